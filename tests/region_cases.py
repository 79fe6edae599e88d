"""Regions for tests: made, opened, damaged, and overlaid with what is not ours."""

import shutil
import struct
import subprocess
import uuid
import zlib

import pytest

from kvtier.io.probe import open_device
from kvtier.io.region import Region
from kvtier.io.superblock import (
    Superblock,
    copy_offsets,
)

STORE = "11111111-2222-3333-4444-555555555555"
OTHER = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
REGION_BYTES = 4 * 1024 * 1024
COPIES = copy_offsets(REGION_BYTES)


def create(path: str, store: str = STORE, *, force: bool = False) -> Superblock:
    device = open_device(path)
    try:
        return Region.create(device, store, force=force).superblock
    finally:
        device.close()


def reopen(path: str, store: str = STORE, *, writable: bool = True) -> list[str]:
    """The notes of opening the region."""
    device = open_device(path, writable=writable)
    try:
        return Region.open(device, store, writable=writable).notes
    finally:
        device.close()


def patch(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def peek(path: str, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def make_file_system(path: str) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", "-F", path], check=True, capture_output=True)


def write_gpt(path: str) -> None:
    """A protective MBR and an empty GPT, as a partitioning tool writes them."""
    last = REGION_BYTES // 512 - 1
    mbr = bytearray(512)
    struct.pack_into("<B3sB3sII", mbr, 446, 0, b"\0\2\0", 0xEE, b"\xff" * 3, 1, last)
    mbr[510:] = b"\x55\xaa"
    entries = bytes(128 * 128)
    fields = [b"EFI PART", 0x10000, 92, 0, 0, 1, last, 34, last - 33, uuid.UUID(OTHER).bytes_le]
    fields += [2, 128, 128, zlib.crc32(entries)]
    layout = "<8sIIIIQQQQ16sQIII"
    fields[3] = zlib.crc32(struct.pack(layout, *fields))
    patch(path, 0, bytes(mbr) + struct.pack(layout, *fields).ljust(512, b"\0") + entries)
