"""An NVMe drive and the kernel's part of a ring, in this process: system calls are answered here.

The drive's blocks are a file. Entries are read from the ring's memory and completions written to it
byte by byte, at the places that linux/io_uring.h and linux/nvme_ioctl.h name; what the drive is
told is kept in `log`.
"""

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.io import passthrough, syscalls
from kvtier.io.buffers import aligned_bytes
from kvtier.io.nvme_namespace import find_namespace

ENTRIES_OFFSET = 0x10000000
BIG = (1 << 10) | (1 << 11)
_HEADS = {"sq_head": 0, "sq_tail": 4, "sq_mask": 8, "cq_head": 64, "cq_tail": 68, "cq_mask": 72}
_CQES, _INDICES = 4096, 1 << 20
HANGS_S = 30.0
OUT_OF_RANGE, INVALID_OPCODE = 0x4080, 0x4001
FLUSH, WRITE, READ, DATASET_MANAGEMENT, IDENTIFY = 0, 1, 2, 9, 6


def field_of(command: bytes, at: int, size: int) -> int:
    return int.from_bytes(command[at : at + size], "little")


@dataclass
class FakeDrive:
    """statuses: first block of a read or write -> what it is answered with, in turn; 0 is success,
    negative an errno of the kernel."""

    fd: int
    block_bytes: int
    blocks: int
    mdts: int = 7
    metadata_bytes: int = 0
    protection: int = 0
    nsid: int = 9
    deallocates: bool = True
    flush_status: int = 0
    statuses: dict[int, list[int]] = field(default_factory=dict)
    log: list[tuple[int, int, int]] = field(default_factory=list)
    """(opcode, first block, blocks) of every command for the namespace."""

    def admin(self, command: bytes) -> int:
        assert command[0] == IDENTIFY, "no other command of this kind is allowed"
        assert field_of(command, 36, 4) == 4096
        answer = bytearray(4096)
        if field_of(command, 40, 4) == 1:
            answer[24:64] = b"FAKE DRIVE".ljust(40)
            answer[77] = self.mdts
            answer[520] = 4 if self.deallocates else 0
            answer[525] = 1
        else:
            assert field_of(command, 4, 4) == self.nsid
            answer[0:8] = self.blocks.to_bytes(8, "little")
            power = self.block_bytes.bit_length() - 1
            answer[26], answer[29] = 1, self.protection
            # Format 0 is there to be confused with the one in use.
            answer[25] = 1
            answer[128:136] = struct.pack("<HBBHBB", 0, 20, 0, self.metadata_bytes, power, 0)
        ctypes.memmove(field_of(command, 24, 8), bytes(answer), 4096)
        return 0

    def io(self, command: bytes) -> int:
        """The status of a command; negative is an errno."""
        assert len(command) == 72
        assert field_of(command, 4, 4) == self.nsid
        opcode, address, nbytes = command[0], field_of(command, 24, 8), field_of(command, 36, 4)
        if opcode == FLUSH:
            self.log.append((FLUSH, 0, 0))
            return self.flush_status
        if opcode == DATASET_MANAGEMENT:
            return self._deallocate(command, address, nbytes)
        if opcode not in (READ, WRITE):
            return INVALID_OPCODE
        first, blocks = field_of(command, 40, 8), field_of(command, 48, 2) + 1
        assert field_of(command, 50, 2) == 0, "no flags are used"
        assert not any(command[52:72])
        assert address % 4 == 0
        assert nbytes == blocks * self.block_bytes
        if self.mdts and nbytes > 4096 << self.mdts:
            return -errno.EINVAL
        self.log.append((opcode, first, blocks))
        if first + blocks > self.blocks:
            return OUT_OF_RANGE
        for bad, answers in self.statuses.items():
            if first <= bad < first + blocks and answers:
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if answer:
                    return answer
        return self._move(opcode, first * self.block_bytes, address, nbytes)

    def _move(self, opcode: int, offset: int, address: int, nbytes: int) -> int:
        memory = memoryview((ctypes.c_char * nbytes).from_address(address))
        if opcode == READ:
            assert os.preadv(self.fd, [memory], offset) == nbytes
        else:
            assert os.pwritev(self.fd, [memory], offset) == nbytes
        return 0

    def _deallocate(self, command: bytes, address: int, nbytes: int) -> int:
        assert field_of(command, 44, 4) == 4
        count = field_of(command, 40, 4) + 1
        assert nbytes == 16 * count <= 4096
        data = ctypes.string_at(address, nbytes)
        for _, blocks, first in struct.iter_unpack("<IIQ", data):
            self.log.append((DATASET_MANAGEMENT, first, blocks))
            if first + blocks > self.blocks:
                return OUT_OF_RANGE
            zeros = aligned_bytes(blocks * self.block_bytes)
            assert os.pwrite(self.fd, zeros.data, first * self.block_bytes) == zeros.size
        return 0


class FakeKernel:
    """Rings whose memory is a memfd, and one drive behind them and behind ioctl."""

    def __init__(self, drive: FakeDrive, character_path: str) -> None:
        self.drive = drive
        self.big_entries = True
        self.held: list[tuple[int, int, int]] | None = None
        """If a list: (ring, user_data, result) of completions that come later, by `release`."""
        self._status = os.stat(character_path)
        self._changed = threading.Condition()
        self._events: dict[int, int] = {}
        self._rings: dict[int, tuple[int, mmap.mmap]] = {}
        """Entries and memory of each."""
        self._real = {
            name: getattr(syscalls, name)
            for name in ("io_uring_setup", "io_uring_enter", "io_uring_register")
        }

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("setup", "enter", "register"):
            monkeypatch.setattr(syscalls, f"io_uring_{name}", getattr(self, f"_{name}"))
        monkeypatch.setattr(syscalls, "ioctl", self._ioctl)

    def release(self) -> None:
        """The completions that were held are there now."""
        with self._changed:
            held, self.held = self.held, None
            for completion in held or []:
                self._complete(*completion)
            self._changed.notify_all()

    def _is_character(self, fd: int) -> bool:
        return os.fstat(fd).st_rdev == self._status.st_rdev

    def _ioctl(self, fd: int, request: int, argument: Any) -> int:
        assert self._is_character(fd), "commands go to the character device"
        if request == 0x4E40:
            return self.drive.nsid
        send = {0xC0484E41: self.drive.admin, 0xC0484E43: self.drive.io}[request]
        result = send(bytes(argument))
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def _setup(self, entries: int, parameters: syscalls.RingParameters) -> int:
        if parameters.flags & BIG != BIG:
            fd = int(self._real["io_uring_setup"](entries, parameters))
            # The number of a ring that was closed may come again.
            self._rings.pop(fd, None)
            return fd
        if not self.big_entries:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fd = os.memfd_create("ring")
        os.ftruncate(fd, ENTRIES_OFFSET + entries * 128)
        parameters.sq_entries, parameters.cq_entries = entries, 2 * entries
        for place, at in enumerate((0, 4, 8, 12, 16, 20, _INDICES)):
            parameters.sq_offsets[place] = at
        for place, at in enumerate((64, 68, 72, 76, 80, _CQES)):
            parameters.cq_offsets[place] = at
        self._rings[fd] = (entries, mmap.mmap(fd, ENTRIES_OFFSET + entries * 128))
        self._put(fd, _HEADS["sq_mask"], entries - 1)
        self._put(fd, _HEADS["cq_mask"], 2 * entries - 1)
        return fd

    def _put(self, fd: int, at: int, value: int) -> None:
        struct.pack_into("<I", self._rings[fd][1], at, value & 0xFFFFFFFF)

    def _get(self, fd: int, at: int) -> int:
        return int(struct.unpack_from("<I", self._rings[fd][1], at)[0])

    def _is_ring(self, fd: int) -> bool:
        return fd in self._rings

    def _enter(self, fd: int, submit: int, wait: int, flags: int) -> int:
        if not self._is_ring(fd):
            return int(self._real["io_uring_enter"](fd, submit, wait, flags))
        with self._changed:
            (entries, memory), taken = self._rings[fd], 0
            while taken < submit and (head := self._get(fd, _HEADS["sq_head"])) != self._get(
                fd, _HEADS["sq_tail"]
            ):
                index = self._get(fd, _INDICES + 4 * (head % entries))
                place = ENTRIES_OFFSET + 128 * index
                self._take(fd, memory[place : place + 128])
                self._put(fd, _HEADS["sq_head"], head + 1)
                taken += 1
            if taken == submit:
                there = self._changed.wait_for(lambda: self._there(fd) >= wait, HANGS_S)
                assert there, "this waits for ever"
            return taken

    def _there(self, fd: int) -> int:
        head = self._get(fd, _HEADS["cq_head"])
        return (self._get(fd, _HEADS["cq_tail"]) - head) & 0xFFFFFFFF

    def _take(self, fd: int, entry: bytes) -> None:
        """struct io_uring_sqe: opcode, flags, ioprio, fd, cmd_op at 8, uring_cmd_flags at 28,
        user_data at 32, cmd at 48."""
        assert entry[0] == 46, "no other operation is known for a character device"
        assert field_of(entry, 8, 4) == 0xC0484E80
        assert not any(entry[1:4] + entry[12:32] + entry[40:48] + entry[120:])
        assert self._is_character(field_of(entry, 4, 4))
        result, user_data = self.drive.io(entry[48:120]), field_of(entry, 32, 8)
        if self.held is None:
            self._complete(fd, user_data, result)
        else:
            self.held.append((fd, user_data, result))

    def _complete(self, fd: int, user_data: int, result: int) -> None:
        tail = self._get(fd, _HEADS["cq_tail"])
        entries, memory = self._rings[fd]
        slot = tail % (2 * entries)
        # The second half of an entry is another answer of the drive, which means nothing here.
        answer = (0xA5A5A5A5, 0x5A5A5A5A)
        struct.pack_into("<QiIQQ", memory, _CQES + 32 * slot, user_data, result, 0, *answer)
        self._put(fd, _HEADS["cq_tail"], tail + 1)
        if fd in self._events:
            os.eventfd_write(self._events[fd], 1)

    def _register(self, fd: int, opcode: int, argument: Any, count: int) -> None:
        if not self._is_ring(fd):
            self._real["io_uring_register"](fd, opcode, argument, count)
        elif opcode == 8:
            operations = b"".join(struct.pack("<BBHI", code, 0, 1, 0) for code in range(64))
            ctypes.memmove(argument, bytes(16) + operations, 16 + 512)
        elif opcode == 4:
            self._events[fd] = int(argument[0])
        else:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class FakeMachine:
    """A tree of sysfs and /dev that calls one block device nvme0n1, and a kernel with a drive."""

    def __init__(self, folder: Path, device: str) -> None:
        """device: a real block device, which holds the drive's bytes."""
        self.device = device
        self.sysfs, self.devices = folder / "sys", folder / "dev"
        number = os.stat(device).st_rdev
        self.block = self._folder("devices/nvme0/nvme0n1")
        self._folder("dev/block")
        (self.sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(self.block)
        self.queue = self._folder("devices/nvme0/nvme0n1/queue")
        self.set_queue(max_hw_sectors_kb=512, max_segments=127)
        (self.block / "device").symlink_to(self.sysfs / "devices/nvme0")
        self.generic = self._folder("class/nvme-generic/ng0n1")
        (self.generic / "device").symlink_to(self.sysfs / "devices/nvme0")
        self.character_path = os.fspath(self.devices / "ng0n1")
        self.devices.mkdir()
        # Any character device will do: no call for it gets to the real kernel.
        os.symlink("/dev/null", self.character_path)
        null = os.stat("/dev/null").st_rdev
        (self.generic / "dev").write_text(f"{os.major(null)}:{os.minor(null)}\n")

    def _folder(self, path: str) -> Path:
        folder = self.sysfs / path
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def set_queue(self, **settings: int) -> None:
        for name, value in settings.items():
            (self.queue / name).write_text(f"{value}\n")

    def put_in(self, monkeypatch: pytest.MonkeyPatch, drive: "FakeDrive") -> FakeKernel:
        """Let the engine find this machine's device, and commands to it get to the drive."""
        where = partial(find_namespace, sysfs=self.sysfs, devices=self.devices)
        monkeypatch.setattr(passthrough, "find_namespace", where)
        kernel = FakeKernel(drive, self.character_path)
        kernel.install(monkeypatch)
        return kernel


@contextmanager
def drive_on(device: str) -> Iterator[FakeDrive]:
    """A drive whose blocks are those of a loop device: of its file, so that what the drive writes
    does not show in the page cache of the device."""
    folder = Path("/sys/block", os.path.basename(device))
    block_bytes = int((folder / "queue" / "logical_block_size").read_text())
    fd = os.open((folder / "loop" / "backing_file").read_text().strip(), os.O_RDWR)
    try:
        yield FakeDrive(fd, block_bytes, os.lseek(fd, 0, os.SEEK_END) // block_bytes)
    finally:
        os.close(fd)


def open_files() -> list[str]:
    """What this process has open, without the memory of rings, which a mapping keeps."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(name for name in names if not name.startswith("/memfd:ring"))
