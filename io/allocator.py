"""Which byte ranges of a store's regions are free, and the choice of one for a new extent.

Invariants of each region (checked by `check`):
- Free ranges and used ranges do not overlap and together cover [start, end) without a gap.
- No two free ranges touch: neighbours are always merged.
- Every boundary lies on the grid.
- `_length_at`, `_starts` and `_by_size` describe the same free ranges; `_starts` and `_by_size`
  are sorted.
"""

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from kvtier.errors import CapacityError, ConfigError, FormatError
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.io.extent import Extent, drive_of


class ExtentAllocator:
    """Best fit over [start, end) bytes. Safe to use from many threads."""

    def __init__(self, start: int, end: int) -> None:
        """start, end: bytes on the grid. Raises ConfigError if no extent fits between them."""
        if start < 0 or end <= start or (start | end) % GRID_BYTES:
            raise ConfigError(
                f"an allocator needs a window in multiples of {GRID_BYTES} bytes: "
                f"got start {start}, end {end}"
            )
        self.start = start
        self.end = end
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}
        self._used_bytes = 0
        self._length_at: dict[int, int] = {start: end - start}
        self._starts: list[int] = [start]
        self._by_size: list[tuple[int, int]] = [(end - start, start)]

    @property
    def free_bytes(self) -> int:
        """Bytes that belong to no extent."""
        return self.end - self.start - self._used_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that belong to an extent."""
        return self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Length of the longest extent that `allocate` would grant now."""
        with self._lock:
            return self._largest()

    def allocate(self, nbytes: int) -> Extent:
        """The smallest free range that holds `nbytes`, rounded up to the grid.

        Raises CapacityError if no free range is long enough, ConfigError if nbytes is not positive.
        """
        if nbytes <= 0:
            raise ConfigError(f"an extent needs at least one byte: got {nbytes}")
        length = align_up(nbytes, GRID_BYTES)
        with self._lock:
            i = bisect_left(self._by_size, (length, 0))
            if i == len(self._by_size):
                largest = self._largest()
                raise CapacityError(
                    f"region ({self.free_bytes} bytes free in all, largest free piece "
                    f"{largest} bytes)",
                    length,
                    largest,
                    self.end - self.start,
                )
            free_length, offset = self._by_size[i]
            self._remove_free(offset)
            if free_length > length:
                self._add_free(offset + length, free_length - length)
            self._used[offset] = length
            self._used_bytes += length
        return Extent(offset, length)

    def free(self, extent: Extent) -> None:
        """Give an allocated extent back. Raises AssertionError if it is not allocated as such."""
        with self._lock:
            found = self._used.get(extent.offset)
            if found != extent.length:
                raise AssertionError(
                    f"freed an extent that is not allocated: offset {extent.offset}, length "
                    f"{extent.length}; allocated at this offset: {found or 0} bytes"
                )
            del self._used[extent.offset]
            self._used_bytes -= extent.length
            offset, length = extent.offset, extent.length
            following = self._length_at.get(extent.end)
            if following is not None:
                self._remove_free(extent.end)
                length += following
            i = bisect_right(self._starts, offset) - 1
            if i >= 0:
                before = self._starts[i]
                before_length = self._length_at[before]
                if before + before_length == offset:
                    self._remove_free(before)
                    offset, length = before, length + before_length
            self._add_free(offset, length)

    def occupy(self, offsets: Iterable[int], lengths: Iterable[int]) -> None:
        """Mark the extents that a catalog names as used; all of them, or none on an error.

        offsets, lengths: bytes, in any order. Raises FormatError on an overlap, a range outside
        the window, one off the grid, or sequences of different lengths.
        """
        try:
            added = list(zip(map(int, offsets), map(int, lengths), strict=True))
        except ValueError as error:
            raise FormatError("the catalog names more offsets than lengths, or fewer") from error
        with self._lock:
            ranges = sorted([*self._used.items(), *added])
            gaps: list[tuple[int, int]] = []
            position = self.start
            for offset, length in ranges:
                if length <= 0 or (offset | length) % GRID_BYTES:
                    raise FormatError(
                        f"extent at offset {offset} of {length} bytes does not lie on the grid "
                        f"of {GRID_BYTES} bytes"
                    )
                if offset < self.start or offset + length > self.end:
                    raise FormatError(
                        f"extent at offset {offset} of {length} bytes lies outside the data "
                        f"window [{self.start}, {self.end}) of the region"
                    )
                if offset < position:
                    raise FormatError(
                        f"extent at offset {offset} of {length} bytes overlaps the one that ends "
                        f"at {position}"
                    )
                if offset > position:
                    gaps.append((position, offset - position))
                position = offset + length
            if position < self.end:
                gaps.append((position, self.end - position))
            self._used = dict(ranges)
            self._used_bytes = sum(self._used.values())
            self._length_at = dict(gaps)
            self._starts = [offset for offset, _ in gaps]
            self._by_size = sorted((length, offset) for offset, length in gaps)

    def used(self) -> dict[int, int]:
        """Length by offset of everything that is in use."""
        with self._lock:
            return dict(self._used)

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds. For tests; walks everything."""
        with self._lock:
            pieces = sorted(
                [(o, n, "used") for o, n in self._used.items()]
                + [(o, n, "free") for o, n in self._length_at.items()]
            )
            position, previous = self.start, "used"
            for offset, length, kind in pieces:
                assert offset == position, f"gap or overlap at {position}: next piece at {offset}"
                assert length > 0, f"empty piece at {offset}"
                assert (offset | length) % GRID_BYTES == 0, f"piece at {offset} off the grid"
                assert not (kind == previous == "free"), f"free pieces touch at {offset}"
                position, previous = offset + length, kind
            assert position == self.end, f"pieces end at {position}, the window at {self.end}"
            assert self._starts == sorted(self._length_at), "starts differ from the lengths"
            assert self._by_size == sorted((n, o) for o, n in self._length_at.items()), "sizes"
            assert self._used_bytes == sum(self._used.values()), "the count of used bytes"

    def _largest(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def _add_free(self, offset: int, length: int) -> None:
        self._length_at[offset] = length
        insort(self._starts, offset)
        insort(self._by_size, (length, offset))

    def _remove_free(self, offset: int) -> None:
        length = self._length_at.pop(offset)
        del self._starts[bisect_left(self._starts, offset)]
        del self._by_size[bisect_left(self._by_size, (length, offset))]


class SpreadAllocator:
    """Free space of all regions of a store that are there: one ExtentAllocator for each.

    Best fit within a region; which region is the caller's wish, or that with most free space.
    """

    def __init__(self, windows: Iterable[tuple[int, int]]) -> None:
        """windows: (start, end) of each region, in bytes of the store's device. Raises ConfigError
        if no extent fits into one of them."""
        self._parts = {drive_of(start): ExtentAllocator(start, end) for start, end in windows}
        self._turn = -1

    @property
    def window_bytes(self) -> int:
        """Bytes that extents may use in all."""
        return sum(part.end - part.start for part in self._parts.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that belong to no extent."""
        return sum(part.free_bytes for part in self._parts.values())

    @property
    def used_bytes(self) -> int:
        """Bytes that belong to an extent."""
        return sum(part.used_bytes for part in self._parts.values())

    @property
    def largest_free_bytes(self) -> int:
        """Length of the longest extent that `allocate` would grant now."""
        return max(part.largest_free_bytes for part in self._parts.values())

    def next_drive(self) -> int:
        """The number of the drive whose turn it is, one after the other."""
        drives = sorted(self._parts)
        self._turn = next((drive for drive in drives if drive > self._turn), drives[0])
        return self._turn

    def allocate(self, nbytes: int, drive: int | None = None) -> Extent:
        """A free range of `nbytes`, rounded up to the grid: on this drive if it has one.

        drive: None: the drive with most free space. Raises CapacityError if no free range is long
        enough anywhere, ConfigError if nbytes is not positive.
        """
        wish = self._parts.get(-1 if drive is None else drive)
        others = [part for part in self._parts.values() if part is not wish]
        others.sort(key=lambda part: -part.free_bytes)
        parts = others if wish is None else [wish, *others]
        for part in parts:
            if len(parts) == 1 or part.largest_free_bytes >= nbytes:
                return part.allocate(nbytes)
        largest = self.largest_free_bytes
        raise CapacityError(
            f"{len(parts)} regions ({self.free_bytes} bytes free in all, largest free piece "
            f"{largest} bytes)",
            align_up(nbytes, GRID_BYTES),
            largest,
            self.window_bytes,
        )

    def free(self, extent: Extent) -> None:
        """Give an allocated extent back. Raises AssertionError if it is not allocated as such."""
        self._parts[extent.drive].free(extent)

    def occupy(self, extents: Iterable[Extent]) -> None:
        """Mark the extents that a catalog names as used. Raises FormatError on an overlap, or one
        outside every window; then the allocator must not be used."""
        own: dict[int, list[Extent]] = {drive: [] for drive in self._parts}
        for extent in extents:
            if extent.drive not in own:
                raise FormatError(
                    f"extent at offset {extent.offset} of {extent.length} bytes lies on drive "
                    f"{extent.drive}, which the store does not have"
                )
            own[extent.drive].append(extent)
        for drive, part in self._parts.items():
            part.occupy([each.offset for each in own[drive]], [each.length for each in own[drive]])
        # The turn is not kept anywhere; whoever has most room got least before.
        self._turn = max(self._parts, key=lambda drive: self._parts[drive].free_bytes) - 1

    def used(self) -> dict[int, int]:
        """Length by offset of everything that is in use."""
        return {
            offset: length
            for part in self._parts.values()
            for offset, length in part.used().items()
        }

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds. For tests; walks everything."""
        for part in self._parts.values():
            part.check()
