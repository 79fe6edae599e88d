"""Thousands of random operations in a row, with faults and kills, against a dict."""

from pathlib import Path

import pytest

from tests.long_walk import walk

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_STEP = 17


@pytest.mark.parametrize("seed", range(3))
def test_a_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    walked = walk(tmp_path / "s", monkeypatch, seed, 150)
    assert walked.operations == 150


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_long_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    walked = walk(tmp_path / "s", monkeypatch, seed, 2000)
    assert walked.operations == 2000
    assert len(walked.counts) == EVERY_STEP, walked.counts
