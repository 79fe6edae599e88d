"""Finding an NVMe namespace and its character device, and refusing what commands may not go to."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import DeviceError
from kvtier.io import nvme_namespace, probe
from kvtier.io.nvme_namespace import Namespace, Place, character_devices, find_namespace
from tests.conftest import LoopMaker
from tests.fake_nvme import FakeDrive, FakeKernel, FakeMachine, open_files

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, loop_device: LoopMaker) -> FakeMachine:
    return FakeMachine(tmp_path, loop_device(MIB, 512))


def found(machine: FakeMachine, path: str | None = None) -> Place:
    return find_namespace(path or machine.device, machine.sysfs, machine.devices)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[FakeDrive]:
    fd = os.open(tmp_path / "blocks", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, MIB)
    yield FakeDrive(fd, 4096, MIB // 4096)
    os.close(fd)


@pytest.fixture
def kernel(drive: FakeDrive, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel(drive, "/dev/null")
    kernel.install(monkeypatch)
    return kernel


@pytest.mark.loop
def test_a_block_device_has_its_character_device(machine: FakeMachine, tmp_path: Path) -> None:
    assert found(machine) == Place(machine.device, machine.character_path, machine.queue)
    link = tmp_path / "nvme-eui.0123"
    link.symlink_to(machine.device)
    assert found(machine, str(link)) == Place(str(link), machine.character_path, machine.queue)


@pytest.mark.loop
def test_a_partition_is_refused(machine: FakeMachine) -> None:
    (machine.block / "partition").write_text("1\n")
    with pytest.raises(DeviceError, match=r"is a partition of /dev/nvme0: .*whole namespace"):
        found(machine)


@pytest.mark.loop
def test_what_is_no_namespace_is_refused(machine: FakeMachine, loop_device: LoopMaker) -> None:
    other = loop_device(MIB, 512)
    number = os.stat(other).st_rdev
    folder = machine.sysfs / "devices/loop7"
    folder.mkdir()
    place = machine.sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    place.symlink_to(folder)
    with pytest.raises(DeviceError, match=r"\(loop7\) is no NVMe namespace"):
        found(machine, other)


def test_a_file_and_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot look at"):
        find_namespace(str(tmp_path / "missing"))
    (tmp_path / "file").touch()
    with pytest.raises(DeviceError, match="is no block device: name a whole NVMe namespace"):
        find_namespace(str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="is no block device"):
        find_namespace("/dev/null")


@pytest.mark.loop
def test_a_character_device_that_is_another_is_refused(machine: FakeMachine) -> None:
    (machine.generic / "dev").write_text("240:0\n")
    with pytest.raises(DeviceError, match="is device 1:3, not the character device 240:0"):
        found(machine)
    os.unlink(machine.character_path)
    with pytest.raises(DeviceError, match=r"not at .*ng0n1.*number 240:0"):
        found(machine)
    (machine.generic / "device").unlink()
    (machine.generic / "device").symlink_to(machine.sysfs / "devices")
    with pytest.raises(DeviceError, match="different controllers"):
        found(machine)
    os.rename(machine.generic, machine.generic.with_name("ng1n1"))
    with pytest.raises(DeviceError, match="no character device ng0n1"):
        found(machine)


def test_a_namespace_says_what_it_is(kernel: FakeKernel, drive: FakeDrive) -> None:
    namespace = Namespace.open("/dev/null", writable=True)
    assert namespace.nsid == drive.nsid
    assert (namespace.own.block_bytes, namespace.own.capacity_bytes) == (4096, MIB)
    assert namespace.controller.model == "FAKE DRIVE"
    namespace.close()
    namespace.close()


@pytest.mark.parametrize(("metadata", "protection"), [(8, 0), (8, 1), (0, 3)])
def test_blocks_with_metadata_are_refused(
    kernel: FakeKernel, drive: FakeDrive, metadata: int, protection: int
) -> None:
    drive.metadata_bytes, drive.protection = metadata, protection
    files = open_files()
    with pytest.raises(DeviceError, match=f"{metadata} bytes of metadata.*type {protection}"):
        Namespace.open("/dev/null", writable=True)
    assert open_files() == files


def test_a_device_that_takes_no_commands() -> None:
    """The real kernel's answer, for what is no NVMe drive."""
    with pytest.raises(DeviceError, match=r"/dev/null takes no NVMe commands: .*6\.2") as caught:
        Namespace.open("/dev/null", writable=True)
    assert caught.value.errno == errno.ENOTTY
    with pytest.raises(DeviceError, match="No such file"):
        Namespace.open("/dev/ng987n1", writable=True)


@pytest.mark.parametrize(
    ("mdts", "limits", "most"),
    [
        # What a drive of QEMU has: 126 pages are certain to fit, 512 KiB are not.
        (7, (512, 127), 256 * 1024),
        (5, (512, 127), 128 * 1024),
        (7, (64, 127), 64 * 1024),
        (0, (4096, 128), 256 * 1024),
        (0, (4096, 1025), 4096 * 1024),
        (0, (1280, 1025), 1024 * 1024),
    ],
)
def test_the_most_that_one_command_may_move(
    kernel: FakeKernel,
    drive: FakeDrive,
    tmp_path: Path,
    mdts: int,
    limits: tuple[int, int],
    most: int,
) -> None:
    """limits: the kernel's, KiB of one command and pieces of memory."""
    drive.mdts = mdts
    (tmp_path / "max_hw_sectors_kb").write_text(f"{limits[0]}\n")
    (tmp_path / "max_segments").write_text(f"{limits[1]}\n")
    namespace = Namespace.open("/dev/null", writable=True)
    assert namespace.transfer_bytes_max(tmp_path) == most
    (tmp_path / "max_segments").write_text("1\n")
    with pytest.raises(DeviceError, match="0 bytes with one command"):
        namespace.transfer_bytes_max(tmp_path)
    (tmp_path / "max_segments").unlink()
    with pytest.raises(DeviceError, match="max_segments"):
        namespace.transfer_bytes_max(tmp_path)
    namespace.close()


def test_a_count_of_blocks_has_16_bits(
    kernel: FakeKernel, drive: FakeDrive, tmp_path: Path
) -> None:
    drive.block_bytes, drive.mdts = 512, 0
    (tmp_path / "max_hw_sectors_kb").write_text("1048576\n")
    (tmp_path / "max_segments").write_text("65535\n")
    namespace = Namespace.open("/dev/null", writable=True)
    assert namespace.transfer_bytes_max(tmp_path) == 65536 * 512
    namespace.close()


def test_flush_and_deallocate(kernel: FakeKernel, drive: FakeDrive) -> None:
    os.pwrite(drive.fd, b"\xff" * MIB, 0)
    namespace = Namespace.open("/dev/null", writable=True)
    namespace.flush()
    pieces = [(number, 1) for number in range(0, 256, 2)] + [(1, 1), (3, 1)]
    namespace.deallocate(pieces * 3)
    assert drive.log == [(0, 0, 0), *((9, *piece) for piece in pieces * 3)]
    assert os.pread(drive.fd, 8192, 4 * 4096) == bytes(4096) + b"\xff" * 4096
    drive.flush_status = 0x4006
    with pytest.raises(DeviceError, match="NVMe status 0x4006: internal error") as caught:
        namespace.flush()
    assert caught.value.errno == errno.EIO
    with pytest.raises(DeviceError, match="LBA out of range"):
        namespace.deallocate([(255, 2)])
    namespace.close()


def test_a_failed_flush_is_not_tried_again(kernel: FakeKernel, drive: FakeDrive) -> None:
    """Though the drive allows it: what was lost would stay lost, and nobody would hear of it."""
    drive.flush_status = 0x0006
    namespace = Namespace.open("/dev/null", writable=True)
    with pytest.raises(DeviceError, match="internal error"):
        namespace.flush()
    assert drive.log == [(0, 0, 0)]
    namespace.close()


def test_the_report_for_doctor(
    kernel: FakeKernel, drive: FakeDrive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert character_devices(tmp_path) == []
    monkeypatch.setattr(nvme_namespace, "character_devices", list)
    assert not probe.nvme_report().usable
    assert "no /dev/ng*" in probe.nvme_report().reason
    monkeypatch.setattr(nvme_namespace, "character_devices", lambda: ["/dev/null", "/dev/ng77n1"])
    report = probe.nvme_report()
    assert report.usable
    for word in ("answered: /dev/null", "engine='nvme'", "cannot open /dev/ng77n1"):
        assert word in report.reason
    drive.metadata_bytes = 8
    report = probe.nvme_report()
    assert not report.usable
    assert "metadata" in report.reason
    kernel.big_entries = False
    assert "Linux 5.19" in probe.nvme_report().reason


def test_the_character_devices_of_a_machine(tmp_path: Path) -> None:
    for name in ("ng1n1", "ng0n1"):
        (tmp_path / "class/nvme-generic" / name).mkdir(parents=True)
    assert character_devices(tmp_path, Path("/dev")) == ["/dev/ng0n1", "/dev/ng1n1"]
