"""The bytes of a slab: packed and parsed, and every damage to them found."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from kvtier.errors import BadMagic, ChecksumMismatch, FormatError, VersionMismatch
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.device import ByteArray
from kvtier.tiering import slab_format
from kvtier.tiering.slab_format import DIRECTORY_ENTRY, SlabHeader, SlabIdentity, to_signed
from kvtier.tiering.slab_limits import ENTRIES_MAX, HEADERS_BYTES

FINGERPRINT = bytes(range(32))
KEYS = [b"k", b"a longer key", "schl\u00fcssel".encode(), bytes(200)]
BLOBS = [b"x", b"", bytes(range(256)) * 17, b"last"]
AT = 7 * GRID_BYTES
GOLDEN = "01ee0cdb43e6b64bee251f03803a50d6da1458939e0514581b5bdda576a243cd"


def identity(extent_bytes: int, generation: int = 12345) -> SlabIdentity:
    return SlabIdentity(b"u" * 16, FINGERPRINT, generation, AT, extent_bytes, 1_700_000_000_000_000)


def a_slab(keys: list[bytes], blobs: list[bytes]) -> ByteArray:
    layout = slab_format.plan([len(key) for key in keys], [len(blob) for blob in blobs])
    own = identity(layout.extent_bytes)
    entries = np.zeros(len(keys), DIRECTORY_ENTRY)
    entries["offset"] = layout.offsets
    entries["length"] = [len(blob) for blob in blobs]
    entries["checksum"] = [
        slab_format.blob_checksum(FINGERPRINT, key, memoryview(blob), own.generation)
        for key, blob in zip(keys, blobs, strict=True)
    ]
    block = np.zeros(layout.extent_bytes, np.uint8)
    head = slab_format.pack_head(own, layout, keys, entries)
    block[: head.size] = head
    for offset, blob in zip(layout.offsets, blobs, strict=True):
        block[offset : offset + len(blob)] = np.frombuffer(blob, np.uint8)
    return block


@pytest.mark.parametrize("count", [1, 7, 8, 9, ENTRIES_MAX])
def test_what_was_packed_is_parsed(count: int) -> None:
    keys = [f"key {i}".encode() for i in range(count)]
    blobs = [bytes([i % 251]) * (i % 23) for i in range(count)]
    block = a_slab(keys, blobs)
    slab = slab_format.parse(block, AT)
    assert slab.keys == keys
    assert slab.header.live.all()
    assert len(slab.header.live) == slab.header.entries == count
    assert slab.header.identity == identity(block.size)
    ends = 0
    for entry, blob in enumerate(blobs):
        offset, length, *_ = slab.directory[entry].tolist()
        assert offset % 8 == 0
        assert offset >= max(ends, slab.header.head_bytes)
        data = block[offset : offset + length].data
        assert bytes(data) == blob
        ends = offset + length


def test_every_flipped_bit_of_the_head_is_found() -> None:
    """One copy of the header may be damaged; then the other one speaks."""
    whole = a_slab(KEYS, BLOBS)
    directory_end = HEADERS_BYTES + slab_format.parse(whole, AT).header.directory_bytes
    random = np.random.default_rng(3)
    for at in [*range(200), *random.integers(0, directory_end, 500).tolist()]:
        block = whole.copy()
        block[at] ^= 1 << int(random.integers(8))
        if at >= HEADERS_BYTES:
            with pytest.raises(ChecksumMismatch, match="directory"):
                slab_format.parse(block, AT)
            continue
        copy = at // GRID_BYTES
        with pytest.raises((BadMagic, VersionMismatch, ChecksumMismatch)):
            slab_format.parse_header(block[copy * GRID_BYTES :], "here")
        header, newest = slab_format.newest_header(block, "here")
        assert newest == 1 - copy
        assert header.live.all()
        assert slab_format.parse(block, AT).keys == KEYS


def test_both_copies_damaged_is_an_error() -> None:
    block = a_slab(KEYS, BLOBS)
    block[100] ^= 1
    block[GRID_BYTES + 100] ^= 1
    with pytest.raises(ChecksumMismatch):
        slab_format.parse(block, AT)


def test_the_copy_that_was_written_last_counts() -> None:
    block = a_slab(KEYS, BLOBS)
    for _ in range(4):
        header, newest = slab_format.newest_header(block, "here")
        live = header.live.copy()
        live[np.flatnonzero(live)[0]] = False
        older = 1 - newest
        block[older * GRID_BYTES : (older + 1) * GRID_BYTES] = slab_format.pack_header(
            replace(header, sequence=header.sequence + 1, live=live)
        )
        found, place = slab_format.newest_header(block, "here")
        assert place == older
        assert (found.live == live).all()
    assert not slab_format.parse(block, AT).header.live.any()


def test_a_slab_at_another_place_is_not_taken() -> None:
    with pytest.raises(ChecksumMismatch, match=f"written for byte {AT}"):
        slab_format.parse(a_slab(KEYS, BLOBS), AT + GRID_BYTES)


def test_copies_of_two_slabs_are_refused() -> None:
    block = a_slab(KEYS, BLOBS)
    header, _ = slab_format.newest_header(block, "here")
    other = replace(header, identity=replace(header.identity, generation=99))
    block[:GRID_BYTES] = slab_format.pack_header(other)
    with pytest.raises(ChecksumMismatch, match="two slabs"):
        slab_format.parse(block, AT)


def test_another_version_is_named() -> None:
    block = a_slab(KEYS, BLOBS)
    block[8] = 7
    with pytest.raises(VersionMismatch, match="version 7"):
        slab_format.parse_header(block, "here")


@pytest.mark.parametrize(
    "change",
    [
        {"entries": 0, "live": np.zeros(0, np.bool_)},
        {"entries": 3},
        {"directory_bytes": 8},
        {"directory_bytes": 1 << 40},
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    header, _ = slab_format.newest_header(a_slab(KEYS, BLOBS), "here")
    values = {name: getattr(header, name) for name in SlabHeader.__slots__} | change
    block = slab_format.pack_header(SlabHeader(**values))
    with pytest.raises(FormatError, match="contradicts"):
        slab_format.parse_header(block, "here")


def test_a_directory_that_is_cut_off_or_lies_is_refused() -> None:
    block = a_slab(KEYS, BLOBS)
    header, _ = slab_format.newest_header(block, "here")
    with pytest.raises(FormatError, match="cut off"):
        slab_format.parse_directory(header, block[: HEADERS_BYTES + 10], "here")
    lies = {"offset": 0, "length": 1 << 62, "key_length": 5000, "key_offset": 1}
    for field, value in lies.items():
        lying = block.copy()
        entries = lying[HEADERS_BYTES:][: 4 * 32].view(DIRECTORY_ENTRY)
        entries[field][1] = value
        data = lying[HEADERS_BYTES : HEADERS_BYTES + header.directory_bytes]
        right = replace(header, directory_checksum=slab_format.directory_checksum(data, 12345))
        with pytest.raises(FormatError, match="contradicts"):
            slab_format.parse_directory(right, lying, "here")


def test_a_checksum_covers_all_that_makes_a_blob() -> None:
    data = memoryview(b"data")
    found = {
        slab_format.blob_checksum(FINGERPRINT, b"ab", data, 1),
        slab_format.blob_checksum(bytes(32), b"ab", data, 1),
        slab_format.blob_checksum(FINGERPRINT, b"abd", memoryview(b"ata"), 1),
        slab_format.blob_checksum(FINGERPRINT, b"ab", memoryview(b"datb"), 1),
        slab_format.blob_checksum(FINGERPRINT, b"ab", data, 2),
    }
    assert len(found) == 5


@pytest.mark.parametrize("number", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_checksums_keep_their_bits_as_signed_numbers(number: int) -> None:
    signed = to_signed(number)
    assert -(1 << 63) <= signed < 1 << 63
    assert signed % (1 << 64) == number


def test_the_bytes_are_those_of_version_1() -> None:
    """Another digest means another format: then the version must change."""
    assert slab_format.SLAB_VERSION == 1
    block = a_slab(KEYS, BLOBS)
    assert block.size == 5 * GRID_BYTES
    assert hashlib.sha256(block.tobytes()).hexdigest() == GOLDEN
