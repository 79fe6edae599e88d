"""Tables of the catalog, and the rows that they hold.

The catalog stores what it is handed and interprets none of it: tokens, digests and extents are
bytes to it.
"""

import struct
from dataclasses import dataclass

from kvtier.errors import FormatError
from kvtier.io.extent import Extent

CATALOG_VERSION = 2

SCHEMA = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE fingerprint (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE,
    description TEXT NOT NULL,
    record BLOB NOT NULL,
    created REAL NOT NULL
);
CREATE TABLE segment (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    fingerprint_id INTEGER NOT NULL REFERENCES fingerprint (id),
    provenance TEXT NOT NULL,
    start_digest BLOB NOT NULL,
    end_digest BLOB NOT NULL,
    start_position INTEGER NOT NULL,
    token_count INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    parent_id INTEGER REFERENCES segment (id),
    parent_limit INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    extents BLOB NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    quarantined INTEGER NOT NULL
);
CREATE INDEX segment_fingerprint ON segment (fingerprint_id);
CREATE INDEX segment_parent ON segment (parent_id);
CREATE TABLE name (
    fingerprint_id INTEGER NOT NULL REFERENCES fingerprint (id),
    name TEXT NOT NULL,
    segment_id INTEGER NOT NULL REFERENCES segment (id),
    token_limit INTEGER NOT NULL,
    token_count INTEGER NOT NULL,
    record BLOB NOT NULL,
    held_until REAL NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (fingerprint_id, name)
) WITHOUT ROWID;
CREATE INDEX name_segment ON name (segment_id);
CREATE TABLE condemned (
    offset INTEGER PRIMARY KEY,
    length INTEGER NOT NULL
);
CREATE TABLE slab (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    fingerprint_id INTEGER NOT NULL REFERENCES fingerprint (id),
    extent BLOB NOT NULL,
    generation INTEGER NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    quarantined INTEGER NOT NULL,
    header_stale INTEGER NOT NULL
);
CREATE TABLE blob (
    fingerprint_id INTEGER NOT NULL REFERENCES fingerprint (id),
    key BLOB NOT NULL,
    slab_id INTEGER NOT NULL REFERENCES slab (id),
    entry INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    length INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (fingerprint_id, key)
) WITHOUT ROWID;
CREATE INDEX blob_slab ON blob (slab_id, entry);
"""

_EXTENT = struct.Struct("<qq")
EXTENT_BYTES = 16
"""Bytes of one Extent in a row."""
assert _EXTENT.size == EXTENT_BYTES


@dataclass(frozen=True, slots=True)
class FingerprintRow:
    """record: the extent that repeats it on the region (pack_extents). created: unix seconds."""

    id: int
    digest: bytes
    description: str
    record: bytes
    created: float


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One sealed segment. extents: see pack_extents, one per layer. created, used: unix seconds.

    `id` is given by the catalog and ignored when a row is added.
    """

    id: int
    fingerprint_id: int
    provenance: str
    start_digest: bytes
    end_digest: bytes
    start_position: int
    token_count: int
    tokens: bytes
    parent_id: int | None
    parent_limit: int
    generation: int
    extents: bytes
    created: float
    used: float
    quarantined: bool


@dataclass(frozen=True, slots=True)
class NameRow:
    """A name that a user gave to the sequence that ends in a segment.

    record: the extent that repeats it on the region (pack_extents). held_until, created: unix
    seconds; held_until 0: not held.
    """

    name: str
    fingerprint_id: int
    segment_id: int
    limit: int
    token_count: int
    record: bytes
    held_until: float
    created: float


@dataclass(frozen=True, slots=True)
class SlabRow:
    """An extent of packed Blobs. extent: see pack_extents. created, used: unix seconds.

    `id` is given by the catalog and ignored when a row is added. header_stale: its header on the
    region still shows Blobs as live that were removed.
    """

    id: int
    fingerprint_id: int
    extent: bytes
    generation: int
    created: float
    used: float
    quarantined: bool
    header_stale: bool


@dataclass(frozen=True, slots=True)
class BlobRow:
    """A Blob. entry: its place in the slab's directory. offset: bytes from the slab's start.

    checksum: as SQLite keeps it, a signed number of 64 bits. created: unix seconds. `slab_id` is
    ignored where a Blob is added together with its slab.
    """

    fingerprint_id: int
    key: bytes
    slab_id: int
    entry: int
    offset: int
    length: int
    checksum: int
    created: float


def pack_extents(extents: list[Extent]) -> bytes:
    """Little-endian (offset i64, length i64) per layer."""
    return b"".join(_EXTENT.pack(extent.offset, extent.length) for extent in extents)


def unpack_extents(data: bytes) -> list[Extent]:
    """The opposite of pack_extents. Raises FormatError if the bytes are no such array."""
    if len(data) % _EXTENT.size:
        raise FormatError(f"extents need multiples of {_EXTENT.size} bytes: found {len(data)}")
    try:
        return [Extent(offset, length) for offset, length in _EXTENT.iter_unpack(data)]
    except AssertionError as error:
        raise FormatError(f"the catalog names an impossible extent: {error}") from error
