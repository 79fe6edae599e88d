"""Plain tables, counts and sizes in words for the commands that must answer at once (no rich)."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

GAP = "  "
LAST_COLUMN_WIDTH_MIN = 16
"""A narrower last column would be a tower of words: then the line may be too long instead."""


def terminal_width() -> int | None:
    """Columns of the terminal behind stdout; None where stdout is none, and nothing is wrapped."""
    return shutil.get_terminal_size().columns if at_terminal() else None


def at_terminal() -> bool:
    """Whether stdout is a terminal; a process may also be started without any stdout."""
    # The type says that there always is one.
    out: TextIO | None = sys.stdout
    return out is not None and out.isatty()


def warning(text: str) -> str:
    """`text` in red where stdout is a terminal that may show colours."""
    if not at_terminal() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[31m{text}\x1b[0m"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[object]], line_width: int | None = None
) -> str:
    """Columns as wide as their widest cell; numbers stand to the right.

    line_width: characters of a line; the last column is wrapped to keep to it.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(len(head), *(len(row[i]) for row in cells)) if cells else len(head)
        for i, head in enumerate(heads)
    ]
    right = [bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(heads))]
    if line_width is not None:
        room = line_width - sum(widths[:-1]) - len(GAP) * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(room, LAST_COLUMN_WIDTH_MIN))
    lines = [piece for line in ([*heads], *cells) for piece in _wrapped(line, widths[-1])]
    return "\n".join(
        GAP.join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _wrapped(line: list[str], width: int) -> list[list[str]]:
    """The line as several, its last cell in pieces of at most `width` characters."""
    pieces = (
        [line[-1]]
        if len(line[-1]) <= width
        else textwrap.wrap(line[-1], width, break_on_hyphens=False)
    )
    blank = [""] * (len(line) - 1)
    return [[*(line[:-1] if i == 0 else blank), piece] for i, piece in enumerate(pieces)]


def counted(number: int, noun: str) -> str:
    """A count in words: 1 segment, 2 segments."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human_bytes(nbytes: int) -> str:
    """1536 -> "1.5 KiB"; whole bytes below 1 KiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
