"""Single Pages on their way from the drive: one batch of reads in device order, into a buffer.

It is a bounce buffer, and not the Frames themselves: a checksum leaves a Page's bytes in the
processor's cache, so that the copy costs a tenth of a microsecond; reads may take holes and the
rest of blocks along; and what is given up has no Frames that would have to be waited for.

Invariants:
- Reads are rounded to blocks and read the smallest holes along, where the device's calibration says
  that this is cheaper, and only as far as all bytes read stay within AMPLIFICATION_MAX times those
  of the Pages. What rounding alone takes is beyond that choice.
- A buffer belongs to its flight until the device is done with it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.io.buffers import BufferPiece
from kvtier.io.device import Buffers, Int64Array, PendingBatch, Priority
from kvtier.io.ranges import merge_ranges
from kvtier.tiering.extent_io import starts_of
from kvtier.tiering.frame_runs import FrameArray
from kvtier.tiering.frames import FramePool
from kvtier.tiering.geometry import PAGE_TOKENS, LayerGeometry
from kvtier.tiering.steps import Read, Steps, apart, failures_of, started

AMPLIFICATION_MAX = 1.3
"""Bytes read over bytes wanted, up to which holes are read along."""
REQUEST_BYTES = 1 << 20
"""Pages that touch become one request up to this size."""


@dataclass(frozen=True, slots=True, eq=False)
class PageReads:
    """How Pages are to be read: all arrays int64, those of Pages in the order of offsets.

    places: which Pages, as PageCache names them. offsets, lengths: of each on the device. begins,
    sizes: the same on the grid of blocks. starts: where in the buffer each Page begins. reads:
    offsets on the device, starts in the buffer and lengths of the requests. index: of the request
    that holds each Page.
    """

    places: Int64Array
    offsets: Int64Array
    lengths: Int64Array
    begins: Int64Array
    sizes: Int64Array
    starts: Int64Array
    reads: tuple[Int64Array, Int64Array, Int64Array]
    index: Int64Array

    @classmethod
    def plan(
        cls,
        places: Int64Array,
        offsets: Int64Array,
        lengths: Int64Array,
        block_bytes: int,
        gap_bytes: int,
    ) -> "PageReads":
        """Of Pages that are each named once. gap_bytes: the longest hole that is read along."""
        order = offsets.argsort()
        places, offsets, lengths = places[order], offsets[order], lengths[order]
        begins = offsets // block_bytes * block_bytes
        sizes = -(-(offsets + lengths) // block_bytes) * block_bytes - begins
        spare = int(AMPLIFICATION_MAX * int(lengths.sum())) - int(sizes.sum())
        merged = merge_ranges(begins, sizes, gap_bytes, REQUEST_BYTES, max(spare, 0))
        at = starts_of(merged.lengths)
        starts = at[merged.index] + merged.start + (offsets - begins)
        reads = merged.offsets, at, merged.lengths
        return cls(places, offsets, lengths, begins, sizes, starts, reads, merged.index)

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return int(self.reads[2].sum())

    def parts(self, nbytes_max: int) -> list[slice]:
        """Runs of Pages that fill about so many bytes each, or are one Page."""
        ends = self.sizes.cumsum()
        if ends[-1] <= nbytes_max:
            return [slice(0, len(ends))]
        cuts = ends.searchsorted(np.arange(nbytes_max, int(ends[-1]), nbytes_max))
        bounds = np.unique(np.concatenate([[0], cuts, [len(ends)]])).tolist()
        return [slice(first, past) for first, past in pairwise(bounds)]


class PageFlight:
    """Some Pages of one layer on their way."""

    def __init__(self, layer: int, planned: PageReads, piece: BufferPiece) -> None:
        """piece: of planned.nbytes."""
        self.layer = layer
        self.planned = planned
        self.piece = piece
        self.batch: PendingBatch | None = None

    @property
    def in_air(self) -> bool:
        return self.batch is not None and not self.batch.done

    def starting(self, priority: Priority) -> Steps[None]:
        """Begin to read. Raises what `Device.start_read` raises."""
        offsets, starts, lengths = self.planned.reads
        read = Read(offsets, Buffers(self.piece.memory, starts, lengths), self.piece.used_by)
        self.batch = yield from started(read, priority)

    def landing(self) -> Steps[list[tuple[int, int]]]:
        """(index of a Page, errno) of what cannot be read, once the batch is done. Raises
        DeviceError where the device as a whole fails."""
        assert self.batch is not None
        failed = yield from failures_of(self.batch)
        if not failed:
            return []
        # A request may have failed for a hole, or for another Page.
        requests = [index for index, _ in failed]
        suspects = np.flatnonzero(np.isin(self.planned.index, requests)).tolist()
        return (yield from apart((page, self._alone(page)) for page in suspects))

    def _alone(self, page: int) -> Read:
        """The blocks of one Page."""
        planned, one = self.planned, slice(page, page + 1)
        starts = planned.starts[one] - (planned.offsets[one] - planned.begins[one])
        buffers = Buffers(self.piece.memory, starts, planned.sizes[one])
        return Read(planned.begins[one], buffers, self.piece.used_by)

    def unpack(
        self,
        pages: Int64Array,
        generations: Sequence[int],
        checksums: npt.NDArray[np.uint64],
        frames: FrameArray,
        target: "PageTarget",
    ) -> npt.NDArray[np.bool_]:
        """Copy Pages, by their indices, into Frames that nobody knows; which of them have their
        checksums. generations, checksums, frames: for each of `pages`."""
        starts, lengths = self.planned.starts[pages], self.planned.lengths[pages]
        source, arena, size = self.piece.memory.data, target.pool.arena.data, target.frame_bytes
        digest = xxhash.xxh3_64_intdigest
        found = []
        for start, length, generation, frame in zip(
            starts.tolist(), lengths.tolist(), generations, frames.tolist(), strict=True
        ):
            page = source[start : start + length]
            found.append(digest(page, generation))
            if length == size:
                at = frame * size
                arena[at : at + size] = page
            else:
                target.place_short(page, frame)
        sound: npt.NDArray[np.bool_] = np.array(found, np.uint64) == checksums
        return sound


@dataclass(slots=True)
class PageFetch:
    """Pages of one layer that somebody waits for. left: Frames that were taken for them and hold
    none yet. parts: reads that have not begun."""

    layer: int
    left: FrameArray
    parts: deque[PageReads] = field(default_factory=deque)
    flights: deque[PageFlight] = field(default_factory=deque)

    def some(self, count: int) -> FrameArray:
        """Take the first of the Frames that are left."""
        frames = self.left
        self.left = frames[count:]
        return frames[:count]


@dataclass(frozen=True, slots=True)
class PageTarget:
    """The Frames that Pages of one layer are copied into."""

    pool: FramePool
    shape: LayerGeometry
    item_bytes: int

    @property
    def frame_bytes(self) -> int:
        return self.pool.frame_bytes

    def place_short(self, page: memoryview, frame: int) -> None:
        """Copy a Page of fewer than 16 tokens: its values begin where those of a full one do, and
        slots that it does not use are zero."""
        rows = self.pool.arena[frame * self.frame_bytes : (frame + 1) * self.frame_bytes]
        source = np.frombuffer(page, np.uint8)
        key_bytes = self.shape.key_width * self.item_bytes
        count = source.size // (self.shape.row_width * self.item_bytes)
        split, keys = PAGE_TOKENS * key_bytes, count * key_bytes
        rows[:] = 0
        rows[:keys] = source[:keys]
        rows[split : split + source.size - keys] = source[keys:]


def distinct(ordered: Int64Array) -> Int64Array:
    """Each of these once; there is one at least."""
    first = np.empty(len(ordered), np.bool_)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], first[1:])
    found: Int64Array = ordered[first]
    return found
