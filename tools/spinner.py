"""The live form of the stages: finished ones with their seconds, the current one spinning."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column


class Spinner:
    """One row per stage; a percentage changes the row that is there."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.row: TaskID | None = None
        self.words = ""

    def say(self, words: str) -> None:
        if self.row is not None and "%" in words and words.split(":")[0] in self.words:
            self.progress.update(self.row, description=words)
        else:
            self.finish()
            self.row = self.progress.add_task(words, total=1)
        self.words = words

    def finish(self) -> None:
        if self.row is not None:
            self.progress.update(self.row, completed=1)


@contextmanager
def spinner(title: str) -> Iterator[Spinner]:
    """Show stages on the terminal behind stderr until the end of the block."""
    console = Console(stderr=True)
    console.print(title, highlight=False)
    # The words take the width that is left, last: on a narrow terminal they are cut, not the time.
    words = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False, table_column=words),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        live = Spinner(progress)
        yield live
        live.finish()
