"""The kvtier command for tests: run here or as a process, read as JSON, answered, timed."""

import io
import json
import os
import pty
import resource
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from kvtier.tools.cli import main

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "kvtier.tools.cli"]
ANSWER_S_MAX = 0.7
"""Processor time of a command that opens a store: torch alone would take longer."""

Done = subprocess.CompletedProcess[str]


class Typed(io.StringIO):
    """A terminal where somebody typed something already."""

    def isatty(self) -> bool:
        return True


def kvtier(*arguments: str | Path, code: int = 0, stdin: io.StringIO | None = None) -> Done:
    """Run it in this process, where nobody can answer a question unless stdin is Typed."""
    words = ["kvtier", *map(str, arguments)]
    out, err, found = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch("sys.argv", words),
        mock.patch("sys.stdin", stdin or io.StringIO()),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            found = end.code if isinstance(end.code, int) else int(end.code is not None)
    return _checked(Done(words, found, out.getvalue(), err.getvalue()), code)


def as_json(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kvtier(*arguments, "--json", code=code).stdout)
    return found


def refused(*arguments: str | Path) -> str:
    """What it says on stderr when it does not do it."""
    done = kvtier(*arguments, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith("kvtier: ")
    return done.stderr


def answered(answer: str, *arguments: str | Path, code: int = 0) -> Done:
    """Run it where somebody types one line."""
    return kvtier(*arguments, code=code, stdin=Typed(f"{answer}\n"))


def at_a_terminal(answer: str, *arguments: str | Path, code: int = 0) -> Done:
    """Run it as a process, at a terminal where somebody types one line."""
    own, terminal = pty.openpty()
    try:
        os.write(own, f"{answer}\n".encode())
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            cwd=ROOT,
            stdin=terminal,
            capture_output=True,
            text=True,
        )
    finally:
        os.close(own)
        os.close(terminal)
    return _checked(done, code)


def _checked(done: Done, code: int) -> Done:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def processor_s(*arguments: str | Path, runs: int = 3) -> float:
    """Best processor time of several runs, in seconds."""
    best = 60.0
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, *map(str, arguments)], cwd=ROOT, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        best = min(best, used)
    return best


def heavy_modules(*arguments: str | Path) -> str:
    """Which of the modules that take long to load it loaded: "[]" for none."""
    code = (
        "import sys\n"
        "from kvtier.tools.cli import main\n"
        f"sys.argv = {['kvtier', *map(str, arguments)]!r}\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'cupy', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "print('loaded:', sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.rpartition("loaded: ")[2].strip()
