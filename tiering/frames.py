"""Frames of one memory tier, under one limit in bytes.

Invariants:
- used_bytes never exceeds limit_bytes; used_bytes_max is the highest value ever reached.
- A Frame is either free or handed out once.
- Free Frames are reused last in, first out, so that memory which was never needed is never
  touched: a pool is reserved address space until its Frames are written. Where several pools share
  the limit, memory of free Frames goes back to the system.
"""

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import CapacityError
from kvtier.io.buffers import aligned_bytes, give_back
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry
from kvtier.tiering.packing import TORCH_DTYPES

FrameArray = npt.NDArray[np.int64]


class FramePool:
    """Frames of one row width, as the rows of one tensor."""

    def __init__(self, width: int, frame_bytes: int, count: int, dtype: torch.dtype) -> None:
        self.frame_bytes = frame_bytes
        self._bytes = aligned_bytes(count * frame_bytes)
        self.memory = torch.from_numpy(self._bytes).view(count, frame_bytes).view(dtype)
        assert self.memory.shape == (count, PAGE_TOKENS * width)
        self._unused = 0
        """Frames from this one on were never handed out."""
        self._given = np.zeros(0, np.int64)
        self._given_count = 0

    def take(self, count: int) -> FrameArray:
        again = min(count, self._given_count)
        self._given_count -= again
        first = self._unused
        self._unused += count - again
        assert self._unused <= len(self.memory)
        reused = self._given[self._given_count : self._given_count + again][::-1]
        return np.concatenate([reused, np.arange(first, self._unused)])

    def give(self, frames: FrameArray) -> None:
        needed = self._given_count + len(frames)
        if needed > len(self._given):
            self._given = np.resize(self._given, max(needed, 2 * len(self._given)))
        self._given[self._given_count : needed] = frames
        self._given_count = needed

    def return_memory(self, frames: FrameArray) -> None:
        """Let the system have the memory of Frames that were given back."""
        ordered = np.sort(frames)
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
            give_back(self._bytes, int(run[0]) * self.frame_bytes, len(run) * self.frame_bytes)


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
            pool = FramePool(width, frame_bytes, count, TORCH_DTYPES[self._geometry.dtype])
            self._pools[width] = pool
        return pool

    def memory(self, layer: int) -> torch.Tensor:
        """Tensor [frames, 16 * (Dk + Dv)] that this layer's Frames are rows of."""
        return self.pool(layer).memory

    def take(self, layer: int, count: int) -> FrameArray:
        """Frames for `count` Pages. Raises CapacityError when they do not fit the limit."""
        needed = count * self._geometry.frame_bytes(layer)
        if needed > self.free_bytes:
            raise CapacityError(self.name, needed, self.free_bytes, self.limit_bytes)
        self.used_bytes += needed
        self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)
        return self.pool(layer).take(count)

    def give(self, layer: int, frames: FrameArray) -> None:
        """Take Frames back."""
        self.used_bytes -= len(frames) * self._geometry.frame_bytes(layer)
        assert self.used_bytes >= 0
        pool = self.pool(layer)
        pool.give(frames)
        if len(self._pools) > 1 and len(frames):
            # Else memory that one pool has touched would stay beside what another one needs, and
            # together they would exceed the limit.
            pool.return_memory(frames)
