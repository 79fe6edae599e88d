"""Which drive of a store is which, and what is refused in the place of one."""

import os
import shutil
from pathlib import Path

import pytest

from kvtier.errors import (
    BadMagic,
    ConfigError,
    DeviceError,
    FormatError,
    WrongStoreError,
)
from kvtier.tiering.config import Config
from kvtier.tiering.rebuilder import rebuild
from kvtier.tiering.store_files import read_settings
from kvtier.tiering.verifier import verify
from tests.drive_cases import (
    DRIVES,
    LONG,
    OF_M,
    bring_back,
    make_drives,
    make_long,
    make_store,
    take_away,
    tokens_there,
)
from tests.store_cases import (
    MIB,
    check_bytes,
    open_store,
)


def test_drives_that_changed_their_places_are_known(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    take_away(tmp_path, 0)
    os.rename(tmp_path / "drive3", tmp_path / "drive0")
    os.rename(tmp_path / "away0", tmp_path / "drive3")
    with open_store(path) as store:
        assert len(store._files.region.notes) == 2
        assert "drive0 is region 3 of the store, not 0" in store._files.region.notes[0]
        sequence = store.resume(LONG)
        check_bytes(store, OF_M, sequence, LONG)
        store.release(sequence)
    assert verify(path).ok
    os.unlink(tmp_path / "drive3")
    with open_store(path) as store:
        assert tokens_there(store, LONG) == 3 * len(LONG) // 4, "region 0 is the one that is gone"
        assert store.stats().segments_unavailable == 4


def test_a_copy_and_foreign_drives_are_refused(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    take_away(tmp_path, 1)
    shutil.copy(tmp_path / "drive2", tmp_path / "drive1")
    with pytest.raises(FormatError, match=r"both region 2 of store .*: one of them is a copy"):
        open_store(path)
    os.unlink(tmp_path / "drive1")
    other = tmp_path / "other"
    other.mkdir()
    make_store(other)
    shutil.copy(other / "drive1", tmp_path / "drive1")
    with pytest.raises(WrongStoreError):
        open_store(path)
    (tmp_path / "drive1").write_bytes(bytes(4 * MIB))
    with pytest.raises(BadMagic, match=f"^{tmp_path / 'drive1'}: no kvtier superblock"):
        open_store(path)
    assert not (tmp_path / "drive1").read_bytes().strip(b"\0")
    os.unlink(tmp_path / "drive1")
    bring_back(tmp_path, 1)
    os.truncate(tmp_path / "drive1", 3 * MIB)
    with pytest.raises(ConfigError, match="it was truncated"):
        open_store(path)
    os.truncate(tmp_path / "drive1", 100)
    with pytest.raises(ConfigError, match=r"drive1 has 100 bytes: .* was the file truncated\?"):
        open_store(path)


def test_a_drive_of_a_larger_store_is_not_taken_for_a_store_of_one(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    text = (path / "store.yaml").read_text()
    first = text.index("- path"), text.index("- path", text.index("- path") + 1)
    one = "region:\n  " + text[first[0] + 2 : first[1]]
    (path / "store.yaml").write_text(text[: text.index("regions:")] + one)
    assert len(read_settings(path).regions) == 1
    with pytest.raises(FormatError, match="one of 4 regions"):
        open_store(path)


def test_regions_that_are_asked_for_must_be_those_of_the_store(tmp_path: Path) -> None:
    path = make_store(tmp_path)
    paths = [str(tmp_path / f"drive{number}") for number in range(DRIVES)]
    open_store(path, config=Config(list(reversed(paths)), hot="4MiB")).close()
    for wrong in (paths[:3], [*paths, str(tmp_path / "x")], paths[0]):
        with pytest.raises(ConfigError, match="this store's region is"):
            open_store(path, config=Config(wrong, hot="4MiB"))


def test_nothing_is_written_unless_every_drive_may_be(tmp_path: Path) -> None:
    paths = make_drives(tmp_path)
    with open(paths[3], "r+b") as file:
        file.write(os.urandom(MIB))
    with pytest.raises(DeviceError, match="carries unknown data"):
        open_store(tmp_path / "kv", config=Config(paths, hot="4MiB"))
    for path in paths[:3]:
        assert not Path(path).read_bytes().strip(b"\0")


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ([], "1 to 64 regions: got 0"),
        (["/a", "4GiB"], "a list of paths"),
        (["/a", 5], "a list of paths"),
        (["/a", "/b", "/a"], "names /a twice"),
        (["/a"] * 65, "1 to 64 regions: got 65"),
    ],
)
def test_lists_that_name_no_drives(region: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(region)


def another_name(path: str, how: str) -> str:
    """Of the drive at `path`, in the same folder."""
    folder = os.path.dirname(path)
    other = os.path.join(folder, how)
    if how == "symlink":
        os.symlink(path, other)
    elif how == "hardlink":
        os.link(path, other)
    else:
        other = f"{folder}/./{os.path.basename(path)}"
    return other


NAMES = ("symlink", "hardlink", "dot")


@pytest.mark.parametrize("how", NAMES)
def test_one_drive_by_two_names(tmp_path: Path, how: str) -> None:
    (path,) = make_drives(tmp_path, (8 * MIB,))
    other = another_name(path, how)
    message = f"{path} and {other} are the same drive: name every drive once"
    with pytest.raises(ConfigError, match=message):
        open_store(tmp_path / "kv", config=Config([path, other], hot="4MiB"))


@pytest.mark.parametrize("how", NAMES[:2])
def test_a_store_whose_settings_name_one_drive_by_two_names(tmp_path: Path, how: str) -> None:
    path = make_store(tmp_path)
    first, second = str(tmp_path / "drive0"), str(tmp_path / "drive1")
    other = another_name(first, how)
    settings = path / "store.yaml"
    settings.write_text(settings.read_text().replace(second, other))
    (path / "catalog.sqlite").rename(tmp_path / "catalog.sqlite")
    with pytest.raises(ConfigError, match=f"{first} and {other} are the same drive"):
        rebuild(path)
    (tmp_path / "catalog.sqlite").rename(path / "catalog.sqlite")
    with pytest.raises(ConfigError, match=f"{first} and {other} are the same drive"):
        open_store(path)
    settings.write_text(settings.read_text().replace(other, first))
    with pytest.raises(ConfigError, match=f"{first} is named twice: name every drive once"):
        open_store(path)


def test_a_drive_that_was_made_a_link_to_another(tmp_path: Path) -> None:
    path = make_store(tmp_path)
    os.unlink(tmp_path / "drive1")
    os.symlink(tmp_path / "drive0", tmp_path / "drive1")
    with pytest.raises(ConfigError, match="are the same drive: name every drive once"):
        open_store(path)
