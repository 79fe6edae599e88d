"""What a block device is to kvtier: batches of aligned reads and writes, flush, discard.

Every implementation (`uring.py`, `threads.py`, `simulated.py`) passes `tests/device_contract.py`.

Invariants:
- Offsets are bytes from the start of the Device; offset, length and memory address of every
  request are multiples of `block_bytes` (checked before any request is issued).
- A batch returns when all of its requests are complete. A short transfer is continued until it
  is whole; it is never taken for done.
- A failed request never hides: DeviceError lists every failed request of the batch, and all
  others of that batch were completed.
- `write` does not imply durability; `flush` does.
- Requests that wait for their turn begin by Priority, and first come first served within one; what
  is in flight is never stopped for others.
- A batch that was started keeps its memory alive, and its memory belongs to it, until it is done;
  a batch is done only when nothing writes into its memory any more.
"""

import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier.errors import AlignmentError, ConfigError, DeviceError
from kvtier.io.traffic import Traffic

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


class Priority(IntEnum):
    """Whose turn it is on a busy device: the lower number begins first.

    DEMAND: somebody waits for the bytes. PREFETCH: somebody probably will. WRITE: nobody waits, but
    memory stays bound until they are written. SCRUB: looking for damage, which has no hurry.
    """

    DEMAND = 0
    PREFETCH = 1
    WRITE = 2
    SCRUB = 3


@dataclass(frozen=True, slots=True)
class Buffers:
    """Pieces of one memory area, as arrays: what a batch reads into or writes from.

    memory: uint8 [n], C-contiguous. starts, lengths: int64 [requests], bytes within memory.
    """

    memory: ByteArray
    starts: Int64Array
    lengths: Int64Array

    @classmethod
    def whole(cls, memory: ByteArray) -> Self:
        """One request that covers all of `memory`."""
        return cls(memory, np.zeros(1, np.int64), np.array([memory.size], np.int64))

    @property
    def addresses(self) -> Int64Array:
        return self.starts + address_of(self.memory)


def address_of(memory: ByteArray) -> int:
    """Where an array begins. `ndarray.ctypes` makes an object each time, at ten times the cost."""
    return int(memory.__array_interface__["data"][0])


class PendingBatch:
    """A batch on its way, made by a Device. Safe to use from many threads."""

    def __init__(self, what: str, path: str, offsets: Int64Array, buffers: Buffers) -> None:
        """what: "read" or "write". Devices alone make batches and call `settle`."""
        self.what = what
        self.path = path
        self.offsets = offsets
        self.lengths = buffers.lengths
        self.errors = np.zeros(len(offsets), np.int64)
        """int64 [requests]: 0, or the errno with which a request failed. Final when done."""
        self.causes: dict[int, str] = {}
        """What the drive itself said of a failure, in words, by index; where it is heard at all."""
        self._buffers: Buffers | None = buffers
        self._crash: BaseException | None = None
        self._done = False
        self._callbacks: list[Callable[[], None]] = []
        self._changed = threading.Condition(threading.Lock())

    @property
    def done(self) -> bool:
        """Whether every request is complete and the memory may be used for something else."""
        return self._done

    def settle(self, crash: BaseException | None = None) -> None:
        """Nothing of it is in flight any more. crash: what broke it off, else `errors` counts."""
        with self._changed:
            assert not self._done
            self._crash = crash
            self._buffers = None
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call this once when the batch is done, at once if it is.

        It is called on whatever thread settles the batch, must be quick, may not raise, and may
        not call the device.
        """
        with self._changed:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    def join(self) -> None:
        """Return when it is done, also by an exception such as KeyboardInterrupt. Only for Devices
        whose batches go on by themselves; everybody else calls `Device.wait`."""
        with self._changed:
            try:
                self._changed.wait_for(lambda: self._done)
            except BaseException:
                self._changed.wait_for(lambda: self._done)
                raise

    def result(self) -> None:
        """Raise what `read` or `write` would have raised. The batch must be done."""
        assert self._done, "the batch is still on its way"
        if self._crash is not None:
            raise self._crash
        raise_failures(
            self.what, self.path, self.offsets, self.lengths, self.errors, causes=self.causes
        )


class Device(ABC):
    """A raw block device, or a preallocated file. Safe to use from many threads."""

    engine: str
    """Name of the implementation: "io_uring", "threads", "nvme_passthrough", "simulated"."""
    path: str
    direct_io: bool
    """True if requests go past the page cache (O_DIRECT)."""
    direct_io_reason: str
    """Why `direct_io` is what it is, in words."""
    capacity_bytes: int
    block_bytes: int
    """Logical block size: every offset, length and address is a multiple of it."""
    merge_gap_bytes: int = 0
    """So many bytes between two ranges are cheaper to read along than to ask for twice, as far as
    that was measured; 0: only what touches is worth merging. For `ranges.merge_ranges`."""
    failed_flushes: int = 0
    """Flushes that failed so far. What was written before one may be gone for good, whatever a
    later flush returns: the kernel and the drive report such a loss once."""

    @property
    def traffic(self) -> Traffic:
        """What it was asked to move since it was opened."""
        return Traffic()

    @abstractmethod
    def read(
        self, offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
    ) -> None:
        """Fill buffers[i] from offsets[i]. Raises what `check` does, DeviceError, ClosedError."""

    def start_read(
        self, offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
    ) -> PendingBatch:
        """Begin what `read` does and return without waiting for the device.

        A failure of the device is raised by the batch's `result`. One bad block may fail requests
        that lie beside it; `read` tells them apart, here the caller does, by reading each alone.
        Raises what `check` does, ClosedError.
        """
        return self._start("read", offsets, buffers, priority)

    def start_write(
        self, offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.WRITE
    ) -> PendingBatch:
        """Begin what `write` does and return without waiting for the device. The bytes may not
        change until the batch is done; `flush` makes durable only what was done before it.

        A failure of the device is raised by the batch's `result`. Raises what `check` does,
        ClosedError.
        """
        return self._start("write", offsets, buffers, priority)

    @abstractmethod
    def _start(
        self, what: str, offsets: Int64Array, buffers: Buffers, priority: Priority
    ) -> PendingBatch:
        """What `start_read` and `start_write` do. what: "read" or "write"."""

    @abstractmethod
    def wait(self, batch: PendingBatch) -> None:
        """Return when a batch of this device is done; raises what its `result` raises.

        Also by an exception such as KeyboardInterrupt it returns only when the batch is done.
        """

    @property
    @abstractmethod
    def completion_fd(self) -> int:
        """An eventfd that is readable when started batches may be done since the last `poll`.

        For one event loop at a time. The device closes it. Raises ClosedError, DeviceError.
        """

    @abstractmethod
    def poll(self) -> None:
        """Take note of what is complete, without waiting; batches that are complete become done.

        Raises ClosedError.
        """

    @abstractmethod
    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        """Write buffers[i] at offsets[i]. Raises what `check` does, DeviceError, ClosedError."""

    @abstractmethod
    def flush(self) -> None:
        """Return when everything written before is durable. Raises DeviceError, ClosedError."""

    @abstractmethod
    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        """Tell the device that these ranges hold nothing of value.

        Returns False where the device does not support it, which is not an error. Raises
        AlignmentError, ConfigError, DeviceError, ClosedError.
        """

    def locate(self, offset: int) -> "tuple[Device, int]":
        """The device, and the byte of it, that an offset stands for; see drives.py."""
        return self, offset

    def register(self, memory: ByteArray) -> bool:
        """Announce an arena that many requests will use, so that it may be pinned once.

        memory: uint8 [n], kept alive by the device until it is closed. Replaces an arena announced
        before. Returns True if requests inside it are cheaper from now on, False where there is
        nothing to gain; requests outside it stay allowed either way.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Wait for requests in flight and release the device. Calling it twice is allowed."""

    def check(self, offsets: Int64Array, buffers: Buffers) -> None:
        """Raise AlignmentError or ConfigError unless every request may be issued."""
        if not len(offsets) == len(buffers.starts) == len(buffers.lengths):
            raise ConfigError(
                f"a batch needs as many offsets as buffers: got {len(offsets)} offsets, "
                f"{len(buffers.starts)} starts, {len(buffers.lengths)} lengths"
            )
        if not len(offsets) or self._is_in_order(offsets, buffers):
            return
        self._raise_what_is_wrong(offsets, buffers)

    def _is_in_order(self, offsets: Int64Array, buffers: Buffers) -> bool:
        """What `check` asks, in as few passes over the arrays as there can be."""
        starts, lengths, memory = buffers.starts, buffers.lengths, buffers.memory
        # Of numbers that are or'ed together each bit is set that is set in one, the sign's too.
        bits = int(np.bitwise_or.reduce(offsets | lengths | starts)) | address_of(memory)
        return (
            bits >= 0
            and bits % self.block_bytes == 0
            and int((starts + lengths).max()) <= memory.size
            and int((offsets + lengths).max()) <= self.capacity_bytes
        )

    def _raise_what_is_wrong(self, offsets: Int64Array, buffers: Buffers) -> None:
        """For requests that are not in order. Negative lengths are left to `check_memory`."""
        addresses = buffers.addresses
        unaligned = (offsets | buffers.lengths | addresses) % self.block_bytes != 0
        if unaligned.any():
            i = int(np.flatnonzero(unaligned)[0])
            raise AlignmentError(
                int(offsets[i]), int(buffers.lengths[i]), int(addresses[i]), self.block_bytes
            )
        ends = buffers.starts + buffers.lengths
        if (buffers.starts < 0).any() or (ends > buffers.memory.size).any():
            raise ConfigError(f"a buffer lies outside its memory of {buffers.memory.size} bytes")
        if (offsets < 0).any() or (offsets + buffers.lengths > self.capacity_bytes).any():
            i = int(np.argmax((offsets < 0) | (offsets + buffers.lengths > self.capacity_bytes)))
            raise ConfigError(
                f"request at offset {int(offsets[i])} of {int(buffers.lengths[i])} bytes lies "
                f"outside {self.path} of {self.capacity_bytes} bytes"
            )


def check_memory(buffers: Buffers, *, reading: bool) -> None:
    """Raise ConfigError unless the kernel may be given the addresses of these buffers."""
    memory = buffers.memory
    if memory.dtype != np.uint8 or not memory.flags.c_contiguous:
        raise ConfigError(
            f"I/O needs C-contiguous memory of uint8: got {memory.dtype} with strides "
            f"{memory.strides}"
        )
    if reading and not memory.flags.writeable:
        raise ConfigError("a read needs writable memory: this array is read-only")
    if len(buffers.lengths) and int(buffers.lengths.min()) < 0:
        raise ConfigError(f"a buffer has a negative length: {int(buffers.lengths.min())} bytes")


def raise_failures(
    what: str,
    path: str,
    offsets: Int64Array,
    lengths: Int64Array,
    errors: Int64Array,
    *,
    causes: Mapping[int, str] | None = None,
) -> None:
    """Raise DeviceError if any request of a batch failed. errors: int64 [requests], 0 or errno.
    causes: see PendingBatch."""
    failed = np.flatnonzero(errors)
    if not len(failed):
        return
    first = int(failed[0])
    number = int(errors[first])
    cause = (causes or {}).get(first, "")
    raise DeviceError(
        f"{len(failed)} of {len(offsets)} {what}s of {path} failed; the first at offset "
        f"{int(offsets[first])} of {int(lengths[first])} bytes: {os.strerror(number)} "
        f"({errno.errorcode.get(number, number)}){cause and f', {cause}'}",
        number,
        [(int(i), int(errors[i])) for i in failed],
    )
