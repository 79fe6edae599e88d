"""A Device in memory with seeded faults and power cuts: for tests of kvtier and of its users.

Invariants:
- Batches, flushes, discards and marks take turns, so that the log is one true order of events.
- Started batches take their turns on a thread of the simulation, by Priority, and within one in
  any order if `shuffled`.
- A write that fails changes nothing, and a read that fails leaves its memory as it was.
- The log holds what was asked for and acknowledged, whatever then became of it, and with the
  unflushed writes stays within `log_bytes_max` each.
"""

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np

from kvtier.errors import AlignmentError, ClosedError, ConfigError, DeviceError
from kvtier.io.device import (
    Buffers,
    ByteArray,
    Device,
    Int64Array,
    PendingBatch,
    Priority,
    check_memory,
    raise_failures,
)
from kvtier.io.simulated_faults import (
    NO_FAULTS,
    Chance,
    Faults,
    draw,
    elsewhere,
    rotted,
    shortened,
    strikes,
)
from kvtier.io.simulated_log import SimulatedCounts, SimulatedOperation
from kvtier.io.simulated_medium import ENTRY_BYTES, Kept, Medium, Unflushed, check_cut, check_sizes
from kvtier.io.simulated_started import StartedBatches
from kvtier.io.traffic import Traffic

LOG_BYTES_MAX = 256 << 20


class SimulatedDevice(Device):
    """Open by `SimulatedDevice.open` or `from_image`. A run of one thread repeats for a seed."""

    engine = "simulated"
    direct_io = True
    direct_io_reason = "simulated in memory: there is no page cache"

    def __init__(
        self,
        medium: Medium,
        sizes: tuple[int, int],
        *,
        seed: int,
        faults: Faults,
        path: str,
        log_bytes_max: int,
    ) -> None:
        """sizes: (block_bytes, capacity_bytes)."""
        self.path = path
        self.block_bytes, self.capacity_bytes = sizes
        self.counts = SimulatedCounts()
        self._medium = medium
        self._seed = seed
        self._faults = faults
        self._log: list[SimulatedOperation] = []
        self._log_bytes = 0
        self._log_bytes_max = log_bytes_max
        self._rots = 0
        self._turn = threading.Lock()
        self._started = StartedBatches(self._next_started)
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def open(
        cls,
        capacity_bytes: int,
        *,
        block_bytes: int = 4096,
        seed: int = 0,
        faults: Faults = NO_FAULTS,
        path: str = "simulated device",
        log_bytes_max: int = LOG_BYTES_MAX,
    ) -> Self:
        """A device of zeros. path: a name for messages, no file is touched. Raises ConfigError."""
        check_sizes(capacity_bytes, block_bytes, seed)
        medium, sizes = Medium.blank(capacity_bytes), (block_bytes, capacity_bytes)
        return cls(medium, sizes, seed=seed, faults=faults, path=path, log_bytes_max=log_bytes_max)

    @classmethod
    def from_image(
        cls,
        image: bytes,
        *,
        block_bytes: int = 4096,
        seed: int = 0,
        faults: Faults = NO_FAULTS,
        path: str = "simulated device",
        log_bytes_max: int = LOG_BYTES_MAX,
    ) -> Self:
        """A device that holds a copy of `image`, all of it durable. Raises ConfigError."""
        check_sizes(len(image), block_bytes, seed)
        medium, sizes = Medium.holding(image), (block_bytes, len(image))
        return cls(medium, sizes, seed=seed, faults=faults, path=path, log_bytes_max=log_bytes_max)

    # ---- what every Device does -------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        return self.counts.traffic

    def read(
        self, offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
    ) -> None:
        self._carry_out("read", offsets, buffers)

    def wait(self, batch: PendingBatch) -> None:
        batch.join()
        batch.result()

    @property
    def completion_fd(self) -> int:
        self._require_open()
        return self._started.event.fd

    def poll(self) -> None:
        self._require_open()
        self._started.event.clear()

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        self._carry_out("write", offsets, buffers)

    def flush(self) -> None:
        with self._in_turn():
            self._require_room(ENTRY_BYTES)
            self.counts.flushes += 1
            if self.counts.flushes in self._faults.failing_flushes:
                self._medium.drop()
                self.failed_flushes += 1
                self._note(SimulatedOperation("failed flush"))
                raise DeviceError(
                    f"{self.path} could not be made durable: {os.strerror(errno.EIO)}", errno.EIO
                )
            self._medium.flush()
            self._note(SimulatedOperation("flush"))

    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        if len(offsets) != len(lengths):
            raise ConfigError(f"discard got {len(offsets)} offsets and {len(lengths)} lengths")
        ranges = list(zip(offsets.tolist(), lengths.tolist(), strict=True))
        with self._in_turn():
            for offset, length in ranges:
                if (offset | length) % self.block_bytes:
                    raise AlignmentError(offset, length, 0, self.block_bytes)
                self._check_range("discard", offset, length)
            self._require_room(ENTRY_BYTES * len(ranges))
            for offset, length in ranges:
                gone = Unflushed(offset, length, None)
                self._medium.land(gone, [length], volatile=self._faults.volatile_cache)
                self._note(SimulatedOperation("discard", offset, length))
        return True

    def close(self) -> None:
        # A turn that another thread held at a fork is never given back there, so take none.
        self._closed = True
        if os.getpid() == self._pid:
            self._started.close(f"{self.path} is closed")
            # A batch that has its turn now ends first.
            with self._turn:
                pass

    # ---- what only a simulation can do ------------------------------------------------------

    @property
    def faults(self) -> Faults:
        """What goes wrong from now on."""
        return self._faults

    def set_faults(self, faults: Faults) -> None:
        """Let other things go wrong, from the next batch on.

        Raises ConfigError where the volatile cache would go while it holds something, ClosedError.
        """
        with self._in_turn():
            held = len(self._medium.unflushed)
            if held and not faults.volatile_cache:
                raise ConfigError(
                    f"{self.path} has {held} unflushed writes, which need the volatile cache: "
                    "flush before you switch it off"
                )
            self._faults = faults

    @property
    def log(self) -> tuple[SimulatedOperation, ...]:
        """Everything acknowledged since `open` or `clear_log`, in the order of completion."""
        return tuple(self._log)

    def mark(self, text: str) -> None:
        """Put a note into the log, such as "saved a". Raises ConfigError beyond the bound."""
        operation = SimulatedOperation("mark", text=text)
        with self._in_turn():
            self._require_room(operation.log_bytes)
            self._note(operation)

    def clear_log(self) -> None:
        """Forget the log, for the sake of its bound. The bytes of the device stay."""
        with self._in_turn():
            self._log.clear()
            self._log_bytes = 0

    def rot(self, offset: int, length: int, bits: int) -> Int64Array:
        """Flip `bits` different bits of a range, in the cache and on the medium.

        Returns them, int64 [bits], counted from the start of the device. Raises ConfigError.
        """
        with self._in_turn():
            self._check_range("rot", offset, length)
            if not 1 <= bits <= 8 * length:
                raise ConfigError(f"a range of {length} bytes has no {bits} bits to flip")
            random = draw(self._seed, Chance.ROT, self._rots)
            self._rots += 1
            flipped: Int64Array = 8 * offset + random.choice(8 * length, bits, replace=False)
            self._medium.flip(flipped)
            return flipped

    def live(self) -> bytes:
        """What a fault-free read of the whole device would return. Allowed after close."""
        self._require_own_process()
        return self._medium.live()

    def image(self, kept: Kept = "some", *, seed: int = 0, torn_bytes: int | None = None) -> bytes:
        """What a power cut at this moment could leave. Allowed during a batch and after close.

        All that is durable, and of the unflushed writes none, all, or a subset that `seed` draws,
        about half of it torn into sectors of torn_bytes (512 or 4096), of which some stand on the
        device. No older write lands over a newer one. Raises ConfigError.
        """
        check_cut(kept, torn_bytes, seed)
        self._require_own_process()
        return self._medium.image(kept, np.random.default_rng(seed), torn_bytes)

    # ---- inside -----------------------------------------------------------------------------

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Alone with the device, which stays open. Raises ClosedError."""
        self._require_own_process()
        with self._turn:
            self._require_open()
            yield

    def _require_open(self) -> None:
        self._require_own_process()
        if self._closed:
            raise ClosedError(f"{self.path} is closed")

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self.path} was opened by process {self._pid} and cannot be used in its forked "
                f"child {os.getpid()}: open it anew there"
            )

    def _require_room(self, nbytes: int) -> None:
        """Raise ConfigError before an operation would let memory grow past the bound."""
        log, unflushed = self._log_bytes + nbytes, self._medium.unflushed_bytes + nbytes
        if max(log, unflushed) > self._log_bytes_max:
            raise ConfigError(
                f"{self.path} would hold {log} bytes of log and {unflushed} bytes of unflushed "
                f"writes, more than log_bytes_max, {self._log_bytes_max} bytes: call clear_log, "
                "flush, or open it with a larger bound"
            )

    def _note(self, operation: SimulatedOperation) -> None:
        self._log.append(operation)
        self._log_bytes += operation.log_bytes

    def _completions(self, chance: Chance, first: int, count: int) -> Iterator[int]:
        """Indices of a batch in the order of completion, each after its delay."""
        order = np.arange(count)
        if self._faults.shuffled and count > 1:
            order = draw(self._seed, chance, first).permutation(count)
        for i in order.tolist():
            if self._faults.delay_s:
                time.sleep(self._faults.delay_s)
            yield i

    def _next_started(self, turn: int, waiting: int) -> int:
        """Which of the started batches that wait comes next, in its `turn`-th choice."""
        if not self._faults.shuffled:
            return 0
        return int(draw(self._seed, Chance.STARTED, turn).integers(waiting))

    def _carry_out(self, what: str, offsets: Int64Array, buffers: Buffers) -> None:
        with self._in_turn():
            self.check(offsets, buffers)
            check_memory(buffers, reading=what == "read")
            errors = self._batch(what, offsets, buffers)
        raise_failures(what, self.path, offsets, buffers.lengths, errors)

    def _start(
        self, what: str, offsets: Int64Array, buffers: Buffers, priority: Priority
    ) -> PendingBatch:
        self._require_open()
        self.check(offsets, buffers)
        check_memory(buffers, reading=what == "read")
        batch = PendingBatch(what, self.path, offsets, buffers)

        def carry_out() -> None:
            with self._turn:
                batch.errors[:] = self._batch(what, offsets, buffers)

        self._started.add(batch, carry_out, priority)
        return batch

    def _batch(self, what: str, offsets: Int64Array, buffers: Buffers) -> Int64Array:
        """Move a batch, in turn. Returns 0 or an errno for each request."""
        writing, count = what == "write", len(offsets)
        if writing:
            self._require_room(int(buffers.lengths.sum()) + ENTRY_BYTES * count)
        first = self.counts.begin(what, buffers.lengths)
        errors = np.zeros(count, np.int64)
        order = Chance.WRITE_ORDER if writing else Chance.READ_ORDER
        move = self._write if writing else self._read
        for i in self._completions(order, first, count):
            start, length = int(buffers.starts[i]), int(buffers.lengths[i])
            errors[i] = move(int(offsets[i]), buffers.memory[start : start + length], first + i)
        return errors

    def _read(self, offset: int, target: ByteArray, number: int) -> int:
        """Carry out one read. Returns 0 or an errno."""
        error = self._faults.error(offset, target.size, writing=False)
        if error:
            self.counts.failed_requests += 1
            return error
        done = 0
        for piece in self._pieces(target.size, Chance.SHORT_READ, number):
            self._medium.read(offset + done, target[done : done + piece])
            done += piece
        return 0

    def _write(self, offset: int, source: ByteArray, number: int) -> int:
        """Carry out one write. Returns 0 or an errno."""
        faults, data = self._faults, source.tobytes()
        error = faults.error(offset, len(data), writing=True)
        if error:
            self.counts.failed_requests += 1
            return error
        self._note(SimulatedOperation("write", offset, len(data), data))
        if not data:
            return 0
        pieces = self._pieces(len(data), Chance.SHORT_WRITE, number)
        if strikes(faults.lost_rate, draw(self._seed, Chance.LOST, number)):
            self.counts.lost_writes += 1
            return 0
        random = draw(self._seed, Chance.MISDIRECTED, number)
        if strikes(faults.misdirected_rate, random):
            wrong = elsewhere(offset, self.capacity_bytes - len(data), self.block_bytes, random)
            self.counts.misdirected_writes += wrong != offset
            offset = wrong
        random = draw(self._seed, Chance.ROTTED, number)
        if strikes(faults.rotted_rate, random):
            self.counts.rotted_writes += 1
            data = rotted(data, faults.rotted_bits, random)
        landed = Unflushed(offset, len(data), data)
        self._medium.land(landed, pieces, volatile=faults.volatile_cache)
        return 0

    def _pieces(self, nbytes: int, chance: Chance, number: int) -> list[int]:
        """Lengths of the transfers that move one request, in bytes, whole blocks each."""
        rate = self._faults.short_rate
        if not rate:
            return [nbytes]
        pieces = shortened(nbytes // self.block_bytes, rate, draw(self._seed, chance, number))
        self.counts.short_transfers += len(pieces) - 1
        return [piece * self.block_bytes for piece in pieces]

    def _check_range(self, what: str, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.capacity_bytes:
            raise ConfigError(
                f"{what} at offset {offset} of {length} bytes lies outside {self.path} of "
                f"{self.capacity_bytes} bytes"
            )
