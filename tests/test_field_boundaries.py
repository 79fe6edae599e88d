"""Field reports about the edges of pages and segments: pieces, remainders, one token more."""

from pathlib import Path

import pytest

from kvtier.io.alignment import GRID_BYTES
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.listing import describe
from tests.store_cases import (
    GEOMETRIES,
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


@pytest.mark.parametrize("pieces", [(7, 16, 33, 44), (1,) * 100, (16,) * 6 + (4,), (99, 1), (100,)])
def test_a_prompt_in_pieces_is_found_whole(tmp_path: Path, pieces: tuple[int, ...]) -> None:
    """A018: however a prompt arrives, all 100 tokens are stored: tails are kept."""
    kv, tokens = KV(PLAIN), some_tokens(100, 1)
    assert sum(pieces) == len(tokens)
    with open_store(tmp_path, placement=Shuffled(1)) as store:
        sequence, length = store.sequence(), 0
        for piece in pieces:
            length += piece
            extend(store, kv, sequence, tokens[:length])
        store.save(sequence, "n", tokens)
        store.release(sequence)
        assert store.lookup(tokens) == 100
    with open_store(tmp_path) as store:
        check_bytes(store, kv, store.resume([*tokens, 1]), tokens)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("edge", [16, SEGMENT_TOKENS, 2 * SEGMENT_TOKENS])
def test_every_length_about_an_edge_is_found_to_the_token(
    tmp_path: Path, edge: int, seed: int
) -> None:
    """A018: one token below, at, and above the edges of pages and segments."""
    kv = KV(GEOMETRIES["windows"])
    with open_store(tmp_path, GEOMETRIES["windows"], placement=Shuffled(seed)) as store:
        for length in (edge - 1, edge, edge + 1):
            tokens = some_tokens(length, 10 * seed + length)
            put(store, kv, f"n{length}", tokens, pieces=edge)
            for wanted in (tokens, [*tokens, 1], tokens[:-1]):
                sequence = store.resume(wanted)
                check_bytes(store, kv, sequence, wanted[:length])
                store.release(sequence)


@pytest.mark.parametrize("whole", [SEGMENT_TOKENS, 2 * SEGMENT_TOKENS])
def test_one_token_more_is_not_written_alone(tmp_path: Path, whole: int) -> None:
    """A019: a decode step writes nothing to the device; a save writes the tail once."""
    kv, tokens = KV(PLAIN), some_tokens(whole + 20, 1)
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens[:whole])
        store.save(sequence, "n", tokens[:whole])
        written = store.stats().bytes_written
        assert written > 0
        for length in range(whole + 1, whole + 21):
            extend(store, kv, sequence, tokens[:length])
            assert store.stats().bytes_written == written
        store.save(sequence, "n", tokens)
        tail = store.stats().bytes_written - written
        assert 0 < tail < written
        for _ in range(3):
            store.save(sequence, "n", tokens)
        assert store.stats().bytes_written == written + tail
        check_bytes(store, kv, sequence, tokens)


def test_a_conversation_saved_after_every_token_writes_each_token_once(tmp_path: Path) -> None:
    """A019: also where every flush is asked for: tails of one token, never a whole page again."""
    kv, tokens = KV(PLAIN), some_tokens(30, 1)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)) as store:
        sequence, steps = store.sequence(), []
        for length in range(1, 31):
            before = store.stats().bytes_written
            extend(store, kv, sequence, tokens[:length])
            store.save(sequence, "n", tokens[:length])
            steps.append(store.stats().bytes_written - before)
        # From the second on, the record of the name replaces one, which is erased.
        assert len(set(steps[1:])) == 1, "the cost of a step does not grow with what was saved"
        assert steps[0] < steps[1] <= steps[0] + GRID_BYTES
        check_everywhere(store, kv, sequence, tokens)
        store.release(sequence)
    assert sum(each.tokens for each in describe(tmp_path).segments) == 30
    with open_store(tmp_path) as store:
        check_bytes(store, kv, store.resume(tokens), tokens)
