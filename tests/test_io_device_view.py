"""A device as an operator sees it: what it carries, who uses it. Looking writes nothing."""

import os
import struct
from pathlib import Path

import pytest
import xxhash

from kvtier.errors import DeviceError
from kvtier.io import device_view
from kvtier.io.device_view import block_devices, look_at
from kvtier.io.rawfile import create_region_file
from tests.region_cases import (
    COPIES,
    REGION_BYTES,
    STORE,
    create,
    make_file_system,
    patch,
    peek,
    write_gpt,
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    name = str(tmp_path / "region")
    create_region_file(name, REGION_BYTES)
    return name


def test_nothing(path: str) -> None:
    view = look_at(path)
    assert not view.carries_anything
    assert (view.nbytes, view.is_block_device, view.stable_path) == (REGION_BYTES, False, None)
    assert (view.superblock, view.foreign, view.in_use, view.problem) == (None,) * 4


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_region_of_which_one_superblock_is_left(path: str, kept: int) -> None:
    create(path)
    for number, offset in enumerate(COPIES):
        if number != kept:
            patch(path, offset, bytes(4096))
    view = look_at(path)
    assert view.carries_anything
    assert view.superblock is not None
    assert view.superblock.store_uuid == STORE
    assert view.foreign is None


def test_a_file_system_over_a_region(path: str) -> None:
    create(path)
    make_file_system(path)
    view = look_at(path)
    assert view.foreign is not None
    assert view.carries_anything


def test_a_partition_table(path: str) -> None:
    write_gpt(path)
    assert look_at(path).foreign in ("GPT partition table", "unknown data in the first 1 MiB")


def test_a_region_of_another_version(path: str) -> None:
    create(path)
    body = bytearray(peek(path, 0, 4088))
    body[8:12] = struct.pack("<I", 99)
    block = bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))
    for offset in COPIES:
        patch(path, offset, block)
    view = look_at(path)
    assert view.superblock is None
    assert view.other_version is not None
    assert "99" in view.other_version
    assert view.carries_anything


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 70_000])
def test_small_files(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(bytes(nbytes))
    assert not look_at(str(path)).carries_anything
    path.write_bytes(b"\7" * nbytes)
    assert look_at(str(path)).carries_anything == bool(nbytes)


def test_looking_writes_nothing(path: str) -> None:
    create(path)
    os.utime(path, ns=(1, 1))
    before = Path(path).read_bytes()
    look_at(path)
    assert Path(path).read_bytes() == before
    assert os.stat(path).st_mtime_ns == 1


def test_what_cannot_be_looked_at(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "absent", "."):
        with pytest.raises(DeviceError, match=name if name != "." else str(tmp_path)):
            look_at(str(tmp_path / name))


def test_devices_that_cannot_be_read_are_shown_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, sectors in (("sd10", "8"), ("sd2", "16"), ("loop0", "0"), ("cciss!c0d0", "8")):
        folder = tmp_path / name / "queue"
        folder.mkdir(parents=True)
        (tmp_path / name / "size").write_text(f"{sectors}\n")
        (folder / "logical_block_size").write_text("4096\n")

    def refuse(path: str) -> device_view.DeviceView:
        raise DeviceError(f"cannot read {path}", 5)

    monkeypatch.setattr("kvtier.io.device_view.look_at", refuse)
    views = block_devices(tmp_path)
    assert [(each.path, each.nbytes) for each in views] == [
        ("/dev/cciss/c0d0", 4096),
        ("/dev/sd2", 8192),
        ("/dev/sd10", 4096),
    ]
    assert {each.block_bytes for each in views} == {4096}
    assert [each.problem for each in views] == [f"cannot read {each.path}" for each in views]
