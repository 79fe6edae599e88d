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

from kvtier.errors import ConfigError, DeviceError, FormatError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.catalog import Catalog, FingerprintRow, NameRow, SegmentRow
from kvtier.io.device import Buffers, Device
from kvtier.io.extent import Extent
from kvtier.io.probe import open_device
from kvtier.io.region import Region
from kvtier.tiering import extent_format, store_files
from kvtier.tiering.catalog_rows import extents_of, row_problem
from kvtier.tiering.chain import Tokens, chain_digest
from kvtier.tiering.extent_format import ExtentIdentity
from kvtier.tiering.geometry import ITEM_BYTES
from kvtier.tiering.page_layout import PageLayout


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
            fingerprints = {row.id: row for row in catalog.fingerprints()}
        sound = _check_references(segments, names, fingerprints, report)
        _check_overlaps(sound, report)
        region_path = settings.region_file(directory)
        try:
            device = open_device(region_path, writable=False)
        except DeviceError as error:
            report.add("region", region_path, str(error))
            return report
        try:
            _check_region(device, settings.store_uuid, settings.region_bytes, report)
            streams = _streams(sound)
            for row in sound:
                _check_segment(device, row, fingerprints[row.fingerprint_id], catalog, report)
                _check_tokens(row, streams[row.id], report)
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
        report.add("superblock", device.path, str(error))
    else:
        for note in region.notes:
            report.add("superblock", device.path, note)


def _check_references(
    segments: list[SegmentRow],
    names: list[NameRow],
    fingerprints: dict[int, FingerprintRow],
    report: Report,
) -> list[SegmentRow]:
    """Rows, parents, names and fingerprints fit together; returns the rows that can be true."""
    sound: dict[int, SegmentRow] = {}
    for row in segments:
        where = f"segment {row.id}"
        parent = None if row.parent_id is None else sound.get(row.parent_id)
        problem = row_problem(row, parent, None)
        if row.fingerprint_id not in fingerprints:
            problem = f"its fingerprint {row.fingerprint_id} is missing"
        if problem is not None:
            report.add("reference", where, problem)
            continue
        sound[row.id] = row
        if row.quarantined:
            report.add("extent", where, "it is quarantined: damage was found before")
    for name in names:
        target = sound.get(name.segment_id)
        if target is None or not 0 < name.limit <= target.token_count:
            report.add("reference", f"name {name.name!r}", f"segment {name.segment_id} is missing")
        elif target.start_position + name.limit != name.token_count:
            report.add("reference", f"name {name.name!r}", "its length is not its segment's end")
    return list(sound.values())


def _check_overlaps(segments: list[SegmentRow], report: Report) -> None:
    ranges = sorted(
        (extent.offset, extent.end, row.id) for row in segments for extent in extents_of(row)
    )
    for (_, end, owner), (offset, _, other) in pairwise(ranges):
        if offset < end:
            report.add("extent", f"byte {offset}", f"segments {owner} and {other} overlap")


def _streams(segments: list[SegmentRow]) -> dict[int, Tokens]:
    """All tokens from position 0 to the end of each Segment."""
    by_id = {row.id: row for row in segments}
    streams: dict[int, Tokens] = {}
    for row in segments:  # a parent's id is smaller than its children's
        own = np.frombuffer(row.tokens, "<u4")
        if row.parent_id is None:
            streams[row.id] = own
        else:
            before = by_id[row.parent_id].start_position + row.parent_limit
            streams[row.id] = np.concatenate([streams[row.parent_id][:before], own])
    return streams


def _check_tokens(row: SegmentRow, stream: Tokens, report: Report) -> None:
    """The names of a Segment's ends are the digests of the tokens before them."""
    ends = chain_digest(stream[: row.start_position]), chain_digest(stream)
    if ends != (row.start_digest, row.end_digest):
        report.add("tokens", f"segment {row.id}", "its digests are not those of its tokens")


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
        header = extent_format.parse_header(block, "it")
        extent_format.require_identity(header, identity, "it")
        layout = PageLayout(header.geometry, identity.token_count, ITEM_BYTES[header.dtype])
        layout.require_raw(header.directory, "it")
        layout.order_of(header.directory)
    except FormatError as error:
        yield "header", str(error)
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
