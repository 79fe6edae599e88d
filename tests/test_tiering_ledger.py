"""Changes of catalog and region together: their order, and what a crash in between leaves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import DeviceError
from kvtier.io.catalog import Catalog, SegmentRow
from kvtier.io.catalog_blobs import BlobTables
from kvtier.io.catalog_schema import BlobRow, SlabRow
from kvtier.io.device import Buffers, Int64Array
from kvtier.tiering import extent_format, record_format
from kvtier.tiering.config import Config
from kvtier.tiering.opening import open_files
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OF_M = KV(PLAIN)
A, B = some_tokens(600, 1), some_tokens(700, 2)
SMALL = Config("4MiB", hot=MIB)


def magics(path: Path) -> dict[int, bytes]:
    """Grid blocks of the region that begin a header or a record, by offset."""
    data = (path / "region.kv").read_bytes()
    found = {at: data[at : at + 8] for at in range(MIB, len(data) - 4096, 4096)}
    wanted = (extent_format.MAGIC, record_format.MAGIC)
    return {at: magic for at, magic in found.items() if magic in wanted}


def named_blocks(store: Store) -> set[int]:
    """Offsets of everything that the catalog names."""
    catalog = store._files.catalog
    found = {extent.offset for e in store._files.inventory.entries.values() for extent in e.extents}
    records = [row.record for row in catalog.fingerprints()]
    records += [row.record for row in catalog.names()]
    found |= {int.from_bytes(record[:8], "little") for record in records}
    return found


def test_order_of_a_save_and_of_a_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A066: data and records are flushed before the catalog names them, and erased after."""
    with open_store(tmp_path, PLAIN, SMALL) as store:
        device, steps = store._files.region.device, []
        write, flush = device.write, device.flush
        commit = Catalog.transaction

        def noting(what: str, inner: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object) -> object:
                steps.append(what)
                return inner(*args)

            return call

        monkeypatch.setattr(device, "write", noting("write", write))
        monkeypatch.setattr(device, "start_write", noting("write", device.start_write))
        monkeypatch.setattr(device, "flush", noting("flush", flush))
        monkeypatch.setattr(Catalog, "transaction", noting("commit", commit))
        sequence = store.sequence()
        extend(store, OF_M, sequence, A)
        steps.clear()
        store.save(sequence, "a", A)
        store.release(sequence)
        order = [each for at, each in enumerate(steps) if each != steps[at - 1] or not at]
        # Payloads; what gets headers is announced; headers and record; the commit.
        assert order == ["write", "commit", "write", "flush", "commit"]
        steps.clear()
        store.remove("a")
        assert steps == ["commit", "write", "flush"]


def test_nothing_removed_can_be_found_by_its_header(tmp_path: Path) -> None:
    with open_store(tmp_path, PLAIN, SMALL) as store:
        put(store, OF_M, "a", A)
        put(store, OF_M, "b", B)
        put(store, OF_M, "b", B[:650])
        assert set(magics(tmp_path)) == named_blocks(store)
        assert store.remove("a") == 2
        assert store.remove("b") == 2
        left = set(magics(tmp_path))
        assert left == named_blocks(store)
        assert len(left) == 1, "only the record of the fingerprint"
        put(store, OF_M, "a", A)
        check_settled(store, tmp_path)


STEPS = ("write", "flush")


@pytest.mark.parametrize("step", STEPS)
def test_a_removal_that_was_cut_short_is_finished_by_the_next_open(
    tmp_path: Path, step: str
) -> None:
    store = open_store(tmp_path, PLAIN, SMALL)
    put(store, OF_M, "a", A)
    put(store, OF_M, "b", B)
    device = store._files.region.device

    def cut(*args: object) -> None:
        raise DeviceError("the power was cut", 5)

    setattr(device, step, cut)
    with pytest.raises(DeviceError, match="the next open tries again"):
        store.remove("a")
    used = store.stats().device_bytes
    assert store.lookup(A) < 5
    assert store._files.catalog.condemned(), "noted, so that it can be finished"
    store._files.close()
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as again:
        assert set(magics(tmp_path)) == named_blocks(again)
        assert again.stats().device_bytes < used
        assert again.lookup(A) < 5
        put(again, OF_M, "a", A)
        check_settled(again, tmp_path)
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as again:
        assert again._files.catalog.condemned() == []
        for tokens in (A, B):
            check_bytes(again, OF_M, again.resume(tokens), tokens)


def test_space_that_was_used_again_is_not_erased_by_a_replay(tmp_path: Path) -> None:
    """Kill at every point between a removal and the commit of what reuses its space."""
    store = open_store(tmp_path, PLAIN, SMALL)
    put(store, OF_M, "a", A)
    store.remove("a")
    assert store._files.catalog.condemned(), "leaves with the next transaction"
    put(store, OF_M, "b", B)
    assert store._files.catalog.condemned() == []
    store._lock._broken_by = "a kill"  # Nothing is settled on the way out.
    store._files.close()
    for _ in range(2):
        with open_store(tmp_path, PLAIN, Config(hot=MIB)) as again:
            sequence = again.resume(B)
            check_bytes(again, OF_M, sequence, B)
            again.release(sequence)
            assert verify(tmp_path).ok


def test_a_header_that_cannot_be_erased_keeps_its_space(tmp_path: Path) -> None:
    store = open_store(tmp_path, PLAIN, SMALL)
    put(store, OF_M, "a", A)
    device = store._files.region.device
    write = device.write
    bad = next(iter(store._files.inventory.entries.values())).extents[0]

    def failing(offsets: Int64Array, buffers: Buffers) -> None:
        kept = np.flatnonzero(offsets != bad.offset)
        write(offsets[kept], Buffers(buffers.memory, buffers.starts[kept], buffers.lengths[kept]))
        failures = [(int(index), 5) for index in np.flatnonzero(offsets == bad.offset)]
        if failures:
            raise DeviceError("cannot write", 5, failures)

    device.write = failing  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="could not be erased"):
        store.remove("a")
    assert store._files.catalog.condemned()[0] == bad
    put(store, OF_M, "b", B)
    assert store._files.catalog.condemned() == [bad], "all others were erased and are free"
    assert set(magics(tmp_path)) - named_blocks(store) == {bad.offset}
    store.close()
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as again:
        assert set(magics(tmp_path)) == named_blocks(again)
        check_bytes(again, OF_M, again.resume(B), B)


def test_a_change_that_fails_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path, PLAIN, SMALL) as store:
        put(store, OF_M, "a", A)
        used = store.stats().device_bytes
        sequence = store.sequence()
        extend(store, OF_M, sequence, B)

        def refuse(*args: object) -> None:
            raise DeviceError("the flush failed", 5)

        with monkeypatch.context() as patched:
            patched.setattr(store._files.region.device, "flush", refuse)
            with pytest.raises(DeviceError, match="the flush failed"):
                store.save(sequence, "b", B)
        assert [each.name for each in store.names()] == ["a"]
        assert store.lookup(B) < 5
        store.release(sequence)
        put(store, OF_M, "b", B)
        store.remove("b")
        assert store.stats().device_bytes == used
        put(store, OF_M, "b", B)
        check_settled(store, tmp_path)


@pytest.mark.parametrize("killed", [False, True])
def test_headers_of_a_save_that_was_cut_are_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Or a later rebuild could take them for a copy of what was stored again and then removed."""
    store = open_store(tmp_path, PLAIN, SMALL)
    put(store, OF_M, "a", A)
    sequence = store.sequence()
    extend(store, OF_M, sequence, B)

    def refuse(*args: object) -> int:
        raise DeviceError("the catalog cannot be written", 28)

    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "add_segment", refuse)
        with pytest.raises(DeviceError, match="the catalog"):
            store.save(sequence, "b", B)
    assert set(magics(tmp_path)) > named_blocks(store), "headers are there, and nobody names them"
    if killed:
        store._files.close()
        store = open_store(tmp_path, PLAIN, Config(hot=MIB))
    else:
        store.release(sequence)
    assert set(magics(tmp_path)) == named_blocks(store)
    put(store, OF_M, "b", B)
    store.remove("b")
    assert set(magics(tmp_path)) == named_blocks(store)
    check_settled(store, tmp_path)
    store.close()


def test_an_interrupt_right_after_the_commit_erases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was interrupted does not know whether it was done."""
    commit = Catalog.transaction
    naming: list[int] = []
    add, add_slab = Catalog.add_segment, BlobTables.add_slab

    @contextmanager
    def interrupted(self: Catalog) -> Iterator[None]:
        with commit(self):
            yield
        if naming:
            raise KeyboardInterrupt

    def adding(self: Catalog, row: SegmentRow) -> int:
        naming.append(1)
        return add(self, row)

    def adding_slab(self: BlobTables, row: SlabRow, blobs: list[BlobRow]) -> int:
        naming.append(1)
        return add_slab(self, row, blobs)

    monkeypatch.setattr(Catalog, "transaction", interrupted)
    monkeypatch.setattr(Catalog, "add_segment", adding)
    monkeypatch.setattr(BlobTables, "add_slab", adding_slab)
    for call in ("save", "flush"):
        naming.clear()
        store = open_store(tmp_path, PLAIN, None if (tmp_path / "store.yaml").exists() else SMALL)
        if call == "save":
            with pytest.raises(KeyboardInterrupt):
                put(store, OF_M, "a", A)
        else:
            store.put_blob("k", b"bytes")
            with pytest.raises(KeyboardInterrupt):
                store.flush()
        naming.clear()
        store.close()
        assert verify(tmp_path).findings == []
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        check_bytes(store, OF_M, store.resume(A), A)
        assert [each.name for each in store.names()] == ["a"]
        assert store.get_blob("k") == b"bytes"


def test_a_store_without_torch_s_parts_applies_the_same_changes(tmp_path: Path) -> None:
    """The command line opens the files alone."""
    with open_store(tmp_path, PLAIN, SMALL) as store:
        put(store, OF_M, "a", A)
    files = open_files(tmp_path, Config())
    inventory = files.inventory
    assert sorted(name for _, name in inventory.names) == ["a"]
    assert sum(entry.nbytes for entry in inventory.entries.values()) > len(A) * PLAIN.token_bytes
    files.close()
