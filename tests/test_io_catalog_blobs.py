"""The catalog's tables of slabs and Blobs: rows come back, keys are unique, transactions hold."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import KvtierError
from kvtier.io.catalog import Catalog
from kvtier.io.catalog_blobs import BlobTables, BlobTotal
from kvtier.io.catalog_schema import BlobRow, SlabRow

SLAB = SlabRow(0, 1, b"extent", (1 << 63) - 1, 5.0, 6.0, False, False)


def blob(key: bytes, entry: int, fingerprint_id: int = 1) -> BlobRow:
    return BlobRow(fingerprint_id, key, 0, entry, 8192 + 8 * entry, 7, -5, 5.0)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.create(tmp_path / "catalog.sqlite", "u") as catalog:
        for digest in (b"m", b"n"):
            catalog.add_fingerprint(digest, "{}")
        yield catalog


def test_rows_come_back(catalog: Catalog) -> None:
    tables = BlobTables(catalog)
    blobs = [blob(b"b", 1), blob(b"a", 0), blob(b"a\0", 2), blob(b"\xff", 3)]
    first = tables.add_slab(SLAB, blobs)
    second = tables.add_slab(replace(SLAB, fingerprint_id=2), [blob(b"a", 0, 2)])
    assert tables.slabs() == [
        replace(SLAB, id=first),
        replace(SLAB, id=second, fingerprint_id=2),
    ]
    assert tables.slab(second) == replace(SLAB, id=second, fingerprint_id=2)
    assert tables.slab(99) is None
    wanted = sorted((replace(each, slab_id=first) for each in blobs), key=lambda each: each.entry)
    assert tables.blobs_of(first) == wanted
    assert tables.live_entries(first) == [0, 1, 2, 3]
    assert tables.total() == BlobTotal(5, 35)
    assert tables.without_slab() == 0


def test_a_blob_takes_the_place_of_one_with_its_key(catalog: Catalog) -> None:
    tables = BlobTables(catalog)
    first = tables.add_slab(SLAB, [blob(b"a", 0), blob(b"b", 1)])
    second = tables.add_slab(SLAB, [blob(b"a", 0)])
    assert tables.live_entries(first) == [1]
    assert tables.live_entries(second) == [0]
    tables.delete_blobs([(1, b"b"), (2, b"a"), (1, b"unknown")])
    assert tables.live_entries(first) == []
    assert tables.live_entries(second) == [0]


def test_deleting_slabs_takes_their_blobs_and_ids_are_not_given_again(catalog: Catalog) -> None:
    tables = BlobTables(catalog)
    first = tables.add_slab(SLAB, [blob(b"a", 0)])
    second = tables.add_slab(SLAB, [blob(b"b", 0)])
    tables.delete_slabs([second])
    assert [row.id for row in tables.slabs()] == [first]
    assert tables.total().blobs == 1
    assert tables.add_slab(SLAB, []) > second


def test_marks_and_times(catalog: Catalog) -> None:
    tables = BlobTables(catalog)
    first, second = (tables.add_slab(SLAB, []) for _ in range(2))
    tables.set_slabs_used({first: 9.0, 77: 1.0})
    tables.set_slabs_quarantined([second])
    tables.set_headers_stale([first, second], True)
    tables.set_headers_stale([second], False)
    assert tables.slabs() == [
        replace(SLAB, id=first, used=9.0, header_stale=True),
        replace(SLAB, id=second, quarantined=True),
    ]


def test_a_transaction_that_fails_leaves_nothing(catalog: Catalog) -> None:
    tables = BlobTables(catalog)
    kept = tables.add_slab(SLAB, [blob(b"a", 0)])

    def fail() -> None:
        with catalog.transaction():
            tables.add_slab(SLAB, [blob(b"a", 0)])
            tables.delete_slabs([kept])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [row.id for row in tables.slabs()] == [kept]
    assert tables.live_entries(kept) == [0]
    with pytest.raises(KvtierError, match="refuses the row"):
        tables.add_slab(replace(SLAB, fingerprint_id=99), [])
    with pytest.raises(KvtierError, match="refuses the row"):
        tables.add_slab(SLAB, [blob(b"b", 0, 99)])
    assert [row.id for row in tables.slabs()] == [kept]
