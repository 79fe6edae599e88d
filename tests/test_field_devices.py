"""Field reports about which device it is: two names, other sectors, other users."""

import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, DeviceError, ForeignDataError, LockedError, WrongStoreError
from kvtier.io.foreign import in_use_by
from kvtier.io.rawfile import create_region_file
from kvtier.tiering.config import Config
from kvtier.tiering.store_files import read_settings
from kvtier.tiering.verifier import verify
from tests.conftest import LoopMaker
from tests.region_cases import make_file_system
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    Shuffled,
    check_bytes,
    check_everywhere,
    open_store,
    put,
    some_tokens,
)

OF_M = KV(PLAIN)
TOKENS = some_tokens(1100, 1)


def digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_two_names_of_one_region_are_one_region(
    tmp_path: Path, link: Callable[[str, str], None]
) -> None:
    """A076: another store cannot be put on it by another name, open or closed."""
    region, name = str(tmp_path / "region"), str(tmp_path / "other name")
    create_region_file(region, 8 * MIB)
    link(region, name)
    first, second = tmp_path / "first", tmp_path / "second"
    with open_store(first, PLAIN, Config(region, hot=MIB)) as store:
        put(store, OF_M, "n", TOKENS)
        with pytest.raises((LockedError, ForeignDataError)):
            open_store(second, PLAIN, Config(name, hot=MIB))
        with pytest.raises((LockedError, ForeignDataError)):
            open_store(second, PLAIN, Config(name, hot=MIB, force=True))
    before = digest(region)
    with pytest.raises(ForeignDataError, match=read_settings(first).store_uuid):
        open_store(second, PLAIN, Config(name, hot=MIB))
    assert digest(region) == before
    with open_store(first, PLAIN, Config(hot=MIB)) as store:
        check_bytes(store, OF_M, store.resume(TOKENS), TOKENS)


def test_a_copied_store_directory_is_not_a_second_writer(tmp_path: Path) -> None:
    """A075, A076: both directories point at one region by its absolute path."""
    region = str(tmp_path / "region")
    create_region_file(region, 8 * MIB)
    with open_store(tmp_path / "first", PLAIN, Config(region, hot=MIB)) as store:
        put(store, OF_M, "n", TOKENS)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    with (
        open_store(tmp_path / "first", PLAIN, Config(hot=MIB)),
        pytest.raises(LockedError, match="open for writing already"),
    ):
        open_store(tmp_path / "copy", PLAIN, Config(hot=MIB))


@pytest.mark.loop
def test_two_names_of_one_device_are_one_device(tmp_path: Path, loop_device: LoopMaker) -> None:
    """A076: a link, as below /dev/disk/by-id, and the kernel's name."""
    device = loop_device(8 * MIB, 512)
    link = str(tmp_path / "by-id")
    os.symlink(device, link)
    with open_store(tmp_path / "first", PLAIN, Config(link, hot=MIB)) as store:
        put(store, OF_M, "n", TOKENS)
        with pytest.raises(ForeignDataError, match="in use"):
            open_store(tmp_path / "second", PLAIN, Config(device, hot=MIB, force=True))
    with pytest.raises(ForeignDataError, match=read_settings(tmp_path / "first").store_uuid):
        open_store(tmp_path / "second", PLAIN, Config(device, hot=MIB))
    with open_store(tmp_path / "first", PLAIN, Config(device, hot=MIB)) as store:
        check_bytes(store, OF_M, store.resume(TOKENS), TOKENS)


@pytest.mark.loop
def test_devices_that_swapped_their_names_are_told_apart(
    tmp_path: Path, loop_device: LoopMaker
) -> None:
    """A080: the paths stay and what is behind them changes, as after another boot."""
    devices = [loop_device(8 * MIB, 512) for _ in range(2)]
    paths = [str(tmp_path / each) for each in ("nvme0n1", "nvme1n1")]
    stores = [tmp_path / each for each in ("zero", "one")]
    for device, path, store_path in zip(devices, paths, stores, strict=True):
        os.symlink(device, path)
        with open_store(store_path, PLAIN, Config(path, hot=MIB)) as store:
            put(store, OF_M, "n", TOKENS)
    uuids = [read_settings(each).store_uuid for each in stores]
    before = [digest(each) for each in devices]
    for path, device in zip(paths, reversed(devices), strict=True):
        os.unlink(path)
        os.symlink(device, path)
    for store_path in stores:
        with pytest.raises(WrongStoreError) as caught:
            open_store(store_path, PLAIN, Config(hot=MIB))
        assert all(each in str(caught.value) for each in uuids)
        assert {each.kind for each in verify(store_path).findings} >= {"superblock"}
    assert [digest(each) for each in devices] == before


@pytest.mark.loop
@pytest.mark.parametrize("blocks", [(512, 4096), (4096, 512)])
def test_a_region_moves_between_sector_sizes(
    tmp_path: Path, loop_device: LoopMaker, blocks: tuple[int, int]
) -> None:
    """A058: made on one, copied byte by byte to the other, and used there."""
    source, target = (loop_device(8 * MIB, each) for each in blocks)
    path, link = tmp_path / "store", str(tmp_path / "drive")
    os.symlink(source, link)
    with open_store(path, PLAIN, Config(link, hot=MIB), Shuffled(1)) as store:
        assert store._files.region.device.block_bytes == blocks[0]
        put(store, OF_M, "n", TOKENS)
    subprocess.run(
        ["dd", f"if={source}", f"of={target}", "bs=1M", "conv=fsync", "status=none"], check=True
    )
    os.unlink(link)
    os.symlink(target, link)
    with open_store(path, PLAIN, Config(hot=MIB)) as store:
        assert store._files.region.device.block_bytes == blocks[1]
        sequence = store.resume([*TOKENS, 1])
        check_bytes(store, OF_M, sequence, TOKENS)
        check_everywhere(store, OF_M, sequence, TOKENS)
        put(store, OF_M, "more", some_tokens(100, 2))
    assert verify(path).ok


def one_partition(path: str, sectors: int) -> None:
    """An MBR with one Linux partition from sector 2048 on."""
    mbr = bytearray(512)
    struct.pack_into("<B3sB3sII", mbr, 446, 0, b"\0\2\0", 0x83, b"\xff" * 3, 2048, sectors - 2048)
    mbr[510:] = b"\x55\xaa"
    with open(path, "r+b") as file:
        file.write(mbr)


@pytest.mark.loop
def test_a_whole_disk_with_a_mounted_partition_is_refused(
    tmp_path: Path, loop_device: LoopMaker
) -> None:
    """A081: the path that is named is not the one that is mounted; forced or not."""
    device = loop_device(16 * MIB, 512)
    one_partition(device, 16 * MIB // 512)
    found = subprocess.run(["partx", "-a", device], capture_output=True, text=True)
    partition = f"{device}p1"
    if found.returncode or not os.path.exists(partition):
        subprocess.run(["partx", "-d", device], capture_output=True)
        pytest.skip(f"no partitions on loop devices here: {found.stderr.strip()}")
    mount = tmp_path / "mount"
    mount.mkdir()
    try:
        make_file_system(partition)
        with pytest.raises(ForeignDataError, match=r"partition table|unknown data"):
            open_store(tmp_path / "store", PLAIN, Config(device, hot=MIB))
        subprocess.run(["mount", partition, str(mount)], check=True)
        (mount / "file").write_text("mine")
        used = in_use_by(device)
        assert used is not None
        assert str(mount) in used
        for force in (False, True):
            with pytest.raises((ForeignDataError, DeviceError), match=r"in use|busy"):
                open_store(tmp_path / "store", PLAIN, Config(device, hot=MIB, force=force))
        assert (mount / "file").read_text() == "mine"
    finally:
        subprocess.run(["umount", str(mount)], capture_output=True)
        subprocess.run(["partx", "-d", device], capture_output=True)


def over_loop(device: str) -> tuple[list[str], list[str]]:
    """Commands that put a loop device over a device and take it away again."""
    made = subprocess.run(["losetup", "-f", "--show", device], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no second loop device: {made.stderr.strip()}")
    return ["true"], ["losetup", "-d", made.stdout.strip()]


def over_mapper(device: str) -> tuple[list[str], list[str]]:
    name = f"kvtier-test-{os.getpid()}"
    table = f"0 {16 * MIB // 512} linear {device} 0"
    return ["dmsetup", "create", name, "--table", table], ["dmsetup", "remove", name]


@pytest.mark.loop
@pytest.mark.parametrize("over", [over_loop, over_mapper])
def test_a_device_that_another_one_holds_is_refused(
    tmp_path: Path, loop_device: LoopMaker, over: Callable[[str], tuple[list[str], list[str]]]
) -> None:
    """A081: a device above it uses it, forced or not."""
    device = loop_device(16 * MIB, 512)
    assert in_use_by(device) is None
    begin, end = over(device)
    made = subprocess.run(begin, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"{begin[0]}: {made.stderr.strip()}")
    try:
        used = in_use_by(device)
        assert used is not None
        assert used.startswith("held by ")
        for force in (False, True):
            with pytest.raises((ForeignDataError, DeviceError), match=r"in use|busy|held"):
                open_store(tmp_path / "store", PLAIN, Config(device, hot=MIB, force=force))
        assert not Path(device).read_bytes().strip(b"\0")
    finally:
        subprocess.run(end, check=True)


def test_a_region_twice_the_size_of_its_place_is_refused_with_both(tmp_path: Path) -> None:
    """A051: told 16 MiB, there are 8; nothing is written."""
    region = tmp_path / "region.kv"
    with open_store(tmp_path, PLAIN, Config("16MiB", hot=MIB)) as store:
        put(store, OF_M, "n", TOKENS)
    os.truncate(region, 8 * MIB)
    before = digest(region)
    with pytest.raises(ConfigError, match=rf"{8 * MIB} bytes, but .* {16 * MIB} bytes"):
        open_store(tmp_path, PLAIN, Config(hot=MIB))
    assert digest(region) == before
