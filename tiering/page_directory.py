"""What reading single Pages takes: where each lies on the device, and the checksum it must have.

Invariants:
- What is kept of a unit is that of the Extent it had when it was loaded; `lacking` names a unit
  whose Extent is another one by now. What is kept of a slot goes with its Segment (`forget`).
- A checksum comes from a header on the device that was checked, or from the directory that this
  process made for it. Beside the arrays there is an object for a unit, none for a Page.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.io.device import ByteArray, Int64Array
from kvtier.io.extent import Extent
from kvtier.tiering.extent_format import DIRECTORY_ENTRY, HEADER_BYTES, Directory
from kvtier.tiering.extent_io import ExtentIO, Unit
from kvtier.tiering.geometry import PAGE_TOKENS, SEGMENT_PAGES
from kvtier.tiering.segment import Segment
from kvtier.tiering.steps import Reading, Steps
from kvtier.tiering.units import Units

ChecksumArray = npt.NDArray[np.uint64]


class PageDirectories:
    """Of the Segments in use. Callers hold the store's lock."""

    def __init__(self, extents: ExtentIO) -> None:
        self.extents = extents
        geometry = extents.geometry
        layers = len(geometry.layers)
        self._heads = [each.kv_heads for each in geometry.layers]
        self._row_bytes = [geometry.row_bytes(layer) for layer in range(layers)]
        self._slots = 0
        self._checksums: list[ChecksumArray | None] = [None] * layers
        """Of one layer, [slots, heads, pages]."""
        self._payloads = np.zeros((layers, 0), np.int64)
        """Where a unit's payload begins on the device."""
        self._tokens = np.zeros(0, np.int64)
        self._segments: dict[int, Segment] = {}
        """By slot."""
        self._extents: dict[tuple[int, int], Extent] = {}
        """By layer and slot."""

    # ---- loaded -----------------------------------------------------------------------------

    def note(self, segments: Iterable[Segment]) -> None:
        """Single Pages of these may be asked for."""
        for each in segments:
            self._segments[each.slot] = each
            if each.slot >= self._slots:
                self._grow(each.slot + 1)
            self._tokens[each.slot] = each.token_count

    def _grow(self, slots: int) -> None:
        slots = max(slots, 2 * self._slots)
        added = slots - self._slots
        self._payloads = np.pad(self._payloads, ((0, 0), (0, added)))
        self._tokens = np.pad(self._tokens, (0, added))
        self._checksums = [
            each if each is None else np.pad(each, ((0, added), (0, 0), (0, 0)))
            for each in self._checksums
        ]
        self._slots = slots

    def units(self, layer: int, slots: Iterable[int]) -> list[Unit]:
        """The units at these slots, each of whose Segments was noted."""
        return [Unit(self._segments[slot], layer) for slot in slots]

    def lacking(self, layer: int, slots: Iterable[int]) -> list[int]:
        """Those of these slots, each of whose Segments was noted, whose units are to be loaded."""
        known, segments = self._extents, self._segments
        # A unit that is on no device is not known either.
        return [
            slot
            for slot in slots
            if (extent := known.get((layer, slot))) is None
            or segments[slot].extents[layer] is not extent
        ]

    def known(self, layer: int, slots: Iterable[int]) -> list[int]:
        """Those of these slots whose units can be read without any preparation."""
        noted = [slot for slot in slots if slot in self._segments]
        lacking = {*self.lacking(layer, noted)}
        return [each for each in noted if each not in lacking and not self._segments[each].lost]

    def loading(self, units: Sequence[Unit], reading: Reading) -> Steps[None]:
        """Know the directories of these units, of noted Segments. Raises FormatError,
        DeviceError."""
        lacking = [each for each in units if self.lacking(each.layer, [each.segment.slot])]
        if not lacking:
            return
        self.extents.require_written(Units.of(lacking))
        committed = []
        for unit in lacking:
            # Until the commit there is no header yet.
            made = unit.segment.directories
            directory = made[unit.layer] if made else None
            if directory is None:
                committed.append(unit)
            else:
                self._keep(unit, directory)
        yield from self.extents.checking_headers(committed, reading, self._keep_header)

    def _keep_header(self, unit: Unit, header: ByteArray) -> None:
        size = self.extents.shape(unit).frames * DIRECTORY_ENTRY.itemsize
        self._keep(unit, header[HEADER_BYTES : HEADER_BYTES + size].view(DIRECTORY_ENTRY))

    def _keep(self, unit: Unit, directory: Directory) -> None:
        """directory: raw, and laid out as PageLayout says."""
        layer, slot, heads = unit.layer, unit.segment.slot, self._heads[unit.layer]
        sums = self._checksums[layer]
        if sums is None:
            sums = np.zeros((self._slots, heads, SEGMENT_PAGES), np.uint64)
            self._checksums[layer] = sums
        by_head = directory["checksum"].reshape(heads, -1)
        sums[slot, :, : by_head.shape[1]] = by_head
        extent = self.extents.extent(unit)
        self._payloads[layer, slot] = extent.offset + self.extents.shape(unit).header_bytes
        self._extents[layer, slot] = extent

    def forget(self, segment: Segment) -> None:
        """It loses its slot, or its Extents."""
        if self._segments.pop(segment.slot, None) is not None:
            for layer in range(segment.layers):
                self._extents.pop((layer, segment.slot), None)

    # ---- asked ------------------------------------------------------------------------------

    def checksums(self, layer: int, places: Int64Array) -> ChecksumArray:
        """uint64, of Pages of units that are known, at places as PageCache names them."""
        sums = self._checksums[layer]
        assert sums is not None
        found: ChecksumArray = sums.reshape(-1)[places]
        return found

    def ranges(self, layer: int, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Offsets on the device and lengths of the same Pages, in bytes."""
        heads, row_bytes = self._heads[layer], self._row_bytes[layer]
        columns, pages = np.divmod(places, SEGMENT_PAGES)
        slots, head = np.divmod(columns, heads)
        tokens = self._tokens[slots]
        before = pages * PAGE_TOKENS
        counts = np.minimum(tokens - before, PAGE_TOKENS)
        assert not len(counts) or int(counts.min()) > 0, "a Page that its Segment does not have"
        offsets = self._payloads[layer, slots] + (head * tokens + before) * row_bytes
        return offsets, counts * row_bytes

    def generations(self, slots: Iterable[int]) -> list[int]:
        """What checksums of Pages at these slots are seeded with."""
        segments = self._segments
        return [segments[slot].generation for slot in slots]
