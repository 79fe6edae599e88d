"""Commands that measure this machine: bench device. They only read."""

from typing import Annotated

import typer

from kvtier.tools.command_parts import EXIT_CODES, JsonOption, show, stoppable

app = typer.Typer(
    help="Measure this machine.", epilog=EXIT_CODES, no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def common() -> None:
    """Options that belong to no command; without it a group of one command would be none."""


@app.command(epilog=EXIT_CODES)
@stoppable()
def device(
    target: Annotated[
        str, typer.Argument(metavar="PATH|STORE", help="Device, file, or store's directory.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Some seconds for each drive.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say how fast a drive is read, by each engine, and which is used.

    Nothing is written. A file with holes is refused: they are read from nowhere.
    """
    from kvtier.tools import bench_device as room
    from kvtier.tools.text_table import terminal_width

    found = room.measure(target, quick=quick)
    show(found.to_dict(), room.measured_text(found, terminal_width()), as_json=as_json)
