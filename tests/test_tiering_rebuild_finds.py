"""What a record on the region may hold: a scan reads what a writer writes, and refuses the rest."""

import hashlib
from typing import Any

import pytest

from kvtier.errors import FormatError
from kvtier.io.extent import Extent
from kvtier.tiering import record_format
from kvtier.tiering.rebuild_finds import FingerprintRecord, NameRecord
from kvtier.tiering.record_format import NAME_CHARACTERS_MAX, Record, is_name
from tests.store_cases import PLAIN

PLACE = Extent(1 << 20, 4096)
NAME = {
    "name": "chat", "generation": 5, "end_digest": "00" * 16, "limit": 3, "token_count": 3,
    "created": 1.0,
}  # fmt: skip


def described(description: str, geometry: Any) -> Record:
    digest = hashlib.sha256(description.encode(errors="replace")).digest()
    body = {"description": description, "geometry": geometry}
    return Record(b"u" * 16, digest, record_format.FINGERPRINT, body)


def test_what_a_writer_writes_is_read() -> None:
    found = FingerprintRecord.read(described("{}", PLAIN.to_dict()), PLACE)
    assert (found.description, found.geometry, found.extent) == ("{}", PLAIN, PLACE)
    name = NameRecord.read(Record(b"u" * 16, b"f" * 32, record_format.NAME, NAME), PLACE)
    assert (name.name, name.limit, name.extent) == ("chat", 3, PLACE)


@pytest.mark.parametrize(
    "geometry",
    [
        None, 5, "float32", [], {}, {"dtype": "float32"},
        {"dtype": "int7", "layers": [[1, 8, 8, None]]},
        {"dtype": "float32", "layers": 5}, {"dtype": "float32", "layers": [5]},
        {"dtype": "float32", "layers": [[1, 8]]},
        {"dtype": "float32", "layers": [["a", "b", "c", "d"]]},
        {"dtype": "float32", "layers": [[{}, [], None, {}]]}, {"dtype": {}, "layers": []},
    ],
    ids=repr,
)  # fmt: skip
def test_impossible_shapes_are_typed(geometry: Any) -> None:
    with pytest.raises(FormatError, match="no KV shapes"):
        FingerprintRecord.read(described("{}", geometry), PLACE)


@pytest.mark.parametrize("description", ["\ud800", "\u00e9", "other"])
def test_a_description_of_something_else_is_typed(description: str) -> None:
    record = described(description, PLAIN.to_dict())
    if description == "other":
        record.body["description"] = "{}"
    with pytest.raises(FormatError, match="describes another one"):
        FingerprintRecord.read(record, PLACE)


@pytest.mark.parametrize(
    "name", ["", "a" * (NAME_CHARACTERS_MAX + 1), "line\n", "\ud800", "\0", 5, None, b"a", ["a"]]
)
def test_what_is_no_name_is_typed(name: Any) -> None:
    assert not is_name(name)
    record = Record(b"u" * 16, b"f" * 32, record_format.NAME, {**NAME, "name": name})
    with pytest.raises(FormatError, match="holds no name"):
        NameRecord.read(record, PLACE)


@pytest.mark.parametrize("name", ["a", "a" * NAME_CHARACTERS_MAX, "Zw\u00f6lf Chats", "../x"])
def test_what_is_a_name(name: str) -> None:
    assert is_name(name)
