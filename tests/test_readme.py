"""The Python examples of README.md run as they stand."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.model_cases import prompt, qwen2

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(README.read_text(encoding="utf-8"))
pytestmark = pytest.mark.usefixtures("one_thread")


def test_there_are_examples() -> None:
    assert BLOCKS
    assert any("TieredCache" in block for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty directory; `model` and `input_ids` are there where a block does not make them.

    A store of gigabytes is what a reader wants; here its region may be small.
    """
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": qwen2(), "input_ids": prompt(1, 60)}
    small = re.sub(r'region="\d+GiB"', 'region="64MiB"', block)
    exec(compile(small, f"{README.name}", "exec"), names)
    if "TieredCache" in block:
        output = names["output"] if "output" in names else names["answer"].tokens
        assert names["cache"].get_seq_length() == output.shape[1] - 1
