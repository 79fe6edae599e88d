"""Makes a lost catalog anew from what lies on the region.

Invariants:
- The region is only read until the new catalog is whole and in its place.
- A catalog that can be read is replaced only by force; the old file is kept in any case.
- Cut anywhere, the store has its old catalog, or none (and does not open), or the new one.
- What the new catalog does not name is erased, before the call returns or when the store is opened
  next: a later rebuild must not find what was removed since.
"""

import errno
import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError, DeviceError, FormatError, VersionMismatch
from kvtier.io.catalog import Catalog, NameRow, SegmentRow, pack_extents
from kvtier.io.durability import sync_directory
from kvtier.io.extent import drive_start
from kvtier.io.probe import open_device
from kvtier.io.regions import Regions, open_places
from kvtier.tiering import record_format, store_files
from kvtier.tiering.inventory import Inventory
from kvtier.tiering.ledger import Change, Ledger, NewName, load_allocator
from kvtier.tiering.lost_settings import known_settings, settings_of
from kvtier.tiering.rebuild_finds import Finds
from kvtier.tiering.rebuild_plan import NOT_LOST, PlannedName, Planner, RebuildPlan
from kvtier.tiering.rebuild_slabs import NOT_LOST as SLABS_NOT_LOST
from kvtier.tiering.rebuild_slabs import (
    LiveEntries,
    SlabPlan,
    fingerprints_of,
    plan_slabs,
    stale_headers,
    write_slabs,
)
from kvtier.tiering.record_format import NAME, Record
from kvtier.tiering.region_scan import RegionScan
from kvtier.tiering.store_files import Settings

GIB = 1 << 30

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are done."""


def nobody_asks(done: int, total: int) -> None:
    """The progress of a rebuild that nobody watches."""


@dataclass(slots=True)
class RebuildReport:
    """What came back. seconds: of the walk over the region; the rest takes less.

    segments_dropped, names_dropped, slabs_dropped, unusable: counts by reason. kept_catalog: where
    the old catalog is now; None: there was none. headers_left: of what does not come back, for the
    next open to erase, because the device refused.
    """

    store_uuid: str
    region_path: str
    bytes_read: int = 0
    bytes_unreadable: int = 0
    seconds: float = 0.0
    segments_found: int = 0
    segments_restored: int = 0
    segments_dropped: dict[str, int] = field(default_factory=dict)
    names_restored: int = 0
    names_dropped: dict[str, int] = field(default_factory=dict)
    fingerprints_restored: int = 0
    descriptions_lost: int = 0
    blobs_restored: int = 0
    slabs_dropped: dict[str, int] = field(default_factory=dict)
    unusable: dict[str, int] = field(default_factory=dict)
    headers_erased: int = 0
    headers_left: int = 0
    kept_catalog: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything that was found came back."""
        reasons = (self.segments_dropped.keys() | self.names_dropped.keys()) - set(NOT_LOST)
        reasons |= self.slabs_dropped.keys() - set(SLABS_NOT_LOST)
        return not reasons and not self.bytes_unreadable and not self.descriptions_lost

    @property
    def seconds_per_gib(self) -> float:
        return self.seconds * GIB / max(self.bytes_read, 1)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds_per_gib": self.seconds_per_gib, "ok": self.ok}


def rebuild(
    directory: Path,
    *,
    regions: Sequence[str] = (),
    force: bool = False,
    progress: Progress = nobody_asks,
) -> RebuildReport:
    """Replace the catalog of a closed store by one made from its region.

    regions: where they lie, if store.yaml is lost too. Holds are not on them, and are forgotten.
    All of them must be there: what continues a Segment of a missing drive would be lost. Raises
    ConfigError (no store, no region, a catalog that can be read and no force), LockedError,
    FormatError, WrongStoreError, DeviceError, CapacityError.
    """
    with ExitStack() as stack:
        known = known_settings(directory, regions)
        stack.enter_context(store_files.lock(directory))
        removed, live = _require_lost(directory, force)
        opened, settings = _open_regions(directory, known, regions, stack)
        report = RebuildReport(opened.store_uuid, opened.path)
        finds = _scan(opened, removed, report, progress)
        plan = Planner(finds).plan()
        slabs = plan_slabs(finds.slabs.values(), removed, live)
        finds.stale += slabs.erased
        _count(plan, finds, report)
        report.blobs_restored, report.slabs_dropped = slabs.blobs, dict(slabs.dropped)
        report.descriptions_lost += len(fingerprints_of(slabs) - plan.fingerprints.keys())
        new = directory / store_files.REBUILT
        try:
            _write(new, opened.store_uuid, plan, slabs, finds)
            report.kept_catalog = _replace(directory, new)
        finally:
            _remove(new)
        catalog = stack.enter_context(store_files.open_catalog(directory, settings))
        _finish(catalog, opened, plan)
        report.headers_left = len(catalog.condemned())
        if known is None:
            # Last: without it there is no store, and nobody takes a half-made one for whole.
            store_files.write_settings(directory, settings)
    return report


# ---- before anything is changed -------------------------------------------------------------


def _require_lost(directory: Path, force: bool) -> tuple[set[int], LiveEntries]:
    """Offsets of what the catalog says was removed and not erased yet, and of slabs, which Blobs
    are live, if it can be read.

    Raises ConfigError where it can be read and is not to be replaced by force.
    """
    path = directory / store_files.CATALOG
    if not path.exists():
        return set(), {}
    removed: set[int] = set()
    live: LiveEntries = {}
    try:
        with Catalog.open(path, read_only=True) as catalog:
            removed = {each.offset for each in catalog.condemned()}
            live = stale_headers(catalog)
            found = f"names {len(catalog.segments())} segments"
    except VersionMismatch as error:
        found = f"has format version {error.found}"
    except FormatError:
        return removed, live
    if not force:
        raise ConfigError(
            f"the catalog of {directory} can be read and {found}; rebuild replaces it, and "
            "forgets holds. Use --force to do so"
        )
    return removed, live


def _open_regions(
    directory: Path, settings: Settings | None, paths: Sequence[str], stack: ExitStack
) -> tuple[Regions, Settings]:
    if settings is None:
        settings = settings_of(directory, paths)
    places = settings.places(directory)
    found = open_places(places, lambda path: stack.enter_context(closing(open_device(path))))
    regions = Regions.open(places, found, settings.store_uuid)
    if regions.missing:
        raise DeviceError(
            f"{'; '.join(each.why for each in regions.missing)}. A rebuild needs all drives of a "
            "store: what continues segments of a missing one would be lost",
            errno.ENODEV,
        )
    return regions, settings


def _scan(region: Regions, removed: set[int], report: RebuildReport, progress: Progress) -> Finds:
    """Walk all regions, one after the other."""
    finds = Finds()
    total = sum(each.end - each.start for each in region.windows)
    done = 0
    started = time.perf_counter()
    for member, window in zip(region.present, region.windows, strict=True):
        scan = RegionScan(member, drive_start(window.drive))
        for find in scan.finds():
            finds.add(find, removed)
            progress(done + scan.bytes_done, total)
        done += window.end - window.start
        report.bytes_read += scan.bytes_read
        report.bytes_unreadable += scan.bytes_unreadable
    progress(total, total)
    report.seconds = time.perf_counter() - started
    return finds


def _count(plan: RebuildPlan, finds: Finds, report: RebuildReport) -> None:
    report.segments_found = len(finds.segments)
    report.segments_restored = len(plan.segments)
    report.segments_dropped = dict(plan.segments_dropped)
    report.names_restored = len(plan.names)
    report.names_dropped = dict(plan.names_dropped)
    report.fingerprints_restored = len(plan.fingerprints)
    lost = [each for each in plan.fingerprints.values() if each.record is None]
    report.descriptions_lost = len(lost)
    report.unusable = dict(finds.unusable)
    report.headers_erased = len(finds.stale)


# ---- the new catalog ------------------------------------------------------------------------


def _write(path: Path, store_uuid: str, plan: RebuildPlan, slabs: SlabPlan, finds: Finds) -> None:
    """Make the catalog as a file of its own."""
    _remove(path)
    now = time.time()
    with Catalog.create(path, store_uuid) as catalog, catalog.transaction():
        prints: dict[bytes, int] = {}
        for digest, planned in plan.fingerprints.items():
            record = b"" if planned.record is None else pack_extents([planned.record])
            prints[digest] = catalog.add_fingerprint(digest, planned.description, record)
            shapes = json.dumps(planned.geometry.to_dict())
            catalog.set_meta(f"geometry:{digest.hex()}", shapes)
        ids: list[int] = []
        for segment in plan.segments:
            key = segment.found.key
            ids.append(
                catalog.add_segment(
                    SegmentRow(
                        id=0,
                        fingerprint_id=prints[key.fingerprint],
                        provenance=key.provenance,
                        start_digest=key.start_digest,
                        end_digest=key.end_digest,
                        start_position=key.start_position,
                        token_count=key.token_count,
                        tokens=segment.found.tokens,
                        parent_id=None if segment.parent is None else ids[segment.parent],
                        parent_limit=segment.limit,
                        generation=key.generation,
                        extents=pack_extents(segment.found.extents),
                        created=now,
                        used=now,
                        quarantined=False,
                    )
                )
            )
        for name in plan.names:
            catalog.set_name(_name_row(name, prints[name.record.fingerprint], ids))
        write_slabs(catalog, slabs, prints)
        catalog.condemn(finds.stale)


def _name_row(name: PlannedName, fingerprint_id: int, ids: list[int]) -> NameRow:
    record = name.record
    return NameRow(
        name=record.name,
        fingerprint_id=fingerprint_id,
        segment_id=ids[name.segment],
        limit=record.limit,
        token_count=record.token_count,
        record=pack_extents([record.extent]),
        held_until=0.0,
        created=record.created,
    )


def _replace(directory: Path, new: Path) -> str | None:
    """Put the new catalog in the place of the old one; returns where that is kept.

    The write-ahead log goes with its catalog: beside another one it would be taken for that one's.
    """
    old = directory / store_files.CATALOG
    kept: Path | None = None
    with store_files.typed(directory):
        if any(each.exists() for each in _files(old)):
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            name, number = f"{store_files.LOST}{stamp}", 1
            while any(each.exists() for each in _files(directory / name)):
                number += 1
                name = f"{store_files.LOST}{stamp}-{number}"
            kept = directory / name
            for source, target in zip(_files(old), _files(kept), strict=True):
                if source.exists():
                    source.rename(target)
            sync_directory(os.fspath(directory))
        new.rename(old)
    sync_directory(os.fspath(directory))
    return None if kept is None else os.fspath(kept)


def _files(catalog: Path) -> list[Path]:
    """A catalog's files, the main one last: without it the others are nothing."""
    return [Path(f"{catalog}{suffix}") for suffix in ("-wal", "-shm", "-journal", "")]


def _remove(catalog: Path) -> None:
    with store_files.typed(catalog):
        for each in (*_files(catalog), *_files(Path(f"{catalog}.new"))):
            each.unlink(missing_ok=True)


def _finish(catalog: Catalog, region: Regions, plan: RebuildPlan) -> None:
    """Erase what the catalog does not name, and write the records that name another Segment."""
    rows = catalog.segments()
    inventory = Inventory.load(catalog, rows)
    allocator = load_allocator(catalog, inventory, region)
    ledger = Ledger(catalog, region.device, allocator, inventory)
    ledger.replay()
    change = Change()
    prints = {row.digest: row.id for row in catalog.fingerprints()}
    for name in plan.names:
        if name.moved:
            key = (prints[name.record.fingerprint], name.record.name)
            row = ledger.inventory.names[key]
            generation = plan.segments[name.segment].found.key.generation
            body = record_format.name_body(row, generation, name.record.end_digest)
            place = allocator.allocate(record_format.bytes_of(body))
            record = Record(
                uuid.UUID(catalog.store_uuid).bytes, name.record.fingerprint, NAME, body
            )
            record_format.put(record, place, region.device.write)
            change.names.append(NewName(row, place))
    if change.names:
        ledger.apply(change)
    ledger.settle()
