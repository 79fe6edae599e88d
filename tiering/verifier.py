"""Reads a whole store and checks it: superblocks, headers, every page, the catalog's references.

It shares the format's parser with the read path, and takes no lock: a store that is open for
writing may be verified; what was committed before is what is checked.
"""

from pathlib import Path

from kvtier.errors import ConfigError, DeviceError, FormatError
from kvtier.io.catalog import Catalog, SegmentRow
from kvtier.io.extent import Extent
from kvtier.io.probe import open_device
from kvtier.io.region import Region
from kvtier.tiering import store_files
from kvtier.tiering.blob_verifier import check_slabs
from kvtier.tiering.catalog_check import CatalogRows, check_rows
from kvtier.tiering.extent_check import ExtentChecker, without_place
from kvtier.tiering.findings import Finding, Report
from kvtier.tiering.region_state import MISSING, region_advice, region_state


def verify(path: str | Path) -> Report:
    """Check the store in a directory. Raises ConfigError where there is no store, and FormatError
    or DeviceError where its catalog cannot be read at all; everything else is a finding."""
    directory = Path(path)
    settings = store_files.read_settings(directory)
    report = Report()
    with store_files.open_catalog(directory, settings, read_only=True) as catalog:
        rows = CatalogRows.read(catalog)
        sound = check_rows(rows, report)
        region_path = settings.region_file(directory)
        if region_state(region_path, settings.region_bytes) == MISSING:
            report.add("region", region_path, region_advice(MISSING, settings.region_bytes))
            return report
        try:
            device = open_device(region_path, writable=False)
        except DeviceError as error:
            report.add("region", region_path, without_place(error, region_path))
            return report
        try:
            checker = ExtentChecker(device, settings.store_uuid, report)
            _check_region(checker, settings.store_uuid, settings.region_bytes)
            _check_extents(checker, catalog, rows, sound)
            check_slabs(checker, catalog, rows)
        finally:
            device.close()
    return report


def _check_extents(
    checker: ExtentChecker, catalog: Catalog, rows: CatalogRows, sound: list[SegmentRow]
) -> None:
    """Report what is wrong with the Extents of Segments and records that are there to the end."""
    damaged: dict[int, list[Finding]] = {}
    for row in sound:
        found = checker.check_segment(row, rows.fingerprints[row.fingerprint_id].digest)
        if found:
            damaged[row.id] = found
    records: dict[tuple[str, Extent], list[Finding]] = {}
    for place in rows.records(catalog.store_uuid):
        found = checker.check_record(place.extent, place.expected, place.whose)
        if found:
            records[place.whose, place.extent] = found
    if not damaged and not records:
        return
    # A writer may have removed some, and used their space, since the rows were read.
    now = CatalogRows.read(catalog)
    for segment_id in sorted(damaged.keys() & {row.id for row in now.segments}):
        checker.report.findings += damaged[segment_id]
    for place in now.records(catalog.store_uuid):
        checker.report.findings += records.get((place.whose, place.extent), [])


def _check_region(checker: ExtentChecker, store_uuid: str, region_bytes: int) -> None:
    device, report = checker.device, checker.report
    if device.capacity_bytes < region_bytes:
        report.add(
            "region",
            device.path,
            f"{device.capacity_bytes} bytes, made with {region_bytes}: it was truncated",
        )
    check_superblocks(checker, store_uuid)


def check_superblocks(checker: ExtentChecker, store_uuid: str) -> None:
    """Report damaged copies of the superblock, and bytes around them that are not zeros."""
    device, report = checker.device, checker.report
    try:
        # Not closed as a Region: the device is still needed, and the caller closes it.
        region = Region.open(device, store_uuid, writable=False)
    except (FormatError, DeviceError, ConfigError) as error:
        report.add("superblock", device.path, without_place(error, device.path))
        return
    for note in region.notes:
        report.add("superblock", device.path, note.replace(f" of {device.path}", ""))
    checker.check_reserved(region.superblock.region_bytes)
