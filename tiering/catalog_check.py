"""Whether what a catalog says fits together: rows, parents, names, and who has which Extents."""

import uuid
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvtier.errors import FormatError
from kvtier.io.catalog import Catalog, FingerprintRow, NameRow, SegmentRow
from kvtier.io.catalog_blobs import BlobTables
from kvtier.io.catalog_schema import SlabRow
from kvtier.io.extent import Extent, drive_of, drive_start
from kvtier.tiering import record_format
from kvtier.tiering.catalog_rows import RowChecker, extents_of, is_well_typed, record_extents
from kvtier.tiering.findings import Report
from kvtier.tiering.record_format import Record
from kvtier.tiering.slab_rows import slab_extent


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """A record that the catalog names. whose: in words. expected: what it must say."""

    whose: str
    extent: Extent
    expected: Record


@dataclass(frozen=True, slots=True)
class CatalogRows:
    """What a catalog says at one moment.

    fingerprints: those that are well typed, by id. condemned: Extents whose headers are still to
    be erased. problems: what cannot be read, in words.
    """

    segments: list[SegmentRow]
    names: list[NameRow]
    fingerprints: dict[int, FingerprintRow]
    condemned: list[Extent]
    problems: list[str]
    slabs: list[SlabRow]

    @classmethod
    def read(cls, catalog: Catalog) -> "CatalogRows":
        """Raises FormatError, DeviceError, LockedError."""
        condemned: list[Extent] = []
        problems: list[str] = []
        with catalog.transaction():
            segments, names, prints = catalog.segments(), catalog.names(), catalog.fingerprints()
            slabs = BlobTables(catalog).slabs()
            try:
                condemned = catalog.condemned()
            except FormatError as error:
                problems.append(str(error))
        fingerprints = {row.id: row for row in prints if is_well_typed(row)}
        return cls(segments, names, fingerprints, condemned, problems, slabs)

    def records(self, store_uuid: str) -> list[RecordPlace]:
        """Where the records of names and fingerprints lie, as far as rows can be true."""
        store = uuid.UUID(store_uuid).bytes
        found: list[RecordPlace] = []
        for row in self.fingerprints.values():
            body: dict[str, Any] = {"description": row.description}
            expected = Record(store, row.digest, record_format.FINGERPRINT, body)
            whose = f"fingerprint {row.digest.hex()[:12]}"
            found += [RecordPlace(whose, each, expected) for each in _extents(row)]
        for name in self.names:
            if is_well_typed(name) and name.fingerprint_id in self.fingerprints:
                body = {"name": name.name, "limit": name.limit, "token_count": name.token_count}
                digest = self.fingerprints[name.fingerprint_id].digest
                expected = Record(store, digest, record_format.NAME, body)
                whose = f"name {name.name!r}"
                found += [RecordPlace(whose, each, expected) for each in _extents(name)]
        return found


def _extents(row: NameRow | FingerprintRow) -> list[Extent]:
    """Those of a row's record; none where they are impossible, which `check_rows` reports."""
    try:
        return record_extents(row.record)
    except FormatError:
        return []


def _slab_extents(row: SlabRow) -> list[Extent]:
    """That of a slab; none where it is impossible, which `check_slabs` reports."""
    try:
        return [slab_extent(row)]
    except FormatError:
        return []


def check_rows(rows: CatalogRows, report: Report) -> list[SegmentRow]:
    """Report rows, parents, names and fingerprints that do not fit together, and Extents that
    overlap; returns the Segments' rows that can be true, in the order of their ids."""
    for unread in rows.problems:
        report.add("reference", "catalog", unread)
    checker = RowChecker()
    for row in rows.segments:
        where = f"segment {row.id}"
        problem = checker.problem(row)
        if problem is not None:
            report.add("reference", where, problem)
        elif row.fingerprint_id not in rows.fingerprints:
            report.add("reference", where, f"its fingerprint {row.fingerprint_id} is missing")
        elif row.quarantined:
            report.add("extent", where, "it is quarantined: damage was found before")
    sound = {row.id: row for row in checker.sound if row.fingerprint_id in rows.fingerprints}
    for name in rows.names:
        _check_name(name, sound.get(name.segment_id), report)
    for print_row in rows.fingerprints.values():
        _check_record_place(print_row, f"fingerprint {print_row.digest.hex()[:12]}", report)
    _check_overlaps(rows, list(sound.values()), report)
    return list(sound.values())


def _check_name(name: NameRow, target: SegmentRow | None, report: Report) -> None:
    where = f"name {name.name!r}"
    if not is_well_typed(name) or target is None or not 0 < name.limit <= target.token_count:
        report.add("reference", where, f"segment {name.segment_id} is missing or damaged")
    elif target.start_position + name.limit != name.token_count:
        report.add("reference", where, "its length is not its segment's end")
    else:
        _check_record_place(name, where, report)


def _check_record_place(row: NameRow | FingerprintRow, where: str, report: Report) -> None:
    try:
        record_extents(row.record)
    except FormatError as error:
        report.add("reference", where, str(error))


def _check_overlaps(rows: CatalogRows, segments: list[SegmentRow], report: Report) -> None:
    ranges = [
        (extent.offset, extent.end, f"segment {row.id}")
        for row in segments
        for extent in extents_of(row)
    ]
    ranges += [
        (each.offset, each.end, f"name {row.name!r}")
        for row in rows.names
        if is_well_typed(row)
        for each in _extents(row)
    ]
    ranges += [
        (each.offset, each.end, f"fingerprint {row.digest.hex()[:12]}")
        for row in rows.fingerprints.values()
        for each in _extents(row)
    ]
    ranges += [(each.offset, each.end, "a removed extent") for each in rows.condemned]
    ranges += [
        (each.offset, each.end, f"slab {row.id}")
        for row in rows.slabs
        for each in _slab_extents(row)
    ]
    for (_, end, owner), (offset, _, other) in pairwise(sorted(ranges)):
        if offset < end:
            where = f"byte {offset - drive_start(drive_of(offset))} of region {drive_of(offset)}"
            report.add("extent", where, f"{owner} and {other} overlap")
