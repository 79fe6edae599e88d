"""The numbers of an open store for other processes: `stats.json` beside the catalog.

The process that has the store open replaces the file when it opens it, at most once in
STATS_EVERY_S at calls that nobody waits for bytes at, and when it closes it. What the file says of
the process is checked when it is read: numbers of one that is gone are shown as such. Nothing rests
on the file: it is neither synced nor locked.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.io.small_file import can_be_shown, read_small, replace_file

STATS = "stats.json"
STATS_VERSION = 1
STATS_EVERY_S = 1.0
STATS_BYTES_MAX = 1 << 20
NUMBER_MAX = 2**63

_log = logging.getLogger("kvtier")


class StatsFile:
    """Writes the file. Callers hold the store's lock."""

    def __init__(self, directory: Path, store_uuid: str) -> None:
        self.path = directory / STATS
        self.store_uuid = store_uuid
        self._written_at = -STATS_EVERY_S
        self._failed = False

    def write_when_due(self, collect: Callable[[], dict[str, Any]]) -> None:
        """Write the numbers if the last time was long enough ago."""
        if time.monotonic() - self._written_at >= STATS_EVERY_S:
            self.write(collect(), is_open=True)

    def write(self, numbers: dict[str, Any], *, is_open: bool) -> None:
        """Write them now. Where that fails a warning says so once: a store works without."""
        self._written_at = time.monotonic()
        content = {
            "version": STATS_VERSION,
            "store_uuid": self.store_uuid,
            "pid": os.getpid(),
            "process_started": _process_started(os.getpid()),
            "host": socket.gethostname(),
            "written": time.time(),
            "open": is_open,
            "stats": numbers,
        }
        try:
            # As a whole: `dump` writes piece by piece, in Python, for ten times as long.
            replace_file(self.path, json.dumps(content))
        except OSError as error:
            if not self._failed:
                _log.warning("%s is not kept up to date: %s", self.path, error)
            self._failed = True


@dataclass(frozen=True, slots=True)
class LiveNumbers:
    """What a process wrote of a store that it has, or had, open.

    state: "open", "closed", "gone" (it ended without closing the store), or "elsewhere" (on another
    host, where nobody can look after it). age_s: seconds since they were written.
    """

    state: str
    pid: int
    host: str
    age_s: float
    stats: dict[str, Any]


def read_stats(directory: Path, store_uuid: str) -> LiveNumbers | str:
    """The numbers of a store in words or as such: a text says why there are none."""
    path = directory / STATS
    try:
        content = json.loads(read_small(path, STATS_BYTES_MAX))
        version, own = content["version"], content["store_uuid"]
        pid, started, host = content["pid"], content["process_started"], content["host"]
        written, is_open, stats = content["written"], content["open"], content["stats"]
        # All of it is shown: no number that has no end, and no text that steers a terminal.
        _require_plain([version, own, pid, started, host, written, is_open, stats])
        if not (type(version) is type(pid) is type(started) is int and type(is_open) is bool):
            raise TypeError("a field has another type")
        if not (isinstance(own, str) and isinstance(host, str) and isinstance(stats, dict)):
            raise TypeError("a field has another type")
        age_s = max(0.0, time.time() - written)
    except FileNotFoundError:
        return "no process has had this store open since numbers are kept"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        return f"{path} is damaged ({error}): the next process that opens the store writes it anew"
    if version != STATS_VERSION:
        return f"{path} has version {version}, this is {STATS_VERSION}"
    if own != store_uuid:
        return f"{path} is of another store, {own}"
    if not is_open:
        state = "closed"
    elif host != socket.gethostname():
        state = "elsewhere"
    else:
        # A process of the same number that began later is another one.
        state = "open" if started and _process_started(pid) == started else "gone"
    return LiveNumbers(state, pid, host, age_s, stats)


def _require_plain(value: object) -> None:
    """Raises ValueError or TypeError for what no store writes, RecursionError."""
    if isinstance(value, dict | list):
        for each in value:
            _require_plain(each)
        if isinstance(value, dict):
            _require_plain(list(value.values()))
    elif isinstance(value, str):
        if not can_be_shown(value):
            raise ValueError("a text holds characters that cannot be shown")
    elif isinstance(value, int | float):
        if not -NUMBER_MAX <= value <= NUMBER_MAX:
            raise ValueError("a number that nothing here reaches")
    elif value is not None:
        raise TypeError("a field has another type")


def _process_started(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; 0: there is none, or nobody may
    look."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        # The command's name comes before, and may hold anything but the last bracket.
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
