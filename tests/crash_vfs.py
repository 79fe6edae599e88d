"""SQLite below the catalog, with every write, truncation, sync and deletion noted in a CrashLog.

apsw brings a SQLite of its own and lets Python stand between it and the files. `RecordedConnection`
has the methods of a `sqlite3.Connection` that `io/catalog.py` uses, and takes the place of what its
`_connect` returns. The shared-memory file is rebuilt after a crash and therefore not noted.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import apsw

from kvtier.io import catalog
from tests.crash_log import CrashLog, Event

SYNCHRONOUS = "pragma synchronous"
"""The name under which the mutation "synchronous is not FULL" goes as a removed sync."""
CHECKPOINT_PAGES = 24
"""So few that a short run checkpoints in the middle of its commits."""
_DELETED_OR_SYNCED = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_WAL
_names = (f"crash{number}" for number in itertools.count())


class _File(apsw.VFSFile):
    def __init__(
        self, log: CrashLog, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        relative = log.relative(path)
        is_new = relative is not None and not os.path.lexists(str(path))
        super().__init__("", name, flags)
        self._log = log
        self._relative = relative
        # SQLite makes the name of a new journal durable at the first sync of its contents.
        self._syncs_directory = is_new and bool(flags[0] & _DELETED_OR_SYNCED)
        self._role = "database"
        if flags[0] & _DELETED_OR_SYNCED:
            self._role = "log" if flags[0] & apsw.SQLITE_OPEN_WAL else "journal"
        if is_new and relative is not None:
            log.note(Event("create", relative))

    def xWrite(self, data: Any, offset: int) -> None:
        super().xWrite(data, offset)
        if self._relative is not None:
            self._log.note(Event("write", self._relative, offset, data=bytes(data)))

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        if self._relative is not None:
            self._log.note(Event("resize", self._relative, length=newsize))

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        if self._relative is None:
            return
        happened = self._log.sync(Event("sync", self._relative), f"SQLite's sync of {self._role}")
        if happened and self._syncs_directory:
            self._log.note(_own_entry(self._relative))
            self._syncs_directory = False


def _own_entry(relative: str) -> Event:
    """A sync of the directory that counts for SQLite's own file alone: whether there is one depends
    on how SQLite was built, so nothing else may rest on it."""
    return Event("sync directory", os.path.dirname(relative), target=relative)


class _Vfs(apsw.VFS):
    def __init__(self, name: str, log: CrashLog) -> None:
        super().__init__(name, "")
        self.name = name
        self._log = log

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> _File:
        return _File(self._log, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        relative = self._log.relative(filename)
        if relative is not None:
            self._log.note(Event("delete", relative))
            if syncdir:
                self._log.note(_own_entry(relative))


class _Cursor:
    """What `sqlite3.Cursor` offers after one statement."""

    def __init__(self, connection: apsw.Connection, cursor: apsw.Cursor) -> None:
        self._cursor = cursor
        self._rows = cursor.fetchall()
        self.lastrowid = connection.last_insert_rowid()
        self.rowcount = connection.changes()

    def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())


class RecordedConnection:
    """A database whose files are recorded, with the methods that the catalog calls."""

    def __init__(self, path: str, read_only: bool, log: CrashLog) -> None:
        flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE
        self._vfs = _Vfs(next(_names), log)
        self._log = log
        self._connection = apsw.Connection(path, flags=flags, vfs=self._vfs.name)
        self.execute("PRAGMA synchronous = FULL")
        self.execute("PRAGMA foreign_keys = ON")
        self.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")

    def execute(self, sql: str, values: Sequence[object] = ()) -> _Cursor:
        if sql == "PRAGMA synchronous = FULL":
            self._log.sites[SYNCHRONOUS] += 1
            if self._log.removed == SYNCHRONOUS:
                sql = "PRAGMA synchronous = NORMAL"
        cursor = self._connection.execute(sql, tuple(values))
        return _Cursor(self._connection, cursor)

    def executemany(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        for values in rows:
            self.execute(sql, values)

    def executescript(self, sql: str) -> None:
        self._connection.execute(sql).fetchall()

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def close(self) -> None:
        self._connection.close()


@contextmanager
def recorded_catalogs(log: CrashLog) -> Iterator[None]:
    """Within the block, catalogs are opened on the recorded SQLite."""

    def connect(path: str | Path, read_only: bool) -> RecordedConnection:
        return RecordedConnection(os.fspath(path), read_only, log)

    with mock.patch.object(catalog, "_connect", connect):
        yield
