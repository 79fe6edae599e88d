"""Units as columns: the same units in the same order and sizes, and Frames where they belong."""

import numpy as np
import pytest

from kvtier.io.buffers import BufferPool
from kvtier.io.ring import results_of
from kvtier.tiering import extent_format
from kvtier.tiering.cargo import Runs
from kvtier.tiering.extent_io import ExtentIO, Owner, Unit, UnitShape
from kvtier.tiering.frames import MemoryTier
from kvtier.tiering.geometry import SEGMENT_PAGES, Geometry, LayerGeometry
from kvtier.tiering.residency import NO_FRAME, Residency
from kvtier.tiering.segment import Segment, SegmentView
from kvtier.tiering.units import Units

GEOMETRY = Geometry(
    (LayerGeometry(2, 8, 8), LayerGeometry(3, 24, 0, 600), LayerGeometry(2, 10, 6)), "float16"
)


def views_of(counts: list[int]) -> list[SegmentView]:
    starts = np.cumsum([0, *counts]).tolist()
    segments = [
        Segment(start, 3, slot=slot, token_count=count)
        for slot, (start, count) in enumerate(zip(starts, counts, strict=False))
    ]
    return [SegmentView(each, each.token_count) for each in segments]


def pairs(units: Units) -> list[tuple[int, int]]:
    return [(each.layer, each.segment.slot) for each in units]


@pytest.mark.parametrize("end", [1400, 1111])
def test_by_layer_is_what_each_layer_sees_in_its_order(end: int) -> None:
    views = views_of([512, 512, 376])
    firsts = [layer.first_seen(end) for layer in GEOMETRY.layers]
    units = Units.by_layer(views, firsts)
    expected = [
        (layer, view.segment.slot)
        for layer, first in enumerate(firsts)
        for view in views
        if view.end > first
    ]
    assert len(units) == len(expected) < 9
    assert pairs(units) == expected
    assert units.slots.tolist() == [slot for _, slot in expected]
    assert units.tokens.tolist() == [each.segment.token_count for each in units]


def test_units_are_the_same_however_they_are_taken() -> None:
    views = views_of([512, 100, 16])
    units = Units.by_layer(views, [0, 0, 0])
    assert len(units) == 9
    again = Units.of(list(units))
    assert pairs(again) == pairs(units)
    assert again.tokens.tolist() == units.tokens.tolist()
    assert Units.of(units) is units
    assert pairs(units[2:5]) == pairs(units)[2:5]
    assert units[4] == Unit(views[1].segment, 1)
    chosen = np.arange(9) % 2 == 0
    assert pairs(units.those(chosen)) == pairs(units)[::2]
    assert units.those(np.ones(9, np.bool_)) is units
    assert pairs(Units.of([])) == []


def test_sizes_are_those_of_the_shapes_and_stay_with_the_units() -> None:
    extents = ExtentIO(GEOMETRY, Owner(b"", b""), None, None, BufferPool(4096))  # type: ignore[arg-type]
    units = Units.by_layer(views_of([512, 100, 16, 1]), [0, 0, 0])
    first = extents.sizes(units[:1])
    assert first.frames.tolist() == [64]
    sizes = extents.sizes(units)
    for index, unit in enumerate(units):
        shape = UnitShape.of(GEOMETRY, unit.layer, unit.segment.token_count)
        assert [int(each[index]) for each in sizes] == [
            shape.frames,
            shape.frames_bytes,
            shape.header_bytes,
            shape.payload_bytes,
            extent_format.extent_bytes(GEOMETRY, unit.layer, unit.segment.token_count),
        ]
    chosen = np.arange(len(units)) % 3 == 1
    for part, places in ((units[3:7], np.arange(3, 7)), (units.those(chosen), chosen.nonzero()[0])):
        assert part.sizes is not None
        for ours, own in zip(sizes, extents.sizes(part), strict=True):
            assert (ours[places] == own).all()


def test_put_units_records_whole_and_cut_ones_and_leaves_what_is_there() -> None:
    hot = MemoryTier("HOT", 1 << 20, GEOMETRY)
    tier = Residency(GEOMETRY, hot, MemoryTier("HOST", 0, GEOMETRY)).hot
    layers, slots = np.arange(3).repeat(12), np.tile(np.arange(3, 15), 3)
    # Enough as long as each other to be written at once, whole or cut, and some of another length.
    pages = np.tile([SEGMENT_PAGES, 6, 7, 7, 7, SEGMENT_PAGES, 7, 5, 7, 7, 6, SEGMENT_PAGES], 3)
    heads = np.array([each.kv_heads for each in GEOMETRY.layers])[layers]
    counts = pages * heads
    frames = np.arange(counts.sum()) + 100
    begins = counts.cumsum() - counts
    there = np.arange(heads[3] * 7).reshape(-1, 7)
    tier.put(0, 6, 0, there)
    taken = tier.put_units(layers, slots, frames, begins, counts)
    assert taken.tolist() == [index != 3 for index in range(36)]
    for index, (layer, slot) in enumerate(zip(layers.tolist(), slots.tolist(), strict=True)):
        own = frames[begins[index] : begins[index] + counts[index]].reshape(heads[index], -1)
        own = own if taken[index] else there
        assert (tier.frames[layer][slot, :, : pages[index]] == own).all()
        assert (tier.frames[layer][slot, :, pages[index] :] == NO_FRAME).all()
        assert tier.pages[layer, slot] == counts[index]
    assert tier.pages.sum() == counts.sum()


def test_runs_end_where_frames_are_no_neighbours_and_where_a_unit_ends() -> None:
    firsts, counts = np.array([0, 3]), np.array([3, 4])
    one = Runs.of(np.arange(7) + 9, firsts, counts)
    assert [each.tolist() for each in one] == [[0, 3], [3, 4], [0, 1]]
    many = Runs.of(np.array([1, 2, 9, 10, 11, 20, 5]), firsts, counts)
    assert [each.tolist() for each in many] == [
        [0, 2, 3, 5, 6],
        [2, 1, 2, 1, 1],
        [0, 0, 1, 1, 1],
    ]


def test_results_of_completions_keep_their_sign_and_lose_their_flags() -> None:
    results = np.array([0, 4096, -5, -125, (1 << 31) - 1], np.int32)
    for flags in (0, 1, 0x80000001):
        entries = np.zeros(len(results), [("result", "i4"), ("flags", "u4")])
        entries["result"], entries["flags"] = results, flags
        assert results_of(entries.view(np.int64)).tolist() == results.tolist()


def test_a_lease_counts_a_unit_as_often_as_it_is_named() -> None:
    hot = MemoryTier("HOT", 1 << 20, GEOMETRY)
    residency = Residency(GEOMETRY, hot, MemoryTier("HOST", 0, GEOMETRY))
    layers, slots = np.array([2, 0, 2, 2]), np.array([5, 15, 5, 4])
    expected = np.zeros((3, 16))
    expected[2, 5], expected[0, 15], expected[2, 4] = 2, 1, 1
    with residency.lease(layers, slots):
        assert (residency.leases == expected).all()
        with residency.lease(layers[:1], slots[:1]):
            assert residency.leases[2, 5] == 3
            # Slots may be added while it lasts.
            while residency.has_free_slot:
                residency.take_slot()
            residency.take_slot()
        assert (residency.leases[:, :16] == expected).all()
    assert not residency.leases.any()
