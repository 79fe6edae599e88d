"""Where an export may be written: over an older export, and over nothing else."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from kvtier.errors import ConfigError, DeviceError
from kvtier.tiering import exchange_format
from kvtier.tiering.config import Config
from kvtier.tiering.exchange import export_name
from kvtier.tiering.exchange_format import ExportFile, ExportWriter
from kvtier.tiering.store import Store
from tests.store_cases import KV, PLAIN, open_store, put, some_tokens


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store of "a", whose region lies beside its directory."""
    region = tmp_path / "region"
    region.touch()
    os.truncate(region, 4 << 20)
    with open_store(tmp_path / "store", config=Config(str(region), hot="4MiB")) as store:
        put(store, KV(PLAIN), "a", some_tokens(100, 1))
        yield store


@pytest.mark.parametrize("name", ["store.yaml", "catalog.sqlite", "lock", "new"])
def test_nothing_in_a_store(name: str, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    with pytest.raises(ConfigError, match="is a kvtier store: name a file in another directory"):
        export_name(store, "a", folder / name)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before


def test_nothing_in_another_store_or_where_one_stands(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(tmp_path / "other", config=Config("4MiB", hot="4MiB")).close()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    monkeypatch.chdir(tmp_path / "other")
    for path in (tmp_path / "other" / "a.kv", tmp_path / "link" / "a.kv", Path("a.kv")):
        with pytest.raises(ConfigError, match="is a kvtier store"):
            export_name(store, "a", path)


def test_not_the_region(store: Store, tmp_path: Path) -> None:
    os.link(tmp_path / "region", tmp_path / "same")
    before = (tmp_path / "region").read_bytes()
    for name in ("region", "same"):
        with pytest.raises(ConfigError, match="is this store's region"):
            export_name(store, "a", tmp_path / name)
    assert (tmp_path / "region").read_bytes() == before
    assert os.path.samefile(tmp_path / "region", tmp_path / "same")


def test_no_file_of_others(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    safetensors.torch.save_file({"keys.0": torch.zeros(2, 40, 8)}, path, {"format": "pt"})
    for data in (path.read_bytes(), b"", b"a letter", b"\xff" * 100, b"x" * 10_000):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"a\.kv exists and is no kvtier export: name"):
            export_name(store, "a", path)
        assert path.read_bytes() == data
    os.symlink(path, tmp_path / "link")
    with pytest.raises(ConfigError, match="no regular file"):
        export_name(store, "a", tmp_path / "link")
    path.unlink()
    export_name(store, "a", path)


def test_an_export_that_is_not_whole_is_replaced(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    export_name(store, "a", path)
    os.truncate(path, path.stat().st_size - 1)
    export_name(store, "a", path)
    with ExportFile.open(str(path)) as file:
        file.check()


def test_a_file_that_comes_there_meanwhile(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, genuine = tmp_path / "out" / "a.kv", ExportWriter.finish
    path.parent.mkdir()

    def finish(self: ExportWriter) -> None:
        genuine(self)
        path.write_text("of somebody else")

    monkeypatch.setattr(exchange_format.ExportWriter, "finish", finish)
    with pytest.raises(ConfigError, match="is no kvtier export"):
        export_name(store, "a", path)
    assert path.read_text() == "of somebody else"
    assert [each.name for each in path.parent.iterdir()] == ["a.kv"]


def test_while_it_is_written_it_is_hidden_and_private(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    seen: list[tuple[str, int]] = []
    folder.mkdir()

    def finish(self: ExportWriter) -> None:
        seen.extend((each.name, stat.S_IMODE(each.stat().st_mode)) for each in folder.iterdir())
        raise DeviceError("the drive is gone")

    monkeypatch.setattr(exchange_format.ExportWriter, "finish", finish)
    for name in ("a.kv", "a.kv", "\u00e9" * 120):
        with pytest.raises(DeviceError, match="the drive is gone"):
            export_name(store, "a", folder / name)
    assert list(folder.iterdir()) == []
    names = [name for name, _ in seen]
    assert len(set(names)) == 3
    assert names[0].startswith(".a.kv.kvtier-")
    assert {mode for _, mode in seen} == {0o600}
