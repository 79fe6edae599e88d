"""Tables of the catalog, and the rows that they hold.

The catalog stores what it is handed and interprets none of it: tokens, digests and extents are
bytes to it.
"""

import struct
from dataclasses import dataclass

from kvtier.errors import FormatError
from kvtier.io.extent import Extent

CATALOG_VERSION = 1

SCHEMA = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE fingerprint (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE,
    description TEXT NOT NULL,
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
    held INTEGER NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (fingerprint_id, name)
) WITHOUT ROWID;
CREATE INDEX name_segment ON name (segment_id);
"""

_EXTENT = struct.Struct("<qq")
assert _EXTENT.size == 16


@dataclass(frozen=True, slots=True)
class FingerprintRow:
    """created: unix seconds."""

    id: int
    digest: bytes
    description: str
    created: float


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One sealed segment. extents: see pack_extents, one per layer. created: unix seconds.

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
    quarantined: bool


@dataclass(frozen=True, slots=True)
class NameRow:
    """A name that a user gave to the sequence that ends in a segment. created: unix seconds."""

    name: str
    fingerprint_id: int
    segment_id: int
    limit: int
    token_count: int
    held: bool
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
