"""Single Pages that cannot be had, and those begun ahead: a typed error or nothing, never other
bytes, and nothing left behind."""

import errno
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ClosedError, DeviceError, FormatError
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.page_recall import PageRecall
from tests.aio_cases import ENGINES, simulated_drives
from tests.page_recall_cases import GEOMETRIES, TOKENS, Recalled, Wants, opened, stored
from tests.store_cases import open_store, put, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS = GEOMETRIES["float16, a block"]
LARGE = Config(None, "8MiB")


def one(case: Recalled, segment: int, head: int, page: int) -> Wants:
    slot = case.segments[segment].slot
    return Wants(*(np.array([each], np.int64) for each in (slot, head, page)))


def place_of(case: Recalled, layer: int, wants: Wants) -> tuple[int, int]:
    """Offset on the device and length of the first of these."""
    places = case.cache.places(layer, *wants.arrays)
    offsets, lengths = case.recall.directories.ranges(layer, places)
    return int(offsets[0]), int(lengths[0])


def without(wants: Wants, bad: Wants) -> Wants:
    same = np.ones(len(wants), np.bool_)
    for have, each in zip(wants.arrays, bad.arrays, strict=True):
        same &= have == each[0]
    return wants.some(~same)


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as region:
        region.seek(offset)
        [byte] = region.read(1)
        region.seek(offset)
        region.write(bytes([byte ^ 16]))


def is_known(case: Recalled, layer: int, wants: Wants) -> Any:
    return case.cache.frames(layer, case.cache.places(layer, *wants.arrays)) >= 0


def settled(case: Recalled) -> bool:
    """No buffer is in use, soon."""
    deadline = time.monotonic() + 5
    while case.recall._buffers_ahead.used_bytes and time.monotonic() < deadline:
        case.recall.device.poll()
        time.sleep(0.001)
    return not (case.recall._buffers_ahead.used_bytes or case.recall._reading.buffers.used_bytes)


# ---- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page", [0, 5, 12])
@pytest.mark.parametrize("geometry", ["float16, a block", "width 80", "small"])
def test_one_rotten_page(tmp_path: Path, geometry: str, page: int, engine: Any) -> None:
    """Page 12 of the last Segment is a short one."""
    kv = stored(tmp_path, GEOMETRIES[geometry])
    with opened(tmp_path, kv, Config(None, "8MiB", engine=engine)) as case:
        bad = one(case, 3, 1, page)
        offset, length = place_of(case, 1, bad)
        flip(case.store._files.region.path, offset + length - 1)
        wants = case.all_of(1)
        rest = without(wants, bad)
        case.recall.start(1, *case.all_of(1, case.segments[3:]).arrays)
        for _ in range(2):
            with pytest.raises(FormatError, match=f"page {page} of kv head 1 is damaged"):
                case.brought(1, wants)
            case.check_limit()
            assert is_known(case, 1, rest).all()
            assert not is_known(case, 1, bad).any()
        assert case.segments[3].quarantined
        assert case.segments[3].damaged
        assert not any(each.quarantined for each in case.segments[:3])
        case.recalled(1, rest)
        assert settled(case)


def test_pages_of_another_segment_in_its_place(tmp_path: Path) -> None:
    """Whole and intact, but not what was asked for."""
    kv = stored(tmp_path, BLOCKS)
    with opened(tmp_path, kv, LARGE) as case:
        wrong, right = one(case, 1, 0, 3), one(case, 0, 0, 3)
        source, length = place_of(case, 0, right)
        target, _ = place_of(case, 0, wrong)
        with open(case.store._files.region.path, "r+b") as region:
            region.seek(source)
            page = region.read(length)
            region.seek(target)
            region.write(page)
        with pytest.raises(FormatError):
            case.brought(0, wrong)
        assert case.segments[1].damaged
        case.recalled(0, right)


def test_a_rotten_header(tmp_path: Path) -> None:
    kv = stored(tmp_path, BLOCKS)
    with opened(tmp_path, kv, LARGE) as case:
        twin = PageRecall(case.store._mover)
        extent = case.segments[2].extents[0]
        assert extent is not None
        flip(case.store._files.region.path, extent.offset + 300)
        with pytest.raises(FormatError):
            twin.require_directories(case.units())
        assert case.segments[2].damaged
        assert not case.segments[1].quarantined


# ---- the device -----------------------------------------------------------------------------


def offsets_of(path: Path, kv: Any, layer: int, segment: int, head: int, page: int) -> int:
    with opened(path, kv, LARGE) as case:
        return place_of(case, layer, one(case, segment, head, page))[0]


@pytest.mark.parametrize("geometry", ["float16, a block", "width 80"])
def test_one_bad_block_fails_its_pages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, geometry: str
) -> None:
    kv = stored(tmp_path, GEOMETRIES[geometry])
    offset = offsets_of(tmp_path, kv, 0, 1, 1, 7)
    faults = Faults(bad_ranges=(BadRange(offset, 512, errno.ENODATA),))
    with simulated_drives(monkeypatch, faults), opened(tmp_path, kv, LARGE) as case:
        wants = case.all_of(0)
        with pytest.raises(DeviceError) as caught:
            case.brought(0, wants)
        assert caught.value.errno == errno.ENODATA
        case.check_limit()
        known = is_known(case, 0, wants)
        assert 1 <= (~known).sum() <= 2
        assert not is_known(case, 0, one(case, 1, 1, 7)).any()
        assert [each.quarantined for each in case.segments] == [False, True, False, False]
        assert not case.segments[1].damaged
        case.recalled(0, wants.some(known))
        assert settled(case)


def test_a_bad_block_in_a_hole_fails_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = stored(tmp_path, BLOCKS)
    offset = offsets_of(tmp_path, kv, 0, 1, 1, 7)
    faults = Faults(bad_ranges=(BadRange(offset, 512),))
    with simulated_drives(monkeypatch, faults), opened(tmp_path, kv, LARGE) as case:
        case.store._extents.device.merge_gap_bytes = 8192
        case.recalled(0, without(case.all_of(0), one(case, 1, 1, 7)))
        assert case.recall.counters.reads <= len(case.segments)
        assert not case.segments[1].quarantined


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_slow_drive_that_answers_in_pieces_and_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, geometry: Geometry
) -> None:
    kv = stored(tmp_path, geometry)
    random = np.random.default_rng(6)
    faults = Faults(delay_s=0.0002, shuffled=True, short_rate=0.4)
    layers = len(geometry.layers)
    with (
        simulated_drives(monkeypatch, faults),
        opened(tmp_path, kv, Config(None, "1MiB")) as case,
    ):
        for _ in range(12):
            case.cache.begin_step()
            for layer in range(layers):
                wants = case.chosen(random, layer, 12)
                behind = (layer + 1) % layers
                case.recall.start(behind, *case.chosen(random, behind, 8).arrays)
                case.recalled(layer, wants)
        case.recall.give_up()
        assert settled(case)
        case.released(tmp_path)


def test_a_drive_that_fails_as_a_whole(tmp_path: Path) -> None:
    kv = stored(tmp_path, BLOCKS)
    with opened(tmp_path, kv, LARGE) as case:
        case.recall.start(0, *case.all_of(0).arrays)
        case.store._extents.device.close()
        case.recall.start(1, *case.all_of(1).arrays)
        for layer in (1, 0):
            wants = case.all_of(layer)
            if layer:
                with pytest.raises(ClosedError):
                    case.brought(layer, wants)
            else:
                # What had been read before is there, and right.
                case.recalled(layer, wants)
        assert not case.recall._buffers_ahead.used_bytes


# ---- ahead ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_right_and_wrong_guesses(tmp_path: Path, geometry: Geometry, engine: Any) -> None:
    kv = stored(tmp_path, geometry)
    random = np.random.default_rng(7)
    layers = len(geometry.layers)
    with opened(tmp_path, kv, Config(None, "768KiB", engine=engine)) as case:
        for _ in range(20):
            case.cache.begin_step()
            next_wants = case.chosen(random, 0, 8)
            for layer in range(layers):
                wants, behind = next_wants, (layer + 1) % layers
                next_wants = case.chosen(random, behind, 8)
                case.recalled(layer, wants)
                guess = next_wants.some(slice(2, None)).both(case.chosen(random, behind, 2))
                case.recall.start(behind, *guess.arrays)
                if random.random() < 0.2:
                    case.empty_hot()
        assert case.recall.counters.pages_ahead > case.recall.counters.pages_missed > 0
        case.released(tmp_path)
        assert settled(case)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_guessed_is_read_once(tmp_path: Path, engine: Any) -> None:
    kv = stored(tmp_path, BLOCKS)
    with opened(tmp_path, kv, Config(None, "8MiB", engine=engine)) as case:
        wants = case.all_of(1)
        case.recall.start(1, *wants.arrays)
        case.recall.start(1, *wants.both(wants).arrays)
        case.recalled(1, wants)
        counters = case.recall.counters
        assert (counters.pages_ahead, counters.pages_missed) == (len(wants), 0)
        assert counters.bytes_wanted == len(wants) * BLOCKS.frame_bytes(0) - 2 * 2048
        case.released(tmp_path)


def test_a_guess_costs_nobody_anything(tmp_path: Path) -> None:
    """Where HOT is full of what is in use, what was begun ahead goes nowhere."""
    kv = stored(tmp_path, BLOCKS)
    unit = BLOCKS.frames_bytes(0, 512)
    with opened(tmp_path, kv, Config(None, 3 * unit)) as case:
        first = case.all_of(0, case.segments[:1])
        case.recalled(0, first)
        units = [Unit(each, 1) for each in case.segments[:2]]
        assert case.store._mover.load(units) == 2
        guess = case.all_of(0, case.segments[1:3])
        case.recall.start(0, *guess.arrays)
        batch = next(iter(case.recall._ahead.values())).batch
        assert batch is not None
        case.recall.device.wait(batch)
        case.recalled(0, first)
        assert not is_known(case, 0, guess).any()
        assert case.store._residency.hot.pages[1].sum() == 128
        case.released(tmp_path)


def test_a_guess_of_a_unit_that_came_as_a_whole(tmp_path: Path) -> None:
    kv = stored(tmp_path, BLOCKS)
    with opened(tmp_path, kv, LARGE) as case:
        guess = case.all_of(0, case.segments[:1])
        case.recall.start(0, *guess.arrays)
        assert case.store._mover.load([Unit(case.segments[0], 0)]) == 1
        case.recalled(0, guess.both(case.all_of(0, case.segments[1:2])))
        assert not is_known(case, 0, guess).any()
        case.released(tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_given_up_on_its_way(tmp_path: Path, engine: Any) -> None:
    kv = stored(tmp_path, BLOCKS)
    with opened(tmp_path, kv, Config(None, "8MiB", engine=engine)) as case:
        for _ in range(20):
            case.recall.start(0, *case.all_of(0).arrays)
            case.recall.give_up()
        assert settled(case)
        assert case.cache.held_bytes == 0
        case.recalled(0, case.all_of(0))
        assert case.recall.counters.pages_missed == len(case.all_of(0))
        case.released(tmp_path)


@pytest.mark.parametrize("engine", [*ENGINES, "slow"])
def test_the_store_closed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    kv = stored(tmp_path, BLOCKS)
    faults = Faults(delay_s=0.02)
    if engine == "slow":
        with simulated_drives(monkeypatch, faults), opened(tmp_path, kv, LARGE) as case:
            case.recall.start(0, *case.all_of(0).arrays)
            assert next(iter(case.recall._ahead.values())).in_air
            case.store.close()
    else:
        with opened(tmp_path, kv, Config(None, "8MiB", engine=engine)) as case:
            case.recall.start(0, *case.all_of(0).arrays)
            case.recalled(1, case.all_of(1))
            case.store.close()
    case.recall.give_up()
    assert case.recall._buffers_ahead.used_bytes == 0


def test_a_segment_released_on_its_way(tmp_path: Path) -> None:
    """Its slot is another Segment's when its Pages land: they are nobody's."""
    kv = stored(tmp_path, BLOCKS)
    other = some_tokens(1100, 77)
    with open_store(tmp_path, BLOCKS, Config(None, "4MiB")) as store:
        put(store, kv, "b", other)
    with opened(tmp_path, kv, LARGE) as case:
        case.recall.start(0, *case.all_of(0).arrays)
        case.store.release(case.sequence)
        case.store._registry.forget_unused()
        twin = Recalled(case.store, kv, other, case.recall)
        wants = twin.all_of(0)
        twin.recalled(0, wants)
        assert case.recall.counters.pages_missed == len(wants)
        twin.released(tmp_path)
        assert len(TOKENS) > len(other)
