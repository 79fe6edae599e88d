"""The live form of the stages: finished ones with their seconds, the current one spinning."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


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
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        live = Spinner(progress)
        yield live
        live.finish()
