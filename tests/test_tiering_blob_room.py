"""Blobs on a full region, beside Segments, from many threads, and after damage: what makes room."""

import threading
from pathlib import Path

import pytest

from kvtier.errors import CapacityError
from kvtier.tiering.blobs import GROUP_BYTES, GROUP_ENTRIES
from kvtier.tiering.config import Config
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.blob_cases import some_bytes
from tests.store_cases import KV, MIB, PLAIN, check_settled, open_store, put, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def test_blobs_and_segments_make_room_for_each_other(tmp_path: Path) -> None:
    """The newest are retrievable, and the region is never exceeded."""
    kv = KV(PLAIN)
    with open_store(tmp_path, PLAIN, Config("6MiB", hot=MIB)) as store:
        limit = store._files.allocator.window_bytes
        tokens = {}
        for turn in range(30):
            tokens[turn] = some_tokens(500 + turn, turn)
            put(store, kv, f"n{turn}", tokens[turn])
            blobs = {f"{turn} {i}": some_bytes(50_000, 100 * turn + i) for i in range(9)}
            store.put_blobs(blobs)
            store.flush()
            assert store.get_blobs(blobs) == [*blobs.values()]
            assert store.lookup(tokens[turn]) == len(tokens[turn])
            assert store.stats().device_bytes <= limit
            store._files.allocator.check()
        stats = store.stats()
        assert stats.slabs_evicted > 10
        assert stats.segments_evicted > 5
        assert 0 < stats.blobs < 30 * 9
        check_settled(store, tmp_path)


def test_blobs_that_are_used_stay(tmp_path: Path) -> None:
    with open_store(tmp_path, PLAIN, Config("6MiB", hot=MIB)) as store:
        store.put_blob("kept", some_bytes(1000, 0))
        store.flush()
        for i in range(12):
            assert store.get_blob("kept") == some_bytes(1000, 0)
            store.put_blob(f"k{i}", some_bytes(900_000, i))
            store.flush()
        assert store.stats().slabs_evicted > 3
        assert store.get_blob("k0") is None


def test_a_blob_that_never_fits_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path, PLAIN, Config("4MiB", hot=MIB)) as store:
        store.put_blob("a", b"small")
        with pytest.raises(CapacityError):
            store.put_blob("large", bytes(8 * MIB))
        assert store.get_blob("large") is None
        assert store.get_blob("a") == b"small"
        store.flush()
        assert store.get_blob("a") == b"small"
        check_settled(store, tmp_path)


def test_a_full_region_keeps_what_cannot_be_sealed(tmp_path: Path) -> None:
    """A Sequence in use fills the region: Blobs stay in memory, up to a bound."""
    with open_store(tmp_path, PLAIN, Config("4MiB", hot=MIB)) as store:
        allocator = store._files.allocator
        ballast = allocator.allocate(allocator.largest_free_bytes)
        store.put_blob("a", b"small")
        with pytest.raises(CapacityError):
            store.flush()
        assert store.get_blob("a") == b"small"
        with pytest.raises(CapacityError):
            store.put_blobs({f"k{i}": bytes(MIB - i) for i in range(3 * GROUP_BYTES // MIB)})
        assert store._blobs._unsealed_bytes <= GROUP_BYTES
        # Blobs of no bytes are counted, too.
        many = {f"empty {i}": b"" for i in range(GROUP_ENTRIES + 9)}
        with pytest.raises(CapacityError):
            store.put_blobs(many)
        assert store.stats().blobs_unsealed <= GROUP_ENTRIES
        allocator.free(ballast)
        for key in (*many, *(f"k{i}" for i in range(3 * GROUP_BYTES // MIB))):
            store.remove_blob(key)
        store.flush()
        assert store.get_blob("a") == b"small"
        check_settled(store, tmp_path)


def test_many_threads(tmp_path: Path) -> None:
    problems: list[str] = []

    def work(store: Store, number: int) -> None:
        for turn in range(40):
            key, data = f"{number} {turn % 7}", some_bytes(2000 + turn, 1000 * number + turn)
            store.put_blob(key, data)
            if turn % 10 == number:
                store.flush()
            if store.get_blob(key) != data:
                problems.append(key)
            if turn % 13 == 0 and not store.remove_blob(key):
                problems.append(f"{key} was gone")

    with open_store(tmp_path) as store:
        threads = [threading.Thread(target=work, args=(store, i)) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        store.flush()
        check_settled(store, tmp_path)


def test_a_damaged_slab_makes_room_before_all_others(tmp_path: Path) -> None:
    with open_store(tmp_path, PLAIN, Config("6MiB", hot=MIB)) as store:
        for key, seed in (("old", 0), ("damaged", 1)):
            store.put_blob(key, some_bytes(900_000, seed))
            store.flush()
        place = store._files.inventory.blobs.find(b"damaged")
        assert place is not None
        with (tmp_path / "region.kv").open("r+b") as file:
            file.seek(place.offset)
            file.write(b"some other bytes")
        assert store.get_blob("damaged") is None
        assert place.slab.id in store._files.inventory.slabs, "nobody needed its room yet"
        for i in range(4):
            store.put_blob(f"k{i}", some_bytes(900_000, i))
            store.flush()
        assert place.slab.id not in store._files.inventory.slabs
        assert store.get_blob("old") == some_bytes(900_000, 0), "that of the damaged one was enough"
        assert store.stats().slabs_evicted == 1
    assert verify(tmp_path).findings == []
