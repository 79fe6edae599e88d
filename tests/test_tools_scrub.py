"""The command kvtier scrub: what it finds, what it leaves behind, whom it refuses."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.io.extent import Extent
from kvtier.tiering.listing import describe
from kvtier.tiering.verifier import verify
from tests.store_cases import KV, PLAIN, check_everywhere, open_store, put, some_tokens

ROOT = Path(__file__).parent.parent
A, B = some_tokens(700, 1), some_tokens(900, 2)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A closed store of "a" (Segments 1 and 2) and "b" (3 and 4)."""
    with open_store(tmp_path / "store") as store:
        put(store, KV(PLAIN), "a", A)
        put(store, KV(PLAIN), "b", B)
    return tmp_path / "store"


def scrub(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier.tools.cli", "scrub", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def as_json(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(scrub(*arguments, "--json", code=code).stdout)
    return found


def extent_of(path: Path, segment: int, layer: int) -> Extent:
    with open_store(path) as store:
        found = store._registry.committed[segment].extents[layer]
    assert found is not None
    return found


def damage(path: Path, offset: int) -> None:
    with (path / "region.kv").open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * 64)


def test_a_sound_store(store: Path) -> None:
    done = scrub(store)
    assert "nothing found" in done.stdout
    assert "quarantined" not in done.stdout
    assert "scrubbing" in done.stderr
    found = as_json(store, "--rate", "1GiB")
    assert found["ok"]
    assert found["finished"]
    assert found["findings"] == found["quarantined"] == []
    assert found["segments_checked"] == 4
    assert found["bytes_read"] == found["bytes_total"]


def test_damage_is_quarantined_in_the_catalog(store: Path) -> None:
    extent = extent_of(store, 2, 1)
    damage(store, extent.offset + extent.length // 2)
    done = scrub(store, code=1)
    assert "quarantined now: segment 2" in done.stdout
    assert f"byte {extent.offset} of {store}/region.kv (block " in done.stdout
    assert "1 finding\n" in done.stdout
    assert [each.id for each in describe(store).segments if each.quarantined] == [2]
    found = as_json(store, code=1)
    assert found["quarantined"] == []
    assert [each["what"] for each in found["findings"]] == [
        "it is quarantined: damage was found before"
    ]
    with open_store(store) as opened:
        assert opened.lookup(A) == 512
        check_everywhere(opened, KV(PLAIN), opened.resume(B), B)


def test_padding_is_reported_and_kept(store: Path) -> None:
    extent = extent_of(store, 2, 1)
    with (store / "region.kv").open("r+b") as file:
        file.seek(extent.end - 1)
        file.write(b"\x01")
    found = as_json(store, code=1)
    assert [each["kind"] for each in found["findings"]] == ["padding"]
    assert found["quarantined"] == []
    with open_store(store) as opened:
        check_everywhere(opened, KV(PLAIN), opened.resume(A), A)


def test_a_damaged_copy_of_the_superblock_is_repaired_and_said(store: Path) -> None:
    damage(store, 100)
    found = as_json(store, code=1)
    assert [each["kind"] for each in found["findings"]] == ["superblock"]
    assert found["findings"][0]["what"].endswith("repaired")
    assert verify(store).ok
    assert as_json(store)["ok"]


def test_an_open_store_is_refused_and_its_holder_is_named(store: Path) -> None:
    with open_store(store):
        done = scrub(store, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith("kvtier: ")
    assert "open for writing in process" in done.stderr


@pytest.mark.parametrize("rate", ["0", "fast", "-1MiB"])
def test_a_rate_that_cannot_be(store: Path, rate: str) -> None:
    assert "rate" in scrub(store, f"--rate={rate}", code=2).stderr


def test_no_store_is_refused_and_none_is_made(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        assert str(path) in scrub(path, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_the_rate_is_kept(store: Path) -> None:
    begun = time.monotonic()
    found = as_json(store, "--rate", "1MiB")
    assert time.monotonic() - begun >= (found["bytes_read"] - (1 << 20)) / (1 << 20)


def test_it_loads_no_torch(store: Path) -> None:
    code = (
        "import sys\n"
        "from kvtier.tools.cli import main\n"
        f"sys.argv = ['kvtier', 'scrub', {str(store)!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")
