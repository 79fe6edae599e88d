"""What the commands show on narrow terminals, and that nothing is wrapped where there is none."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.tools import spinner as spinner_room
from kvtier.tools.text_table import LAST_COLUMN_WIDTH_MIN, table, warning

ROOT = Path(__file__).parent.parent
WORDS = "checking against DynamicCache: computing the document of 2,000 tokens, question 3 of 3"


def on_a_terminal(columns: int, *arguments: str) -> list[str]:
    """The lines that the command prints on a terminal of that width."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    with subprocess.Popen(
        [sys.executable, "-m", "kvtier", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=follower,
        stdout=follower,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(follower)
        output = b""
        while chunk := _read(leader):
            output += chunk
    os.close(leader)
    assert process.returncode == 0
    return output.decode().splitlines()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:
        # EIO: no process has the terminal's other end any more.
        return b""


@pytest.mark.parametrize("columns", [60, 72, 100])
def test_doctor_wraps_its_tables_to_the_terminal(columns: int) -> None:
    lines = on_a_terminal(columns, "doctor")
    tables = lines[lines.index("") + 1 :]
    assert any(line.startswith("O_DIRECT") for line in tables)
    assert max(map(len, tables)) <= columns
    piped = subprocess.run(
        [sys.executable, "-m", "kvtier", "doctor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # No word is lost, and without a terminal each row is one line for grep.
    assert " ".join(piped.split()) == " ".join(" ".join(lines).split())
    assert max(map(len, piped.splitlines())) > columns


def test_last_column_is_wrapped_under_itself() -> None:
    rows = [("a", 5, "one two three four five six"), ("bc", 10, "short")]
    assert table(("x", "n", "why"), rows, 24) == (
        "x    n  why\na    5  one two three\n        four five six\nbc  10  short"
    )
    assert table(("x", "n", "why"), rows, 200) == table(("x", "n", "why"), rows)


def test_last_column_keeps_a_width_that_can_be_read() -> None:
    lines = table(("x", "why"), [("a" * 50, "word " * 20)], 40).splitlines()
    assert max(map(len, lines)) <= 50 + 2 + LAST_COLUMN_WIDTH_MIN
    assert table(("x", "why"), [("a", "")], 40) == "x  why\na"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_warning_is_red_on_a_terminal_that_may_show_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert warning("gone") == "\x1b[31mgone\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert warning("gone") == "gone"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert warning("gone") == "gone"


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_spinner_cuts_the_words_and_not_the_time(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()

    def console(*, stderr: bool) -> Console:
        assert stderr
        return Console(file=out, force_terminal=True, width=columns, color_system=None)

    monkeypatch.setattr(spinner_room, "Console", console)
    with spinner_room.spinner("model: made-up") as live:
        live.say("loading")
        live.say(WORDS)
    last = [line for line in out.getvalue().splitlines() if "checking" in line][-1]
    assert "0:00:00 checking" in last
    assert (WORDS in last) == (columns > len(WORDS) + 12)
    assert ("…" in last) == (columns <= len(WORDS) + 12)
