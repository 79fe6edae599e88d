"""Which Frames of a pool are free, kept as runs, so that a unit gets neighbours where it can.

Neighbours can be read from the drive by one request, and without a bounce buffer.

Invariants (checked by `check`):
- No two free runs touch, and none touches the Frames that were never handed out.
- `_length_at`, `_start_before` and `_by_size` describe the same runs; `_by_size` is sorted.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FrameArray = npt.NDArray[np.int64]

_FEW = np.arange(128)


class FrameRuns:
    """Frames [0, count), all free at first."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._unused = 0
        """Frames from this one on are free, and most of them were never handed out."""
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        """Past the end of a run -> its start."""
        self._by_size: list[tuple[int, int]] = []

    def take(self, count: int) -> FrameArray:
        """`count` Frames, which must be free: the smallest run that holds them, so that large ones
        stay whole; else what was never used, so that memory which is not needed is not touched;
        else several runs, the largest first. They come in ascending order."""
        if not count:
            return np.zeros(0, np.int64)
        place = bisect_left(self._by_size, (count, -1))
        if place < len(self._by_size):
            return self._cut(self._by_size[place][1], count)
        parts = []
        while count > self._count - self._unused and self._by_size:
            length, start = self._by_size[-1]
            part = min(length, count)
            parts.append(self._cut(start, part))
            count -= part
        if count:
            assert count <= self._count - self._unused, "more Frames than are free"
            parts.append(_neighbours(self._unused, count))
            self._unused += count
        return parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))

    def take_each(self, counts: Sequence[int]) -> FrameArray:
        """What `take` gives for each count, one behind the other: all neighbours where that costs
        no memory which was never used while there are free runs."""
        total = sum(counts)
        if len(counts) == 1 or not self._by_size or self._by_size[-1][0] >= total:
            return self.take(total)
        return np.concatenate([self.take(count) for count in counts])

    def give(self, frames: FrameArray) -> None:
        """Take Frames back, in any order."""
        for start, length in runs_of(frames):
            self._add(start, length)

    def _cut(self, start: int, count: int) -> FrameArray:
        """Take the beginning of a run."""
        length = self._remove(start)
        if length > count:
            self._insert(start + count, length - count)
        return _neighbours(start, count)

    def _add(self, start: int, length: int) -> None:
        assert start + length <= self._unused, "Frames that were not handed out"
        before = self._start_before.get(start)
        if before is not None:
            length += self._remove(before)
            start = before
        if start + length in self._length_at:
            length += self._remove(start + length)
        if start + length == self._unused:
            self._unused = start
        else:
            self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        insort(self._by_size, (length, start))

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        del self._by_size[bisect_left(self._by_size, (length, start))]
        return length

    def check(self, taken: FrameArray) -> None:
        """Raise AssertionError unless every invariant holds and all but `taken` is free."""
        runs = [(start, length) for length, start in self._by_size]
        assert sorted(runs) == sorted(self._length_at.items())
        assert self._start_before == {start + length: start for start, length in runs}
        assert self._by_size == sorted(self._by_size)
        free = np.zeros(self._count, np.int64)
        free[self._unused :] = 1
        for start, length in runs:
            free[start : start + length] += 1
            assert start + length < self._unused
            assert start + length not in self._length_at, "free runs touch"
        free[taken] += 1
        assert (free == 1).all(), "a Frame is free and taken, or neither"


def _neighbours(start: int, count: int) -> FrameArray:
    """`count` Frames from `start` on."""
    if count > len(_FEW):
        return np.arange(start, start + count)
    # As each layer of a decode takes them. np.arange lets go of the interpreter's lock, which costs
    # more than the rest where other threads wait for it.
    few: FrameArray = _FEW[:count] + start
    return few


def runs_of(frames: FrameArray) -> list[tuple[int, int]]:
    """(start, length) of the runs that Frames form, in ascending order. Each is there once."""
    count = len(frames)
    if not count:
        return []
    first = int(frames[0])
    if int(frames[-1]) - first + 1 == count and bool((frames[1:] > frames[:-1]).all()):
        return [(first, count)]
    ordered = np.sort(frames)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    starts = ordered[np.concatenate([[0], breaks])]
    lengths = np.diff(np.concatenate([[0], breaks, [count]]))
    return list(zip(starts.tolist(), lengths.tolist(), strict=True))
