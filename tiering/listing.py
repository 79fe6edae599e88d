"""What a store holds, read from its settings and catalog alone: no KV, no torch, no lock."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import FormatError
from kvtier.io.catalog import CATALOG_VERSION, FingerprintRow, NameRow, SegmentRow
from kvtier.io.catalog_blobs import BlobTables, BlobTotal
from kvtier.io.catalog_schema import SlabRow
from kvtier.io.extent import Extent
from kvtier.io.superblock import DATA_START, copy_offsets
from kvtier.tiering import store_files
from kvtier.tiering.catalog_rows import SECONDS_MAX, extents_of, is_well_typed, record_extents
from kvtier.tiering.region_state import MISSING as MISSING_REGION
from kvtier.tiering.region_state import PRESENT, region_state
from kvtier.tiering.slab_rows import slab_extent

MISSING = "missing"
"""Stands for a fingerprint that a damaged catalog no longer has."""


@dataclass(frozen=True, slots=True)
class RegionEntry:
    """state: "present", "missing", "truncated to N bytes" or "unreachable: WHY". used_bytes: of
    Segments, slabs and records."""

    path: str
    bytes: int
    state: str
    used_bytes: int


@dataclass(frozen=True, slots=True)
class FingerprintEntry:
    id: int
    hex: str
    description: dict[str, Any]
    segments: int
    tokens: int


@dataclass(frozen=True, slots=True)
class NameEntry:
    """held_until: ISO 8601 in UTC; None where it is not held, or held until somebody lets go.
    damaged: a Segment of it is quarantined or gone, so that not all of it can be resumed. missing:
    a Segment of it lies on a drive that is missing, and all others are there."""

    name: str
    fingerprint: str
    tokens: int
    held: bool
    held_until: str | None
    created: str
    damaged: bool
    missing: bool


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """start: position of its first token. bytes: of its Extents. drives: numbers of the regions
    that they lie on."""

    id: int
    fingerprint: str
    provenance: str
    start: int
    tokens: int
    bytes: int
    tiers: list[str]
    quarantined: bool
    drives: list[int]


@dataclass(frozen=True, slots=True)
class BlobsEntry:
    """The Blobs of all fingerprints: how many, their bytes, and what their slabs take.
    quarantined_slabs: those of the slabs that are out of use."""

    count: int
    bytes: int
    slabs: int
    slab_bytes: int
    quarantined_slabs: int


@dataclass(frozen=True, slots=True)
class StoreDescription:
    """Sizes in bytes, times as ISO 8601 in UTC. region_bytes, used_bytes: of all regions.
    free_bytes: of those that are there."""

    uuid: str
    catalog_version: int
    regions: list[RegionEntry]
    region_bytes: int
    used_bytes: int
    free_bytes: int
    fingerprints: list[FingerprintEntry]
    names: list[NameEntry]
    segments: list[SegmentEntry]
    blobs: BlobsEntry

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def utc_text(seconds: float) -> str:
    """Unix seconds as ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _extents(row: SegmentRow | NameRow | FingerprintRow | SlabRow) -> list[Extent]:
    """What a row has on the regions. `verify` says what is wrong with a row; a listing shows it as
    holding nothing."""
    try:
        if isinstance(row, SegmentRow):
            return extents_of(row)
        return [slab_extent(row)] if isinstance(row, SlabRow) else record_extents(row.record)
    except FormatError:
        return []


def _bytes(extents: Iterable[Extent]) -> int:
    return sum(each.length for each in extents)


def _blobs(total: BlobTotal, slabs: list[SlabRow]) -> BlobsEntry:
    return BlobsEntry(
        total.blobs,
        total.nbytes,
        len(slabs),
        _bytes(extent for each in slabs for extent in _extents(each)),
        sum(bool(each.quarantined) for each in slabs),
    )


def _segment(row: SegmentRow, hexes: dict[int, str], missing: set[int]) -> SegmentEntry:
    extents = _extents(row)
    drives = sorted({each.drive for each in extents})
    is_there = not row.quarantined and missing.isdisjoint(drives)
    return SegmentEntry(
        row.id,
        hexes.get(row.fingerprint_id, MISSING),
        row.provenance,
        row.start_position,
        row.token_count,
        _bytes(extents),
        ["nvme"] if is_there else [],
        row.quarantined,
        drives,
    )


def _fingerprint(row: FingerprintRow, segments: list[SegmentRow]) -> FingerprintEntry:
    own = [each for each in segments if each.fingerprint_id == row.id]
    return FingerprintEntry(
        row.id,
        row.digest.hex(),
        _description(row),
        len(own),
        sum(each.token_count for each in own),
    )


def _description(row: FingerprintRow) -> dict[str, Any]:
    try:
        found = json.loads(row.description)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"damaged": row.description[:200]}


def _whole(segments: list[SegmentRow], lost: Callable[[SegmentRow], bool]) -> set[int]:
    """Ids of Segments that are not lost, nor is anything before them."""
    whole: set[int] = set()
    # Parents come first: a Segment's id is greater than its parent's.
    for row in sorted(segments, key=lambda row: row.id):
        if not lost(row) and (row.parent_id is None or row.parent_id in whole):
            whole.add(row.id)
    return whole


def _is_quarantined(row: SegmentRow) -> bool:
    return bool(row.quarantined)


def _name(
    row: NameRow, hexes: dict[int, str], whole: set[int], there: set[int], now: float
) -> NameEntry:
    return NameEntry(
        row.name,
        hexes.get(row.fingerprint_id, MISSING),
        row.token_count,
        row.held_until > now,
        utc_text(row.held_until) if now < row.held_until < SECONDS_MAX else None,
        utc_text(row.created),
        row.segment_id not in whole,
        row.segment_id in whole and row.segment_id not in there,
    )


def describe(path: str | Path) -> StoreDescription:
    """Describe the store in a directory, also while another process writes to it.

    Raises ConfigError where there is no store, FormatError, DeviceError.
    """
    directory = Path(path)
    settings = store_files.read_settings(directory)
    with (
        store_files.open_catalog(directory, settings, read_only=True) as catalog,
        catalog.transaction(),
    ):
        fingerprints, segments, names = (
            catalog.fingerprints(),
            catalog.segments(),
            catalog.names(),
        )
        tables = BlobTables(catalog)
        slabs = tables.slabs()
        blobs = _blobs(tables.total(), slabs)
    fingerprints = [row for row in fingerprints if is_well_typed(row)]
    names = [row for row in names if is_well_typed(row)]
    segments = [row for row in segments if is_well_typed(row)]
    hexes = {row.id: row.digest.hex() for row in fingerprints}
    places = settings.places(directory)
    states = [region_state(each.path, each.nbytes) for each in places]
    missing = {number for number, state in enumerate(states) if state == MISSING_REGION}
    entries = [_segment(row, hexes, missing) for row in segments]
    rows: list[SegmentRow | NameRow | FingerprintRow | SlabRow] = [*segments, *names]
    rows += [*fingerprints, *slabs]
    on: Counter[int] = Counter()
    for row in rows:
        for extent in _extents(row):
            on[extent.drive] += extent.length
    regions = [
        RegionEntry(each.path, each.nbytes, states[number], on[number])
        for number, each in enumerate(places)
    ]
    # What is missing cannot be written to, so none of it counts as free.
    free = sum(
        copy_offsets(each.nbytes)[2] - DATA_START - on[number]
        for number, each in enumerate(places)
        if states[number] == PRESENT
    )
    there = _whole(
        segments,
        lambda row: row.quarantined or any(each.drive in missing for each in _extents(row)),
    )
    now, whole = time.time(), _whole(segments, _is_quarantined)
    return StoreDescription(
        uuid=settings.store_uuid,
        catalog_version=CATALOG_VERSION,
        regions=regions,
        region_bytes=settings.region_bytes,
        used_bytes=on.total(),
        free_bytes=free,
        fingerprints=[_fingerprint(row, segments) for row in fingerprints],
        names=[_name(row, hexes, whole, there, now) for row in names],
        segments=entries,
        blobs=blobs,
    )
