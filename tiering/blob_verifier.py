"""The part of `verify` and `scrub` that is about Blobs: headers and directories of slabs, bytes of
each Blob, and whether the catalog says the same."""

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvtier.errors import DeviceError, FormatError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.catalog import Catalog, FingerprintRow
from kvtier.io.catalog_blobs import BlobTables
from kvtier.io.catalog_schema import BlobRow, SlabRow
from kvtier.io.device import ByteArray
from kvtier.io.extent import Extent
from kvtier.tiering import slab_format, slab_limits
from kvtier.tiering.catalog_check import CatalogRows
from kvtier.tiering.extent_check import ExtentChecker, Found, without_place
from kvtier.tiering.findings import BLOB, MEDIA, PADDING, Finding, place
from kvtier.tiering.slab_format import Slab, to_signed
from kvtier.tiering.slab_limits import COPIES
from kvtier.tiering.slab_rows import BlobChecker, slab_extent, slab_problem

HERE = "this slab"
"""Stands for a slab in the parser's messages, and is cut off them."""
LOOKS_MAX = 3
"""How often a slab is looked at while a writer changes it."""


@dataclass(frozen=True, slots=True)
class SlabRows:
    """What the catalog says of one slab."""

    slab: SlabRow
    blobs: list[BlobRow]

    @classmethod
    def read(cls, tables: BlobTables, slab_id: int) -> "SlabRows | None":
        """None: it was removed."""
        slab = tables.slab(slab_id)
        return None if slab is None else cls(slab, tables.blobs_of(slab_id))


def check_slabs(checker: ExtentChecker, catalog: Catalog, rows: CatalogRows) -> None:
    """Report what is wrong with slabs and Blobs that are there to the end."""
    tables = BlobTables(catalog)
    lost = tables.without_slab()
    if lost:
        checker.report.add("reference", "catalog", f"{lost} blobs name slabs that are missing")
    for row in rows.slabs:
        found: list[Finding] = []
        said = _rows(catalog, tables, row.id)
        for _ in range(LOOKS_MAX):
            found = [] if said is None else list(slab_findings(checker, said, rows.fingerprints))
            if not found:
                break
            # A writer may have removed Blobs, or the slab, while it was read.
            now = _rows(catalog, tables, row.id)
            if now == said:
                break
            said = now
        checker.report.slabs_checked += 1
        checker.report.findings += found


def _rows(catalog: Catalog, tables: BlobTables, slab_id: int) -> SlabRows | None:
    with catalog.transaction():
        return SlabRows.read(tables, slab_id)


def slab_findings(
    checker: ExtentChecker, said: SlabRows, fingerprints: Mapping[int, FingerprintRow]
) -> Iterator[Finding]:
    """Read a slab from end to end: what is wrong with it. fingerprints: those that are known."""
    row = said.slab
    where = f"slab {row.id}"
    problem = slab_problem(row)
    if problem is None and row.fingerprint_id not in fingerprints:
        problem = f"its fingerprint {row.fingerprint_id} is missing"
    try:
        extent = slab_extent(row)
    except FormatError as error:
        problem = str(error)
    if problem is not None:
        yield Finding("reference", where, problem)
        return
    if row.quarantined:
        yield Finding("extent", where, "it is quarantined: damage was found before")
    if not checker.is_there(extent):
        return
    device = checker.device
    where = f"{where}, {place(device, extent.offset)}"
    outside = checker.outside(extent)
    if outside is not None:
        yield Finding("region", where, outside)
        return
    try:
        block = checker.read(extent)
    except DeviceError as error:
        yield Finding(MEDIA, where, without_place(error, device.path))
        return
    checker.report.extents_checked += 1
    fingerprint = fingerprints[row.fingerprint_id].digest
    judged = list(_judged(said.blobs, row, extent))
    for wrong in (each for _, each in judged if each is not None):
        yield Finding("reference", f"a blob of {where}", wrong)
    sound = [blob for blob, wrong in judged if wrong is None]
    checker.report.blobs_checked += len(sound)
    store = uuid.UUID(checker.store_uuid).bytes
    for kind, what in _block_findings(block, row, extent, sound, store + fingerprint):
        yield Finding(kind, where, what)


def _judged(
    blobs: list[BlobRow], row: SlabRow, extent: Extent
) -> Iterator[tuple[BlobRow, str | None]]:
    """Each row with what is wrong with it."""
    checker = BlobChecker(row.fingerprint_id, extent)
    for blob in blobs:
        yield blob, checker.problem(blob)


def _block_findings(
    block: ByteArray, row: SlabRow, extent: Extent, blobs: list[BlobRow], owner: bytes
) -> Iterator[Found]:
    """What is wrong with the bytes of a slab. owner: the store's UUID, then the fingerprint."""
    for blob in blobs:
        data = block[blob.offset : blob.offset + blob.length]
        found = slab_format.blob_checksum(owner[16:], blob.key, data.data, row.generation)
        if to_signed(found) != blob.checksum:
            byte = extent.byte + blob.offset
            yield BLOB, f"the blob at byte {byte}, entry {blob.entry}, is damaged"
    # While a header is to be rewritten, it may be torn, and show what was removed as live.
    for copy in range(0 if row.header_stale else COPIES):
        try:
            slab_format.parse_header(block[copy * GRID_BYTES :], HERE)
        except FormatError as error:
            yield "header", f"copy {copy}: {without_place(error, HERE)}"
    try:
        slab = slab_format.parse(block, extent.offset)
    except FormatError as error:
        yield "header", without_place(error, HERE)
        return
    identity = slab.header.identity
    told = identity.store_uuid + identity.fingerprint
    if told != owner or (identity.generation, identity.extent_bytes) != (
        row.generation,
        extent.length,
    ):
        yield "header", "another slab lies here"
        return
    yield from _directory_findings(slab, row, blobs)
    if _padding(slab, block).any():
        yield PADDING, "bytes between its blobs that must be zeros are not"


def _directory_findings(slab: Slab, row: SlabRow, blobs: list[BlobRow]) -> Iterator[Found]:
    for blob in blobs:
        if blob.entry >= slab.header.entries:
            yield "reference", f"entry {blob.entry} is not in its directory"
            continue
        offset, length, checksum = slab.directory[blob.entry].tolist()[:3]
        said = (blob.key, blob.offset, blob.length, blob.checksum)
        if said != (slab.keys[blob.entry], offset, length, to_signed(checksum)):
            yield "reference", f"entry {blob.entry} is another one than the catalog says"
    live = np.zeros(slab.header.entries, np.bool_)
    live[[blob.entry for blob in blobs if blob.entry < slab.header.entries]] = True
    differing = np.flatnonzero(live != slab.header.live)
    if len(differing) and not row.header_stale:
        yield (
            "header",
            f"{len(differing)} entries are live there and not in the catalog, or reverse",
        )


def _padding(slab: Slab, block: ByteArray) -> ByteArray:
    """A copy of the slab with all that is covered by a checksum as zeros."""
    rest = block.copy()
    rest[: slab_limits.HEADERS_BYTES + slab.header.directory_bytes] = 0
    for offset, length, *_ in slab.directory.tolist():
        rest[offset : offset + length] = 0
    return rest
