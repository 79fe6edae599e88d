"""Walks one region on its grid and says which Extents, slabs and records of a store lie there.

Invariants:
- What is reported as sound was read in full: its header names this store and the byte where it
  was found, and its payload has its checksum.
- The walk goes on behind what is sound, and one grid block further behind anything else: what an
  old header claims must not hide what was written into its space since, and what looks like a
  header inside a sound payload is no header. So nothing sound overlaps anything sound.
- Every size that was read is bounded before it is used; memory does not grow with the region.
"""

import errno
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from kvtier.errors import DeviceError, FormatError, VersionMismatch
from kvtier.io.alignment import GRID_BYTES, align_down, align_up
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, ByteArray, Device
from kvtier.io.extent import Extent
from kvtier.io.region import Region
from kvtier.tiering import extent_format, record_format, slab_format, slab_limits
from kvtier.tiering.extent_format import DIRECTORY_ENTRY, HEADER_BYTES, ExtentHeader
from kvtier.tiering.geometry import (
    HEADS_MAX,
    ITEM_BYTES,
    LAYERS_MAX,
    PAYLOAD_BYTES_MAX,
    SEGMENT_PAGES,
    SEGMENT_TOKENS,
)
from kvtier.tiering.page_layout import PageLayout
from kvtier.tiering.rebuild_slabs import FoundSlab, header_copies
from kvtier.tiering.record_format import RECORD_BYTES_MAX, Record
from kvtier.tiering.slab_format import Slab, SlabIdentity

PIECE_BYTES = 1 << 20
"""Bytes of one request of a batch."""
WINDOW_BYTES = 8 * PIECE_BYTES
"""Bytes that are in memory at once: eight requests keep a drive busy."""
HEADER_BYTES_MAX = align_up(
    HEADER_BYTES + HEADS_MAX * SEGMENT_PAGES * DIRECTORY_ENTRY.itemsize + 4 * SEGMENT_TOKENS,
    GRID_BYTES,
)
assert max(HEADER_BYTES_MAX, RECORD_BYTES_MAX) <= WINDOW_BYTES
GENERATION_MAX = 2**63 - 1

HERE = "this extent"
_BLOCK_WORDS = GRID_BYTES // 8


def _word(magic: bytes) -> int:
    return int.from_bytes(magic, "little")


_EXTENT_WORD = _word(extent_format.MAGIC)
_RECORD_WORD = _word(record_format.MAGIC)
_SLAB_WORD = _word(slab_format.MAGIC)


@dataclass(frozen=True, slots=True)
class FoundExtent:
    """An intact header of this store at its place. sound: the payload has its checksum too."""

    header: ExtentHeader
    sound: bool

    @property
    def extent(self) -> Extent:
        return Extent(self.header.identity.device_offset, self.header.identity.extent_bytes)


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A sound record of this store at its place."""

    record: Record
    extent: Extent


@dataclass(frozen=True, slots=True)
class Unusable:
    """Something that begins like a header or a record and is neither. why: in words."""

    offset: int
    why: str


Find = FoundExtent | FoundRecord | FoundSlab | Unusable


class RegionScan:
    """One walk over one region. `finds` goes through it once."""

    def __init__(self, region: Region, base: int = 0) -> None:
        """base: the offset of its drive's first byte on the store's device."""
        self._base = base
        self._end = region.data_end
        self._at = region.data_start
        self._window = _Window(region)
        self._store_uuid = uuid.UUID(region.store_uuid).bytes

    @property
    def bytes_done(self) -> int:
        """How far into the region the walk is."""
        return self._at

    @property
    def bytes_read(self) -> int:
        return self._window.bytes_read

    @property
    def bytes_unreadable(self) -> int:
        """Bytes that the device could not read; they were taken for zeros."""
        return len(self._window.unreadable) * GRID_BYTES

    def finds(self) -> Iterator[Find]:
        """Everything that begins like a header or a record, in the order of the region.

        Raises DeviceError when the device fails as a whole.
        """
        while self._at < self._end:
            memory = self._window.ahead(self._at)
            words = memory.view("<u8")[::_BLOCK_WORDS]
            # Extents lie next to each other, so that a hit is mostly the first block.
            known = (_EXTENT_WORD, _RECORD_WORD, _SLAB_WORD)
            if int(words[0]) not in known:
                hits = np.flatnonzero(np.isin(words, np.array(known, np.uint64)))
                self._at += int(hits[0]) * GRID_BYTES if len(hits) else memory.size
                continue
            find = self._look(int(words[0]))
            if isinstance(find, FoundRecord) or (
                isinstance(find, FoundExtent | FoundSlab) and find.sound
            ):
                self._at = find.extent.end - self._base
            else:
                self._at += GRID_BYTES
            yield find

    def _look(self, word: int) -> Find:
        try:
            if word == _SLAB_WORD:
                return self._slab()
            return self._record() if word == _RECORD_WORD else self._extent()
        except VersionMismatch as error:
            return Unusable(self._base + self._at, f"of format version {error.found}")
        except FormatError as error:
            return Unusable(self._base + self._at, str(error))

    # ---- records ----------------------------------------------------------------------------

    def _record(self) -> FoundRecord:
        """Raises FormatError."""
        size = record_format.record_bytes(self._window.at(self._at, GRID_BYTES))
        if size > self._end - self._at:
            raise FormatError("it ends behind the region")
        offset = self._base + self._at
        record = record_format.parse(self._window.at(self._at, size), offset)
        if record.store_uuid != self._store_uuid:
            raise FormatError("of another store")
        return FoundRecord(record, Extent(offset, size))

    # ---- extents ----------------------------------------------------------------------------

    def _extent(self) -> FoundExtent:
        """Raises FormatError."""
        room = self._end - self._at
        claimed = int(self._window.at(self._at, GRID_BYTES)[12:16].view("<u4")[0])
        size = min(align_up(max(claimed, HEADER_BYTES), GRID_BYTES), HEADER_BYTES_MAX, room)
        header = extent_format.parse_header(self._window.at(self._at, size), HERE)
        identity = header.identity
        if identity.store_uuid != self._store_uuid:
            raise FormatError("of another store")
        if identity.device_offset != self._base + self._at:
            raise FormatError("at another place than it was written to")
        _require_possible(header, room)
        return FoundExtent(header, self._is_whole(header))

    def _is_whole(self, header: ExtentHeader) -> bool:
        """Whether the payload has its checksum, read piece by piece. What the digests hold does not
        matter: they can be made anew."""
        digest = xxhash.xxh3_64(seed=header.identity.generation)
        at, end = self._at + header.header_bytes, self._at + header.identity.extent_bytes
        left = header.payload_bytes
        while at < end:
            piece = self._window.ahead(at)[: end - at]
            if self._window.is_damaged(at, piece.size):
                return False
            digest.update(piece[:left].data)
            left -= min(left, piece.size)
            at += piece.size
        return digest.intdigest() == header.payload_checksum

    # ---- slabs ------------------------------------------------------------------------------

    def _slab(self) -> FoundSlab:
        """Here is the first copy of a header, or the second, if the first is not one any more.

        Raises FormatError.
        """
        start = self._slab_start()
        size = min(slab_limits.HEADERS_BYTES, self._end - start)
        header, _ = slab_format.newest_header(self._window.at(start, size), HERE)
        identity = header.identity
        if identity.store_uuid != self._store_uuid:
            raise FormatError("of another store")
        if identity.device_offset != self._base + start:
            raise FormatError("at another place than it was written to")
        if identity.extent_bytes > self._end - start or header.head_bytes > WINDOW_BYTES:
            raise FormatError("the header of the slab contradicts itself")
        copies = [
            self._base + each for each in header_copies(start) if self._is_copy(each, identity)
        ]
        head = self._window.at(start, header.head_bytes)
        slab = slab_format.parse_directory(header, head, HERE)
        sound = all(self._is_intact(slab, entry) for entry in np.flatnonzero(header.live).tolist())
        return FoundSlab(slab, sound, copies)

    def _slab_start(self) -> int:
        """Where the slab begins whose header is here. Raises FormatError."""
        try:
            header = slab_format.parse_header(self._window.at(self._at, GRID_BYTES), HERE)
        except FormatError:
            # The copy behind it may be intact.
            return self._at
        behind = header.identity.device_offset == self._base + self._at - GRID_BYTES
        return self._at - GRID_BYTES if behind else self._at

    def _is_copy(self, offset: int, identity: SlabIdentity) -> bool:
        try:
            header = slab_format.parse_header(self._window.at(offset, GRID_BYTES), HERE)
        except FormatError:
            return False
        return header.identity == identity

    def _is_intact(self, slab: Slab, entry: int) -> bool:
        """Whether a Blob has its checksum, read piece by piece."""
        identity = slab.header.identity
        digest = slab_format.BlobHash(identity.fingerprint, slab.keys[entry], identity.generation)
        offset, length, checksum, *_ = slab.directory[entry].tolist()
        at = identity.device_offset - self._base + offset
        end = at + length
        while at < end:
            block = align_down(at, GRID_BYTES)
            piece = self._window.ahead(block)[at - block :][: end - at]
            if self._window.is_damaged(block, at - block + piece.size):
                return False
            digest.update(piece.data)
            at += piece.size
        return digest.checksum == int(checksum)


def _require_possible(header: ExtentHeader, room: int) -> None:
    """Raise FormatError unless the header is one that a writer of this release makes."""
    identity, shape = header.identity, header.geometry
    stored = 0 if header.tokens is None else len(header.tokens)
    layout = PageLayout(shape, identity.token_count, ITEM_BYTES[header.dtype])
    directory_end = HEADER_BYTES + header.directory.nbytes
    if (
        not 1 <= header.layers <= LAYERS_MAX
        or identity.layer >= header.layers
        or stored != (identity.token_count if identity.layer == 0 else 0)
        or header.header_bytes != align_up(directory_end + 4 * stored, GRID_BYTES)
        or header.payload_bytes != shape.kv_heads * layout.head_bytes
        or identity.extent_bytes != header.digests_at + align_up(header.digests.nbytes, GRID_BYTES)
        or identity.extent_bytes > room
        or header.payload_bytes > PAYLOAD_BYTES_MAX
        or not 0 < identity.generation <= GENERATION_MAX
    ):
        raise FormatError("the extent header contradicts itself")
    layout.require_raw(header.directory, HERE)
    layout.order_of(header.directory)


class _Window:
    """The piece of the region that is in memory; it moves to wherever is read."""

    def __init__(self, region: Region) -> None:
        self._device: Device = region.device
        self._region = region
        self._memory = aligned_bytes(WINDOW_BYTES)
        self._start = self._past = 0
        self.bytes_read = 0
        self.unreadable: set[int] = set()
        """Offsets of grid blocks."""

    def at(self, offset: int, length: int) -> ByteArray:
        """These bytes, valid until the next call. length: at most WINDOW_BYTES."""
        if not self._start <= offset or offset + length > self._past:
            self._move(offset)
        return self._memory[offset - self._start :][:length]

    def ahead(self, offset: int) -> ByteArray:
        """What is in memory from this grid block on: one block at least. Valid until the next
        call."""
        if not self._start <= offset < self._past:
            self._move(offset)
        return self._memory[offset - self._start : self._past - self._start]

    def is_damaged(self, offset: int, length: int) -> bool:
        """Whether a block of these could not be read."""
        return bool(self.unreadable) and not self.unreadable.isdisjoint(
            range(offset, offset + length, GRID_BYTES)
        )

    def _move(self, offset: int) -> None:
        length = min(WINDOW_BYTES, self._region.data_end - offset)
        starts = np.arange(0, length, PIECE_BYTES, dtype=np.int64)
        lengths = np.minimum(PIECE_BYTES, length - starts)
        # Until all is read, nothing in memory is of any place.
        self._start = self._past = 0
        failed: list[int] = []
        try:
            self._device.read(offset + starts, Buffers(self._memory, starts, lengths))
        except DeviceError as error:
            if not error.failures:
                raise
            failed = [index for index, _ in error.failures]
        for index in failed:
            self._read_blocks(offset, int(starts[index]), int(lengths[index]))
        self.bytes_read += length
        self._start, self._past = offset, offset + length

    def _read_blocks(self, offset: int, start: int, length: int) -> None:
        """Read a piece block by block, so that only what is bad is missing, and is zeros."""
        starts = np.arange(start, start + length, GRID_BYTES, dtype=np.int64)
        lengths = np.full(len(starts), GRID_BYTES, np.int64)
        try:
            self._device.read(offset + starts, Buffers(self._memory, starts, lengths))
        except DeviceError as error:
            if not error.failures:
                raise
            self._require_device(error)
            for index, _ in error.failures:
                at = int(starts[index])
                self._memory[at : at + GRID_BYTES] = 0
                self.unreadable.add(offset + at)

    def _require_device(self, error: DeviceError) -> None:
        """Raise the error if not even the superblock can be read: then the device is gone."""
        block = aligned_bytes(GRID_BYTES)
        try:
            self._device.read(np.zeros(1, np.int64), Buffers.whole(block))
        except DeviceError:
            raise DeviceError(
                f"{self._region.path} can not be read any more: {error}. Nothing was changed",
                error.errno or errno.EIO,
            ) from error
