"""Walks everything that a store's catalog names, at a set rate, and quarantines what is damaged.

Invariants:
- Reads are made without the store's lock, piece by piece, so that demand reads go first. What
  looks damaged is read again under the lock before anybody acts on it: by then its space may
  belong to another Segment.
- Only Segments, and slabs of Blobs, whose own bytes are damaged or unreadable are quarantined.
  Where the device fails as a whole, or lost its end, the walk ends with an error: its Segments may
  come back with it.
- Padding that is not zeros is reported; the KV beside it is exact and stays in use.
- No tier is touched: what HOT holds stays there.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np

from kvtier.errors import ConfigError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.buffers import aligned_bytes
from kvtier.io.catalog import SegmentRow
from kvtier.io.catalog_blobs import BlobTables
from kvtier.io.device import Buffers
from kvtier.io.extent import drive_start
from kvtier.io.region import Region
from kvtier.io.superblock import DATA_START, copy_offsets
from kvtier.tiering.blob_verifier import SlabRows, slab_findings
from kvtier.tiering.catalog_check import CatalogRows, RecordPlace, check_rows
from kvtier.tiering.catalog_rows import extents_of
from kvtier.tiering.config import parse_bytes
from kvtier.tiering.extent_check import ExtentChecker
from kvtier.tiering.findings import BLOB, DIGESTS, MEDIA, PADDING, Finding, Report
from kvtier.tiering.opening import OpenFiles
from kvtier.tiering.slab_rows import slab_extent
from kvtier.tiering.verifier import check_superblocks

RATE_DEFAULT = "100MiB"
"""Per second. A drive reads some GiB in that time, so that a scrub costs others little."""


@dataclass(slots=True)
class ScrubReport(Report):
    """What a scrub found until now.

    bytes_total: what it set out to read. quarantined, slabs_quarantined: ids of the Segments and
    slabs that it took out of use. finished: it came to its end.
    """

    bytes_total: int = 0
    quarantined: list[int] = field(default_factory=list)
    slabs_quarantined: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Custody:
    """How a scrub may act on a store.

    guard: keeps everybody else from changing the store for a moment; re-entrant.
    quarantine: takes the Segment with this id out of use for good; called under the guard.
    tell: hears of each finding at once, without the guard, and of an early end.
    """

    guard: AbstractContextManager[None]
    quarantine: Callable[[int], None]
    tell: Callable[[Finding], None]


def parse_rate(rate: int | str) -> int:
    """Bytes per second. Raises ConfigError."""
    found = parse_bytes(rate, "rate")
    if not found:
        raise ConfigError("rate is 0 bytes per second: name one such as '100MiB', or do not scrub")
    return found


class Pace:
    """Holds reads to a rate. Time that was not used is not made up for by a burst."""

    def __init__(self, bytes_per_s: int, wait: Callable[[float], object]) -> None:
        """wait: sleeps so many seconds, or less when the walk is to end."""
        self._bytes_per_s = bytes_per_s
        self._wait = wait
        self._due_s = 0.0

    def __call__(self, nbytes: int) -> None:
        """Return when `nbytes` may be read."""
        now = time.monotonic()
        if self._due_s > now:
            self._wait(self._due_s - now)
        self._due_s = max(self._due_s, now) + nbytes / self._bytes_per_s


class Scrubber:
    """One walk: `run` in this thread, or `start` in the background and `stop` or `result`."""

    def __init__(
        self,
        files: OpenFiles,
        custody: Custody,
        *,
        rate: int | str = RATE_DEFAULT,
    ) -> None:
        """rate: bytes per second that are read at most. Raises ConfigError."""
        self._files = files
        self._custody = custody
        self._ending = threading.Event()
        self._report = ScrubReport()
        pace = Pace(parse_rate(rate), self._ending.wait)
        region = files.region
        self._checker = ExtentChecker(region.device, region.store_uuid, self._report, pace)
        # The second look is made under the lock: it does not wait, and is not counted.
        self._second = ExtentChecker(region.device, region.store_uuid, Report())
        self._tables = BlobTables(files.catalog)
        self._thread = threading.Thread(target=self._work, name="kvtier-scrub", daemon=True)
        self._error: BaseException | None = None

    # ---- in the background ------------------------------------------------------------------

    def start(self) -> None:
        """Begin the walk in a thread of its own. Once only."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread is at work."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the walk and wait for its thread. Calling it twice is allowed.

        Call it before the store's lock is taken to close: the thread may be waiting for the lock.
        """
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the walk. False: the time passed before."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> ScrubReport:
        """Wait for the end of the walk; what it found. Raises what ended it early: DeviceError
        when the device answers nothing any more, FormatError, ClosedError."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self.report()

    def report(self) -> ScrubReport:
        """What was found until now: a copy."""
        found = self._report
        return replace(
            found,
            findings=list(found.findings),
            quarantined=list(found.quarantined),
            slabs_quarantined=list(found.slabs_quarantined),
        )

    def _work(self) -> None:
        try:
            self.run()
        except BaseException as error:
            # It belongs to whoever asks for the result.
            self._error = error
            what = f"the scrub ended early: {error}"
            self._custody.tell(Finding("scrub", self._files.region.path, what))

    # ---- the walk ---------------------------------------------------------------------------

    def run(self) -> ScrubReport:
        """Walk to the end, or until `stop`, in this thread. Raises as `result`."""
        uuid = self._files.region.store_uuid
        with self._custody.guard:
            rows = CatalogRows.read(self._files.catalog)
            known = self._files.inventory.slabs.values()
            slabs = [each.extent for each in known if each.sound and not each.quarantined]
        sound = check_rows(rows, self._report)
        # In the order in which they lie, which costs a drive least. What is quarantined is known.
        chosen = sorted(
            (row for row in sound if not row.quarantined), key=lambda row: extents_of(row)[0].offset
        )
        records = rows.records(uuid)
        region = self._files.region
        self._report.bytes_total = DATA_START * len(region.present) + sum(
            extent.length
            for extent in (
                *(extent for row in chosen for extent in extents_of(row)),
                *(each.extent for each in records),
                *slabs,
            )
            if region.holds(extent)
        )
        for drive in region.missing:
            self._report.add("region", drive.path, f"the drive is missing: {drive.why}")
        for number, member in enumerate(region.members):
            if isinstance(member, Region):
                check_superblocks(self._checker, drive_start(number), member.device)
        for place in records:
            if not self._ending.is_set():
                self._check_record(place)
        for row in chosen:
            if not self._ending.is_set():
                self._check_segment(row, rows.fingerprints[row.fingerprint_id].digest)
        for slab in rows.slabs:
            if not self._ending.is_set():
                self._check_slab(slab.id, rows)
        self._report.finished = not self._ending.is_set()
        return self.report()

    def _check_record(self, place: RecordPlace) -> None:
        """A damaged record is reported; nobody reads it but `rebuild`."""
        if not self._checker.check_record(place.extent, place.expected, place.whose):
            return
        with self._custody.guard:
            now = CatalogRows.read(self._files.catalog).records(self._files.region.store_uuid)
            found = self._second.check_record(place.extent, place.expected, place.whose)
            if place not in now:
                return
            self._report.findings += found
        for each in found:
            self._custody.tell(each)

    def _check_segment(self, row: SegmentRow, fingerprint: bytes) -> None:
        """Check one Segment and act on what is confirmed."""
        for layer in range(self._checker.count_segment(row)):
            if self._ending.is_set() or not self._is_current(row):
                return
            if self._checker.check_extent(row, fingerprint, layer):
                self._confirm(row, fingerprint, layer)

    def _is_current(self, row: SegmentRow) -> bool:
        """Whether the store still has this Segment, in use. Ids are never given twice."""
        entry = self._files.inventory.entries.get(row.id)
        return entry is not None and not entry.quarantined

    def _confirm(self, row: SegmentRow, fingerprint: bytes, layer: int) -> None:
        """Look again while nobody else changes the store; report, and quarantine."""
        with self._custody.guard:
            if not self._is_current(row):
                return
            found = self._second.check_extent(row, fingerprint, layer)
            damage = [each for each in found if each.kind not in (PADDING, DIGESTS)]
            if any(each.kind == MEDIA for each in damage):
                self._require_whole_drive(extents_of(row)[layer].drive)
            if damage:
                self._custody.quarantine(row.id)
                self._report.quarantined.append(row.id)
            self._report.findings += found
        for each in found:
            self._custody.tell(each)

    def _check_slab(self, slab_id: int, rows: CatalogRows) -> None:
        """Check one slab and act on what is confirmed. Damage to its header concerns no Blob."""
        said = SlabRows.read(self._tables, slab_id)
        if said is None or said.slab.quarantined:
            return
        self._report.slabs_checked += 1
        if not list(slab_findings(self._checker, said, rows.fingerprints)):
            return
        with self._custody.guard:
            said = SlabRows.read(self._tables, slab_id)
            if said is None or said.slab.quarantined:
                return
            found = list(slab_findings(self._second, said, rows.fingerprints))
            if any(each.kind == MEDIA for each in found):
                self._require_whole_drive(slab_extent(said.slab).drive)
            if any(each.kind in (MEDIA, BLOB) for each in found):
                self._files.ledger.slabs.quarantine([self._files.inventory.slabs[slab_id]])
                self._report.slabs_quarantined.append(slab_id)
            self._report.findings += found
        for each in found:
            self._custody.tell(each)

    def _require_whole_drive(self, number: int) -> None:
        """Raises DeviceError unless the first and the last block of a region can be read: else the
        drive failed, is gone or was truncated, and that is no fault of one Segment's media."""
        member = self._files.region.members[number]
        assert isinstance(member, Region), "what was read lies on a drive that is there"
        ends = copy_offsets(member.superblock.region_bytes)
        block = aligned_bytes(2 * GRID_BYTES)
        starts = np.array([0, GRID_BYTES], np.int64)
        lengths = np.full(2, GRID_BYTES, np.int64)
        offsets = np.array([ends[0], ends[2]], np.int64)
        member.device.read(offsets, Buffers(block, starts, lengths))
