"""Slabs on the device: written whole, their Blobs read back and checked.

Invariants:
- A Blob is handed out only when its bytes, together with its key and fingerprint, have the checksum
  that the catalog names.
- Bytes that neighbour on the device are read as one piece; all pieces of a call as one batch, as
  far as it has at most BATCH_BYTES.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvtier.errors import ChecksumMismatch, DeviceError
from kvtier.io.alignment import GRID_BYTES, align_down, align_up
from kvtier.io.buffers import aligned_bytes
from kvtier.io.catalog import pack_extents
from kvtier.io.catalog_schema import BlobRow, SlabRow
from kvtier.io.device import Buffers, ByteArray, Int64Array
from kvtier.io.extent import Extent
from kvtier.tiering import slab_format
from kvtier.tiering.blob_index import BlobPlace
from kvtier.tiering.extent_io import BATCH_BYTES, ExtentIO, batches, starts_of
from kvtier.tiering.findings import place as place_words
from kvtier.tiering.slab_format import (
    DIRECTORY_ENTRY,
    Directory,
    SlabIdentity,
    SlabPlan,
    to_signed,
)
from kvtier.tiering.slab_ledger import NewSlab

Blob = tuple[bytes, memoryview]
"""Key and bytes."""
Pack = Sequence[Blob]
"""The Blobs of one slab."""
Outcome = bytes | ChecksumMismatch | DeviceError
"""What became of reading one Blob."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A slab that is about to be written."""

    pack: Pack
    layout: SlabPlan
    extent: Extent
    identity: SlabIdentity
    entries: Directory


@dataclass(slots=True)
class _Range:
    """Bytes [start, end) of the device, on the grid, with the Blobs in them: indices."""

    start: int
    end: int
    members: list[int]

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class SlabIO:
    """Callers hold the store's lock."""

    def __init__(self, extents: ExtentIO, fingerprint_id: int) -> None:
        """extents: of the store; its buffers, its space and its counters are used."""
        self.extents = extents
        self.fingerprint_id = fingerprint_id
        self.created_last = 0
        """When the newest slab was made, in unix microseconds: the next one is newer."""

    # ---- writing ----------------------------------------------------------------------------

    def write(self, packs: Sequence[Pack]) -> tuple[list[NewSlab], list[Extent]]:
        """Write slabs, one for each pack; returns what is to be named, and their Extents.

        Nothing is flushed. Raises CapacityError, DeviceError; then no Extent is allocated.
        """
        drafts: list[_Draft] = []
        taken: list[Extent] = []
        layouts = [
            slab_format.plan([len(k) for k, _ in pack], [d.nbytes for _, d in pack])
            for pack in packs
        ]
        self.extents.space.require(sum(each.extent_bytes for each in layouts))
        try:
            for pack, layout in zip(packs, layouts, strict=True):
                taken.append(self.extents.space.allocate(layout.extent_bytes))
                drafts.append(self._draft(pack, layout, taken[-1]))
            self.extents.space.ledger.announce(taken)
            for part in batches([each.extent.length for each in drafts]):
                self._write_batch(drafts[part])
        except BaseException:
            self.extents.space.free(taken)
            raise
        return [self._rows(each) for each in drafts], taken

    def _draft(self, pack: Pack, layout: SlabPlan, extent: Extent) -> _Draft:
        owner = self.extents.owner
        # Of two slabs that show the same key as live, a scan must know the newer one.
        self.created_last = max(time.time_ns() // 1000, self.created_last + 1)
        generation = secrets.randbits(63) | 1
        identity = SlabIdentity(
            owner.store_uuid,
            owner.fingerprint,
            generation,
            extent.offset,
            extent.length,
            self.created_last,
        )
        entries = np.zeros(len(pack), DIRECTORY_ENTRY)
        entries["offset"] = layout.offsets
        entries["length"] = [data.nbytes for _, data in pack]
        entries["checksum"] = [
            slab_format.blob_checksum(owner.fingerprint, key, data, generation)
            for key, data in pack
        ]
        return _Draft(pack, layout, extent, identity, entries)

    def _write_batch(self, drafts: Sequence[_Draft]) -> None:
        """Write slabs of together at most BATCH_BYTES, or one larger one in several pieces."""
        total = sum(each.extent.length for each in drafts)
        with self.extents.buffers.lease(min(total, BATCH_BYTES)) as memory:
            if total > BATCH_BYTES:
                (large,) = drafts
                for first in range(0, total, BATCH_BYTES):
                    piece = memory[: min(BATCH_BYTES, total - first)]
                    _fill(large, piece, first)
                    self._write([large.extent.offset + first], [piece.size], piece)
                return
            lengths = [each.extent.length for each in drafts]
            start = 0
            for draft, length in zip(drafts, lengths, strict=True):
                _fill(draft, memory[start : start + length], 0)
                start += length
            self._write([each.extent.offset for each in drafts], lengths, memory)

    def _write(self, offsets: list[int], lengths: list[int], memory: ByteArray) -> None:
        """Pieces that lie one behind the other in memory."""
        sizes: Int64Array = np.array(lengths, np.int64)
        starts = starts_of(sizes)
        self.extents.space.write(np.array(offsets, np.int64), Buffers(memory, starts, sizes))

    def _rows(self, draft: _Draft) -> NewSlab:
        created = draft.identity.created / 1e6
        slab = SlabRow(
            0, self.fingerprint_id, pack_extents([draft.extent]), draft.identity.generation,
            created, created, False, False,
        )  # fmt: skip
        found = zip(
            draft.pack, draft.layout.offsets, draft.entries["checksum"].tolist(), strict=True
        )
        blobs = [
            BlobRow(
                self.fingerprint_id,
                key,
                0,
                entry,
                offset,
                data.nbytes,
                to_signed(checksum),
                created,
            )
            for entry, ((key, data), offset, checksum) in enumerate(found)
        ]
        return NewSlab(slab, blobs)

    # ---- reading ----------------------------------------------------------------------------

    def read(self, blobs: Sequence[tuple[bytes, BlobPlace]]) -> list[Outcome]:
        """Read Blobs by key and place. Raises DeviceError when the device as a whole fails."""
        found: dict[int, Outcome] = {}
        places = [each for _, each in blobs]
        ranges = _ranges(places)
        for part in batches([each.nbytes for each in ranges]):
            self._read_ranges(ranges[part], blobs, found)
        for index, (key, place) in enumerate(blobs):
            if not place.length:
                found[index] = self._checked(key, place, np.empty(0, np.uint8))
        return [found[index] for index in range(len(blobs))]

    def _read_ranges(
        self,
        ranges: Sequence[_Range],
        blobs: Sequence[tuple[bytes, BlobPlace]],
        found: dict[int, Outcome],
    ) -> None:
        with self._memory(sum(each.nbytes for each in ranges)) as memory:
            failed = self._read(ranges, memory)
            start = 0
            for index, each in enumerate(ranges):
                for member in each.members if index not in failed else ():
                    key, place = blobs[member]
                    at = start + place.offset - each.start
                    found[member] = self._checked(key, place, memory[at : at + place.length])
                start += each.nbytes
        for index, error in failed.items():
            members = ranges[index].members
            if len(members) == 1:
                found[members[0]] = error
                continue
            # A piece fails as a whole; one by one, only what is bad fails.
            for member in members:
                single = _range_of(blobs[member][1], member)
                self._read_ranges([single], blobs, found)

    def _read(self, ranges: Sequence[_Range], memory: ByteArray) -> dict[int, DeviceError]:
        """Read ranges one behind the other into memory; returns what failed, by index."""
        offsets: list[int] = []
        lengths: list[int] = []
        owners: list[int] = []
        for index, each in enumerate(ranges):
            for first in range(each.start, each.end, BATCH_BYTES):
                offsets.append(first)
                lengths.append(min(BATCH_BYTES, each.end - first))
                owners.append(index)
        sizes: Int64Array = np.array(lengths, np.int64)
        starts = starts_of(sizes)
        try:
            self.extents.device.read(np.array(offsets, np.int64), Buffers(memory, starts, sizes))
        except DeviceError as error:
            if not error.failures:
                raise
            return {owners[request]: error for request, _ in error.failures}
        finally:
            self.extents.counters.bytes_read += int(sizes.sum())
        return {}

    @contextmanager
    def _memory(self, nbytes: int) -> Iterator[ByteArray]:
        """Room for a batch. A Blob that is larger is copied to memory in any case."""
        if nbytes > BATCH_BYTES:
            yield aligned_bytes(nbytes)
        else:
            with self.extents.buffers.lease(nbytes) as memory:
                yield memory

    def _checked(self, key: bytes, place: BlobPlace, data: ByteArray) -> Outcome:
        fingerprint = self.extents.owner.fingerprint
        found = slab_format.blob_checksum(fingerprint, key, data.data, place.slab.generation)
        if to_signed(found) != place.checksum:
            return ChecksumMismatch(f"{self.where(place)}: the blob is damaged")
        return data.tobytes()

    def where(self, place: BlobPlace) -> str:
        """A Blob's place in words, for messages."""
        words = place_words(self.extents.device, place.offset)
        return f"entry {place.entry} of slab {place.slab.id} at {words}"


def _fill(draft: _Draft, memory: ByteArray, first: int) -> None:
    """Put the bytes [first, first + memory.size) of a slab into memory."""
    memory[:] = 0
    past = first + memory.size
    if not first:
        keys = [key for key, _ in draft.pack]
        head = slab_format.pack_head(draft.identity, draft.layout, keys, draft.entries)
        memory[: head.size] = head
    for (_, data), offset in zip(draft.pack, draft.layout.offsets, strict=True):
        start, end = max(first, offset), min(past, offset + data.nbytes)
        if start < end:
            part = data[start - offset : end - offset]
            memory[start - first : end - first] = np.frombuffer(part, np.uint8)


def _range_of(place: BlobPlace, member: int) -> _Range:
    end = align_up(place.end, GRID_BYTES)
    return _Range(align_down(place.offset, GRID_BYTES), end, [member])


def _ranges(places: Sequence[BlobPlace]) -> list[_Range]:
    """What to read for these Blobs, merged where they touch, up to BATCH_BYTES."""
    found: list[_Range] = []
    order = sorted(range(len(places)), key=lambda index: places[index].offset)
    for index in order:
        if not places[index].length:
            continue
        each = _range_of(places[index], index)
        last = found[-1] if found else None
        if last is not None and each.start <= last.end and each.end - last.start <= BATCH_BYTES:
            last.end = max(last.end, each.end)
            last.members.append(index)
        else:
            found.append(each)
    return found
