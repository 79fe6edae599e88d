"""Extent headers: what was written is read back; anything else is a typed error, never a crash."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from kvtier.errors import (
    BadMagic,
    ChecksumMismatch,
    FormatError,
    VersionMismatch,
)
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.device import ByteArray
from kvtier.tiering import extent_format
from kvtier.tiering.chain import as_tokens
from kvtier.tiering.extent_format import (
    CHECKSUM_AT,
    DIRECTORY_ENTRY,
    FORMAT_VERSION,
    HEADER,
    HEADER_BYTES,
    ExtentIdentity,
    checksum,
    checksum_pages,
    damaged_pages,
    parse_header,
    require_identity,
    write_header,
)
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.page_layout import PageLayout

TOKENS = 37
GEOMETRY = Geometry(
    (LayerGeometry(2, 64, 64), LayerGeometry(3, 80, 48, window=128), LayerGeometry(1, 576, 0)),
    "bfloat16",
)
STREAM = as_tokens(range(100, 100 + TOKENS))
# Offset of each header field, from the order of fields that docs/format.md gives.
AT = {
    "version": 8, "size": 12, "store_uuid": 16, "fingerprint": 32, "start_digest": 64,
    "end_digest": 80, "generation": 96, "device_offset": 104, "extent_bytes": 112,
    "payload_bytes": 120, "start_position": 136, "layer": 144, "kv_heads": 152, "key_width": 156,
    "value_width": 160, "page_tokens": 164, "dtype": 166, "token_count": 168, "pages": 172,
    "stored_tokens": 176, "provenance": 184, "window": 240,
}  # fmt: skip


def identity_of(layer: int) -> ExtentIdentity:
    return ExtentIdentity(
        store_uuid=bytes(range(16)),
        fingerprint=bytes(range(32, 64)),
        provenance="exact",
        start_digest=bytes(range(64, 80)),
        end_digest=bytes(range(80, 96)),
        generation=0x1122334455667788,
        start_position=1024,
        token_count=TOKENS,
        layer=layer,
        device_offset=(layer + 1) << 20,
        extent_bytes=extent_format.extent_bytes(GEOMETRY, layer, TOKENS),
    )


def header_of(layer: int) -> ByteArray:
    """A header with pages of random bytes behind it in mind."""
    directory = PageLayout(GEOMETRY.layers[layer], TOKENS, 2).directory(None)
    block = np.full(extent_format.header_bytes(GEOMETRY, layer, TOKENS), 0xEE, np.uint8)
    write_header(block, identity_of(layer), GEOMETRY, directory, 0xABCDEF, STREAM)
    return block


def seal(block: ByteArray) -> ByteArray:
    """Give a changed header the checksum that belongs to it."""
    block[CHECKSUM_AT:HEADER_BYTES] = 0
    size = min(struct.unpack_from("<I", block.data, AT["size"])[0], block.size)
    struct.pack_into("<Q", block.data, CHECKSUM_AT, checksum(block[:size], 0))
    return block


def patched(field: str, form: str, value: object) -> ByteArray:
    block = header_of(1)
    struct.pack_into(form, block.data, AT[field], value)
    return seal(block)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_header_round_trip(layer: int) -> None:
    block = header_of(layer)
    header = parse_header(block, "here")
    assert header.identity == identity_of(layer)
    assert header.geometry == GEOMETRY.layers[layer]
    assert (header.dtype, header.layers) == ("bfloat16", 3)
    assert header.header_bytes == block.size
    assert block.size % GRID_BYTES == 0
    assert header.payload_bytes == GEOMETRY.payload_bytes(layer, TOKENS)
    assert header.payload_checksum == 0xABCDEF
    expected = PageLayout(GEOMETRY.layers[layer], TOKENS, 2).directory(None)
    assert header.directory.tobytes() == expected.tobytes()
    if layer == 0:
        assert header.tokens is not None
        assert header.tokens.tolist() == STREAM.tolist()
    else:
        assert header.tokens is None
    require_identity(header, identity_of(layer), "here")
    longer = np.concatenate([block, np.full(GRID_BYTES, 0x55, np.uint8)])
    assert parse_header(longer, "here").identity == identity_of(layer)


def test_sizes_are_on_the_grid() -> None:
    # 4 pages of 56 bytes and 256 bytes of header fill one block up to 68 pages.
    one = Geometry((LayerGeometry(2, 64, 64),) * 2, "bfloat16")
    assert extent_format.header_bytes(one, 1, 512) == GRID_BYTES
    assert extent_format.header_bytes(one, 0, 512) == 2 * GRID_BYTES
    assert extent_format.extent_bytes(one, 1, 16) == 3 * GRID_BYTES
    assert extent_format.extent_bytes(one, 1, 17) == 4 * GRID_BYTES


@pytest.mark.parametrize("layer", [0, 1])
def test_every_flipped_byte_of_a_header_is_detected(layer: int) -> None:
    block = header_of(layer)
    parse_header(block, "here")
    for at in range(block.size):
        damaged = block.copy()
        damaged[at] ^= 0x40
        with pytest.raises(FormatError):
            parse_header(damaged, "here")


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_random_mutations_of_a_header_never_crash(seed: int) -> None:
    random = np.random.RandomState(seed)
    for _ in range(250):
        block = header_of(int(random.randint(3)))
        original = block.tobytes()
        for _ in range(random.randint(1, 20)):
            block[random.randint(HEADER_BYTES + 200)] = random.randint(256)
        if block.tobytes() == original:
            continue
        with pytest.raises(FormatError):
            parse_header(block[: random.randint(0, block.size + 1)], "here")
        with pytest.raises(FormatError):
            parse_header(block, "here")


@pytest.mark.parametrize("seed", range(8))
def test_mutations_under_a_valid_checksum_never_crash(seed: int) -> None:
    """A112: a checksum does not stop a faulty or hostile writer: bounds must hold without it."""
    random = np.random.RandomState(seed)
    expected = identity_of(1)
    outcomes = set()
    for _ in range(250):
        block = header_of(1)
        for _ in range(random.randint(1, 4)):
            # The fields and the first entries of the directory; magic and version stay.
            block[random.randint(AT["size"], HEADER_BYTES + 3 * 56)] = random.choice([0, 1, 255])
        seal(block)
        try:
            header = parse_header(block, "here")
            require_identity(header, expected, "here")
            layout = PageLayout(GEOMETRY.layers[1], expected.token_count, 2)
            layout.require_raw(header.directory, "here")
            layout.order_of(header.directory)
            outcomes.add("accepted")
        except FormatError as error:
            outcomes.add(type(error).__name__)
    assert {"FormatError", "ChecksumMismatch"} <= outcomes


@pytest.mark.parametrize(
    ("field", "form", "value"),
    [
        ("kv_heads", "<I", 0),
        ("kv_heads", "<I", 1025),
        ("key_width", "<I", 0),
        ("value_width", "<I", 1 << 20),
        ("window", "<Q", (1 << 40) + 1),
        ("provenance", "4s", b"\xff\xfe\xfd\xfc"),
        ("page_tokens", "<H", 32),
        ("dtype", "<H", 0),
        ("dtype", "<H", 9),
        ("token_count", "<I", 0),
        ("token_count", "<I", 513),
        ("pages", "<I", 1 << 31),
        ("stored_tokens", "<I", 1),
        ("payload_bytes", "<Q", 1),
        ("payload_bytes", "<Q", 1 << 63),
        ("extent_bytes", "<Q", GRID_BYTES),
    ],
)
def test_impossible_fields_are_refused_whatever_the_checksum(
    field: str, form: str, value: object
) -> None:
    with pytest.raises(FormatError, match="here"):
        parse_header(patched(field, form, value), "here")


@pytest.mark.parametrize("size", [0, 255, GRID_BYTES + 1, 2**32 - 1])
def test_header_size_is_bounded_before_it_is_used(size: int) -> None:
    block = header_of(1)
    struct.pack_into("<I", block.data, AT["size"], size)
    with pytest.raises(FormatError, match=f"{size} bytes"):
        parse_header(block, "here")


def test_page_outside_the_payload_is_refused() -> None:
    block = header_of(1)
    directory = block[HEADER_BYTES : HEADER_BYTES + 9 * 56].view(DIRECTORY_ENTRY)
    directory["length"][8] += 1
    with pytest.raises(FormatError, match="outside the payload"):
        parse_header(seal(block), "here")


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, 2**32 - 1])
def test_another_version_is_named(version: int) -> None:
    block = header_of(0)
    struct.pack_into("<I", block.data, AT["version"], version)
    for each in (block, seal(block.copy())):
        with pytest.raises(VersionMismatch, match=f"version {version};") as caught:
            parse_header(each, "here")
        assert (caught.value.found, caught.value.readable) == (version, FORMAT_VERSION)


def test_what_is_no_header_at_all() -> None:
    with pytest.raises(BadMagic):
        parse_header(np.zeros(GRID_BYTES, np.uint8), "here")
    with pytest.raises(FormatError, match="255 bytes"):
        parse_header(header_of(0)[:255], "here")


OTHER_VALUES: dict[str, object] = {
    "store_uuid": bytes(16),
    "fingerprint": bytes(32),
    "provenance": "approximate:budget=0.5,codec=raw",
    "start_digest": bytes(16),
    "end_digest": bytes(16),
    "generation": 5,
    "start_position": 0,
    "token_count": 36,
    "layer": 1,
    "device_offset": 4096,
    "extent_bytes": 1 << 20,
}


@pytest.mark.parametrize("field", ExtentIdentity.__slots__)
def test_another_extent_is_named_by_what_differs(field: str) -> None:
    header = parse_header(header_of(0), "here")
    expected = replace(identity_of(0), **{field: OTHER_VALUES[field]})  # type: ignore[arg-type]
    with pytest.raises(ChecksumMismatch, match=rf"here: .*\(its {field} differ\)"):
        require_identity(header, expected, "here")


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_pages_are_found_one_by_one(seed: int) -> None:
    random = np.random.RandomState(seed)
    layout = PageLayout(LayerGeometry(3, 8, 4), TOKENS, 2)
    payload = random.randint(0, 256, 3 * layout.head_bytes).astype(np.uint8)
    directory = layout.directory(None)
    checksum_pages(directory, payload, 77)
    assert damaged_pages(directory, payload, 77) == []
    for page in range(len(directory)):
        offset, length = int(directory["offset"][page]), int(directory["length"][page])
        damaged = payload.copy()
        damaged[offset + random.randint(length)] ^= 1
        assert damaged_pages(directory, damaged, 77) == [page]
    assert damaged_pages(directory, payload, 78) == list(range(len(directory)))


def test_checksums_are_bound_to_the_generation() -> None:
    data = np.arange(64, dtype=np.uint8)
    assert checksum(data, 1) != checksum(data, 2)
    assert HEADER.size == HEADER_BYTES
