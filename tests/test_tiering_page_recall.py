"""Single Pages come into HOT, and stay while they are wanted: exact bytes, within the limit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import CapacityError
from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.page_cache import KEPT_STEPS
from kvtier.tiering.writer import hot_bytes_min
from tests.aio_cases import ENGINES
from tests.page_recall_cases import GEOMETRIES, TOKENS, Recalled, Wants, opened, stored
from tests.store_cases import (
    Remembered,
    Shuffled,
    check_bytes,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS = GEOMETRIES["float16, a block"]


def tiny(geometry: Geometry) -> int:
    """Room for one unit and a little."""
    return hot_bytes_min(geometry) + 8 * geometry.frame_bytes(0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_bytes_are_what_was_appended(tmp_path: Path, geometry: Geometry, engine: Any) -> None:
    kv = stored(tmp_path, geometry)
    random = np.random.default_rng(5)
    with opened(tmp_path, kv, Config(None, tiny(geometry), engine=engine)) as case:
        held = {layer: case.chosen(random, layer, 10) for layer in range(len(geometry.layers))}
        for _ in range(30):
            case.recall.cache.begin_step()
            for layer in range(len(geometry.layers)):
                # Most of what a step wants is what the one before wanted.
                wants = held[layer].both(case.chosen(random, layer, int(random.integers(1, 8))))
                case.recalled(layer, wants)
                held[layer] = wants.some(random.permutation(len(wants))[:12])
        counters = case.recall.counters
        assert 0 < counters.pages_missed < counters.pages_wanted
        assert counters.bytes_wanted <= counters.bytes_read
        case.released(tmp_path)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_layer_as_a_whole(tmp_path: Path, geometry: Geometry) -> None:
    """Neighbours are one request, across heads, and where only a header lies between them; short
    last Pages lie in Frames like others."""
    kv = stored(tmp_path, geometry)
    with opened(tmp_path, kv, Config(None, "16MiB")) as case:
        for layer in range(len(geometry.layers)):
            before = case.recall.counters.reads
            case.recalled(layer, case.all_of(layer))
            assert 0 < case.recall.counters.reads - before <= len(case.segments)
        wanted = len(case.segments), case.recall.counters
        assert wanted[1].bytes_read < 1.3 * wanted[1].bytes_wanted
        case.released(tmp_path)


def test_parts_of_a_large_recall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = stored(tmp_path, BLOCKS)
    monkeypatch.setattr("kvtier.tiering.page_recall.PART_BYTES", 40_000)
    with opened(tmp_path, kv, Config(None, "16MiB")) as case:
        case.recalled(0, case.all_of(0))
        assert case.recall.counters.reads >= len(case.all_of(0)) // 10
        case.released(tmp_path)


def test_what_is_there_is_not_read_again(tmp_path: Path) -> None:
    kv = stored(tmp_path, BLOCKS)
    with opened(tmp_path, kv, Config(None, "8MiB")) as case:
        assert case.store._mover.load([Unit(case.segments[1], 0)]) == 1
        wants = case.all_of(0)
        reads = case.store._extents.device.traffic.bytes_read
        case.recalled(0, wants)
        counters = case.recall.counters
        whole = 2 * 32
        assert (counters.pages_wanted, counters.pages_missed) == (len(wants), len(wants) - whole)
        assert counters.bytes_read == case.store._extents.device.traffic.bytes_read - reads
        reads = case.store._extents.device.traffic.bytes_read
        case.recalled(0, wants.both(wants))
        assert case.store._extents.device.traffic.bytes_read == reads
        case.released(tmp_path)


def test_holes_are_read_along_as_far_as_that_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = stored(tmp_path, BLOCKS)
    monkeypatch.setattr("kvtier.tiering.page_recall.HOLE_BYTES", 0)
    with opened(tmp_path, kv, Config(None, "8MiB")) as case:
        every = case.all_of(0, case.segments[:1]).some(slice(0, 32))
        holed = every.some(np.isin(every.pages, [3, 9, 10, 20, 30], invert=True))
        case.store._extents.device.merge_gap_bytes = 0
        case.recalled(0, holed)
        assert case.recall.counters.reads == 5
        case.cache.forget(case.segments[0].slot)
        case.store._extents.device.merge_gap_bytes = 4096
        case.recalled(0, holed)
        assert case.recall.counters.reads == 5 + 2
        # Of far more holes than may be read along, only some are.
        case.cache.forget(case.segments[0].slot)
        counters = case.recall.counters
        counters.reads = counters.bytes_read = counters.bytes_wanted = 0
        case.recalled(0, every.some(slice(0, 32, 2)))
        assert counters.reads == 16 - int(0.3 * 16)
        assert counters.bytes_read <= 1.3 * counters.bytes_wanted
        # Small ones are read along whatever was measured.
        case.cache.forget(case.segments[0].slot)
        counters.reads = case.store._extents.device.merge_gap_bytes = 0
        monkeypatch.setattr("kvtier.tiering.page_recall.HOLE_BYTES", 4096)
        case.recalled(0, holed)
        assert counters.reads == 2
        case.released(tmp_path)


def test_the_last_steps_stay_and_older_ones_leave_first(tmp_path: Path) -> None:
    kv = stored(tmp_path, BLOCKS)
    # Room for 40 Pages; 2 new ones in each step.
    page = BLOCKS.frame_bytes(0)
    with opened(tmp_path, kv, Config(None, max(tiny(BLOCKS), 100 * page))) as case:
        room = case.store._residency.hot.tier.limit_bytes // page
        every = case.all_of(0)
        new = room // (KEPT_STEPS + 2)
        for step in range(len(every) // new):
            case.cache.begin_step()
            case.recalled(0, every.some(slice(step * new, (step + 1) * new)))
            missed = case.recall.counters.pages_missed
            kept = every.some(slice(max(0, step - KEPT_STEPS) * new, (step + 1) * new))
            frames = case.cache.frames(0, case.cache.places(0, *kept.arrays))
            assert (frames >= 0).all()
            assert missed == (step + 1) * new
        case.released(tmp_path)


def test_old_pages_give_way_before_units_and_new_ones_after(tmp_path: Path) -> None:
    kv = stored(tmp_path, BLOCKS)
    unit = BLOCKS.frames_bytes(0, 512)
    with opened(tmp_path, kv, Config(None, 3 * unit)) as case:
        room, cache = case.store._room, case.cache
        old, new = (case.all_of(0, [each]) for each in case.segments[:2])
        case.recalled(0, old)
        for _ in range(KEPT_STEPS + 1):
            cache.begin_step()
        case.recalled(0, new)
        assert case.store._mover.load([Unit(case.segments[2], 1)]) == 1
        assert case.store._residency.hot.tier.free_bytes == 0
        assert room.make(unit)
        assert cache.page_bytes == unit
        assert case.store._residency.hot.pages.any()
        assert not room.make(2 * unit, idle_only=True)
        assert room.make(2 * unit)
        assert cache.page_bytes == unit
        assert not case.store._residency.hot.pages.any()
        with cache.lease():
            case.recalled(0, new)
            assert not room.make(3 * unit)
        assert cache.page_bytes == unit
        assert room.make(3 * unit)
        assert cache.held_bytes == 0
        case.released(tmp_path)


def test_a_unit_that_is_whole_needs_no_single_pages(tmp_path: Path) -> None:
    kv = stored(tmp_path, BLOCKS)
    unit = BLOCKS.frames_bytes(0, 512)
    with opened(tmp_path, kv, Config(None, 3 * unit)) as case:
        wants = case.all_of(0, case.segments[:1])
        case.recalled(0, wants)
        assert case.store._mover.load([Unit(case.segments[0], 0), Unit(case.segments[1], 0)]) == 2
        case.recalled(0, wants)
        assert case.cache.page_bytes == unit
        # Nothing here is idle but they.
        assert case.store._room.make(unit, idle_only=True)
        assert case.cache.page_bytes == 0
        assert case.store._residency.hot.pages.sum() == 2 * len(wants)
        case.released(tmp_path)


def test_more_than_hot_has_room_for(tmp_path: Path) -> None:
    kv = stored(tmp_path, BLOCKS)
    with opened(tmp_path, kv, Config(None, tiny(BLOCKS))) as case:
        held = case.all_of(0, case.segments[:1])
        case.recalled(0, held)
        with pytest.raises(CapacityError):
            case.brought(0, case.all_of(0))
        case.check_limit()
        # What is held and wanted as well does not make room for the rest.
        case.recalled(0, held)
        with pytest.raises(CapacityError):
            case.brought(0, held.both(case.all_of(0, case.segments[1:2])))
        case.check_limit()
        case.recalled(0, case.all_of(0, case.segments[1:2]))
        case.released(tmp_path)


def test_what_host_has_is_copied(tmp_path: Path) -> None:
    kv = stored(tmp_path, GEOMETRIES["width 80"])
    config = Config(None, "2MiB", host="4MiB")
    with opened(tmp_path, kv, config) as case:
        units = [Unit(each, 1) for each in case.segments]
        for unit in units[:3]:
            assert case.store._mover.load([unit]) == 1
        case.empty_hot()
        assert case.store._residency.host.pages[1].any()
        before = case.store._extents.device.traffic.bytes_read
        wants = case.all_of(1, case.segments[:1])
        case.recalled(1, wants)
        assert case.store._extents.device.traffic.bytes_read == before
        case.recalled(1, case.all_of(1))
        assert case.store._extents.device.traffic.bytes_read > before
        case.released(tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_of_segments_that_nobody_saved(tmp_path: Path, engine: Any) -> None:
    """Their directories are in memory, and their bytes may be on their way to the drive; some are
    named later, and some are written anew."""
    geometry = GEOMETRIES["widths differ"]
    kv = Remembered(geometry)
    config = Config("48MiB", hot=4 * geometry.token_bytes * 512, engine=engine)
    with open_store(tmp_path, geometry, config, Shuffled(3)) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, TOKENS)
        case = Recalled(store, kv, TOKENS, sequence=sequence)
        for layer in range(2):
            case.recalled(layer, case.all_of(layer).some(slice(0, None, 3)))
        assert store.save(sequence, "a", TOKENS) == len(TOKENS)
        for layer in range(2):
            case.recalled(layer, case.all_of(layer).some(slice(0, None, 5)))
        check_bytes(store, kv, sequence, TOKENS)
        store.release(sequence)


def test_a_segment_released_while_its_pages_are_here(tmp_path: Path) -> None:
    kv = stored(tmp_path, BLOCKS)
    other = some_tokens(1100, 77)
    with open_store(tmp_path, BLOCKS, Config(None, "4MiB")) as store:
        put(store, kv, "b", other)
    with opened(tmp_path, kv, Config(None, "8MiB")) as case:
        wants = case.all_of(0)
        case.recalled(0, wants)
        case.store.release(case.sequence)
        case.store._registry.forget_unused()
        assert case.cache.count == 0
        assert not case.recall.directories._extents
        assert (case.cache.frames(0, case.cache.places(0, *wants.arrays)) < 0).all()
        twin = Recalled(case.store, kv, other, case.recall)
        assert {each.slot for each in twin.segments} & {*wants.slots.tolist()}
        twin.recalled(0, twin.all_of(0))
        twin.released(tmp_path)


def test_what_was_read_ahead_for_others_gives_way(tmp_path: Path) -> None:
    """It lands when its layer's turn has come, and takes room that is free; not from who waits."""
    kv = stored(tmp_path, BLOCKS)
    with opened(tmp_path, kv, Config(None, tiny(BLOCKS))) as case:
        first, second, *_ = case.segments
        ahead = case.all_of(0, [first])
        case.recall.start(0, *ahead.arrays)
        assert case.recall.counters.pages_ahead == len(ahead)
        batch = next(iter(case.recall._ahead.values())).batch
        assert batch is not None
        case.recall.device.wait(batch)
        case.recalled(0, case.all_of(0, [second]))
        assert not case.recall._ahead
        case.recalled(0, ahead)
        case.released(tmp_path)


def test_many_segments_make_the_arrays_grow(tmp_path: Path) -> None:
    geometry = GEOMETRIES["small"]
    tokens = some_tokens(40 * 512, 9)
    kv = stored(tmp_path, geometry, tokens)
    random = np.random.default_rng(1)
    with opened(tmp_path, kv, Config(None, "1MiB"), tokens) as case:
        for _ in range(120):
            case.cache.begin_step()
            for layer in range(3):
                case.recalled(layer, case.chosen(random, layer, 60))
        assert case.cache._queued <= 8 * case.cache.count + 16384 + 60
        case.released(tmp_path)


def test_nothing_wanted(tmp_path: Path) -> None:
    kv = stored(tmp_path, BLOCKS)
    none = np.zeros(0, np.int64)
    with opened(tmp_path, kv, Config(None, "8MiB")) as case:
        assert len(case.brought(0, Wants(none, none, none))) == 0
        case.recall.start(0, none, none, none)
        case.recalled(0, Wants(none, none, none))
