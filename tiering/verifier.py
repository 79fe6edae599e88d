"""Reads a whole store and checks it: superblocks, headers, every page, the catalog's references.

It shares the format's parser with the read path, and takes no lock: a store that is open for
writing may be verified; what was committed before is what is checked.
"""

import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import ConfigError, DeviceError, FormatError, KvtierError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.catalog import Catalog, FingerprintRow, NameRow, SegmentRow
from kvtier.io.device import Buffers, Device
from kvtier.io.extent import Extent
from kvtier.io.probe import open_device
from kvtier.io.region import Region
from kvtier.tiering import extent_format, store_files
from kvtier.tiering.catalog_rows import RowChecker, extents_of, is_well_typed
from kvtier.tiering.extent_format import ExtentIdentity
from kvtier.tiering.geometry import ITEM_BYTES
from kvtier.tiering.page_layout import PageLayout
from kvtier.tiering.region_state import MISSING, region_advice, region_state

PLACE = "this extent"
"""Stands for an Extent in the parser's messages, and is cut off them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """kind: superblock, region, header, page, extent, tokens, reference. where, what: in words."""

    kind: str
    where: str
    what: str


@dataclass(slots=True)
class Report:
    findings: list[Finding] = field(default_factory=list)
    segments_checked: int = 0
    extents_checked: int = 0
    pages_checked: int = 0
    bytes_read: int = 0

    @property
    def ok(self) -> bool:
        return not self.findings

    def add(self, kind: str, where: str, what: str) -> None:
        self.findings.append(Finding(kind, where, what))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def verify(path: str | Path) -> Report:
    """Check the store in a directory. Raises ConfigError where there is no store, and FormatError
    or DeviceError where its catalog cannot be read at all; everything else is a finding."""
    directory = Path(path)
    settings = store_files.read_settings(directory)
    report = Report()
    with store_files.open_catalog(directory, settings, read_only=True) as catalog:
        with catalog.transaction():
            segments, names = catalog.segments(), catalog.names()
            rows = catalog.fingerprints()
        fingerprints = {row.id: row for row in rows if is_well_typed(row)}
        sound = _check_references(segments, names, fingerprints, report)
        _check_overlaps(sound, report)
        region_path = settings.region_file(directory)
        if region_state(region_path, settings.region_bytes) == MISSING:
            report.add("region", region_path, region_advice(MISSING, settings.region_bytes))
            return report
        try:
            device = open_device(region_path, writable=False)
        except DeviceError as error:
            report.add("region", region_path, _without_place(error, region_path))
            return report
        try:
            _check_region(device, settings.store_uuid, settings.region_bytes, report)
            for row in sound:
                _check_segment(device, row, fingerprints[row.fingerprint_id], catalog, report)
        finally:
            device.close()
    return report


def _check_region(device: Device, store_uuid: str, region_bytes: int, report: Report) -> None:
    if device.capacity_bytes < region_bytes:
        report.add(
            "region",
            device.path,
            f"{device.capacity_bytes} bytes, made with {region_bytes}: it was truncated",
        )
    try:
        # Not closed as a Region: the device is still needed, and the caller closes it.
        region = Region.open(device, store_uuid, writable=False)
    except (FormatError, DeviceError, ConfigError) as error:
        report.add("superblock", device.path, _without_place(error, device.path))
    else:
        for note in region.notes:
            report.add("superblock", device.path, note.replace(f" of {device.path}", ""))


def _without_place(error: KvtierError, place: str) -> str:
    """The error's text without the place it begins with: a finding names its place already."""
    return str(error).removeprefix(place).lstrip(": ")


def _check_references(
    segments: list[SegmentRow],
    names: list[NameRow],
    fingerprints: dict[int, FingerprintRow],
    report: Report,
) -> list[SegmentRow]:
    """Rows, parents, names and fingerprints fit together; returns the rows that can be true."""
    checker = RowChecker()
    for row in segments:
        where = f"segment {row.id}"
        problem = checker.problem(row)
        if problem is not None:
            report.add("reference", where, problem)
        elif row.fingerprint_id not in fingerprints:
            report.add("reference", where, f"its fingerprint {row.fingerprint_id} is missing")
        elif row.quarantined:
            report.add("extent", where, "it is quarantined: damage was found before")
    sound = {row.id: row for row in checker.sound if row.fingerprint_id in fingerprints}
    for name in names:
        where = f"name {name.name!r}"
        target = sound.get(name.segment_id) if is_well_typed(name) else None
        if target is None or not 0 < name.limit <= target.token_count:
            report.add("reference", where, f"segment {name.segment_id} is missing or damaged")
        elif target.start_position + name.limit != name.token_count:
            report.add("reference", where, "its length is not its segment's end")
    return list(sound.values())


def _check_overlaps(segments: list[SegmentRow], report: Report) -> None:
    ranges = sorted(
        (extent.offset, extent.end, row.id) for row in segments for extent in extents_of(row)
    )
    for (_, end, owner), (offset, _, other) in pairwise(ranges):
        if offset < end:
            report.add("extent", f"byte {offset}", f"segments {owner} and {other} overlap")


def _check_segment(
    device: Device,
    row: SegmentRow,
    fingerprint: FingerprintRow,
    catalog: Catalog,
    report: Report,
) -> None:
    report.segments_checked += 1
    store_uuid = uuid.UUID(catalog.store_uuid).bytes
    for layer, extent in enumerate(extents_of(row)):
        identity = ExtentIdentity(
            store_uuid=store_uuid,
            fingerprint=fingerprint.digest,
            provenance=row.provenance,
            start_digest=row.start_digest,
            end_digest=row.end_digest,
            generation=row.generation,
            start_position=row.start_position,
            token_count=row.token_count,
            layer=layer,
            device_offset=extent.offset,
            extent_bytes=extent.length,
        )
        where = f"segment {row.id}, layer {layer}, byte {extent.offset} of {device.path}"
        for kind, what in _extent_findings(device, extent, identity, row, report):
            report.add(kind, where, what)


def _extent_findings(
    device: Device,
    extent: Extent,
    identity: ExtentIdentity,
    row: SegmentRow,
    report: Report,
) -> Iterator[tuple[str, str]]:
    """Read one Extent from end to end and yield what is wrong with it."""
    if extent.end > device.capacity_bytes:
        yield "region", f"it ends at {extent.end}, the region at {device.capacity_bytes}"
        return
    block = aligned_bytes(extent.length)
    try:
        device.read(np.array([extent.offset], np.int64), Buffers.whole(block))
    except DeviceError as error:
        yield "extent", f"it cannot be read: {error}"
        return
    report.extents_checked += 1
    report.bytes_read += extent.length
    try:
        header = extent_format.parse_header(block, PLACE)
        extent_format.require_identity(header, identity, PLACE)
        layout = PageLayout(header.geometry, identity.token_count, ITEM_BYTES[header.dtype])
        layout.require_raw(header.directory, PLACE)
        layout.order_of(header.directory)
    except FormatError as error:
        yield "header", _without_place(error, PLACE)
        return
    if header.tokens is not None and header.tokens.tobytes() != row.tokens:
        yield "tokens", "its tokens are not those of the catalog"
    payload = block[header.header_bytes :][: header.payload_bytes]
    damaged = extent_format.damaged_pages(header.directory, payload, identity.generation)
    report.pages_checked += len(header.directory)
    if damaged:
        yield "page", f"pages {', '.join(map(str, damaged))} of {len(header.directory)} are damaged"
    elif extent_format.checksum(payload, identity.generation) != header.payload_checksum:
        yield "extent", "its payload is damaged"
