"""Frames of one memory tier, under one limit in bytes.

Invariants:
- used_bytes never exceeds limit_bytes; used_bytes_max is the highest value ever reached.
- A Frame is either free or handed out once.
- Free Frames are reused before others, so that memory which was never needed is never touched: a
  pool is reserved address space until its Frames are written. Where several pools share the limit,
  memory of free Frames goes back to the system.
- A pool has room for headers beside its Frames, so that a unit's header and its Pages can be read
  by one batch, which has one memory. Header rooms are no part of the limit.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import CapacityError
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.io.buffers import aligned_bytes, give_back
from kvtier.io.device import ByteArray
from kvtier.tiering.extent_format import header_bytes
from kvtier.tiering.frame_runs import FrameArray, FrameRuns, runs_of
from kvtier.tiering.geometry import PAGE_TOKENS, SEGMENT_TOKENS, Geometry
from kvtier.tiering.packing import TORCH_DTYPES

HEADERS_BYTES = 8 << 20
"""Room for the headers of units on their way, in each pool; touched only as far as it is used."""
HEADERS_MAX = 1024
HEADERS_MIN = 16

BitArray = npt.NDArray[np.generic]


class FramePool:
    """Frames of one row width, as the rows of one tensor."""

    def __init__(
        self, width: int, frame_bytes: int, count: int, header_room: int, dtype: torch.dtype
    ) -> None:
        """header_room: bytes of the largest header of a unit whose Pages are these Frames."""
        self.frame_bytes = frame_bytes
        headers = min(max(HEADERS_BYTES // header_room, HEADERS_MIN), HEADERS_MAX)
        headers_start = align_up(count * frame_bytes, GRID_BYTES)
        self.arena: ByteArray = aligned_bytes(headers_start + headers * header_room)
        """Frame i is the frame_bytes from i * frame_bytes on."""
        rows = torch.from_numpy(self.arena[: count * frame_bytes])
        self.memory = rows.view(count, frame_bytes).view(dtype)
        assert self.memory.shape == (count, PAGE_TOKENS * width)
        self.bits = bits_of(self.memory)
        self._free = FrameRuns(count)
        self._free_headers = [
            headers_start + place * header_room for place in range(headers - 1, -1, -1)
        ]

    def take(self, count: int) -> FrameArray:
        """Frames that are free, neighbours where there are."""
        return self._free.take(count)

    def take_each(self, counts: Sequence[int]) -> FrameArray:
        """The same for several units, one behind the other."""
        return self._free.take_each(counts)

    def give(self, frames: FrameArray) -> None:
        self._free.give(frames)

    def take_header(self) -> int | None:
        """Where in `arena` a header may be put; None: nowhere now."""
        return self._free_headers.pop() if self._free_headers else None

    def give_header(self, start: int) -> None:
        self._free_headers.append(start)

    def close(self) -> None:
        """Let the memory go. Who has Frames may still give them back."""
        self.arena = np.empty(0, np.uint8)
        self.memory = self.memory.new_empty(0)
        self.bits = bits_of(self.memory)

    def return_memory(self, frames: FrameArray) -> None:
        """Let the system have the memory of Frames that were given back."""
        for start, length in runs_of(frames) if self.arena.size else ():
            give_back(self.arena, start * self.frame_bytes, length * self.frame_bytes)


def bits_of(tensor: torch.Tensor) -> BitArray:
    """The same memory as an array, bfloat16 as integers, for copies of a few tokens bit for bit:
    numpy makes them at a fraction of the cost of a call of torch."""
    array: BitArray = (
        tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return array


class MemoryTier:
    """HOT or HOST: a byte limit and the Frame pools that share it (one per row width)."""

    def __init__(self, name: str, limit_bytes: int, geometry: Geometry) -> None:
        """Raises CapacityError when the system does not grant the address space."""
        self.name = name
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.used_bytes_max = 0
        self._geometry = geometry
        self._pools: dict[int, FramePool] = {}
        self._token_rows: dict[int, tuple[BitArray, BitArray]] = {}
        if limit_bytes:
            for layer in range(len(geometry.layers)):
                self.pool(layer)

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes

    def pool(self, layer: int) -> FramePool:
        """The pool that Frames of this layer come from, made at its first use."""
        width = self._geometry.layers[layer].row_width
        pool = self._pools.get(width)
        if pool is None:
            frame_bytes = self._geometry.frame_bytes(layer)
            count = self.limit_bytes // frame_bytes
            room = max(
                header_bytes(self._geometry, each, SEGMENT_TOKENS)
                for each, shape in enumerate(self._geometry.layers)
                if shape.row_width == width
            )
            dtype = TORCH_DTYPES[self._geometry.dtype]
            pool = FramePool(width, frame_bytes, count, room, dtype)
            self._pools[width] = pool
        return pool

    def memory(self, layer: int) -> torch.Tensor:
        """Tensor [frames, 16 * (Dk + Dv)] that this layer's Frames are rows of."""
        return self.pool(layer).memory

    def token_rows(self, layer: int) -> tuple[BitArray, BitArray]:
        """The bits of that memory as keys [frames, 16, Dk] and values [frames, 16, Dv]."""
        rows = self._token_rows.get(layer)
        if rows is None:
            shape = self._geometry.layers[layer]
            bits = self.pool(layer).bits
            split = PAGE_TOKENS * shape.key_width
            rows = (
                bits[:, :split].reshape(len(bits), PAGE_TOKENS, shape.key_width),
                bits[:, split:].reshape(len(bits), PAGE_TOKENS, shape.value_width),
            )
            assert not len(bits) or np.shares_memory(rows[0], bits)
            self._token_rows[layer] = rows
        return rows

    def take(self, layer: int, count: int) -> FrameArray:
        """Frames for `count` Pages. Raises CapacityError when they do not fit the limit."""
        pool = self.pool(layer)
        self._use(count * pool.frame_bytes)
        return pool.take(count)

    def take_each(self, layer: int, counts: Sequence[int]) -> FrameArray:
        """The same for several units of layers that share this one's pool, one behind the
        other."""
        pool = self.pool(layer)
        self._use(sum(counts) * pool.frame_bytes)
        return pool.take_each(counts)

    def close(self) -> None:
        """Let the memory go: who still holds a closed store does not hold that."""
        for pool in self._pools.values():
            pool.close()
        self._token_rows.clear()

    def _use(self, needed: int) -> None:
        if needed > self.free_bytes:
            raise CapacityError(self.name, needed, self.free_bytes, self.limit_bytes)
        self.used_bytes += needed
        self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)

    def give(self, layer: int, frames: FrameArray) -> None:
        """Take Frames back."""
        pool = self.pool(layer)
        self.used_bytes -= len(frames) * pool.frame_bytes
        assert self.used_bytes >= 0
        pool.give(frames)
        if len(self._pools) > 1 and len(frames):
            # Else memory that one pool has touched would stay beside what another one needs, and
            # together they would exceed the limit.
            pool.return_memory(frames)
