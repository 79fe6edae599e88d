"""The region's root on the device: identity, geometry and format version, in three copies.

Layout, little-endian, 4096 bytes (docs/format.md has a sentence per field):

    0    magic         8   b"KVTIERSB"
    8    version       u32 FORMAT_VERSION
    12   block_bytes   u32 logical block of the device at format time
    16   sequence      u64 grows by one with each format; of intact copies the largest counts
    24   store_uuid    16
    40   created       u64 unix seconds
    48   region_bytes  u64 bytes from the start of the device to the end of the region
    56   data_start    u64 first byte that an extent may use
    64   grid_bytes    u32
    68   region_index  u16 which of the store's regions this is, from 0
    70   more_regions  u16 how many others the store has: zero for most, and before there were any
    72   zero          4016
    4088 checksum      u64 XXH3-64 of bytes 0..4088

Invariants:
- Magic, version and checksum keep their places in every later version, so that an old release
  recognises a newer region and refuses it without taking it for damaged.
- Copies lie at offset 0, at 64 KiB and in the last grid block of the region; extents in none.
"""

import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from kvtier.errors import BadMagic, ChecksumMismatch, DeviceError, FormatError, VersionMismatch
from kvtier.io.alignment import GRID_BYTES, align_down

MAGIC = b"KVTIERSB"
FORMAT_VERSION = 1
REGIONS_MAX = 64
"""Regions of one store: more drives than one machine has lanes for."""
SUPERBLOCK_BYTES = 4096
SECOND_COPY_OFFSET = 64 * 1024
DATA_START = 1024 * 1024
REGION_BYTES_MIN = 2 * DATA_START
ONE_COPY = "superblock copy at offset"
"""What is said of one copy begins so: the region is the store's, and others are intact."""

_FIELDS = struct.Struct("<8sIIQ16sQQQIHH4016x")
_CHECKSUM = struct.Struct("<Q")
CHECKSUM_BYTES = _CHECKSUM.size
assert _FIELDS.size + _CHECKSUM.size == SUPERBLOCK_BYTES == GRID_BYTES
assert SECOND_COPY_OFFSET + SUPERBLOCK_BYTES <= DATA_START
assert DATA_START % GRID_BYTES == 0


@dataclass(frozen=True, slots=True)
class Superblock:
    """A checked superblock. created: unix seconds; the rest in bytes."""

    store_uuid: str
    created: int
    region_bytes: int
    block_bytes: int
    sequence: int = 1
    data_start: int = DATA_START
    grid_bytes: int = GRID_BYTES
    region_index: int = 0
    more_regions: int = 0

    @property
    def region_count(self) -> int:
        """How many regions the store has."""
        return self.more_regions + 1

    def pack(self) -> bytes:
        """The 4096 bytes that stand on the device."""
        body = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            self.block_bytes,
            self.sequence,
            uuid.UUID(self.store_uuid).bytes,
            self.created,
            self.region_bytes,
            self.data_start,
            self.grid_bytes,
            self.region_index,
            self.more_regions,
        )
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def parse(cls, data: bytes, path: str = "") -> "Superblock":
        """Check and read 4096 bytes. path: of their device, for messages.

        Raises BadMagic, VersionMismatch, ChecksumMismatch.
        """
        where = f"{path}: " if path else ""
        if len(data) != SUPERBLOCK_BYTES:
            raise BadMagic(f"{where}a superblock has {SUPERBLOCK_BYTES} bytes: got {len(data)}")
        magic, version, *numbers = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise BadMagic(f"{where}no kvtier superblock: expected {MAGIC!r}, found {magic!r}")
        if version != FORMAT_VERSION:
            raise VersionMismatch(f"{where}the superblock", version, FORMAT_VERSION)
        if not checksum_holds(data):
            raise ChecksumMismatch(f"{where}the superblock is damaged: its checksum does not match")
        block_bytes, sequence, store, created, region_bytes, start, grid, index, more = numbers
        return cls(
            store_uuid=str(uuid.UUID(bytes=store)),
            created=created,
            region_bytes=region_bytes,
            block_bytes=block_bytes,
            sequence=sequence,
            data_start=start,
            grid_bytes=grid,
            region_index=index,
            more_regions=more,
        )


def checksum_holds(data: bytes) -> bool:
    """True if the bytes are as they were written, whatever format version they have."""
    body, (stored,) = data[: _FIELDS.size], _CHECKSUM.unpack_from(data, _FIELDS.size)
    return bool(xxhash.xxh3_64_intdigest(body) == stored)


def copy_offsets(region_bytes: int) -> tuple[int, int, int]:
    """Where the three copies of a region of this size lie. Bytes."""
    return 0, SECOND_COPY_OFFSET, align_down(region_bytes, GRID_BYTES) - GRID_BYTES


@dataclass(frozen=True, slots=True)
class SuperblockCopy:
    """One place where a superblock should be: the checked one, or the error that it gave."""

    offset: int
    found: Superblock | FormatError | DeviceError
    other_version: bool
    """True if an intact superblock of another format version stands here."""


def read_copies(
    read: Callable[[int, int], bytes], capacity_bytes: int, path: str = ""
) -> tuple[SuperblockCopy, SuperblockCopy, SuperblockCopy]:
    """Read and check all three copies.

    read(offset, length) returns bytes of the device. The place of the last copy follows from the
    region size in the first two where one of them is intact and the device is long enough, else
    from `capacity_bytes`. path: of the device, for messages.
    """
    first = _read_copy(read, 0, path)
    second = _read_copy(read, SECOND_COPY_OFFSET, path)
    region_bytes = capacity_bytes
    for copy in (first, second):
        if isinstance(copy.found, Superblock) and copy.found.region_bytes <= capacity_bytes:
            region_bytes = copy.found.region_bytes
            break
    return first, second, _read_copy(read, copy_offsets(region_bytes)[2], path)


def _read_copy(read: Callable[[int, int], bytes], offset: int, path: str) -> SuperblockCopy:
    try:
        data = read(offset, SUPERBLOCK_BYTES)
    except DeviceError as error:
        # One unreadable copy is what the others are for. Without its traceback, the error keeps
        # no frame, and so no device, alive.
        return SuperblockCopy(offset, error.with_traceback(None), False)
    try:
        return SuperblockCopy(offset, Superblock.parse(data, path), False)
    except VersionMismatch as error:
        return SuperblockCopy(offset, error.with_traceback(None), checksum_holds(data))
    except FormatError as error:
        return SuperblockCopy(offset, error.with_traceback(None), False)
