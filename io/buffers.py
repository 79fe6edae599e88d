"""Memory for direct I/O: aligned, in one arena, under a hard limit.

Invariants of BufferPool:
- Leased pieces never overlap, begin on 4096 bytes, and together with the free pieces cover the
  arena.
- `used_bytes` is the sum of the leased pieces and never exceeds `memory_bytes`.
- A piece comes back when its `with` block ends, whatever ended it.
"""

import mmap
import threading
import time
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvtier.errors import CapacityError, ConfigError
from kvtier.io.alignment import GRID_BYTES, align_down, align_up, os_page_bytes
from kvtier.io.device import ByteArray
from kvtier.io.syscalls import return_pages


def aligned_bytes(nbytes: int) -> ByteArray:
    """uint8 [nbytes] of zeros that begins on an OS page, and so on 4096 bytes at least.

    Raises CapacityError when the system does not grant that much address space.
    """
    if nbytes < 0:
        raise ConfigError(f"memory of {nbytes} bytes was asked for")
    if not nbytes:
        return np.empty(0, np.uint8)
    # A private mapping: a forked child must not share the bytes that the parent reads into.
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(f"memory ({error})", nbytes, 0, nbytes) from error
    return np.frombuffer(pages, np.uint8)


def give_back(memory: ByteArray, start: int, length: int) -> None:
    """Return the OS pages that lie wholly inside a piece of `aligned_bytes` memory to the system;
    they read as zeros afterwards."""
    first = align_up(start, os_page_bytes())
    past = align_down(start + length, os_page_bytes())
    if past > first:
        return_pages(memory.ctypes.data + first, past - first)


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
        if nbytes < 0:
            raise ConfigError(f"a lease of {nbytes} bytes was asked for")
        length = max(align_up(nbytes, GRID_BYTES), GRID_BYTES)
        if length > self.memory_bytes:
            raise CapacityError("buffer pool", length, self.memory_bytes, self.memory_bytes)
        start = self._take(length, timeout_s)
        try:
            yield self.memory[start : start + nbytes]
        finally:
            self._give_back(start, length)

    def _take(self, length: int, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for i, (start, free_length) in enumerate(self._free):
                    if free_length >= length:
                        if free_length == length:
                            del self._free[i]
                        else:
                            self._free[i] = (start + length, free_length - length)
                        self._used_bytes += length
                        self._used_bytes_max = max(self._used_bytes_max, self._used_bytes)
                        return start
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    largest = max((n for _, n in self._free), default=0)
                    raise CapacityError(
                        f"buffer pool (waited {timeout_s:g} s; largest free piece {largest} bytes)",
                        length,
                        self.memory_bytes - self._used_bytes,
                        self.memory_bytes,
                    )
                self._changed.wait(remaining_s)

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
