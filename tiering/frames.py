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

import ctypes
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
from kvtier.tiering.geometry import PAGE_TOKENS, SEGMENT_TOKENS, Geometry, LayerGeometry
from kvtier.tiering.packing import TORCH_DTYPES

HEADERS_BYTES = 8 << 20
"""Room for the headers of units on their way, in each pool; touched only as far as it is used."""
HEADERS_MAX = 1024
HEADERS_MIN = 16

BitArray = npt.NDArray[np.generic]

# Unlike ctypes.memmove it keeps the interpreter's lock: it copies a few kilobytes, and to let go of
# the lock for that wakes another thread, which costs more than the copy.
_copy_bytes = ctypes.PyDLL(None).memmove
_copy_bytes.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_bytes.restype = None


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


class PartRows:
    """Keys, or values, in the Frames of one layer: `bits` [frames, 16, width].

    A decode adds one token to every layer in every step. Nothing on that way lets go of the
    interpreter's lock: while other threads wait for it, each time would wake one of them, which
    costs many times the call. numpy keeps it for single elements and slices of a few hundred, and
    lets go of it for lists of indices: so a row is one element, and its Frames are a slice.
    """

    def __init__(self, bits: BitArray, heads: int) -> None:
        self.bits = bits
        self._token = np.empty((heads, bits.shape[2]), bits.dtype)
        """One token's row of each head, on its way to their Frames."""
        self._token_address = self._token.ctypes.data
        row = np.dtype((np.void, self._token.nbytes // heads))
        self._rows = bits.view(row)[:, :, 0]
        self._token_rows = self._token.view(row)[:, 0]

    def put_token(self, frames: list[int] | slice, place: int, rows: torch.Tensor) -> None:
        """Write rows [heads, 1, width] at a place of these Frames, one for each head."""
        if rows.is_contiguous():
            _copy_bytes(self._token_address, rows.data_ptr(), self._token.nbytes)
        else:
            # A token that was cut out of several.
            self._token[:] = bits_of(rows)[:, 0]
        if isinstance(frames, slice):
            self._rows[frames, place] = self._token_rows
            return
        for head, frame in enumerate(frames):
            self._rows[frame, place] = self._token_rows[head]


class TokenRows:
    """The Frames of one layer as places of tokens."""

    def __init__(self, bits: BitArray, shape: LayerGeometry) -> None:
        """bits: [frames, 16 * (Dk + Dv)]."""
        split = PAGE_TOKENS * shape.key_width
        parts = [(bits[:, :split], shape.key_width)]
        if shape.value_width:
            parts.append((bits[:, split:], shape.value_width))
        self.parts = [
            PartRows(part.reshape(len(bits), PAGE_TOKENS, width), shape.kv_heads)
            for part, width in parts
        ]
        assert not len(bits) or all(np.shares_memory(each.bits, bits) for each in self.parts)

    def put(self, frames: FrameArray, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys [heads, n, Dk] and values [heads, n, Dv], as `require_rows` takes them, from
        the first-th slot of a unit on, whose Pages lie in these Frames [heads, pages]."""
        given = (keys, values)
        count = keys.shape[1]
        if count == 1:
            page, place = divmod(first, PAGE_TOKENS)
            where = _as_slice(frames[:, page].tolist())
            for part, rows in zip(self.parts, given, strict=False):
                part.put_token(where, place, rows)
            return
        slots = np.arange(first, first + count)
        pages, places = frames[:, slots // PAGE_TOKENS], slots % PAGE_TOKENS
        for part, rows in zip(self.parts, given, strict=False):
            part.bits[pages, places] = bits_of(rows)


def _as_slice(frames: list[int]) -> list[int] | slice:
    """The same Frames as a slice, if they lie at equal distances, as those of a Page mostly do."""
    if len(frames) == 1:
        return frames
    first, step = frames[0], frames[1] - frames[0]
    end = first + step * len(frames)
    if step > 0 and (len(frames) == 2 or frames == list(range(first, end, step))):
        return slice(first, end, step)
    return frames


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
        self._token_rows: dict[int, TokenRows] = {}
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

    def token_rows(self, layer: int) -> TokenRows:
        """That memory as places of tokens."""
        rows = self._token_rows.get(layer)
        if rows is None:
            rows = TokenRows(self.pool(layer).bits, self._geometry.layers[layer])
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
