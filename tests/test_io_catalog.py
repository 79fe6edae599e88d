"""The catalog: what it keeps, what it refuses, what survives."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import (
    ClosedError,
    DeviceError,
    FormatError,
    KvtierError,
    LockedError,
    VersionMismatch,
)
from kvtier.io import catalog as catalog_module
from kvtier.io.catalog import (
    CATALOG_VERSION,
    Catalog,
    NameRow,
    SegmentRow,
    pack_extents,
    unpack_extents,
)
from kvtier.io.extent import Extent

STORE = "11111111-2222-3333-4444-555555555555"
RECORD = pack_extents([Extent(1 << 20, 4096)])
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "a store?#%" / "catalog.sqlite")


@pytest.fixture
def catalog(path: str) -> Iterator[Catalog]:
    os.mkdir(os.path.dirname(path))
    with Catalog.create(path, STORE) as opened:
        yield opened


def segment(fingerprint_id: int, *, seed: int = 0, parent_id: int | None = None) -> SegmentRow:
    return SegmentRow(
        id=0,
        fingerprint_id=fingerprint_id,
        provenance="exact",
        start_digest=bytes([seed]) * 16,
        end_digest=bytes([seed + 1]) * 16,
        start_position=512 * seed,
        token_count=512,
        tokens=bytes(range(256)) * 8,
        parent_id=parent_id,
        parent_limit=512,
        generation=3,
        extents=pack_extents([Extent(4096 * (seed + 1), 8192)]),
        created=1.5,
        used=1.75,
        quarantined=False,
    )


def name_row(name: str, fingerprint_id: int, segment_id: int) -> NameRow:
    return NameRow(name, fingerprint_id, segment_id, 500, 1012, RECORD, 1e11, 2.5)


def test_everything_comes_back(catalog: Catalog, path: str) -> None:
    first = catalog.add_fingerprint(b"\0\1", "model a")
    second = catalog.add_fingerprint(b"\0\2", "model b")
    assert catalog.add_fingerprint(b"\0\1", "other words") == first != second
    rows = [segment(first), segment(second, seed=1)]
    ids = [catalog.add_segment(row) for row in rows]
    child = segment(first, seed=2, parent_id=ids[0])
    ids.append(catalog.add_segment(child))
    catalog.set_name(name_row("chat", first, ids[2]))
    catalog.set_name(name_row("chat", second, ids[1]))
    catalog.set_meta("note", "one")
    catalog.set_meta("note", "zwei ä")
    catalog.close()
    for read_only in (False, True):
        with Catalog.open(path, read_only=read_only) as again:
            assert again.store_uuid == STORE
            assert [(f.id, f.digest, f.description) for f in again.fingerprints()] == [
                (first, b"\0\1", "model a"),
                (second, b"\0\2", "model b"),
            ]
            stored = [replace(row, id=i) for row, i in zip([*rows, child], ids, strict=True)]
            assert again.segments() == stored
            assert again.segments(first) == [stored[0], stored[2]]
            assert again.segments(99) == []
            assert again.names() == [
                name_row("chat", first, ids[2]),
                name_row("chat", second, ids[1]),
            ]
            assert again.names(second) == [name_row("chat", second, ids[1])]
            assert again.get_meta("note") == "zwei ä"
            assert again.get_meta("nothing") is None


def test_names_replace_and_vanish(catalog: Catalog) -> None:
    fingerprint = catalog.add_fingerprint(b"f", "f")
    ids = [catalog.add_segment(segment(fingerprint, seed=i)) for i in range(2)]
    catalog.set_name(name_row("n", fingerprint, ids[0]))
    catalog.set_name(name_row("n", fingerprint, ids[1]))
    assert [row.segment_id for row in catalog.names()] == [ids[1]]
    catalog.delete_name(fingerprint, "n")
    assert catalog.names() == []
    with pytest.raises(KvtierError, match="no name 'n'"):
        catalog.delete_name(fingerprint, "n")


def test_used_segments_are_kept(catalog: Catalog) -> None:
    fingerprint = catalog.add_fingerprint(b"f", "f")
    parent = catalog.add_segment(segment(fingerprint))
    child = catalog.add_segment(segment(fingerprint, seed=1, parent_id=parent))
    catalog.set_name(name_row("kept", fingerprint, child))
    for refused in ([parent], [child], [child, parent]):
        with pytest.raises(KvtierError, match="parent of a segment, or has a name"):
            catalog.delete_segments(refused)
        assert len(catalog.segments()) == 2
    catalog.delete_name(fingerprint, "kept")
    with pytest.raises(KvtierError, match="no segment 99"):
        catalog.delete_segments([child, 99])
    assert len(catalog.segments()) == 2, "all or nothing"
    catalog.delete_segments([parent, child])
    assert catalog.segments() == []
    assert catalog.add_segment(segment(fingerprint)) > child, "an id was used again"
    with pytest.raises(KvtierError, match=f"no segment {child}"):
        catalog.delete_segments([child])


def test_condemned_extents_are_kept_until_absolved(catalog: Catalog, path: str) -> None:
    extents = [Extent(8192, 4096), Extent(1 << 40, 8192)]
    with catalog.transaction():
        catalog.condemn(extents[1:])
        catalog.condemn(extents[:1])
    catalog.close()
    with Catalog.open(path) as again:
        assert again.condemned() == extents
        again.absolve(extents[:1])
        assert again.condemned() == extents[1:]
        with pytest.raises(KvtierError, match="UNIQUE"):
            again.condemn(extents)
        assert again.condemned() == extents[1:], "all or nothing"


def test_times_of_use(catalog: Catalog) -> None:
    fingerprint = catalog.add_fingerprint(b"f", "f")
    ids = [catalog.add_segment(segment(fingerprint, seed=i)) for i in range(3)]
    catalog.set_used({ids[0]: 5.0, ids[2]: 7.5, 99: 1.0})
    assert [row.used for row in catalog.segments()] == [5.0, 1.75, 7.5]


def test_rows_that_refer_to_nothing(catalog: Catalog) -> None:
    with pytest.raises(KvtierError, match="FOREIGN KEY"):
        catalog.add_segment(segment(77))
    fingerprint = catalog.add_fingerprint(b"f", "f")
    with pytest.raises(KvtierError, match="FOREIGN KEY"):
        catalog.add_segment(segment(fingerprint, parent_id=77))
    with pytest.raises(KvtierError, match="FOREIGN KEY"):
        catalog.set_name(name_row("n", fingerprint, 77))
    with pytest.raises(KvtierError, match="no segment 77"):
        catalog.set_quarantined(77, True)


def test_quarantine(catalog: Catalog) -> None:
    one = catalog.add_segment(segment(catalog.add_fingerprint(b"f", "f")))
    for flag in (True, False):
        catalog.set_quarantined(one, flag)
        (row,) = catalog.segments()
        assert row.quarantined is flag


def test_transaction_is_one_commit(catalog: Catalog, path: str) -> None:
    with Catalog.open(path, read_only=True) as reader:
        with catalog.transaction():
            fingerprint = catalog.add_fingerprint(b"f", "f")
            catalog.add_segment(segment(fingerprint))
            assert reader.segments() == [], "seen before the commit"
        assert len(reader.segments()) == 1


def test_transaction_rolls_back(catalog: Catalog) -> None:
    fingerprint = catalog.add_fingerprint(b"f", "f")

    def interrupted() -> None:
        with catalog.transaction():
            catalog.add_segment(segment(fingerprint))
            raise ZeroDivisionError

    def refused() -> None:
        with catalog.transaction():
            catalog.add_segment(segment(fingerprint))
            catalog.add_segment(segment(fingerprint + 1))

    def nested() -> None:
        with catalog.transaction():
            catalog.add_segment(segment(fingerprint))
            with catalog.transaction():
                pass

    for work, error in (
        (interrupted, ZeroDivisionError),
        (refused, KvtierError),
        (nested, AssertionError),
    ):
        with pytest.raises(error):
            work()
        assert catalog.segments() == []
    with catalog.transaction():
        catalog.add_segment(segment(fingerprint))
    assert len(catalog.segments()) == 1


def test_transactions_of_threads_take_turns(catalog: Catalog) -> None:
    fingerprint = catalog.add_fingerprint(b"f", "f")
    wrong: list[int] = []

    def work() -> None:
        for _ in range(5):
            with catalog.transaction():
                before = len(catalog.segments())
                catalog.add_segment(segment(fingerprint))
                catalog.add_segment(segment(fingerprint))
                if len(catalog.segments()) != before + 2:
                    wrong.append(before)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(catalog.segments()) == 40


def test_read_only_beside_a_writer(catalog: Catalog, path: str) -> None:
    with Catalog.open(path, read_only=True) as reader:
        with reader.transaction():
            assert reader.fingerprints() == []
            catalog.add_fingerprint(b"f", "f")
            assert reader.fingerprints() == [], "one view for the whole block"
        assert len(reader.fingerprints()) == 1
        with pytest.raises(DeviceError, match="readonly"):
            reader.set_meta("a", "b")


def test_two_writers(catalog: Catalog, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "BUSY_TIMEOUT_MS", 50)
    with Catalog.open(path) as other, catalog.transaction():
        catalog.set_meta("a", "b")
        with pytest.raises(LockedError, match="50 ms"):
            other.set_meta("a", "c")


def test_durability_settings(catalog: Catalog, path: str) -> None:
    connection = catalog._connection
    assert connection is not None
    settings = {
        name: connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("journal_mode", "synchronous", "user_version", "foreign_keys")
    }
    assert settings == {
        "journal_mode": "wal",
        "synchronous": 2,
        "user_version": CATALOG_VERSION,
        "foreign_keys": 1,
    }
    catalog.set_meta("a", "b")
    for suffix in ("", "-wal", "-shm"):
        assert stat.S_IMODE(os.stat(path + suffix).st_mode) == 0o600


def test_committed_rows_survive_kill(catalog: Catalog, path: str) -> None:
    catalog.close()
    code = (
        "import os, signal, sys\n"
        "from kvtier.io.catalog import Catalog\n"
        "catalog = Catalog.open(sys.argv[1])\n"
        "catalog.set_meta('committed', 'yes')\n"
        "with catalog.transaction():\n"
        "    catalog.set_meta('uncommitted', 'yes')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, check=False)
    assert result.returncode == -signal.SIGKILL
    with Catalog.open(path, read_only=True) as reader:
        assert reader.get_meta("committed") == "yes"
    with Catalog.open(path) as again:
        assert again.get_meta("committed") == "yes"
        assert again.get_meta("uncommitted") is None


def test_create_where_something_is(catalog: Catalog, path: str) -> None:
    with pytest.raises(DeviceError, match="cannot create"):
        Catalog.create(path, STORE)
    assert catalog.store_uuid == STORE


def test_a_failed_create_leaves_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkdir(os.path.dirname(path))
    monkeypatch.setattr(catalog_module, "SCHEMA", "CREATE NONSENSE;")
    with pytest.raises(FormatError, match="syntax error"):
        Catalog.create(path, STORE)
    assert os.listdir(os.path.dirname(path)) == []


@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_no_catalog(tmp_path: Path, read_only: bool) -> None:
    with pytest.raises(DeviceError, match="no catalog"):
        Catalog.open(tmp_path / "missing", read_only=read_only)
    with pytest.raises(DeviceError, match="no catalog"):
        Catalog.open(tmp_path, read_only=read_only)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"not SQLite at all" * 1000)
    with pytest.raises(FormatError, match="garbage"):
        Catalog.open(garbage, read_only=read_only)
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(FormatError, match="empty"):
        Catalog.open(empty, read_only=read_only)
    foreign = tmp_path / "foreign"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    before = foreign.read_bytes()
    with pytest.raises(FormatError, match="not a kvtier catalog"):
        Catalog.open(foreign, read_only=read_only)
    assert foreign.read_bytes() == before
    assert empty.stat().st_size == 0


def test_newer_version(catalog: Catalog, path: str) -> None:
    catalog.close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {CATALOG_VERSION + 1}")
    connection.close()
    with pytest.raises(VersionMismatch) as caught:
        Catalog.open(path)
    assert (caught.value.found, caught.value.readable) == (CATALOG_VERSION + 1, CATALOG_VERSION)


def test_damaged_pages(catalog: Catalog, path: str) -> None:
    fingerprint = catalog.add_fingerprint(b"f", "f")
    for seed in range(40):
        catalog.add_segment(segment(fingerprint, seed=seed))
    catalog.close()
    data = bytearray(Path(path).read_bytes())
    data[8192:] = b"\xa5" * (len(data) - 8192)
    Path(path).write_bytes(data)
    with pytest.raises(FormatError, match="damaged"), Catalog.open(path) as again:
        again.segments()


def test_use_after_close_and_in_a_child(catalog: Catalog) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            catalog.segments()
        except ClosedError:
            catalog.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    catalog.set_meta("the parent", "goes on")
    catalog.close()
    catalog.close()
    with pytest.raises(ClosedError):
        catalog.segments()
    with pytest.raises(ClosedError), catalog.transaction():
        pass


def test_the_uuid_cannot_be_overwritten(catalog: Catalog) -> None:
    with pytest.raises(AssertionError):
        catalog.set_meta("store_uuid", "other")


def test_extents_are_packed() -> None:
    extents = [Extent(4096, 8192), Extent(1 << 40, 4096)]
    data = pack_extents(extents)
    assert data.hex() == "0010000000000000002000000000000000000000000100000010000000000000"
    assert unpack_extents(data) == extents
    assert unpack_extents(b"") == []
    with pytest.raises(FormatError, match="15"):
        unpack_extents(bytes(15))
    with pytest.raises(FormatError, match="impossible"):
        unpack_extents(b"\1" * 16)
