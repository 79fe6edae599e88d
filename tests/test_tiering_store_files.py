"""A store's files: settings that survive, damage that is named, strangers that stay untouched."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvtier.errors import (
    ConfigError,
    FormatError,
    LockedError,
    VersionMismatch,
    WrongStoreError,
)
from kvtier.io.catalog import Catalog
from kvtier.io.region_place import RegionPlace
from kvtier.tiering import store_files
from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tiering.opening import open_files
from kvtier.tiering.stats_file import STATS, read_stats
from kvtier.tiering.store_files import (
    CATALOG,
    COSTS,
    LAYOUT_VERSION,
    LOCK,
    OWN_FILES,
    REGION,
    SETTINGS,
    Settings,
)
from tests.store_cases import KV, PLAIN, open_store, put, some_tokens

ROOT = Path(__file__).parent.parent
STORE = "11111111-2222-3333-4444-555555555555"
OTHER = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
SMALL = Config(region="4MiB", engine="threads")


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(directory)): each.read_bytes()
        for each in sorted(directory.rglob("*"))
        if each.is_file()
    }


@pytest.mark.parametrize("path", [REGION, "/dev/disk/by-id/nvme-eui.0123", "a: b # \u00e9 '\"\n"])
def test_settings_round_trip(tmp_path: Path, path: str) -> None:
    assert not store_files.is_store(tmp_path)
    for size in (4 << 20, 2**62):
        settings = Settings(STORE, (RegionPlace(path, size),))
        store_files.write_settings(tmp_path, settings)
        assert store_files.read_settings(tmp_path) == settings
    assert store_files.is_store(tmp_path)
    assert os.listdir(tmp_path) == [SETTINGS]
    assert stat.S_IMODE((tmp_path / SETTINGS).stat().st_mode) == 0o600


def test_settings_are_readable_text(tmp_path: Path) -> None:
    store_files.write_settings(tmp_path, Settings(STORE, (RegionPlace(REGION, 4096),)))
    assert (tmp_path / SETTINGS).read_text() == (
        f"layout_version: 1\nstore_uuid: {STORE}\nregion:\n  path: region.kv\n  bytes: 4096\n"
    )


def test_region_path_is_relative_to_the_store_or_absolute(tmp_path: Path) -> None:
    settings = Settings(STORE, (RegionPlace(REGION, 1), RegionPlace("/dev/x", 2)))
    assert settings.places(tmp_path) == [
        RegionPlace(str(tmp_path / REGION), 1),
        RegionPlace("/dev/x", 2),
    ]
    assert settings.region_bytes == 3


GOOD = f"layout_version: 1\nstore_uuid: {STORE}\nregion: {{path: region.kv, bytes: 4096}}\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 200,
        b"\xff\xfe\x00garbage",
        b"layout_version: 1\n",
        b"- a\n- list\n",
        b"just text",
        b"{unclosed: [",
        b"[" * 600,
        b"a: *missing\n",
        b"!!python/object/apply:os.system ['true']\n",
        GOOD[:40].encode(),
        GOOD.replace(STORE, "1111").encode(),
        GOOD.replace(STORE, STORE[:-1]).encode(),
        GOOD.replace(STORE, "null").encode(),
        GOOD.replace("4096", "many").encode(),
        GOOD.replace("4096", "-4096").encode(),
        GOOD.replace("4096", "4096.5").encode(),
        GOOD.replace("4096", ".inf").encode(),
        GOOD.replace("4096", "true").encode(),
        GOOD.replace("region.kv", "null").encode(),
        GOOD.replace("region.kv", "[a]").encode(),
        GOOD.replace("layout_version: 1", "layout_version: one").encode(),
        GOOD.replace("layout_version: 1", "layout_version: 1.5").encode(),
        GOOD.replace("layout_version: 1", "layout_version: true").encode(),
        GOOD.replace("{path", "5 #{path").encode(),
    ],
    ids=lambda data: repr(data)[2:42],
)
def test_damaged_settings_are_a_format_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / SETTINGS).write_bytes(data)
    with pytest.raises(FormatError, match=SETTINGS):
        store_files.read_settings(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_any_flipped_byte_is_read_or_named(tmp_path: Path, seed: int) -> None:
    store_files.write_settings(tmp_path, Settings(STORE, (RegionPlace(REGION, 4096),)))
    text = (tmp_path / SETTINGS).read_bytes()
    for at in range(len(text)):
        damaged = bytearray(text)
        damaged[at] ^= (1, 0x20, 0x80)[seed]
        (tmp_path / SETTINGS).write_bytes(damaged)
        try:
            settings = store_files.read_settings(tmp_path)
        except FormatError:
            continue
        for each in settings.regions:
            assert isinstance(each.nbytes, int)
            assert isinstance(each.path, str)


@pytest.mark.parametrize("version", [LAYOUT_VERSION + 1, 0, 10**9])
def test_another_layout_version_is_named_before_the_rest_is_read(
    tmp_path: Path, version: int
) -> None:
    (tmp_path / SETTINGS).write_text(f"layout_version: {version}\nsomething: new\n")
    with pytest.raises(VersionMismatch, match=f"version {version};"):
        store_files.read_settings(tmp_path)


def test_open_refuses_a_newer_store_and_changes_nothing(tmp_path: Path) -> None:
    open_files(tmp_path, SMALL).close()
    data = yaml.safe_load((tmp_path / SETTINGS).read_text())
    data["layout_version"] = LAYOUT_VERSION + 1
    (tmp_path / SETTINGS).write_text(yaml.safe_dump(data))
    (tmp_path / LOCK).unlink()
    before = snapshot(tmp_path)
    with pytest.raises(VersionMismatch):
        open_files(tmp_path, SMALL)
    assert {name: data for name, data in snapshot(tmp_path).items() if name != LOCK} == before


def test_no_store_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=SETTINGS):
        store_files.read_settings(tmp_path)


@pytest.mark.parametrize("foreign", ["notes.txt", "photos/cat.jpg", ".hidden", "store.yml"])
def test_foreign_directory_is_refused_and_untouched(tmp_path: Path, foreign: str) -> None:
    (tmp_path / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / foreign).write_text("mine")
    # Even files that have our names are not ours in a directory of someone else.
    (tmp_path / REGION).write_text("mine too")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="not a kvtier store"):
        open_files(tmp_path, SMALL)
    assert snapshot(tmp_path) == before


def test_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        open_files(path, SMALL)
    assert path.read_text() == "mine"


def test_directory_is_private(tmp_path: Path) -> None:
    open_files(tmp_path / "a" / "store", SMALL).close()
    assert stat.S_IMODE((tmp_path / "a" / "store").stat().st_mode) == 0o700


def test_what_a_cut_creation_left_is_cleared(tmp_path: Path) -> None:
    for name in (f"{CATALOG}-wal", REGION, f"{SETTINGS}.new", LOCK):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / CATALOG).touch()
    files = open_files(tmp_path, SMALL)
    files.close()
    assert set(os.listdir(tmp_path)) == {SETTINGS, CATALOG, REGION, LOCK}


def test_what_a_used_store_leaves_is_known_as_its_own(tmp_path: Path) -> None:
    """What is not would keep a rebuild, or the next demo, from the directory."""
    with open_store(tmp_path / "kv") as store:
        put(store, KV(PLAIN), "a", some_tokens(600, 1))
        store.costs.note_pass(600, 0, 0.1)
    left = set(os.listdir(tmp_path / "kv"))
    assert COSTS in left
    assert left <= OWN_FILES | {SETTINGS}


def test_a_catalog_that_cannot_be_read_is_not_cleared(tmp_path: Path) -> None:
    """It may be all that is left of a store."""
    (tmp_path / CATALOG).write_bytes(b"half")
    with pytest.raises(FormatError, match="not a kvtier catalog"):
        open_files(tmp_path, SMALL)
    assert (tmp_path / CATALOG).read_bytes() == b"half"


def test_creation_in_progress_elsewhere_is_not_cleared(tmp_path: Path) -> None:
    """Another process holds the lock and has not written its settings yet."""
    with store_files.lock(tmp_path):
        (tmp_path / REGION).write_bytes(b"theirs")
        (tmp_path / CATALOG).write_bytes(b"theirs")
        code = (
            "from pathlib import Path\n"
            "from kvtier.errors import LockedError\n"
            "from kvtier.tiering.config import Config\n"
            "from kvtier.tiering.opening import open_files\n"
            "try:\n"
            f"    open_files(Path({str(tmp_path)!r}), Config(region='4MiB', engine='threads'))\n"
            "except LockedError:\n"
            "    print('locked')\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert result.stdout == "locked\n"
        with pytest.raises(LockedError):
            open_files(tmp_path, SMALL)
        assert (tmp_path / REGION).read_bytes() == b"theirs"
        assert (tmp_path / CATALOG).read_bytes() == b"theirs"


def test_catalog_of_another_store_is_refused(tmp_path: Path) -> None:
    Catalog.create(tmp_path / CATALOG, OTHER).close()
    with (
        pytest.raises(WrongStoreError, match=OTHER),
        store_files.open_catalog(tmp_path, Settings(STORE, (RegionPlace(REGION, 4096),))),
    ):
        pytest.fail("a catalog of another store was opened")


@pytest.mark.parametrize("name", [f"{SETTINGS}.new", COSTS, f"{COSTS}.new", STATS, f"{STATS}.new"])
def test_a_pipe_under_the_name_of_a_small_file_stops_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "store"
    with open_store(path) as store:
        put(store, KV(PLAIN), "a", some_tokens(300, 1))
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    assert describe(path).names
    assert not isinstance(read_stats(path, describe(path).uuid), str) or name == STATS
    with open_store(path) as store:
        store.costs.note_pass(100, 0, 1.0)
        store.stats()
    assert (path / COSTS).is_file()
    assert (path / STATS).is_file()
    if name != f"{SETTINGS}.new":
        assert not (path / name).is_fifo()


def test_a_pipe_in_place_of_the_settings_is_damage(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SETTINGS)
    with pytest.raises(FormatError, match=r"store\.yaml is damaged: it is not a regular file"):
        store_files.read_settings(tmp_path)
    os.mkfifo(tmp_path / f"{SETTINGS}.new")
    settings = Settings(STORE, (RegionPlace(REGION, 4096),))
    store_files.write_settings(tmp_path, settings)
    assert store_files.read_settings(tmp_path) == settings
