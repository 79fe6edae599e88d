"""NVMe passthrough on the drive of the virtual machine: what is refused, and what fails how.

`test_nvme_passthrough.py` has pytest run it there, one class on each machine.
"""

import errno
import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import DeviceError, ForeignDataError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, ByteArray
from kvtier.io.passthrough import PassthroughDevice
from kvtier.io.probe import nvme_report, open_device
from kvtier.io.region import Region
from tests.device_contract import filled, integers
from tests.nvme_kernel import DRIVE

STORE = "7d0a6e5c-1111-4222-8333-944455556666"
SECOND = "/dev/nvme0n2"
PARTITION = Path(f"{DRIVE}p1")
FAILING_AT = 20 << 20
"""The offset of the sector that cannot be read. QEMU lets writes to it fail as well."""
AROUND_BYTES = 1 << 20
BEFORE_FLUSH, AFTER_FLUSH = b"BEFOREFLUSH:", b"AFTERFLUSH::"
DISCARDED_AT, DISCARDED_BYTES = 4 << 20, 64 << 10
_REREAD_PARTITIONS = 0x125F
_NOBODY = 65534


@pytest.fixture
def device() -> Iterator[PassthroughDevice]:
    device = open_device(DRIVE, engine="nvme")
    assert isinstance(device, PassthroughDevice)
    yield device
    device.close()


def refused(path: str, error: type[DeviceError], words: str) -> None:
    with pytest.raises(error, match=words):
        open_device(path, engine="nvme")


def around_the_failure() -> ByteArray:
    """What is on the drive around FAILING_AT, half of it before it."""
    return filled(AROUND_BYTES, 7)


class TestRefusals:
    """On a drive of 4096-byte blocks and 512 KiB a command, with a second namespace."""

    def test_what_it_found(self, device: PassthroughDevice) -> None:
        assert (device.path, device.character_path) == (DRIVE, "/dev/ng0n1")
        assert device.block_bytes == 4096
        assert device.transfer_bytes_max == 256 << 10
        assert device.volatile_cache

    def test_doctor_names_both_namespaces(self) -> None:
        report = nvme_report()
        assert report.usable
        assert "answered: /dev/ng0n1." in report.reason
        assert "the blocks of /dev/ng0n2 carry 8 bytes of metadata" in report.reason

    def test_blocks_with_metadata(self) -> None:
        refused(SECOND, DeviceError, "8 bytes of metadata each")

    @pytest.mark.parametrize("mode", [0o600, 0o666])
    def test_nobody_has_no_permission(self, mode: int) -> None:
        """With that of the file, the kernel still wants a capability."""
        os.chmod("/dev/ng0n1", mode)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
                report = nvme_report()
                os.write(writing, f"{report.usable} {report.reason}".encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, encoding="utf-8") as answer:
            said = answer.read()
        os.waitpid(pid, 0)
        os.chmod("/dev/ng0n1", 0o600)
        assert said.startswith("False ")
        assert "/dev/ng0n1" in said
        assert "Permission denied" in said
        assert "CAP_SYS_ADMIN" in said

    def test_a_mounted_file_system(self, tmp_path: Path) -> None:
        """Neither may have the drive while the other has it."""
        subprocess.run(["/usr/sbin/mkfs.ext4", "-q", "-F", DRIVE], check=True)
        mount = ["mount", "-t", "ext4", DRIVE, str(tmp_path)]
        subprocess.run(mount, check=True)
        refused(DRIVE, ForeignDataError, f"mounted on {tmp_path}")
        subprocess.run(["umount", str(tmp_path)], check=True)
        device = open_device(DRIVE, engine="nvme")
        tried = subprocess.run(mount, check=False, capture_output=True, text=True)
        assert tried.returncode, "it was mounted"
        with pytest.raises(ForeignDataError, match="ext4 file system"):
            Region.create(device, STORE)
        device.close()
        subprocess.run(mount, check=True)
        subprocess.run(["umount", str(tmp_path)], check=True)

    def test_a_region_is_the_same_by_both_ways(self) -> None:
        Region.create(open_device(DRIVE, engine="nvme"), STORE, force=True).close()
        for engine in ("nvme", "io_uring", "threads"):
            with Region.open(open_device(DRIVE, engine=engine), STORE) as region:
                assert region.notes == []
                assert region.path == DRIVE

    def test_nothing_old_is_left_in_the_page_cache(self) -> None:
        """Commands do not know of it: who has read before would read the same for ever."""
        with open(DRIVE, "r+b", buffering=0) as other:
            other.seek(8 << 20)
            other.write(b"\xee" * 4096)
            device = open_device(DRIVE, engine="nvme")
            target = Buffers.whole(aligned_bytes(4096))
            device.read(integers(8 << 20), target)
            assert (target.memory == 0xEE).all(), "what others wrote comes first"
            other.seek(8 << 20)
            other.read(4096)
            source = filled(4096, 3)
            device.write(integers(8 << 20), Buffers.whole(source))
            device.close()
            other.seek(8 << 20)
            assert other.read(4096) == source.tobytes()

    def test_a_partition(self) -> None:
        """Last of all: the drive has a partition table then."""
        table = bytearray(512)
        table[446:462] = struct.pack("<4B4BII", 0, 0, 0, 0, 0x83, 0, 0, 0, 256, 1024)
        table[510:512] = b"\x55\xaa"
        with open(DRIVE, "r+b") as file:
            file.write(bytes(table).ljust(1 << 20, b"\0"))
            file.flush()
            os.fsync(file.fileno())
            fcntl.ioctl(file.fileno(), _REREAD_PARTITIONS)
        for _ in range(100):
            if PARTITION.exists():
                break
            time.sleep(0.1)
        refused(str(PARTITION), DeviceError, "is a partition of /dev/nvme0n1: ")
        other = open_device(str(PARTITION), engine="io_uring")
        refused(DRIVE, ForeignDataError, "in use")
        other.close()
        device = open_device(DRIVE, engine="nvme")
        with pytest.raises(ForeignDataError, match="DOS partition table"):
            Region.create(device, STORE)
        device.close()


class TestFailures:
    """On a drive of 512-byte blocks and 16 KiB a command, with a sector that cannot be read."""

    def test_a_bad_block(self, device: PassthroughDevice) -> None:
        """It fails alone, with the errno that the block layer has for it."""
        assert (device.block_bytes, device.transfer_bytes_max) == (512, 16 << 10)
        lengths = np.full(9, 512, np.int64)
        starts = np.arange(9, dtype=np.int64) * 512
        offsets = FAILING_AT - 4 * 512 + starts
        source = around_the_failure()[AROUND_BYTES // 2 - 4 * 512 :][: 9 * 512]
        target = Buffers(aligned_bytes(9 * 512), starts, lengths)
        words = r"1 of 9 reads .*\(ENODATA\), NVMe status 0x\w*281: unrecovered read error"
        with pytest.raises(DeviceError, match=words) as caught:
            device.read(offsets, target)
        assert caught.value.failures == [(4, errno.ENODATA)]
        same = (target.memory == source).reshape(9, 512).all(1)
        assert same.tolist() == [True] * 4 + [False] + [True] * 4
        device.close()
        plain = open_device(DRIVE, engine="io_uring")
        with pytest.raises(DeviceError, match="1 of 9 reads") as by_blocks:
            plain.read(offsets, target)
        plain.close()
        assert by_blocks.value.failures == caught.value.failures

    def test_a_bad_block_in_a_long_request(self, device: PassthroughDevice) -> None:
        half = AROUND_BYTES // 2
        offsets = integers(FAILING_AT - half, FAILING_AT - half)
        target = Buffers(aligned_bytes(4 * half), integers(0, 2 * half), integers(2 * half, half))
        with pytest.raises(DeviceError, match=r"1 of 2 reads .*unrecovered read error") as caught:
            device.read(offsets, target)
        assert caught.value.failures == [(0, errno.ENODATA)]
        assert np.array_equal(target.memory[2 * half : 3 * half], around_the_failure()[:half])

    def test_past_the_end(self, device: PassthroughDevice) -> None:
        end = device.capacity_bytes
        device.capacity_bytes += 1 << 20
        words = r"\(EREMOTEIO\), NVMe status 0x4080: LBA out of range"
        target = Buffers.whole(aligned_bytes(64 << 10))
        with pytest.raises(DeviceError, match=r"1 of 1 reads .*" + words):
            device.read(integers(end - 512), target)
        with pytest.raises(DeviceError, match=r"1 of 1 writes .*" + words):
            device.write(integers(end), target)

    def test_a_command_that_is_too_long_is_refused_by_the_kernel(
        self, device: PassthroughDevice
    ) -> None:
        device.transfer_bytes_max *= 2
        with pytest.raises(DeviceError, match=r"1 of 1 reads .*\(EINVAL\)$"):
            device.read(integers(0), Buffers.whole(aligned_bytes(32 << 10)))

    def test_marks_for_the_log(self, device: PassthroughDevice) -> None:
        """The log of the drive shows afterwards whether the flush came between these."""
        assert device.discard(integers(DISCARDED_AT), integers(DISCARDED_BYTES))
        for mark in (BEFORE_FLUSH, AFTER_FLUSH):
            memory = aligned_bytes(32 << 10)
            for start in range(0, memory.size, 512):
                memory[start : start + len(mark)] = np.frombuffer(mark, np.uint8)
            device.write(integers(0), Buffers.whole(memory))
            if mark == BEFORE_FLUSH:
                device.flush()
