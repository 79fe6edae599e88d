"""What every file of commands needs: exit codes, options, a way to stop, JSON."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

EXIT_FOUND = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 130
EXIT_CODES = (
    "Exit codes: 0 all well; 1 verify or scrub found something, rebuild left something out, or the "
    "demo broke a promise; "
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
    print(json.dumps(content, indent=2, default=os.fspath))


def show(content: dict[str, Any], text: str, *, as_json: bool) -> None:
    """What a command found or did, for programs or for people."""
    if as_json:
        print_json(content)
    else:
        print(text)
