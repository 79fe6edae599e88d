"""The bytes of a slab: an Extent of many packed Blobs (`docs/format.md`).

Invariants:
- Two copies of the header lie in the first two blocks. They differ only in `sequence` and in which
  Blobs are live. A change overwrites the older one, so a torn write leaves the other.
- Directory and Blobs never change; the header covers the directory by its checksum.
- The checksum of a Blob also covers fingerprint and key, and has the slab's generation as its seed:
  bytes of another Blob, another slab or another model fail it.
- `parse_header` and `parse_directory` bound every size before it is used.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import BadMagic, ChecksumMismatch, FormatError, VersionMismatch
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.io.device import ByteArray
from kvtier.tiering.slab_limits import (
    BLOB_ALIGNMENT,
    COPIES,
    ENTRIES_MAX,
    HEADERS_BYTES,
    KEY_BYTES_MAX,
)

MAGIC = b"KVTIERSL"
SLAB_VERSION = 1
DIRECTORY_BYTES_MAX = ENTRIES_MAX * (32 + KEY_BYTES_MAX)

LIVE_BYTES = ENTRIES_MAX // 8
HEADER = struct.Struct(f"<8sII16s32sQQQQQQQ{LIVE_BYTES}s3456sQ")
HEADER_FIELDS = (
    "magic", "version", "entries", "store_uuid", "fingerprint", "generation", "device_offset",
    "extent_bytes", "created", "directory_bytes", "directory_checksum", "sequence", "live", "zero",
    "checksum",
)  # fmt: skip
assert HEADER.size == GRID_BYTES
_CHECKSUM_AT = GRID_BYTES - 8

DIRECTORY_ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u8"),
        ("checksum", "<u8"),
        ("key_offset", "<u4"),
        ("key_length", "<u4"),
    ]
)
assert DIRECTORY_ENTRY.itemsize == 32

_SIGN = 1 << 63

Live = npt.NDArray[np.bool_]
Directory = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class SlabIdentity:
    """Whose slab this is and where it must lie. created: unix microseconds."""

    store_uuid: bytes
    fingerprint: bytes
    generation: int
    device_offset: int
    extent_bytes: int
    created: int


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """One intact copy. live: bool [entries], whether each Blob is one still."""

    identity: SlabIdentity
    entries: int
    directory_bytes: int
    directory_checksum: int
    sequence: int
    live: Live

    @property
    def head_bytes(self) -> int:
        """Bytes before the first Blob, on the grid."""
        return head_bytes(self.directory_bytes)


@dataclass(frozen=True, slots=True)
class Slab:
    """A slab as `parse` found it. directory: DIRECTORY_ENTRY [entries]; keys in its order."""

    header: SlabHeader
    directory: Directory
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """Where things go in a slab. offsets: bytes from its start, of each Blob."""

    directory_bytes: int
    offsets: list[int]
    extent_bytes: int


def head_bytes(directory_bytes: int) -> int:
    """Bytes before the first Blob of a slab, on the grid."""
    return align_up(HEADERS_BYTES + directory_bytes, GRID_BYTES)


def plan(key_lengths: Sequence[int], lengths: Sequence[int]) -> SlabPlan:
    """The layout of a slab with these keys and Blobs: bytes of each."""
    directory_bytes = len(lengths) * DIRECTORY_ENTRY.itemsize + sum(key_lengths)
    offsets: list[int] = []
    end = head_bytes(directory_bytes)
    for length in lengths:
        offsets.append(end)
        end = align_up(end + length, BLOB_ALIGNMENT)
    return SlabPlan(directory_bytes, offsets, align_up(end, GRID_BYTES))


class BlobHash:
    """XXH3-64 of a Blob together with whose it is, piece by piece."""

    def __init__(self, fingerprint: bytes, key: bytes, generation: int) -> None:
        self._digest = xxhash.xxh3_64(seed=generation)
        self._digest.update(fingerprint + struct.pack("<I", len(key)) + key)

    def update(self, piece: memoryview) -> None:
        self._digest.update(piece)

    @property
    def checksum(self) -> int:
        return int(self._digest.intdigest())


def blob_checksum(fingerprint: bytes, key: bytes, data: memoryview, generation: int) -> int:
    """The checksum of a Blob that is in memory as a whole."""
    digest = BlobHash(fingerprint, key, generation)
    digest.update(data)
    return digest.checksum


def directory_checksum(directory: ByteArray, generation: int) -> int:
    """XXH3-64 of a directory, bound to its slab."""
    return int(xxhash.xxh3_64_intdigest(directory.data, generation))


def to_signed(checksum: int) -> int:
    """A checksum as SQLite keeps it."""
    return (checksum ^ _SIGN) - _SIGN


# ---- writing ------------------------------------------------------------------------------------


def pack_head(
    identity: SlabIdentity, layout: SlabPlan, keys: Sequence[bytes], entries: Directory
) -> ByteArray:
    """Both headers and the directory of a new slab, all of whose Blobs are live.

    entries: DIRECTORY_ENTRY [n] with offset, length and checksum; the keys' places are filled in.
    """
    directory = _pack_directory(keys, entries)
    assert directory.size == layout.directory_bytes
    checksum = directory_checksum(directory, identity.generation)
    header = SlabHeader(
        identity, len(keys), directory.size, checksum, 1, np.ones(len(keys), np.bool_)
    )
    head = np.zeros(header.head_bytes, np.uint8)
    for copy in range(COPIES):
        start = copy * GRID_BYTES
        head[start : start + GRID_BYTES] = pack_header(replace(header, sequence=1 + copy))
    head[HEADERS_BYTES : HEADERS_BYTES + directory.size] = directory
    return head


def _pack_directory(keys: Sequence[bytes], entries: Directory) -> ByteArray:
    assert len(keys) == len(entries) <= ENTRIES_MAX
    lengths = np.array([len(each) for each in keys], np.int64)
    entries["key_length"] = lengths
    entries["key_offset"] = entries.nbytes + np.cumsum(lengths) - lengths
    return np.concatenate([entries.view(np.uint8), np.frombuffer(b"".join(keys), np.uint8)])


def pack_header(header: SlabHeader) -> ByteArray:
    """One copy of a header: uint8 [4096]."""
    identity = header.identity
    live = np.packbits(header.live, bitorder="little").tobytes()
    block = np.zeros(GRID_BYTES, np.uint8)
    HEADER.pack_into(
        block.data, 0,
        MAGIC, SLAB_VERSION, header.entries, identity.store_uuid, identity.fingerprint,
        identity.generation, identity.device_offset, identity.extent_bytes, identity.created,
        header.directory_bytes, header.directory_checksum, header.sequence, live, b"", 0,
    )  # fmt: skip
    struct.pack_into("<Q", block.data, _CHECKSUM_AT, _header_checksum(block))
    return block


def _header_checksum(block: ByteArray) -> int:
    return int(xxhash.xxh3_64_intdigest(block[:_CHECKSUM_AT].data))


# ---- reading ------------------------------------------------------------------------------------


def parse_header(block: ByteArray, where: str) -> SlabHeader:
    """Check and read one copy of a header, uint8 [4096 or more]. Raises FormatError.

    where: named in messages. It belongs to the slab at `identity.device_offset`; copy 1 lies one
    block behind that.
    """
    if block.size < GRID_BYTES:
        raise FormatError(f"{where}: {block.size} bytes are too few for the header of a slab")
    block = block[:GRID_BYTES].copy()
    (
        magic, version, entries, store_uuid, fingerprint, generation, device_offset, extent_bytes,
        created, directory_bytes, directory_checksum, sequence, live, _zero, checksum,
    ) = HEADER.unpack_from(block.data)  # fmt: skip
    if magic != MAGIC:
        raise BadMagic(f"{where}: no slab here")
    if version != SLAB_VERSION:
        raise VersionMismatch(f"{where}: the slab", version, SLAB_VERSION)
    if _header_checksum(block) != checksum:
        raise ChecksumMismatch(f"{where}: the header of the slab is damaged")
    bits = np.unpackbits(np.frombuffer(live, np.uint8), bitorder="little").astype(np.bool_)
    if (
        not 1 <= entries <= ENTRIES_MAX
        or bits[entries:].any()
        or not entries * DIRECTORY_ENTRY.itemsize <= directory_bytes <= DIRECTORY_BYTES_MAX
        or head_bytes(directory_bytes) > extent_bytes
        or (device_offset | extent_bytes) % GRID_BYTES
    ):
        raise FormatError(f"{where}: the header of the slab contradicts itself")
    identity = SlabIdentity(
        store_uuid, fingerprint, generation, device_offset, extent_bytes, created
    )
    return SlabHeader(
        identity, entries, directory_bytes, directory_checksum, sequence, bits[:entries]
    )


def newest_header(block: ByteArray, where: str) -> tuple[SlabHeader, int]:
    """The intact copy that was written last, and which one it is. block: uint8 [8192 or more].

    Raises FormatError when neither is intact, or they are of two slabs.
    """
    found: list[tuple[SlabHeader, int]] = []
    problems: list[FormatError] = []
    for copy in range(COPIES):
        try:
            part = block[copy * GRID_BYTES : (copy + 1) * GRID_BYTES]
            found.append((parse_header(part, f"{where}, copy {copy}"), copy))
        except FormatError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    if len({header.identity for header, _ in found}) > 1:
        raise ChecksumMismatch(f"{where}: the copies of the header are of two slabs")
    return max(found, key=lambda each: each[0].sequence)


def parse_directory(header: SlabHeader, head: ByteArray, where: str) -> Slab:
    """Check and read the directory. head: uint8, the slab's first `head_bytes`.

    Raises FormatError.
    """
    data = head[HEADERS_BYTES : HEADERS_BYTES + header.directory_bytes].copy()
    if data.size < header.directory_bytes:
        raise FormatError(f"{where}: the directory of the slab is cut off")
    if directory_checksum(data, header.identity.generation) != header.directory_checksum:
        raise ChecksumMismatch(f"{where}: the directory of the slab is damaged")
    directory = data[: header.entries * DIRECTORY_ENTRY.itemsize].view(DIRECTORY_ENTRY)
    keys: list[bytes] = []
    end = header.entries * DIRECTORY_ENTRY.itemsize
    payload_end = header.head_bytes
    for offset, length, _, key_offset, key_length in directory.tolist():
        if (
            key_offset != end
            or not 1 <= key_length <= KEY_BYTES_MAX
            or end + key_length > data.size
            or offset < payload_end
            or offset + length > header.identity.extent_bytes
        ):
            raise FormatError(f"{where}: the directory of the slab contradicts itself")
        keys.append(data[end : end + key_length].tobytes())
        end += key_length
        payload_end = offset + length
    if end != data.size:
        raise FormatError(f"{where}: the directory of the slab contradicts itself")
    return Slab(header, directory, keys)


def parse(block: ByteArray, device_offset: int) -> Slab:
    """A whole slab's head that was read from `device_offset`: uint8, at least the newest header's
    `head_bytes`. Raises FormatError unless headers and directory are intact and lie in place."""
    where = f"the slab at byte {device_offset}"
    header, _ = newest_header(block, where)
    if header.identity.device_offset != device_offset:
        raise ChecksumMismatch(f"{where} was written for byte {header.identity.device_offset}")
    return parse_directory(header, block, where)
