"""What every file of commands needs: exit codes, options, a way to stop, JSON."""

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, TextIO

import typer

from kvtier.errors import DeviceError
from kvtier.tools.system_errors import typed

EXIT_FOUND = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 130
EXIT_CODES = (
    "Exit codes: 0 all well; 1 verify or scrub found something, rebuild left something out, the "
    "demo broke a promise, or guard run saw a task collapse; "
    "2 the request could not be carried out (bad arguments, not a store, device refused, not "
    "confirmed); "
    "130 stopped from the keyboard."
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
# Paths are taken as str: checking a Path makes typer build much slower.
StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="The store's directory.")]


@contextmanager
def stoppable() -> Iterator[None]:
    """An interrupt from the keyboard is one word and its own exit code, not typer's."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise typer.Exit(EXIT_STOPPED) from None


def print_json(content: dict[str, Any]) -> None:
    """One JSON object on stdout; paths as text."""
    # JSON has no infinity: whoever parses the output would stop at it.
    say(json.dumps(content, indent=2, default=os.fspath, allow_nan=False))


def show(content: dict[str, Any], text: str, *, as_json: bool) -> None:
    """What a command found or did, for programs or for people."""
    if as_json:
        print_json(content)
    else:
        say(text)


def say(text: str) -> None:
    """Print on stdout now. Raises DeviceError where that fails, as on a full disk; where there is
    no stdout nobody wants to know."""
    out: TextIO | None = sys.stdout
    if out is None:
        return
    try:
        with typed("write to stdout"):
            print(text, file=out, flush=True)
    except DeviceError as error:
        # The interpreter flushes once more when it ends, and would complain in its own words.
        with suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), out.fileno())
        if error.errno == errno.EPIPE:
            # Who reads has enough, as `head` does.
            raise typer.Exit(EXIT_FOUND) from None
        raise
