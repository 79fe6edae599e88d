"""Blobs after their catalog was lost: what was sealed comes back exactly, what was removed does
not."""

from pathlib import Path

import numpy as np
import pytest

from kvtier.io.alignment import GRID_BYTES
from kvtier.io.extent import Extent
from kvtier.tiering import rebuild_slabs
from kvtier.tiering.rebuilder import RebuildReport, rebuild
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.blob_cases import some_bytes
from tests.store_cases import KV, MIB, PLAIN, check_settled, open_store, put, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

BLOBS = {f"k{i}".encode(): some_bytes(900 * i, i) for i in range(10)}


def lose_catalog(path: Path) -> None:
    for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
        (path / name).unlink(missing_ok=True)


def rebuilt(path: Path) -> RebuildReport:
    lose_catalog(path)
    report = rebuild(path)
    assert verify(path).findings == []
    return report


def slab_of(store: Store, key: bytes) -> Extent:
    place = store._files.inventory.blobs.find(key)
    assert place is not None
    return place.slab.extent


def poke(path: Path, offset: int, data: bytes) -> None:
    with (path / "region.kv").open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_all_blobs_come_back_and_none_that_was_removed_or_replaced(tmp_path: Path) -> None:
    kv = KV(PLAIN)
    wanted = dict(BLOBS)
    with open_store(tmp_path) as store:
        put(store, kv, "name", some_tokens(600, 1))
        store.put_blobs(BLOBS)
        store.put_blob("large", some_bytes(9 * MIB + 5, 1))
        store.put_blob("large and removed", some_bytes(2 * MIB, 2))
        store.flush()
        for key in (b"k1", b"k7", b"large and removed"):
            store.remove_blob(key)
            wanted.pop(key, None)
        for turn in range(4):
            for i, key in enumerate((b"k2", b"k3", b"k9")):
                wanted[key] = some_bytes(100 + i, 50 + turn)
                store.put_blob(key, wanted[key])
            store.flush()
        wanted[b"large"] = some_bytes(9 * MIB + 5, 1)
    with open_store(tmp_path, model="n") as store:
        store.put_blob("k0", b"of another model")
    report = rebuilt(tmp_path)
    assert report.blobs_restored == len(wanted) + 1
    assert report.ok
    with open_store(tmp_path) as store:
        assert store.blob_keys() == sorted(wanted)
        assert store.get_blobs(wanted) == [*wanted.values()]
        assert store.lookup(some_tokens(600, 1)) == 600
        check_settled(store, tmp_path)
        for key in wanted:
            assert store.remove_blob(key)
        check_settled(store, tmp_path)
    with open_store(tmp_path, model="n") as store:
        assert store.get_blob("k0") == b"of another model"
    assert rebuilt(tmp_path).blobs_restored == 1, "what was removed after a rebuild stays so"


def test_either_copy_of_the_header_will_do(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_blobs(BLOBS)
        store.flush()
        extent = slab_of(store, b"k3")
    image = (tmp_path / "region.kv").read_bytes()
    for at, first in ((0, 0), (100, 0), (GRID_BYTES, 1), (GRID_BYTES + 100, 1)):
        (tmp_path / "region.kv").write_bytes(image)
        poke(tmp_path, extent.offset + at, b"\xff")
        lose_catalog(tmp_path)
        assert rebuild(tmp_path).blobs_restored == len(BLOBS), f"copy {first}"
        assert [each.kind for each in verify(tmp_path).findings] == ["header"]
        with open_store(tmp_path) as store:
            assert store.get_blobs(BLOBS) == [*BLOBS.values()]
            # A change of the header heals the copy that is damaged.
            store.remove_blob("k0")
        assert verify(tmp_path).findings == []


def test_a_slab_with_a_damaged_blob_does_not_come_back(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_blobs(BLOBS)
        store.flush()
        place = store._files.inventory.blobs.find(b"k5")
        assert place is not None
        store.put_blob("other", b"slab")
    poke(tmp_path, place.offset, bytes([some_bytes(900 * 5, 5)[0] ^ 1]))
    report = rebuilt(tmp_path)
    assert report.slabs_dropped == {rebuild_slabs.DAMAGED: 1}
    assert not report.ok
    assert report.headers_erased == 2
    with open_store(tmp_path) as store:
        assert store.blob_keys() == [b"other"]
        used = store.stats().device_bytes
        store.put_blobs(BLOBS)
        store.flush()
        assert store.get_blobs(BLOBS) == [*BLOBS.values()]
        assert store.stats().device_bytes > used
    assert rebuilt(tmp_path).blobs_restored == len(BLOBS) + 1


def test_a_fingerprint_that_lost_its_record_keeps_its_blobs(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put_blobs(BLOBS)
        store.flush()
        (row,) = store._files.catalog.fingerprints()
    offset = int(np.frombuffer(row.record, "<i8")[0])
    poke(tmp_path, offset, bytes(GRID_BYTES))
    report = rebuilt(tmp_path)
    assert report.descriptions_lost == 1
    with open_store(tmp_path) as store:
        assert store.get_blobs(BLOBS) == [*BLOBS.values()]


def test_what_an_old_catalog_knows_of_removals_counts(tmp_path: Path) -> None:
    """A crash left the header stale, and the catalog is replaced by force."""
    with open_store(tmp_path) as store:
        store.put_blobs(BLOBS)
        store.flush()
        extent = slab_of(store, b"k3")
        region = (tmp_path / "region.kv").read_bytes()
        store.remove_blob("k3")
        catalogs = {
            each.name: each.read_bytes() for each in tmp_path.iterdir() if "sqlite" in each.name
        }
    poke(tmp_path, extent.offset, region[extent.offset :][: 2 * GRID_BYTES])
    lose_catalog(tmp_path)
    for name, data in catalogs.items():
        (tmp_path / name).write_bytes(data)
    report = rebuild(tmp_path, force=True)
    assert report.blobs_restored == len(BLOBS) - 1
    assert verify(tmp_path).findings == []
    assert rebuilt(tmp_path).blobs_restored == len(BLOBS) - 1, "its header was written anew"
