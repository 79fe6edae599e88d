"""What is no YAML is refused with its place, and never quoted."""

import pytest

from kvtier.tiering.yaml_text import parse_yaml

SECRET = "hunter2"


def test_what_is_yaml_is_parsed() -> None:
    assert parse_yaml(b"a: 1\nb: [x, 0.5]\n") == {"a": 1, "b": ["x", 0.5]}


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (f"a: b\nc: [{SECRET}".encode(), "ParserError at line 2, column "),
        (f"a: b\n{SECRET}: *{SECRET}".encode(), "ComposerError at line 2, column 10"),
        (f"{SECRET}\x01".encode(), "ReaderError at character 7"),
        (SECRET.encode() + b"\xff", "UnicodeDecodeError at byte 7"),
        (f"!!bool {SECRET}".encode(), "KeyError"),
        (b"[" * 100_000, "RecursionError"),
    ],
    ids=["unended", "unknown alias", "control character", "no text", "no bool", "deep"],
)
def test_what_is_none_is_told_by_its_place(data: bytes, where: str) -> None:
    with pytest.raises(ValueError, match="Error") as caught:
        parse_yaml(data)
    assert str(caught.value).startswith(where)
    assert SECRET not in str(caught.value)
