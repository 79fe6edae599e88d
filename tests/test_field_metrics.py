"""Field reports about numbers: asked and found, read and written, and none counted twice."""

from pathlib import Path

import numpy as np
import pytest

from kvtier.tiering.config import Config
from kvtier.tiering.writer import hot_bytes_min
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    Shuffled,
    check_bytes,
    check_everywhere,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OF_M = KV(PLAIN)


def test_the_hit_rate_has_everything_that_was_asked_for_below_it(tmp_path: Path) -> None:
    """A113: ten lookups of 100 tokens, four of them known: 400 of 1,000, not 400 of 400."""
    known = [[seed, *some_tokens(99, seed)] for seed in range(4)]
    new = [[50 + seed, *some_tokens(99, seed)] for seed in range(6)]
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)) as store:
        for seed, tokens in enumerate(known):
            put(store, OF_M, f"n{seed}", tokens)
        assert (store.stats().tokens_looked_up, store.stats().tokens_matched) == (0, 0)
        for tokens in [new[0], *known, *new[1:]]:
            store.release(store.resume(tokens))
        stats = store.stats()
        assert (stats.tokens_looked_up, stats.tokens_matched) == (1000, 400)


@pytest.mark.parametrize("hot", [hot_bytes_min(PLAIN), 4 * MIB])
def test_a_question_is_counted_once_whatever_follows(tmp_path: Path, hot: int) -> None:
    """A114: peeking with `lookup`, reading again, attending and retrying count nothing; a partial
    match counts what was found."""
    tokens = some_tokens(1000, 1)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=hot)) as store:
        put(store, OF_M, "n", tokens[:800])
        for _ in range(3):
            assert store.lookup(tokens) == 800
        sequence = store.resume(tokens)
        check_everywhere(store, OF_M, sequence, tokens[:800])
        extend(store, OF_M, sequence, tokens)
        check_everywhere(store, OF_M, sequence, tokens)
        store.save(sequence, "more", tokens)
        store.release(store.fork(sequence))
        stats = store.stats()
        assert (stats.tokens_looked_up, stats.tokens_matched) == (1000, 800)


def test_what_was_found_is_told_apart_by_tier(tmp_path: Path) -> None:
    """A114: 512 tokens in HOT, 512 in HOST, the rest on the drive alone; each is counted once."""
    tokens = some_tokens(1300, 1)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB, host=MIB)) as store:
        put(store, OF_M, "n", tokens)
        residency = store._residency
        first, second, third = (view.segment for view in store.resume(tokens).views)
        already = store.stats()
        for segment in (second, third):
            for layer in range(2):
                if segment is second:
                    store._room.keep_in_host(np.array([layer]), np.array([segment.slot]))
                residency.hot.drop(layer, segment.slot)
                if segment is third:
                    residency.host.drop(layer, segment.slot)
        assert residency.hot.pages[:, first.slot].all()
        store.resume([*tokens, 5, 5])
        stats = store.stats()
        assert stats.tokens_matched - already.tokens_matched == 1300
        assert stats.tokens_matched_hot - already.tokens_matched_hot == 512
        assert stats.tokens_matched_host - already.tokens_matched_host == 512


def test_what_was_written_is_read_back_and_both_are_counted(tmp_path: Path) -> None:
    """A043: 20 sequences, memory dropped by opening anew: all are found on the drive, and the bytes
    read are those of their extents."""
    lists = [[seed, *some_tokens(150 + seed, seed)] for seed in range(20)]
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB), Shuffled(1)) as store:
        for seed, tokens in enumerate(lists):
            put(store, OF_M, f"n{seed}", tokens)
        written, used = store.stats().bytes_written, store.stats().device_bytes
        # Names and the fingerprint have a record of a block or two each, beside the extents.
        assert abs(written - used) <= 21 * 2 * 4096
    with open_store(tmp_path, PLAIN, Config(hot="16MiB")) as store:
        assert [store.lookup(tokens) for tokens in lists] == [len(tokens) for tokens in lists]
        assert store.stats().bytes_read == 0, "a lookup reads no KV"
        for tokens in lists:
            sequence = store.resume(tokens)
            check_bytes(store, OF_M, sequence, tokens)
            store.release(sequence)
        stats = store.stats()
        assert stats.tokens_matched == stats.tokens_looked_up == sum(map(len, lists))
        assert sum(map(len, lists)) * PLAIN.token_bytes < stats.bytes_read <= used
        assert (stats.failed_reads, stats.damaged_extents) == (0, 0)


def test_numbers_of_a_store_are_the_same_after_reopening(tmp_path: Path) -> None:
    """A115: sizes, room used and entries; the capacity is never 0."""
    found = []
    for number in range(3):
        config = Config(None if number else "16MiB", hot=2 * MIB, host=MIB)
        with open_store(tmp_path, PLAIN, config) as store:
            if not number:
                for seed in range(6):
                    put(store, OF_M, f"n{seed}", [seed, *some_tokens(900, seed)])
            stats = store.stats()
            found.append(
                (
                    stats.store_uuid,
                    stats.region_bytes,
                    stats.device_bytes,
                    stats.segments,
                    stats.hot_limit_bytes,
                    stats.host_limit_bytes,
                    len(store.names()),
                )
            )
    assert found[0] == found[1] == found[2]
    assert found[0][1:] == (16 * MIB, found[0][2], 12, 2 * MIB, MIB, 6)
    assert found[0][2] > 6 * 900 * PLAIN.token_bytes
