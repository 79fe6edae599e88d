"""Shows what is being done now, on stderr: a spinner on a terminal, plain lines elsewhere."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Stages(Protocol):
    """Takes one line of words about what is being done now."""

    def say(self, words: str) -> None: ...


class PlainStages:
    """One line per stage with the seconds since the start; percentages do not make new lines."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.last = ""

    def say(self, words: str) -> None:
        stem = re.sub(r"\d+ %", "", words)
        if stem != self.last:
            print(f"[{time.monotonic() - self.start:6.1f} s] {words}", file=sys.stderr, flush=True)
        self.last = stem


@contextmanager
def stages(title: str) -> Iterator[Stages]:
    """Show stages until the end of the block."""
    if not sys.stderr.isatty():
        plain = PlainStages()
        plain.say(title)
        yield plain
        return
    from kvtier.tools.spinner import spinner

    with spinner(title) as live:
        yield live
