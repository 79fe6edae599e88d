"""The demo's closing table, for people."""

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtier.tools.demo import DemoResult
from kvtier.tools.text_table import human_bytes


def show(result: DemoResult, chart: Path) -> None:
    """Print the answers, the figures and what they include to stdout."""
    console = Console(highlight=False)
    for number, question in enumerate(result.questions, start=1):
        console.print(f"{number}. {question.question}", style="bold", markup=False)
        console.print(f"   {' '.join(question.answer.split())}", markup=False)
    console.print()
    grid = Table(title=f"kvtier demo: {result.model}", title_justify="left", show_header=False)
    grid.add_column()
    grid.add_column(justify="right")
    for name, value in _rows(result):
        grid.add_row(name, value)
    console.print(grid)
    console.print(_notes(result), style="dim", markup=False, soft_wrap=True)
    console.print(f"chart: {os.fspath(chart)}", markup=False, soft_wrap=True)


def _rows(result: DemoResult) -> list[tuple[str, str]]:
    direct = "direct I/O" if result.direct_io else f"buffered ({result.direct_io_reason})"
    limit = human_bytes(result.hot_limit_bytes)
    return [
        ("prompt", f"{result.prompt_tokens:,} tokens"),
        ("prefill, from nothing", f"{result.prefill_s:.2f} s"),
        ("restore, new process", f"{result.restore_s:.2f} s"),
        ("ratio", f"{result.speedup:.1f}x"),
        ("identical to DynamicCache", "yes" if result.identical else "NO"),
        ("bytes on the device", _both(result.device_bytes)),
        ("of which KV of the prompt", _both(result.kv_bytes)),
        ("bytes in the page cache", _page_cache(result)),
        ("hot memory, maximum", f"{human_bytes(result.hot_bytes_max)} of {limit}"),
        ("engine", f"{result.engine}, {direct}"),
    ]


def _page_cache(result: DemoResult) -> str:
    held = _both(result.page_cache_bytes)
    return f"NOT 0: {held}" if result.page_cache_used else held


def _both(nbytes: int) -> str:
    return f"{nbytes:,} B" if nbytes < 1024 else f"{nbytes:,} B ({human_bytes(nbytes)})"


def _notes(result: DemoResult) -> str:
    question = result.questions[1]
    return (
        "Both times run until the first new token is there. prefill: the whole prompt of question "
        f"1. restore: {question.restored_tokens:,} tokens read from the drive and the other "
        f"{question.prompt_tokens - question.restored_tokens} of question 2 computed, in a new "
        "process. Loading the model, warming it up and opening the store are in neither. "
        f"Document: {result.document}. CPU threads: {result.threads}."
    )
