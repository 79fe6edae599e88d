"""The command kvtier rebuild: what it replaces, what it refuses, what a cut leaves behind."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, DeviceError, FormatError, LockedError
from kvtier.io.catalog import Catalog
from kvtier.tiering import rebuilder, store_files
from kvtier.tiering.catalog_rows import extents_of
from kvtier.tiering.config import Config
from kvtier.tiering.rebuilder import rebuild
from kvtier.tiering.verifier import verify
from tests.rebuild_cases import lose, poke, rows
from tests.store_cases import KV, PLAIN, check_bytes, open_store, put, some_tokens

ROOT = Path(__file__).parent.parent
A, B = some_tokens(700, 1), some_tokens(900, 2)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A closed store of "a" (Segments 1 and 2) and "b" (3 and 4)."""
    with open_store(tmp_path / "store", config=Config("4MiB", hot="4MiB")) as store:
        put(store, KV(PLAIN), "a", A)
        put(store, KV(PLAIN), "b", B)
    return tmp_path / "store"


def run(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier.tools.cli", "rebuild", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def check(path: Path) -> None:
    assert verify(path).findings == []
    with open_store(path) as store:
        for tokens in (A, B):
            sequence = store.resume(tokens)
            check_bytes(store, KV(PLAIN), sequence, tokens)
            store.release(sequence)
        assert [(each.name, each.held_until) for each in store.names()] == [("a", 0), ("b", 0)]


def kept(path: Path) -> list[str]:
    found = [each.name for each in path.glob("catalog.sqlite.*")]
    return sorted(each for each in found if not each.endswith(("-wal", "-shm")))


def test_a_lost_catalog(store: Path) -> None:
    with open_store(store) as opened:
        opened.hold("a")
    lose(store)
    done = run(store)
    assert "restored 4 of 4 segments, 2 names, 1 fingerprint\n" in done.stdout
    assert "s per GiB" in done.stdout
    assert "holds are not on the region" in done.stdout
    assert kept(store) == []
    check(store)


def test_json_and_what_did_not_come_back(store: Path) -> None:
    poke(store, extents_of(rows(store)[0])[1].end - 8192, b"\xa5" * 8)
    lose(store)
    found: dict[str, Any] = json.loads(run(store, "--json", code=1).stdout)
    assert found["ok"] is False
    assert (found["segments_found"], found["segments_restored"]) == (4, 2)
    assert sum(found["segments_dropped"].values()) == 2
    assert found["names_restored"] == 1
    assert found["bytes_read"] > 2 << 20
    assert found["seconds_per_gib"] == pytest.approx(
        found["seconds"] * (1 << 30) / found["bytes_read"]
    )


def test_a_readable_catalog_is_replaced_by_force_alone(store: Path) -> None:
    done = run(store, code=2)
    assert "names 4 segments; rebuild replaces it" in done.stderr
    assert kept(store) == []
    done = run(store, "--force")
    (old,) = kept(store)
    assert old in done.stdout
    with Catalog.open(store / old) as catalog:
        assert len(catalog.segments()) == 4
    check(store)
    run(store, "--force")
    assert len(kept(store)) == 2


def test_a_damaged_catalog_is_kept_with_its_log(store: Path) -> None:
    (store / "catalog.sqlite").write_bytes(b"\xa5" * 8192)
    (store / "catalog.sqlite-wal").write_bytes(b"old log")
    report = rebuild(store)
    assert report.kept_catalog is not None
    assert Path(report.kept_catalog).read_bytes() == b"\xa5" * 8192
    assert Path(f"{report.kept_catalog}-wal").read_bytes() == b"old log"
    check(store)


def test_a_log_without_its_catalog_is_not_taken_for_the_new_ones(store: Path) -> None:
    lose(store)
    (store / "catalog.sqlite-wal").write_bytes(b"old log")
    report = rebuild(store)
    assert Path(f"{report.kept_catalog}-wal").read_bytes() == b"old log"
    check(store)


def test_a_catalog_of_another_version_is_not_lost(store: Path) -> None:
    connection = sqlite3.connect(store / "catalog.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="can be read and has format version 99"):
        rebuild(store)
    rebuild(store, force=True)
    check(store)


@pytest.mark.parametrize("settings", [None, b"region: [", b"layout_version: 1\n"])
def test_settings_are_lost_too(store: Path, settings: bytes | None) -> None:
    lose(store)
    (store / "store.yaml").unlink()
    if settings is not None:
        (store / "store.yaml").write_bytes(settings)
    assert "name its region: --region PATH" in run(store, code=2).stderr
    run(store, "--region", store / "region.kv")
    assert store_files.read_settings(store).regions[0].path == "region.kv"
    check(store)


def test_the_whole_directory_is_lost(store: Path, tmp_path: Path) -> None:
    (store / "region.kv").rename(tmp_path / "drive")
    target = tmp_path / "new" / "store"
    run(target, "--region", tmp_path / "drive")
    assert target.stat().st_mode & 0o777 == 0o700
    assert (target / "catalog.sqlite").stat().st_mode & 0o777 == 0o600
    check(target)


def test_what_is_refused(store: Path, tmp_path: Path) -> None:
    assert "not a kvtier store" in run(tmp_path / "nothing", code=2).stderr
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    done = run(tmp_path / "other", "--region", store / "region.kv", code=2)
    assert f"lies in the store {store}" in done.stderr
    (tmp_path / "drive").write_bytes((store / "region.kv").read_bytes())
    done = run(tmp_path / "other", "--region", tmp_path / "drive", code=2)
    assert "'letter.txt'" in done.stderr
    (tmp_path / "plain").write_bytes(bytes(4 << 20))
    with pytest.raises(ConfigError, match="this store's region is"):
        rebuild(store, regions=[str(tmp_path / "plain")])
    lose(store)
    with pytest.raises(FormatError, match="superblock"):
        rebuild(tmp_path / "new", regions=[str(tmp_path / "plain")])
    (store / "store.yaml").write_text("layout_version: 2\n")
    with pytest.raises(FormatError, match="version 2"):
        rebuild(store, regions=[str(store / "region.kv")])


def test_a_region_that_is_gone(store: Path) -> None:
    lose(store)
    (store / "region.kv").rename(store / "elsewhere")
    with pytest.raises(DeviceError, match="does not exist"):
        rebuild(store)
    os.truncate(store / "elsewhere", 3 << 20)
    (store / "elsewhere").rename(store / "region.kv")
    with pytest.raises(ConfigError, match="truncated"):
        rebuild(store)
    assert kept(store) == []


def test_a_store_in_use(store: Path) -> None:
    with open_store(store), pytest.raises(LockedError):
        rebuild(store, force=True)


def test_no_new_store_where_one_was(store: Path) -> None:
    """What rebuild keeps must not be taken for the leftovers of a creation, which are deleted."""
    rebuild(store, force=True)
    lose_but_kept = [store / "catalog.sqlite", store / "store.yaml"]
    for each in lose_but_kept:
        each.unlink()
    before = (store / "region.kv").read_bytes()
    with pytest.raises(ConfigError, match="not a kvtier store and not empty"):
        open_store(store)
    assert (store / "region.kv").read_bytes() == before
    rebuild(store, regions=[str(store / "region.kv")])
    check(store)


class Cut(BaseException):
    """The process ends here."""


STEPS = (
    (Path, "rename"),
    (os, "rename"),
    (rebuilder, "sync_directory"),
    (Catalog, "add_segment"),
    (Catalog, "set_name"),
    (Catalog, "condemn"),
    (Catalog, "close"),
    (rebuilder, "load_allocator"),
    (store_files, "write_settings"),
)
"""Everything that a rebuild changes is one of these calls, or lies between two of them."""


def cut_before(step: int, patch: pytest.MonkeyPatch) -> list[str]:
    """The process ends before the n-th of these calls. Returns the calls, as they come."""
    calls: list[str] = []

    def watched(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == step:
                raise Cut
            return call(*arguments, **options)

        return counted

    for target, name in STEPS:
        patch.setattr(target, name, watched(getattr(target, name), name))
    return calls


@pytest.mark.parametrize("lost", [(), ("catalog.sqlite", "store.yaml")])
def test_cut_anywhere(store: Path, tmp_path: Path, lost: tuple[str, ...]) -> None:
    cut: list[str] = []
    for step in range(1, 60):
        path = tmp_path / f"copy{step}"
        shutil.copytree(store, path)
        for each in lost:
            (path / each).unlink()
        regions = [str(path / "region.kv")] if "store.yaml" in lost else []
        with pytest.MonkeyPatch.context() as patch:
            calls = cut_before(step, patch)
            with contextlib.suppress(Cut):
                rebuild(path, regions=regions, force=True)
        is_whole = (path / "catalog.sqlite").exists() and (path / "store.yaml").exists()
        if not is_whole:
            with pytest.raises((DeviceError, ConfigError, FormatError)):
                open_store(path, config=Config(hot="4MiB"))
            rebuild(path, regions=regions, force=True)
        check(path)
        assert not [each for each in kept(path) if "rebuilt" in each]
        shutil.rmtree(path)
        if len(calls) < step:
            break
        cut.append(calls[step - 1])
    assert {"rename", "add_segment", "condemn", "load_allocator"} <= set(cut)
    assert len(cut) > 12


def test_torch_is_not_needed(store: Path) -> None:
    lose(store)
    code = (
        "import sys; from pathlib import Path; from kvtier.tools.rebuild import rebuild\n"
        f"print(rebuild(Path({str(store)!r}), [], force=False).ok, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]
