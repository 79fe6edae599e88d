"""Files and devices that a store must refuse, and those that it must open: one test each."""

import hashlib
import logging
import os
import sqlite3
import struct
import subprocess
from pathlib import Path

import pytest
import xxhash

from kvtier.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    ForeignDataError,
    FormatError,
    VersionMismatch,
    WrongStoreError,
)
from kvtier.io import syscalls
from kvtier.io.catalog import CATALOG_VERSION
from kvtier.io.superblock import FORMAT_VERSION, copy_offsets
from kvtier.tiering.config import Config
from kvtier.tiering.store_files import LAYOUT_VERSION, read_settings
from kvtier.tiering.verifier import verify
from tests.conftest import LoopMaker
from tests.region_cases import make_file_system, patch, peek
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    Shuffled,
    check_bytes,
    check_everywhere,
    check_settled,
    open_store,
    put,
    some_tokens,
)
from tests.store_worker import in_a_child

OF_M = KV(PLAIN)
TOKENS = some_tokens(1100, 1)
NOBODY = 65534


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The directory of a closed store of 4 MiB that holds TOKENS."""
    path = tmp_path / "store"
    with open_store(path, PLAIN, Config("4MiB", hot=MIB)) as store:
        put(store, OF_M, "n", TOKENS)
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_whole(path: Path) -> None:
    with open_store(path, PLAIN, Config(hot=MIB)) as store:
        check_bytes(store, OF_M, store.resume(TOKENS), TOKENS)


# ---- what is not a store --------------------------------------------------------------------


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is a file: a store is a directory"):
        open_store(path)
    with pytest.raises(DeviceError, match="Not a directory"):
        open_store(path / "deeper")
    assert path.read_text() == "mine"


def test_a_directory_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"not empty \(found 'thesis.tex'\)"):
        open_store(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_where_the_region_should_be(tmp_path: Path) -> None:
    (tmp_path / "region").mkdir()
    with pytest.raises(DeviceError, match="is a directory: a region needs a block device"):
        open_store(tmp_path / "store", PLAIN, Config(str(tmp_path / "region"), hot=MIB))


def test_a_character_device_as_region(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="is a character device"):
        open_store(tmp_path / "store", PLAIN, Config("/dev/zero", hot=MIB))


def test_a_region_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: name a block device"):
        open_store(tmp_path / "store", PLAIN, Config(str(tmp_path / "gone"), hot=MIB))


def test_a_region_larger_than_the_disk(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"is full: \d+ bytes needed, \d+ bytes free"):
        open_store(tmp_path / "store", PLAIN, Config("4000TiB", hot=MIB))
    assert not (tmp_path / "store" / "region.kv").exists()


def test_a_file_of_somebody_else_as_region(tmp_path: Path) -> None:
    path = tmp_path / "photo.raw"
    path.write_bytes(b"\x89RAW" * (MIB // 4) + bytes(3 * MIB))
    before = digest(path)
    with pytest.raises(ForeignDataError, match="unknown data"):
        open_store(tmp_path / "store", PLAIN, Config(str(path), hot=MIB))
    assert digest(path) == before
    with open_store(tmp_path / "store", PLAIN, Config(str(path), hot=MIB, force=True)) as store:
        put(store, OF_M, "n", TOKENS)


# ---- what does not fit together -------------------------------------------------------------


def test_a_region_file_that_is_smaller_than_its_settings(stored: Path) -> None:
    os.truncate(stored / "region.kv", 3 * MIB)
    with pytest.raises(ConfigError, match=rf"has {3 * MIB} bytes, but .* {4 * MIB} bytes"):
        open_store(stored)


def test_another_size_or_region_than_the_store_has(stored: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{4 * MIB} bytes, {8 * MIB} were asked for"):
        open_store(stored, PLAIN, Config("8MiB", hot=MIB))
    with pytest.raises(ConfigError, match=r"region is .*region\.kv, not "):
        open_store(stored, PLAIN, Config(str(tmp_path / "other"), hot=MIB))
    check_whole(stored)


def test_the_region_of_another_store(stored: Path, tmp_path: Path) -> None:
    """A008."""
    other = tmp_path / "other"
    open_store(other, PLAIN, Config("4MiB", hot=MIB)).close()
    uuids = read_settings(stored).store_uuid, read_settings(other).store_uuid
    mine, theirs = stored / "region.kv", other / "region.kv"
    mine.rename(tmp_path / "aside")
    theirs.rename(mine)
    before = digest(mine)
    with pytest.raises(WrongStoreError) as found:
        open_store(stored)
    assert all(each in str(found.value) for each in uuids)
    assert digest(mine) == before
    (tmp_path / "aside").replace(mine)
    check_whole(stored)


def test_a_region_in_use_by_another_store_is_not_formatted(stored: Path, tmp_path: Path) -> None:
    path = stored / "region.kv"
    before = digest(path)
    with pytest.raises(ForeignDataError, match=read_settings(stored).store_uuid):
        open_store(tmp_path / "new", PLAIN, Config(str(path), hot=MIB))
    assert digest(path) == before


def test_the_catalog_of_another_store(stored: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    open_store(other, PLAIN, Config("4MiB", hot=MIB)).close()
    (other / "catalog.sqlite").replace(stored / "catalog.sqlite")
    with pytest.raises(WrongStoreError, match=read_settings(stored).store_uuid):
        open_store(stored)


def test_a_catalog_that_is_missing_or_garbage(stored: Path) -> None:
    path = stored / "catalog.sqlite"
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(FormatError, match="not a kvtier catalog"):
        open_store(stored)
    path.unlink()
    with pytest.raises(DeviceError, match="no catalog"):
        open_store(stored)


@pytest.mark.parametrize("text", ["", "{", "layout_version: 1", "[1, 2]", "\x00\x01"])
def test_settings_that_are_damaged(stored: Path, text: str) -> None:
    (stored / "store.yaml").write_text(text)
    before = digest(stored / "region.kv")
    with pytest.raises(FormatError, match=r"store\.yaml is damaged"):
        open_store(stored)
    assert digest(stored / "region.kv") == before


# ---- versions: checked before anything is written (A072) ------------------------------------


def test_a_newer_superblock_is_refused_and_unchanged(stored: Path) -> None:
    path = stored / "region.kv"
    for offset in copy_offsets(4 * MIB):
        block = bytearray(peek(str(path), offset, 4096))
        struct.pack_into("<I", block, 8, FORMAT_VERSION + 1)
        struct.pack_into("<Q", block, 4088, xxhash.xxh3_64_intdigest(bytes(block[:4088])))
        patch(str(path), offset, bytes(block))
    before = digest(path)
    with pytest.raises(VersionMismatch, match=f"version {FORMAT_VERSION + 1}"):
        open_store(stored)
    assert digest(path) == before
    assert {each.kind for each in verify(stored).findings} == {"superblock"}


def test_a_newer_catalog_is_refused_and_the_region_unchanged(stored: Path) -> None:
    connection = sqlite3.connect(stored / "catalog.sqlite")
    connection.execute(f"PRAGMA user_version = {CATALOG_VERSION + 1}")
    connection.close()
    before = digest(stored / "region.kv"), digest(stored / "catalog.sqlite")
    with pytest.raises(VersionMismatch, match=f"version {CATALOG_VERSION + 1}"):
        open_store(stored)
    assert (digest(stored / "region.kv"), digest(stored / "catalog.sqlite")) == before


def test_a_newer_layout_is_refused_and_nothing_changed(stored: Path) -> None:
    settings = stored / "store.yaml"
    text = settings.read_text()
    newer = text.replace(f"layout_version: {LAYOUT_VERSION}", "layout_version: 7")
    settings.write_text(newer)
    names = ("region.kv", "catalog.sqlite")
    before = [digest(stored / each) for each in names]
    with pytest.raises(VersionMismatch, match="version 7"):
        open_store(stored)
    assert [digest(stored / each) for each in names] == before
    assert settings.read_text() == newer
    settings.write_text(text)
    check_whole(stored)


# ---- permissions and engines ----------------------------------------------------------------


def test_no_permission_is_said_with_the_user_and_the_path(stored: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    for each in (stored, *stored.parents):
        if each.is_relative_to("/tmp") and each != Path("/tmp"):
            each.chmod(0o755)

    def use() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with pytest.raises(DeviceError, match=rf"{stored}.*[Pp]ermission denied"):
            open_store(stored)

    assert in_a_child(use) == 0
    check_whole(stored)


def test_a_kernel_without_io_uring_means_threads_and_one_warning(
    stored: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(entries: int, parameters: object) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(syscalls, "io_uring_setup", refused)
    with caplog.at_level(logging.WARNING, "kvtier"), open_store(stored) as store:
        assert store.stats().engine == "threads"
        check_bytes(store, OF_M, store.resume(TOKENS), TOKENS)
    warnings = [each.getMessage() for each in caplog.records if "engine" in each.getMessage()]
    assert len(warnings) == 1
    assert "EPERM" in warnings[0]
    assert "seccomp" in warnings[0]
    with pytest.raises(DeviceError, match=r"io_uring cannot be used.*EPERM"):
        open_store(stored, PLAIN, Config(hot=MIB, engine="io_uring"))


def test_direct_io_can_be_switched_off_and_says_so(stored: Path) -> None:
    with open_store(stored, PLAIN, Config(hot=MIB, direct_io="off")) as store:
        assert not store.stats().direct_io
        assert "caller" in store.stats().direct_io_reason
        check_bytes(store, OF_M, store.resume(TOKENS), TOKENS)


def test_an_error_while_opening_leaves_nothing_open(stored: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConfigError):
            open_store(stored, PLAIN, Config(hot=1))
        with pytest.raises(ConfigError):
            open_store(stored, PLAIN, Config("8MiB", hot=MIB))
    assert sorted(os.listdir("/proc/self/fd")) == before
    check_whole(stored)


# ---- block devices --------------------------------------------------------------------------


@pytest.mark.loop
@pytest.mark.parametrize("block_bytes", [512, 4096])
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_round_trip_on_a_block_device(
    tmp_path: Path, loop_device: LoopMaker, block_bytes: int, engine: str
) -> None:
    """A058."""
    device = loop_device(16 * MIB, block_bytes)
    path = tmp_path / "store"
    config = Config(device, hot=MIB, engine="io_uring" if engine == "io_uring" else "threads")
    with open_store(path, PLAIN, config, Shuffled(1)) as store:
        assert store.stats().engine == engine
        assert store.stats().direct_io
        put(store, OF_M, "n", TOKENS)
        check_settled(store, path)
    with open_store(path, PLAIN, Config(hot=MIB)) as store:
        assert store.stats().region_path == device
        sequence = store.resume([*TOKENS, 1])
        check_bytes(store, OF_M, sequence, TOKENS)
        check_everywhere(store, OF_M, sequence, TOKENS)
        store.release(sequence)
        check_settled(store, path)


@pytest.mark.loop
def test_a_device_with_a_file_system_is_refused_unless_forced(
    tmp_path: Path, loop_device: LoopMaker
) -> None:
    device = loop_device(16 * MIB, 512)
    make_file_system(device)
    before = digest(Path(device))
    with pytest.raises(ForeignDataError, match="ext4"):
        open_store(tmp_path / "store", PLAIN, Config(device, hot=MIB))
    assert digest(Path(device)) == before
    with open_store(tmp_path / "store", PLAIN, Config(device, hot=MIB, force=True)) as store:
        put(store, OF_M, "n", TOKENS)
    check_whole(tmp_path / "store")


@pytest.mark.loop
def test_a_mounted_device_is_refused_even_when_forced(
    tmp_path: Path, loop_device: LoopMaker
) -> None:
    device = loop_device(16 * MIB, 512)
    make_file_system(device)
    mount = tmp_path / "mount"
    mount.mkdir()
    result = subprocess.run(["mount", device, str(mount)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"cannot mount: {result.stderr.strip()}")
    try:
        (mount / "file").write_text("mine")
        for force in (False, True):
            with pytest.raises(ForeignDataError, match=f"in use.*{mount}"):
                open_store(tmp_path / "store", PLAIN, Config(device, hot=MIB, force=force))
        assert (mount / "file").read_text() == "mine"
    finally:
        subprocess.run(["umount", str(mount)], check=True)
