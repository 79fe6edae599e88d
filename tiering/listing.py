"""What a store holds, read from its settings and catalog alone: no KV, no torch, no lock."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import FormatError
from kvtier.io.catalog import CATALOG_VERSION, FingerprintRow, SegmentRow
from kvtier.io.superblock import DATA_START, copy_offsets
from kvtier.tiering import store_files
from kvtier.tiering.catalog_rows import extents_of, is_well_typed
from kvtier.tiering.region_state import region_state

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
    name: str
    fingerprint: str
    tokens: int
    held: bool
    created: str


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
class StoreDescription:
    """Sizes in bytes, times as ISO 8601 in UTC.

    region_state: "present", "missing", "truncated to N bytes" or "unreachable: WHY".
    """

    uuid: str
    format_version: int
    region_path: str
    region_bytes: int
    region_state: str
    used_bytes: int
    free_bytes: int
    fingerprints: list[FingerprintEntry]
    names: list[NameEntry]
    segments: list[SegmentEntry]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _extent_bytes(row: SegmentRow) -> int:
    try:
        return sum(extent.length for extent in extents_of(row))
    except FormatError:
        # `verify` says what is wrong with the row; a listing shows it as holding nothing.
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
    used = sum(each.bytes for each in entries)
    window = copy_offsets(settings.region_bytes)[2] - DATA_START
    return StoreDescription(
        uuid=settings.store_uuid,
        format_version=CATALOG_VERSION,
        region_path=region_path,
        region_bytes=settings.region_bytes,
        region_state=region_state(region_path, settings.region_bytes),
        used_bytes=used,
        free_bytes=window - used,
        fingerprints=[_fingerprint(row, segments) for row in fingerprints],
        names=[
            NameEntry(
                row.name,
                hexes.get(row.fingerprint_id, MISSING),
                row.token_count,
                row.held,
                _iso(row.created),
            )
            for row in names
        ],
        segments=entries,
    )
