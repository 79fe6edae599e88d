"""A filled store on a device in memory, whose bytes are changed one place at a time and back."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvtier.io.alignment import align_up
from kvtier.io.buffers import aligned_bytes
from kvtier.io.catalog import Catalog, SegmentRow
from kvtier.io.device import Buffers
from kvtier.io.extent import Extent
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import NO_FAULTS
from kvtier.io.superblock import DATA_START
from kvtier.tiering import opening, verifier
from kvtier.tiering.catalog_check import CatalogRows, RecordPlace
from kvtier.tiering.catalog_rows import extents_of
from kvtier.tiering.config import Config, PlacementName
from kvtier.tiering.extent_check import ExtentChecker
from kvtier.tiering.extent_format import HEADER_BYTES, header_bytes
from kvtier.tiering.findings import Finding, Report
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import check_superblocks
from tests.store_cases import MIB, PLAIN, Remembered, check_bytes, open_store, put, some_tokens

OF_M = Remembered(PLAIN)
GRID = 4096
REGION_BYTES = 3 * MIB
HOT = Config(hot="4MiB")
LENGTHS = (700, 1100, 40, 513, 300)
"""Tokens of what is saved in turn until the region is full: whole Segments and short ones."""
EACH_BYTES = 96 * 1024
"""Upper bound of what headers, padding, digests and a record cost a name."""

Owner = SegmentRow | RecordPlace | None
"""Whose bytes they are; None: superblocks, and what lies around them."""


class Kept(SimulatedDevice):
    """Stays open when a store closes it, so that many stores in turn are opened on it."""

    def close(self) -> None:
        self.clear_log()


@dataclass(frozen=True)
class Place:
    """Bytes that are changed together."""

    offset: int
    length: int
    owner: Owner


class FilledStore:
    """A closed store whose region is full; `open` opens a fresh copy of it on the same device.

    Made once for many tests: each calls `attach`.
    """

    def __init__(self, home: Path, placement: PlacementName = "position") -> None:
        self.home = home
        self.placement = placement
        # The store looks whether the device is in use, so its path must exist.
        (home / "device").touch()
        self.device = Kept.open(REGION_BYTES, block_bytes=512, path=str(home / "device"))
        self.saved: dict[str, list[int]] = {}
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            self._fill(home / "pristine")
        with Catalog.open(home / "pristine" / "catalog.sqlite") as catalog:
            self.store_uuid = catalog.store_uuid
            rows = CatalogRows.read(catalog)
        self.rows = rows.segments
        self.records = rows.records(self.store_uuid)
        (self.fingerprint,) = rows.fingerprints.values()
        self.image = np.frombuffer(self.device.live(), np.uint8)
        parents = {row.id: row.parent_id for row in self.rows}
        self.name_of: dict[int, str] = {}
        """Which name a Segment belongs to: no two share any."""
        for name, last in self._last_segments.items():
            each: int | None = last
            while each is not None:
                self.name_of[each] = name
                each = parents[each]

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        for module in (opening, verifier):
            patch.setattr(module, "open_device", lambda path, **wishes: self.device)
        patch.setattr(opening, "create_region_file", lambda path, nbytes: Path(path).touch())

    def attach(self, patch: pytest.MonkeyPatch) -> None:
        """Use the device, as it was, in place of every region from now on."""
        self.device.set_faults(NO_FAULTS)
        self.write(0, self.image.tobytes())
        self._patch(patch)

    def _fill(self, path: Path) -> None:
        config = Config("3MiB", hot="4MiB", placement=self.placement)
        with open_store(path, PLAIN, config) as store:
            for number in range(40):
                tokens = some_tokens(LENGTHS[number % len(LENGTHS)], number)
                needed = len(tokens) * PLAIN.token_bytes + EACH_BYTES
                if store.stats().device_bytes + needed > REGION_BYTES - DATA_START - GRID:
                    continue
                put(store, OF_M, f"n{number}", tokens)
                self.saved[f"n{number}"] = tokens
            self._last_segments = {each.name: each.segment_id for each in store.names()}

    # ---- places -----------------------------------------------------------------------------

    def extent_of(self, random: np.random.Generator) -> tuple[SegmentRow, int, Extent]:
        """Any Extent, as likely as any other: (row, layer, extent)."""
        row = self.rows[int(random.integers(len(self.rows)))]
        extents = extents_of(row)
        layer = int(random.integers(len(extents)))
        return row, layer, extents[layer]

    def any_byte(self, random: np.random.Generator) -> tuple[int, Owner]:
        """A byte of all that is in use, each as likely as any other."""
        extents = [(each, row) for row in self.rows for each in extents_of(row)]
        parts: list[tuple[int, int, Owner]] = [(0, DATA_START, None)]
        parts += [(REGION_BYTES - GRID, GRID, None)]
        parts += [(extent.offset, extent.length, row) for extent, row in extents]
        parts += [(each.extent.offset, each.extent.length, each) for each in self.records]
        at = int(random.integers(sum(length for _, length, _ in parts)))
        for offset, length, owner in parts:
            if at < length:
                return offset + at, owner
            at -= length
        raise AssertionError("unreachable")

    def chosen_byte(self, random: np.random.Generator) -> tuple[int, Owner]:
        """A byte of one part of the format, each part as likely as any other."""
        part = int(random.integers(8))
        if part == 0:
            copy = (0, 64 * 1024, REGION_BYTES - GRID)[int(random.integers(3))]
            return copy + int(random.integers(GRID)), None
        if part == 1:
            return int(random.integers(DATA_START)), None
        if part == 6:
            record = self.records[int(random.integers(len(self.records)))]
            return record.extent.offset + int(random.integers(record.extent.length)), record
        row, layer, extent = self.extent_of(random)
        head = header_bytes(PLAIN, layer, row.token_count)
        payload_end = head + PLAIN.payload_bytes(layer, row.token_count)
        first, last = {
            2: (0, HEADER_BYTES),
            3: (HEADER_BYTES, head),
            4: (head, payload_end),
            5: (payload_end, align_up(payload_end, GRID)),
            7: (align_up(payload_end, GRID), extent.length),
        }[part]
        if first == last:
            first, last = 0, extent.length
        return extent.offset + int(random.integers(first, last)), row

    # ---- changes ----------------------------------------------------------------------------

    def change(self, random: np.random.Generator) -> tuple[Place, bytes]:
        """Draw a change: a place of whole blocks, and what it is to hold instead."""
        while True:
            draw = self.any_byte if random.integers(2) else self.chosen_byte
            at, owner = draw(random)
            length = (512, GRID)[int(random.integers(2))]
            place = Place(at // length * length, length, owner)
            before = self.image[place.offset : place.offset + length]
            after = before.copy()
            kind = int(random.integers(6))
            if kind < 3:
                after[at - place.offset] ^= 1 << int(random.integers(8))
            elif kind == 3:
                after[:] = np.frombuffer(random.bytes(length), np.uint8)
            elif kind == 4:
                after[:] = 0
            else:
                # A write that went to the wrong place: a block of another Extent.
                _, _, other = self.extent_of(random)
                first = other.offset + int(random.integers(other.length // length)) * length
                after[:] = self.image[first : first + length]
            if not np.array_equal(before, after):
                return place, after.tobytes()

    def write(self, offset: int, data: bytes) -> None:
        memory = aligned_bytes(len(data))
        memory[:] = np.frombuffer(data, np.uint8)
        self.device.write(np.array([offset], np.int64), Buffers.whole(memory))
        self.device.clear_log()

    def restore(self, place: Place) -> None:
        self.write(place.offset, self.image[place.offset : place.offset + place.length].tobytes())

    # ---- what is seen of it -----------------------------------------------------------------

    def findings(self, owner: Owner) -> list[Finding]:
        """What `verify` says of one Segment or record, or of what lies around them."""
        report = Report()
        checker = ExtentChecker(self.device, self.store_uuid, report)
        if owner is None:
            check_superblocks(checker, 0, self.device)
            return report.findings
        if isinstance(owner, RecordPlace):
            return checker.check_record(owner.extent, owner.expected, owner.whose)
        return checker.check_segment(owner, self.fingerprint.digest)

    def lost_with(self, owner: Owner) -> str | None:
        """The name that damage there may cost tokens."""
        return self.name_of[owner.id] if isinstance(owner, SegmentRow) else None

    def open(self) -> Store:
        """A store with the pristine catalog on the device as it is."""
        copy = self.home / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.home / "pristine", copy)
        return open_store(copy, PLAIN, HOT)

    def resumed(self, store: Store, name: str) -> int:
        """How much of a name the store returns; an assertion if its bytes are not exact."""
        tokens = self.saved[name]
        sequence = store.resume(tokens)
        found = sequence.length()
        if found:
            check_bytes(store, OF_M, sequence, tokens[:found])
        store.release(sequence)
        return found
