"""Commands for who looks after a store: format, devices, stat, rm, hold, unhold, export, import.

Each one parses its arguments here and does its work in a file of its own, imported when needed.
"""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.tools.command_parts import (
    EXIT_CODES,
    JsonOption,
    StoreArgument,
    say,
    show,
    stoppable,
)

app = typer.Typer()

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As kvtier ls shows it.")]
FingerprintOption = Annotated[
    str | None,
    typer.Option(metavar="HEX", help="First digits of the model's, where several have the name."),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask; for scripts.")]


@app.command("format", epilog=EXIT_CODES)
@stoppable()
def format_store(
    store: StoreArgument,
    devices: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DEVICE]...",
            help="Drives or files that it is spread over; or a region by --region.",
        ),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|PATH", help="Size of a new file in STORE, a device, or a file; else 4GiB."
        ),
    ] = None,
    yes: YesOption = False,
    force: Annotated[
        bool, typer.Option("--force", help="Lose what it carries; still asks, or --yes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a store. On a device it shows what would be lost, and has its path typed.

    A device that is mounted or in use is refused, forced or not.
    """
    from kvtier.tools import format_store as room

    made = room.format_store(Path(store), room.chosen(devices or [], region), force=force, yes=yes)
    named = devices or ([region] if region and made.carried else [])
    show(made.to_dict(), room.formatted_text(made, named), as_json=as_json)


@app.command(epilog=EXIT_CODES)
def devices(as_json: JsonOption = False) -> None:
    """List block devices, what they carry, and which store they are of."""
    from kvtier.tools import devices as room
    from kvtier.tools.text_table import terminal_width

    found = room.find()
    show(room.to_dict(found), room.devices_text(found, terminal_width()), as_json=as_json)


@app.command(epilog=EXIT_CODES)
@stoppable()
def stat(
    store: StoreArgument,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again every second, until it is stopped.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a store's numbers, live where a process has it open.

    Write amplification among them: bytes that reached the drive over bytes of KV stored.
    """
    from kvtier.tools import store_stat as room

    if not watch:
        state = room.stat(Path(store))
        show(state.to_dict(), room.stat_text(state), as_json=as_json)
        return
    for state in room.watch(Path(store)):
        if as_json:
            say(room.json_line(state))
        else:
            room.clear_screen()
            say(room.stat_text(state))


@app.command("rm", epilog=EXIT_CODES)
@stoppable()
def remove(
    *,
    store: StoreArgument,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="As kvtier ls shows them.")
    ] = None,
    fingerprint: FingerprintOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything; asks first.")] = False,
    damaged: Annotated[
        bool,
        typer.Option(
            "--damaged", help="What scrub or use found damaged, and all that continues it."
        ),
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove names, and the segments that nobody else needs, for good."""
    from kvtier.tools import remove as room

    wish = room.Wish(names or [], fingerprint, everything, damaged, yes)
    removed = room.remove(Path(store), wish)
    show(removed.to_dict(), room.removed_text(removed, wish), as_json=as_json)


@app.command(epilog=EXIT_CODES)
@stoppable()
def hold(
    *,
    store: StoreArgument,
    name: NameArgument,
    time: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="90s, 15m, 12h, 7d, 2w; else until unhold."),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What all holds may keep; else half of the region."),
    ] = None,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a name's segments from eviction. What is held already counts towards the limit."""
    from kvtier.tools import hold as room

    held = room.hold(Path(store), name, time, limit=limit, fingerprint=fingerprint)
    show(held.to_dict(), room.held_text(held), as_json=as_json)


@app.command(epilog=EXIT_CODES)
@stoppable()
def unhold(
    store: StoreArgument,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="As kvtier ls shows it.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every name of every model.")] = False,
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """End the hold of a name, or of all."""
    from kvtier.tools import hold as room

    names = room.unhold(Path(store), name, every=every, fingerprint=fingerprint)
    show({"unheld": names}, room.unheld_text(names), as_json=as_json)


@app.command(epilog=EXIT_CODES)
@stoppable()
def export(
    store: StoreArgument,
    name: NameArgument,
    file: Annotated[str, typer.Argument(metavar="FILE", help="New, or an export to be replaced.")],
    fingerprint: FingerprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write what was saved under a name to one safetensors file. You alone may read it."""
    from kvtier.tools import exchange as room

    done = room.export(Path(store), name, Path(file), fingerprint)
    show(done.to_dict(), room.exported_text(done), as_json=as_json)


@app.command("import", epilog=EXIT_CODES)
@stoppable()
def import_file(
    store: StoreArgument,
    file: Annotated[str, typer.Argument(metavar="FILE", help="From kvtier export.")],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Else the file's own.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Store an exported prefix, for the model that it was exported for."""
    from kvtier.tools import exchange as room

    done = room.import_(Path(store), Path(file), name)
    show(done.to_dict(), room.imported_text(done), as_json=as_json)
