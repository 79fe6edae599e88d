"""Everything that a store holds on its region, whichever model it belongs to, by catalog id.

The prefix index knows the Segments of one model; room is made, and names are removed, among all.

Invariants:
- An entry's children are the entries that name it as their parent.
- Slabs of Blobs stand beside the Segments; of their Blobs, those of one model are known.
- `held_bytes` counts a Segment once, however many held names end in it or behind it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite

from kvtier.io.catalog import Catalog, NameRow, SegmentRow
from kvtier.io.catalog_blobs import BlobTables
from kvtier.io.catalog_schema import BlobRow, SlabRow
from kvtier.io.extent import Extent
from kvtier.tiering.blob_index import BlobIndex, SlabEntry
from kvtier.tiering.catalog_rows import extents_of, is_well_typed
from kvtier.tiering.slab_rows import slab_extent, slab_problem

NameKey = tuple[int, str]
"""Fingerprint id and name."""


@dataclass(slots=True)
class Entry:
    """One Segment of the catalog. used: unix seconds."""

    id: int
    parent_id: int | None
    extents: list[Extent]
    used: float
    quarantined: bool
    sound: bool = True
    """False: its row cannot be true, and it is left alone."""
    unavailable: bool = False
    """Something of it lies on a drive that is missing: left alone until that is back."""
    children: set[int] = field(default_factory=set)
    names: set[NameKey] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return sum(each.length for each in self.extents)


class Inventory:
    """Kept in step with the catalog by the Ledger; Registry and SlabLedger note damage in both.

    `sound` stands in no row: whoever checks the rows of an opened store sets it.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.names: dict[NameKey, NameRow] = {}
        self.slabs: dict[int, SlabEntry] = {}
        self.blobs = BlobIndex()
        """Of the model that the store was opened for; see BlobShelf.load."""

    @classmethod
    def load(cls, catalog: Catalog, segments: Iterable[SegmentRow]) -> "Inventory":
        """segments: all rows of the catalog, ordered by id."""
        found = cls()
        for row in segments:
            found.add_segment(row.id, row)
        for name in catalog.names():
            if is_well_typed(name):
                found.add_name(name)
        for slab in BlobTables(catalog).slabs():
            found.add_slab(slab.id, slab)
        return found

    def miss(self, is_there: Callable[[Extent], bool]) -> None:
        """Know what lies on drives that are missing. is_there: whether an Extent can be read."""
        for entry in self.entries.values():
            entry.unavailable = not all(map(is_there, entry.extents))
        for slab in self.slabs.values():
            slab.unavailable = not is_there(slab.extent)

    def add_segment(self, segment_id: int, row: SegmentRow) -> None:
        """row.id is ignored. Raises FormatError for impossible Extents."""
        # What a damaged catalog may say of its use must not stop anybody from opening it.
        used = row.used if isinstance(row.used, float) and isfinite(row.used) else 0.0
        self.entries[segment_id] = Entry(
            segment_id, row.parent_id, extents_of(row), used, bool(row.quarantined)
        )
        if row.parent_id in self.entries:
            self.entries[row.parent_id].children.add(segment_id)

    def replace_segment(self, segment_id: int, row: SegmentRow) -> None:
        """Its Extents, which were lost, are those of the row now."""
        entry = self.entries[segment_id]
        entry.extents, entry.used = extents_of(row), row.used
        entry.quarantined = entry.unavailable = False

    def remove_segment(self, segment_id: int) -> None:
        entry = self.entries.pop(segment_id)
        if entry.parent_id in self.entries:
            self.entries[entry.parent_id].children.discard(segment_id)

    def add_name(self, row: NameRow) -> None:
        """Also replaces a name."""
        key = (row.fingerprint_id, row.name)
        self.remove_name(key)
        self.names[key] = row
        if row.segment_id in self.entries:
            self.entries[row.segment_id].names.add(key)

    def remove_name(self, key: NameKey) -> None:
        """No error for an unknown one."""
        row = self.names.pop(key, None)
        if row is not None and row.segment_id in self.entries:
            self.entries[row.segment_id].names.discard(key)

    def add_slab(self, slab_id: int, row: SlabRow, blobs: Sequence[BlobRow] = ()) -> None:
        """row.id is ignored. blobs: of this store's model. Raises FormatError for an impossible
        Extent."""
        sound = slab_problem(row) is None
        slab = SlabEntry(
            slab_id,
            row.fingerprint_id,
            slab_extent(row),
            row.generation,
            row.used if sound else 0.0,
            bool(row.quarantined),
            sound,
        )
        self.slabs[slab_id] = slab
        self.blobs.add(slab, blobs)

    def remove_slab(self, slab_id: int) -> None:
        """With all its Blobs."""
        self.blobs.drop(self.slabs.pop(slab_id))

    def chain(self, segment_id: int) -> list[Entry]:
        """A Segment and everything before it, the last one first."""
        found: list[Entry] = []
        entry = self.entries.get(segment_id)
        while entry is not None:
            found.append(entry)
            parent = self.entries.get(entry.parent_id) if entry.parent_id else None
            # A damaged row may name itself or a later one; those that can be true never do.
            entry = parent if parent is not None and parent.id < entry.id else None
        return found

    def held(self, now: float) -> list[NameRow]:
        """Names whose hold has not ended."""
        return [row for row in self.names.values() if row.held_until > now]

    def held_segments(self, now: float, *, but: NameKey | None = None) -> dict[int, int]:
        """Bytes of every Segment that a hold keeps, by id. but: a name that does not count."""
        kept: dict[int, int] = {}
        for row in self.held(now):
            if (row.fingerprint_id, row.name) == but:
                continue
            for entry in self.chain(row.segment_id):
                if entry.id in kept:
                    break
                kept[entry.id] = entry.nbytes
        return kept

    def held_bytes(self, now: float) -> int:
        return sum(self.held_segments(now).values())
