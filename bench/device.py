"""Each Device against fio, in the same minutes: random and sequential reads and writes.

    python bench/device.py [--quick] [--json PATH] [--plot PATH] [--folder DIR]

Asked is how near kvtier comes to what fio, a program in C that does nothing else, gets out of the
same bytes with direct I/O and 32 requests in flight: on a file on the disk, on a loop device over
it, and on a loop device over tmpfs, which is faster than a drive and so shows what Python costs.
Reads of 4 and 8 KiB go a batch of 1,024 at a time; larger ones as a restore reads, with the next
batch started before the last one is waited for. Before anything is timed, what each engine reads is
compared with what the page cache says. The bars are the medians of the better kvtier engine over
those of the better fio engine, in the place where that is least: of 4 and 8 KiB in all places, of
more on the disk and the loop device over it. Over tmpfs the kernel's copies and the process share
the cores.

The latency is that of one batch of 60 scattered reads of 4 KiB, a step of sparse decoding. CPU time
is that of this process, user and system, for one random read of 64 KiB with io_uring.

Needs fio (make bench-tools), and root for the loop devices.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from kvtier.errors import ConfigError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, ByteArray, Device, Int64Array
from kvtier.io.threads import ThreadsDevice
from kvtier.io.uring import UringDevice
from kvtier.tools.bench_form import Bench
from kvtier.tools.bench_rig import fio, interleave, loop_device, random_file
from kvtier.tools.text_table import human_bytes

DEPTH = 32
BATCH_MAX = 1024
BATCH_BYTES_MAX = 16 << 20
SCATTERED = 60
KIB, MIB = 1 << 10, 1 << 20
SMALL_BYTES_MAX = 16 * KIB
"""Reads up to this size go a batch at a time."""
BARS = {4 * KIB: (0.60, 0.85), 8 * KIB: (0.60, 0.85), 64 * KIB: (0.90, 1.0), 256 * KIB: (0.90, 1.0)}
SEQUENTIAL_BYTES = MIB
READS = (4 * KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
WRITES = (4 * KIB, 64 * KIB, MIB)
FIO_NAMES = {"randread": "random read", "read": "sequential read"}
FIO_NAMES |= {"randwrite": "random write", "write": "sequential write"}
CPU_BYTES = 64 * KIB
FILE, LOOP, OVER_TMPFS = "file", "loop device", "loop over tmpfs"
DRIVES = (FILE, LOOP)
OURS = ("kvtier io_uring", "kvtier threads")
THEIRS = ("fio io_uring", "fio psync")


@dataclass(frozen=True)
class Effort:
    """How long and how often."""

    file_bytes: int
    seconds: float
    pause_s: float
    rounds: int
    rounds_of_others: int


FULL = Effort(2 << 30, 0.5, 0.2, 5, 1)
QUICK = Effort(512 << 20, 0.25, 0.05, 1, 0)


@dataclass
class Place:
    """Where bytes are read, with a device of each engine open on it."""

    name: str
    path: str
    nbytes: int
    devices: dict[str, Device]
    cpu_us: list[float] = field(default_factory=list)


class Mover:
    """Moves bytes of one place between a device and two halves of an arena, in turn."""

    def __init__(self, nbytes: int, seed: int = 1) -> None:
        """nbytes: of the place."""
        self._nbytes = nbytes
        self._random = np.random.default_rng(seed)
        self.memory: ByteArray = aligned_bytes(2 * BATCH_BYTES_MAX)
        self.memory[:] = self._random.integers(0, 256, self.memory.size, np.uint8)
        self._next = 0

    def request(self, rw: str, request_bytes: int, half: int) -> tuple[Int64Array, Buffers]:
        """One batch: offsets and the half of the arena it goes to or comes from."""
        count = min(BATCH_MAX, BATCH_BYTES_MAX // request_bytes)
        places = self._nbytes // request_bytes
        if rw.startswith("rand"):
            offsets = self._random.integers(0, places, count) * request_bytes
        else:
            offsets = (self._next + np.arange(count)) % places * request_bytes
            self._next = (self._next + count) % places
        starts = np.arange(count, dtype=np.int64) * request_bytes + half * BATCH_BYTES_MAX
        lengths = np.full(count, request_bytes, np.int64)
        return offsets, Buffers(self.memory, starts, lengths)

    def rate(self, device: Device, rw: str, request_bytes: int, seconds: float) -> float:
        """Bytes per second, as a caller of the Device gets them."""
        if rw.endswith("read") and request_bytes > SMALL_BYTES_MAX:
            return self._started_ahead(device, rw, request_bytes, seconds)
        move = device.write if rw.endswith("write") else device.read
        moved, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) - begin < seconds:
            offsets, buffers = self.request(rw, request_bytes, 0)
            move(offsets, buffers)
            moved += len(offsets) * request_bytes
        return moved / (now - begin)

    def _started_ahead(self, device: Device, rw: str, request_bytes: int, seconds: float) -> float:
        """As a restore reads: the next batch begins before the last one is waited for."""
        moved, begin = 0, time.perf_counter()
        batch = device.start_read(*self.request(rw, request_bytes, 0))
        half = 1
        while (now := time.perf_counter()) - begin < seconds:
            following = device.start_read(*self.request(rw, request_bytes, half))
            device.wait(batch)
            moved += len(batch.offsets) * request_bytes
            batch, half = following, 1 - half
        device.wait(batch)
        return moved / (now - begin)


def check_bytes(place: Place, mover: Mover) -> None:
    """Every engine reads what the page cache reads; an AssertionError if not."""
    for name, device in place.devices.items():
        for request_bytes in (4 * KIB, 256 * KIB):
            offsets, buffers = mover.request("randread", request_bytes, 0)
            device.read(offsets, buffers)
            with open(place.path, "rb") as file:
                for offset, start in zip(offsets[:64], buffers.starts[:64], strict=True):
                    expected = os.pread(file.fileno(), request_bytes, int(offset))
                    found = mover.memory[start : start + request_bytes].tobytes()
                    assert found == expected, f"{name} reads other bytes of {place.path}"
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def opened(name: str, path: str, nbytes: int) -> Iterator[Place]:
    with ExitStack() as stack:
        ring = UringDevice.open(path, direct="required", depth=DEPTH)
        stack.enter_context(closing(ring))
        # A second engine on a block device that is open for writing is refused, so it only reads.
        workers = ThreadsDevice.open(path, writable=False, direct="required", workers=DEPTH)
        stack.enter_context(closing(workers))
        yield Place(name, path, nbytes, {OURS[0]: ring, OURS[1]: workers})


def places(bench: Bench, folder: str, effort: Effort) -> Iterator[Place]:
    """Each place in turn; one that this machine does not have is noted."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvtier-bench-") as inside:
        path = os.path.join(inside, "region")
        random_file(path, effort.file_bytes)
        with opened(FILE, path, effort.file_bytes) as place:
            yield place
        try:
            with (
                loop_device(path, effort.file_bytes) as device,
                opened(LOOP, device, effort.file_bytes) as place,
            ):
                yield place
        except ConfigError as error:
            bench.note(f"{LOOP}: not measured: {error}")
    nbytes = min(effort.file_bytes, 512 << 20)
    try:
        with (
            loop_device(None, nbytes) as device,
            opened(OVER_TMPFS, device, nbytes) as place,
        ):
            yield place
    except ConfigError as error:
        bench.note(f"{OVER_TMPFS}: not measured: {error}")


def methods(
    place: Place, mover: Mover, what: tuple[str, int], seconds: float
) -> dict[str, Callable[[], float]]:
    """Bytes per second of each way to move requests of one kind and size. what: (rw, bytes)."""
    rw, request_bytes = what

    def ours(name: str) -> float:
        before = time.process_time()
        rate = mover.rate(place.devices[name], rw, request_bytes, seconds)
        if (rw, request_bytes, name) == ("randread", CPU_BYTES, OURS[0]):
            requests = rate * seconds / request_bytes
            place.cpu_us.append(1e6 * (time.process_time() - before) / requests)
        return rate

    def theirs(engine: str) -> float:
        jobs = DEPTH if engine == "psync" and rw.startswith("rand") else 1
        return fio(
            place.path,
            rw=rw,
            bs=request_bytes,
            depth=DEPTH if engine == "io_uring" else 1,
            engine=engine,
            size=place.nbytes,
            runtime_s=seconds,
            jobs=jobs,
        )

    found: dict[str, Callable[[], float]] = {
        THEIRS[0]: lambda: theirs("io_uring"),
        OURS[0]: lambda: ours(OURS[0]),
        THEIRS[1]: lambda: theirs("psync"),
    }
    if rw.endswith("read"):
        found[OURS[1]] = lambda: ours(OURS[1])
    return found


def latency_us(device: Device, mover: Mover, times: int) -> list[float]:
    """Of one batch of scattered small reads, as often as that."""
    found = []
    for _ in range(times):
        offsets, buffers = mover.request("randread", 4 * KIB, 0)
        part = slice(0, SCATTERED)
        step = Buffers(buffers.memory, buffers.starts[part], buffers.lengths[part])
        begin = time.perf_counter()
        device.read(offsets[part], step)
        found.append(1e6 * (time.perf_counter() - begin))
    return found


def fio_latency_us(place: Place, seconds: float) -> float:
    """The same by fio, which hands over 60 reads at once and waits for all of them."""
    together = [f"--iodepth_batch_{each}={SCATTERED}" for each in ("submit", "complete_min")]
    rate = fio(
        place.path,
        bs=4 * KIB,
        depth=SCATTERED,
        size=place.nbytes,
        runtime_s=seconds,
        extra=together,
    )
    return 1e6 * SCATTERED * 4 * KIB / rate


class Roofline:
    """Ratios over fio, by what they are of and then by place."""

    def __init__(self, bench: Bench, effort: Effort) -> None:
        self.bench = bench
        self.effort = effort
        self.ratios: dict[tuple[str, int], dict[str, float]] = {}
        self.cpu_us: dict[str, float] = {}

    def measure(self, place: Place) -> None:
        mover = Mover(place.nbytes)
        for device in place.devices.values():
            device.register(mover.memory)
        check_bytes(place, mover)
        rows = []
        for rw, request_bytes, rounds in self._plan():
            found = interleave(
                methods(place, mover, (rw, request_bytes), self.effort.seconds),
                rounds=rounds,
                pause_s=self.effort.pause_s,
            )
            rows.append(self._row(place, rw, request_bytes, found))
        heads = ("what", "of", *THEIRS, *OURS, "over fio")
        self.bench.table(f"{place.name}, MB/s (medians)", heads, rows)
        self._latency(place, mover)
        self.cpu_us[place.name] = median(place.cpu_us)

    def _plan(self) -> Iterator[tuple[str, int, int]]:
        few = self.effort.rounds_of_others
        for request_bytes in READS:
            rounds = self.effort.rounds if request_bytes in BARS else few
            if rounds:
                yield "randread", request_bytes, rounds
        yield "read", SEQUENTIAL_BYTES, self.effort.rounds
        if few:
            yield "read", 64 * KIB, few
            for rw in ("randwrite", "write"):
                for request_bytes in WRITES:
                    yield rw, request_bytes, few

    def _row(
        self, place: Place, rw: str, request_bytes: int, found: dict[str, list[float]]
    ) -> list[str]:
        medians = {name: median(values) for name, values in found.items()}
        what = f"{FIO_NAMES[rw]} {human_bytes(request_bytes)}"
        for name, values in found.items():
            self.bench.samples(f"{place.name}, {what}, {name}", values, unit="B/s")
        best = max(medians[name] for name in OURS if name in medians)
        ratio = best / max(medians[name] for name in THEIRS)
        self.ratios.setdefault((rw, request_bytes), {})[place.name] = ratio
        cells = [f"{medians[n] / 1e6:.0f}" if n in medians else "" for n in (*THEIRS, *OURS)]
        return [FIO_NAMES[rw], human_bytes(request_bytes), *cells, f"{ratio:.2f}"]

    def _latency(self, place: Place, mover: Mover) -> None:
        times = 300 if self.effort.rounds > 1 else 60
        rows = []
        for name, device in place.devices.items():
            found = latency_us(device, mover, times)
            self.bench.samples(f"{place.name}, {SCATTERED} reads, {name}", found, unit="us")
            rows.append([name, f"{median(found):.0f}", f"{np.percentile(found, 99):.0f}"])
        rows.append(["fio io_uring", f"{fio_latency_us(place, self.effort.seconds):.0f}", ""])
        title = f"{place.name}, one batch of {SCATTERED} scattered reads of 4 KiB, us"
        self.bench.table(title, ("", "median", "p99"), rows)

    def bars(self) -> None:
        for request_bytes, (bar, aim) in BARS.items():
            words = human_bytes(request_bytes).replace(".0", "")
            self._bar(f"random reads {words} over fio", ("randread", request_bytes), bar, aim)
        self._bar("sequential reads over fio", ("read", SEQUENTIAL_BYTES), 0.85, 0.95)
        shown = ", ".join(f"{place} {value:.1f}" for place, value in self.cpu_us.items())
        self.bench.note(f"CPU per 64 KiB read, us: {shown}")
        self.bench.bar(
            "CPU per 64 KiB read",
            max(self.cpu_us[place] for place in DRIVES if place in self.cpu_us),
            bar=10,
            aim=5,
            unit="us",
            higher_is_better=False,
        )

    def _bar(self, name: str, what: tuple[str, int], bar: float, aim: float) -> None:
        by_place = self.ratios[what]
        shown = ", ".join(f"{place} {ratio:.2f}" for place, ratio in by_place.items())
        self.bench.note(f"{name}: {shown}")
        counted = by_place if what[1] <= SMALL_BYTES_MAX else [p for p in DRIVES if p in by_place]
        self.bench.bar(name, min(by_place[place] for place in counted), bar=bar, aim=aim, unit="x")


def main() -> int:
    bench = Bench("device", __doc__)
    default = tempfile.gettempdir()
    bench.parser.add_argument("--folder", default=default, metavar="DIR", help="on the disk to try")
    options = bench.options()
    effort = QUICK if options.quick else FULL
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    roofline = Roofline(bench, effort)
    for place in places(bench, options.folder, effort):
        roofline.measure(place)
    roofline.bars()
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
