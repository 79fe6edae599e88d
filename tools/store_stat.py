"""The command `kvtier stat`: what a store holds, and the live numbers of who has it open."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.tiering.listing import StoreDescription, describe
from kvtier.tiering.region_state import MISSING
from kvtier.tiering.stats_file import LiveNumbers, read_stats
from kvtier.tools.text_table import at_terminal, human_bytes, table

WATCH_EVERY_S = 1.0
_CLEAR = "\x1b[H\x1b[2J"
_SIZES = ("_bytes", "bytes_")


@dataclass(frozen=True, slots=True)
class StoreState:
    """catalog: what is stored. live: numbers of the process that has the store open, or had; a text
    says why there are none."""

    catalog: StoreDescription
    live: LiveNumbers | str

    def to_dict(self) -> dict[str, Any]:
        """One object: counts of what is stored, then the process and its numbers."""
        store, live = self.catalog, self.live
        found: dict[str, Any] = {
            "uuid": store.uuid,
            "catalog": {
                "segments": len(store.segments),
                "segments_quarantined": sum(each.quarantined for each in store.segments),
                "segment_bytes": sum(each.bytes for each in store.segments),
                "tokens": sum(each.tokens for each in store.segments),
                "names": len(store.names),
                "names_held": sum(each.held for each in store.names),
                "fingerprints": len(store.fingerprints),
                "blobs": store.blobs.count,
                "blob_bytes": store.blobs.bytes,
                "slabs": store.blobs.slabs,
                "region_bytes": store.region_bytes,
                "used_bytes": store.used_bytes,
                "free_bytes": store.free_bytes,
                "missing_regions": [e.path for e in store.regions if e.state == MISSING],
            },
        }
        if isinstance(live, str):
            return {**found, "process": None, "why_not": live, "live": None}
        process = {"state": live.state, "pid": live.pid, "host": live.host, "age_s": live.age_s}
        return {**found, "process": process, "live": live.stats}


def stat(directory: Path) -> StoreState:
    """Raises ConfigError where there is no store, FormatError, DeviceError."""
    description = describe(directory)
    return StoreState(description, read_stats(directory, description.uuid))


def watch(directory: Path) -> Iterator[StoreState]:
    """The state again and again, until the caller has enough."""
    while True:
        yield stat(directory)
        time.sleep(WATCH_EVERY_S)


def stat_text(state: StoreState) -> str:
    """What is stored, whose numbers follow and how old they are, and these."""
    numbers = state.to_dict()["catalog"]
    stored = [(_words(name), _shown(name, value)) for name, value in numbers.items()]
    lines = [f"store {state.catalog.uuid}", table(("stored", ""), stored), ""]
    if isinstance(state.live, str):
        return "\n".join([*lines, f"no live numbers: {state.live}"])
    live = [(_words(name), _shown(name, value)) for name, value in state.live.stats.items()]
    return "\n".join([*lines, _process(state.live), table(("since it was opened", ""), live)])


def clear_screen() -> None:
    """Where stdout is a terminal: what is shown next stands at its top."""
    if at_terminal():
        print(_CLEAR, end="")


def json_line(state: StoreState) -> str:
    """One object in one line, for programs that read while it goes on."""
    return json.dumps(state.to_dict())


def _process(live: LiveNumbers) -> str:
    """Whose numbers these are, and whether they still hold."""
    age = f"{live.age_s:.0f} s ago"
    if live.state == "open":
        return f"open in process {live.pid}, numbers of {age}"
    if live.state == "closed":
        return f"not open; process {live.pid} closed it {age}, with these numbers"
    if live.state == "elsewhere":
        return f"open in process {live.pid} on host {live.host}, as of {age}: it may be gone since"
    return f"not open: process {live.pid} ended {age} or later without closing it; its last numbers"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if any(each in f"{name}_" for each in _SIZES) and isinstance(value, int):
        return f"{human_bytes(value)} ({value})"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
