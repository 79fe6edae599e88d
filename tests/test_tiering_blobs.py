"""Blobs: exact bytes or a miss, what a commit costs, who sees them."""

from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ClosedError, ConfigError
from kvtier.io.simulated_log import SimulatedOperation
from kvtier.tiering.blobs import GROUP_BYTES
from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tiering.slab_limits import ENTRIES_MAX, KEY_BYTES_MAX, SLAB_BYTES
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.blob_cases import Bench, counted, some_bytes
from tests.store_cases import MIB, PLAIN, check_settled, open_store

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (0, 1, 7, 8, 9, 511, 4096, 4097, MIB - 1, MIB, MIB + 1, 3 * MIB)


def walk(store: Store, path: Path, seed: int, steps: int) -> Store:
    """Random calls against a dict; returns the store, which was reopened meanwhile."""
    random = np.random.default_rng(seed)
    wanted: dict[bytes, bytes] = {}
    keys = [f"key {i}".encode() for i in range(40)]
    for step in range(steps):
        key = keys[int(random.integers(len(keys)))]
        kind = random.random()
        if kind < 0.5:
            size = int(random.choice([0, 3, 100, 5000, 70_000]))
            wanted[key] = random.bytes(size) if random.random() < 0.9 else wanted.get(key, b"")
            store.put_blob(key, wanted[key])
        elif kind < 0.85:
            assert store.get_blob(key) == wanted.get(key)
            assert store.has_blob(key) == (key in wanted)
        elif kind < 0.93:
            assert store.remove_blob(key) == (wanted.pop(key, None) is not None)
        elif kind < 0.97:
            store.flush()
        elif kind < 0.975:
            store.close()
            store = open_store(path, PLAIN, Config(hot=MIB))
        if step % 100 == 0:
            assert store.blob_keys() == sorted(wanted)
            assert store.get_blobs(keys) == [wanted.get(each) for each in keys]
            assert store.stats().blobs == len(wanted)
    assert store.get_blobs(keys) == [wanted.get(each) for each in keys]
    assert store.stats().damaged_extents == 0
    return store


# ---- exactness ----------------------------------------------------------------------------------


def test_every_size_comes_back_exactly(tmp_path: Path) -> None:
    wanted = {f"of {size}": some_bytes(size, size) for size in SIZES}
    with open_store(tmp_path) as store:
        for key, data in wanted.items():
            store.put_blob(key, data)
            assert store.get_blob(key) == data, "found at once"
        store.flush()
        assert store.get_blobs(wanted) == [*wanted.values()]
        check_settled(store, tmp_path)
    with open_store(tmp_path) as store:
        for key, data in wanted.items():
            assert store.get_blob(key) == data
        assert store.blob_keys() == sorted(key.encode() for key in wanted)
        assert store.stats().blobs == len(SIZES)
        check_settled(store, tmp_path)


@pytest.mark.parametrize("sealed", [False, True])
def test_what_is_put_last_is_found(tmp_path: Path, sealed: bool) -> None:
    with open_store(tmp_path) as store:
        for data in (b"one", b"two", some_bytes(2 * MIB, 1), b"", b"three", b"two"):
            store.put_blob("k", data)
            if sealed:
                store.flush()
            assert store.get_blob("k") == data
        assert store.blob_keys() == [b"k"]
    with open_store(tmp_path) as store:
        assert store.get_blob("k") == b"two"
        assert store.stats().slabs == 1, "those that were replaced went"
        check_settled(store, tmp_path)


def test_a_large_blob_replaces_one_that_is_not_sealed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_blob("k", b"small")
        store.put_blob("other", b"stays")
        store.put_blob("k", some_bytes(2 * MIB, 1))
        store.flush()
        assert store.get_blobs(["k", "other"]) == [some_bytes(2 * MIB, 1), b"stays"]
        check_settled(store, tmp_path)
    with open_store(tmp_path) as store:
        assert store.get_blob("k") == some_bytes(2 * MIB, 1)


def test_arrays_and_views_are_taken(tmp_path: Path) -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    with open_store(tmp_path) as store:
        store.put_blobs(
            {
                "array": array,
                "part": memoryview(b"abcdef")[2:4],
                "bytearray": bytearray(b"xyz"),
                "nothing": np.zeros((0, 4)),
                "big endian": np.arange(3, dtype=">i4"),
            }
        )
        array += 1
        assert store.get_blob("array") == (array - 1).tobytes(), "it was copied"
        wanted = [b"cd", b"xyz", b"", np.arange(3, dtype=">i4").tobytes()]
        assert store.get_blobs(["part", "bytearray", "nothing", "big endian"]) == wanted


@pytest.mark.parametrize(
    "data",
    [np.zeros((4, 4))[:, ::2], np.array([None]), "text", 3, None, memoryview(b"abcdef")[::2]],
    ids=lambda data: type(data).__name__,
)
def test_what_is_no_blob_is_refused(tmp_path: Path, data: object) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(ConfigError, match="blob"):
            store.put_blob("k", data)
        assert store.get_blob("k") is None


@pytest.mark.parametrize("key", ["", b"", b"x" * (KEY_BYTES_MAX + 1), "\udc80", 3])
def test_what_is_no_key_is_refused(tmp_path: Path, key: str) -> None:
    with open_store(tmp_path) as store:
        for call in (store.get_blob, store.has_blob, store.remove_blob):
            with pytest.raises(ConfigError, match="key"):
                call(key)
        with pytest.raises(ConfigError, match="key"):
            store.put_blob(key, b"x")


def test_keys_are_bytes_and_text_stands_for_them(tmp_path: Path) -> None:
    keys: list[str | bytes] = ["k", "K", "k ", "schl\u00fcssel", b"\x00", b"\xff" * KEY_BYTES_MAX]
    with open_store(tmp_path) as store:
        store.put_blobs({key: str(i).encode() for i, key in enumerate(keys)})
        store.flush()
        for i, key in enumerate(keys):
            assert store.get_blob(key) == str(i).encode()
        assert store.get_blob("schl\u00fcssel".encode()) == b"3"
    with pytest.raises(ClosedError):
        store.get_blob("k")


# ---- what it costs ------------------------------------------------------------------------------


def test_a_blob_costs_its_bytes_and_a_share_of_a_commit(tmp_path: Path) -> None:
    """256 Blobs of 4 KiB: one write, one flush of the device, and two transactions, of which the
    first announces what is written."""
    with Bench.at(tmp_path) as bench, bench.open() as store:
        for i in range(256):
            store.put_blob(f"block {i:040}", some_bytes(4096, i))
        used = store.stats().device_bytes
        bench.device.clear_log()
        flushes = bench.device.counts.flushes
        with counted(store) as ends:
            store.flush()
        assert ends == ["COMMIT", "COMMIT"]
        assert bench.device.counts.flushes == flushes + 1
        kinds = [each.kind for each in bench.device.log]
        assert kinds == ["write", "flush"]
        written = sum(each.length for each in bench.device.log)
        assert written <= 256 * 4096 * 1.05 + 16 * 1024
        assert store.stats().device_bytes - used == written
        with counted(store) as ends:
            store.flush()
        assert ends == []


def test_a_known_blob_is_not_written_again(tmp_path: Path) -> None:
    with Bench.at(tmp_path) as bench:
        blobs = {f"k{i}": some_bytes(100 * i, i) for i in range(20)}
        with bench.open() as store:
            store.put_blobs(blobs)
            store.put_blobs(blobs)
            store.flush()
            written = store.stats().bytes_written
            with counted(store) as ends:
                store.put_blobs(blobs)
                store.flush()
            assert ends == []
            assert store.stats().bytes_written == written
            store.put_blob("k3", some_bytes(300, 99))
            store.flush()
            assert store.get_blob("k3") == some_bytes(300, 99)


def test_one_batch_of_reads_serves_many(tmp_path: Path) -> None:
    with Bench.at(tmp_path) as bench, bench.open() as store:
        blobs = {f"k{i:03}": some_bytes(2000 + i, i) for i in range(300)}
        store.put_blobs(blobs)
        store.flush()
        before = bench.device.calls, store.stats().bytes_read
        wanted = [*blobs, "missing", *list(blobs)[:3]]
        found = store.get_blobs(wanted)
        assert found == [blobs.get(key) for key in wanted]
        assert bench.device.calls == before[0] + 1
        assert store.stats().bytes_read - before[1] < 1.02 * sum(map(len, blobs.values()))


def test_full_slabs_of_one_call_share_a_commit(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        blobs = {f"k{i}": some_bytes(100_000, i) for i in range(95)}
        assert sum(map(len, blobs.values())) < GROUP_BYTES
        with counted(store) as ends:
            store.put_blobs(blobs)
        assert ends == ["COMMIT", "COMMIT"]
        assert 0 < store.stats().blobs_unsealed <= SLAB_BYTES // 100_000
        with counted(store) as ends:
            store.put_blobs({f"l{i}": some_bytes(MIB, i) for i in range(2)})
            for i in range(3):
                store.put_blob(f"large {i}", some_bytes(MIB + 1 + i, i))
        assert len(ends) == 2 * 4
        assert store.get_blobs(blobs) == [*blobs.values()]


def test_a_slab_has_a_bounded_number_of_entries(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        blobs = {f"{i}": b"%d" % i for i in range(ENTRIES_MAX + 10)}
        store.put_blobs(blobs)
        assert store.stats().blobs_unsealed == 10
        store.flush()
        assert store.stats().slabs == 2
        assert store.get_blobs(blobs) == [*blobs.values()]
        assert verify(tmp_path).findings == []


# ---- who sees them ------------------------------------------------------------------------------


def test_another_model_never_sees_a_blob(tmp_path: Path) -> None:
    for model in ("m", "n"):
        with open_store(tmp_path, model=model) as store:
            assert store.get_blob("k") is None
            assert store.blob_keys() == []
            store.put_blob("k", f"of {model}".encode())
    for model in ("m", "n"):
        with open_store(tmp_path, model=model) as store:
            assert store.get_blob("k") == f"of {model}".encode()
            assert store.stats().blobs == 1
            assert store.stats().slabs == 2
    with open_store(tmp_path, model="m") as store:
        assert store.remove_blob("k")
        check_settled(store, tmp_path)
    with open_store(tmp_path, model="n") as store:
        assert store.get_blob("k") == b"of n"
        store.clear()
        assert store.blob_keys() == []
        check_settled(store, tmp_path)


def test_the_listing_counts_blobs(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_blobs({"a": bytes(10), "b": bytes(5000)})
        assert describe(tmp_path).blobs.count == 0, "not sealed"
        store.flush()
        found = describe(tmp_path)
        assert (found.blobs.count, found.blobs.bytes, found.blobs.slabs) == (2, 5010, 1)
        assert found.blobs.slab_bytes >= 5010
        report = verify(tmp_path)
        assert (report.slabs_checked, report.blobs_checked) == (1, 2)
        check_settled(store, tmp_path)


def test_clear_takes_all_blobs(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_blobs({"a": bytes(10), "b": bytes(2 * MIB)})
        store.flush()
        store.put_blob("c", b"not sealed")
        empty = describe(tmp_path).blobs.slab_bytes
        used = store.stats().device_bytes
        store.clear()
        assert store.blob_keys() == []
        assert store.stats().device_bytes == used - empty
        check_settled(store, tmp_path)
    with open_store(tmp_path) as store:
        assert store.blob_keys() == []


def test_removing_gives_back_a_slab_with_its_last_blob(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        used = store.stats().device_bytes
        store.put_blobs({f"k{i}": some_bytes(3000, i) for i in range(5)})
        store.flush()
        for i in range(5):
            assert store.stats().slabs == 1
            assert store.remove_blob(f"k{i}")
            assert not store.remove_blob(f"k{i}")
            assert store.get_blob(f"k{i}") is None
            check_settled(store, tmp_path)
        assert store.stats().slabs == 0
        assert store.stats().device_bytes == used


# ---- many calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "steps"), [(1, 700), pytest.param(2, 3000, marks=pytest.mark.slow)]
)
def test_a_walk_against_a_dict(tmp_path: Path, seed: int, steps: int) -> None:
    store = open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB))
    store = walk(store, tmp_path, seed, steps)
    store.flush()
    check_settled(store, tmp_path)
    store.close()
    assert verify(tmp_path).findings == []


def test_the_log_of_the_device_counts_writes() -> None:
    """The test of the cost would show nothing on a log without lengths."""
    assert SimulatedOperation("write", 0, 5, b"abcde").length == 5
