"""The numbers of an open store for other processes: `stats.json` beside the catalog.

The process that has the store open replaces the file at most once in STATS_EVERY_S, at calls that
nobody waits for bytes at, and when it closes the store. What the file says of the process is
checked when it is read: numbers of one that is gone are shown as such. Nothing rests on the file:
it is neither synced nor locked.
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

STATS = "stats.json"
STATS_VERSION = 1
STATS_EVERY_S = 1.0
STATS_BYTES_MAX = 1 << 20

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
        new = self.path.with_name(f"{STATS}.new")
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                # As a whole: `dump` writes piece by piece, in Python, for ten times as long.
                file.write(json.dumps(content))
            new.rename(self.path)
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
        with path.open("rb") as file:
            data = file.read(STATS_BYTES_MAX)
    except FileNotFoundError:
        return "no process has had this store open since numbers are kept"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    try:
        content = json.loads(data)
        version, own = content["version"], content["store_uuid"]
        pid, started, host = content["pid"], content["process_started"], content["host"]
        written, is_open, stats = content["written"], content["open"], content["stats"]
        age_s = max(0.0, time.time() - written)
        if type(pid) is not int or not isinstance(host, str) or not isinstance(stats, dict):
            raise TypeError("a field has another type")
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


def _process_started(pid: int) -> int:
    """When a process began, in clock ticks since the machine did; 0: there is none, or nobody may
    look."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        # The command's name comes before, and may hold anything but the last bracket.
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
