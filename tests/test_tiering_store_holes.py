"""Holes: what lies behind damage is found, attached once the hole was computed, and exact.

A hole that is computed in the pieces in which it was stored is healed: what was computed takes the
place of what was lost, and the next resume finds everything.
"""

from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, FormatError
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Provenance
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from kvtier.tiering.writer import hot_bytes_min
from tests import hole_cases
from tests.hole_cases import rows
from tests.store_cases import (
    KV,
    PLAIN,
    Remembered,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)

OF_M = Remembered(PLAIN)
LONG = some_tokens(3000, 1)
"""Six Segments, the last one of 440 tokens."""
LAST = len(LONG)


def lose(path: Path, *segments: int) -> None:
    """Of a closed store."""
    with open_store(path) as store:
        hole_cases.lose(store, *segments)


def fill(store: Store, kv: KV, tokens: list[int], *, in_pieces: bool = True) -> Sequence:
    """Resume, compute the holes, attach what lies behind each."""
    sequence = store.resume(tokens)
    for start, end in store.holes(tokens):
        if sequence.length() <= start:
            assert sequence.length() == start
            extend(store, kv, sequence, tokens[:end])
            store.name_tokens(sequence, tokens[:end])
            if in_pieces or end in {first for first, _ in store.stored(tokens)}:
                store.extend(sequence, tokens)
    return sequence


def go_on(store: Store, name: str, tokens: list[int]) -> None:
    """Save a stream that begins with what is stored."""
    sequence = store.resume(tokens)
    extend(store, OF_M, sequence, tokens)
    store.save(sequence, name, tokens)
    store.release(sequence)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    with open_store(tmp_path) as store:
        put(store, OF_M, "long", LONG)
    return tmp_path


def test_what_lies_behind_damage_is_found_and_attached(stored: Path) -> None:
    lose(stored, 1, 3)
    with open_store(stored) as store:
        assert store.lookup(LONG) == 512
        assert store.stored(LONG) == [(0, 512), (1024, 1536), (2048, LAST)]
        assert store.holes(LONG) == [(512, 1024), (1536, 2048)]
        read = store.stats().bytes_read
        sequence = fill(store, OF_M, LONG)
        assert store.stats().bytes_read > read
        check_bytes(store, OF_M, sequence, LONG)
        check_everywhere(store, OF_M, sequence, LONG)
        assert sequence.tokens.tolist() == LONG
        store.release(sequence)


@pytest.mark.parametrize("hot", [hot_bytes_min(PLAIN) + 256 * 1024, 4 << 20])
def test_a_filled_hole_takes_the_place_of_the_lost_segment(stored: Path, hot: int) -> None:
    lose(stored, 0, 1, 3)
    before = rows(stored)
    with open_store(stored, PLAIN, Config(hot=hot)) as store:
        assert store.stored(LONG) == [(1024, 1536), (2048, LAST)]
        assert store.holes(LONG) == [(0, 512), (512, 1024), (1536, 2048)]
        sequence = fill(store, OF_M, LONG)
        assert store.save(sequence, "long", LONG) == LAST
        check_bytes(store, OF_M, sequence, LONG)
        store.release(sequence)
        assert store.lookup(LONG) == LAST
        assert store.holes(LONG) == []
        check_settled(store, stored)
    after = rows(stored)
    assert [row.id for row in after] == [row.id for row in before]
    assert [row.quarantined for row in before] == [True, True, False, True, False, False]
    assert not any(row.quarantined for row in after)
    kept = [row.extents == old.extents for row, old in zip(after, before, strict=True)]
    assert kept == [False, False, True, False, True, True]
    assert verify(stored).findings == []
    with open_store(stored) as store:
        sequence = store.resume(LONG)
        check_bytes(store, OF_M, sequence, LONG)
        assert store.saved("long")[0].tolist() == LONG


def test_a_prompt_computed_as_a_whole_heals_too(stored: Path) -> None:
    """Who knows nothing of holes computes all that follows the match; what is whole stays."""
    lose(stored, 2)
    before = rows(stored)
    with open_store(stored) as store:
        sequence = store.resume(LONG)
        assert sequence.length() == 1024
        extend(store, OF_M, sequence, LONG)
        store.save(sequence, "long", LONG)
        check_bytes(store, OF_M, sequence, LONG)
        store.release(sequence)
        assert store.lookup(LONG) == LAST
        check_settled(store, stored)
    after = rows(stored)
    assert [row.id for row in after] == [row.id for row in before]
    assert sum(a.extents != b.extents for a, b in zip(after, before, strict=True)) == 1


def test_every_branch_behind_a_healed_segment_is_found(stored: Path) -> None:
    other = LONG[:1024] + some_tokens(700, 5)
    inner = LONG[:700] + some_tokens(300, 6)
    with open_store(stored) as store:
        for name, tokens in (("other", other), ("inner", inner)):
            go_on(store, name, tokens)
    lose(stored, 1)
    with open_store(stored) as store:
        for tokens in (LONG, other, inner):
            assert store.lookup(tokens) == 512
        assert store.holes(inner) == [(512, 700)]
        store.save(sequence := fill(store, OF_M, LONG), "long", LONG)
        store.release(sequence)
        for tokens in (LONG, other, inner):
            assert store.lookup(tokens) == len(tokens)
            sequence = store.resume(tokens)
            check_bytes(store, OF_M, sequence, tokens)
            store.release(sequence)
        check_settled(store, stored)


def test_names_of_a_healed_segment_survive_a_lost_catalog(tmp_path: Path) -> None:
    """The record of a name says which Segment it ends in, and that is another one now."""
    from kvtier.tiering.rebuilder import rebuild

    short = LONG[:900]
    with open_store(tmp_path) as store:
        put(store, OF_M, "long", LONG[:1500])
        go_on(store, "short", short)
    lose(tmp_path, 1)
    with open_store(tmp_path) as store:
        store.hold("short")
        sequence = fill(store, OF_M, LONG[:1500])
        store.save(sequence, "long", LONG[:1500])
        store.release(sequence)
        (name,) = [each for each in store.names() if each.name == "short"]
        assert name.held_until
        check_settled(store, tmp_path)
    (tmp_path / "catalog.sqlite").unlink()
    assert rebuild(tmp_path).ok
    with open_store(tmp_path) as store:
        assert sorted(each.name for each in store.names()) == ["long", "short"]
        assert store.saved("short")[0].tolist() == short
        check_bytes(store, OF_M, store.resume(short), short)


def test_a_segment_in_use_is_not_replaced_under_its_user(stored: Path) -> None:
    """Its whole layers may still be attended to; what is stored anew stands beside it."""
    with open_store(stored, PLAIN, Config(hot=hot_bytes_min(PLAIN))) as store:
        user = store.resume(LONG)
        assert user.length() == LAST
        hole_cases.damage(store, 1)
        assert store.scrub("1GiB").result().quarantined == [2]
        sequence = fill(store, OF_M, LONG)
        store.save(sequence, "long", LONG)
        check_bytes(store, OF_M, sequence, LONG)
        store.release(sequence)
        lost = user.views[1].segment
        assert lost.lost
        assert lost.written
        store.release(user)
        check = store.resume(LONG)
        check_bytes(store, OF_M, check, LONG[: check.length()])
        assert store.stored(LONG) == [(0, LAST)]
        store.release(check)


def test_damage_behind_a_hole_is_the_next_hole(stored: Path) -> None:
    lose(stored, 1)
    with open_store(stored) as store:
        hole_cases.damage(store, 3)
        sequence = store.resume(LONG)
        extend(store, OF_M, sequence, LONG[:1024])
        store.name_tokens(sequence, LONG[:1024])
        assert store.extend(sequence, LONG) == 1536
        assert store.holes(LONG) == [(512, 1024), (1536, 2048)]
        check_bytes(store, OF_M, sequence, LONG[:1536])
        extend(store, OF_M, sequence, LONG[:2048])
        store.name_tokens(sequence, LONG[:2048])
        assert store.extend(sequence, LONG) == LAST
        check_bytes(store, OF_M, sequence, LONG)
        store.release(sequence)


def test_extend_begins_an_empty_sequence_and_cuts_where_tokens_differ(stored: Path) -> None:
    with open_store(stored) as store:
        sequence = store.sequence()
        assert store.extend(sequence, LONG[:600]) == 600
        assert store.extend(sequence, LONG[:600]) == 600
        assert store.extend(sequence, [*LONG[:600], 0, 1, 2]) == 600
        check_bytes(store, OF_M, sequence, LONG[:600])
        store.release(sequence)


def test_extend_refuses_what_it_cannot_know(stored: Path) -> None:
    lose(stored, 1)
    with open_store(stored) as store:
        sequence = store.resume(LONG)
        extend(store, OF_M, sequence, LONG[:600])
        with pytest.raises(ConfigError, match="512 are named"):
            store.extend(sequence, LONG)
        store.name_tokens(sequence, LONG[:600])
        with pytest.raises(ConfigError, match="599 given"):
            store.extend(sequence, LONG[:599])
        with pytest.raises(ConfigError, match="first at position 3"):
            store.extend(sequence, [*LONG[:3], LONG[3] + 1, *LONG[4:]])
        keys, values = OF_M.rows(LONG[:601], 0)
        store.append(sequence, 0, keys[:, 600:], values[:, 600:])
        with pytest.raises(ConfigError, match="between passes"):
            store.extend(sequence, LONG)
        store.crop(sequence, 600)
        assert store.extend(sequence, LONG) == 600, "nothing begins there"
        store.release(sequence)


def test_a_graft_of_something_else_is_refused(tmp_path: Path) -> None:
    """What is refused changes nothing: neither Sequence, and no Tail is cut."""
    with open_store(tmp_path) as store:
        own = store.sequence()
        extend(store, OF_M, own, LONG[:600])
        others = {
            "same provenance": store.sequence(Provenance.approximate(0.5, "fp8")),
            "not named": store.sequence(),
            "not the same": store.sequence(),
            "no segment": store.sequence(),
        }
        for each in others.values():
            extend(store, OF_M, each, LONG[:500] if each is others["no segment"] else LONG[:512])
        with pytest.raises(ConfigError, match="same provenance"):
            store.graft(own, own)
        store.name_tokens(own, LONG[:600])
        for words, other in others.items():
            if words != "not named":
                first = LONG[0] + 1 if words == "not the same" else LONG[0]
                store.name_tokens(other, [first, *LONG[1 : other.length()]])
            with pytest.raises(ConfigError, match=words):
                store.graft(own, other)
            assert len(other.tail) == (words == "no segment")
            store.release(other)
        check_bytes(store, OF_M, own, LONG[:600])
        store.release(own)


def test_a_graft_before_a_tail_that_was_sealed_meanwhile(stored: Path) -> None:
    """With little room in HOT, computing what was lost seals the Tail of who needs it."""
    lose(stored, 0)
    with open_store(stored) as store:
        own, other = store.sequence(), store.sequence()
        for sequence, tokens in ((own, LONG[:700]), (other, LONG[:512])):
            extend(store, OF_M, sequence, tokens)
            store.name_tokens(sequence, tokens)
        store._writer.seal(own)
        store.graft(own, other)
        assert other.closed
        check_bytes(store, OF_M, own, LONG[:700])
        store.save(own, "n", LONG[:700])
        store.release(own)
    with open_store(stored) as store:
        sequence = store.resume(LONG[:700])
        assert sequence.length() == 700
        check_bytes(store, OF_M, sequence, LONG[:700])
        store.release(sequence)


def test_nothing_is_saved_behind_what_is_lost(stored: Path) -> None:
    """HOT has it still, but nobody would find it. A graft of the same tokens mends it."""
    with open_store(stored) as store:
        own = store.resume(LONG[:1024])
        hole_cases.lose(store, 0)
        extend(store, OF_M, own, LONG[:1100])
        with pytest.raises(FormatError, match="tokens 0 to 512 of this sequence are damaged"):
            store.save(own, "more", LONG[:1100], hold=True)
        assert "more" not in [each.name for each in store.names()]
        check_bytes(store, OF_M, own, LONG[:1100])
        other = store.sequence()
        extend(store, OF_M, other, LONG[:512])
        store.name_tokens(other, LONG[:512])
        store.graft(own, other)
        assert store.save(own, "more", LONG[:1100], hold=True) == 1100
        assert store.lookup(LONG[:1100]) == 1100
        store.release(own)


@pytest.mark.parametrize("seed", range(6))
def test_any_damage_of_a_tree_of_streams(tmp_path: Path, seed: int) -> None:
    """Streams that leave each other anywhere; any Segments are lost; all is had again, exactly."""
    random = np.random.default_rng(seed)
    streams = [some_tokens(int(random.integers(600, 2200)), seed)]
    for number in range(4):
        trunk = streams[int(random.integers(len(streams)))]
        at = int(random.integers(len(trunk)))
        streams.append(trunk[:at] + some_tokens(int(random.integers(30, 900)), 100 + number))
    with open_store(tmp_path) as store:
        for number, stream in enumerate(streams):
            put(store, OF_M, f"n{number}", stream, pieces=int(random.integers(90, 700)))
    count = len(rows(tmp_path))
    chosen = random.choice(count, size=max(1, count // 3), replace=False)
    lose(tmp_path, *chosen.tolist())
    for _ in range(2):
        with open_store(tmp_path) as store:
            for number, stream in enumerate(streams):
                ranges = store.stored(stream)
                sequence = fill(store, OF_M, stream, in_pieces=bool(random.integers(2)))
                assert sequence.length() >= (ranges[-1][1] if ranges else 0)
                extend(store, OF_M, sequence, stream)
                check_bytes(store, OF_M, sequence, stream)
                store.save(sequence, f"n{number}", stream)
                check_bytes(store, OF_M, sequence, stream)
                store.release(sequence)
            check_settled_but_for_the_lost(store, tmp_path)


def check_settled_but_for_the_lost(store: Store, path: Path) -> None:
    """As check_settled; a Segment may stay lost where its tokens were stored anew otherwise."""
    store._files.allocator.check()
    assert all(not each.references for each in store._registry.committed.values())
    found = verify(path).findings
    lost = {each.where for each in found if each.what.startswith("it is quarantined")}
    assert {each.where.split(",")[0] for each in found} == lost
