"""Worker processes as the benchmark sees them: started, asked, and ended."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TextIO

from bench.peers.worker import Context, Load, Place
from kvtier.errors import KvtierError

ROOT = Path(__file__).resolve().parents[2]
LOG_LINES_SHOWN = 3


class Worker:
    """One process. Ends with its `with` block."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", log: TextIO) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    def start(cls, name: str, python: str, module: Sequence[str], folder: Path) -> Self:
        """Run `python -m module...`, with its log in `folder`. `require_ready` waits for it.

        Raises KvtierError.
        """
        if not Path(python).exists():
            raise KvtierError(f"{name}: there is no {python} (make bench-peers makes it)")
        log = (folder / f"{name.replace('/', ' ')}.log").open("w+", encoding="utf-8")
        process = subprocess.Popen(
            [python, "-m", *module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        return cls(name, process, log)

    def require_ready(self) -> None:
        """Wait until its imports are done. Raises KvtierError."""
        self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One request and its answer. Raises KvtierError."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise KvtierError(f"{self.name} ended: {self._log_end()}")
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise KvtierError(f"{self.name} ended: {self._log_end()}") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            raise KvtierError(f"{self.name} ended: {self._log_end()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            self.stop()
            raise KvtierError(f"{self.name}: {found['error']}")
        return found

    def _log_end(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return " | ".join(lines[-LOG_LINES_SHOWN:])

    # ---- as a contestant --------------------------------------------------------------------

    def store(self, context: Context, place: Place, data: Path) -> None:
        self.ask(
            {"do": "store", "context": asdict(context), "place": asdict(place), "data": str(data)}
        )

    def load(self, *, check: bool = False) -> Load:
        return Load(**self.ask({"do": "load", "check": check}))

    def close(self) -> None:
        self.ask({"do": "close"})

    # ---- the end ----------------------------------------------------------------------------

    def stop(self) -> None:
        """End the process; it has no state that is worth keeping."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()
