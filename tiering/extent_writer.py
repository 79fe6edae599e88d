"""Extents of Segments on the device: payloads written behind the caller, and headed at commit.

A unit that `write` took has its Extent at once, and its bytes are on their way. Whoever needs them
on the device calls `finish` first: a commit, a reader who does not find them in HOT. What gives an
Extent back waits as well (Ledger.release).

Invariants:
- A payload is on the device before its header; a header is written only when its Segment is
  about to be committed. An Extent without a header belongs to nobody after a crash.
- Digests lie behind the payload and are written with it, in one request; the header tells of them.
- A write that failed is tried once more from memory. A unit that the device does not take has no
  Extent any more, so its Segment is not `written`, and no commit names it. Where HOT has its only
  copy (Residency: not on NVME), nothing is lost, and it can be written anew.
"""

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.errors import DeviceError, KvtierError
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.io.buffers import BufferPiece, BufferPool
from kvtier.io.device import Buffers, ByteArray
from kvtier.io.extent import Extent
from kvtier.kernels.digests import PageDigests
from kvtier.tiering import extent_format
from kvtier.tiering.clusterer import Placement, UnitKeys
from kvtier.tiering.extent_format import NO_DIGESTS, DigestSection, ExtentIdentity
from kvtier.tiering.extent_io import ExtentIO, Unit, batches, starts_of
from kvtier.tiering.geometry import SEGMENT_TOKENS, Geometry
from kvtier.tiering.packing import pack, rearranged
from kvtier.tiering.page_layout import Order
from kvtier.tiering.residency import Residency
from kvtier.tiering.segment import NO_SLOT, Segment
from kvtier.tiering.started_writes import StartedWrite
from kvtier.tiering.stored_digests import DigestKind

_log = logging.getLogger("kvtier")

WRITE_BATCH_BYTES = 4 << 20
"""Bytes of one batch of writes: the next is packed while this one is on its way."""

REFUSED_MAX = 16
"""Extents that are kept from use because the device did not take bytes there. Where it takes none
anywhere, that must not use up the region."""


def write_buffer_bytes(geometry: Geometry, kind: DigestKind | None) -> int:
    """Bytes that may be on their way to the drive at once."""
    layers = range(len(geometry.layers))
    largest = max(stored_bytes(geometry, each, SEGMENT_TOKENS, kind) for each in layers)
    return max(4 * WRITE_BATCH_BYTES, 2 * largest)


def stored_bytes(geometry: Geometry, layer: int, tokens: int, kind: DigestKind | None) -> int:
    """Bytes of the Extent of a unit, on the grid; kind: of the digests that it is written with."""
    plain = extent_format.extent_bytes(geometry, layer, tokens)
    section = NO_DIGESTS if kind is None else kind.section(layer, tokens)
    return plain + align_up(section.nbytes, GRID_BYTES)


@dataclass(frozen=True, slots=True)
class UnitWrite:
    """A complete unit to be written: keys [heads, tokens, Dk], values [heads, tokens, Dv].

    order: of its tokens, where that was made before (is_ordered); else its Placement makes it.
    """

    unit: Unit
    keys: torch.Tensor
    values: torch.Tensor
    order: Order | None = None
    is_ordered: bool = False

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """A unit as it will lie on the drive: rows [heads, tokens, width] in the order of slots, and
    the digests of its Pages, if they are stored."""

    unit: Unit
    order: Order | None
    keys: torch.Tensor
    values: torch.Tensor
    digests: PageDigests | None


class ExtentWriter:
    """Writes units. Callers hold the store's lock."""

    def __init__(
        self,
        extents: ExtentIO,
        residency: Residency,
        placement: Placement,
        digests: DigestKind | None = None,
    ) -> None:
        """digests: which are stored with every unit; None: none."""
        self.extents = extents
        self.geometry = extents.geometry
        self.device = extents.device
        self.space = extents.space
        self.residency = residency
        self.placement = placement
        self.digests = digests
        self.started = extents.space.started
        # Not the pool that reads use: they must not wait for what nobody has looked at yet.
        self.buffers = BufferPool(write_buffer_bytes(extents.geometry, digests))
        self._refused: list[Extent] = []
        self.failed_writes = 0
        """Units whose bytes the device did not take, also when asked once more."""

    # ---- payloads ---------------------------------------------------------------------------

    def write(self, writes: Sequence[UnitWrite]) -> None:
        """Begin to write the payloads of complete units; their headers follow at commit.

        Returns without waiting for the device, but for as much of what was begun before as memory
        needs. On an error none of the units counts as written and their Extents are free again.
        Raises CapacityError, DeviceError.
        """
        sizes = [self.stored_bytes(each.unit.layer, each.tokens) for each in writes]
        # Before anything is evicted for a part of what does not fit as a whole.
        self.space.require(sum(sizes))
        units = [each.unit for each in writes]
        orders = [each.segment.orders[each.layer] for each in units]
        directories = [each.segment.directories[each.layer] for each in units]
        try:
            for part in batches(sizes, WRITE_BATCH_BYTES):
                self._start(writes[part])
        except BaseException:
            # Frames of these units are still in the order they had.
            for unit, order, directory in zip(units, orders, directories, strict=True):
                self._take_back(unit)
                unit.segment.orders[unit.layer] = order
                unit.segment.directories[unit.layer] = directory
            raise

    def stored_bytes(self, layer: int, tokens: int) -> int:
        """Bytes of the Extent of a unit that is written, at most."""
        return stored_bytes(self.geometry, layer, tokens, self.digests)

    def _start(self, writes: Sequence[UnitWrite]) -> None:
        # Before any memory or space is taken, which others may wait for.
        laid_out = self._laid_out(writes)
        shapes = [self.extents.shape(each.unit) for each in laid_out]
        heads = [each.header_bytes for each in shapes]
        lengths = np.array(
            [
                shape.digests_at - shape.header_bytes + self._digest_bytes(each)
                for each, shape in zip(laid_out, shapes, strict=True)
            ],
            np.int64,
        )
        starts = starts_of(lengths)
        extents: list[Extent] = []
        piece = self._piece(int(lengths.sum()))
        try:
            for each, head, length in zip(writes, heads, lengths.tolist(), strict=True):
                drive = self.space.drive_for(each.unit.segment)
                extents.append(self.space.allocate(head + length, drive))
            for laid, start, length in zip(
                laid_out, starts.tolist(), lengths.tolist(), strict=True
            ):
                self._fill(laid, piece.memory[start : start + length])
            offsets = np.array([each.offset for each in extents], np.int64) + heads
            buffers = Buffers(piece.memory, starts, lengths)
            # Taken before the first byte may be on its way: a flush that fails from now on counts.
            epoch = self.device.failed_flushes
            batch = self.device.start_write(offsets, buffers)
        except BaseException:
            piece.give_back()
            self.space.free(extents)
            raise
        piece.used_by(batch)
        units = [each.unit for each in writes]
        self.started.add(StartedWrite(batch, piece, offsets, buffers, units, [*extents]))
        for unit, extent in zip(units, extents, strict=True):
            if not any(unit.segment.extents):
                unit.segment.flush_epoch = epoch
            unit.segment.extents[unit.layer] = extent

    def _laid_out(self, writes: Sequence[UnitWrite]) -> list[_LaidOut]:
        """These units in the orders that the placement chooses, with their digests."""
        orders = self._orders(writes)
        found = []
        for each, order in zip(writes, orders, strict=True):
            keys, values, digests = each.keys, each.values, None
            if order is not None:
                keys, values = rearranged(keys, order), rearranged(values, order)
            if self.digests is not None:
                digests = self.digests.make_if_possible(each.unit.layer, keys, values)
            found.append(_LaidOut(each.unit, order, keys, values, digests))
        return found

    def _digest_bytes(self, unit: _LaidOut) -> int:
        """Bytes that its digests take on the drive."""
        return 0 if unit.digests is None else align_up(self._section(unit.unit).nbytes, GRID_BYTES)

    def _section(self, unit: Unit) -> DigestSection:
        """The digests that a unit is written with, if it has some."""
        assert self.digests is not None
        return self.digests.section(unit.layer, unit.segment.token_count)

    def _orders(self, writes: Sequence[UnitWrite]) -> list[Order | None]:
        """Those that were made before, and the others by one call."""
        missing = [
            UnitKeys(each.unit.layer, each.unit.segment.start, each.keys)
            for each in writes
            if not each.is_ordered
        ]
        made = iter(self.placement.orders(missing) if missing else ())
        return [each.order if each.is_ordered else next(made) for each in writes]

    def _piece(self, nbytes: int) -> BufferPiece:
        """Memory to write from. Where all is in use, the oldest writes are waited for."""
        while (piece := self.buffers.take(nbytes)) is None:
            oldest = self.started.oldest()
            assert oldest is not None, "nobody else has pieces of this pool"
            self._settle(oldest)
        return piece

    def _take_back(self, unit: Unit) -> None:
        """Nothing of a unit is on the device, or on its way there, any more."""
        extent = unit.segment.extents[unit.layer]
        if extent is not None:
            unit.segment.extents[unit.layer] = None
            self.space.free([extent])
        if unit.segment.slot != NO_SLOT:
            self.residency.on_nvme[unit.layer, unit.segment.slot] = False

    # ---- the outcome ------------------------------------------------------------------------

    def is_on_device(self, unit: Unit) -> bool:
        """Whether a unit has arrived there, as far as is known."""
        extent = unit.segment.extents[unit.layer]
        return extent is not None and not self.started.covers(extent)

    def finish(self, units: Sequence[Unit]) -> None:
        """Return when the payloads of these units are on the device.

        Raises DeviceError where the device does not take one: such a unit is on it no more.
        """
        if not self.started:
            # Who only reads asks for every batch.
            return
        extents = [unit.segment.extents[unit.layer] for unit in units]
        for write in self.started.into(each for each in extents if each is not None):
            self._settle(write)
        for unit, extent in zip(units, extents, strict=True):
            if extent is not None and unit.segment.extents[unit.layer] is None:
                raise self.extents.not_written(unit)

    def finish_segments(self, segments: Sequence[Segment]) -> None:
        """As `finish`, for all layers."""
        self.finish([Unit(each, layer) for each in segments for layer in range(each.layers)])

    def finish_all(self) -> None:
        """Return when nothing is on its way. Whoever needs what failed will hear of it."""
        while (oldest := self.started.oldest()) is not None:
            self._settle(oldest)

    def _settle(self, write: StartedWrite) -> None:
        """Wait for a batch, and try once more what failed. What fails again is taken back."""
        failed: dict[int, KvtierError | OSError] = {}
        error = self.started.wait(write)
        if error is not None:
            failed = self._again(write, error)
        self.started.remove(write)
        for index, (unit, extent) in enumerate(zip(write.units, write.extents, strict=True)):
            if extent is None:
                continue
            if index in failed:
                self.failed_writes += 1
                where = self.extents.where(unit)
                _log.error("not written, and so not saved: %s: %s", where, failed[index])
                # What HOT has stays as it is: dirty, or free to leave.
                unit.segment.write_error = failed[index]
                unit.segment.extents[unit.layer] = None
                self._set_aside(extent, failed[index])
            else:
                self.residency.on_nvme[unit.layer, unit.segment.slot] = True

    def _set_aside(self, extent: Extent, error: KvtierError | OSError) -> None:
        """Keep space from being given out that does not take bytes: the next who gets it would
        fail too. Not that of a device which is only full."""
        if isinstance(error, DeviceError) and error.errno == errno.ENOSPC:
            self.space.free([extent])
            return
        self._refused.append(extent)
        if len(self._refused) > REFUSED_MAX:
            self.space.free([self._refused.pop(0)])

    @property
    def refused_bytes(self) -> int:
        """Bytes that are neither free nor of use, because the device did not take bytes there."""
        return sum(each.length for each in self._refused)

    def _again(
        self, write: StartedWrite, error: KvtierError | OSError
    ) -> dict[int, KvtierError | OSError]:
        """Write once more what failed of a batch, while its bytes are in memory. Returns what
        fails again, by its index."""
        failed = [index for index, _ in error.failures] if isinstance(error, DeviceError) else []
        failed = failed or list(range(len(write.units)))
        # What was given up may belong to somebody else by now.
        failed = [index for index in failed if write.extents[index] is not None]
        lasting: dict[int, KvtierError | OSError] = {}
        for index in failed:
            one = slice(index, index + 1)
            buffers = write.buffers
            alone = Buffers(buffers.memory, buffers.starts[one], buffers.lengths[one])
            try:
                self.space.write(write.offsets[one], alone)
            except (KvtierError, OSError) as again:
                lasting[index] = again
        return lasting

    def may_be_lost(self, segment: Segment) -> bool:
        """Whether a flush failed between the first write of an uncommitted Segment and now."""
        written = any(segment.extents) and segment.catalog_id is None
        return written and segment.flush_epoch != self.device.failed_flushes

    def _fill(self, laid_out: _LaidOut, target: ByteArray) -> None:
        """Pack one unit into `target`, its digests behind it; note order, directory, checksum."""
        unit, order = laid_out.unit, laid_out.order
        segment, layer, shape = unit.segment, unit.layer, self.extents.shape(unit)
        payload = target[: shape.payload_bytes]
        pack(laid_out.keys, laid_out.values, None, payload)
        behind = target[shape.payload_bytes :]
        behind[:] = 0
        if laid_out.digests is not None:
            assert self.digests is not None
            start = shape.digests_at - shape.header_bytes
            section = target[start : start + self._section(unit).nbytes]
            self.digests.pack(laid_out.digests, unit, section)
        directory = shape.layout.plain.copy() if order is None else shape.layout.directory(order)
        extent_format.checksum_pages(directory, payload, segment.generation)
        segment.directories[layer] = directory
        segment.orders[layer] = order
        segment.payload_checksums[layer] = extent_format.checksum(payload, segment.generation)

    def write_headers(self, segments: Sequence[Segment]) -> None:
        """Write the headers of all Extents of written Segments whose tokens are known."""
        units = [Unit(each, layer) for each in segments for layer in range(each.layers)]
        sizes = [
            extent_format.header_bytes(self.geometry, each.layer, each.segment.token_count)
            for each in units
        ]
        for part in batches(sizes, WRITE_BATCH_BYTES):
            lengths = np.array(sizes[part], np.int64)
            starts = starts_of(lengths)
            offsets = np.zeros(len(lengths), np.int64)
            piece = self._piece(int(lengths.sum()))
            try:
                for index, unit in enumerate(units[part]):
                    start, length = int(starts[index]), int(lengths[index])
                    identity = self.extents.identity(unit)
                    offsets[index] = identity.device_offset
                    self._write_header(unit, identity, piece.memory[start : start + length])
                self.space.write(offsets, Buffers(piece.memory, starts, lengths))
            finally:
                piece.give_back()

    def _write_header(self, unit: Unit, identity: ExtentIdentity, target: ByteArray) -> None:
        segment, layer = unit.segment, unit.layer
        directory = segment.directories[layer]
        assert directory is not None
        has_digests = identity.extent_bytes > self.extents.shape(unit).digests_at
        extent_format.write_header(
            target,
            identity,
            self.geometry,
            directory,
            segment.payload_checksums[layer],
            segment.named_tokens,
            digests=self._section(unit) if has_digests else NO_DIGESTS,
        )
