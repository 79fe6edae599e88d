"""Extents of Segments on the device: read back and checked. `extent_writer.py` writes them.

Invariants:
- Bytes are handed out only after the header named the expected Extent and the payload had its
  checksum. What fails is marked as quarantined and is never handed out again.
- All bytes between memory and device pass through one bounded, aligned buffer pool.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch

from kvtier.errors import ChecksumMismatch, DeviceError, FormatError
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.io.buffers import BufferPool
from kvtier.io.device import Buffers, ByteArray, Device, Int64Array
from kvtier.io.extent import Extent
from kvtier.tiering import extent_format
from kvtier.tiering.costs import DriveFlow
from kvtier.tiering.drive_space import DriveSpace
from kvtier.tiering.extent_format import ExtentIdentity
from kvtier.tiering.findings import place
from kvtier.tiering.geometry import SEGMENT_TOKENS, Geometry, pages_of
from kvtier.tiering.packing import TORCH_DTYPES
from kvtier.tiering.page_layout import PageLayout
from kvtier.tiering.segment import Segment
from kvtier.tiering.steps import Pause, Read, Reading, Steps, whole

if TYPE_CHECKING:
    from kvtier.tiering.units import Units

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
class UnitShape:
    """What follows from a unit's layer and its count of tokens alone, worked out once: every read
    asks for it. pages: of one kv head. frames: of all of them."""

    layout: PageLayout
    heads: int
    pages: int
    frames: int
    frames_bytes: int
    header_bytes: int
    payload_bytes: int

    @property
    def digests_at(self) -> int:
        """Where in an Extent its digests begin, if it has some."""
        return self.header_bytes + align_up(self.payload_bytes, GRID_BYTES)

    @classmethod
    def of(cls, geometry: Geometry, layer: int, tokens: int) -> Self:
        heads, pages = geometry.layers[layer].kv_heads, pages_of(tokens)
        return cls(
            PageLayout(geometry.layers[layer], tokens, geometry.item_bytes),
            heads,
            pages,
            heads * pages,
            geometry.frames_bytes(layer, tokens),
            extent_format.header_bytes(geometry, layer, tokens),
            geometry.payload_bytes(layer, tokens),
        )


class Sizes(NamedTuple):
    """Of units, what their UnitShapes say, and the bytes of their Extents without digests: int64
    [units] each."""

    frames: Int64Array
    frames_bytes: Int64Array
    header_bytes: Int64Array
    payload_bytes: Int64Array
    extent_bytes: Int64Array


@dataclass(slots=True)
class Counters:
    """What moved since the store was opened."""

    bytes_read: int = 0
    damaged_extents: int = 0
    damaged_digests: int = 0
    """Units whose digests were damaged, and made anew."""
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


def _nothing_on_its_way(units: Sequence[Unit]) -> None:
    """What `finish_writes` does for who only reads."""


def _seen_enough(unit: Unit, header: ByteArray) -> None:
    """What `checking_headers` does for who wants to know no more than that they are right."""


def starts_of(lengths: Int64Array) -> Int64Array:
    """Where pieces of these lengths begin that lie one behind the other."""
    starts: Int64Array = lengths.cumsum() - lengths
    return starts


class ExtentIO:
    """Reads units, and knows what their Extents look like. Callers hold the store's lock."""

    def __init__(
        self,
        geometry: Geometry,
        owner: Owner,
        device: Device,
        space: DriveSpace,
        buffers: BufferPool,
    ) -> None:
        self.geometry = geometry
        self.owner = owner
        self.device = device
        self.space = space
        self.buffers = buffers
        self.counters = Counters()
        self.flow = DriveFlow()
        self.finish_writes: Callable[[Sequence[Unit]], None] = _nothing_on_its_way
        """Called before units are read: ExtentWriter.finish, where a store also writes."""
        self.blocking = Reading(buffers, BATCH_BYTES)
        """How callers read that wait with the store's lock."""
        self._shapes: dict[tuple[int, int], UnitShape] = {}
        """By layer and tokens."""
        layers = len(geometry.layers)
        self._sizes = np.zeros((len(Sizes._fields), layers, SEGMENT_TOKENS + 1), np.int64)
        """[Sizes, layers, tokens]; 0: not worked out yet."""

    def shape(self, unit: Unit) -> UnitShape:
        key = unit.layer, unit.segment.token_count
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = UnitShape.of(self.geometry, *key)
        return shape

    def sizes(self, units: Units) -> Sizes:
        """Of each of these units."""
        found = units.sizes
        if found is None:
            found = self._sizes[:, units.layers, units.tokens]
            if not found[0].all():
                self._work_out({*units.tokens[found[0] == 0].tolist()})
                found = self._sizes[:, units.layers, units.tokens]
            units.sizes = found
        return Sizes(*found)

    def _work_out(self, counts: set[int]) -> None:
        """Sizes of units of Segments of so many tokens."""
        for tokens in counts:
            for layer in range(len(self.geometry.layers)):
                shape = UnitShape.of(self.geometry, layer, tokens)
                self._sizes[:, layer, tokens] = (
                    *(shape.frames, shape.frames_bytes, shape.header_bytes, shape.payload_bytes),
                    extent_format.extent_bytes(self.geometry, layer, tokens),
                )

    def layout(self, unit: Unit) -> PageLayout:
        return self.shape(unit).layout

    def extent(self, unit: Unit) -> Extent:
        """Where a unit lies that is on the device (`require_written`)."""
        extent = unit.segment.extents[unit.layer]
        assert extent is not None
        return extent

    def identity(self, unit: Unit) -> ExtentIdentity:
        """What the header of this unit's Extent says."""
        segment, extent = unit.segment, self.extent(unit)
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

    def typed(self, payload: ByteArray) -> torch.Tensor:
        """Bytes of Pages as numbers of the store's dtype."""
        return torch.from_numpy(payload).view(TORCH_DTYPES[self.geometry.dtype])

    def require_written(self, units: Units) -> None:
        """Have units on the device that are about to be read: what is on its way there arrives.

        Raises DeviceError where the device did not take one.
        """
        self.finish_writes(units)
        extents = units.extents()
        if not all(extents):
            raise self.not_written(units[extents.index(None)])

    def not_written(self, unit: Unit) -> DeviceError:
        """The error of who needs a unit whose write failed."""
        error = unit.segment.write_error
        start, end = unit.segment.start, unit.segment.start + unit.segment.token_count
        return DeviceError(
            f"layer {unit.layer} of tokens {start} to {end} is not on {self.device.path}, which "
            f"did not take its bytes: {error}. Other segments are not concerned; compute these "
            "tokens anew",
            getattr(error, "errno", None) or errno.EIO,
        )

    # ---- reading ----------------------------------------------------------------------------

    def knows_header(self, unit: Unit) -> bool:
        """Whether a unit can be checked without its header: this process wrote it, or has checked
        it before. Its payload's checksum is bound to the Segment's generation, so that nothing
        else can lie in its place unnoticed."""
        return unit.segment.payload_checksums[unit.layer] != 0

    def unknown_headers(self, units: Units) -> list[int]:
        """Indices of those whose headers are not known."""
        layers = units.layers.tolist()
        sums = [
            segment.payload_checksums[layer]
            for segment, layer in zip(units.segments, layers, strict=True)
        ]
        return [] if all(sums) else [index for index, known in enumerate(sums) if not known]

    def check(self, unit: Unit, header: ByteArray | None, payload: Sequence[ByteArray]) -> None:
        """Require that a unit's bytes are what they should be, and note what its header says.

        header: None where it is known. payload: its bytes in pieces. Raises FormatError
        (ChecksumMismatch among them).
        """
        if header is not None:
            self._learn(unit, header)
        segment = unit.segment
        found = extent_format.checksum_of_pieces(payload, segment.generation)
        if found != segment.payload_checksums[unit.layer]:
            raise self.payload_damaged(unit)

    def payload_damaged(self, unit: Unit) -> ChecksumMismatch:
        """The error of who read a payload that has not its checksum."""
        return ChecksumMismatch(f"{self.where(unit)}: the payload is damaged")

    def _learn(self, unit: Unit, block: ByteArray) -> None:
        """The header of a committed Extent, once it is the one expected."""
        segment, layer, layout = unit.segment, unit.layer, self.layout(unit)
        tokens = segment.named_tokens
        checksum = extent_format.checksum_in_plain_header(
            block, self.identity(unit), self.geometry, layout.plain, tokens
        )
        if checksum is not None:
            order = None
        else:
            where = self.where(unit)
            header = extent_format.parse_header(block, where)
            extent_format.require_identity(header, self.identity(unit), where)
            if header.tokens is not None and (header.tokens != tokens).any():
                raise ChecksumMismatch(f"{where}: its tokens are not those of the catalog")
            layout.require_raw(header.directory, where)
            order = layout.order_of(header.directory)
            checksum = header.payload_checksum
        segment.orders[layer] = order
        segment.payload_checksums[layer] = checksum

    def blame_damaged(self, unit: Unit, error: FormatError) -> None:
        """Count and mark a unit whose bytes are not what they should be."""
        self.counters.damaged_extents += 1
        unit.segment.quarantined = unit.segment.damaged = True
        _log.error("quarantined: %s", error)

    def blame_unread(self, failures: Sequence[tuple[Unit, int]]) -> DeviceError:
        """Mark units that cannot be read, with the errno of each; the error to raise for them."""
        self.counters.failed_reads += 1
        for unit, number in failures:
            unit.segment.quarantined = True
            where, why = self.where(unit), os.strerror(number)
            _log.error("not used until the store is opened again: %s: %s", where, why)
        unit, number = failures[0]
        return DeviceError(
            f"{len(failures)} units of {self.device.path} cannot be read; the first is "
            f"{self.where(unit)}: {os.strerror(number)}. Compute their tokens anew",
            number,
            [(index, each) for index, (_, each) in enumerate(failures)],
        )

    def where(self, unit: Unit) -> str:
        """A unit's place in words, for messages."""
        return f"layer {unit.layer} at {place(self.device, self.extent(unit).offset)}"

    def checking_headers(
        self,
        units: Sequence[Unit],
        reading: Reading,
        seen: Callable[[Unit, ByteArray], None] = _seen_enough,
    ) -> Steps[None]:
        """Read the headers of committed units and require that each is what it should be.

        seen: called with each that is, whose bytes are gone afterwards. Raises DeviceError, or
        FormatError after marking what failed as quarantined.
        """
        while units:
            some, units = units[: reading.units_max], units[reading.units_max :]
            yield from self._checking_headers(some, reading, seen)

    def _checking_headers(
        self, units: Sequence[Unit], reading: Reading, seen: Callable[[Unit, ByteArray], None]
    ) -> Steps[None]:
        sizes = [self.shape(each).header_bytes for each in units]
        for chosen in batches(sizes, reading.batch_bytes):
            part = units[chosen]
            lengths = np.array(sizes[chosen], np.int64)
            starts = starts_of(lengths)
            offsets = np.array([self.extent(each).offset for each in part], np.int64)
            piece = yield from reading.piece(int(lengths.sum()))
            try:
                read = Read(offsets, Buffers(piece.memory, starts, lengths), piece.used_by)
                try:
                    yield from whole(read)
                except DeviceError as error:
                    if not error.failures:
                        raise
                    raise self.blame_unread([(part[i], n) for i, n in error.failures]) from error
                for index, unit in enumerate(part):
                    yield Pause.SHORT
                    start = int(starts[index])
                    header = piece.memory[start : start + sizes[chosen][index]]
                    try:
                        self._learn(unit, header)
                    except FormatError as error:
                        self.blame_damaged(unit, error)
                        raise
                    seen(unit, header)
            finally:
                piece.give_back()
