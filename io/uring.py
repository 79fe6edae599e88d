"""A Device on io_uring: one ring per device, one batch at a time, 32 requests deep.

Invariants:
- `_lock` is held while anything is in flight, so the memory of a batch outlives its requests.
- A batch that ends by an exception first waits for what it has in flight.
- A request is done when all of its bytes moved or it has an errno; nothing else ends it.
"""

import errno
import os
import threading
import time
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvtier.errors import DeviceError
from kvtier.io import ring as ring_module
from kvtier.io.device import Buffers, ByteArray, Int64Array
from kvtier.io.raw_device import RETRIES_MAX, RETRY_S, RawDevice
from kvtier.io.rawfile import DirectMode, RawFile, check_memory, open_raw, raise_failures
from kvtier.io.ring import Ring

DEPTH = 32
SUBMIT_MIN = 8
"""Requests are handed over in groups of at least this many while enough of them wait."""
TRANSFER_BYTES_MAX = 1 << 30
"""The kernel moves less than 2 GiB per request; longer ones are continued like short transfers."""
REGISTERED_PIECE_BYTES = 1 << 30
"""The kernel's limit for one registered buffer; an arena is registered in pieces of this size."""


class UringDevice(RawDevice):
    """Open by `UringDevice.open`. Batches of several threads take turns."""

    engine = "io_uring"

    def __init__(self, raw: RawFile, ring: Ring) -> None:
        super().__init__(raw)
        self.registered_reason = "no arena was announced"
        """Why requests do or do not use registered buffers, in words."""
        self._ring = ring
        self._lock = threading.Lock()
        self._ring_closed = False
        self._arena: ByteArray | None = None
        self._arena_start = 0
        self._arena_end = 0

    @classmethod
    def open(cls, path: str, *, writable: bool = True, direct: DirectMode = "preferred") -> Self:
        """Open a block device or file. Raises DeviceError, also if io_uring is refused."""
        raw = open_raw(path, writable=writable, direct=direct)
        try:
            ring = Ring.open(DEPTH)
        except OSError as error:
            raw.close()
            raise DeviceError(
                f"io_uring was refused by the kernel: {error.strerror}", error.errno or 0
            ) from error
        return cls(raw, ring)

    def register(self, memory: ByteArray) -> bool:
        """Pin an arena for the kernel. False, with `registered_reason`, where it refuses."""
        with self._raw.use(), self._lock:
            if self._arena is not None:
                self._ring.unregister_buffers()
                self._arena, self._arena_start, self._arena_end = None, 0, 0
            start, end = int(memory.ctypes.data), int(memory.ctypes.data) + memory.size
            starts = list(range(start, end, REGISTERED_PIECE_BYTES))
            lengths = [min(REGISTERED_PIECE_BYTES, end - piece) for piece in starts]
            if not starts:
                self.registered_reason = "the arena is empty"
                return False
            try:
                self._ring.register_buffers(starts, lengths)
            except OSError as error:
                name = errno.errorcode.get(error.errno or 0, str(error.errno))
                self.registered_reason = (
                    f"not registered ({name}): pinning {memory.size} bytes goes past the memlock "
                    "limit (ulimit -l), or the kernel refuses it"
                )
                return False
            self._arena, self._arena_start, self._arena_end = memory, start, end
            self.registered_reason = f"registered: {memory.size} bytes"
            return True

    def close(self) -> None:
        self._raw.close()
        if os.getpid() != self._pid:
            if not self._ring_closed:
                self._ring_closed = True
                self._ring.close()
            return
        with self._lock:
            if not self._ring_closed:
                self._ring_closed = True
                self._ring.close()
                self._arena = None

    def _batch(self, what: str, offsets: Int64Array, buffers: Buffers) -> None:
        with self._raw.use() as fd:
            self.check(offsets, buffers)
            check_memory(buffers, reading=what == "read")
            batch = _Progress.start(what == "write", offsets, buffers)
            with self._lock:
                # A second Ctrl-C during the clean-up of an earlier batch may have left some.
                self._settle()
                try:
                    self._move(fd, batch)
                except OSError as error:
                    self._settle()
                    raise DeviceError(
                        f"io_uring failed on {self.path}: {error.strerror}", error.errno or 0
                    ) from error
                except BaseException:
                    self._settle()
                    raise
        raise_failures(what, self.path, offsets, buffers.lengths, batch.errors)

    def _settle(self) -> None:
        """Wait until nothing is in flight. Raises DeviceError if the ring is broken."""
        try:
            self._ring.drain()
        except OSError as error:
            raise DeviceError(
                f"the io_uring of {self.path} is broken: {error.strerror}. Open the device anew.",
                error.errno or 0,
            ) from error

    def _move(self, fd: int, batch: "_Progress") -> None:
        """Move every byte of the batch, or set an errno for the request."""
        waiting = np.flatnonzero(batch.lengths > 0)
        while len(waiting) or self._ring.in_flight:
            now = waiting[: self._ring.depth - self._ring.in_flight]
            waiting = waiting[len(now) :]
            if len(now):
                self._submit(fd, batch, now)
            flying = self._ring.in_flight
            self._ring.enter(min(SUBMIT_MIN, flying) if len(waiting) else flying)
            done, results = self._ring.reap()
            again = batch.account(done, results, self.block_bytes if self.direct_io else 1)
            if len(again):
                waiting = np.concatenate([waiting, again])

    def _submit(self, fd: int, batch: "_Progress", now: Int64Array) -> None:
        """Push what is left of the requests `now`."""
        moved = batch.moved[now]
        addresses = batch.addresses[now] + moved
        lengths = np.minimum(batch.lengths[now] - moved, TRANSFER_BYTES_MAX)
        first = (addresses - self._arena_start) // REGISTERED_PIECE_BYTES
        last = (addresses + lengths - 1 - self._arena_start) // REGISTERED_PIECE_BYTES
        inside = (addresses >= self._arena_start) & (addresses + lengths <= self._arena_end)
        fixed = inside & (first == last)
        plain_code = ring_module.WRITE if batch.writing else ring_module.READ
        fixed_code = ring_module.WRITE_FIXED if batch.writing else ring_module.READ_FIXED
        self._ring.push(
            fd,
            np.where(fixed, fixed_code, plain_code).astype(np.uint8),
            (batch.offsets[now] + moved, addresses, lengths),
            np.where(fixed, first, 0),
            now,
        )


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far the requests of one batch are. Arrays are int64 [requests]."""

    writing: bool
    offsets: Int64Array
    addresses: Int64Array
    lengths: Int64Array
    moved: Int64Array
    errors: Int64Array
    retries: Int64Array

    @classmethod
    def start(cls, writing: bool, offsets: Int64Array, buffers: Buffers) -> Self:
        zeros = np.zeros((3, len(offsets)), np.int64)
        return cls(writing, offsets, buffers.addresses, buffers.lengths, *zeros)

    def account(self, done: Int64Array, results: Int64Array, block_bytes: int) -> Int64Array:
        """Book completions; returns the requests that must go on.

        done: indices of requests. results: bytes moved, or -errno. block_bytes: no transfer may
        end inside a block of this size.
        """
        transient = np.isin(results, (-errno.EAGAIN, -errno.EINTR))
        if transient.any():
            self.retries[done[transient]] += 1
            transient &= self.retries[done] <= RETRIES_MAX
            time.sleep(RETRY_S)
        failed = (results < 0) & ~transient
        self.errors[done[failed]] = -results[failed]
        # Nothing moved, or the end of the file inside a block: the bytes are not there.
        ended = (results == 0) | ((results > 0) & (results % block_bytes != 0))
        self.errors[done[ended]] = errno.EIO
        good = (results > 0) & ~ended
        self.moved[done[good]] += results[good]
        unfinished = (self.errors[done] == 0) & (self.moved[done] < self.lengths[done])
        again: Int64Array = done[unfinished]
        return again
