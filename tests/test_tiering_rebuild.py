"""A lost catalog is made anew: what was stored comes back exactly, what was removed does not."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import KvtierError
from kvtier.io.catalog import Catalog
from kvtier.io.extent import Extent
from kvtier.tiering import rebuild_plan
from kvtier.tiering.catalog_rows import extents_of
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import EXACT
from kvtier.tiering.rebuilder import rebuild
from tests.rebuild_cases import (
    GRID,
    KVS,
    Stream,
    forged,
    free_blocks,
    identity_of,
    lose,
    name_record,
    peek,
    poke,
    random_walk,
    rebuilt,
    rows,
    save,
    state,
)
from tests.store_cases import PLAIN, open_store, put, some_tokens

KV_M = KVS["m"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_all_that_was_stored_and_nothing_that_was_removed(path: Path, seed: int) -> None:
    streams = random_walk(path, seed, steps=5)
    before = state(path, streams)
    count = len(rows(path))
    assert count > 45
    assert any(before.matched[each] < len(each.tokens) for each in streams), "none was removed"
    report = rebuilt(path)
    assert report.ok
    # Two Segments below different parents may turn out to hold the same stream.
    twice = report.segments_dropped.get(rebuild_plan.TWICE, 0)
    assert report.segments_restored + twice == count
    assert report.names_restored == sum(map(len, before.names.values()))
    assert state(path, streams) == before
    # And once more, after the store was opened and used.
    assert rebuilt(path).segments_restored == report.segments_restored
    assert state(path, streams) == before


def test_everything_can_be_removed_afterwards(path: Path) -> None:
    streams = random_walk(path, 4, steps=4)
    rebuilt(path)
    with open_store(path) as store:
        store.clear()
    report = rebuilt(path)
    assert (report.segments_found, report.names_restored) == (0, 0)
    assert set(state(path, streams).matched.values()) == {0}


def test_what_was_evicted_stays_away(path: Path) -> None:
    tokens = [some_tokens(700, seed) for seed in range(30)]
    with open_store(path, config=Config("4MiB", hot="4MiB")) as store:
        for number, each in enumerate(tokens):
            put(store, KV_M, f"n{number}", each)
        assert store.stats().segments_evicted > 10
    streams = [Stream("m", EXACT, f"n{n}", tuple(each)) for n, each in enumerate(tokens)]
    before = state(path, streams)
    assert {0, 700} <= set(before.matched.values())
    assert rebuilt(path).ok
    assert state(path, streams) == before


def test_a_new_child_of_what_came_back(path: Path) -> None:
    base = some_tokens(900, 1)
    with open_store(path) as store:
        put(store, KV_M, "base", base)
    rebuilt(path)
    longer = Stream("m", EXACT, "longer", tuple(base[:800] + some_tokens(500, 2)))
    with open_store(path) as store:
        save(store, longer)
    assert rebuilt(path).names_restored == 2
    assert state(path, [longer]).matched[longer] == 1300


# ---- damage ---------------------------------------------------------------------------------


@pytest.fixture
def three(path: Path) -> Path:
    """A store of "a", "b" and "c", three Segments each, that share nothing."""
    with open_store(path) as store:
        for number, name in enumerate("abc"):
            put(store, KV_M, name, some_tokens(1300, number))
    return path


STREAMS = [Stream("m", EXACT, name, tuple(some_tokens(1300, n))) for n, name in enumerate("abc")]


def test_a_damaged_payload_ends_its_stream(three: Path) -> None:
    middle = rows(three)[4]
    poke(three, extents_of(middle)[1].end - 2 * GRID, b"\xa5" * 8)
    report = rebuilt(three)
    assert not report.ok
    assert report.segments_dropped == {rebuild_plan.DAMAGED: 1, rebuild_plan.NO_CHAIN: 1}
    assert report.names_dropped == {rebuild_plan.NAME_LOST: 1}
    found = state(three, STREAMS)
    assert list(found.matched.values()) == [1300, 512, 1300]
    assert {name for name, _, _ in found.names["m"]} == {"a", "c"}
    # What was left out is erased: it is not found again.
    assert rebuilt(three).ok


def test_what_is_quarantined_is_read_anew(three: Path) -> None:
    with Catalog.open(three / "catalog.sqlite") as catalog:
        catalog.set_quarantined(rows(three)[0].id, True)
    assert state_without_verify(three) == [0, 1300, 1300]
    assert rebuilt(three).ok
    assert list(state(three, STREAMS).matched.values()) == [1300, 1300, 1300]


def state_without_verify(path: Path) -> list[int]:
    with open_store(path) as store:
        return [store.lookup(list(each.tokens)) for each in STREAMS]


def test_stored_twice(three: Path) -> None:
    """Quarantined and stored anew while somebody uses the old ones: one of the two comes back, and
    removing it removes both."""
    with open_store(three) as store:
        save(store, Stream("m", EXACT, "b2", STREAMS[1].tokens))
    with open_store(three) as store:
        user = store.resume(STREAMS[1].tokens)
        for view in user.views:
            view.segment.quarantined = view.segment.damaged = True
        store._registry.quarantine([view.segment for view in user.views])
        # "b2" goes on pointing at the old Segments, "b" at the new ones.
        put(store, KV_M, "b", list(STREAMS[1].tokens))
        store.release(user)
    assert len(rows(three)) == 12
    report = rebuilt(three)
    assert report.ok
    assert report.segments_dropped == {rebuild_plan.TWICE: 3}
    again = rebuilt(three)
    assert (again.segments_found, again.names_restored) == (9, 4)
    found = state(three, STREAMS)
    assert list(found.matched.values()) == [1300, 1300, 1300]
    assert {name for name, _, _ in found.names["m"]} == {"a", "b", "b2", "c"}
    with open_store(three) as store:
        store.remove("b2")
        assert store.remove("b") == 3
    rebuilt(three)
    assert list(state(three, STREAMS).matched.values()) == [1300, 0, 1300]


def test_a_stale_header_hides_nothing(three: Path) -> None:
    """A header whose body was overwritten long ago: live Extents lie in what it claims."""
    row = rows(three)[3]
    whole = extents_of(row)[0]
    with open_store(three) as store:
        store.remove("a")
    # In the gap, so near its end that what it claims reaches into the Extents of "b".
    gap_end = extents_of(rows(three)[0])[0].offset
    at = gap_end - 3 * GRID
    assert at in set(free_blocks(three))
    assert at + whole.length > gap_end
    stale = forged(
        identity_of(three, row, 0, at), PLAIN, some_tokens(512, 9), np.zeros(65536, np.uint8)
    )
    poke(three, at, stale[: 2 * GRID])
    report = rebuilt(three)
    assert report.segments_restored == 6
    assert list(state(three, STREAMS).matched.values()) == [0, 1300, 1300]
    # Its Segment is whole without it; the header is erased, and nobody finds it again.
    assert report.headers_erased == 1
    assert not any(peek(three, Extent(at, GRID)))


def test_a_header_inside_a_payload_is_no_header(three: Path) -> None:
    """Whoever can choose the bytes of keys and values can not forge a Segment by them."""
    row = rows(three)[0]
    free = _free(three)
    start = next(at for at in sorted(free) if set(range(at, at + 64 * GRID, GRID)) <= free)
    size = 65536
    tokens = some_tokens(row.token_count, 7)
    header = len(forged(identity_of(three, row, 0, start), PLAIN, tokens, _zeros(size))) - size
    inner_at = start + header
    short = PLAIN.payload_bytes(1, 100)
    inner_identity = replace(
        identity_of(three, row, 1, inner_at), token_count=100, generation=row.generation + 2
    )
    inner = forged(inner_identity, PLAIN, tokens[:100], _zeros(short))
    payload = _zeros(size)
    payload[: len(inner)] = np.frombuffer(inner, np.uint8)
    outer_identity = replace(identity_of(three, row, 0, start), generation=row.generation + 4)
    poke(three, start, forged(outer_identity, PLAIN, tokens, payload))
    report = rebuilt(three)
    # The outer Extent is sound, and a Segment of which the other layer is missing.
    assert report.segments_found == 10
    assert report.segments_dropped == {rebuild_plan.DAMAGED: 1}


def _zeros(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.zeros(nbytes, np.uint8)


def _free(path: Path) -> set[int]:
    return set(free_blocks(path))


def test_extents_at_another_place_and_of_another_store(three: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with open_store(other) as store:
        put(store, KV_M, "x", some_tokens(700, 11))
    free = sorted(_free(three))
    foreign = extents_of(rows(other)[0])[0]
    own = extents_of(rows(three)[0])[0]
    poke(three, free[-80], peek(other, foreign))
    poke(three, free[-40], peek(three, own))
    poke(three, free[-2], peek(other, name_record(other, "x")))
    report = rebuilt(three)
    assert report.ok
    assert report.unusable == {
        "of another store": 1,
        "at another place than it was written to": 1,
        f"the record was written for byte {name_record(other, 'x').offset}": 1,
    }
    assert list(state(three, STREAMS).matched.values()) == [1300, 1300, 1300]


def test_a_torn_record_loses_a_name(three: Path) -> None:
    record = name_record(three, "b")
    poke(three, record.offset + 100, b"\0" * 64)
    report = rebuilt(three)
    assert report.unusable == {"the record is damaged": 1}
    assert report.names_restored == 2
    assert list(state(three, STREAMS).matched.values()) == [1300, 1300, 1300]


def test_a_lost_description(three: Path) -> None:
    """The model finds its KV by the digest in the headers, and its shapes are checked."""
    with Catalog.open(three / "catalog.sqlite") as catalog:
        (row,) = catalog.fingerprints()
    offset, _ = np.frombuffer(row.record, "<i8").tolist()
    poke(three, offset, b"\0" * GRID)
    report = rebuilt(three)
    assert (report.descriptions_lost, report.fingerprints_restored) == (1, 1)
    assert not report.ok
    with Catalog.open(three / "catalog.sqlite") as catalog:
        (row,) = catalog.fingerprints()
        assert '"lost":true' in row.description
    assert list(state(three, STREAMS).matched.values()) == [1300, 1300, 1300]


def test_two_records_of_one_name(three: Path) -> None:
    """A save that a crash cut off between its record and its commit leaves a second record."""
    with open_store(three) as store:
        other = Stream("m", EXACT, "other", tuple(some_tokens(40, 5)))
        save(store, other)
    record = name_record(three, "a")
    kept = peek(three, record)
    time.sleep(0.01)
    with open_store(three) as store:
        save(store, Stream("m", EXACT, "a", other.tokens))
    assert name_record(three, "a") != record
    poke(three, record.offset, kept)
    report = rebuilt(three)
    assert report.ok
    assert report.names_dropped == {rebuild_plan.NAME_OLDER: 1}
    assert not any(peek(three, record)), "the older record is erased"
    assert ("a", 40, 40) in state(three, [other]).names["m"]


def test_a_save_that_a_crash_cut_off(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers are durable, the catalog names nobody: it comes back exactly, and can be removed."""
    orphan = Stream("m", EXACT, "orphan", tuple(some_tokens(600, 8)))

    def broken(self: Catalog, row: object) -> int:
        raise KvtierError("power cut")

    with open_store(three) as store:
        monkeypatch.setattr(Catalog, "add_segment", broken)
        with pytest.raises(KvtierError, match="power cut"):
            save(store, orphan)
        monkeypatch.undo()
    rebuilt(three)
    found = state(three, [orphan, *STREAMS])
    assert found.matched[orphan] in (0, 600)
    with open_store(three) as store:
        store.clear()
    assert rebuilt(three).segments_found == 0


@pytest.mark.parametrize("seed", range(8))
def test_any_damage_is_a_miss(three: Path, seed: int) -> None:
    """Every match after a rebuild is compared bit by bit (`state`)."""
    random = np.random.default_rng(seed)
    used = [each for row in rows(three) for each in extents_of(row)]
    for _ in range(6):
        extent = used[int(random.integers(len(used)))]
        at = int(random.integers(min(extent.length, random.choice([300, 4096, 1 << 20]))))
        poke(three, extent.offset + at, random.bytes(int(random.integers(1, 9))))
    report = rebuilt(three)
    assert report.segments_restored < 9
    matched = state(three, STREAMS).matched
    assert all(each in (0, 512, 1024, 1300) for each in matched.values())
    assert rebuilt(three).segments_restored == report.segments_restored


def test_a_removal_that_was_not_erased_yet(three: Path) -> None:
    """Its Extents are condemned in a catalog that can still be read: they do not come back."""
    gone = rows(three)[5]
    with Catalog.open(three / "catalog.sqlite") as catalog, catalog.transaction():
        catalog.delete_name(1, "b")
        catalog.delete_segments([gone.id])
        catalog.condemn([name_record(three, "c"), *extents_of(gone)])
        catalog.delete_name(1, "c")
    report = rebuild(three, force=True)
    assert report.segments_restored == 8
    assert list(state(three, STREAMS).matched.values()) == [1300, 1024, 1300]
    assert rebuilt(three).segments_found == 8
    lose(three)
