"""Records: small blocks on the region that repeat what no extent header says, for `rebuild`.

A lost catalog takes names and the descriptions of fingerprints with it unless the region has them
too. A record is read by `rebuild` and `verify` alone; in daily use the catalog answers.

Layout, little-endian, a multiple of 4096 bytes (docs/format.md has a sentence per field):

    0   magic          8   b"KVTIERRC"
    8   version        u32
    12  record_bytes   u32 all of it, on the grid
    16  store_uuid     16
    32  fingerprint    32
    64  device_offset  u64 where it was written
    72  kind           u32 1 a name, 2 a fingerprint
    76  body_bytes     u32
    80  checksum       u64 XXH3-64, seed 0, of record_bytes bytes with this field as zeros
    88  body           JSON, then zeros
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import numpy as np
import xxhash

from kvtier.errors import BadMagic, ChecksumMismatch, ConfigError, FormatError, VersionMismatch
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.io.buffers import aligned_bytes
from kvtier.io.catalog import NameRow
from kvtier.io.device import Buffers, ByteArray, Int64Array
from kvtier.io.extent import Extent

MAGIC = b"KVTIERRC"
RECORD_VERSION = 1
NAME: Final = 1
FINGERPRINT: Final = 2
RECORD_BYTES_MAX = 1 << 20
NAME_CHARACTERS_MAX = 256

FIELDS = struct.Struct("<8sII16s32sQIIQ")
FIELD_NAMES = (
    "magic", "version", "record_bytes", "store_uuid", "fingerprint", "device_offset", "kind",
    "body_bytes", "checksum",
)  # fmt: skip
_CHECKSUM_AT = FIELDS.size - 8
assert FIELDS.size == 88


def is_name(name: object) -> TypeGuard[str]:
    """Whether a Sequence can be saved under this name: text of 1 to NAME_CHARACTERS_MAX characters,
    all printable."""
    return isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable()


def require_name(name: object) -> None:
    """Raise ConfigError unless a Sequence can be saved under this name."""
    if not is_name(name):
        got = name[:300] if isinstance(name, str) else type(name)
        raise ConfigError(
            f"a name has 1 to {NAME_CHARACTERS_MAX} printable characters: got {got!r}"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """store_uuid: 16 bytes. fingerprint: 32 bytes. body: plain JSON values."""

    store_uuid: bytes
    fingerprint: bytes
    kind: int
    body: dict[str, Any]

    def pack(self) -> ByteArray:
        """The bytes that stand on the region, except for place and checksum (`seal`)."""
        body = _encoded(self.body)
        size = bytes_of(self.body)
        block = np.zeros(size, np.uint8)
        head = FIELDS.pack(
            MAGIC, RECORD_VERSION, size, self.store_uuid, self.fingerprint, 0, self.kind,
            len(body), 0,
        )  # fmt: skip
        block[: len(head)] = np.frombuffer(head, np.uint8)
        block[len(head) : len(head) + len(body)] = np.frombuffer(body, np.uint8)
        return block


def name_body(row: NameRow, generation: int, end_digest: bytes) -> dict[str, Any]:
    """Of the record of a name. generation, end_digest: of the Segment that it ends in."""
    return {
        "name": row.name,
        "generation": generation,
        "end_digest": end_digest.hex(),
        "limit": row.limit,
        "token_count": row.token_count,
        "created": row.created,
    }


def put(record: Record, extent: Extent, write: Callable[[Int64Array, Buffers], None]) -> None:
    """Write a record into its Extent. write: `Device.write`, or what stands for it."""
    packed = record.pack()
    assert packed.size == extent.length
    block = aligned_bytes(packed.size)
    block[:] = packed
    seal(block, extent.offset)
    write(np.array([extent.offset], np.int64), Buffers.whole(block))


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def bytes_of(body: dict[str, Any]) -> int:
    """Bytes of a record with this body, on the grid. Raises ConfigError where it is too long."""
    size = align_up(FIELDS.size + len(_encoded(body)), GRID_BYTES)
    if size > RECORD_BYTES_MAX:
        raise ConfigError(
            f"a name or fingerprint takes at most {RECORD_BYTES_MAX} bytes on the region: this "
            f"one needs {size} bytes"
        )
    return size


def seal(block: ByteArray, device_offset: int) -> None:
    """Write place and checksum into the bytes of a record, in memory."""
    struct.pack_into("<Q", block.data, 64, device_offset)
    struct.pack_into("<Q", block.data, _CHECKSUM_AT, 0)
    struct.pack_into("<Q", block.data, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(block.data))


def record_bytes(head: ByteArray) -> int:
    """Length that the first bytes of a record claim. Raises FormatError unless it may be one."""
    if head.size < FIELDS.size or head[:8].tobytes() != MAGIC:
        raise BadMagic("no record")
    version, size = struct.unpack_from("<II", head.data, 8)
    if version != RECORD_VERSION:
        raise VersionMismatch("a record", version, RECORD_VERSION)
    if not 0 < size <= RECORD_BYTES_MAX or size % GRID_BYTES:
        raise FormatError(f"a record claims {size} bytes")
    return int(size)


def parse(block: ByteArray, device_offset: int) -> Record:
    """Check and read a record that was read from `device_offset`. Raises FormatError."""
    size = record_bytes(block)
    if block.size < size:
        raise FormatError(f"a record of {size} bytes is cut off after {block.size}")
    _, _, _, store, fingerprint, place, kind, body_bytes, checksum = FIELDS.unpack_from(block.data)
    whole = block[:size].copy()
    struct.pack_into("<Q", whole.data, _CHECKSUM_AT, 0)
    if xxhash.xxh3_64_intdigest(whole.data) != checksum:
        raise ChecksumMismatch("the record is damaged")
    if place != device_offset:
        raise ChecksumMismatch(f"the record was written for byte {place}")
    if body_bytes > size - FIELDS.size or kind not in (NAME, FINGERPRINT):
        raise FormatError("the record contradicts itself")
    try:
        body = json.loads(whole[FIELDS.size : FIELDS.size + body_bytes].tobytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the body of the record is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise FormatError("the body of the record is no JSON object")
    return Record(store, fingerprint, kind, body)
