"""The catalog's tables of slabs and Blobs.

The calls take part in the transaction of the catalog that is open, else each is one of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier.io.catalog import Catalog
from kvtier.io.catalog_schema import BlobRow, SlabRow

_SLAB_COLUMNS = "fingerprint_id, extent, generation, created, used, quarantined, header_stale"
_BLOB_COLUMNS = "fingerprint_id, key, slab_id, entry, offset, length, checksum, created"


@dataclass(frozen=True, slots=True)
class BlobTotal:
    """How many Blobs a fingerprint has, and the bytes of them."""

    blobs: int
    nbytes: int


class BlobTables:
    """Works on the connection of an open Catalog, which it does not own."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def add_slab(self, row: SlabRow, blobs: Sequence[BlobRow]) -> int:
        """Store a slab with its Blobs; returns its id, which no other slab ever had.

        A Blob takes the place of one with the same key.
        """
        with self._catalog._use() as connection, self._catalog._all_or_nothing():
            cursor = connection.execute(
                f"INSERT INTO slab ({_SLAB_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    row.fingerprint_id, row.extent, row.generation, row.created, row.used,
                    row.quarantined, row.header_stale,
                ),
            )  # fmt: skip
            slab_id = int(cursor.lastrowid or 0)
            connection.executemany(
                f"INSERT OR REPLACE INTO blob ({_BLOB_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        each.fingerprint_id, each.key, slab_id, each.entry, each.offset,
                        each.length, each.checksum, each.created,
                    )
                    for each in blobs
                ],
            )  # fmt: skip
            return slab_id

    def slabs(self) -> list[SlabRow]:
        """All slabs, ordered by id."""
        return self._slabs(None)

    def slab(self, slab_id: int) -> SlabRow | None:
        """One slab, if there is such."""
        return next(iter(self._slabs(slab_id)), None)

    def _slabs(self, slab_id: int | None) -> list[SlabRow]:
        rows = self._catalog._rows(
            f"SELECT id, {_SLAB_COLUMNS} FROM slab WHERE ?1 IS NULL OR id = ?1 ORDER BY id",
            (slab_id,),
        )
        return [
            # SQLite has no booleans: 0 and 1 come back.
            replace(SlabRow(*row), quarantined=bool(row[6]), header_stale=bool(row[7]))
            for row in rows
        ]

    def blobs_of(self, slab_id: int) -> list[BlobRow]:
        """The Blobs of one slab, ordered by entry."""
        rows = self._catalog._rows(
            f"SELECT {_BLOB_COLUMNS} FROM blob WHERE slab_id = ? ORDER BY entry", (slab_id,)
        )
        return [BlobRow(*row) for row in rows]

    def live_entries(self, slab_id: int) -> list[int]:
        """Entries of a slab's directory that are Blobs."""
        rows = self._catalog._rows("SELECT entry FROM blob WHERE slab_id = ?", (slab_id,))
        return [int(entry) for (entry,) in rows if isinstance(entry, int)]

    def total(self) -> BlobTotal:
        """Of all fingerprints, what a damaged row holds left out."""
        ((count, nbytes),) = self._catalog._rows(
            "SELECT count(*), ifnull(sum(length), 0) FROM blob WHERE typeof(length) = 'integer'"
        )
        return BlobTotal(int(count), int(nbytes))

    def without_slab(self) -> int:
        """How many Blobs name a slab that does not exist: none, unless the catalog is damaged."""
        ((count,),) = self._catalog._rows(
            "SELECT count(*) FROM blob WHERE slab_id NOT IN (SELECT id FROM slab)"
        )
        return int(count)

    def delete_blobs(self, keys: Sequence[tuple[int, bytes]]) -> None:
        """Forget Blobs by fingerprint id and key. Unknown ones are no error."""
        with self._catalog._use() as connection, self._catalog._all_or_nothing():
            connection.executemany("DELETE FROM blob WHERE fingerprint_id = ? AND key = ?", keys)

    def delete_slabs(self, slab_ids: Sequence[int]) -> None:
        """Forget slabs with all their Blobs."""
        ids = [(each,) for each in slab_ids]
        with self._catalog._use() as connection, self._catalog._all_or_nothing():
            connection.executemany("DELETE FROM blob WHERE slab_id = ?", ids)
            connection.executemany("DELETE FROM slab WHERE id = ?", ids)

    def set_slabs_used(self, times: Mapping[int, float]) -> None:
        """Note when slabs were last used: unix seconds by id. Unknown ids are no error."""
        self._update("used", times)

    def set_slabs_quarantined(self, slab_ids: Sequence[int]) -> None:
        """Mark slabs as damaged."""
        self._update("quarantined", dict.fromkeys(slab_ids, 1))

    def set_headers_stale(self, slab_ids: Sequence[int], stale: bool) -> None:
        """Note whether the headers of slabs still show Blobs that were removed."""
        self._update("header_stale", dict.fromkeys(slab_ids, int(stale)))

    def _update(self, column: str, values: Mapping[int, float]) -> None:
        with self._catalog._use() as connection, self._catalog._all_or_nothing():
            connection.executemany(
                f"UPDATE slab SET {column} = ? WHERE id = ?",
                [(value, slab_id) for slab_id, value in values.items()],
            )
