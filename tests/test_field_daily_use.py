"""Field reports about daily use: room used again, holds that end, the next turn of a chat."""

import re
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.io.extent import Extent
from kvtier.tiering.config import Config
from kvtier.tiering.verifier import verify
from tests.field_cases import extents_of
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_settled,
    extend,
    open_store,
    put,
    shared,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OF_M = KV(PLAIN)
A, B = [1, *some_tokens(2047, 1)], [2, *some_tokens(2047, 2)]


def overlap(first: list[list[Extent]], second: list[list[Extent]]) -> bool:
    flat = [[each for layers in extents for each in layers] for extents in (first, second)]
    return any(a.offset < b.end and b.offset < a.end for a in flat[0] for b in flat[1])


@pytest.mark.parametrize("way", ["removed", "evicted"])
def test_room_that_is_used_again_has_one_identity(tmp_path: Path, way: str) -> None:
    """A022: four Segments of A go, four of B lie where they were; A is not found, before and after
    the store is opened anew, and nothing of it can be found by its headers."""
    with open_store(tmp_path, PLAIN, Config("2MiB", hot=MIB)) as store:
        put(store, OF_M, "a", A)
        before = extents_of(tmp_path)
        assert len(before) == 4
        if way == "removed":
            store.remove("a")
            put(store, OF_M, "b", B)
        else:
            put(store, OF_M, "b", B)
            put(store, OF_M, "c", [3, *some_tokens(2047, 3)])
        assert store.lookup(A) == 0
    assert verify(tmp_path).ok
    assert overlap(before, extents_of(tmp_path)), "the room was not used again"
    last = B if way == "removed" else [3, *some_tokens(2047, 3)]
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        assert store.resume(A).length() == 0
        sequence = store.resume(last)
        check_bytes(store, OF_M, sequence, last)
        store.release(sequence)
        check_settled(store, tmp_path)


def test_a_hold_that_ends_twice_takes_nothing_from_another(tmp_path: Path) -> None:
    """A026: two names hold one prefix; one is let go twice, and the other still keeps it."""
    with open_store(tmp_path, PLAIN, Config("4MiB", hot=MIB)) as store:
        put(store, OF_M, "first", A)
        put(store, OF_M, "second", A)
        store.hold("first")
        store.hold("second")
        held = store.stats().held_bytes
        assert held > 0
        for _ in range(2):
            store.unhold("first")
            assert store.stats().held_bytes == held
        with pytest.raises(ConfigError, match="no name 'third'"):
            store.unhold("third")
        for seed in range(14):
            put(store, OF_M, f"n{seed}", [10 + seed, *some_tokens(1000, seed)])
        assert store.stats().segments_evicted > 0
        sequence = store.resume(A)
        check_bytes(store, OF_M, sequence, A)
        store.release(sequence)
        store.unhold("second")
        store.unhold("second")
        assert store.stats().held_bytes == 0


def test_the_next_turn_matches_the_generated_part_too(tmp_path: Path) -> None:
    """A117: ids are kept, not text: prompt and answer are found; text that is tokenised another
    way matches up to the first id that differs, and that place is told with both ids."""
    prompt, answer = some_tokens(130, 1), some_tokens(75, 2)
    stream = prompt + answer
    with open_store(tmp_path, PLAIN, Config("16MiB", hot=MIB)) as store:
        sequence = store.sequence()
        extend(store, OF_M, sequence, prompt)
        extend(store, OF_M, sequence, stream, pieces=1)
        store.save(sequence, "chat", stream)
        store.release(sequence)
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        assert store.lookup([*stream, *some_tokens(20, 3)]) == len(stream)
        again = list(stream)
        again[150] = (again[150] + 1) % 97
        assert store.lookup(again) == shared(stream, again) == 150
        sequence = store.resume(stream)
        words = f"first at position 150: {again[150]} given, {stream[150]} held"
        with pytest.raises(ConfigError, match=re.escape(words)):
            store.name_tokens(sequence, again)
        check_bytes(store, OF_M, sequence, stream)


def test_numbers_show_that_nothing_could_be_used_again(tmp_path: Path) -> None:
    """A119: ten unrelated prompts: asked for, found, and read, so that no gain is explained."""
    with open_store(tmp_path, PLAIN, Config("16MiB", hot=MIB)) as store:
        for seed in range(10):
            tokens = [seed, *some_tokens(99, seed)]
            sequence = store.resume(tokens)
            extend(store, OF_M, sequence, tokens)
            store.save(sequence, f"n{seed}", tokens)
            store.release(sequence)
        stats = store.stats()
        assert (stats.tokens_looked_up, stats.tokens_matched, stats.bytes_read) == (1000, 0, 0)
        assert stats.bytes_written > 1000 * PLAIN.token_bytes
