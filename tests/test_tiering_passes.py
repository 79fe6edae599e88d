"""Passes over the layers: what was not used in the last one is idle, and makes room in HOT for what
is written."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiering import eviction
from kvtier.tiering.eviction import BoolArray, ReadCost, Usage, Victims
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from tests.store_cases import GEOMETRIES, KV, check_bytes, extend, open_store, some_tokens

GEOMETRY = GEOMETRIES["uniform"]
LAYERS = len(GEOMETRY.layers)
KEYS_AND_VALUES = KV(GEOMETRY)
Add = Callable[[Sequence, int], None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path, GEOMETRY) as store:
        yield store


@pytest.fixture
def add(store: Store) -> Add:
    """Append one token to one layer."""

    def add(sequence: Sequence, layer: int) -> None:
        keys, values = KEYS_AND_VALUES.rows([layer], layer)
        store.append(sequence, layer, keys, values)

    return add


def passes_begun(store: Store, what: Callable[[], None]) -> int:
    """How many passes began meanwhile."""
    begun = 0
    begin = store._residency.begin_pass

    def counted() -> None:
        nonlocal begun
        begun += 1
        begin()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._residency, "begin_pass", counted)
        what()
    return begun


def test_the_rows_of_a_batch_are_one_pass(store: Store, add: Add) -> None:
    rows = [store.sequence() for _ in range(3)]

    def step() -> None:
        for layer in range(LAYERS):
            for row in rows:
                add(row, layer)

    step()
    assert passes_begun(store, step) == 1
    store.release(rows.pop(0))
    assert passes_begun(store, step) == 1


def test_one_sequence_after_the_other_is_a_pass_each(store: Store, add: Add) -> None:
    def each() -> None:
        for _ in range(4):
            sequence = store.sequence()
            for layer in range(LAYERS):
                add(sequence, layer)

    each()
    assert passes_begun(store, each) == 4


def test_who_stays_in_the_middle_of_a_pass_keeps_nobody_from_the_next(
    store: Store, add: Add
) -> None:
    begun, stuck, other = (store.sequence() for _ in range(3))
    for layer in range(LAYERS):
        add(begun, layer)
    assert passes_begun(store, lambda: add(stuck, 0)) == 1

    def steps() -> None:
        for _ in range(4):
            for layer in range(LAYERS):
                add(other, layer)

    # The first of them joins the pass that is never ended.
    assert passes_begun(store, steps) == 3


@pytest.mark.parametrize("behind", range(LAYERS))
def test_what_one_uses_all_the_time_is_not_idle_beside_another(
    store: Store, add: Add, behind: int
) -> None:
    """Two threads, one of which is always so many layers behind the other: what both use in every
    pass of theirs is in one session, and each step is one pass."""
    sequences = [store.sequence() for _ in range(2)]
    for seed, sequence in enumerate(sequences):
        extend(store, KEYS_AND_VALUES, sequence, some_tokens(600, seed))
    first, second = sequences
    slots = [segment.slot for sequence in sequences for segment in sequence.tail]
    assert len(slots) == 2

    places = iter(range(100 * LAYERS))

    def steps() -> None:
        for place in islice(places, 5 * LAYERS):
            add(first, place % LAYERS)
            if place >= behind:
                add(second, (place - behind) % LAYERS)

    residency = store._residency
    steps()
    began = residency.began_at[:, slots].copy()
    assert passes_begun(store, steps) in (5, 6)
    assert (residency.began_at[:, slots] == began).all()
    assert (residency.used_at[:, slots] > began).all()


def test_room_for_a_whole_segment_is_looked_for_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers arrive one by one; what is idle leaves HOT for all of them, and not more."""
    tier = store._residency.hot.tier
    segment_bytes = SEGMENT_TOKENS * GEOMETRY.token_bytes

    def prefill(seed: int) -> Sequence:
        sequence = store.sequence()
        store.name_tokens(sequence, some_tokens(SEGMENT_TOKENS, seed))
        extend(store, KEYS_AND_VALUES, sequence, some_tokens(SEGMENT_TOKENS, seed))
        return sequence

    seed = 0
    while tier.free_bytes >= segment_bytes:
        store.release(prefill(seed))
        seed += 1
    looks: list[int] = []
    plan = eviction.plan_eviction

    def counted(usage: Usage, cost: ReadCost, needed: int, spared: BoolArray | None) -> Victims:
        looks.append(needed)
        return plan(usage, cost, needed, spared)

    monkeypatch.setattr(eviction, "plan_eviction", counted)
    last = prefill(seed)
    assert len(looks) == 1
    assert tier.free_bytes < segment_bytes
    check_bytes(store, KEYS_AND_VALUES, last, some_tokens(SEGMENT_TOKENS, seed))


def test_a_segment_is_kept_in_frames_that_are_no_neighbours(store: Store) -> None:
    tier = store._residency.hot.tier
    taken = tier.take(0, tier.limit_bytes // GEOMETRY.frame_bytes(0))
    tier.give(0, taken[::2])
    tokens = some_tokens(SEGMENT_TOKENS, 1)
    sequence = store.sequence()
    extend(store, KEYS_AND_VALUES, sequence, tokens)
    frames = store._residency.hot.held(0, sequence.views[0].segment.slot)
    assert (np.diff(np.sort(frames)) == 2).all()
    check_bytes(store, KEYS_AND_VALUES, sequence, tokens)
    store.release(sequence)
