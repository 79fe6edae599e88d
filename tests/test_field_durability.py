"""Field reports about what survives: cut journals, the order of flush and commit, full queues."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.errors import DeviceError
from kvtier.io.catalog import Catalog
from kvtier.io.device import Buffers, Int64Array
from kvtier.io.threads import ThreadsDevice
from kvtier.io.uring import UringDevice
from kvtier.tiering.config import Config
from kvtier.tiering.verifier import verify
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    extend,
    open_store,
    put,
    some_tokens,
)
from tests.store_worker import in_a_child

pytestmark = pytest.mark.usefixtures("one_thread")
OF_M = KV(PLAIN)
A, B = some_tokens(300, 1), some_tokens(280, 2)
FRAME_BYTES = 24 + 4096
"""Of SQLite's write-ahead log: a header and a page."""


@pytest.fixture
def journal(tmp_path: Path) -> tuple[Path, dict[str, bytes], int]:
    """A store whose process was killed after it saved A and then B: its directory, its catalog's
    files, and the length of the log when B was begun."""
    path = tmp_path / "store"
    mark = tmp_path / "mark"

    def save() -> None:
        store = open_store(path, PLAIN, Config("4MiB", hot=MIB))
        put(store, OF_M, "a", A)
        mark.write_text(str((path / "catalog.sqlite-wal").stat().st_size))
        put(store, OF_M, "b", B)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(save) == -signal.SIGKILL
    names = ("catalog.sqlite", "catalog.sqlite-wal")
    return path, {name: (path / name).read_bytes() for name in names}, int(mark.read_text())


def cuts(begun: int, length: int) -> list[int]:
    """Every edge of B's records in the log, a byte on both sides of it, and bytes between."""
    edges = range(begun, length + 1, FRAME_BYTES)
    near = {edge + delta for edge in edges for delta in (-1, 0, 1, 24)}
    some = random.Random(1).sample(range(begun, length), 8)
    return sorted(each for each in {*near, *some} if begun <= each <= length)


def test_a_cut_journal_opens_and_loses_only_its_end(
    journal: tuple[Path, dict[str, bytes], int],
) -> None:
    """A063: the log ends anywhere in the records of B: A is exact, B is exact or not there."""
    path, files, begun = journal
    log = files["catalog.sqlite-wal"]
    found = set()
    region = (path / "region.kv").read_bytes()
    for cut in cuts(begun, len(log)):
        # What the log does not name is erased when the store is opened.
        (path / "region.kv").write_bytes(region)
        (path / "catalog.sqlite-shm").unlink(missing_ok=True)
        (path / "catalog.sqlite").write_bytes(files["catalog.sqlite"])
        (path / "catalog.sqlite-wal").write_bytes(log[:cut])
        with open_store(path, PLAIN, Config(hot=MIB)) as store:
            check_bytes(store, OF_M, store.resume(A), A)
            sequence = store.resume(B)
            check_bytes(store, OF_M, sequence, B[: sequence.length()])
            found.add((sequence.length(), len(store.names())))
            store.release(sequence)
        assert verify(path).ok
    assert found >= {(0, 1), (len(B), 2)}
    assert {length for length, _ in found} == {0, len(B)}


@contextmanager
def traced(patched: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What reaches the drive and the catalog, in order."""
    log: list[str] = []
    for kind in (ThreadsDevice, UringDevice):
        write, flush = kind.write, kind.flush

        def writing(
            self: object, offsets: Int64Array, buffers: Buffers, do: object = write
        ) -> None:
            assert callable(do)
            do(self, offsets, buffers)
            log.append("write")

        def flushing(self: object, do: object = flush) -> None:
            assert callable(do)
            do(self)
            log.append("flush")

        patched.setattr(kind, "write", writing)
        patched.setattr(kind, "flush", flushing)
    transaction, synced = Catalog.transaction, os.fdatasync

    @contextmanager
    def committing(self: Catalog) -> Iterator[None]:
        log.append("begin")
        with transaction(self):
            yield
        log.append("commit")

    def syncing(fd: int) -> None:
        synced(fd)
        log.append("fdatasync")

    patched.setattr(Catalog, "transaction", committing)
    patched.setattr(os, "fdatasync", syncing)
    yield log


@pytest.mark.parametrize("tokens", [30, 512, 1300])
def test_data_is_flushed_before_the_catalog_names_it(
    tmp_path: Path, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A066: O_DIRECT is not a flush: between the last write and the commit lies a real fdatasync,
    and the commit itself is synchronous (see test_durability_settings of the catalog)."""
    with open_store(tmp_path, PLAIN, Config("16MiB", hot=MIB)) as store:
        with traced(monkeypatch) as log:
            put(store, OF_M, "n", some_tokens(tokens, 1))
            assert store._files.catalog._rows("PRAGMA synchronous") == [(2,)]
        commits = [place for place, each in enumerate(log) if each == "commit"]
        # In pairs: the first announces what gets headers, the second names it.
        assert commits
        assert len(commits) % 2 == 0, log
        for announced, named in zip(commits[::2], commits[1::2], strict=True):
            between = log[announced + 1 : named]
            last_write = len(between) - 1 - between[::-1].index("write")
            after = between[last_write + 1 :]
            assert after.index("fdatasync") < after.index("flush") < after.index("begin"), log


def test_a_flush_that_failed_is_never_made_good_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A065: the third flush fails, the later ones succeed: what it was for is reported, is not
    found, and a second save writes all of it again."""
    with open_store(tmp_path, PLAIN, Config("16MiB", hot=MIB)) as store:
        put(store, OF_M, "a", A)
        genuine, failures = os.fdatasync, [OSError(5, "Input/output error")]

        def fail_once(fd: int) -> None:
            if failures:
                raise failures.pop()
            genuine(fd)

        monkeypatch.setattr(os, "fdatasync", fail_once)
        sequence = store.sequence()
        extend(store, OF_M, sequence, B)
        with pytest.raises(DeviceError, match="could not be made durable") as caught:
            store.save(sequence, "b", B)
        assert caught.value.errno == 5
        assert (store.lookup(B), [each.name for each in store.names()]) == (0, ["a"])
        before = store.stats().bytes_written
        assert store.save(sequence, "b", B) == len(B)
        assert store.stats().bytes_written - before >= 2 * 4096, "written again, not only flushed"
        store.release(sequence)
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        for tokens in (A, B):
            check_bytes(store, OF_M, store.resume(tokens), tokens)
    assert verify(tmp_path).ok


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_close_drops_nothing_that_was_put(tmp_path: Path, engine: str) -> None:
    """A069: fifty saves in a row and a close; none waits in a queue that could be dropped."""
    lists = [[seed, *some_tokens(40, seed)] for seed in range(50)]
    config = Config("16MiB", hot=MIB, engine="threads" if engine == "threads" else "io_uring")
    with open_store(tmp_path, PLAIN, config) as store:
        for seed, tokens in enumerate(lists):
            put(store, OF_M, f"n{seed}", tokens)
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        assert len(store.names()) == 50
        for tokens in lists:
            sequence = store.resume(tokens)
            check_bytes(store, OF_M, sequence, tokens)
            store.release(sequence)
