"""kvtier bench device: how fast a drive is read here by each engine, and what a store would choose.

It only reads. Figures of a busy machine are those of a busy machine.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.io.calibration import (
    BATCH_BYTES_MAX,
    WindowReader,
    calibrate,
    open_setting,
    setting_words,
)
from kvtier.io.calibration_file import Calibration, Trial
from kvtier.io.device import Device
from kvtier.tiering import store_files
from kvtier.tiering.start_calibration import stored_extents, window_of
from kvtier.tools.system_errors import typed
from kvtier.tools.text_table import human_bytes, table

ORDERS = ("random", "sequential")
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
CALIBRATION_S, QUICK_CALIBRATION_S = 2.0, 1.0
ROW_S, QUICK_ROW_S = 0.3, 0.05
BATCH_MAX = 1024
HOLE_SHARE_MAX = 0.01
"""Of a file that is measured as a whole: so few holes change no figure."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What reads of one size reach. order: "random" or "sequential"."""

    engine: str
    setting: int
    order: str
    request_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Drive:
    """What was found of one device or file, read in bytes [start, end)."""

    path: str
    start: int
    end: int
    calibration: Calibration
    rates: list[Rate]


@dataclass(frozen=True, slots=True)
class Measured:
    """All drives of a store, or the one that was named."""

    drives: list[Drive]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(target: str, *, quick: bool) -> Measured:
    """Measure a device, a file, or the regions of a store. Raises ConfigError, DeviceError."""
    return Measured([_drive(*window, quick=quick) for window in _windows(target)])


def _windows(target: str) -> Iterator[tuple[str, int, int]]:
    """Path, and first and last byte of what may be read."""
    directory = Path(target)
    with typed(f"look at {target}"):
        is_directory = directory.is_dir()
    if not is_directory:
        size = _size(target)
        _refuse_holes(target, size)
        yield (target, 0, size)
        return
    if not store_files.is_store(directory):
        raise ConfigError(
            f"{target} is not a kvtier store, it has no {store_files.SETTINGS}: name a store's "
            "directory, or a device or file to read from"
        )
    settings = store_files.read_settings(directory)
    stored = stored_extents(directory, settings)
    too_small = []
    for number, place in enumerate(settings.places(directory)):
        window = window_of(number, stored)
        if window is not None and os.path.exists(place.path):
            yield (place.path, *window)
        else:
            too_small.append(place.path)
    if len(too_small) == len(settings.regions):
        raise ConfigError(
            f"{', '.join(too_small)} holds less than 64 MiB of segments in a row, and holes are "
            "read from nowhere: store more, or name a device or file that is full"
        )


def _size(path: str) -> int:
    with typed(f"look at {path}"):
        status = os.stat(path)
        if not stat.S_ISBLK(status.st_mode):
            return status.st_size
        fd = os.open(path, os.O_RDONLY)
        try:
            return os.lseek(fd, 0, os.SEEK_END)
        finally:
            os.close(fd)


def _refuse_holes(path: str, size: int) -> None:
    """Raises ConfigError where a good part of a file was never written."""
    with typed(f"look at {path}"):
        holes = _hole_bytes(path, size)
    if holes > HOLE_SHARE_MAX * size:
        raise ConfigError(
            f"{path} has holes: {human_bytes(holes)} of its {human_bytes(size)} were never "
            "written, and holes are read from nowhere: name a store, or a device or file that is "
            "full"
        )


def _hole_bytes(path: str, size: int) -> int:
    """How much of a file is holes, space that was reserved and not written among them. 0 for a
    device, and where the file system cannot tell."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        return 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        at = holes = 0
        while at < size:
            try:
                data = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # From here to the end there is no data.
                    return holes + size - at
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    return 0
                raise
            holes += data - at
            at = os.lseek(fd, data, os.SEEK_HOLE)
        return holes
    finally:
        os.close(fd)


def _drive(path: str, start: int, end: int, *, quick: bool) -> Drive:
    found = calibrate(path, start, end, QUICK_CALIBRATION_S if quick else CALIBRATION_S)
    reader = WindowReader(start, end)
    seconds = QUICK_ROW_S if quick else ROW_S
    # A drive that is very slow is read in small batches.
    count_max = max(1, min(BATCH_MAX, int(seconds / max(found.latency_s, 1e-6))))
    rates: list[Rate] = []
    for trial in _best_of_each_engine(found):
        with closing(open_setting(path, trial.engine, trial.setting, "preferred")) as device:
            device.register(reader.memory)
            for order, nbytes in product(ORDERS, SIZES):
                if nbytes <= end - start:
                    count = min(count_max, BATCH_BYTES_MAX // nbytes)
                    best_s = _best_s(reader, device, (order, nbytes, count), seconds)
                    rates.append(Rate(trial.engine, trial.setting, order, nbytes, nbytes / best_s))
    return Drive(path, start, end, found, rates)


def _best_s(
    reader: WindowReader, device: Device, what: tuple[str, int, int], seconds: float
) -> float:
    """Seconds for one read, at best: what else the machine does only ever adds time."""
    order, nbytes, count = what
    until = time.monotonic() + seconds
    found: list[float] = []
    while not found or time.monotonic() < until:
        sequential = order == "sequential"
        found.append(reader.request_s(device, nbytes, count, sequential=sequential))
    return min(found)


def _best_of_each_engine(found: Calibration) -> list[Trial]:
    best: dict[str, Trial] = {}
    for trial in found.trials:
        known = best.setdefault(trial.engine, trial)
        # As the calibration weighs them, so that its words and the columns name the same setting.
        if _worth(trial) > _worth(known):
            best[trial.engine] = trial
    setting = found.depth if found.engine == "io_uring" else found.workers
    best[found.engine] = Trial(found.engine, setting, 0.0, found.read_bytes_per_s)
    return list(best.values())


def _worth(trial: Trial) -> float:
    return trial.small_bytes_per_s * trial.large_bytes_per_s


def measured_text(found: Measured, line_width: int | None = None) -> str:
    """line_width: of the terminal."""
    return "\n\n".join(_drive_text(each, line_width) for each in found.drives)


def _drive_text(drive: Drive, line_width: int | None) -> str:
    found = drive.calibration
    used = found.depth if found.engine == "io_uring" else found.workers
    lines = [
        f"{drive.path}, {human_bytes(drive.end - drive.start)} from byte {drive.start} on",
        f"a store here uses {setting_words(found.engine, used)}; {found.why}",
        f"one read of 4 KiB alone takes {1e6 * found.latency_s:.0f} us; a gap of up to "
        f"{human_bytes(found.merge_gap_bytes)} is read along",
        "",
    ]
    engines = sorted({(each.engine, each.setting) for each in drive.rates})
    rows = []
    for order, nbytes in product(ORDERS, SIZES):
        cells = [
            f"{each.bytes_per_s / 1e6:.0f} MB/s, {each.bytes_per_s / nbytes:.0f}/s"
            for engine in engines
            for each in drive.rates
            if (each.engine, each.setting) == engine
            and (each.order, each.request_bytes) == (order, nbytes)
        ]
        if cells:
            rows.append((order, human_bytes(nbytes), *cells))
    heads = ("reads", "of", *(setting_words(*each) for each in engines))
    return "\n".join([*lines, table(heads, rows, line_width)])
