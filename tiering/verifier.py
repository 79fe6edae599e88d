"""Reads a whole store and checks it: superblocks, headers, every page, the catalog's references.

It shares the format's parser with the read path, and takes no lock: a store that is open for
writing may be verified; what was committed before is what is checked.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvtier.errors import ConfigError, DeviceError, FormatError
from kvtier.io.catalog import Catalog, SegmentRow
from kvtier.io.device import Device
from kvtier.io.drives import Drives, MissingDrive
from kvtier.io.extent import Extent, drive_start
from kvtier.io.probe import open_device
from kvtier.io.region import Region, root_of
from kvtier.io.region_place import RegionPlace
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
    with (
        store_files.open_catalog(directory, settings, read_only=True) as catalog,
        ExitStack() as stack,
    ):
        rows = CatalogRows.read(catalog)
        sound = check_rows(rows, report)
        members = _open_drives(settings.places(directory), settings.store_uuid, report, stack)
        if all(isinstance(each, MissingDrive) for each in members):
            return report
        device = members[0] if len(members) == 1 else Drives(members)
        checker = ExtentChecker(device, settings.store_uuid, report)
        for number, (member, place) in enumerate(zip(members, settings.regions, strict=True)):
            if not isinstance(member, MissingDrive):
                _check_region(checker, drive_start(number), member, place.nbytes)
        _check_extents(checker, catalog, rows, sound)
        check_slabs(checker, catalog, rows)
    return report


def _open_drives(
    places: Sequence[RegionPlace], store_uuid: str, report: Report, stack: ExitStack
) -> list[Device | MissingDrive]:
    """The store's regions by number, opened for reading; what is wrong with them is reported."""
    found: list[Device | MissingDrive] = []
    for place in places:
        try:
            if region_state(place.path, place.nbytes) == MISSING:
                raise DeviceError(region_advice(MISSING, place.nbytes, len(places)))
            found.append(open_device(place.path, writable=False))
            stack.callback(found[-1].close)
        except DeviceError as error:
            why = without_place(error, place.path)
            report.add("region", place.path, why)
            found.append(MissingDrive(place.path, place.nbytes, why))
    if len(places) == 1:
        return found
    # A drive that cannot say which one it is stays where the settings name it.
    wanted = [_number(device, store_uuid, len(places)) for device in found]
    ordered: dict[int, Device | MissingDrive] = {}
    for number, device in zip(wanted, found, strict=True):
        if number is not None and number not in ordered:
            ordered[number] = device
    for number, device in enumerate(found):
        if device not in ordered.values():
            free = [each for each in range(len(places)) if each not in ordered]
            ordered[number if number in free else free[0]] = device
    return [ordered[number] for number in range(len(places))]


def _number(device: Device | MissingDrive, store_uuid: str, count: int) -> int | None:
    """Which region of this store a device carries, as its superblock says."""
    if isinstance(device, MissingDrive):
        return None
    try:
        root = root_of(device)
    except (FormatError, DeviceError, ConfigError):
        return None
    is_own = (root.store_uuid, root.region_count) == (store_uuid, count)
    return root.region_index if is_own and root.region_index < count else None


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


def _check_region(checker: ExtentChecker, start: int, device: Device, nbytes: int) -> None:
    """start: of this region, in bytes of the checker's device."""
    if device.capacity_bytes < nbytes:
        checker.report.add(
            "region",
            device.path,
            f"{device.capacity_bytes} bytes, made with {nbytes}: it was truncated",
        )
    check_superblocks(checker, start, device)


def check_superblocks(checker: ExtentChecker, start: int, device: Device) -> None:
    """Report damaged copies of the superblock, and bytes around them that are not zeros.

    start: of this region, in bytes of the checker's device. device: the one that it lies on.
    """
    report = checker.report
    try:
        # Not closed as a Region: the device is still needed, and the caller closes it.
        region = Region.open(device, checker.store_uuid, writable=False)
    except (FormatError, DeviceError, ConfigError) as error:
        report.add("superblock", device.path, without_place(error, device.path))
        return
    for note in region.notes:
        report.add("superblock", device.path, note.replace(f" of {device.path}", ""))
    checker.check_reserved(start, region.superblock.region_bytes)
