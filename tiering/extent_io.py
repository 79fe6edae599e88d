"""Extents of Segments on the device: written, headed, read back and checked.

Invariants:
- A payload is on the device before its header; a header is written only when its Segment is
  about to be committed. An Extent without a header belongs to nobody after a crash.
- Bytes are handed out only after the header named the expected Extent and the payload had its
  checksum. What fails is marked as quarantined and is never handed out again.
- All bytes between memory and device pass through one bounded, aligned buffer pool.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.errors import ChecksumMismatch, DeviceError, FormatError
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.io.allocator import ExtentAllocator
from kvtier.io.buffers import BufferPool
from kvtier.io.device import Buffers, ByteArray, Device, Int64Array
from kvtier.io.extent import Extent
from kvtier.tiering import extent_format
from kvtier.tiering.extent_format import ExtentHeader, ExtentIdentity
from kvtier.tiering.geometry import SEGMENT_TOKENS, Geometry
from kvtier.tiering.packing import TORCH_DTYPES, Placement, pack
from kvtier.tiering.page_layout import PageLayout
from kvtier.tiering.segment import Segment

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


def batches(sizes: Sequence[int]) -> Iterator[slice]:
    """Cut a list of sizes in bytes into runs of at most BATCH_BYTES, or of one."""
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and total + size > BATCH_BYTES:
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
        allocator: ExtentAllocator,
        buffers: BufferPool,
        placement: Placement,
    ) -> None:
        self.geometry = geometry
        self.owner = owner
        self.device = device
        self.allocator = allocator
        self.buffers = buffers
        self.placement = placement
        self.counters = Counters()

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
        try:
            for part in batches(sizes):
                self._write_batch(writes[part])
        except BaseException:
            for each in writes:
                self._unwrite(each.unit)
            raise

    def _unwrite(self, unit: Unit) -> None:
        """Forget what a failed write noted: Frames of this unit are still in position order."""
        extent = unit.segment.extents[unit.layer]
        if extent is not None:
            self.allocator.free(extent)
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
                extents.append(self.allocator.allocate(head + length))
            with self.buffers.lease(int(lengths.sum())) as memory:
                for index, each in enumerate(writes):
                    start, payload = int(starts[index]), payloads[index]
                    memory[start + payload : start + int(lengths[index])] = 0
                    self._fill(each, memory[start : start + payload])
                offsets = np.array([extent.offset for extent in extents], np.int64) + heads
                self.device.write(offsets, Buffers(memory, starts, lengths))
                self.counters.bytes_written += memory.size
        except BaseException:
            for extent in extents:
                self.allocator.free(extent)
            raise
        for each, extent in zip(writes, extents, strict=True):
            each.unit.segment.extents[each.unit.layer] = extent

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
                self.device.write(offsets, Buffers(memory, starts, lengths))
                self.counters.bytes_written += memory.size

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

    def free(self, segment: Segment) -> None:
        """Give back the Extents of a Segment that the catalog does not name."""
        assert segment.catalog_id is None
        for layer, extent in enumerate(segment.extents):
            if extent is not None:
                self.allocator.free(extent)
                segment.extents[layer] = None

    # ---- reading ----------------------------------------------------------------------------

    @contextmanager
    def read(self, units: Sequence[Unit]) -> Iterator[Iterator[torch.Tensor]]:
        """Payloads of written units, checked one by one as they are taken, valid in the block.

        Reads all of them as one batch, which must fit the buffer pool (`batches`). Raises
        DeviceError, or FormatError (ChecksumMismatch among them) where a payload is taken.
        """
        extents = [unit.segment.extents[unit.layer] for unit in units]
        lengths = np.array([each.length for each in extents if each], np.int64)
        offsets = np.array([each.offset for each in extents if each], np.int64)
        assert len(lengths) == len(units)
        starts = _starts(lengths)
        with self.buffers.lease(int(lengths.sum())) as memory:
            self._read(units, offsets, Buffers(memory, starts, lengths))
            self.counters.bytes_read += memory.size
            yield (
                self._typed(self._checked(unit, memory[start : start + length]))
                for unit, start, length in zip(
                    units, starts.tolist(), lengths.tolist(), strict=True
                )
            )

    @contextmanager
    def _blaming(self, unit: Unit) -> Iterator[None]:
        """Counts and marks a unit whose bytes are not what they should be."""
        try:
            yield
        except FormatError:
            self.counters.damaged_extents += 1
            unit.segment.quarantined = True
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
        return f"layer {unit.layer} at byte {extent.offset} of {self.device.path}"

    def check_headers(self, units: Sequence[Unit]) -> None:
        """Read the headers of committed units and require that each is what it should be.

        Raises DeviceError, or FormatError after marking what failed as quarantined.
        """
        sizes = [
            extent_format.header_bytes(self.geometry, each.layer, each.segment.token_count)
            for each in units
        ]
        for chosen in batches(sizes):
            part = units[chosen]
            lengths = np.array(sizes[chosen], np.int64)
            starts = _starts(lengths)
            offsets = np.array([self.identity(each).device_offset for each in part], np.int64)
            with self.buffers.lease(int(lengths.sum())) as memory:
                self._read(part, offsets, Buffers(memory, starts, lengths))
                for unit, start, length in zip(
                    part, starts.tolist(), lengths.tolist(), strict=True
                ):
                    self._check_header(unit, memory[start : start + length])

    def _read(self, units: Sequence[Unit], offsets: Int64Array, buffers: Buffers) -> None:
        """Read one piece of every unit; those that cannot be read are marked before it raises."""
        try:
            self.device.read(offsets, buffers)
        except DeviceError as error:
            self.counters.failed_reads += 1
            for index, _ in error.failures:
                units[index].segment.quarantined = True
            raise

    def _check_header(self, unit: Unit, block: ByteArray) -> None:
        where = self.where(unit)
        with self._blaming(unit):
            self._header(unit, block, where)
