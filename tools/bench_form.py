"""The form that all benchmarks have: options, tables, bars, JSON, a chart and an exit code.

A bar is a figure that the project promises, an aim one that it would like. `finish` says which
bars fall short, and nothing is a bar that was not measured: what could not be is named as missing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.tools.text_table import table

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure against what is promised (bar) and what is wished for (aim).

    value: None where it could not be measured; `why` then says what was in the way.
    """

    name: str
    value: float | None
    bar: float
    aim: float
    unit: str
    higher_is_better: bool
    optional: bool = False
    why: str = ""

    def reaches(self, target: float) -> bool:
        """Whether the figure is at least as good as `target`."""
        if self.value is None:
            return self.optional
        return self.value >= target if self.higher_is_better else self.value <= target

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.reaches(self.aim):
            return "aim"
        return "bar" if self.reaches(self.bar) else "SHORT"

    @property
    def share(self) -> float:
        """How much of the bar is reached; 1 is all of it."""
        if not self.value:
            return 0.0
        return self.value / self.bar if self.higher_is_better else self.bar / self.value


class Bench:
    """One run of one benchmark."""

    def __init__(self, name: str, description: str | None) -> None:
        """name: of the script. description: its docstring."""
        self.name = name
        self.bars: list[Bar] = []
        self.draw: Callable[[Path], None] | None = None
        """Draws what `--plot` asks for; None: the bars."""
        self.parser = argparse.ArgumentParser(
            prog=f"bench/{name}.py",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures")
        self.parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a chart")
        self.parser.add_argument("--quick", action="store_true", help="an answer in a minute")
        self._options: argparse.Namespace | None = None
        self._samples: dict[str, Any] = {}
        self._tables: dict[str, Any] = {}
        self._notes: list[str] = []

    def options(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The options given; those of the process unless `arguments` are passed."""
        self._options = self.parser.parse_args(arguments)
        return self._options

    # ---- figures ----------------------------------------------------------------------------

    def bar(
        self,
        name: str,
        value: float,
        *,
        bar: float,
        aim: float,
        unit: str,
        higher_is_better: bool = True,
    ) -> None:
        """A figure that was measured in this run."""
        self.bars.append(Bar(name, float(value), bar, aim, unit, higher_is_better))

    def missing(self, name: str, why: str, *, optional: bool = False) -> None:
        """A bar that could not be measured here. Unless optional it counts as short."""
        self.bars.append(Bar(name, None, 0.0, 0.0, "", True, optional, why))

    def samples(self, name: str, values: Sequence[float], *, unit: str) -> None:
        """What a bar was computed from."""
        self._samples[name] = {"unit": unit, "values": [float(each) for each in values]}

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table, and keep it for the JSON."""
        self._tables[title] = {"heads": list(heads), "rows": [[*map(str, row)] for row in rows]}
        print(f"\n{title}\n{table(heads, rows)}", flush=True)

    def note(self, text: str) -> None:
        """Print a sentence that belongs to the figures, and keep it for the JSON."""
        self._notes.append(text)
        print(text, flush=True)

    # ---- the end ----------------------------------------------------------------------------

    def finish(self) -> int:
        """Print the bars and write what the options ask for; 1 when a bar falls short."""
        options = self._options or self.options()
        if self.bars:
            self._print_bars()
        if options.json is not None:
            options.json.write_text(json.dumps(self.report(), indent=1) + "\n")
        if options.plot is not None:
            (self.draw or self._draw_bars)(options.plot)
        return int(any(not each.reaches(each.bar) for each in self.bars))

    def report(self) -> dict[str, Any]:
        """All figures of this run, as they go into the JSON."""
        return {
            "name": self.name,
            "commit": commit(),
            "quick": bool(self._options and self._options.quick),
            "machine": machine(),
            "bars": [asdict(each) for each in self.bars],
            "samples": self._samples,
            "tables": self._tables,
            "notes": self._notes,
        }

    def _print_bars(self) -> None:
        rows = []
        for each in self.bars:
            sign = "" if each.higher_is_better else "at most "
            value = each.why if each.value is None else f"{each.value:.3g} {each.unit}"
            wanted = ("", "") if each.value is None else (f"{sign}{each.bar:g}", f"{each.aim:g}")
            rows.append([each.name, *wanted, each.verdict, value])
        print(f"\n{table(['bar', 'bar', 'aim', 'reached', 'value'], rows)}", flush=True)

    def _draw_bars(self, path: Path) -> None:
        from matplotlib.figure import Figure

        shown = [each for each in self.bars if each.value is not None]
        figure = Figure(figsize=(9, 1.2 + 0.45 * len(shown)), dpi=150, facecolor="white")
        axes = figure.add_subplot()
        colours = ["#1f6feb" if each.reaches(each.bar) else "#cf222e" for each in shown]
        bars = axes.barh([each.name for each in shown], [each.share for each in shown])
        for patch, colour, each in zip(bars, colours, shown, strict=True):
            patch.set_color(colour)
            axes.annotate(f" {each.value:.3g} {each.unit}", (each.share, each.name), va="center")
        axes.axvline(1, color="#616e7c", linewidth=1)
        axes.invert_yaxis()
        axes.set_xlabel("share of the bar (1: reached)")
        axes.set_title(f"{self.name}, commit {commit()[:12]}")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.margins(x=0.2)
        figure.savefig(path, bbox_inches="tight")


def commit() -> str:
    """The commit that this checkout is at, with "+" where files differ from it; "unknown" outside
    of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", os.fspath(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_bytes": pages,
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "load": os.getloadavg()[0],
    }
