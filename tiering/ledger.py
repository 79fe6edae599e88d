"""The one place where catalog and region change together, so that a crash leaves both true.

Order of a change:
    new Extents are announced -> their headers, and records of names, are written -> flush
    -> one catalog transaction
    -> the headers of what was removed are erased -> flush -> (discard) -> its space is free
    -> headers of slabs that lost Blobs are rewritten -> flush

Invariants:
- The flush before the transaction makes durable what the transaction names.
- Extents are announced in `condemned` before their headers are written, and leave it with the
  transaction that names them: what a cut save leaves is erased like what was removed.
- What is removed is named by nobody from the transaction on. Until its headers are erased its
  Extents stand in the table `condemned` and are not free; a crash in between is made good by
  `replay`. So a change that has returned can not be undone by a scan for headers.
- A row leaves `condemned` with or before the commit of whatever reuses its space.
- Once the transaction of `apply` is committed, nothing raises.

Not announced are the record of a new fingerprint, which describes no KV, and those that a rebuild
writes. Besides the Ledger, the catalog is changed by SlabLedger, which notes damage of slabs, and
by OpenFiles, which notes KV shapes; none of this touches the region.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvtier.errors import DeviceError
from kvtier.io.allocator import SpreadAllocator
from kvtier.io.buffers import aligned_bytes
from kvtier.io.catalog import Catalog, NameRow, SegmentRow, pack_extents, unpack_extents
from kvtier.io.catalog_blobs import BlobTables
from kvtier.io.device import Buffers, Device, Int64Array
from kvtier.io.extent import Extent
from kvtier.io.regions import Regions
from kvtier.tiering.blob_index import SlabEntry
from kvtier.tiering.catalog_rows import extents_of, record_extents
from kvtier.tiering.inventory import Inventory, NameKey
from kvtier.tiering.slab_ledger import SlabChange, SlabLedger
from kvtier.tiering.slab_limits import HEADERS_BYTES
from kvtier.tiering.started_writes import StartedWrites

ERASE_BATCH = 256
"""Headers that are erased as one batch: 2 MiB of zeros at most."""
ERASED_BYTES = HEADERS_BYTES
"""What is erased of each Extent, where it is that long: a slab has two copies of its header."""


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A Segment to be named. parent: index in the same change of its parent, if that is new too."""

    row: SegmentRow
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class NewName:
    """A name to be set. segment: index in the same change; None: row.segment_id is known.

    record: the Extent of its record, which is written already; row.record is ignored.
    """

    row: NameRow
    record: Extent
    segment: int | None = None


@dataclass(slots=True)
class Change:
    """What one call of `Ledger.apply` does. removed_segments: ids, children before parents.

    replaced: by id of a lost Segment, what takes its place: of the same tokens, elsewhere.
    """

    segments: list[NewSegment] = field(default_factory=list)
    replaced: dict[int, SegmentRow] = field(default_factory=dict)
    names: list[NewName] = field(default_factory=list)
    quarantined: list[int] = field(default_factory=list)
    removed_names: list[NameKey] = field(default_factory=list)
    removed_segments: list[int] = field(default_factory=list)
    slabs: SlabChange = field(default_factory=SlabChange)


class Ledger:
    """Applies changes, and keeps inventory and allocator in step. Callers hold the store's lock."""

    def __init__(
        self,
        catalog: Catalog,
        device: Device,
        allocator: SpreadAllocator,
        inventory: Inventory,
        *,
        discard: bool = False,
    ) -> None:
        """discard: tell the device what space is free (TRIM)."""
        self.catalog = catalog
        self.device = device
        self.allocator = allocator
        self.inventory = inventory
        self.discard = discard
        self.started = StartedWrites(device)
        self.slabs = SlabLedger(BlobTables(catalog), device, inventory)
        # Taken once: after a commit nothing may fail for want of memory.
        self._zeros = aligned_bytes(ERASE_BATCH * ERASED_BYTES)
        self._not_erased: DeviceError | None = None
        self._unflushed: list[Extent] = []
        """Condemned Extents that were erased, which a flush that failed may have undone."""
        self._erased: list[Extent] = []
        """Condemned Extents that may leave the catalog with the next transaction."""
        self._announced: dict[int, Extent] = {}
        """By offset: what may have headers on the region and is named by nobody yet."""
        self._used: dict[int, float] = {}
        """Times of use that the catalog does not have yet."""
        known = [each.used for each in inventory.entries.values()]
        known += [each.used for each in inventory.slabs.values()]
        self._last_used = max(known, default=0.0)

    def replay(self) -> None:
        """Finish removals that a crash cut short. Their Extents are allocated when this is called.

        Where the device fails they stay condemned, and a warning says so.
        """
        self._erase(self.catalog.condemned(), discard=self.discard)
        self.slabs.replay()

    # ---- changes ----------------------------------------------------------------------------

    def announce(self, extents: Sequence[Extent]) -> None:
        """Note durably that headers will be written into these allocated Extents.

        They count as condemned until a change names them. So what a crash leaves of a save that
        was not finished is erased by the next open, and no scan for headers can take it for a
        copy of something that was removed later. Raises DeviceError.
        """
        new = [extent for extent in extents if extent.offset not in self._announced]
        if not new:
            return
        with self.catalog.transaction():
            self.catalog.absolve(self._erased)
            self.catalog.condemn(new)
        self._erased.clear()
        self._announced.update({extent.offset: extent for extent in new})

    def release(self, extents: Sequence[Extent]) -> None:
        """Give back Extents that no change named; headers that they may have are erased first, and
        what is still being written into them ends."""
        self.started.give_up(extents)
        headed = [each for each in extents if self._announced.pop(each.offset, None) is not None]
        offsets = {extent.offset for extent in headed}
        for extent in extents:
            if extent.offset not in offsets:
                self.allocator.free(extent)
        if headed:
            self._erase(headed, discard=False)

    def apply(self, change: Change, *, discard: bool = False) -> list[int]:
        """Make a change durable; returns the ids of the new Segments.

        discard: tell the device what became free, whatever the store's setting is.

        Payloads and headers of new Segments, and records of new names, are written already, not
        flushed. Raises DeviceError, after which nothing of the change is done. Headers that could
        not be erased are no error here: see `require_erased`.
        """
        fresh = _segment_extents(change)
        assert not any(map(self.started.covers, fresh)), "a flush covers only what was done before"
        if change.segments or change.replaced or change.names or change.slabs.added:
            self.device.flush()
        outcome = self.slabs.outcome(change.slabs)
        removed = self._removed_extents(change) + self.slabs.extents(outcome)
        ids: list[int] = []
        rows: list[SegmentRow] = []
        names: list[NameRow] = []
        named = self._named_now(change, fresh)
        with self.catalog.transaction():
            self.catalog.absolve([*self._erased, *named])
            for new in change.segments:
                row = new.row if new.parent is None else _child(new.row, ids[new.parent])
                rows.append(row)
                ids.append(self.catalog.add_segment(row))
            for segment_id, row in change.replaced.items():
                self.catalog.replace_segment(segment_id, row)
            for segment_id in change.quarantined:
                self.catalog.set_quarantined(segment_id, True)
            for fingerprint_id, text in change.removed_names:
                self.catalog.delete_name(fingerprint_id, text)
            for name in change.names:
                row_of_name = _named(name, ids)
                self.catalog.set_name(row_of_name)
                names.append(row_of_name)
            self.catalog.delete_segments(change.removed_segments)
            self.catalog.set_used(self._used)
            slab_ids = self.slabs.write(change.slabs, outcome)
            self.catalog.condemn(removed)
        self._erased.clear()
        self._used.clear()
        for extent in named:
            del self._announced[extent.offset]
        self._note(change, dict(zip(ids, rows, strict=True)), names)
        self.slabs.note(change.slabs, outcome, slab_ids)
        # The change is done. Nothing may raise from here on: callers would undo what is named.
        self._erase(removed, discard=discard or self.discard)
        self._not_erased = self.slabs.rewrite(outcome.stale) or self._not_erased
        return ids

    def _named_now(self, change: Change, fresh: list[Extent]) -> list[Extent]:
        """What was announced and is named by this change. fresh: its Segments' Extents."""
        extents = [*fresh, *(name.record for name in change.names)]
        extents += [
            extent for new in change.slabs.added for extent in unpack_extents(new.row.extent)
        ]
        return [extent for extent in extents if extent.offset in self._announced]

    def _removed_extents(self, change: Change) -> list[Extent]:
        """Extents that nobody will name after the change: of Segments, and of names' records."""
        inventory = self.inventory
        keys = [*change.removed_names, *((n.row.fingerprint_id, n.row.name) for n in change.names)]
        found = [
            extent
            for key in keys
            if key in inventory.names
            for extent in record_extents(inventory.names[key].record)
        ]
        for segment_id in [*change.removed_segments, *change.replaced]:
            found += inventory.entries[segment_id].extents
        return found

    def _note(self, change: Change, added: dict[int, SegmentRow], names: list[NameRow]) -> None:
        """Bring the inventory up to what the catalog says now. added: rows by their new ids."""
        inventory = self.inventory
        for key in change.removed_names:
            inventory.remove_name(key)
        for segment_id in change.removed_segments:
            inventory.remove_segment(segment_id)
        for segment_id, row in added.items():
            inventory.add_segment(segment_id, row)
        for segment_id, row in change.replaced.items():
            inventory.replace_segment(segment_id, row)
        for segment_id in change.quarantined:
            inventory.entries[segment_id].quarantined = True
        for name in names:
            inventory.add_name(name)

    def find_fingerprint(self, digest: bytes) -> int | None:
        """Id of a fingerprint that the catalog has."""
        rows = self.catalog.fingerprints()
        return next((row.id for row in rows if row.digest == digest), None)

    def add_fingerprint(self, digest: bytes, description: str, record: Extent) -> int:
        """Name a new fingerprint, whose record is written already; returns its id."""
        self.device.flush()
        with self.catalog.transaction():
            self.catalog.absolve(self._erased)
            added = self.catalog.add_fingerprint(digest, description, pack_extents([record]))
        self._erased.clear()
        return added

    # ---- erasing ----------------------------------------------------------------------------

    def _erase(self, extents: Sequence[Extent], *, discard: bool) -> None:
        """Overwrite the headers of condemned Extents durably, then give their space back.

        Extents whose headers the device does not let go stay condemned, and are not used again;
        those for which only the flush failed are tried again here the next time.
        """
        self._not_erased = None
        extents = [*self._unflushed, *extents]
        self._unflushed = []
        zeros = self._zeros
        erased: list[Extent] = []
        for first in range(0, len(extents), ERASE_BATCH):
            part = extents[first : first + ERASE_BATCH]
            starts = np.arange(len(part), dtype=np.int64) * ERASED_BYTES
            lengths = np.array([min(each.length, ERASED_BYTES) for each in part], np.int64)
            failed: set[int] = set()
            try:
                self.device.write(_offsets(part), Buffers(zeros, starts, lengths))
            except DeviceError as error:
                self._not_erased = error
                failed = {index for index, _ in error.failures} or set(range(len(part)))
            erased += [each for index, each in enumerate(part) if index not in failed]
        if not erased:
            return
        try:
            self.device.flush()
            if discard:
                lengths = np.array([each.length for each in erased], np.int64)
                self.device.discard(_offsets(erased), lengths)
        except DeviceError as error:
            self._not_erased = error
            self._unflushed = erased
            return
        for extent in erased:
            self.allocator.free(extent)
        self._erased += erased

    def require_erased(self) -> None:
        """Raise the DeviceError for which the last change left headers of what it removed."""
        if self._not_erased is not None:
            raise DeviceError(
                "what was removed is gone from the catalog, but its headers could not be erased; "
                f"the next open tries again: {self._not_erased}",
                self._not_erased.errno or 0,
            )

    # ---- use --------------------------------------------------------------------------------

    def touch(self, segment_ids: Sequence[int]) -> None:
        """These Segments are used now. The catalog hears of it with the next change, or at
        `settle`."""
        # Never backwards, whatever the clock does: the order of use is what counts.
        self._last_used = now = max(time.time(), self._last_used)
        for segment_id in segment_ids:
            self.inventory.entries[segment_id].used = now
            self._used[segment_id] = now

    def touch_slabs(self, slabs: Iterable[SlabEntry]) -> None:
        """As `touch`, for slabs."""
        self._last_used = now = max(time.time(), self._last_used)
        for slab in slabs:
            self.slabs.touch(slab, now)

    def settle(self) -> None:
        """Write down what waits for the next transaction."""
        if self._used or self._erased or self.slabs.waiting:
            self.apply(Change())

    def set_hold(self, key: NameKey, until: float) -> None:
        """Hold a name until a time in unix seconds; 0: no longer."""
        row = self.inventory.names[key]
        held = replace(row, held_until=until)
        self.catalog.set_name(held)
        self.inventory.add_name(held)


def load_allocator(catalog: Catalog, inventory: Inventory, region: Regions) -> SpreadAllocator:
    """Free space of the regions that are there: all in their windows that no row of the catalog
    names.

    Raises FormatError where rows overlap or name impossible Extents.
    """
    allocator = SpreadAllocator((each.start, each.end) for each in region.windows)
    extents = [extent for entry in inventory.entries.values() for extent in entry.extents]
    records = [row.record for row in catalog.fingerprints()]
    records += [row.record for row in catalog.names()]
    extents += [extent for record in records for extent in record_extents(record)]
    extents += [slab.extent for slab in inventory.slabs.values()]
    extents += catalog.condemned()
    allocator.occupy(each for each in extents if region.holds(each))
    return allocator


def _segment_extents(change: Change) -> list[Extent]:
    """Extents of the Segments that a change names."""
    rows = [*(new.row for new in change.segments), *change.replaced.values()]
    return [extent for row in rows for extent in extents_of(row)]


def _offsets(extents: Sequence[Extent]) -> Int64Array:
    return np.array([each.offset for each in extents], np.int64)


def _child(row: SegmentRow, parent_id: int) -> SegmentRow:
    return replace(row, parent_id=parent_id)


def _named(name: NewName, ids: Sequence[int]) -> NameRow:
    segment_id = name.row.segment_id if name.segment is None else ids[name.segment]
    return replace(name.row, segment_id=segment_id, record=pack_extents([name.record]))
