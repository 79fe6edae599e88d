"""Measures a device for a second and says how to use it: which engine, how deep, what to merge.

Invariants:
- It only reads, and only inside the window it was given.
- It ends in time on slow devices too: each measurement is sized by what was seen before it, and
  what there is no time for is not measured.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from kvtier.errors import ConfigError, DeviceError
from kvtier.io.alignment import GRID_BYTES, align_down, align_up
from kvtier.io.buffers import aligned_bytes
from kvtier.io.calibration_file import MERGE_GAP_BYTES_MAX, Calibration, MeasuredEngine, Trial
from kvtier.io.device import Buffers, ByteArray, Device
from kvtier.io.probe import io_uring_report
from kvtier.io.rawfile import DirectMode
from kvtier.io.threads import WORKERS, ThreadsDevice
from kvtier.io.uring import DEPTH, UringDevice

SMALL_BYTES = 4096
LARGE_BYTES = 256 << 10
WINDOW_BYTES_MIN = 4 * LARGE_BYTES
"""A smaller window would lie in the caches of a drive as a whole."""
ROUNDS = 3
BATCH_BYTES_MAX = 16 << 20
BATCH_MIN, BATCH_MAX = 4, 1024
"""Requests of one batch."""
LATENCY_SHARE = 0.08
"""Of the time, for single reads."""
NEAR = 0.92
"""A setting so near to the best is as good, and the one named first is taken: two measurements of
the same thing differ by as much."""
THREADS_ARE_WORTH = 0.87
"""Threads take about twice the CPU time for a request, so they must be faster by so much."""

SETTINGS: tuple[tuple[MeasuredEngine, int], ...] = (
    ("io_uring", DEPTH),
    ("io_uring", 2 * DEPTH),
    ("io_uring", DEPTH // 2),
    ("threads", WORKERS),
    ("threads", 2 * WORKERS),
)
"""What is tried, what is preferred first."""


@dataclass
class _Candidate:
    """One setting under trial. seconds: of each request, by its size, one figure a round."""

    engine: MeasuredEngine
    setting: int
    device: Device
    seconds: dict[int, list[float]] = field(
        default_factory=lambda: {SMALL_BYTES: [], LARGE_BYTES: []}
    )

    def request_s(self, nbytes: int) -> float:
        """The best round: what else the machine does only ever adds time."""
        return min(self.seconds[nbytes])

    def rate(self, nbytes: int) -> float:
        return nbytes / self.request_s(nbytes)

    @property
    def is_measured(self) -> bool:
        return all(self.seconds.values())

    def trial(self) -> Trial:
        return Trial(self.engine, self.setting, self.rate(SMALL_BYTES), self.rate(LARGE_BYTES))


class WindowReader:
    """Reads of one size from a window of a device, in batches, timed."""

    def __init__(self, start: int, end: int) -> None:
        self._start = align_up(start, GRID_BYTES)
        self._end = align_down(end, GRID_BYTES)
        self._random = np.random.default_rng(1)
        self._next = 0
        self.memory: ByteArray = aligned_bytes(BATCH_BYTES_MAX)
        # The first touch of memory would count as time of the device.
        self.memory[:] = 1

    def request_s(
        self, device: Device, nbytes: int, count: int, *, sequential: bool = False
    ) -> float:
        """Seconds for one request of a batch of `count`, at random places or where the last
        sequential batch ended."""
        if sequential:
            places = (self._end - self._start) // nbytes
            offsets = self._start + nbytes * ((self._next + np.arange(count)) % places)
            self._next = (self._next + count) % places
        else:
            places = (self._end - self._start - nbytes) // GRID_BYTES + 1
            offsets = self._start + GRID_BYTES * self._random.integers(0, places, count)
        starts = np.arange(count, dtype=np.int64) * nbytes
        buffers = Buffers(self.memory, starts, np.full(count, nbytes, np.int64))
        begin = time.perf_counter()
        device.read(offsets, buffers)
        return (time.perf_counter() - begin) / count


def calibrate(
    path: str,
    start: int,
    end: int,
    seconds: float = 1.0,
    *,
    direct: DirectMode = "preferred",
    settings: Sequence[tuple[MeasuredEngine, int]] = SETTINGS,
) -> Calibration:
    """Measure bytes [start, end) of a device or file, which must have been written: reads of a
    hole never reach the drive. settings: what is tried, what is preferred first.

    Takes about `seconds`. Raises ConfigError for a window that is too small or outside of the
    device, DeviceError where it cannot be read.
    """
    if end - start < WINDOW_BYTES_MIN or start < 0:
        raise ConfigError(
            f"a device is measured in a window of {WINDOW_BYTES_MIN} bytes at least: got bytes "
            f"{start} to {end}"
        )
    if seconds <= 0:
        raise ConfigError(f"a measurement takes time: got {seconds} seconds")
    deadline = time.monotonic() + seconds
    refusal = io_uring_report()
    with ExitStack() as stack:
        candidates: list[_Candidate] = []
        for engine, setting in settings:
            if engine == "threads" or refusal.usable:
                device = open_setting(path, engine, setting, direct)
                stack.callback(device.close)
                candidates.append(_Candidate(engine, setting, device))
        if not candidates:
            raise DeviceError(f"no engine that was named can be used: {refusal.reason}")
        reader = WindowReader(start, end)
        for each in candidates:
            each.device.register(reader.memory)
        latency_s = _latency_s(reader, candidates[0].device, seconds)
        _measure(reader, candidates, (latency_s, seconds), deadline)
    measured = [each for each in candidates if each.is_measured]
    why_not = "" if refusal.usable else f"; {refusal.reason}"
    return _choose(measured, latency_s, why_not)


def open_setting(path: str, engine: str, setting: int, direct: DirectMode) -> Device:
    """Open a device for reading with an engine and its depth or workers. Raises DeviceError."""
    if engine == "io_uring":
        return UringDevice.open(path, writable=False, direct=direct, depth=setting)
    return ThreadsDevice.open(path, writable=False, direct=direct, workers=setting)


def setting_words(engine: str, setting: int) -> str:
    return f"{engine}, " + (f"depth {setting}" if engine == "io_uring" else f"{setting} workers")


def _latency_s(reader: WindowReader, device: Device, seconds: float) -> float:
    """The median of small reads, one after the other."""
    end = time.monotonic() + LATENCY_SHARE * seconds
    # The first one wakes what sleeps.
    reader.request_s(device, SMALL_BYTES, 1)
    found = [reader.request_s(device, SMALL_BYTES, 1)]
    while time.monotonic() < end:
        found.append(reader.request_s(device, SMALL_BYTES, 1))
    return median(found)


def _measure(
    reader: WindowReader, candidates: list[_Candidate], times: tuple[float, float], deadline: float
) -> None:
    """times: (latency_s, seconds). In rounds through all, every other one backwards, so that what
    the machine does meanwhile hits all alike. The first candidate is measured in any case."""
    latency_s, seconds = times
    slot_s = seconds * (1 - LATENCY_SHARE) / (ROUNDS * 2 * len(candidates))
    for turn in range(ROUNDS):
        order = candidates if turn % 2 == 0 else candidates[::-1]
        for nbytes in (SMALL_BYTES, LARGE_BYTES):
            for each in order:
                late = time.monotonic() + slot_s > deadline
                if late and not (each is candidates[0] and not each.seconds[nbytes]):
                    continue
                known = candidates[0].seconds[nbytes] or [latency_s / 8 + nbytes / 1e9]
                count = int(slot_s / median(known))
                most = min(BATCH_MAX, BATCH_BYTES_MAX // nbytes)
                count = max(BATCH_MIN, min(count, most))
                each.seconds[nbytes].append(reader.request_s(each.device, nbytes, count))


def _choose(measured: list[_Candidate], latency_s: float, why_not: str) -> Calibration:
    """The first that is nearly as good as the best, small and large reads counting alike."""
    best_small = max(each.rate(SMALL_BYTES) for each in measured)
    best_large = max(each.rate(LARGE_BYTES) for each in measured)

    def score(each: _Candidate) -> float:
        share = each.rate(SMALL_BYTES) / best_small * (each.rate(LARGE_BYTES) / best_large)
        worth = THREADS_ARE_WORTH if each.engine == "threads" else 1.0
        return worth * float(share**0.5)

    best = max(map(score, measured))
    chosen = next(each for each in measured if score(each) >= NEAR * best)
    # Time for a request is so much for itself, and so much for each byte.
    small_s, large_s = chosen.request_s(SMALL_BYTES), chosen.request_s(LARGE_BYTES)
    byte_s = max((large_s - small_s) / (LARGE_BYTES - SMALL_BYTES), 1e-13)
    gap = int(max(small_s - SMALL_BYTES * byte_s, 0.0) / byte_s)
    others = [each for each in measured if each.engine != chosen.engine]
    return Calibration(
        engine=chosen.engine,
        depth=chosen.setting if chosen.engine == "io_uring" else DEPTH,
        workers=chosen.setting if chosen.engine == "threads" else WORKERS,
        merge_gap_bytes=min(align_down(gap, GRID_BYTES), MERGE_GAP_BYTES_MAX),
        read_bytes_per_s=chosen.rate(LARGE_BYTES),
        write_bytes_per_s=None,
        latency_s=latency_s,
        why=_why(chosen, max(others, key=score, default=None)) + why_not,
        trials=tuple(each.trial() for each in measured),
    )


def _words(each: _Candidate) -> str:
    small, large = (each.rate(nbytes) / 1e6 for nbytes in (SMALL_BYTES, LARGE_BYTES))
    return (
        f"{setting_words(each.engine, each.setting)}, reads {small:.0f} MB/s in 4 KiB and "
        f"{large:.0f} MB/s in 256 KiB"
    )


def _why(chosen: _Candidate, other: _Candidate | None) -> str:
    return f"measured: {_words(chosen)}" + (f"; {_words(other)}" if other is not None else "")
