"""A store that is spread over several drives: what lies where, and what a missing drive costs."""

import asyncio
import logging
import os
from itertools import pairwise
from pathlib import Path

import pytest

from kvtier.errors import (
    CapacityError,
    DeviceError,
)
from kvtier.io import probe
from kvtier.io.device import Device
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.tiering import opening
from kvtier.tiering.aio import AsyncStore
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.listing import describe
from kvtier.tiering.rebuilder import rebuild
from kvtier.tiering.verifier import verify
from tests.drive_cases import (
    DRIVES,
    LONG,
    OF_M,
    bring_back,
    condemned,
    drives_of,
    make_long,
    make_store,
    rows,
    take_away,
    tokens_there,
)
from tests.store_cases import (
    MIB,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)


def test_segments_lie_on_all_drives_in_turn(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    places = [drives_of(row) for row in rows(path)]
    assert all(len(each) == 1 for each in places), "all extents of a segment lie on one drive"
    order = [min(each) for each in places]
    assert all(after == (before + 1) % DRIVES for before, after in pairwise(order))
    with open_store(path) as store:
        assert store.stats().engine.endswith(f" x{DRIVES}")
        assert store.stats().region_bytes == DRIVES * 4 * MIB
        assert store.stats().missing_regions == ()
        sequence = store.resume(LONG)
        check_bytes(store, OF_M, sequence, LONG)
        store.release(sequence)
        check_settled(store, path)
    assert [each.used_bytes > 0 for each in describe(path).regions] == [True] * DRIVES
    assert [row.drives for row in describe(path).segments] == [[each] for each in order]


def test_each_drive_has_its_turn_also_over_many_short_openings(tmp_path: Path) -> None:
    path = make_store(tmp_path)
    for number in range(DRIVES):
        with open_store(path) as store:
            put(store, OF_M, f"n{number}", some_tokens(512, 50 + number))
    assert sorted(min(drives_of(row)) for row in rows(path)) == list(range(DRIVES))


def test_drives_of_different_sizes_are_filled_before_anything_is_evicted(tmp_path: Path) -> None:
    path = make_store(tmp_path, (2 * MIB, 8 * MIB))
    with open_store(path) as store:
        number = 0
        segment_bytes = 0
        while store._files.allocator.free_bytes > 3 * segment_bytes:
            before = store.stats().device_bytes
            put(store, OF_M, f"n{number}", some_tokens(512, number))
            segment_bytes = max(segment_bytes, store.stats().device_bytes - before)
            number += 1
        assert store.stats().segments_evicted == 0
        for _ in range(5):
            put(store, OF_M, f"n{number}", some_tokens(512, number))
            number += 1
        assert store.stats().segments_evicted > 0
        check_settled(store, path)


def test_what_no_drive_has_room_for_is_refused(tmp_path: Path) -> None:
    path = make_store(tmp_path, (2 * MIB, 2 * MIB))
    with open_store(path) as store, pytest.raises(CapacityError) as caught:
        store.put_blob("large", bytes(3 * MIB))
    assert caught.value.limit == 2 * (MIB - 4096)


def test_many_restores_on_an_event_loop(tmp_path: Path) -> None:
    """Completions of all drives wake the loop; what is restored is exact, with a drive less too."""
    path = make_long(tmp_path)

    async def work(expected: int) -> None:
        async with await AsyncStore.open(lambda: open_store(path)) as aio:
            lengths = [1, 500, 513, 2000, 5000, len(LONG)]
            found = await asyncio.gather(*(aio.resume(LONG[:each]) for each in lengths))
            for each, sequence in zip(lengths, found, strict=True):
                length = min(each, expected)
                check_bytes(aio.store, OF_M, sequence, LONG[:length])
                await aio.release(sequence)

    asyncio.run(work(len(LONG)))
    take_away(tmp_path, 3)
    first = next(row.start_position for row in rows(path) if drives_of(row) == {3})
    asyncio.run(work(first))


# ---- a drive is missing -------------------------------------------------------------------------


def test_a_missing_drive_costs_its_segments_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_long(tmp_path)
    take_away(tmp_path, 2)
    with caplog.at_level(logging.ERROR, "kvtier"), open_store(path) as store:
        assert f"{tmp_path / 'drive2'} of this store does not exist" in caplog.text
        assert store.stats().missing_regions == (str(tmp_path / "drive2"),)
        assert store.stats().segments_unavailable == 4
        assert tokens_there(store, LONG) == 3 * len(LONG) // 4
        first = next(n for n, row in enumerate(rows(path)) if drives_of(row) == {2})
        sequence = store.resume(LONG)
        assert sequence.length() == first * SEGMENT_TOKENS
        check_everywhere(store, OF_M, sequence, LONG[: sequence.length()])
        store.release(sequence)
        assert [name.name for name in store.names()] == ["long"]
    bring_back(tmp_path, 2)
    with open_store(path) as store:
        sequence = store.resume(LONG)
        check_bytes(store, OF_M, sequence, LONG)
        store.release(sequence)
        check_settled(store, path)


def test_writing_goes_on_and_evicts_nothing_that_is_missing(tmp_path: Path) -> None:
    path = make_long(tmp_path, 2 * MIB)
    missed = [row for row in rows(path) if drives_of(row) == {1}]
    take_away(tmp_path, 1)
    with open_store(path) as store:
        for number in range(30):
            put(store, OF_M, f"n{number}", some_tokens(512, 100 + number))
        assert store.stats().segments_evicted > 5
        new = [row for row in rows(path) if row.id > 16]
        assert new
        assert not any(1 in drives_of(row) for row in new)
    assert {row.id for row in missed} < {row.id for row in rows(path)}
    bring_back(tmp_path, 1)
    with open_store(path) as store:
        check_settled(store, path)
        # What comes before a missing segment stays as well, what comes after it may go.
        assert store.lookup(LONG) >= missed[-1].start_position + SEGMENT_TOKENS


def test_a_hole_is_computed_and_stored_anew_on_the_other_drives(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    take_away(tmp_path, 3)
    with open_store(path) as store:
        sequence = store.resume(LONG)
        for start, end in store.holes(LONG):
            assert sequence.length() == start
            extend(store, OF_M, sequence, LONG[:end])
            store.name_tokens(sequence, LONG[:end])
            store.extend(sequence, LONG)
        extend(store, OF_M, sequence, LONG)
        check_bytes(store, OF_M, sequence, LONG)
        store.save(sequence, "again", LONG)
        store.release(sequence)
        assert store.lookup(LONG) == len(LONG)
    assert set(condemned(path)) == {3}, "the old ones are to be erased when their drive is back"
    assert len(rows(path)) == 16
    bring_back(tmp_path, 3)
    with open_store(path) as store:
        assert store.lookup(LONG) == len(LONG)
        check_settled(store, path)
    assert condemned(path) == []


def test_what_is_removed_while_its_drive_is_missing_stays_removed(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    take_away(tmp_path, 0)
    with open_store(path) as store:
        with pytest.raises(DeviceError, match="the next open tries again"):
            store.remove("long")
        assert store.names() == []
        assert store.lookup(LONG) == 0
    assert set(condemned(path)) == {0}
    with open_store(path):
        assert set(condemned(path)) == {0}, "also after an opening without it"
    bring_back(tmp_path, 0)
    open_store(path).close()
    assert condemned(path) == []
    (path / "catalog.sqlite").unlink()
    assert rebuild(path).segments_found == 0


def test_blobs_of_a_missing_drive_are_misses_until_it_is_back(tmp_path: Path) -> None:
    path = make_store(tmp_path)
    blobs = {f"b{number}": os.urandom(300_000) for number in range(20)}
    with open_store(path) as store:
        for key, data in blobs.items():
            store.put_blob(key, data)
            store.flush()
    take_away(tmp_path, 1)
    with open_store(path) as store:
        found = {key: store.get_blob(key) for key in blobs}
        there = {key for key, data in found.items() if data is not None}
        assert 0 < len(there) < len(blobs)
        assert all(found[key] == blobs[key] for key in there)
        assert all(store.has_blob(key) == (key in there) for key in blobs)
        gone = sorted(blobs.keys() - there)
        # A new value takes the place of the one that is missing, for good.
        store.put_blob(gone[0], b"new")
        store.flush()
        with pytest.raises(DeviceError):
            store.remove_blob(gone[1])
    bring_back(tmp_path, 1)
    expected = {**blobs, gone[0]: b"new", gone[1]: None}
    with open_store(path) as store:
        assert {key: store.get_blob(key) for key in blobs} == expected
    assert verify(path).ok
    (path / "catalog.sqlite").unlink()
    assert rebuild(path).ok
    with open_store(path) as store:
        assert {key: store.get_blob(key) for key in blobs} == expected


def test_no_drive_at_all(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    for number in range(DRIVES):
        take_away(tmp_path, number)
    with pytest.raises(DeviceError, match="no region of this store is there"):
        open_store(path)
    assert {each.kind for each in verify(path).findings} == {"region"}


def test_a_drive_that_answers_nothing_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_long(tmp_path)
    dead = str(tmp_path / "drive1")

    def open_device(path: str, **wishes: object) -> Device:
        if path != dead:
            return probe.open_device(path)
        faults = Faults(bad_ranges=(BadRange(0, 4 * MIB),))
        return SimulatedDevice.open(4 * MIB, faults=faults, path=path)

    monkeypatch.setattr(opening, "open_device", open_device)
    with open_store(path) as store:
        assert store.stats().missing_regions == (dead,)
        assert tokens_there(store, LONG) == 3 * len(LONG) // 4
