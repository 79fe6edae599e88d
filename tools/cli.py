"""The kvtier command. Each command imports what it needs inside, so that ls answers at once."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier import __version__
from kvtier.errors import KvtierError

EXIT_FOUND = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 130
EXIT_CODES = (
    "Exit codes: 0 all well; 1 verify found something, or the demo broke a promise; "
    "2 the request could not be carried out (bad arguments, not a store, device refused); "
    "130 stopped from the keyboard."
)

app = typer.Typer(
    help="Keep the KV cache of language models in memory and on raw NVMe.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
# Paths are taken as str: checking a Path makes typer build much slower.
StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="The store's directory.")]
ModelOption = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Folder, .gguf file or hub id; else the demo's own model."),
]
DocumentOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="UTF-8; the first 2,000 tokens are used.")
]
DemoStoreOption = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Empty or new directory; else demo-out/store, made anew."),
]
RegionOption = Annotated[
    str, typer.Option(metavar="SIZE|DEVICE", help="Size of a file, or a block device.")
]
HotOption = Annotated[str, typer.Option(metavar="SIZE", help="Memory limit of the hot tier.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Format a device that has data.")]
OutputOption = Annotated[
    str | None, typer.Option(metavar="PNG", help="The chart; else demo-out/demo.png.")
]
DeviceOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="Block device to try direct I/O on.")
]
OptionalStore = Annotated[
    str | None, typer.Argument(metavar="STORE", help="Also show what its KV is valid for.")
]


def main() -> None:
    """Run the command line; errors of kvtier become one message and exit code 2."""
    try:
        app()
    except KvtierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
    """Options that belong to no command."""


@contextmanager
def _stoppable() -> Iterator[None]:
    """An interrupt from the keyboard is one word and its own exit code, not typer's."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise typer.Exit(EXIT_STOPPED) from None


@app.command(epilog=EXIT_CODES)
@_stoppable()
def demo(
    *,
    model: ModelOption = None,
    document: DocumentOption = None,
    store: DemoStoreOption = None,
    region: RegionOption = "1GiB",
    hot: HotOption = "256MiB",
    force: ForceOption = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer three questions about a document, restored from the drive after a restart.

    Takes a few minutes on a small CPU. Compares every token with DynamicCache, and ends with
    a table and a chart.
    """
    from kvtier.tools.demo import run
    from kvtier.tools.demo_options import DemoOptions
    from kvtier.tools.demo_report import show

    options = DemoOptions(
        model=model,
        document=_path(document),
        store=_path(store),
        region=region,
        hot=hot,
        force=force,
        chart=_path(output),
    )
    result = run(options)
    if as_json:
        _print_json(result.to_dict())
    else:
        show(result, options.chart_path)
    broken = result.broken_promises()
    for line in broken:
        print(f"kvtier: not as promised: {line}", file=sys.stderr)
    if broken:
        raise typer.Exit(EXIT_FOUND)


@app.command(epilog=EXIT_CODES)
def doctor(
    store: OptionalStore = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what this machine can do, what is used, and why."""
    from kvtier.tools import doctor as room
    from kvtier.tools.text_table import terminal_width

    found = room.diagnose(_path(store), device)
    if as_json:
        _print_json(found.to_dict())
    else:
        print(room.render(found, terminal_width()))


@app.command("ls", epilog=EXIT_CODES)
def list_store(store: StoreArgument, as_json: JsonOption = False) -> None:
    """List what a store holds: names, fingerprints, segments."""
    from kvtier.tiering.listing import describe
    from kvtier.tools.store_text import listing_text
    from kvtier.tools.text_table import terminal_width, warning

    description = describe(Path(store))
    if as_json:
        _print_json(description.to_dict())
    else:
        print(listing_text(description, terminal_width(), warning))


@app.command(epilog=EXIT_CODES)
@_stoppable()
def verify(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Read everything a store holds and check it; exit code 1 if anything is found."""
    from kvtier.tiering.verifier import verify as check
    from kvtier.tools.store_text import report_text

    report = check(Path(store))
    if as_json:
        _print_json(report.to_dict())
    else:
        print(report_text(report))
    if not report.ok:
        raise typer.Exit(EXIT_FOUND)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2, default=os.fspath))


if __name__ == "__main__":
    main()
