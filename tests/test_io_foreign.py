"""What stands on a device that is not ours: recognised, named, and not overwritten."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import (
    DeviceError,
    ForeignDataError,
)
from kvtier.io import foreign
from kvtier.io.foreign import foreign_content, in_use_by
from kvtier.io.probe import open_device
from kvtier.io.rawfile import create_region_file
from kvtier.io.region import Region
from kvtier.io.superblock import (
    SECOND_COPY_OFFSET,
    SUPERBLOCK_BYTES,
    Superblock,
)
from tests.conftest import LoopMaker
from tests.region_cases import (
    REGION_BYTES,
    STORE,
    create,
    make_file_system,
    patch,
    peek,
    reopen,
    write_gpt,
)


def named(content: str) -> str:
    """What is said of this content: its name only where libblkid is installed."""
    return content if foreign._load_blkid() is not None else "unknown data in the first 1 MiB"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    name = str(tmp_path / "region")
    create_region_file(name, REGION_BYTES)
    yield name
    os.unlink(name)


def test_create_refuses_a_file_system_unless_forced(path: str) -> None:
    make_file_system(path)
    assert foreign_content(path) == named("ext4 file system")
    with pytest.raises(ForeignDataError, match="force"):
        create(path)
    create(path, force=True)
    assert foreign_content(path) is None
    assert reopen(path) == []


def test_foreign_content_of_a_partition_table(path: str) -> None:
    write_gpt(path)
    assert foreign_content(path) == named("GPT partition table")
    with pytest.raises(ForeignDataError):
        create(path)


def test_foreign_content_of_ours_and_of_nothing(path: str) -> None:
    assert foreign_content(path) is None
    create(path)
    assert foreign_content(path) is None
    patch(path, 0, bytes(SUPERBLOCK_BYTES))
    assert peek(path, SECOND_COPY_OFFSET, 8) == b"KVTIERSB"
    assert foreign_content(path) is None
    with pytest.raises(DeviceError):
        foreign_content(path + "-missing")
    with pytest.raises(DeviceError):
        in_use_by(path + "-missing")


def test_without_libblkid_the_data_is_still_seen(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.io.foreign._load_blkid", lambda: None)
    assert foreign_content(path) is None
    make_file_system(path)
    assert foreign_content(path) == "unknown data in the first 1 MiB"


@pytest.mark.parametrize("use", ["mounted on /mnt", "in use as swap"])
def test_a_device_in_use_is_never_formatted(
    path: str, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    monkeypatch.setattr("kvtier.io.region.in_use_by", lambda path: use)
    with pytest.raises(ForeignDataError, match=use):
        create(path, force=True)
    assert not Path(path).read_bytes().strip(b"\0")


@pytest.mark.loop
def test_a_mounted_device(loop_device: LoopMaker, tmp_path: Path) -> None:
    device = loop_device(16 << 20, 512)
    assert in_use_by(device) is None
    assert in_use_by(str(tmp_path / "loop0.img")) == (f"held by {device}, whose backing file it is")
    make_file_system(device)
    mount_point = tmp_path / "a mount point"
    mount_point.mkdir()
    subprocess.run(["mount", device, str(mount_point)], check=True)
    try:
        assert in_use_by(device) == f"mounted on {mount_point}"
        with pytest.raises(ForeignDataError, match="mounted on"):
            open_device(device)
        reader = open_device(device, writable=False)
        with pytest.raises(ForeignDataError, match="forced or not"):
            Region.create(reader, STORE, force=True)
        reader.close()
    finally:
        subprocess.run(["umount", str(mount_point)], check=True)
    with pytest.raises(ForeignDataError, match=named("ext4 file system")):
        create(device)


def test_what_a_power_cut_left_of_a_superblock_is_not_foreign(tmp_path: Path) -> None:
    """Any of its sectors may be there and the others not; other bytes beside it are foreign."""
    path = tmp_path / "region"
    block = Superblock("11111111-2222-3333-4444-555555555555", 1, 2 << 20, 512).pack()
    for copy in (0, SECOND_COPY_OFFSET):
        for sectors in range(1, 256):
            head = bytearray(2 << 20)
            for sector in range(8):
                if sectors >> sector & 1:
                    part = slice(512 * sector, 512 * (sector + 1))
                    head[copy + part.start : copy + part.stop] = block[part]
            path.write_bytes(head)
            assert foreign_content(str(path)) is None
    path.write_bytes(bytes(4096) + b"letter" + bytes(2 << 20))
    assert foreign_content(str(path)) is not None
