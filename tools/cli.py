"""The kvtier command. Each command imports what it needs inside, so that ls answers at once."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtier import __version__
from kvtier.errors import KvtierError
from kvtier.tools import bench_commands, guard_commands, operator_commands
from kvtier.tools.command_parts import (
    EXIT_CODES,
    EXIT_FOUND,
    EXIT_REFUSED,
    JsonOption,
    StoreArgument,
    print_json,
    say,
    show,
    stoppable,
)

STDERR = 2

app = typer.Typer(
    help="Keep the KV cache of language models in memory and on raw NVMe.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

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
RateOption = Annotated[str, typer.Option(metavar="SIZE", help="Bytes read per second.")]
LostRegionOption = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="The region, or each of several, if store.yaml is lost too."),
]
ReplaceOption = Annotated[bool, typer.Option("--force", help="Replace a catalog that can be read.")]
OptionalStore = Annotated[
    str | None, typer.Argument(metavar="STORE", help="Also show what its KV is valid for.")
]


def main() -> None:
    """Run the command line; errors of kvtier become one message and exit code 2."""
    # Where stdout or stderr is closed, a region would be opened under its number, and get what a
    # library prints there.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(fd)
    try:
        app()
    except KvtierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
    """Options that belong to no command."""


@app.command(epilog=EXIT_CODES)
@stoppable()
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
    """Ask about a document, restored from the drive after a restart.

    Three questions. Takes a few minutes on a small CPU. Compares every token with DynamicCache, and
    ends with a table and a chart.
    """
    from kvtier.tools import demo_report
    from kvtier.tools.demo import run
    from kvtier.tools.demo_options import DemoOptions

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
        print_json(result.to_dict())
    else:
        demo_report.show(result, options.chart_path)
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
    show(found.to_dict(), room.render(found, terminal_width()), as_json=as_json)


@app.command("ls", epilog=EXIT_CODES)
def list_store(store: StoreArgument, as_json: JsonOption = False) -> None:
    """List what a store holds: names, fingerprints, segments."""
    from kvtier.tiering.listing import describe
    from kvtier.tools.store_text import listing_text
    from kvtier.tools.text_table import terminal_width, warning

    description = describe(Path(store))
    text = listing_text(description, terminal_width(), warning)
    show(description.to_dict(), text, as_json=as_json)


@app.command(epilog=EXIT_CODES)
@stoppable()
def verify(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Read everything a store holds and check it. Exit code 1 if anything is found."""
    from kvtier.tiering.verifier import verify as check
    from kvtier.tools.store_text import verify_text

    report = check(Path(store))
    show(report.to_dict(), verify_text(report), as_json=as_json)
    if not report.ok:
        raise typer.Exit(EXIT_FOUND)


@app.command(epilog=EXIT_CODES)
@stoppable()
def scrub(store: StoreArgument, rate: RateOption = "100MiB", as_json: JsonOption = False) -> None:
    """Read everything slowly, and put out of use what is damaged. Exit code 1 if anything is."""
    from kvtier.tools import scrub as room

    report = room.scrub(Path(store), rate)
    show(report.to_dict(), room.scrub_text(report), as_json=as_json)
    if not report.ok:
        raise typer.Exit(EXIT_FOUND)


@app.command(epilog=EXIT_CODES)
@stoppable()
def rebuild(
    store: StoreArgument,
    region: LostRegionOption = None,
    force: ReplaceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a lost catalog anew from the region. Exit code 1 if something did not come back."""
    from kvtier.tools import rebuild as room

    report = room.rebuild(Path(store), region or [], force=force)
    show(report.to_dict(), room.rebuild_text(report), as_json=as_json)
    if not report.ok:
        raise typer.Exit(EXIT_FOUND)


@app.command(epilog=EXIT_CODES)
def plan(
    *,
    model: Annotated[
        str,
        typer.Option(metavar="NAME|STORE|PATH", help="A known model, a store, or a config.json."),
    ],
    tokens: Annotated[int, typer.Option(help="Length of the context.")] = 32768,
    device_gbps: Annotated[
        float | None, typer.Option("--device-GBps", help="What the drive reads; else 7.")
    ] = None,
    tflops: Annotated[float, typer.Option(help="What the processor can do.")] = 200.0,
    efficiency: Annotated[float, typer.Option(help="Part of it that a prefill reaches.")] = 0.5,
    link: Annotated[
        str | None,
        typer.Option(metavar="GBps,LATENCY|NAME", help="pcie4, pcie5, nvlink-c2c, cxl; 25,2us."),
    ] = None,
    selected: Annotated[
        float, typer.Option(help="Part of the bytes that crosses the link, if chosen before it.")
    ] = 1.0,
    write_gbps: Annotated[
        float | None, typer.Option("--write-GBps", help="Else half of what is read.")
    ] = None,
    reuses: Annotated[float, typer.Option(help="How often a stored context is loaded.")] = 1.0,
    plot: Annotated[str | None, typer.Option(metavar="PATH", help="Draw a chart.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether to load a context or to compute it again.

    The hardware need not be here. Of a store, what loading and computing took on this machine is
    used instead of --tflops.
    """
    from kvtier.tools import plan as room
    from kvtier.tools.text_table import terminal_width

    hardware = room.Hardware(device_gbps, tflops, efficiency, *room.parse_link(link), selected)
    found = room.forecast(model, tokens, hardware, write_gbps=write_gbps, reuses=reuses)
    show(found.to_dict(), room.forecast_text(found, terminal_width()), as_json=as_json)
    if plot is not None:
        from kvtier.tools import plan_chart

        plan_chart.draw(found, Path(plot))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


app.add_typer(operator_commands.app)
app.add_typer(bench_commands.app, name="bench")
app.add_typer(guard_commands.app, name="guard")


if __name__ == "__main__":
    main()
