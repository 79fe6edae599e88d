"""The memory that is registered with a ring, and which requests lie in it."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from kvtier.io.device import ByteArray, Int64Array

REGISTERED_PIECE_BYTES = 1 << 30
"""The kernel's limit for one registered buffer; an arena is registered in pieces of this size."""


@dataclass(frozen=True, slots=True)
class RingArena:
    """Addresses [start, end) of registered memory, which it keeps alive; empty: there is none."""

    start: int = 0
    end: int = 0
    piece_bytes: int = 1
    memory: ByteArray | None = None

    @classmethod
    def of(cls, memory: ByteArray) -> Self:
        """All of `memory`, uint8 [n]."""
        start = int(memory.ctypes.data)
        return cls(start, start + memory.size, REGISTERED_PIECE_BYTES, memory)

    def pieces(self) -> tuple[list[int], list[int]]:
        """Addresses and lengths of the pieces to be registered."""
        starts = list(range(self.start, self.end, self.piece_bytes))
        return starts, [min(self.piece_bytes, self.end - start) for start in starts]

    def pieces_of(self, addresses: Int64Array, lengths: Int64Array) -> Int64Array:
        """For each request the number of the piece that it lies in as a whole; -1: in none."""
        if self.memory is None:
            return np.full(len(addresses), -1, np.int64)
        lasts = addresses + (lengths - 1)
        first = (addresses - self.start) // self.piece_bytes
        outside = (addresses < self.start) | (lasts >= self.end)
        if self.end - self.start > self.piece_bytes:
            outside |= first != (lasts - self.start) // self.piece_bytes
        first[outside] = -1
        return first
