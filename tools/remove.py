"""The command `kvtier rm`: names, everything, or what is damaged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.tiering import maintenance
from kvtier.tiering.maintenance import Removed
from kvtier.tiering.opening import OpenFiles
from kvtier.tools import asking
from kvtier.tools.text_table import counted, human_bytes


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to go: names (of one model, where fingerprint has the first digits of its hex),
    everything, or what is damaged. yes: no question is asked."""

    names: Sequence[str]
    fingerprint: str | None = None
    everything: bool = False
    damaged: bool = False
    yes: bool = False

    def check(self) -> None:
        """Raises ConfigError unless it is one of the three."""
        if bool(self.names) + self.everything + self.damaged != 1:
            raise ConfigError("say what to remove: names, --all, or --damaged; one of them")
        if self.fingerprint is not None and not self.names:
            raise ConfigError("--fingerprint says which model's names are meant: give names")


def remove(directory: Path, wish: Wish) -> Removed:
    """Raises ConfigError (no such name, not confirmed), LockedError, DeviceError."""
    wish.check()
    with maintenance.maintained(directory) as files:
        if wish.everything:
            _confirm(files, directory, wish.yes)
            return maintenance.remove_all(files)
        if wish.damaged:
            return maintenance.remove_damaged(files)
        return maintenance.remove_names(files, wish.names, wish.fingerprint)


def _confirm(files: OpenFiles, directory: Path, yes: bool) -> None:
    if yes:
        return
    inventory = files.inventory
    content = (
        f"{counted(len(inventory.names), 'name')}, {counted(len(inventory.entries), 'segment')}, "
        f"{counted(len(inventory.slabs), 'slab')} of blobs"
    )
    if not asking.is_terminal():
        raise ConfigError(
            f"removing everything ({content}) must be confirmed, and nobody can answer: pass --yes"
        )
    answer = asking.ask(f"Remove everything from {directory}, {content}? Type yes:")
    if answer != "yes":
        raise ConfigError(f"{answer[:200]!r} was typed: nothing was removed")


def removed_text(removed: Removed, wish: Wish) -> str:
    """What went, what of it was held, what was freed."""
    if wish.damaged and not (removed.names or removed.segments or removed.slabs):
        return "nothing is known to be damaged: kvtier scrub finds damage"
    lines = [
        f"removed {name}{', which was held' if name in removed.held else ''}"
        for name in removed.names
    ]
    gone = counted(removed.segments, "segment")
    if removed.slabs:
        gone += f" and {counted(removed.slabs, 'slab')} of blobs"
    lines.append(f"{gone} removed, {human_bytes(removed.freed_bytes)} freed")
    if wish.everything and removed.segments_left:
        lines.append(
            f"{counted(removed.segments_left, 'segment')} left, whose rows in the catalog cannot "
            "be true: kvtier rebuild --force makes it anew"
        )
    return "\n".join(lines)
