"""The bar of `rebuild`: of 1,000 Segments 200 are removed; 800 come back, and none else."""

from pathlib import Path

import pytest

from kvtier.io.catalog import Catalog
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.rebuilder import rebuild
from kvtier.tiering.verifier import verify
from tests.rebuild_cases import lose, rows
from tests.store_cases import KV, check_bytes, open_store, put, some_tokens

TINY = Geometry.uniform(2, 1, 8)
NAMES = 500
REMOVED = range(0, NAMES, 5)


@pytest.mark.slow
def test_of_a_thousand_segments_two_hundred_were_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store"
    kv = KV(TINY)
    # Two Segments each, that nobody shares: the first token is another one.
    tokens = [[number, *some_tokens(511 + 60 + number % 400, number)] for number in range(NAMES)]
    with open_store(path, TINY, Config("192MiB", hot="4MiB")) as store:
        for number, each in enumerate(tokens):
            put(store, kv, f"n{number}", each)
        assert len(store._registry.committed) == 1000
        assert sum(store.remove(f"n{number}") for number in REMOVED) == 200
    before = {(each.generation, each.extents) for each in rows(path)}
    assert len(before) == 800

    lose(path)
    report = rebuild(path)
    with capsys.disabled():
        print(
            f"\nrebuild: {report.segments_restored} segments, {report.bytes_read} bytes in "
            f"{report.seconds:.2f} s, {report.seconds_per_gib:.2f} s per GiB"
        )
    assert report.ok
    assert (report.segments_found, report.segments_restored) == (800, 800)
    assert {(each.generation, each.extents) for each in rows(path)} == before
    found = verify(path)
    assert found.findings == []
    assert found.segments_checked == 800
    with Catalog.open(path / "catalog.sqlite") as catalog:
        names = {each.name for each in catalog.names()}
    assert names == {f"n{number}" for number in range(NAMES) if number not in REMOVED}
    with open_store(path, TINY) as store:
        for number, each in enumerate(tokens):
            sequence = store.resume(each)
            assert sequence.length() == (0 if number in REMOVED else len(each))
            assert store.lookup(each) == sequence.length()
            if number not in REMOVED:
                check_bytes(store, kv, sequence, each)
            store.release(sequence)
