"""docs/export.md is compared with the code: a table that lies is worse than none."""

import json
import re
import struct
from pathlib import Path

from kvtier.tiering.exchange_format import FORMAT, FORMAT_VERSION, HEAD_BYTES_MAX
from tests.exchange_cases import TOKENS, joined, make_export, split

TEXT = (Path(__file__).parent.parent / "docs" / "export.md").read_text(encoding="utf-8")


def test_the_page_says_what_the_file_is(tmp_path: Path) -> None:
    data = make_export(tmp_path).read_bytes()
    head, tensors = split(data)
    said = head.pop("__metadata__")
    table = dict(re.findall(r"^\| (\w+) \| (.*) \|$", TEXT.split("## Metadata")[1], re.M))
    table.pop("key")
    assert set(table) == set(said)
    assert table["format"] == f"`{FORMAT}`" == f"`{said['format']}`"
    assert table["format_version"].startswith(f"`{FORMAT_VERSION}`")
    assert f"at most {HEAD_BYTES_MAX >> 20} MiB" in TEXT
    # The order of the file, and no gap in it.
    places = sorted(head.items(), key=lambda item: item[1]["data_offsets"])
    assert [name for name, _ in places] == ["tokens", "keys.0", "values.0", "keys.1", "values.1"]
    ends = [0, *(place["data_offsets"][1] for _, place in places)]
    assert [place["data_offsets"][0] for _, place in places] == ends[:-1]
    assert ends[-1] == len(tensors)
    assert head["tokens"] == {
        "dtype": "U32", "shape": [len(TOKENS)], "data_offsets": [0, 4 * len(TOKENS)],
    }  # fmt: skip


def test_the_page_says_how_to_compute_the_checksum(tmp_path: Path) -> None:
    """`joined` was written by that page alone."""
    data = make_export(tmp_path).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    assert length % 8 == 0
    again = joined(*split(data))
    (short,) = struct.unpack_from("<Q", again)
    assert again[8 : 8 + short].ljust(length) == data[8 : 8 + length]
    assert json.loads(data[8 : 8 + length]) == json.loads(again[8 : 8 + short])
