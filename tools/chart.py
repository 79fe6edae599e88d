"""Draws the demo's one chart: seconds to the first token, computed against restored."""

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from kvtier.tools.text_table import human_bytes

if TYPE_CHECKING:
    from kvtier.tools.demo import DemoResult

GREY, BLUE, INK, FAINT = "#9aa5b1", "#1f6feb", "#1f2933", "#616e7c"


def draw(result: "DemoResult", path: Path) -> None:
    """Write the chart as a PNG of 1600 x 900 pixels."""
    figure = Figure(figsize=(8, 4.5), dpi=200, facecolor="white")
    axes = figure.add_axes((0.215, 0.20, 0.70, 0.50))
    labels = ["computed\n(prefill)", "restored\nfrom the drive"]
    seconds = [result.prefill_s, result.restore_s]
    bars = axes.barh(labels, seconds, color=[GREY, BLUE], height=0.62)
    axes.bar_label(
        bars,
        labels=[f"{s:.2f} s" for s in seconds],
        padding=6,
        fontsize=13,
        color=INK,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axes.invert_yaxis()
    axes.set_xlim(0, max(seconds) * 1.16)
    axes.set_xlabel("seconds until the first new token", fontsize=10, color=FAINT)
    axes.tick_params(axis="y", length=0, labelsize=12, labelcolor=INK)
    axes.tick_params(axis="x", length=0, labelsize=9, labelcolor=FAINT)
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.axvline(0, color=FAINT, linewidth=1)
    same = "the same tokens" if result.identical else "DIFFERENT TOKENS"
    title = f"A stored context answers {result.speedup:.0f}x sooner, with {same}"
    figure.text(0.04, 0.91, title, fontsize=15, weight="bold", color=INK)
    figure.text(0.04, 0.80, _subtitle(result), fontsize=9.5, color=FAINT, linespacing=1.5)
    figure.text(0.04, 0.03, _footnote(result), fontsize=7.5, color=FAINT, linespacing=1.5)
    figure.savefig(path, format="png")


def _subtitle(result: "DemoResult") -> str:
    direct = "direct I/O" if result.direct_io else "buffered I/O"
    threads = "1 thread" if result.threads == 1 else f"{result.threads} threads"
    prompt = f"prompt of {result.prompt_tokens:,} tokens"
    return (
        f"{result.model}, float32 on the CPU ({threads}); {prompt}\n"
        f"{human_bytes(result.device_bytes)} on the drive by {result.engine}, {direct}; "
        f"{human_bytes(result.page_cache_bytes)} of it in the page cache"
    )


def _footnote(result: "DemoResult") -> str:
    question = result.questions[1]
    own = question.prompt_tokens - question.restored_tokens
    return (
        f"Restored in a new process: {question.restored_tokens:,} tokens read from the drive, "
        f"{own} of the question computed. Greedy tokens of {len(result.questions)} questions\n"
        "compared with DynamicCache. Loading the model and opening the store are in neither bar."
    )
