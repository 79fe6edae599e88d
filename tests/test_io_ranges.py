"""Merging of ranges: against a plain loop, over random ranges, and how long it takes."""

import time

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.io.device import Int64Array
from kvtier.io.ranges import merge_ranges


def ints(*values: int) -> Int64Array:
    return np.array(values, np.int64)


def by_hand(ranges: list[tuple[int, int]], gap: int, most: int) -> list[list[int]]:
    """[offset, end] of each read of ranges that do not overlap, one after the other."""
    reads: list[list[int]] = []
    for offset, length in sorted(ranges):
        end = offset + length
        if reads and offset - reads[-1][1] <= gap and end - reads[-1][0] <= most:
            reads[-1][1] = end
        else:
            reads.append([offset, end])
    return reads


def test_neighbours_become_one_read() -> None:
    merged = merge_ranges(ints(100, 0, 40, 60), ints(10, 20, 20, 20), 0, 1000)
    assert merged.offsets.tolist() == [0, 40, 100]
    assert merged.lengths.tolist() == [20, 40, 10]
    assert merged.index.tolist() == [2, 0, 1, 1]
    assert merged.start.tolist() == [0, 0, 0, 20]


def test_a_gap_is_read_along_with_them() -> None:
    offsets, lengths = ints(0, 24, 60), ints(20, 20, 20)
    assert merge_ranges(offsets, lengths, 3, 1000).lengths.tolist() == [20, 20, 20]
    assert merge_ranges(offsets, lengths, 4, 1000).lengths.tolist() == [44, 20]
    assert merge_ranges(offsets, lengths, 16, 1000).lengths.tolist() == [80]


def test_the_smallest_gaps_are_read_along_as_far_as_the_bytes_go() -> None:
    offsets, lengths = ints(0, 24, 50, 74, 100), ints(20, 20, 20, 20, 20)
    wanted = {0: [20] * 5, 4: [44, 20, 20, 20], 8: [44, 44, 20], 13: [44, 44, 20], 14: [94, 20]}
    for most, reads in wanted.items():
        merged = merge_ranges(offsets, lengths, 100, 1000, most)
        assert merged.lengths.tolist() == reads
    assert merge_ranges(offsets, lengths, 4, 1000, 1000).lengths.tolist() == [44, 44, 20]
    assert merge_ranges(ints(0, 10, 15), ints(10, 10, 10), 5, 99, 0).lengths.tolist() == [25]


def test_reads_are_no_longer_than_allowed_unless_one_range_is() -> None:
    offsets = ints(*range(0, 100, 10), 100)
    lengths = ints(*[10] * 10, 500)
    merged = merge_ranges(offsets, lengths, 0, 35)
    assert merged.lengths.tolist() == [30, 30, 30, 10, 500]
    assert merged.index.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4]


def test_nothing_and_what_is_wrong() -> None:
    assert len(merge_ranges(ints(), ints(), 0, 1).offsets) == 0
    for wrong in ((-1, 10), (0, 0)):
        with pytest.raises(ConfigError):
            merge_ranges(ints(0), ints(1), *wrong)
    with pytest.raises(ConfigError, match="-5"):
        merge_ranges(ints(0), ints(-5), 0, 10)


@pytest.mark.parametrize("seed", range(200))
def test_random_ranges(seed: int) -> None:
    """Overlapping, equal, empty and far ones: each lies whole in its read, and no read that joins
    some is too long."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 60))
    offsets = random.integers(0, int(random.integers(1, 3000)), count)
    lengths = random.integers(0, 50, count)
    gap, most = int(random.integers(0, 20)), int(random.integers(1, 300))
    merged = merge_ranges(offsets, lengths, gap, most)
    assert (merged.start >= 0).all()
    assert (merged.offsets[merged.index] + merged.start == offsets).all()
    assert (merged.start + lengths <= merged.lengths[merged.index]).all()
    assert (np.diff(merged.offsets) >= 0).all()
    members = np.bincount(merged.index, minlength=len(merged.offsets))
    assert (members > 0).all()
    assert (merged.lengths[members > 1] <= most).all()


@pytest.mark.parametrize("seed", range(50))
def test_disjoint_ranges_are_merged_as_by_hand(seed: int) -> None:
    random = np.random.default_rng(1000 + seed)
    count = int(random.integers(1, 80))
    lengths = random.integers(1, 40, count)
    places = np.cumsum(lengths + random.integers(0, 12, count)) - lengths
    order = random.permutation(count)
    gap, most = int(random.integers(0, 12)), int(random.integers(1, 200))
    merged = merge_ranges(places[order], lengths[order], gap, most)
    ranges = list(zip(places.tolist(), lengths.tolist(), strict=True))
    found = [[int(a), int(a + n)] for a, n in zip(merged.offsets, merged.lengths, strict=True)]
    assert found == by_hand(ranges, gap, most)


def test_a_thousand_ranges_take_five_microseconds_each() -> None:
    random = np.random.default_rng(1)
    offsets = random.integers(0, 10_000, 1000) * 4096
    lengths = np.full(1000, 4096, np.int64)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        merge_ranges(offsets, lengths, 16384, 1 << 20)
        times.append(time.perf_counter() - begin)
    assert min(times) < 1000 * 5e-6
