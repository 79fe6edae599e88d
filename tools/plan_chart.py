"""Draws what `kvtier plan` found: seconds of each way over the length of the context."""

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from kvtier.errors import ConfigError
from kvtier.tools.chart import BLUE, FAINT, GREY, INK

if TYPE_CHECKING:
    from kvtier.tools.plan import Forecast

GREEN = "#2f9e44"


def draw(found: "Forecast", path: Path) -> None:
    """Write the chart; the ending of the path says as what. Raises ConfigError."""
    figure = Figure(figsize=(8, 4.5), dpi=200, facecolor="white")
    axes = figure.add_axes((0.10, 0.14, 0.86, 0.66))
    tokens = [row.tokens for row in found.rows]
    for label, values, colour in (
        ("recompute", [row.recompute_s for row in found.rows], GREY),
        ("load", [row.load_s for row in found.rows], BLUE),
        ("both at once", [row.both_s for row in found.rows], GREEN),
    ):
        axes.plot(tokens, values, color=colour, linewidth=2, marker="o", markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the context", fontsize=10, color=FAINT)
    axes.set_ylabel("seconds until it is ready", fontsize=10, color=FAINT)
    for at, words in (
        (found.recompute_below_tokens, "load from here"),
        (found.store_from_tokens, "store from here"),
    ):
        if at is not None and tokens[0] <= at <= tokens[-1]:
            axes.axvline(at, color=FAINT, linewidth=1, linestyle=":")
            axes.text(at, axes.get_ylim()[1], f" {words}", fontsize=8, color=FAINT, va="top")
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.legend(frameon=False, fontsize=10)
    figure.text(0.04, 0.91, found.model, fontsize=15, weight="bold", color=INK)
    figure.text(0.04, 0.85, found.source, fontsize=9.5, color=FAINT)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw {path}: {error}") from error
