"""docs/format.md is compared with the code: a table that lies is worse than none."""

import inspect
import re
import sqlite3
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.io import catalog, catalog_schema, superblock
from kvtier.io.alignment import GRID_BYTES
from kvtier.tiering import (
    digest_section,
    extent_format,
    rebuild_finds,
    record_format,
    slab_format,
    slab_limits,
    store_files,
    stored_digests,
)
from kvtier.tiering.chain import TOKEN_MAX
from kvtier.tiering.digest_section import HEAD, HEAD_BYTES, DigestHead
from kvtier.tiering.extent_format import (
    DIRECTORY_ENTRY,
    HEADER,
    HEADER_BYTES,
    DigestSection,
    ExtentIdentity,
)
from kvtier.tiering.geometry import PAGE_TOKENS, SEGMENT_TOKENS, LayerGeometry
from kvtier.tiering.record_format import Record
from tests import golden_cases

TEXT = (Path(__file__).parent.parent / "docs" / "format.md").read_text(encoding="utf-8")
Row = tuple[int, int, str]


def section(title: str) -> str:
    found = re.search(rf"^(#+) {re.escape(title)}$(.*?)(?=^#|\Z)", TEXT, re.M | re.S)
    assert found is not None, f"no section {title!r}"
    return found[2]


def rows(title: str) -> list[Row]:
    """(offset, size, field) of the section's table."""
    found = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", section(title), re.M)
    return [(int(offset), int(size), name) for offset, size, name in found]


def boxed(title: str) -> list[str]:
    """Field names in the section's diagram, in order; a field that goes on counts once."""
    diagram = section(title).split("```")[1]
    names: list[str] = []
    for line in re.findall(r"^\| .*\|$", diagram, re.M):
        for cell in line.strip("|").split("|"):
            name = cell.split()[0]
            if not names or names[-1] != name:
                names.append(name)
    return names


def one_by_one(layout: struct.Struct) -> list[int]:
    """Sizes of single fields: "II" and "2I" are two fields, "16s" is one."""
    sizes: list[int] = []
    for count, code in re.findall(r"(\d*)([a-zA-Z])", layout.format):
        repeat = 1 if code in "sx" else int(count or 1)
        sizes += [struct.calcsize(f"<{count if code in 'sx' else ''}{code}")] * repeat
    return sizes


@pytest.mark.parametrize(
    ("title", "size"),
    [
        ("Superblock (4096 bytes)", superblock.SUPERBLOCK_BYTES),
        ("Extent header (256 bytes)", HEADER_BYTES),
        ("Page directory entry (56 bytes)", DIRECTORY_ENTRY.itemsize),
        ("Slab header (4096 bytes)", slab_format.HEADER.size),
        ("Slab directory entry (32 bytes)", slab_format.DIRECTORY_ENTRY.itemsize),
        ("Record header (88 bytes)", record_format.FIELDS.size),
    ],
)
def test_tables_have_no_gap_and_diagrams_show_the_same_fields(title: str, size: int) -> None:
    end = 0
    for offset, length, name in rows(title):
        assert offset == end, name
        end += length
    assert end == size
    assert boxed(title) == [name for _, _, name in rows(title)]


def test_header_table_is_the_struct() -> None:
    table = rows("Extent header (256 bytes)")
    assert [size for _, size, _ in table] == one_by_one(HEADER)


@pytest.mark.parametrize("case", golden_cases.CASES, ids=lambda case: case.name)
def test_header_fields_lie_where_the_table_says(case: golden_cases.Case) -> None:
    table = {name: (offset, size) for offset, size, name in rows("Extent header (256 bytes)")}
    layer = len(case.geometry.layers) - 1
    image = golden_cases.image_of(case, layer)
    header = extent_format.parse_header(np.frombuffer(image, np.uint8).copy(), "doc")
    values: dict[str, object] = {
        name: getattr(header.identity, name) for name in ExtentIdentity.__slots__
    }
    values |= {
        name: getattr(header, name)
        for name in ("header_bytes", "payload_bytes", "payload_checksum", "layers")
    }
    values |= {
        "magic": b"KVTIEREX",
        "version": 1,
        "digest_bytes": 0,
        "digest_bits": 0,
        "digest_seed": 0,
        "kv_heads": header.geometry.kv_heads,
        "key_width": header.geometry.key_width,
        "value_width": header.geometry.value_width,
        "window": header.geometry.window or 0,
        "page_tokens": 16,
        "dtype": {"float32": 1, "float16": 2, "bfloat16": 3}[header.dtype],
        "pages": len(header.directory),
        "stored_tokens": 0 if header.tokens is None else len(header.tokens),
        "head_group": 1,
    }
    covered = bytearray(image[: header.header_bytes])
    covered[248:256] = bytes(8)
    values["checksum"] = extent_format.checksum(np.frombuffer(covered, np.uint8), 0)
    assert set(values) == set(table)
    for name, value in values.items():
        offset, size = table[name]
        stored = image[offset : offset + size]
        if isinstance(value, int):
            assert int.from_bytes(stored, "little") == value, name
        else:
            expected = value.encode() if isinstance(value, str) else value
            assert isinstance(expected, bytes)
            assert stored == expected.ljust(size, b"\0"), name


def test_every_compared_field_is_listed() -> None:
    text = " ".join(section("Extent header (256 bytes)").split())
    listed = re.search(r"must lie here: ([\w, ]+)\.", text)
    assert listed is not None
    assert set(listed[1].split(", ")) == set(ExtentIdentity.__slots__)


def test_digest_tables_are_the_struct_and_the_arrays() -> None:
    table = rows("Digests")
    assert [size for _, size, _ in table] == [8, 4, 4, 2, 1, 1, 4]
    assert [offset for offset, *_ in table] == [0, 8, 12, 16, 18, 19, 20]
    assert sum(size for _, size, _ in table) == HEAD_BYTES == HEAD.size
    block = np.zeros(60, np.uint8)
    block[HEAD_BYTES:] = 7
    digest_section.seal(block, DigestHead(DigestSection(60, 3, 9), 5, 500), 77)
    checksum = extent_format.checksum(block[8:], 77)
    values = {"digest_bytes": 60, "layer": 5, "token_count": 500, "digest_bits": 3,
              "digest_seed": 9, "zero": 0, "checksum": checksum}  # fmt: skip
    assert {name for *_, name in table} == set(values)
    for offset, size, name in table:
        assert int.from_bytes(block[offset : offset + size].tobytes(), "little") == values[name]


@pytest.mark.parametrize("bits", [None, 3])
def test_arrays_of_digests_lie_as_the_table_lists_them(bits: int | None) -> None:
    listed = re.findall(
        r"^\| (\w+) \| (\w+) \| ([\w, /]+) \| (yes)? ?\|$", section("Digests"), re.M
    )
    shape, end = LayerGeometry(2, 80, 24), HEAD_BYTES
    sizes = {"bits": bits, "kv_heads": 2, "pages": 3, "width / 4": 20, "key_width": 80,
             "value_width": 24, "16": 16}  # fmt: skip
    arrays = stored_digests.arrays_of(shape, 40, bits)
    assert list(arrays) == [name for name, *_, only in listed if bits is not None or not only]
    for name, dtype, dims, _ in listed:
        if name in arrays:
            array = arrays[name]
            assert str(array.dtype) == f"torch.{dtype}"
            assert list(array.shape) == [sizes[each] for each in dims.split(", ")]
            assert array.start == end
            end += array.nbytes


def test_record_fields_lie_where_the_table_says() -> None:
    table = rows("Record header (88 bytes)")
    assert [name for _, _, name in table] == list(record_format.FIELD_NAMES)
    assert [size for _, size, _ in table] == one_by_one(record_format.FIELDS)
    block = Record(b"u" * 16, b"f" * 32, record_format.FINGERPRINT, {"a": 1}).pack()
    record_format.seal(block, 8 * GRID_BYTES)
    data = block.tobytes()
    values = dict(
        zip(record_format.FIELD_NAMES, record_format.FIELDS.unpack_from(data), strict=True)
    )
    for offset, size, name in table:
        stored = data[offset : offset + size]
        value = values[name]
        assert stored == (value if isinstance(value, bytes) else value.to_bytes(size, "little"))
    assert values["device_offset"] == 8 * GRID_BYTES
    assert data[88 : 88 + values["body_bytes"]] == b'{"a":1}'
    covered = data[:80] + bytes(8) + data[88:]
    assert values["checksum"] == extent_format.checksum(np.frombuffer(covered, np.uint8), 0)


def test_the_keys_of_a_record_are_listed() -> None:
    listed = set(re.findall(r"^\| ([12]) \| `(\w+)` \|", section("Record header (88 bytes)"), re.M))
    name = {"name", "generation", "end_digest", "limit", "token_count", "created"}
    assert listed == {("1", each) for each in name} | {("2", "description"), ("2", "geometry")}
    # The code that writes them has no table of them; the one that reads them refuses less.
    assert name <= set(inspect.getsource(record_format.name_body).split('"'))
    assert name <= set(inspect.getsource(rebuild_finds.NameRecord.read).split('"'))


def test_directory_table_is_the_dtype() -> None:
    fields = DIRECTORY_ENTRY.fields
    assert fields is not None
    expected = [(each[1], each[0].itemsize, name) for name, each in fields.items()]
    assert rows("Page directory entry (56 bytes)") == expected
    assert extent_format.NO_POSITION == 65535


@pytest.mark.parametrize("place", [(0, 0), (2, 3)])
def test_superblock_fields_lie_where_the_table_says(place: tuple[int, int]) -> None:
    block = replace(golden_cases.superblock(), region_index=place[0], more_regions=place[1])
    data = block.pack()
    assert superblock.Superblock.parse(data) == block
    for offset, size, name in rows("Superblock (4096 bytes)"):
        value = int.from_bytes(data[offset : offset + size], "little")
        if name == "magic":
            assert data[offset : offset + size] == superblock.MAGIC
        elif name == "store_uuid":
            assert data[offset : offset + size].hex() == block.store_uuid.replace("-", "")
        elif name == "checksum":
            assert superblock.checksum_holds(data)
        elif name == "version":
            assert value == superblock.FORMAT_VERSION
        elif name == "zero":
            assert value == 0
        else:
            assert value == getattr(block, name), name


def test_slab_fields_lie_where_the_tables_say() -> None:
    table = rows("Slab header (4096 bytes)")
    assert [name for _, _, name in table] == list(slab_format.HEADER_FIELDS)
    assert [size for _, size, _ in table] == one_by_one(slab_format.HEADER)
    identity = slab_format.SlabIdentity(b"u" * 16, b"f" * 32, 77, 8 * GRID_BYTES, 1 << 20, 123)
    live = np.arange(9) % 3 == 0
    header = slab_format.SlabHeader(identity, 9, 500, 1 << 60, 5, live)
    data = slab_format.pack_header(header).tobytes()
    values = {name: getattr(identity, name) for name in slab_format.SlabIdentity.__slots__}
    values |= {
        "magic": b"KVTIERSL",
        "version": 1,
        "entries": 9,
        "directory_bytes": 500,
        "directory_checksum": 1 << 60,
        "sequence": 5,
        "live": bytes([0b01001001]) + bytes(511),
        "zero": bytes(3456),
        "checksum": extent_format.checksum(np.frombuffer(data, np.uint8)[:4088].copy(), 0),
    }
    for offset, size, name in table:
        value = values[name]
        stored = value if isinstance(value, bytes) else value.to_bytes(size, "little")
        assert data[offset : offset + size] == stored, name
    assert set(values) == {name for _, _, name in table}
    fields = slab_format.DIRECTORY_ENTRY.fields
    assert fields is not None
    entry = [(each[1], each[0].itemsize, name) for name, each in fields.items()]
    assert rows("Slab directory entry (32 bytes)") == entry


def test_catalog_tables_are_the_schema() -> None:
    connection = sqlite3.connect(":memory:")
    connection.executescript(catalog_schema.SCHEMA)
    tables = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' "
        "ORDER BY rowid"
    ).fetchall()
    actual = []
    for (table,) in tables:
        columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
        actual += [(table, column[1], column[2]) for column in columns]
    connection.close()
    listed = re.findall(r"^\| (\w+) \| (\w+) \| ([A-Z]+) \|", section("Catalog"), re.M)
    assert listed == actual


@pytest.mark.parametrize(
    ("stated", "actual"),
    [
        ("format version 1 byte", extent_format.PLAIN_VERSION == superblock.FORMAT_VERSION == 1),
        ("and version 2 of Extents", extent_format.FORMAT_VERSION == 2),
        ("`user_version` is 2.", catalog_schema.CATALOG_VERSION == 2),
        ('0x4B565443 ("KVTC")', int.from_bytes(b"KVTC", "big") == catalog._APPLICATION_ID),
        ("layout_version: 1\n", store_files.LAYOUT_VERSION == 1),
        ("The **grid** is 4096 bytes.", GRID_BYTES == 4096),
        ("at offset 65536 and at `region_bytes - 4096`",
         superblock.copy_offsets(1 << 30) == (0, 65536, (1 << 30) - 4096)),
        ("| 1048576 |", superblock.DATA_START == 1048576),
        ("1 to 512", SEGMENT_TOKENS == 512),
        ("of the directory, 1 to 4096", slab_limits.ENTRIES_MAX == 4096),
        ("of the key, 1 to 1024", slab_limits.KEY_BYTES_MAX == 1024),
        ("more than 1048576 bytes has a slab", slab_limits.SLAB_BYTES == 1048576),
        ("the next multiple of 8 bytes", slab_limits.BLOB_ALIGNMENT == 8),
        ("1 to 16", PAGE_TOKENS == 16),
        ("at most 1048576", record_format.RECORD_BYTES_MAX == 1048576),
        ("1 to 256 printable characters", record_format.NAME_CHARACTERS_MAX == 256),
        ("1 float32, 2 float16, 3 bfloat16",
         extent_format.DTYPE_CODES == {"float32": 1, "float16": 2, "bfloat16": 3}),
        ("0 to 4294967294", TOKEN_MAX == 4294967294),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_numbers_are_those_of_the_code(stated: str, actual: bool) -> None:
    assert stated in TEXT
    assert actual
