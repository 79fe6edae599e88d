"""What was measured of the devices of a store, kept beside it so that it is measured once.

It is a cache: a file that is broken, foreign, or of another device, size or kernel says nothing,
and what it would say is measured anew. Read without importing numpy, for `kvtier doctor`.
"""

import json
import logging
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from kvtier.io.engine_limits import DEPTH_MAX, WORKERS_MAX
from kvtier.io.small_file import can_be_shown, number_within, read_small, replace_file
from kvtier.io.stable_path import stable_path

CALIBRATION = "calibration.json"
"""Name of the file in the directory of a store."""
MERGE_GAP_BYTES_MAX = 1 << 20
_FILE_BYTES_MAX = 1 << 20
RATE_RANGE = (1.0, 1e15)
"""Bytes per second of any device that there is, and seconds of a read."""
_LATENCY_S_RANGE = (1e-9, 1e4)
_LAYOUT_VERSION = 1
_log = logging.getLogger("kvtier")

MeasuredEngine = Literal["io_uring", "threads"]
"""The engines that work on every device."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one setting of an engine reached. setting: its depth or its workers.

    small_bytes_per_s, large_bytes_per_s: random reads of SMALL_BYTES and LARGE_BYTES each.
    """

    engine: MeasuredEngine
    setting: int
    small_bytes_per_s: float
    large_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """How a device is used best, and what it then gives.

    depth: requests in flight with io_uring; workers: with threads. merge_gap_bytes: so many bytes
    between two ranges are cheaper to read along than to ask for twice. read_bytes_per_s: of large
    reads; write_bytes_per_s: None, because calibration only reads. latency_s: one small read alone.
    why: for the engine, in words.
    """

    engine: MeasuredEngine
    depth: int
    workers: int
    merge_gap_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float | None
    latency_s: float
    why: str
    trials: tuple[Trial, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError for anything else than `to_dict` makes."""
        trials = tuple(
            Trial(
                _engine(each["engine"]),
                _whole(each["setting"], 1, DEPTH_MAX),
                _rate(each["small_bytes_per_s"]),
                _rate(each["large_bytes_per_s"]),
            )
            for each in found["trials"]
        )
        written = found["write_bytes_per_s"]
        return cls(
            engine=_engine(found["engine"]),
            depth=_whole(found["depth"], 1, DEPTH_MAX),
            workers=_whole(found["workers"], 1, WORKERS_MAX),
            merge_gap_bytes=_whole(found["merge_gap_bytes"], 0, MERGE_GAP_BYTES_MAX),
            read_bytes_per_s=_rate(found["read_bytes_per_s"]),
            write_bytes_per_s=None if written is None else _rate(written),
            latency_s=number_within(found["latency_s"], _LATENCY_S_RANGE),
            why=_words(found["why"]),
            trials=trials,
        )


def _engine(value: object) -> MeasuredEngine:
    if value == "io_uring":
        return "io_uring"
    if value == "threads":
        return "threads"
    raise ValueError(value)


def _whole(value: object, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(value)
    return value


def _rate(value: object) -> float:
    return number_within(value, RATE_RANGE)


def _words(value: object) -> str:
    if not isinstance(value, str) or not can_be_shown(value):
        raise ValueError(value)
    return value


def device_key(path: str) -> str:
    """What a measurement belongs to: the device by a name that stays with it, the size of what
    was measured, and the kernel. Raises the system's OSError."""
    status = os.stat(path)
    if stat.S_ISBLK(status.st_mode):
        fd = os.open(path, os.O_RDONLY)
        try:
            nbytes = os.lseek(fd, 0, os.SEEK_END)
        finally:
            os.close(fd)
        name = _name_of(status.st_rdev)
    else:
        nbytes = status.st_size
        name = f"file {status.st_ino} on {_name_of(status.st_dev)}"
    return f"{name}, {nbytes} bytes, kernel {os.uname().release}"


def _name_of(number: int) -> str:
    """A block device by its number: its stable link, else its kernel name with its backing file."""
    numbers = f"{os.major(number)}:{os.minor(number)}"
    entry = Path("/sys/dev/block") / numbers
    if not entry.exists():
        return f"device {numbers}"
    kernel_name = entry.resolve().name
    stable = stable_path(f"/dev/{kernel_name.replace('!', '/')}")
    if stable is not None:
        return stable
    backing = ""
    with suppress(OSError):
        backing = f" over {(entry / 'loop' / 'backing_file').read_text().strip()}"
    return kernel_name + backing


def load(folder: Path, path: str) -> Calibration | None:
    """What was measured of the device or file at `path`; None where nothing fits it now."""
    try:
        return _entries(folder).get(device_key(path))
    except OSError:
        return None


def save(folder: Path, path: str, calibration: Calibration) -> None:
    """Keep it for `load`. A folder that cannot be written is no error: it is measured again."""
    target = folder / CALIBRATION
    try:
        key = device_key(path)
        # What was measured under another kernel, or before the device changed, is of no use.
        name, _, _ = key.rpartition(", kernel ")
        known = {
            other: each.to_dict()
            for other, each in _entries(folder).items()
            if not other.startswith(name.rpartition(", ")[0] + ", ")
        }
        known[key] = calibration.to_dict()
        content = {"version": _LAYOUT_VERSION, "devices": known}
        replace_file(target, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        _log.info("%s cannot be written (%s): it is measured again", target, error.strerror)


def _entries(folder: Path) -> dict[str, Calibration]:
    """Every entry that can be read. Raises OSError but where there is no file."""
    try:
        found = json.loads(read_small(folder / CALIBRATION, _FILE_BYTES_MAX))
        if found["version"] != _LAYOUT_VERSION:
            return {}
        return {str(key): Calibration.from_dict(each) for key, each in found["devices"].items()}
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        _log.info("%s is not used: %r", folder / CALIBRATION, error)
        return {}
