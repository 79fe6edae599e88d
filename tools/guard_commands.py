"""Commands about what a model loses by a budget: guard run."""

from typing import Annotated

import typer

from kvtier.tools.command_parts import EXIT_CODES, EXIT_FOUND, JsonOption, show, stoppable

TOKENS, TOKENS_QUICK = 2048, 1024
SEEDS, SEEDS_QUICK = 2, 1

app = typer.Typer(
    help="Measure what a model loses by a budget.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def common() -> None:
    """Options that belong to no command; without it a group of one command would be none."""


@app.command(epilog=EXIT_CODES)
@stoppable()
def run(
    *,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder, .gguf file or hub id; else the demo's own."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write the profile beside this store.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Or to this file.")] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(metavar="SHARE", help="To try, several times; else 0.0625 to 0.5."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help=f"Length of the contexts; else {TOKENS:,}.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help=f"Contexts a task; else {SEEDS}.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"One context a task, of {TOKENS_QUICK:,} tokens."),
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="As the store's model has: float32, bfloat16, float16."),
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Find the smallest budget at which a model keeps its answers.

    Retrieval, extraction to JSON and text, against full attention; exit code 1 if a task is lost at
    every budget tried. It is written as a profile, good for this model in this dtype alone, which a
    cache obeys with budget="profile".
    """
    from kvtier.tools import guard_run as room

    options = room.options_of(
        model,
        (store, out),
        budget or (),
        tokens if tokens is not None else TOKENS_QUICK if quick else TOKENS,
        seeds if seeds is not None else SEEDS_QUICK if quick else SEEDS,
        dtype,
    )
    found = room.run(options)
    show(found.to_dict(), room.run_text(found), as_json=as_json)
    if found.collapsed:
        raise typer.Exit(EXIT_FOUND)
