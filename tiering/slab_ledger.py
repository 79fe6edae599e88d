"""The part of a change that is about slabs: rows in the catalog, headers on the region.

A Blob that is removed or replaced is named by nobody from the transaction on. The header of its
slab still shows it as live until it is rewritten; until then the slab stands in the catalog as
`header_stale`, and replay makes good what a crash cut off. So a scan for headers does not bring a
removed Blob back.

Invariants:
- A slab whose last Blob goes, goes with it, unless it is quarantined: its Extent is condemned in
  the same transaction.
- A header copy is overwritten only while the other one is intact.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvtier.errors import DeviceError, FormatError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.buffers import aligned_bytes
from kvtier.io.catalog_blobs import BlobTables
from kvtier.io.catalog_schema import BlobRow, SlabRow
from kvtier.io.device import Buffers, ByteArray, Device, Int64Array
from kvtier.io.extent import Extent
from kvtier.tiering import slab_format
from kvtier.tiering.blob_index import SlabEntry
from kvtier.tiering.findings import place
from kvtier.tiering.inventory import Inventory
from kvtier.tiering.slab_format import SlabHeader
from kvtier.tiering.slab_limits import COPIES, HEADERS_BYTES

_log = logging.getLogger("kvtier")

REWRITE_BATCH = 256
"""Slabs whose headers are rewritten as one batch: 2 MiB are read, 1 MiB written."""

BlobKey = tuple[int, bytes]
"""Fingerprint id and key."""


@dataclass(frozen=True, slots=True)
class NewSlab:
    """A slab to be named, whose bytes are written. Its Blobs replace others of the same keys."""

    row: SlabRow
    blobs: list[BlobRow]


@dataclass(slots=True)
class SlabChange:
    """What a change does to slabs and to Blobs of this store's model."""

    added: list[NewSlab] = field(default_factory=list)
    removed_blobs: list[BlobKey] = field(default_factory=list)
    removed_slabs: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SlabOutcome:
    """What follows from a SlabChange. gone: slabs that go, emptied ones among them. stale: slabs
    whose headers are to be rewritten."""

    gone: list[int]
    stale: list[int]


class SlabLedger:
    """Belongs to a Ledger, which has the transaction. Callers hold the store's lock."""

    def __init__(self, tables: BlobTables, device: Device, inventory: Inventory) -> None:
        self.tables = tables
        self.device = device
        self.inventory = inventory
        # Taken once: after a commit nothing may fail for want of memory.
        self._memory = aligned_bytes(REWRITE_BATCH * HEADERS_BYTES)
        self._rewritten: set[int] = set()
        """Slabs that need not be called stale any more from the next transaction on."""
        self._used: dict[int, float] = {}

    @property
    def waiting(self) -> bool:
        """Whether something is to be written with the next transaction."""
        return bool(self._rewritten or self._used)

    def touch(self, slab: SlabEntry, now: float) -> None:
        """A slab is used now; the catalog hears of it with the next transaction."""
        slab.used = now
        self._used[slab.id] = now

    # ---- a change ---------------------------------------------------------------------------

    def outcome(self, change: SlabChange) -> SlabOutcome:
        """What will follow from a change."""
        blobs = self.inventory.blobs
        leaving: dict[int, int] = {}
        keys = {key for _, key in change.removed_blobs}
        keys |= {row.key for new in change.added for row in new.blobs}
        for key in keys:
            slab = blobs.slab_of(key)
            if slab is not None:
                leaving[slab.id] = leaving.get(slab.id, 0) + 1
        slabs = self.inventory.slabs
        # A damaged slab does not go with its last Blob: its row tells of the damage until the slab
        # is evicted, which happens before all others, or removed.
        emptied = [
            each
            for each, count in leaving.items()
            if slabs[each].blobs == count and not slabs[each].quarantined
        ]
        gone = list(dict.fromkeys([*change.removed_slabs, *emptied]))
        return SlabOutcome(gone, [each for each in leaving if each not in gone])

    def extents(self, outcome: SlabOutcome) -> list[Extent]:
        """Of the slabs that go."""
        return [self.inventory.slabs[each].extent for each in outcome.gone]

    def write(self, change: SlabChange, outcome: SlabOutcome) -> list[int]:
        """Inside the transaction: change the rows; returns the ids of the new slabs."""
        tables = self.tables
        tables.set_headers_stale(sorted(self._rewritten), False)
        tables.set_slabs_used(self._used)
        tables.delete_blobs(change.removed_blobs)
        ids = [tables.add_slab(new.row, new.blobs) for new in change.added]
        tables.delete_slabs(outcome.gone)
        tables.set_headers_stale(outcome.stale, True)
        return ids

    def note(self, change: SlabChange, outcome: SlabOutcome, ids: Sequence[int]) -> None:
        """After the transaction: bring the inventory up to what the catalog says now."""
        self._rewritten.clear()
        self._used.clear()
        for _, key in change.removed_blobs:
            self.inventory.blobs.remove(key)
        for new, slab_id in zip(change.added, ids, strict=True):
            self.inventory.add_slab(slab_id, new.row, new.blobs)
        for slab_id in outcome.gone:
            self.inventory.remove_slab(slab_id)

    def quarantine(self, slabs: Sequence[SlabEntry]) -> None:
        """Damage was found in these slabs: no Blob of them is handed out again, durably."""
        for slab in slabs:
            slab.quarantined = True
        self.tables.set_slabs_quarantined([slab.id for slab in slabs])

    # ---- headers ----------------------------------------------------------------------------

    def replay(self) -> None:
        """Rewrite the headers that a crash left stale. Where the device fails they stay stale."""
        error = self.rewrite([row.id for row in self.tables.slabs() if row.header_stale])
        if error is not None:
            _log.warning("headers of slabs are not up to date yet: %s", error)

    def rewrite(self, slab_ids: Sequence[int]) -> DeviceError | None:
        """Write into the headers of slabs, durably, which Blobs are live now.

        Returns the error for which some could not be written; these stay stale in the catalog.
        """
        problem: DeviceError | None = None
        for first in range(0, len(slab_ids), REWRITE_BATCH):
            slabs = [self.inventory.slabs[each] for each in slab_ids[first:][:REWRITE_BATCH]]
            try:
                written = self._rewrite_batch(slabs)
                self.device.flush()
            except DeviceError as error:
                # One by one, only what is bad fails.
                if len(slabs) > 1:
                    found = [self.rewrite([slab.id]) for slab in slabs]
                    problem = next((each for each in found if each is not None), problem)
                else:
                    problem = error
                continue
            self._rewritten |= written
        return problem

    def _rewrite_batch(self, slabs: Sequence[SlabEntry]) -> set[int]:
        """Rewrite the older copy of each header; returns the ids of slabs done with."""
        memory = self._memory[: len(slabs) * HEADERS_BYTES]
        starts: Int64Array = np.arange(len(slabs), dtype=np.int64) * HEADERS_BYTES
        offsets = np.array([each.extent.offset for each in slabs], np.int64)
        lengths = np.full(len(slabs), HEADERS_BYTES, np.int64)
        self.device.read(offsets, Buffers(memory, starts, lengths))
        places: list[int] = []
        froms: list[int] = []
        for slab, start in zip(slabs, starts.tolist(), strict=True):
            copy = self._renew(slab, memory[start : start + HEADERS_BYTES])
            if copy is not None:
                places.append(slab.extent.offset + copy * GRID_BYTES)
                froms.append(start + copy * GRID_BYTES)
        lengths = np.full(len(places), GRID_BYTES, np.int64)
        buffers = Buffers(memory, np.array(froms, np.int64), lengths)
        self.device.write(np.array(places, np.int64), buffers)
        return {each.id for each in slabs}

    def _renew(self, slab: SlabEntry, head: ByteArray) -> int | None:
        """Put the next header of a slab where the older copy was, in memory; returns which copy.
        None: no header of it is on the region, so that a scan does not find the slab at all."""
        where = f"the slab at {place(self.device, slab.extent.offset)}"
        try:
            header, newest = slab_format.newest_header(head, where)
            self._require_own(header, slab, where)
        except FormatError as error:
            _log.error("its header is not written anew: %s", error)
            return None
        live = np.zeros(header.entries, np.bool_)
        entries = self.tables.live_entries(slab.id)
        live[[each for each in entries if 0 <= each < header.entries]] = True
        copy = (newest + 1) % COPIES
        head[copy * GRID_BYTES : (copy + 1) * GRID_BYTES] = slab_format.pack_header(
            replace(header, sequence=header.sequence + 1, live=live)
        )
        return copy

    def _require_own(self, header: SlabHeader, slab: SlabEntry, where: str) -> None:
        found = header.identity
        expected = (slab.generation, slab.extent.offset, slab.extent.length)
        if (found.generation, found.device_offset, found.extent_bytes) != expected:
            raise FormatError(f"{where}: another slab lies here")
