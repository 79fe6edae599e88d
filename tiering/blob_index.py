"""Which slabs a store has, and which Blobs of one model lie in them.

Invariants:
- A key of the index is that of a row of the catalog; `keys[entry]` of its slab is the same key.
- A slab's `keys` and `places` stay empty where its Blobs belong to another model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.io.catalog_schema import BlobRow
from kvtier.io.device import Int64Array
from kvtier.io.extent import Extent


def _no_places() -> Int64Array:
    return np.zeros((0, 3), np.int64)


@dataclass(slots=True)
class SlabEntry:
    """One slab of the catalog. used: unix seconds.

    sound: False where its row cannot be true, and it is left alone. unavailable: it lies on a drive
    that is missing, and comes back with it. places: int64 [entries, 3],
    offset in the slab, length and checksum of each Blob. keys: by entry; None where there is no
    Blob (any more). unreadable: entries that the device could not read since the store was opened.
    """

    id: int
    fingerprint_id: int
    extent: Extent
    generation: int
    used: float
    quarantined: bool
    sound: bool = True
    unavailable: bool = False
    places: Int64Array = field(default_factory=_no_places)
    keys: list[bytes | None] = field(default_factory=list)
    unreadable: set[int] = field(default_factory=set)

    @property
    def blobs(self) -> int:
        """How many Blobs of this store's model it has."""
        return len(self.keys) - self.keys.count(None)


@dataclass(frozen=True, slots=True)
class BlobPlace:
    """Where a Blob lies. offset: bytes from the start of the device. checksum: signed."""

    slab: SlabEntry
    entry: int
    offset: int
    length: int
    checksum: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class BlobIndex:
    """Kept in step with the catalog by the Inventory alone."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[SlabEntry, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def keys(self) -> Iterator[bytes]:
        """Keys of the Blobs that can be read, as far as is known."""
        return (key for key, (slab, entry) in self._places.items() if _is_usable(slab, entry))

    def slab_of(self, key: bytes) -> SlabEntry | None:
        """The slab that the catalog names for a key, usable or not."""
        found = self._places.get(key)
        return None if found is None else found[0]

    def find(self, key: bytes) -> BlobPlace | None:
        """Where a Blob lies, unless it is known to be damaged."""
        found = self._places.get(key)
        if found is None or not _is_usable(*found):
            return None
        slab, entry = found
        offset, length, checksum = slab.places[entry].tolist()
        return BlobPlace(slab, entry, slab.extent.offset + offset, length, checksum)

    def add(self, slab: SlabEntry, rows: Sequence[BlobRow]) -> None:
        """Know the Blobs of a new slab; they replace others of the same keys."""
        count = 1 + max((row.entry for row in rows), default=-1)
        slab.places = np.zeros((count, 3), np.int64)
        slab.keys = [None] * count
        for row in rows:
            self.remove(row.key)
            slab.places[row.entry] = (row.offset, row.length, row.checksum)
            slab.keys[row.entry] = row.key
            self._places[row.key] = (slab, row.entry)

    def remove(self, key: bytes) -> None:
        """No error for an unknown one."""
        found = self._places.pop(key, None)
        if found is not None:
            slab, entry = found
            slab.keys[entry] = None

    def drop(self, slab: SlabEntry) -> None:
        """Forget all Blobs of a slab."""
        for key in slab.keys:
            if key is not None:
                del self._places[key]
        slab.keys = []


def _is_usable(slab: SlabEntry, entry: int) -> bool:
    is_lost = slab.quarantined or slab.unavailable or entry in slab.unreadable
    return slab.sound and not is_lost
