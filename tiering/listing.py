"""What a store holds, read from its settings and catalog alone: no KV, no torch, no lock."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import FormatError
from kvtier.io.catalog import CATALOG_VERSION, FingerprintRow, NameRow, SegmentRow
from kvtier.io.catalog_blobs import BlobTables, BlobTotal
from kvtier.io.catalog_schema import SlabRow
from kvtier.io.superblock import DATA_START, copy_offsets
from kvtier.tiering import store_files
from kvtier.tiering.catalog_rows import SECONDS_MAX, extents_of, is_well_typed, record_extents
from kvtier.tiering.region_state import region_state
from kvtier.tiering.slab_rows import slab_extent

MISSING = "missing"
"""Stands for a fingerprint that a damaged catalog no longer has."""


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
    damaged: a Segment of it is quarantined or gone, so that not all of it can be resumed."""

    name: str
    fingerprint: str
    tokens: int
    held: bool
    held_until: str | None
    created: str
    damaged: bool


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """start: position of its first token. bytes: of its Extents."""

    id: int
    fingerprint: str
    provenance: str
    start: int
    tokens: int
    bytes: int
    tiers: list[str]
    quarantined: bool


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
    """Sizes in bytes, times as ISO 8601 in UTC.

    region_state: "present", "missing", "truncated to N bytes" or "unreachable: WHY".
    """

    uuid: str
    catalog_version: int
    region_path: str
    region_bytes: int
    region_state: str
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


def _extent_bytes(row: SegmentRow) -> int:
    try:
        return sum(extent.length for extent in extents_of(row))
    except FormatError:
        # `verify` says what is wrong with the row; a listing shows it as holding nothing.
        return 0


def _slab_bytes(row: SlabRow) -> int:
    try:
        return slab_extent(row).length
    except FormatError:
        return 0


def _blobs(total: BlobTotal, slabs: list[SlabRow]) -> BlobsEntry:
    return BlobsEntry(
        total.blobs,
        total.nbytes,
        len(slabs),
        sum(map(_slab_bytes, slabs)),
        sum(bool(each.quarantined) for each in slabs),
    )


def _record_bytes(record: bytes) -> int:
    try:
        return sum(extent.length for extent in record_extents(record))
    except FormatError:
        return 0


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


def _whole(segments: list[SegmentRow]) -> set[int]:
    """Ids of Segments that are not quarantined, nor is anything before them."""
    whole: set[int] = set()
    # Parents come first: a Segment's id is greater than its parent's.
    for row in sorted(segments, key=lambda row: row.id):
        if not row.quarantined and (row.parent_id is None or row.parent_id in whole):
            whole.add(row.id)
    return whole


def _name(row: NameRow, hexes: dict[int, str], whole: set[int], now: float) -> NameEntry:
    return NameEntry(
        row.name,
        hexes.get(row.fingerprint_id, MISSING),
        row.token_count,
        row.held_until > now,
        utc_text(row.held_until) if now < row.held_until < SECONDS_MAX else None,
        utc_text(row.created),
        row.segment_id not in whole,
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
        blobs = _blobs(tables.total(), tables.slabs())
    fingerprints = [row for row in fingerprints if is_well_typed(row)]
    names = [row for row in names if is_well_typed(row)]
    segments = [row for row in segments if is_well_typed(row)]
    hexes = {row.id: row.digest.hex() for row in fingerprints}
    entries = [
        SegmentEntry(
            row.id,
            hexes.get(row.fingerprint_id, MISSING),
            row.provenance,
            row.start_position,
            row.token_count,
            _extent_bytes(row),
            [] if row.quarantined else ["nvme"],
            row.quarantined,
        )
        for row in segments
    ]
    region_path = settings.region_file(directory)
    records = [row.record for row in fingerprints] + [row.record for row in names]
    used = sum(each.bytes for each in entries) + sum(map(_record_bytes, records))
    used += blobs.slab_bytes
    now, whole = time.time(), _whole(segments)
    window = copy_offsets(settings.region_bytes)[2] - DATA_START
    return StoreDescription(
        uuid=settings.store_uuid,
        catalog_version=CATALOG_VERSION,
        region_path=region_path,
        region_bytes=settings.region_bytes,
        region_state=region_state(region_path, settings.region_bytes),
        used_bytes=used,
        free_bytes=window - used,
        fingerprints=[_fingerprint(row, segments) for row in fingerprints],
        names=[_name(row, hexes, whole, now) for row in names],
        segments=entries,
        blobs=blobs,
    )
