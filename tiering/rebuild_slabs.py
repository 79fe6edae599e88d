"""Slabs in a rebuild: which Blobs come back from those that a scan found, and their rows.

A slab comes back when headers, directory and all its live Blobs are intact. Of two Blobs with the
same key the one in the newer slab comes back.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvtier.io.alignment import GRID_BYTES
from kvtier.io.catalog import Catalog, pack_extents
from kvtier.io.catalog_blobs import BlobTables
from kvtier.io.catalog_schema import BlobRow, SlabRow
from kvtier.io.extent import Extent
from kvtier.tiering.catalog_rows import SECONDS_MAX
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.slab_format import Slab, to_signed
from kvtier.tiering.slab_limits import COPIES

DAMAGED: Final = "a blob of it is damaged"
EMPTY: Final = "its blobs were removed, or are in newer slabs"
IMPOSSIBLE: Final = "its fields cannot be"
REMOVED: Final = "it was removed"
NOT_LOST = (EMPTY, REMOVED)
"""Reasons that take nothing from anybody."""

LiveEntries = Mapping[int, set[int]]
"""By generation: entries that are Blobs still, of slabs whose headers say otherwise."""


@dataclass(frozen=True, slots=True)
class FoundSlab:
    """An intact header and directory at their place. sound: so are all live Blobs.

    copies: offsets of the headers of this slab that are intact.
    """

    slab: Slab
    sound: bool
    copies: list[int]

    @property
    def extent(self) -> Extent:
        identity = self.slab.header.identity
        return Extent(identity.device_offset, identity.extent_bytes)


@dataclass(frozen=True, slots=True)
class PlannedSlab:
    """entries: those that come back. stale: its header shows others as live."""

    slab: Slab
    entries: list[int]
    stale: bool


@dataclass(slots=True)
class SlabPlan:
    """erased: header blocks of what does not come back."""

    slabs: list[PlannedSlab] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    erased: list[Extent] = field(default_factory=list)

    @property
    def blobs(self) -> int:
        return sum(len(each.entries) for each in self.slabs)


def stale_headers(catalog: Catalog) -> dict[int, set[int]]:
    """What an old catalog knows better than the headers of slabs."""
    tables = BlobTables(catalog)
    return {
        row.generation: set(tables.live_entries(row.id))
        for row in tables.slabs()
        if row.header_stale
    }


def plan_slabs(found: Iterable[FoundSlab], removed: set[int], known: LiveEntries) -> SlabPlan:
    """A pure function. removed: offsets of what an old catalog says was removed."""
    plan = SlabPlan()
    done: set[tuple[bytes, bytes]] = set()
    for each in sorted(found, key=lambda each: -each.slab.header.identity.created):
        header = each.slab.header
        why = _refusal(each, removed)
        entries: list[int] = []
        live = [entry for entry in range(header.entries) if header.live[entry]]
        if why is None:
            wanted = known.get(header.identity.generation, set(live))
            for entry in live:
                key = (header.identity.fingerprint, each.slab.keys[entry])
                if entry in wanted and key not in done:
                    done.add(key)
                    entries.append(entry)
        if entries:
            plan.slabs.append(PlannedSlab(each.slab, entries, entries != live))
        else:
            plan.dropped[why or EMPTY] += 1
            plan.erased += [Extent(offset, GRID_BYTES) for offset in each.copies]
    return plan


def _refusal(found: FoundSlab, removed: set[int]) -> str | None:
    """Why a slab does not come back; None: it may."""
    identity = found.slab.header.identity
    if identity.device_offset in removed:
        return REMOVED
    if not found.sound:
        return DAMAGED
    if not 0 < identity.generation < 1 << 63 or identity.created / 1e6 > SECONDS_MAX:
        return IMPOSSIBLE
    return None


def write_slabs(catalog: Catalog, plan: SlabPlan, prints: dict[bytes, int]) -> None:
    """Put the planned slabs into a new catalog. prints: ids of fingerprints by digest; those that
    nothing else names are added, without a description."""
    tables = BlobTables(catalog)
    now = time.time()
    # Ids grow with age, as they did before.
    for planned in reversed(plan.slabs):
        identity = planned.slab.header.identity
        if identity.fingerprint not in prints:
            added = catalog.add_fingerprint(identity.fingerprint, lost_description())
            prints[identity.fingerprint] = added
        fingerprint_id = prints[identity.fingerprint]
        extent = Extent(identity.device_offset, identity.extent_bytes)
        created = identity.created / 1e6
        row = SlabRow(
            0, fingerprint_id, pack_extents([extent]), identity.generation, created, now, False,
            planned.stale,
        )  # fmt: skip
        blobs = []
        for entry in planned.entries:
            offset, length, checksum, *_ = planned.slab.directory[entry].tolist()
            key = planned.slab.keys[entry]
            blobs.append(
                BlobRow(fingerprint_id, key, 0, entry, offset, length, to_signed(checksum), created)
            )
        tables.add_slab(row, blobs)


def fingerprints_of(plan: SlabPlan) -> set[bytes]:
    """Digests of the fingerprints that the planned slabs name."""
    return {each.slab.header.identity.fingerprint for each in plan.slabs}


def header_copies(extent_offset: int) -> list[int]:
    """Where the copies of a slab's header lie."""
    return [extent_offset + copy * GRID_BYTES for copy in range(COPIES)]


def lost_description(geometry: Geometry | None = None) -> str:
    """Stands for the description of a fingerprint whose record is gone. geometry: its KV shapes,
    where Segments of it tell them."""
    known = {} if geometry is None else geometry.to_dict()
    return json.dumps({"lost": True, **known}, sort_keys=True, separators=(",", ":"))
