"""Reads Extents from end to end and says what is wrong with each: for `verify` and `scrub`.

Invariants:
- It shares the format's parser with the read path, and nothing else: no tier, no lock, no torch.
- Bytes pass through one buffer of its own, as large as the largest Extent so far, in pieces, so
  that nobody else waits long for the device.
"""

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from kvtier.errors import DeviceError, FormatError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.buffers import aligned_bytes
from kvtier.io.catalog import SegmentRow
from kvtier.io.device import Buffers, ByteArray, Device, Int64Array, Priority
from kvtier.io.drives import MissingDrive
from kvtier.io.extent import Extent
from kvtier.io.superblock import DATA_START, SUPERBLOCK_BYTES, copy_offsets
from kvtier.tiering import digest_section, extent_format, record_format
from kvtier.tiering.catalog_rows import extents_of
from kvtier.tiering.digest_section import DigestHead
from kvtier.tiering.extent_format import ExtentHeader, ExtentIdentity
from kvtier.tiering.findings import DIGESTS, MEDIA, PADDING, RECORD, Finding, Report, place
from kvtier.tiering.geometry import ITEM_BYTES
from kvtier.tiering.page_layout import PageLayout
from kvtier.tiering.record_format import Record

PIECE_BYTES = 1 << 20
"""Bytes of one read: a demand read waits for no more than this, and a rate is kept evenly."""
BLOCKS_NAMED_MAX = 4
"""Unreadable blocks that a finding names one by one."""
HERE = "this extent"
"""Stands for an Extent in the parser's messages, and is cut off them."""

Found = tuple[str, str]
"""Kind of a finding, and what it is in words."""

_log = logging.getLogger("kvtier")


def without_place(error: Exception, place_words: str) -> str:
    """The error's text without the place it begins with: a finding names its place already."""
    return str(error).removeprefix(place_words).lstrip(": ")


def at_once(nbytes: int) -> None:
    """The pace of a check that need not spare anybody."""


class ExtentChecker:
    """Checks Extents of one device, and counts in `report` what was read."""

    def __init__(
        self,
        device: Device,
        store_uuid: str,
        report: Report,
        pace: Callable[[int], None] = at_once,
    ) -> None:
        """pace: called with the bytes of each read before it, to hold the walk to a rate."""
        self.device = device
        self.report = report
        self.store_uuid = store_uuid
        self._store_uuid = uuid.UUID(store_uuid).bytes
        self._pace = pace
        self._memory = aligned_bytes(0)

    def check_segment(self, row: SegmentRow, fingerprint: bytes) -> list[Finding]:
        """Everything that is wrong with the Extents of a Segment. The row must be sound."""
        layers = range(self.count_segment(row))
        return [each for layer in layers for each in self.check_extent(row, fingerprint, layer)]

    def count_segment(self, row: SegmentRow) -> int:
        """Count a Segment in the report, as checked or as missing; returns its layers."""
        extents = extents_of(row)
        if all(map(self.is_there, extents)):
            self.report.segments_checked += 1
        else:
            self.report.segments_missing += 1
        return len(extents)

    def check_extent(self, row: SegmentRow, fingerprint: bytes, layer: int) -> list[Finding]:
        """Read one Extent from end to end: what is wrong with it. Raises ClosedError."""
        extent = extents_of(row)[layer]
        if not self.is_there(extent):
            return []
        where = f"segment {row.id}, layer {layer}, {place(self.device, extent.offset)}"
        found = self._extent_findings(row, fingerprint, layer, extent)
        return [Finding(kind, where, what) for kind, what in found]

    def _extent_findings(
        self, row: SegmentRow, fingerprint: bytes, layer: int, extent: Extent
    ) -> list[Found]:
        outside = self.outside(extent)
        if outside is not None:
            return [("region", outside)]
        identity = ExtentIdentity(
            store_uuid=self._store_uuid,
            fingerprint=fingerprint,
            provenance=row.provenance,
            start_digest=row.start_digest,
            end_digest=row.end_digest,
            generation=row.generation,
            start_position=row.start_position,
            token_count=row.token_count,
            layer=layer,
            device_offset=extent.offset,
            extent_bytes=extent.length,
        )
        try:
            block = self.read(extent)
        except DeviceError as error:
            return [(MEDIA, without_place(error, self.device.path))]
        self.report.extents_checked += 1
        return list(self._block_findings(block, identity, row.tokens))

    def _block_findings(
        self, block: ByteArray, identity: ExtentIdentity, tokens: bytes
    ) -> Iterator[Found]:
        """What is wrong with the bytes of one Extent, the last one included."""
        try:
            header = extent_format.parse_header(block, HERE)
            extent_format.require_identity(header, identity, HERE)
            layout = PageLayout(header.geometry, identity.token_count, ITEM_BYTES[header.dtype])
            layout.require_raw(header.directory, HERE)
            layout.order_of(header.directory)
        except FormatError as error:
            yield "header", without_place(error, HERE)
            return
        if header.tokens is not None and header.tokens.tobytes() != tokens:
            yield "tokens", "its tokens are not those of the catalog"
        yield from self._payload_findings(block, header)
        yield from self._digest_findings(block, header)
        payload_end = header.header_bytes + header.payload_bytes
        digests_end = header.digests_at + header.digests.nbytes
        for start, end in ((payload_end, header.digests_at), (digests_end, block.size)):
            if block[start:end].any():
                yield PADDING, self.not_zeros(block[:end], start, identity.device_offset)

    def _payload_findings(self, block: ByteArray, header: ExtentHeader) -> Iterator[Found]:
        payload = block[header.header_bytes :][: header.payload_bytes]
        generation = header.identity.generation
        damaged = extent_format.damaged_pages(header.directory, payload, generation)
        self.report.pages_checked += len(header.directory)
        if damaged:
            pages = ", ".join(map(str, damaged))
            yield "page", f"damaged pages: {pages} ({len(damaged)} of {len(header.directory)})"
        elif extent_format.checksum(payload, generation) != header.payload_checksum:
            yield "extent", "its payload is damaged"

    def _digest_findings(self, block: ByteArray, header: ExtentHeader) -> Iterator[Found]:
        if not header.digests.nbytes:
            return
        section, identity = block[header.digests_at :], header.identity
        try:
            found = digest_section.parse(section, identity.generation, HERE)
        except FormatError as error:
            yield DIGESTS, without_place(error, HERE)
            return
        if found != DigestHead(header.digests, identity.layer, identity.token_count):
            yield DIGESTS, "its digests are not what its header says"

    def check_record(self, extent: Extent, expected: Record, whose: str) -> list[Finding]:
        """Whether a record lies where the catalog says, and repeats what the catalog says.

        expected: with as much of the body as must be there. whose: in words.
        """
        if not self.is_there(extent):
            return []
        where = f"{whose}, {place(self.device, extent.offset)}"
        outside = self.outside(extent)
        if outside is not None:
            return [Finding("region", where, outside)]
        try:
            block = self.read(extent)
        except DeviceError as error:
            return [Finding(MEDIA, where, without_place(error, self.device.path))]
        try:
            found = record_format.parse(block, extent.offset)
        except FormatError as error:
            return [Finding(RECORD, where, str(error))]
        said = {key: found.body.get(key) for key in expected.body}
        if replace(found, body=said) != expected:
            return [Finding(RECORD, where, "its record says something else than the catalog")]
        return []

    def check_reserved(self, start: int, region_bytes: int) -> None:
        """Report bytes before the data window that belong to no superblock and are not zeros.

        start: of the region, in bytes of the device.
        """
        path = self.device.locate(start)[0].path
        try:
            block = self.read(Extent(start, DATA_START)).copy()
        except DeviceError as error:
            self.report.add(MEDIA, path, without_place(error, path))
            return
        for offset in copy_offsets(region_bytes)[:2]:
            block[offset : offset + SUPERBLOCK_BYTES] = 0
        if block.any():
            self.report.add(PADDING, path, self.not_zeros(block, 0, start))

    def is_there(self, extent: Extent) -> bool:
        """Whether the drive that an Extent lies on is there. What lies on another is not checked:
        that the drive is missing is said once."""
        return not isinstance(self.device.locate(extent.offset)[0], MissingDrive)

    def outside(self, extent: Extent) -> str | None:
        """Why an Extent cannot be there as a whole, in words; None: its drive is long enough."""
        drive, byte = self.device.locate(extent.offset)
        end = byte + extent.length
        if end <= drive.capacity_bytes:
            return None
        return f"it ends at byte {end}, the region at {drive.capacity_bytes}"

    def not_zeros(self, block: ByteArray, start: int, offset: int) -> str:
        """block[start:] holds something; `offset` is where the block lies on the device."""
        held = np.flatnonzero(block[start:])
        _, first = self.device.locate(offset + start + int(held[0]))
        return f"{len(held)} bytes that must be zeros are not, the first at byte {first}"

    # ---- reading ----------------------------------------------------------------------------

    def read(self, extent: Extent) -> ByteArray:
        """The bytes of an Extent, valid until the next read. Raises DeviceError that names the
        blocks which cannot be read, whatever can be read around them."""
        if self._memory.size < extent.length:
            self._memory = aligned_bytes(extent.length)
        block = self._memory[: extent.length]
        failures: list[tuple[int, int]] = []
        for start in range(0, extent.length, PIECE_BYTES):
            piece = block[start : start + PIECE_BYTES]
            self._pace(piece.size)
            self.report.bytes_read += piece.size
            failures += self._read_piece(extent.offset + start, piece)
        if failures:
            raise DeviceError(self._unreadable(failures), failures[0][1], failures)
        return block

    def _read_piece(self, offset: int, piece: ByteArray) -> list[tuple[int, int]]:
        """(byte, errno) of every grid block of a piece that cannot be read."""
        try:
            whole = Buffers.whole(piece)
            self.device.read(np.array([offset], np.int64), whole, Priority.SCRUB)
        except DeviceError as error:
            if not error.failures:
                raise
        else:
            return []
        # A large read fails as a whole; block by block, only what is bad fails.
        starts: Int64Array = np.arange(0, piece.size, GRID_BYTES, dtype=np.int64)
        lengths = np.full(len(starts), GRID_BYTES, np.int64)
        try:
            blocks = Buffers(piece, starts, lengths)
            self.device.read(offset + starts, blocks, Priority.SCRUB)
        except DeviceError as error:
            if not error.failures:
                raise
            return [(offset + int(starts[index]), number) for index, number in error.failures]
        _log.warning("%s could be read only at the second attempt", place(self.device, offset))
        return []

    def _unreadable(self, failures: list[tuple[int, int]]) -> str:
        places = [self.device.locate(offset) for offset, _ in failures[:BLOCKS_NAMED_MAX]]
        named = ", ".join(
            f"byte {byte} (block {byte // drive.block_bytes})" for drive, byte in places
        )
        more = len(failures) - BLOCKS_NAMED_MAX
        return (
            f"{len(failures)} pieces of {GRID_BYTES} bytes cannot be read "
            f"({os.strerror(failures[0][1])}): {named}{f' and {more} more' if more > 0 else ''}"
        )
