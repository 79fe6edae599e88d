"""Holds: what a user wants kept stays, under a cap and for a time."""

import time
from pathlib import Path

import pytest

from kvtier.errors import CapacityError, ConfigError
from kvtier.tiering import drive_space, holds
from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tiering.store import Store
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)
from tests.test_tiering_capacity import OF_M, ONE, exact, small

pytestmark = pytest.mark.usefixtures("one_thread")


def fill(store: Store, first: int, count: int = 8) -> None:
    for seed in range(first, first + count):
        put(store, OF_M, f"filler{seed}", some_tokens(ONE, 5000 + seed))


def test_a_held_name_stays_and_comes_back(tmp_path: Path) -> None:
    tokens = some_tokens(2 * ONE + 40, 1)
    with small(tmp_path) as store:
        put(store, OF_M, "kept", tokens)
        store.hold("kept")
        fill(store, 0)
        assert exact(store, tokens) == len(tokens)
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        fill(store, 100)
        assert exact(store, tokens) == len(tokens)
        assert [each.name for each in describe(tmp_path).names if each.held] == ["kept"]
        assert store.stats().held_bytes > len(tokens) * PLAIN.token_bytes
        store.unhold("kept")
        assert store.stats().held_bytes == 0
        fill(store, 200, 20)
        assert exact(store, tokens) < len(tokens)
        check_settled(store, tmp_path)


def test_a_hold_with_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = some_tokens(ONE, 1)
    now = time.time()
    with small(tmp_path) as store:
        put(store, OF_M, "kept", tokens)
        store.hold("kept", seconds=3600)
        fill(store, 0)
        assert exact(store, tokens) == ONE
        for module in (holds, drive_space):
            monkeypatch.setattr(module.time, "time", lambda: now + 3601)
        assert store._holds.held_bytes == 0
        fill(store, 100, 12)
        assert exact(store, tokens) < ONE


def test_the_cap_is_kept_and_shared_segments_count_once(tmp_path: Path) -> None:
    shared = some_tokens(2 * ONE, 1)
    with small(tmp_path, hold_limit=450_000) as store:
        put(store, OF_M, "one", shared)
        put(store, OF_M, "two", shared + some_tokens(60, 2))
        store.hold("one")
        store.hold("two")
        held = store.stats().held_bytes
        assert held < 450_000
        put(store, OF_M, "three", some_tokens(2 * ONE, 3))
        with pytest.raises(CapacityError, match=r"hold_limit.*450000 bytes"):
            store.hold("three")
        assert store.stats().held_bytes == held
        store.hold("one", seconds=100)
        assert sorted(store.unhold_all()) == ["one", "two"]
        store.hold("three")
        assert store.unhold_all() == ["three"]
        assert store.unhold_all() == []


def test_save_and_hold_in_one(tmp_path: Path) -> None:
    first, second = some_tokens(ONE, 1), some_tokens(5 * ONE, 2)
    with small(tmp_path, hold_limit=300_000) as store:
        sequence = store.sequence()
        extend(store, OF_M, sequence, first)
        store.save(sequence, "held", first, hold=True)
        assert store.names()[0].held_until == holds.FOREVER
        store.save(sequence, "held", first)
        assert store.names()[0].held_until == holds.FOREVER, "saved again, it is as it was"
        store.save(sequence, "held", first, hold=60)
        assert abs(store.names()[0].held_until - time.time() - 60) < 50
        store.save(sequence, "held", first, hold=False)
        assert store.names()[0].held_until == 0
        store.release(sequence)
        big = store.sequence()
        extend(store, OF_M, big, second)
        with pytest.raises(CapacityError, match="hold_limit"):
            store.save(big, "big", second, hold=True)
        assert [each.name for each in store.names()] == ["held"]
        store.save(big, "big", second)
        store.release(big)
        check_settled(store, tmp_path)


def test_a_hold_that_is_renewed_or_replaced_counts_once(tmp_path: Path) -> None:
    """What a name holds already is given up for what it will hold."""
    with small(tmp_path, hold_limit=200_000) as store:
        put(store, OF_M, "kept", some_tokens(ONE, 1))
        store.hold("kept")
        store.hold("kept", seconds=60)
        for seed in (2, 3):
            sequence = store.sequence()
            extend(store, OF_M, sequence, some_tokens(ONE, seed))
            store.save(sequence, "kept", some_tokens(ONE, seed))
            store.release(sequence)
            assert store.names()[0].held_until > 0
        put(store, OF_M, "other", some_tokens(ONE, 4))
        with pytest.raises(CapacityError, match="hold_limit"):
            store.hold("other")
    with open_store(tmp_path, PLAIN, Config(hot=MIB, hold_limit=1)) as store:
        store.hold("kept", seconds=30)
        with pytest.raises(CapacityError, match=r"hold_limit.* 0 bytes free"):
            store.hold("other")


def test_a_hold_that_ended_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(3 * ONE, 1)
    with small(tmp_path, hold_limit=200_000) as store:
        sequence = store.sequence()
        extend(store, OF_M, sequence, tokens[:ONE])
        store.save(sequence, "n", tokens[:ONE], hold=10)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 11)
        extend(store, OF_M, sequence, tokens)
        assert store.save(sequence, "n", tokens) == len(tokens)
        assert store.names()[0].held_until == 0
        store.release(sequence)


def test_what_cannot_be_held(tmp_path: Path) -> None:
    with small(tmp_path) as store:
        put(store, OF_M, "n", some_tokens(100, 1))
        for call in (store.hold, store.unhold, store.remove):
            with pytest.raises(ConfigError, match="no name 'other'"):
                call("other")
        for seconds in (0, -1, float("nan"), float("inf"), 10**400, "1h", True):
            with pytest.raises(ConfigError, match="a hold lasts"):
                store.hold("n", seconds)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hold_limit"):
        Config(hold_limit="much")


def test_what_an_open_sequence_views_stays_until_it_is_evicted(tmp_path: Path) -> None:
    tokens = some_tokens(ONE, 1)
    with small(tmp_path) as store:
        put(store, OF_M, "n", tokens)
        sequence = store.resume(tokens)
        assert store.remove("n") == 0
        assert store.clear() == 0
        check_bytes(store, OF_M, sequence, tokens)
        store.release(sequence)
        assert exact(store, tokens) == ONE, "nobody views it any more, and nobody needs its room"
        fill(store, 0, 20)
        assert exact(store, tokens) == 0
    with small(tmp_path) as store:
        assert exact(store, tokens) == 0


def test_a_name_that_was_removed_takes_only_its_own(tmp_path: Path) -> None:
    shared = some_tokens(ONE, 1)
    long, other = shared + some_tokens(ONE, 2), shared + some_tokens(100, 3)
    with open_store(tmp_path, PLAIN, Config("4MiB", hot=MIB)) as store:
        put(store, OF_M, "long", long)
        put(store, OF_M, "other", other)
        put(store, OF_M, "middle", long[: ONE + 30])
        assert store.remove("long") == 0, "middle ends inside its last segment"
        assert exact(store, long) == len(long)
        assert store.remove("middle") == 1
        assert exact(store, long) < ONE + 5
        check_bytes(store, KV(PLAIN), store.resume(other), other)
        sequence = store.resume(other)
        assert store.remove("other") == 0, "a sequence views them"
        check_bytes(store, KV(PLAIN), sequence, other)
        assert store.names() == []
