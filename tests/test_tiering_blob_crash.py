"""Blobs after a crash and after damage: exact or a miss; what was removed stays removed."""

import logging
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.errors import DeviceError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.tiering import slab_format, slab_limits
from kvtier.tiering.blob_index import BlobPlace
from kvtier.tiering.config import Config
from kvtier.tiering.scrubber import Custody, Scrubber
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.blob_cases import Bench, live_keys, some_bytes
from tests.store_cases import MIB, PLAIN, check_settled, open_store

pytestmark = pytest.mark.usefixtures("one_thread")

BLOBS = {f"k{i}".encode(): some_bytes(700 * i, i) for i in range(8)}
FIRST, REST = sorted(BLOBS)[:3], sorted(BLOBS)[3:]
NEW = {b"k2": some_bytes(5000, 100), b"k5": b"", b"new": some_bytes(9, 101)}
CUTS_MAX = 40


def place_of(store: Store, key: bytes) -> BlobPlace:
    place = store._files.inventory.blobs.find(key)
    assert place is not None
    return place


def filled(store: Store) -> None:
    """One slab with the Blobs of FIRST, and one with those of REST."""
    for keys in (FIRST, REST):
        store.put_blobs({key: BLOBS[key] for key in keys})
        store.flush()


# ---- crashes ------------------------------------------------------------------------------------


def remove_one(store: Store) -> None:
    store.remove_blob("k3")


def remove_many(store: Store) -> None:
    for key in FIRST:
        store.remove_blob(key)


def replace_some(store: Store) -> None:
    store.put_blobs(NEW)
    store.flush()


def clear(store: Store) -> None:
    store.clear()


WORK: dict[Callable[[Store], None], dict[bytes, bytes]] = {
    remove_one: {key: data for key, data in BLOBS.items() if key != b"k3"},
    remove_many: {key: BLOBS[key] for key in REST},
    replace_some: BLOBS | NEW,
    clear: {},
}


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_a_crash_at_any_call_of_the_device(tmp_path: Path, work: Callable[[Store], None]) -> None:
    """Each key stands as before or as after; a scan finds no more than the catalog names."""
    after = WORK[work]
    changed = {key for key in {*BLOBS, *after} if BLOBS.get(key) != after.get(key)}
    outcomes: set[int] = set()
    for cut in range(CUTS_MAX):
        with Bench.at(tmp_path / str(cut)) as bench:
            store = bench.open()
            filled(store)
            device = bench.device
            device.calls_left = cut
            finished = False
            try:
                work(store)
                finished = device.calls_left > 0
            except DeviceError:
                pass
            for seed in range(3):
                image = device.image(("none", "all", "some")[seed], seed=cut, torn_bytes=512)
                with bench.crashed(image) as reopened:
                    done = 0
                    for key in {*BLOBS, *after}:
                        found = reopened.get_blob(key)
                        assert found in (BLOBS.get(key), after.get(key))
                        done += key in changed and found == after.get(key)
                    outcomes.add(done)
                    named = set(reopened.blob_keys())
                    assert reopened.stats().damaged_extents == 0
                    reopened.put_blob("probe", b"after the crash")
                    reopened.flush()
                    left = bench.device
                assert live_keys(left.image("none")) == named | {b"probe"}
                assert bench.verified(left.image("none")).findings == []
            device.calls_left = 1 << 62
            store.close()
        if finished:
            break
    assert finished, "CUTS_MAX is too small"
    # A removal is committed before the device hears of it, a Blob only afterwards.
    assert outcomes >= ({0, len(changed)} if work is replace_some else {len(changed)})


def test_a_crash_loses_only_what_is_not_sealed(tmp_path: Path) -> None:
    with Bench.at(tmp_path) as bench:
        store = bench.open()
        filled(store)
        store.put_blob("k1", b"newer")
        store.put_blob("unsealed", b"x")
        with bench.crashed(bench.device.image("none")) as reopened:
            assert reopened.get_blob("k1") == BLOBS[b"k1"], "as it was sealed"
            assert reopened.get_blob("unsealed") is None
        store.close()
        with bench.crashed(bench.devices[0].image("none")) as reopened:
            assert reopened.get_blobs(["k1", "unsealed"]) == [b"newer", b"x"], "closing seals"


@pytest.mark.parametrize("flushed", [False, True])
def test_kill_9(tmp_path: Path, flushed: bool) -> None:
    open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)).close()
    source, target = os.pipe()
    pid = os.fork()
    if not pid:
        # The thread pool of torch does not survive a fork.
        torch.set_num_threads(1)
        store = open_store(tmp_path, PLAIN, Config(hot=MIB))
        store.put_blobs(BLOBS)
        if flushed:
            store.flush()
        os.write(target, b"put")
        signal.pause()
        os._exit(1)
    os.close(target)
    assert os.read(source, 3) == b"put"
    os.close(source)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        wanted = [BLOBS[key] if flushed else None for key in BLOBS]
        assert store.get_blobs(BLOBS) == wanted
        check_settled(store, tmp_path)


def test_a_header_that_cannot_be_written_is_an_error_and_made_good_later(tmp_path: Path) -> None:
    with Bench.at(tmp_path) as bench:
        store = bench.open()
        filled(store)
        place = place_of(store, b"k3")
        bad = BadRange(place.slab.extent.offset, 2 * GRID_BYTES, 5, reads=False, writes=True)
        bench.device.set_faults(Faults(volatile_cache=True, bad_ranges=(bad,)))
        with pytest.raises(DeviceError, match="next open tries again"):
            store.remove_blob("k3")
        assert store.get_blob("k3") is None
        assert store.get_blob("k2") == BLOBS[b"k2"]
        image = bench.device.image("none")
        assert b"k3" in live_keys(image)
        store.close()
        with bench.crashed(image) as reopened:
            assert reopened.get_blob("k3") is None
            assert b"k3" not in live_keys(bench.device.image("none"))
        assert bench.verified(bench.device.image("none")).findings == []


# ---- damage -------------------------------------------------------------------------------------


def damage(path: Path, offset: int) -> None:
    with (path / "region.kv").open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_a_damaged_blob_is_a_miss_and_its_slab_out_of_use_until_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path) as store:
        filled(store)
        place = place_of(store, b"k3")
        damage(tmp_path, place.offset + 100)
        with caplog.at_level(logging.ERROR):
            assert store.get_blob("k3") is None
        assert f"(block {place.offset // store._extents.device.block_bytes} of" in caplog.text
        assert store.stats().damaged_extents == 1
        assert store.get_blobs(["k5", "k3", *FIRST]) == [None, None, *map(BLOBS.get, FIRST)]
        assert store.blob_keys() == FIRST
    with open_store(tmp_path) as store:
        assert not store.has_blob("k3")
        store.put_blob("k3", b"again")
        assert store.get_blob("k3") == b"again"
    kinds = {each.kind for each in verify(tmp_path).findings}
    assert kinds == {"extent"} | ({"blob"} & kinds)
    with open_store(tmp_path) as store:
        before = store.stats()
        store.clear()
        after = store.stats()
        assert after.slabs == 0
        assert before.device_bytes - after.device_bytes > place.slab.extent.length
    assert verify(tmp_path).findings == []


def test_every_damaged_byte_is_a_miss_or_exact(tmp_path: Path) -> None:
    """Headers and directory are read by `verify` alone; the bytes of Blobs have checksums."""
    random = np.random.default_rng(5)
    with open_store(tmp_path) as store:
        filled(store)
        extent = place_of(store, b"k3").slab.extent
        starts = {key: place_of(store, key) for key in REST}
    image = (tmp_path / "region.kv").read_bytes()
    header, _ = slab_format.newest_header(
        np.frombuffer(image, np.uint8)[extent.offset : extent.end], "here"
    )
    directory_end = slab_limits.HEADERS_BYTES + header.directory_bytes
    for turn in range(24):
        first, past = ((0, 120), (4096, 4216), (8192, directory_end), (12288, extent.length))[
            turn % 4
        ]
        at = extent.offset + int(random.integers(first, past))
        catalog = (tmp_path / "catalog.sqlite").read_bytes()
        damage(tmp_path, at)
        findings = verify(tmp_path).findings
        assert findings, f"byte {at - extent.offset}"
        with open_store(tmp_path) as store:
            found = dict(zip(BLOBS, store.get_blobs(BLOBS), strict=True))
        for key, data in found.items():
            assert data in (None, BLOBS[key])
        hit = [key for key, each in starts.items() if each.offset <= at < each.end]
        assert [key for key, data in found.items() if data is None] == hit
        (tmp_path / "region.kv").write_bytes(image)
        (tmp_path / "catalog.sqlite").write_bytes(catalog)
    assert verify(tmp_path).findings == []


def test_what_cannot_be_read_is_a_miss_until_the_store_is_opened_again(tmp_path: Path) -> None:
    with Bench.at(tmp_path) as bench:
        with bench.open() as store:
            store.put_blobs({f"k{i}": some_bytes(4096, i) for i in range(6)})
            store.flush()
            place = place_of(store, b"k3")
            bad = (BadRange(place.offset, 1, 5),)
            bench.device.set_faults(Faults(volatile_cache=True, bad_ranges=bad))
            wanted = [None if i == 3 else some_bytes(4096, i) for i in range(6)]
            assert store.get_blobs([f"k{i}" for i in range(6)]) == wanted
            assert store.stats().failed_reads == 1
            assert not store.has_blob("k3")
            bench.device.set_faults(Faults(volatile_cache=True))
            assert store.get_blob("k3") is None
        with bench.crashed(bench.device.live()) as store:
            assert store.get_blob("k3") == some_bytes(4096, 3)


def test_a_device_that_answers_nothing_is_an_error(tmp_path: Path) -> None:
    with Bench.at(tmp_path) as bench:
        store = bench.open()
        filled(store)
        bench.device.calls_left = 0
        with pytest.raises(DeviceError):
            store.get_blob("k3")
        bench.device.calls_left = 1 << 62
        assert store.get_blob("k3") == BLOBS[b"k3"]
        store.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE blob SET checksum = checksum + 1",
        "UPDATE blob SET checksum = 'text'",
        "UPDATE blob SET offset = offset + 8",
        "UPDATE blob SET offset = -8",
        "UPDATE blob SET offset = 1 << 40",
        "UPDATE blob SET length = length + 1",
        "UPDATE blob SET length = 1.5",
        "UPDATE blob SET entry = 9000",
        "UPDATE blob SET created = 'now'",
        "UPDATE blob SET key = key || x'00'",
        "UPDATE blob SET key = cast(key AS TEXT)",
        "UPDATE blob SET fingerprint_id = 77",
        "UPDATE blob SET slab_id = 77",
        "UPDATE slab SET generation = generation + 2",
        "UPDATE slab SET generation = -1",
        "UPDATE slab SET used = 'never'",
        "UPDATE slab SET created = 1e300",
        "UPDATE slab SET fingerprint_id = 77",
    ],
)
def test_a_damaged_catalog_gives_no_other_bytes(tmp_path: Path, change: str) -> None:
    with open_store(tmp_path) as store:
        store.put_blobs({"a": some_bytes(3000, 1), "b": some_bytes(3000, 2)})
        store.flush()
    connection = sqlite3.connect(tmp_path / "catalog.sqlite")
    where = " WHERE key = x'61'" if "blob" in change else ""
    connection.execute(change + where)
    connection.commit()
    connection.close()
    assert verify(tmp_path).findings != []
    with open_store(tmp_path) as store:
        assert store.get_blob("a") is None
        assert store.get_blob(b"a\0") is None
        assert store.get_blob("b") in (None, some_bytes(3000, 2))
        store.put_blob("a", b"again")
        store.flush()
        assert store.get_blob("a") == b"again"
    with open_store(tmp_path) as store:
        assert store.get_blob("a") == b"again"


def test_a_scrub_quarantines_slabs_with_damaged_blobs(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        filled(store)
        place = place_of(store, b"k3")
        first = place_of(store, b"k1").slab
        damage(tmp_path, place.offset)
        damage(tmp_path, first.extent.offset + 100)
        custody = Custody(store._lock, lambda _: None, lambda _: None)
        report = Scrubber(store._files, custody, rate="1GiB").run()
        assert report.finished
        assert report.slabs_quarantined == [place.slab.id]
        assert {each.kind for each in report.findings} == {"header", "blob"}
        assert report.bytes_read <= report.bytes_total
        assert store.get_blob("k3") is None
        assert store.get_blobs(FIRST) == [BLOBS[key] for key in FIRST]
        again = Scrubber(store._files, custody, rate="1GiB").run()
        assert again.slabs_quarantined == []
        # What is known to be damaged is not read again, and was not to be.
        assert again.bytes_total == report.bytes_total - place.slab.extent.length
        assert again.bytes_read == again.bytes_total
    with open_store(tmp_path) as store:
        assert store.blob_keys() == FIRST


def test_a_faulty_drive_never_gives_other_bytes(tmp_path: Path) -> None:
    """Lost, misdirected and rotted writes: a miss or exact."""
    found = missed = 0
    for seed in range(10):
        with Bench.at(tmp_path / str(seed)) as bench:
            store = bench.open()
            bench.device._seed = seed
            bench.device.set_faults(
                Faults(
                    volatile_cache=True,
                    lost_rate=0.1,
                    misdirected_rate=0.1,
                    rotted_rate=0.1,
                    rotted_bits=3,
                )
            )
            blobs: dict[bytes, bytes] = {}
            for turn in range(12):
                key = b"key %d" % (turn % 9)
                blobs[key] = some_bytes(3000 + turn, 100 * seed + turn)
                store.put_blob(key, blobs[key])
                store.flush()
            store.close()
            with bench.crashed(bench.device.live()) as reopened:
                for key, data in zip(blobs, reopened.get_blobs(blobs), strict=True):
                    assert data in (None, blobs[key])
                    found += data is not None
                    missed += data is None
    assert min(found, missed) > 5
