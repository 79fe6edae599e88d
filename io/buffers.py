"""Memory for direct I/O: aligned, in one arena, under a hard limit.

Invariants of BufferPool:
- Leased pieces never overlap, begin on 4096 bytes, and together with the free pieces cover the
  arena.
- `used_bytes` is the sum of the leased pieces and never exceeds `memory_bytes`.
- A piece comes back when its `with` block ends, whatever ended it; but one that a batch reads into
  comes back when the batch is done, because until then the device writes into it.
"""

import mmap
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

from kvtier.errors import CapacityError, ConfigError
from kvtier.io.alignment import GRID_BYTES, align_down, align_up, os_page_bytes
from kvtier.io.device import ByteArray, PendingBatch
from kvtier.io.syscalls import return_pages

HUGE_PAGE_BYTES = 2 << 20
"""A huge page of x86-64 and of aarch64 with pages of 4096 bytes."""


def aligned_bytes(nbytes: int) -> ByteArray:
    """uint8 [nbytes] of zeros that begins on an OS page, and so on 4096 bytes at least.

    From HUGE_PAGE_BYTES on it begins on a huge page, and the system is asked for such pages: a
    request is then few pieces of memory for the kernel and the drive, not one for each 4096 bytes.
    Where huge pages are switched off or refused it is ordinary memory. Raises CapacityError when
    the system does not grant that much address space.
    """
    if nbytes < 0:
        raise ConfigError(f"memory of {nbytes} bytes was asked for")
    if not nbytes:
        return np.empty(0, np.uint8)
    is_huge = nbytes >= HUGE_PAGE_BYTES
    # Address space alone: what is never touched takes no memory.
    mapped = nbytes + HUGE_PAGE_BYTES if is_huge else nbytes
    # A private mapping: a forked child must not share the bytes that the parent reads into.
    try:
        pages = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(f"memory ({error})", nbytes, 0, nbytes) from error
    memory = np.frombuffer(pages, np.uint8)
    if not is_huge:
        return memory
    # A kernel without huge pages refuses the advice, and the memory is as good without.
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = -int(memory.ctypes.data) % HUGE_PAGE_BYTES
    return memory[start : start + nbytes]


def give_back(memory: ByteArray, start: int, length: int) -> None:
    """Return the OS pages that lie wholly inside a piece of `aligned_bytes` memory to the system;
    they read as zeros afterwards.

    A huge page that is returned in part leaves the process at once, but others can have its memory
    only when all of it was returned, or when memory is short.
    """
    first = align_up(start, os_page_bytes())
    past = align_down(start + length, os_page_bytes())
    if past > first:
        return_pages(memory.ctypes.data + first, past - first)


class BufferPiece:
    """A leased piece of a BufferPool. Belongs to one owner at a time."""

    def __init__(self, memory: ByteArray, give_back: Callable[[], None]) -> None:
        """memory: uint8 [n]. give_back: returns it to the pool."""
        self.memory = memory
        self._give_back = give_back
        self._given = False
        self._batch: PendingBatch | None = None

    def used_by(self, batch: PendingBatch) -> None:
        """A started batch moves bytes into or out of it."""
        assert not self._given
        assert self._batch is None or self._batch.done, "one batch after the other"
        self._batch = batch

    def give_back(self) -> None:
        """Return it to the pool, as soon as no batch uses it. Calling it twice is allowed."""
        if self._given:
            return
        self._given = True
        if self._batch is None:
            self._give_back()
        else:
            self._batch.when_done(self._give_back)


class BufferPool:
    """Pieces of one arena, leased for a while. Safe to use from many threads."""

    def __init__(self, memory_bytes: int) -> None:
        """memory_bytes: the hard limit, rounded up to 4096 bytes."""
        if memory_bytes <= 0:
            raise ConfigError(f"a buffer pool needs at least one byte: got {memory_bytes}")
        self.memory_bytes = align_up(memory_bytes, GRID_BYTES)
        self.memory = aligned_bytes(self.memory_bytes)
        self._changed = threading.Condition()
        self._free: list[tuple[int, int]] = [(0, self.memory_bytes)]
        self._used_bytes = 0
        self._used_bytes_max = 0

    def close(self) -> None:
        """Let the memory go. Nothing is leased now, or will be."""
        self.memory = np.empty(0, np.uint8)

    @property
    def used_bytes(self) -> int:
        """Bytes leased now."""
        return self._used_bytes

    @property
    def used_bytes_max(self) -> int:
        """The most bytes that were ever leased at once."""
        return self._used_bytes_max

    @contextmanager
    def lease(self, nbytes: int, timeout_s: float = 30.0) -> Iterator[ByteArray]:
        """uint8 [nbytes], aligned to 4096 bytes, for the length of the `with` block.

        Waits up to timeout_s for others to give back. Raises CapacityError when it waited in vain
        or when nbytes can never fit. The bytes are what the last user left.
        """
        length = self._length(nbytes)
        start = self._take(length, timeout_s)
        try:
            yield self.memory[start : start + nbytes]
        finally:
            self._give_back(start, length)

    def take(self, nbytes: int) -> BufferPiece | None:
        """A piece of nbytes that stays leased until it is given back; None if none is free now.

        Raises CapacityError when nbytes can never fit.
        """
        length = self._length(nbytes)
        with self._changed:
            start = self._find(length)
        if start is None:
            return None
        memory = self.memory[start : start + nbytes]
        return BufferPiece(memory, partial(self._give_back, start, length))

    def fits(self, nbytes: int) -> bool:
        """Whether `take` would find a piece now."""
        with self._changed:
            return any(free >= self._length(nbytes) for _, free in self._free)

    def shortage(self, nbytes: int, waited_s: float) -> CapacityError:
        """The error of who waited in vain for a piece of nbytes."""
        largest = max((n for _, n in self._free), default=0)
        return CapacityError(
            f"buffer pool (waited {waited_s:g} s; largest free piece {largest} bytes)",
            self._length(nbytes),
            self.memory_bytes - self._used_bytes,
            self.memory_bytes,
        )

    def _length(self, nbytes: int) -> int:
        """Bytes that a piece of nbytes takes. Raises CapacityError when it can never fit."""
        if nbytes < 0:
            raise ConfigError(f"a lease of {nbytes} bytes was asked for")
        length = max(align_up(nbytes, GRID_BYTES), GRID_BYTES)
        if length > self.memory_bytes:
            raise CapacityError("buffer pool", length, self.memory_bytes, self.memory_bytes)
        return length

    def _find(self, length: int) -> int | None:
        """Lease the first free piece that is long enough. Callers hold `_changed`."""
        for i, (start, free_length) in enumerate(self._free):
            if free_length >= length:
                if free_length == length:
                    del self._free[i]
                else:
                    self._free[i] = (start + length, free_length - length)
                self._used_bytes += length
                self._used_bytes_max = max(self._used_bytes_max, self._used_bytes)
                return start
        return None

    def _take(self, length: int, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (start := self._find(length)) is None:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise self.shortage(length, timeout_s)
                self._changed.wait(remaining_s)
            return start

    def _give_back(self, start: int, length: int) -> None:
        with self._changed:
            insort(self._free, (start, length))
            merged: list[tuple[int, int]] = []
            for piece_start, piece_length in self._free:
                if merged and sum(merged[-1]) == piece_start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + piece_length)
                else:
                    merged.append((piece_start, piece_length))
            self._free = merged
            self._used_bytes -= length
            self._changed.notify_all()
