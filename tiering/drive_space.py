"""Space for new Extents on the drive: given out, and made by evicting Segments, and slabs with
their Blobs, where it is full.

Invariants:
- Space is given out only when no row of the catalog names it, durably (Ledger).
- A Segment that a Sequence views, that a hold keeps, that another Segment continues, or that lies
  on a drive which is missing is never evicted. What is quarantined is of no use and goes first;
  what lies behind it is of use as soon as its tokens are computed again.
"""

import errno
import logging
import time
from collections.abc import Sequence

import numpy as np

from kvtier.errors import CapacityError, DeviceError
from kvtier.io.allocator import SpreadAllocator
from kvtier.io.device import Buffers, Int64Array
from kvtier.io.extent import Extent
from kvtier.tiering.blob_index import SlabEntry
from kvtier.tiering.drive_eviction import (
    NO_PARENT,
    DrivePolicy,
    DriveUsage,
    least_recently_used,
)
from kvtier.tiering.inventory import Entry
from kvtier.tiering.ledger import Change, Ledger
from kvtier.tiering.registry import Registry
from kvtier.tiering.segment import NO_DRIVE, Segment
from kvtier.tiering.started_writes import StartedWrites

_log = logging.getLogger("kvtier")

EVICTED_SHARE_MIN = 64
"""An eviction frees at least this part of the region: it costs two flushes, however small."""


class DriveSpace:
    """Callers hold the store's lock."""

    def __init__(
        self,
        allocator: SpreadAllocator,
        ledger: Ledger,
        registry: Registry,
        policy: DrivePolicy = least_recently_used,
    ) -> None:
        self.allocator = allocator
        self.ledger = ledger
        self.registry = registry
        self.policy = policy
        self.segments_evicted = 0
        self.slabs_evicted = 0

    @property
    def started(self) -> StartedWrites:
        """What is on its way into space that was given out."""
        return self.ledger.started

    def require(self, nbytes: int) -> None:
        """Raise CapacityError, and evict nothing, where so many bytes can not be had at all."""
        free = self.allocator.free_bytes
        if nbytes <= free:
            return
        usage = self._usage()[2]
        evictable = int(usage.nbytes[self.policy(usage, 1 << 62)].sum())
        if nbytes > free + evictable:
            raise CapacityError(
                f"region ({evictable} bytes may be evicted, the rest is in use or held)",
                nbytes,
                free + evictable,
                self.allocator.window_bytes,
            )

    def drive_for(self, segment: Segment) -> int:
        """The number of the drive that all of a Segment is to lie on: the next one in turn, so that
        a context's Segments are read from all drives at once, and one that goes takes few."""
        if segment.drive == NO_DRIVE:
            segment.drive = self.allocator.next_drive()
        return segment.drive

    def allocate(self, nbytes: int, drive: int | None = None) -> Extent:
        """A free range on the grid; where it can be on this drive. Raises CapacityError when
        nothing more can be evicted, DeviceError."""
        self.require(nbytes)
        while True:
            try:
                return self.allocator.allocate(nbytes, drive)
            except CapacityError:
                # Free pieces may be scattered, so freeing as much as is needed need not do.
                if not self.evict(nbytes):
                    raise

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        """Write. A thinly provisioned device may be out of space below the region's limit: then
        Segments are evicted and their space returned to it, and it is tried once more."""
        try:
            self.ledger.device.write(offsets, buffers)
        except DeviceError as error:
            nbytes = int(buffers.lengths.sum())
            if error.errno != errno.ENOSPC or not self.evict(nbytes, discard=True):
                raise
            self.ledger.device.write(offsets, buffers)

    def free(self, extents: Sequence[Extent]) -> None:
        """Give back Extents that the catalog does not name."""
        self.ledger.release(extents)

    def evict(self, needed_bytes: int, *, discard: bool = False) -> int:
        """Remove Segments and slabs of at least needed_bytes, durably; returns how many it were.

        discard: tell the device what became free, whatever the store's setting is. Raises
        DeviceError when the device lets nothing become free.
        """
        window = self.allocator.window_bytes
        entries, slabs, usage = self._usage()
        chosen = self.policy(usage, max(needed_bytes, window // EVICTED_SHARE_MIN))
        if not chosen:
            return 0
        victims = [entries[index].id for index in chosen if index < len(entries)]
        gone = [slabs[index - len(entries)].id for index in chosen if index >= len(entries)]
        names = [
            key for each in victims for key in sorted(self.ledger.inventory.entries[each].names)
        ]
        change = Change(removed_names=names, removed_segments=victims)
        change.slabs.removed_slabs += gone
        free = self.allocator.free_bytes
        self.ledger.apply(change, discard=discard)
        self.registry.drop(victims)
        if self.allocator.free_bytes == free:
            # A device that takes no writes must not cost one Segment after the other.
            self.ledger.require_erased()
        self.segments_evicted += len(victims)
        self.slabs_evicted += len(gone)
        _log.info(
            "%d segments and %d slabs were evicted from the drive to make room%s",
            len(victims),
            len(gone),
            "".join(f"; name {name!r} went with its end" for _, name in names),
        )
        return len(chosen)

    def _usage(self) -> tuple[list[Entry], list[SlabEntry], DriveUsage]:
        """Segments and slabs, and their arrays: first all Segments, then all slabs."""
        inventory = self.ledger.inventory
        held = inventory.held_segments(time.time())
        in_use = self.registry.in_use
        entries = [inventory.entries[each] for each in sorted(inventory.entries)]
        slabs = list(inventory.slabs.values())
        count = len(entries) + len(slabs)
        index_of = {entry.id: index for index, entry in enumerate(entries)}
        parents = np.full(count, NO_PARENT, np.int64)
        lost = np.zeros(count, np.bool_)
        for index, entry in enumerate(entries):
            if entry.parent_id is not None:
                parent = index_of.get(entry.parent_id, NO_PARENT)
                parents[index] = parent
            lost[index] = entry.quarantined
        for index, slab in enumerate(slabs, len(entries)):
            lost[index] = slab.quarantined
        kept = [
            not entry.sound or entry.unavailable or entry.id in held or in_use(entry.id)
            for entry in entries
        ]
        kept += [not slab.sound or slab.unavailable for slab in slabs]
        nbytes = [entry.nbytes for entry in entries] + [slab.extent.length for slab in slabs]
        used = [entry.used for entry in entries] + [slab.used for slab in slabs]
        usage = DriveUsage(
            parents,
            np.array(nbytes, np.int64),
            np.array(used, np.float64),
            np.array(kept, np.bool_),
            lost,
        )
        return entries, slabs, usage
