"""Extents of Segments on the device: written, headed, read back and checked.

Invariants:
- A payload is on the device before its header; a header is written only when its Segment is
  about to be committed. An Extent without a header belongs to nobody after a crash.
- Bytes are handed out only after the header named the expected Extent and the payload had its
  checksum. What fails is marked as quarantined and is never handed out again.
- All bytes between memory and device pass through one bounded, aligned buffer pool.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.errors import ChecksumMismatch, DeviceError, FormatError
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.io.buffers import BufferPiece, BufferPool
from kvtier.io.device import Buffers, ByteArray, Device, Int64Array
from kvtier.io.extent import Extent
from kvtier.tiering import extent_format
from kvtier.tiering.drive_space import DriveSpace
from kvtier.tiering.extent_format import ExtentHeader, ExtentIdentity
from kvtier.tiering.findings import place
from kvtier.tiering.geometry import SEGMENT_TOKENS, Geometry
from kvtier.tiering.packing import TORCH_DTYPES, Placement, pack
from kvtier.tiering.page_layout import PageLayout
from kvtier.tiering.segment import Segment
from kvtier.tiering.steps import Pause, Read, Reading, Steps, whole

_log = logging.getLogger("kvtier")

BATCH_BYTES = 16 << 20
"""Bytes of one batch of reads or writes: enough to keep a fast drive busy."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose Extents these are: the store's UUID and the fingerprint's digest."""

    store_uuid: bytes
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Unit:
    """One layer of one Segment."""

    segment: Segment
    layer: int


@dataclass(frozen=True, slots=True)
class UnitWrite:
    """A complete unit to be written: keys [heads, tokens, Dk], values [heads, tokens, Dv]."""

    unit: Unit
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


@dataclass(slots=True)
class Counters:
    """What moved since the store was opened."""

    bytes_read: int = 0
    bytes_written: int = 0
    damaged_extents: int = 0
    failed_reads: int = 0


def bounce_bytes(geometry: Geometry) -> int:
    """Bytes of the buffer pool that a store with this geometry needs."""
    layers = range(len(geometry.layers))
    largest = max(extent_format.extent_bytes(geometry, each, SEGMENT_TOKENS) for each in layers)
    return 2 * max(BATCH_BYTES, largest)


def batches(
    sizes: Sequence[int], bytes_max: int | None = None, count_max: int = 1 << 62
) -> Iterator[slice]:
    """Cut a list of sizes in bytes into runs of at most bytes_max (BATCH_BYTES unless given) and
    at most count_max, or of one."""
    bytes_max = BATCH_BYTES if bytes_max is None else bytes_max
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and (total + size > bytes_max or index - first >= count_max):
            yield slice(first, index)
            first, total = index, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def _starts(lengths: Int64Array) -> Int64Array:
    """Where pieces of these lengths begin that lie one behind the other."""
    starts: Int64Array = np.cumsum(lengths) - lengths
    return starts


class ExtentIO:
    """Reads and writes units. Callers hold the store's lock."""

    def __init__(
        self,
        geometry: Geometry,
        owner: Owner,
        device: Device,
        space: DriveSpace,
        buffers: BufferPool,
        placement: Placement,
    ) -> None:
        self.geometry = geometry
        self.owner = owner
        self.device = device
        self.space = space
        self.buffers = buffers
        self.placement = placement
        self.counters = Counters()
        self.blocking = Reading(buffers, BATCH_BYTES)
        """How callers read that wait with the store's lock."""

    def layout(self, unit: Unit) -> PageLayout:
        return PageLayout(
            self.geometry.layers[unit.layer], unit.segment.token_count, self.geometry.item_bytes
        )

    def identity(self, unit: Unit) -> ExtentIdentity:
        """What the header of this unit's Extent says."""
        segment = unit.segment
        extent = segment.extents[unit.layer]
        assert extent is not None
        return ExtentIdentity(
            store_uuid=self.owner.store_uuid,
            fingerprint=self.owner.fingerprint,
            provenance=segment.provenance.text,
            start_digest=segment.start_digest,
            end_digest=segment.end_digest,
            generation=segment.generation,
            start_position=segment.start,
            token_count=segment.token_count,
            layer=unit.layer,
            device_offset=extent.offset,
            extent_bytes=extent.length,
        )

    # ---- writing ----------------------------------------------------------------------------

    def write(self, writes: Sequence[UnitWrite]) -> None:
        """Write the payloads of complete units. Their headers follow at commit.

        On an error none of the units counts as written and their Extents are free again. Raises
        CapacityError, DeviceError.
        """
        sizes = [
            extent_format.extent_bytes(self.geometry, each.unit.layer, each.tokens)
            for each in writes
        ]
        # Before anything is evicted for a part of what does not fit as a whole.
        self.space.require(sum(sizes))
        try:
            for part in batches(sizes):
                self._write_batch(writes[part])
        except BaseException:
            self._unwrite([each.unit for each in writes])
            raise

    def _unwrite(self, units: Sequence[Unit]) -> None:
        """Forget what a failed write noted: Frames of these units are still in position order."""
        written = [unit.segment.extents[unit.layer] for unit in units]
        self.space.free([extent for extent in written if extent is not None])
        for unit in units:
            unit.segment.extents[unit.layer] = None
            unit.segment.orders[unit.layer] = None
            unit.segment.directories[unit.layer] = None

    def _write_batch(self, writes: Sequence[UnitWrite]) -> None:
        geometry = self.geometry
        heads = [
            extent_format.header_bytes(geometry, each.unit.layer, each.tokens) for each in writes
        ]
        payloads = [geometry.payload_bytes(each.unit.layer, each.tokens) for each in writes]
        lengths = np.array([align_up(size, GRID_BYTES) for size in payloads], np.int64)
        starts = _starts(lengths)
        extents: list[Extent] = []
        try:
            for head, length in zip(heads, lengths.tolist(), strict=True):
                extents.append(self.space.allocate(head + length))
            with self.buffers.lease(int(lengths.sum())) as memory:
                for index, each in enumerate(writes):
                    start, payload = int(starts[index]), payloads[index]
                    memory[start + payload : start + int(lengths[index])] = 0
                    self._fill(each, memory[start : start + payload])
                offsets = np.array([extent.offset for extent in extents], np.int64) + heads
                self._write(offsets, Buffers(memory, starts, lengths))
        except BaseException:
            self.space.free(extents)
            raise
        for each, extent in zip(writes, extents, strict=True):
            segment = each.unit.segment
            if not any(segment.extents):
                segment.flush_epoch = self.device.failed_flushes
            segment.extents[each.unit.layer] = extent

    def may_be_lost(self, segment: Segment) -> bool:
        """Whether a flush failed between the first write of an uncommitted Segment and now."""
        written = any(segment.extents) and segment.catalog_id is None
        return written and segment.flush_epoch != self.device.failed_flushes

    def _write(self, offsets: Int64Array, buffers: Buffers) -> None:
        self.space.write(offsets, buffers)
        self.counters.bytes_written += int(buffers.lengths.sum())

    def _fill(self, write: UnitWrite, payload: ByteArray) -> None:
        """Pack one unit into `payload`; note its order, directory and checksum."""
        segment, layer = write.unit.segment, write.unit.layer
        order = self.placement.order(write.keys)
        pack(write.keys, write.values, order, self._typed(payload))
        directory = self.layout(write.unit).directory(order)
        extent_format.checksum_pages(directory, payload, segment.generation)
        segment.directories[layer] = directory
        segment.orders[layer] = order
        segment.payload_checksums[layer] = extent_format.checksum(payload, segment.generation)

    def _typed(self, payload: ByteArray) -> torch.Tensor:
        return torch.from_numpy(payload).view(TORCH_DTYPES[self.geometry.dtype])

    def write_headers(self, segments: Sequence[Segment]) -> None:
        """Write the headers of all Extents of written Segments whose tokens are known."""
        units = [Unit(each, layer) for each in segments for layer in range(each.layers)]
        sizes = [
            extent_format.header_bytes(self.geometry, each.layer, each.segment.token_count)
            for each in units
        ]
        for part in batches(sizes):
            lengths = np.array(sizes[part], np.int64)
            starts = _starts(lengths)
            offsets = np.zeros(len(lengths), np.int64)
            with self.buffers.lease(int(lengths.sum())) as memory:
                for index, unit in enumerate(units[part]):
                    start, length = int(starts[index]), int(lengths[index])
                    identity = self.identity(unit)
                    offsets[index] = identity.device_offset
                    self._write_header(unit, identity, memory[start : start + length])
                self._write(offsets, Buffers(memory, starts, lengths))

    def _write_header(self, unit: Unit, identity: ExtentIdentity, target: ByteArray) -> None:
        segment, layer = unit.segment, unit.layer
        directory = segment.directories[layer]
        assert directory is not None
        extent_format.write_header(
            target,
            identity,
            self.geometry,
            directory,
            segment.payload_checksums[layer],
            segment.named_tokens,
        )

    # ---- reading ----------------------------------------------------------------------------

    def reading(self, units: Sequence[Unit], piece: BufferPiece) -> Steps[list[ByteArray]]:
        """Read the Extents of written units as one batch into `piece`, which is long enough.

        Returns them unchecked, for `payload`. Raises DeviceError.
        """
        extents = [unit.segment.extents[unit.layer] for unit in units]
        lengths = np.array([each.length for each in extents if each], np.int64)
        offsets = np.array([each.offset for each in extents if each], np.int64)
        assert len(lengths) == len(units)
        blocks = yield from self._reading(units, offsets, lengths, piece)
        self.counters.bytes_read += int(lengths.sum())
        return blocks

    def _reading(
        self, units: Sequence[Unit], offsets: Int64Array, lengths: Int64Array, piece: BufferPiece
    ) -> Steps[list[ByteArray]]:
        """Read one piece of every unit; those that cannot be read are marked before it raises."""
        starts = _starts(lengths)
        try:
            yield from whole(Read(offsets, Buffers(piece.memory, starts, lengths), piece))
        except DeviceError as error:
            self.counters.failed_reads += 1
            for index, number in error.failures:
                units[index].segment.quarantined = True
                where, why = self.where(units[index]), os.strerror(number)
                _log.error("not used until the store is opened again: %s: %s", where, why)
            raise
        return [
            piece.memory[start : start + length]
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]

    def payload(self, unit: Unit, block: ByteArray) -> torch.Tensor:
        """The payload in a unit's Extent, once it is what it should be. Raises FormatError
        (ChecksumMismatch among them) after marking the unit as quarantined."""
        return self._typed(self._checked(unit, block))

    @contextmanager
    def _blaming(self, unit: Unit) -> Iterator[None]:
        """Counts and marks a unit whose bytes are not what they should be."""
        try:
            yield
        except FormatError as error:
            self.counters.damaged_extents += 1
            unit.segment.quarantined = unit.segment.damaged = True
            _log.error("quarantined: %s", error)
            raise

    def _checked(self, unit: Unit, block: ByteArray) -> ByteArray:
        with self._blaming(unit):
            return self._payload(unit, block)

    def _payload(self, unit: Unit, block: ByteArray) -> ByteArray:
        segment, layer = unit.segment, unit.layer
        where = self.where(unit)
        layout = self.layout(unit)
        if segment.catalog_id is None:
            # Only a committed Extent has its header on the device; this process wrote the
            # payload itself and remembers what it must be.
            head = extent_format.header_bytes(self.geometry, layer, segment.token_count)
            expected = segment.payload_checksums[layer]
        else:
            header = self._header(unit, block, where)
            layout.require_raw(header.directory, where)
            segment.directories[layer] = header.directory
            segment.orders[layer] = layout.order_of(header.directory)
            head, expected = header.header_bytes, header.payload_checksum
        payload = block[head : head + self.geometry.payload_bytes(layer, segment.token_count)]
        if extent_format.checksum(payload, segment.generation) != expected:
            raise ChecksumMismatch(f"{where}: the payload is damaged")
        return payload

    def _header(self, unit: Unit, block: ByteArray, where: str) -> ExtentHeader:
        """The header of a committed Extent, once it is the one expected."""
        header = extent_format.parse_header(block, where)
        extent_format.require_identity(header, self.identity(unit), where)
        if header.tokens is not None and (header.tokens != unit.segment.named_tokens).any():
            raise ChecksumMismatch(f"{where}: its tokens are not those of the catalog")
        return header

    def where(self, unit: Unit) -> str:
        """A unit's place in words, for messages."""
        extent = unit.segment.extents[unit.layer]
        assert extent is not None
        return f"layer {unit.layer} at {place(self.device, extent.offset)}"

    def checking_headers(self, units: Sequence[Unit], reading: Reading) -> Steps[None]:
        """Read the headers of committed units and require that each is what it should be.

        Raises DeviceError, or FormatError after marking what failed as quarantined.
        """
        while units:
            some, units = units[: reading.units_max], units[reading.units_max :]
            yield from self._checking_headers(some, reading)

    def _checking_headers(self, units: Sequence[Unit], reading: Reading) -> Steps[None]:
        sizes = [
            extent_format.header_bytes(self.geometry, each.layer, each.segment.token_count)
            for each in units
        ]
        for chosen in batches(sizes, reading.batch_bytes):
            part = units[chosen]
            lengths = np.array(sizes[chosen], np.int64)
            offsets = np.array([self.identity(each).device_offset for each in part], np.int64)
            piece = yield from reading.piece(int(lengths.sum()))
            try:
                blocks = yield from self._reading(part, offsets, lengths, piece)
                for unit, block in zip(part, blocks, strict=True):
                    yield Pause.SHORT
                    self._check_header(unit, block)
            finally:
                piece.give_back()

    def _check_header(self, unit: Unit, block: ByteArray) -> None:
        where = self.where(unit)
        with self._blaming(unit):
            self._header(unit, block, where)
