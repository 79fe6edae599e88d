"""A scrub beside an open store: what is damaged goes out of use for good, and nothing else does."""

import errno
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ClosedError, ConfigError, DeviceError
from kvtier.io.device import Buffers, Priority
from kvtier.io.simulated_faults import NO_FAULTS, BadRange, Faults
from kvtier.io.superblock import DATA_START
from kvtier.tiering.background_scrub import background_scrub
from kvtier.tiering.catalog_rows import extents_of
from kvtier.tiering.config import Config
from kvtier.tiering.extent_check import PIECE_BYTES
from kvtier.tiering.findings import MEDIA, PADDING, RECORD
from kvtier.tiering.scrubber import Custody, Pace, Scrubber
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.corruption_cases import HOT, OF_M, REGION_BYTES, FilledStore
from tests.store_cases import KV, PLAIN, check_bytes, check_everywhere, open_store, put, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

FAST = "1TiB"
DEADLINE_S = 60


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> FilledStore:
    return FilledStore(tmp_path_factory.mktemp("full"))


@pytest.fixture
def filled(full: FilledStore, monkeypatch: pytest.MonkeyPatch) -> FilledStore:
    full.attach(monkeypatch)
    return full


def scrubber(store: Store, rate: int | str = FAST) -> Scrubber:
    return background_scrub(
        store._lock, store._files, store._registry, store._extents.counters, rate
    )


@contextmanager
def scrubbing(store: Store, rate: int | str) -> Iterator[Scrubber]:
    started = store.scrub(rate)
    try:
        yield started
    finally:
        started.stop()


def middle_of(filled: FilledStore, index: int = 3) -> tuple[int, str]:
    """A byte in the payload of a Segment's last layer, and the name that loses it."""
    row = filled.rows[index]
    extent = extents_of(row)[-1]
    return extent.offset + extent.length // 2 // 4096 * 4096, filled.name_of[row.id]


def damage(filled: FilledStore, offset: int) -> None:
    filled.write(offset, bytes(range(256)) * 2)


def check_lost(filled: FilledStore, store: Store, lost: str) -> None:
    """Only this name is shorter now; everything else is exact."""
    for name, tokens in filled.saved.items():
        length = filled.resumed(store, name)
        assert (length < len(tokens)) == (name == lost), name


def test_a_sound_store_has_no_finding_and_no_tier_is_touched(filled: FilledStore) -> None:
    with filled.open() as store:
        name = next(iter(filled.saved))
        filled.resumed(store, name)
        before = store.stats()
        found = scrubber(store).run()
        assert found.ok
        assert found.finished
        assert found.quarantined == []
        assert found.bytes_read == found.bytes_total
        assert found.segments_checked == len(filled.rows)
        assert store.stats() == before


def test_damage_is_quarantined_for_good_and_logged_with_its_block(
    filled: FilledStore, caplog: pytest.LogCaptureFixture
) -> None:
    offset, lost = middle_of(filled)
    damage(filled, offset)
    with filled.open() as store:
        assert store.lookup(filled.saved[lost]) == len(filled.saved[lost])
        with caplog.at_level(logging.ERROR, "kvtier"):
            found = scrubber(store).run()
        (finding,) = found.findings
        assert finding.kind == "page"
        assert found.quarantined == [filled.rows[3].id]
        extent = extents_of(filled.rows[3])[-1]
        for words in (
            filled.device.path, f"byte {extent.offset} ", f"block {extent.offset // 512} of 512",
        ):  # fmt: skip
            assert words in caplog.text
        assert store.stats().damaged_extents == 1
        assert store.lookup(filled.saved[lost]) < len(filled.saved[lost])
        check_lost(filled, store, lost)
        # What is known is not read or found again.
        again = scrubber(store).run()
        assert again.quarantined == []
        assert [each.what for each in again.findings] == [
            "it is quarantined: damage was found before"
        ]
    found_later = verify(filled.home / "copy").findings
    assert "it is quarantined: damage was found before" in [each.what for each in found_later]
    with open_store(filled.home / "copy", PLAIN, HOT) as store:
        assert store.lookup(filled.saved[lost]) < len(filled.saved[lost])


def test_what_was_lost_can_be_stored_again(filled: FilledStore) -> None:
    offset, lost = middle_of(filled)
    damage(filled, offset)
    with filled.open() as store:
        scrubber(store).run()
        other = next(each for each in filled.saved if each != lost)
        store.remove(other)
        put(store, OF_M, lost, filled.saved[lost])
        assert filled.resumed(store, lost) == len(filled.saved[lost])


def test_segments_of_another_model_are_walked_too(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, KV(PLAIN), "a", some_tokens(700, 1))
        extent = store._registry.committed[1].extents[0]
        assert extent is not None
    with (tmp_path / "region.kv").open("r+b") as file:
        file.seek(extent.offset + extent.length // 2)
        file.write(b"\xff" * 9)
    with open_store(tmp_path, model="another") as store:
        assert scrubber(store).run().quarantined == [1]
        assert store._files.inventory.entries[1].quarantined
    with open_store(tmp_path) as store:
        assert store.lookup(some_tokens(700, 1)) == 0


@pytest.mark.parametrize("number", [errno.ENODATA, errno.EIO])
def test_a_block_that_cannot_be_read_costs_its_segment_alone(
    filled: FilledStore, number: int
) -> None:
    offset, lost = middle_of(filled)
    with filled.open() as store:
        filled.device.set_faults(Faults(bad_ranges=(BadRange(offset, 512, number),)))
        found = scrubber(store).run()
        (finding,) = found.findings
        assert finding.kind == MEDIA
        assert f"byte {offset} (block {offset // 512})" in finding.what
        assert finding.what.startswith("1 pieces of 4096 bytes cannot be read")
        assert found.quarantined == [filled.rows[3].id]
        check_lost(filled, store, lost)
    filled.device.set_faults(NO_FAULTS)
    with open_store(filled.home / "copy", PLAIN, HOT) as store:
        assert store.lookup(filled.saved[lost]) < len(filled.saved[lost]), "it is for good"


@pytest.mark.parametrize(
    "bad",
    [BadRange(0, REGION_BYTES), BadRange(REGION_BYTES // 2, REGION_BYTES // 2)],
    ids=["the whole device", "its second half"],
)
def test_a_device_that_fails_as_a_whole_costs_nobody(
    filled: FilledStore, bad: BadRange, caplog: pytest.LogCaptureFixture
) -> None:
    with filled.open() as store:
        filled.device.set_faults(Faults(bad_ranges=(bad,)))
        with scrubbing(store, FAST) as started, pytest.raises(DeviceError):
            started.result()
        assert started.report().quarantined == []
        assert not started.report().finished
        assert "the scrub ended early" in caplog.text
        filled.device.set_faults(NO_FAULTS)
        check_lost(filled, store, "none")


def test_a_read_that_works_at_the_second_attempt_is_no_finding(
    filled: FilledStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    genuine = filled.device.read
    failed: list[int] = []

    def read(offsets: Any, buffers: Buffers, *priority: Priority) -> None:
        at = int(offsets[0])
        inside = DATA_START < at < REGION_BYTES - 4096
        if len(failed) < 3 and inside and at not in failed:
            failed.append(at)
            raise DeviceError("1 read failed", errno.EIO, [(0, errno.EIO)])
        genuine(offsets, buffers, *priority)

    with filled.open() as store:
        monkeypatch.setattr(filled.device, "read", read)
        with caplog.at_level(logging.WARNING, "kvtier"):
            found = scrubber(store).run()
        assert len(failed) == 3
        assert found.ok
        assert caplog.text.count("second attempt") == 3


def test_padding_and_records_are_reported_and_cost_nothing(filled: FilledStore) -> None:
    row = next(each for each in filled.rows if each.token_count % 512)
    extent = extents_of(row)[1]
    record = filled.records[-1].extent
    damage(filled, record.offset + 512)
    image = filled.image[extent.end - 512 : extent.end].copy()
    assert not image.any(), "it ends with padding"
    image[-1] = 1
    filled.write(extent.end - 512, image.tobytes())
    with filled.open() as store:
        found = scrubber(store).run()
        assert {each.kind for each in found.findings} == {PADDING, RECORD}
        assert f"the first at byte {extent.end - 1}" in str(found.findings)
        assert found.quarantined == []
        check_lost(filled, store, "none")


class RemovesFirst:
    """A guard under which a name is removed before anybody looks again."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.entered = 0

    def __enter__(self) -> None:
        self.entered += 1
        if self.entered == 2:
            self.store.remove(self.name)

    def __exit__(self, *args: object) -> None:
        return None


def test_what_was_removed_since_it_was_read_is_no_finding(filled: FilledStore) -> None:
    offset, lost = middle_of(filled)
    damage(filled, offset)
    with filled.open() as store:
        asked: list[int] = []
        guard = RemovesFirst(store, lost)
        custody = Custody(guard, asked.append, lambda finding: None)
        found = Scrubber(store._files, custody, rate=FAST).run()
        assert guard.entered >= 2
        assert found.findings == []
        assert asked == []


def test_removals_and_saves_beside_a_scrub_are_never_findings(tmp_path: Path) -> None:
    """Space is used again while the walk still thinks of its last owner."""
    with open_store(tmp_path, PLAIN, Config("4MiB", hot="4MiB")) as store:
        for number in range(8):
            put(store, OF_M, f"n{number}", some_tokens(700, number))
        reports = []
        for turn in range(6):
            with scrubbing(store, "40MiB") as started:
                for number in range(8):
                    store.remove(f"n{number}")
                    tokens = some_tokens(600 + turn, 100 * turn + number)
                    put(store, OF_M, f"n{number}", tokens)
                    sequence = store.resume(tokens)
                    check_bytes(store, OF_M, sequence, tokens)
                    store.release(sequence)
                reports.append(started.result())
        assert [each.findings for each in reports] == [[]] * 6
        assert all(each.finished for each in reports)
    assert verify(tmp_path).ok


def test_the_rate_holds_and_demand_does_not_wait_for_it(filled: FilledStore) -> None:
    with filled.open() as store:
        rate = 4 << 20
        begun = time.monotonic()
        with scrubbing(store, rate) as started:
            for name, tokens in filled.saved.items():
                sequence = store.resume(tokens)
                check_everywhere(store, OF_M, sequence, tokens)
                store.release(sequence)
                assert name
            found = started.result()
        assert found.ok
        # All but the first piece had to wait for those before it.
        assert time.monotonic() - begun >= (found.bytes_read - PIECE_BYTES) / rate


class Depth:
    """A guard that counts who is inside."""

    def __init__(self) -> None:
        self.inside = self.entered = 0

    def __enter__(self) -> None:
        self.inside += 1
        self.entered += 1

    def __exit__(self, *args: object) -> None:
        self.inside -= 1


def test_nobody_waits_for_the_rate_under_the_lock(
    filled: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset, _ = middle_of(filled)
    damage(filled, offset)
    damage(filled, filled.records[0].extent.offset)
    guard, paced = Depth(), []
    with filled.open() as store:
        walk = Scrubber(store._files, Custody(guard, lambda each: None, lambda each: None))
        monkeypatch.setattr(walk._checker, "_pace", lambda nbytes: paced.append(guard.inside))
        assert {each.kind for each in walk.run().findings} == {"page", RECORD}
    assert guard.entered == 3
    assert set(paced) == {0}


def test_stop_does_not_wait_for_the_rate(filled: FilledStore) -> None:
    with filled.open() as store:
        started = scrubber(store, 1000)
        started.start()
        assert not started.wait(0.2), "some thousand seconds are left"
        begun = time.monotonic()
        started.stop()
        started.stop()
        assert time.monotonic() - begun < DEADLINE_S
        assert not started.running
        found = started.result()
        assert not found.finished
        assert 0 < found.bytes_read < found.bytes_total
        check_lost(filled, store, "none")


def test_a_store_that_is_closed_under_a_scrub_ends_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, OF_M, "a", some_tokens(700, 1))
    started = scrubber(store, PIECE_BYTES)
    started.start()
    store._files.region.device.close()
    with pytest.raises(ClosedError):
        started.result()
    store.close()


def test_a_lock_that_others_hold_long_is_waited_for(filled: FilledStore) -> None:
    damage(filled, middle_of(filled)[0])
    with filled.open() as store:
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with store._lock:
                held.set()
                done.wait(DEADLINE_S)

        holder = threading.Thread(target=hold)
        with scrubbing(store, 8 << 20) as started:
            holder.start()
            assert held.wait(DEADLINE_S)
            assert not started.wait(0.6)
            assert started.report().quarantined == []
            done.set()
            holder.join()
            assert len(started.result().quarantined) == 1


@pytest.mark.parametrize("rate", [0, "0MiB", -1, "fast", 1.5, None])
def test_a_rate_that_cannot_be_is_refused(filled: FilledStore, rate: Any) -> None:
    with filled.open() as store, pytest.raises(ConfigError, match="rate"):
        scrubber(store, rate)


def test_pace_makes_up_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pace = Pace(10, wait)
    pace(20)
    assert waits == []
    pace(20)
    assert waits == [2.0]
    clock[0] += 50
    pace(5)
    pace(5)
    assert waits == [2.0, 0.5]
