"""The catalog: a SQLite database that says which segments exist and where their extents lie.

Invariants:
- What a call outside a transaction wrote is durable when it returns; inside one, when the
  outermost `with` block has ended without an exception. On an exception nothing of it remains.
- One connection, used by one thread at a time (`_lock`), in the process that opened it.
- The database's user_version is CATALOG_VERSION; a file of another version is not written to.
- A segment that is a parent or has a name cannot be deleted.
"""

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from kvtier.errors import (
    ClosedError,
    DeviceError,
    FormatError,
    KvtierError,
    LockedError,
    VersionMismatch,
)
from kvtier.io.catalog_schema import (
    CATALOG_VERSION,
    SCHEMA,
    FingerprintRow,
    NameRow,
    SegmentRow,
    pack_extents,
    unpack_extents,
)
from kvtier.io.durability import sync_directory
from kvtier.io.extent import Extent

__all__ = [
    "CATALOG_VERSION",
    "Catalog",
    "FingerprintRow",
    "NameRow",
    "SegmentRow",
    "pack_extents",
    "unpack_extents",
]

BUSY_TIMEOUT_MS = 5000
_APPLICATION_ID = 0x4B565443  # "KVTC": tells our database from any other SQLite file.
_UUID_KEY = "store_uuid"

_SEGMENT_COLUMNS = (
    "id, fingerprint_id, provenance, start_digest, end_digest, start_position, token_count, "
    "tokens, parent_id, parent_limit, generation, extents, created, used, quarantined"
)
_NAME_COLUMNS = (
    "name, fingerprint_id, segment_id, token_limit, token_count, record, held_until, created"
)


class Catalog:
    """Open by `Catalog.create` or `Catalog.open`. Safe to use from many threads."""

    def __init__(
        self, path: str, connection: sqlite3.Connection, store_uuid: str, read_only: bool
    ) -> None:
        self.path = path
        self.store_uuid = store_uuid
        self.read_only = read_only
        self._connection: sqlite3.Connection | None = connection
        self._lock = threading.RLock()
        self._in_transaction = False
        self._pid = os.getpid()

    @classmethod
    def create(cls, path: str | Path, store_uuid: str) -> Self:
        """Make a new catalog, mode 0600. Raises DeviceError if the file exists."""
        name = os.fspath(path)
        if os.path.lexists(name):
            raise DeviceError(f"cannot create the catalog {name}: it exists", errno.EEXIST)
        new = f"{name}.new"
        try:
            os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
        except OSError as error:
            raise DeviceError(
                f"cannot create the catalog {name}: {error.strerror}", error.errno or 0
            ) from error
        try:
            # Closing moves everything out of the write-ahead log. The name comes last, so that a
            # crash leaves no catalog or a whole one.
            with _translated(name), closing(_connect(new, read_only=False)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(
                    f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {CATALOG_VERSION}; "
                    f"PRAGMA application_id = {_APPLICATION_ID};"
                )
                connection.execute("INSERT INTO meta VALUES (?, ?)", (_UUID_KEY, store_uuid))
                connection.execute("COMMIT")
            os.rename(new, name)
            sync_directory(os.path.dirname(name))
        except BaseException:
            for suffix in ("", "-wal", "-shm"):
                Path(new + suffix).unlink(missing_ok=True)
            raise
        return cls.open(name)

    @classmethod
    def open(cls, path: str | Path, *, read_only: bool = False) -> Self:
        """Open an existing catalog. With read_only it works beside an active writer.

        Raises DeviceError if there is none, FormatError if it is not a catalog, VersionMismatch.
        """
        name = os.fspath(path)
        if not os.path.isfile(name):
            raise DeviceError(f"there is no catalog at {name}", errno.ENOENT)
        with _translated(name):
            connection = _connect(name, read_only)
            try:
                store_uuid = _identify(connection, name)
            except BaseException:
                connection.close()
                raise
        return cls(name, connection, store_uuid, read_only)

    def close(self) -> None:
        """Release the database. Calling it twice is allowed."""
        if os.getpid() != self._pid:
            # SQLite forbids even closing a connection in a forked child: it would drop the
            # parent's file locks. The child's copy is left to the end of the process.
            return
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One durable commit at the end of the block, a rollback on an exception.

        Holds the catalog's lock for the block; blocks do not nest. On a read-only catalog it gives
        a consistent view over several calls.
        """
        with self._use() as connection:
            if self._in_transaction:
                raise AssertionError("transactions of the catalog do not nest")
            connection.execute("BEGIN" if self.read_only else "BEGIN IMMEDIATE")
            self._in_transaction = True
            try:
                yield
                connection.execute("COMMIT")
            finally:
                self._in_transaction = False
                # After an exception, or a COMMIT that failed, nothing of the block may remain.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def get_meta(self, key: str) -> str | None:
        """The value under `key`, or None."""
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def set_meta(self, key: str, value: str) -> None:
        """Store a value under a key, replacing what was there. The store's uuid cannot change."""
        if key == _UUID_KEY:
            raise AssertionError(f"the meta key {_UUID_KEY!r} belongs to the catalog")
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def add_fingerprint(self, digest: bytes, description: str, record: bytes = b"") -> int:
        """Id of the fingerprint with this digest, added if it is new."""
        self._write(
            "INSERT INTO fingerprint (digest, description, record, created) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (digest) DO NOTHING",
            (digest, description, record, time.time()),
        )
        return int(self._rows("SELECT id FROM fingerprint WHERE digest = ?", (digest,))[0][0])

    def fingerprints(self) -> list[FingerprintRow]:
        """All fingerprints, in the order in which they were added."""
        rows = self._rows(
            "SELECT id, digest, description, record, created FROM fingerprint ORDER BY id"
        )
        return [FingerprintRow(*row) for row in rows]

    def add_segment(self, row: SegmentRow) -> int:
        """Store a segment and return its id, which no other segment ever had. row.id is ignored."""
        columns = _SEGMENT_COLUMNS.removeprefix("id, ")
        values = (
            row.fingerprint_id, row.provenance, row.start_digest, row.end_digest,
            row.start_position, row.token_count, row.tokens, row.parent_id, row.parent_limit,
            row.generation, row.extents, row.created, row.used, row.quarantined,
        )  # fmt: skip
        marks = ", ".join("?" * len(values))
        return self._write(f"INSERT INTO segment ({columns}) VALUES ({marks})", values)[0]

    def segments(self, fingerprint_id: int | None = None) -> list[SegmentRow]:
        """The segments of one fingerprint, or all, ordered by id."""
        rows = self._rows(
            f"SELECT {_SEGMENT_COLUMNS} FROM segment "
            "WHERE ?1 IS NULL OR fingerprint_id = ?1 ORDER BY id",
            (fingerprint_id,),
        )
        # SQLite has no booleans: 0 and 1 come back.
        return [replace(SegmentRow(*row), quarantined=bool(row[14])) for row in rows]

    def delete_segments(self, segment_ids: Sequence[int]) -> None:
        """Forget segments: all of them, or none on an error.

        Raises KvtierError if one is unknown, the parent of one that stays, or has a name.
        """
        with self._use() as connection, self._all_or_nothing():
            # Whatever their order is: damaged rows may even name each other as parents.
            connection.executemany(
                "UPDATE segment SET parent_id = NULL WHERE id = ?", [(i,) for i in segment_ids]
            )
            for segment_id in segment_ids:
                try:
                    found = connection.execute("DELETE FROM segment WHERE id = ?", (segment_id,))
                except sqlite3.IntegrityError as error:
                    raise KvtierError(
                        f"segment {segment_id} cannot be deleted: it is the parent of a segment, "
                        "or has a name. Delete these first"
                    ) from error
                if not found.rowcount:
                    raise KvtierError(f"there is no segment {segment_id} in {self.path}")

    def set_used(self, times: Mapping[int, float]) -> None:
        """Note when segments were last used: unix seconds by id. Unknown ids are no error."""
        with self._use() as connection, self._all_or_nothing():
            connection.executemany(
                "UPDATE segment SET used = ? WHERE id = ?",
                [(used, segment_id) for segment_id, used in times.items()],
            )

    def condemn(self, extents: Sequence[Extent]) -> None:
        """Note extents that nobody names any more and whose headers are still to be erased."""
        with self._use() as connection, self._all_or_nothing():
            connection.executemany(
                "INSERT INTO condemned (offset, length) VALUES (?, ?)",
                [(extent.offset, extent.length) for extent in extents],
            )

    def condemned(self) -> list[Extent]:
        """Extents that were condemned and not absolved since. Raises FormatError."""
        rows = self._rows("SELECT offset, length FROM condemned ORDER BY offset")
        try:
            return [Extent(int(offset), int(length)) for offset, length in rows]
        except (AssertionError, ValueError, TypeError) as error:
            raise FormatError(f"{self.path} condemns an impossible extent: {error}") from error

    def absolve(self, extents: Sequence[Extent]) -> None:
        """Forget condemned extents: their headers are erased."""
        with self._use() as connection, self._all_or_nothing():
            connection.executemany(
                "DELETE FROM condemned WHERE offset = ?", [(extent.offset,) for extent in extents]
            )

    def set_quarantined(self, segment_id: int, flag: bool) -> None:
        """Mark a segment as damaged or as sound. Raises KvtierError if it is unknown."""
        self._update_segment("quarantined = ?", (flag, segment_id))

    def replace_segment(self, segment_id: int, row: SegmentRow) -> None:
        """Give a segment the extents of another of the same tokens. Raises KvtierError."""
        columns = "generation = ?, extents = ?, created = ?, used = ?, quarantined = 0"
        values = (row.generation, row.extents, row.created, row.used, segment_id)
        self._update_segment(columns, values)

    def _update_segment(self, columns: str, values: tuple[object, ...]) -> None:
        """values: of the columns, then the id."""
        if not self._write(f"UPDATE segment SET {columns} WHERE id = ?", values)[1]:
            raise KvtierError(f"there is no segment {values[-1]} in {self.path}")

    def set_name(self, row: NameRow) -> None:
        """Store a name, replacing the same name of the same fingerprint."""
        self._write(
            f"INSERT OR REPLACE INTO name ({_NAME_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.name, row.fingerprint_id, row.segment_id, row.limit, row.token_count,
                row.record, row.held_until, row.created,
            ),
        )  # fmt: skip

    def names(self, fingerprint_id: int | None = None) -> list[NameRow]:
        """The names of one fingerprint, or all, ordered by fingerprint and name."""
        rows = self._rows(
            f"SELECT {_NAME_COLUMNS} FROM name "
            "WHERE ?1 IS NULL OR fingerprint_id = ?1 ORDER BY fingerprint_id, name",
            (fingerprint_id,),
        )
        return [NameRow(*row) for row in rows]

    def delete_name(self, fingerprint_id: int, name: str) -> None:
        """Forget a name. Raises KvtierError if it is unknown."""
        _, count = self._write(
            "DELETE FROM name WHERE fingerprint_id = ? AND name = ?", (fingerprint_id, name)
        )
        if not count:
            raise KvtierError(f"there is no name {name!r} of fingerprint {fingerprint_id}")

    @contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone. Raises ClosedError."""
        if os.getpid() != self._pid:
            raise ClosedError(f"the catalog {self.path} belongs to another process: open it anew")
        with self._lock, _translated(self.path):
            if self._connection is None:
                raise ClosedError(f"the catalog {self.path} is closed")
            yield self._connection

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """The caller's transaction, or one for the block."""
        if self._in_transaction:
            yield
        else:
            with self.transaction():
                yield

    def _rows(self, sql: str, values: tuple[object, ...] = ()) -> list[Any]:
        with self._use() as connection:
            return connection.execute(sql, values).fetchall()

    def _write(self, sql: str, values: tuple[object, ...]) -> tuple[int, int]:
        """Run one statement. Returns the id of the row that it added and the count of rows."""
        with self._use() as connection:
            cursor = connection.execute(sql, values)
            return int(cursor.lastrowid or 0), cursor.rowcount


def _connect(path: str, read_only: bool) -> sqlite3.Connection:
    uri = f"{Path(path).absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    if read_only and os.statvfs(path).f_flag & os.ST_RDONLY:
        # Nobody writes there, so the files that readers share with writers are not needed.
        uri += "&immutable=1"
    connection = sqlite3.connect(
        uri,
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_TIMEOUT_MS / 1000,
    )
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _identify(connection: sqlite3.Connection, path: str) -> str:
    """The store's uuid. Raises FormatError or VersionMismatch before anything is written."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != _APPLICATION_ID:
        raise FormatError(f"{path} is not a kvtier catalog")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != CATALOG_VERSION:
        raise VersionMismatch(f"the catalog {path}", version, CATALOG_VERSION)
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_UUID_KEY,)).fetchone()
    if row is None:
        raise FormatError(f"the catalog {path} names no store: it is damaged")
    return str(row[0])


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """SQLite's errors as kvtier's."""
    try:
        yield
    except UnicodeDecodeError as error:
        # sqlite3 cannot hand on a message of SQLite's that quotes damaged text.
        raise FormatError(f"{path} is not a kvtier catalog, or is damaged: {error}") from error
    except sqlite3.Error as error:
        # The low byte is the primary code; the upper ones only refine it.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_IOERR) & 0xFF
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR):
            raise FormatError(f"{path} is not a kvtier catalog, or is damaged: {error}") from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LockedError(
                f"the catalog {path} stayed locked for {BUSY_TIMEOUT_MS} ms: another process is "
                "writing to it",
                errno.EBUSY,
            ) from error
        if code == sqlite3.SQLITE_CONSTRAINT:
            raise KvtierError(f"the catalog {path} refuses the row: {error}") from error
        number = {
            sqlite3.SQLITE_FULL: errno.ENOSPC,
            sqlite3.SQLITE_READONLY: errno.EROFS,
            sqlite3.SQLITE_CANTOPEN: errno.EACCES,
        }.get(code, errno.EIO)
        raise DeviceError(f"the catalog {path}: {error}", number) from error
