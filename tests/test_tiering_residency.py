"""Frames and Residency: the limit holds, no Frame is handed out twice, leases keep their Pages."""

import numpy as np
import pytest

from kvtier.errors import CapacityError
from kvtier.tiering.frame_runs import FrameArray
from kvtier.tiering.frames import MemoryTier
from kvtier.tiering.geometry import SEGMENT_PAGES, Geometry, LayerGeometry
from kvtier.tiering.residency import NO_FRAME, SLOTS_AT_FIRST, Residency

# Layers 0 and 2 share one pool, because their rows are equally wide; layer 1 has its own.
GEOMETRY = Geometry(
    (LayerGeometry(2, 8, 8), LayerGeometry(1, 24, 0), LayerGeometry(3, 10, 6)), "float16"
)
WIDTHS = [16, 24, 16]


def residency_of(limit_bytes: int = 1 << 20) -> Residency:
    hot = MemoryTier("HOT", limit_bytes, GEOMETRY)
    return Residency(GEOMETRY, hot, MemoryTier("HOST", limit_bytes, GEOMETRY))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_limit_holds_and_no_frame_is_handed_out_twice(seed: int) -> None:
    random = np.random.RandomState(seed)
    limit = 40 * GEOMETRY.frame_bytes(0) + 7
    tier = MemoryTier("HOT", limit, GEOMETRY)
    out: list[tuple[int, FrameArray]] = []
    highest = 0
    for _ in range(600):
        if random.rand() < 0.55 or not out:
            layer, count = int(random.randint(3)), int(random.randint(0, 12))
            needed = count * GEOMETRY.frame_bytes(layer)
            free = limit - sum(len(each) * GEOMETRY.frame_bytes(own) for own, each in out)
            if needed <= free:
                frames = tier.take(layer, count)
                assert len(frames) == count
                out.append((layer, frames))
            else:
                with pytest.raises(CapacityError, match="HOT is full") as caught:
                    tier.take(layer, count)
                assert (caught.value.needed, caught.value.free) == (needed, free)
        else:
            layer, frames = out.pop(random.randint(len(out)))
            tier.give(layer, frames)
        used = sum(len(each) * GEOMETRY.frame_bytes(own) for own, each in out)
        highest = max(highest, used)
        assert (tier.used_bytes, tier.used_bytes_max) == (used, highest)
        assert tier.used_bytes + tier.free_bytes == limit
        for width in set(WIDTHS):
            mine = [each for own, each in out if WIDTHS[own] == width]
            taken = np.concatenate(mine) if mine else np.zeros(0, np.int64)
            assert len(np.unique(taken)) == len(taken)
            rows = tier.memory(WIDTHS.index(width)).shape[0]
            assert taken.size == 0 or (taken.min() >= 0 and taken.max() < rows)
    assert highest > limit // 2


def test_memory_has_a_row_for_every_frame_and_is_aligned() -> None:
    tier = MemoryTier("HOT", 10 * GEOMETRY.frame_bytes(1) + 1, GEOMETRY)
    assert tuple(tier.memory(1).shape) == (10, 16 * 24)
    assert tier.memory(1).data_ptr() % 4096 == 0
    assert tier.memory(0) is tier.memory(2)


def test_frames_are_reused_last_in_first_out() -> None:
    tier = MemoryTier("HOT", 1 << 20, GEOMETRY)
    first = tier.take(0, 4)
    assert first.tolist() == [0, 1, 2, 3]
    tier.give(0, first[2:])
    again = tier.take(2, 3)
    assert sorted(again.tolist()) == [2, 3, 4]


def test_tier_of_no_bytes_refuses_everything() -> None:
    tier = MemoryTier("HOST", 0, GEOMETRY)
    with pytest.raises(CapacityError, match="HOST is full"):
        tier.take(0, 1)
    assert tier.memory(0).shape[0] == 0
    assert len(tier.take(0, 0)) == 0


def test_slots_are_unique_reused_and_grow() -> None:
    residency = residency_of()
    slots = [residency.take_slot() for _ in range(SLOTS_AT_FIRST)]
    assert sorted(slots) == list(range(SLOTS_AT_FIRST))
    assert not residency.has_free_slot
    residency.give_slot(slots[5])
    assert residency.take_slot() == slots[5]
    more = [residency.take_slot() for _ in range(3 * SLOTS_AT_FIRST)]
    assert sorted(slots + more) == list(range(4 * SLOTS_AT_FIRST))
    assert residency.slots == 4 * SLOTS_AT_FIRST


def test_growth_keeps_what_was_known_and_adds_nothing() -> None:
    residency = residency_of()
    slots = [residency.take_slot() for _ in range(SLOTS_AT_FIRST)]
    frames = residency.hot.tier.take(2, 6).reshape(3, 2)
    residency.hot.put(2, slots[3], 4, frames)
    residency.on_nvme[1, slots[2]] = True
    residency.touch(np.array([2]), np.array([slots[3]]))
    with residency.lease(np.array([2]), np.array([slots[3]])):
        added = residency.take_slot()
        assert residency.leases.sum() == 1
        assert residency.leases[2, slots[3]] == 1
    assert residency.leases.sum() == 0
    assert (residency.hot.frames[2][slots[3], :, 4:6] == frames).all()
    assert residency.hot.pages.sum() == 6
    assert residency.used_at[2, slots[3]] == residency.clock
    assert residency.on_nvme.sum() == 1
    for tier in (residency.hot, residency.host):
        assert all((each[added] == NO_FRAME).all() for each in tier.frames)
        assert [each.shape for each in tier.frames] == [
            (2 * SLOTS_AT_FIRST, layer.kv_heads, SEGMENT_PAGES) for layer in GEOMETRY.layers
        ]
    assert not residency.holds(added)
    assert residency.holds(slots[3])


def test_giving_a_slot_back_gives_every_frame_back() -> None:
    residency = residency_of()
    slot, other = residency.take_slot(), residency.take_slot()
    for tier, layer, pages in [
        (residency.hot, 0, 3),
        (residency.hot, 1, 2),
        (residency.host, 2, 1),
    ]:
        heads = GEOMETRY.layers[layer].kv_heads
        tier.put(layer, slot, 0, tier.tier.take(layer, heads * pages).reshape(heads, pages))
    kept = residency.hot.tier.take(0, 2).reshape(2, 1)
    residency.hot.put(0, other, 0, kept)
    residency.on_nvme[:, [slot, other]] = True
    residency.give_slot(slot)
    assert residency.hot.tier.used_bytes == 2 * GEOMETRY.frame_bytes(0)
    assert residency.host.tier.used_bytes == 0
    assert not residency.holds(slot)
    assert residency.hot.held(0, other).tolist() == kept.reshape(-1).tolist()
    assert residency.on_nvme[:, slot].tolist() == [False] * 3
    assert residency.on_nvme[:, other].all()


def test_put_on_top_of_a_page_is_a_mistake() -> None:
    residency = residency_of()
    slot = residency.take_slot()
    residency.hot.put(1, slot, 0, residency.hot.tier.take(1, 2).reshape(1, 2))
    with pytest.raises(AssertionError):
        residency.hot.put(1, slot, 1, residency.hot.tier.take(1, 1).reshape(1, 1))


def test_leases_count_and_end_on_an_error() -> None:
    residency = residency_of()
    slot = residency.take_slot()
    units = np.array([0, 0, 2]), np.array([slot, slot, slot])
    with residency.lease(*units):
        assert residency.leases[:, slot].tolist() == [2, 0, 1]
        with residency.lease(np.array([0]), np.array([slot])):
            assert residency.leases[0, slot] == 3
        with pytest.raises(AssertionError):
            residency.give_slot(slot)
    with pytest.raises(KeyError), residency.lease(*units):
        raise KeyError
    assert residency.leases.sum() == 0


def test_idle_is_what_the_last_whole_pass_did_not_use() -> None:
    residency = residency_of()
    used = [residency.take_slot() for _ in range(3)]

    def touch(slot: int) -> None:
        residency.touch(np.array([0]), np.array([slot]))

    def idle() -> list[bool]:
        return [bool(residency.used_at[0, each] < residency.last_pass_began) for each in used]

    residency.begin_pass()
    for each in used:
        touch(each)
    residency.begin_pass()
    touch(used[0])
    # The pass in progress is not whole: what the one before used is not idle yet.
    assert idle() == [False, False, False]
    residency.begin_pass()
    # used[2] was the last unit touched before that pass: it counts as before, like used[1].
    assert idle() == [False, True, True]
    residency.begin_pass()
    assert idle() == [True, True, True]


def sessions(residency: Residency, slot: int) -> tuple[int, int, int]:
    """used_at, began_at and interval of layer 0."""
    residency.settle()
    return tuple(  # type: ignore[return-value]
        int(each[0, slot]) for each in (residency.used_at, residency.began_at, residency.interval)
    )


@pytest.mark.parametrize("noted", [False, True])
def test_passes_that_follow_each_other_are_one_session(noted: bool) -> None:
    """However uses are told, at once or noted for later."""
    residency = residency_of()
    slot = residency.take_slot()
    slots, layers = np.array([slot]), np.array([0])

    def use() -> int:
        if noted:
            residency.note(0, slots)
        else:
            residency.touch(layers, slots)
        return residency.clock

    def idle() -> None:
        residency.begin_pass()
        residency.begin_pass()

    assert sessions(residency, slot) == (0, 0, 0)
    first = use()
    for _ in range(5):
        residency.begin_pass()
        last = use()
    assert sessions(residency, slot) == (last, first, 0)
    idle()
    second = use()
    assert sessions(residency, slot) == (second, second, second - first)
    residency.clock += 1000
    idle()
    third = use()
    expected = (second - first + third - second) // 2
    assert sessions(residency, slot) == (third, third, expected)
    for _ in range(3):
        residency.begin_pass()
        last = use()
    idle()
    # Noted and touched alike: what was noted counts before what is touched.
    residency.touch(layers, slots)
    now = residency.clock
    assert sessions(residency, slot) == (now, now, (expected + now - third) // 2)
    assert last < now


def test_one_unit_touched_is_what_many_are() -> None:
    one, many = residency_of(), residency_of()
    for residency in (one, many):
        residency.take_slot()
        residency.begin_pass()
    for number in range(12):
        if number % 3 == 0:
            for residency in (one, many):
                residency.begin_pass()
        one.touch_unit(1, 15)
        many.touch(np.array([1]), np.array([15]))
        for name in ("used_at", "began_at", "interval", "clock"):
            assert np.array_equal(getattr(one, name), getattr(many, name))
    assert one.began_at[1, 15] > 0


def test_history_outlives_the_slot() -> None:
    residency = residency_of()
    slot = residency.take_slot()
    slots = np.array([slot])
    residency.note(1, slots)
    residency.begin_pass()
    residency.begin_pass()
    residency.note(1, slots)
    history = residency.give_slot(slot)
    assert (history.began_at, history.interval) == (residency.clock, 3)
    assert residency.take_slot() == slot
    residency.settle()
    # Nothing that was noted of the one before counts for the new one.
    assert not residency.began_at[:, slot].any()
    assert not residency.interval[:, slot].any()
    assert not residency.used_at[:, slot].any()
    other = residency.take_slot(history)
    assert residency.interval[:, other].tolist() == [3] * 3
    assert residency.began_at[:, other].tolist() == [history.began_at] * 3


def test_noted_arrays_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiering.residency.NOTED_MAX", 8)
    residency = residency_of()
    slot = residency.take_slot()
    for _ in range(50):
        residency.note(0, np.array([slot]))
        assert len(residency._noted) <= 8
    residency.settle()
    assert residency.used_at[0, slot] == residency.clock


def test_a_drop_is_counted_for_its_layer_alone() -> None:
    residency = residency_of()
    slot = residency.take_slot()
    residency.hot.put(1, slot, 0, residency.hot.tier.take(1, 2).reshape(1, 2))
    assert residency.hot.drops == [0, 0, 0]
    residency.hot.drop(1, slot)
    residency.hot.drop(1, slot)
    assert residency.hot.drops == [0, 1, 0]
    assert residency.host.drops == [0, 0, 0]
