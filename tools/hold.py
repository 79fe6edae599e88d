"""The commands `kvtier hold` and `kvtier unhold`: keep names from eviction, for a time or not."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.tiering import maintenance
from kvtier.tiering.holds import FOREVER
from kvtier.tiering.listing import utc_text
from kvtier.tools.text_table import human_bytes

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True)
class Held:
    """A hold that was set. held_until: ISO 8601 in UTC; None: until `unhold`. held_bytes: of all
    holds together, of limit_bytes."""

    name: str
    held_until: str | None
    held_bytes: int
    limit_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_seconds(text: str) -> float:
    """Seconds of "90s", "15m", "12h", "7d" or "2w". Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([smhdw])", text.strip().lower(), re.ASCII)
    if match is None:
        raise ConfigError(
            f"a time is a number and one of s, m, h, d, w, such as 90s, 12h or 7d: got {text!r}"
        )
    return float(match[1]) * SECONDS[match[2]]


def hold(
    directory: Path, name: str, time_text: str | None, *, limit: str | None, fingerprint: str | None
) -> Held:
    """Keep what a name stands for. time_text: for how long; None: until `unhold`. limit: a size,
    None for half of the region.

    Raises ConfigError, CapacityError past the limit, LockedError, DeviceError.
    """
    seconds = None if time_text is None else parse_seconds(time_text)
    with maintenance.maintained(directory) as files:
        holds = maintenance.holds_of(files, limit)
        key = maintenance.find_name(files, name, fingerprint)
        holds.hold(key, seconds)
        until = files.inventory.names[key].held_until
        end = None if until >= FOREVER else utc_text(until)
        return Held(name, end, holds.held_bytes, holds.limit_bytes)


def unhold(directory: Path, name: str | None, *, every: bool, fingerprint: str | None) -> list[str]:
    """End the hold of a name, or of all; returns the names. Raises ConfigError, LockedError."""
    if (name is None) == (not every):
        raise ConfigError("say what to let go: one name, or --all")
    if every and fingerprint is not None:
        raise ConfigError("--fingerprint says which model's name is meant: give a name")
    with maintenance.maintained(directory) as files:
        holds = maintenance.holds_of(files, None)
        if name is None:
            return holds.unhold_all()
        holds.unhold(maintenance.find_name(files, name, fingerprint))
        return [name]


def held_text(held: Held) -> str:
    until = "until kvtier unhold" if held.held_until is None else f"until {held.held_until}"
    return (
        f"{held.name} is held {until}; holds keep {human_bytes(held.held_bytes)} of "
        f"{human_bytes(held.limit_bytes)}"
    )


def unheld_text(names: list[str]) -> str:
    return "\n".join(f"{name} is not held any more" for name in names) or "nothing was held"
