"""An NVMe namespace by its character device: found, asked what it is, refused where unfit.

Commands that wait for their answer go from here, by ioctl; reads and writes go by `passthrough.py`.
Nothing here needs numpy, because `kvtier doctor` asks as well.
"""

import ctypes
import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvtier.errors import DeviceError
from kvtier.io import nvme_commands as commands
from kvtier.io import syscalls
from kvtier.io.alignment import os_page_bytes
from kvtier.io.nvme_commands import ControllerIdentity, NamespaceIdentity

SYSFS, DEVICES = Path("/sys"), Path("/dev")
_GENERIC = "class/nvme-generic"
_PERMISSION = "They need the permission of the device, and before Linux 6.2 CAP_SYS_ADMIN"
_NAMESPACE = re.compile(r"nvme\d+n\d+")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a namespace is: its block device, its character device, and the settings of its queue
    in sysfs."""

    path: str
    character_path: str
    queue: Path


def find_namespace(path: str, sysfs: Path = SYSFS, devices: Path = DEVICES) -> Place:
    """The namespace whose block device is at `path`. Raises DeviceError where there is none, or
    only a part of one, or no character device for it."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise DeviceError(f"cannot look at {path}: {error.strerror}", error.errno or 0) from error
    if not stat.S_ISBLK(status.st_mode):
        raise _refused(path, "is no block device: name a whole NVMe namespace such as /dev/nvme0n1")
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    folder = (sysfs / "dev" / "block" / number).resolve()
    if (folder / "partition").exists():
        raise _refused(
            path,
            f"is a partition of /dev/{folder.parent.name}: NVMe commands count from the beginning "
            "of the whole namespace, and nothing would keep them inside a part. Name the whole "
            "namespace, or use the engine io_uring",
        )
    if not _NAMESPACE.fullmatch(folder.name):
        raise _refused(path, f"({folder.name}) is no NVMe namespace: use the engine io_uring")
    generic = sysfs / _GENERIC / folder.name.replace("nvme", "ng", 1)
    if not generic.exists():
        raise _refused(
            path, f"has no character device {generic.name}: it needs Linux 5.13 or later"
        )
    if (generic / "device").resolve() != (folder / "device").resolve():
        raise _refused(path, f"and {generic.name} belong to different controllers")
    character_path = os.fspath(devices / generic.name)
    _check_character_device(character_path, (generic / "dev").read_text().strip())
    return Place(path, character_path, folder / "queue")


def _refused(path: str, why: str) -> DeviceError:
    return DeviceError(f"the engine nvme cannot be used: {path} {why}", errno.EINVAL)


def _check_character_device(path: str, number: str) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DeviceError(
            f"the kernel has a character device for this namespace, but not at {path}: "
            f"{error.strerror}. Make it (number {number}), or pass it into the container",
            error.errno or 0,
        ) from error
    found = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    if not stat.S_ISCHR(status.st_mode) or found != number:
        raise _refused(path, f"is device {found}, not the character device {number}")


def character_devices(sysfs: Path = SYSFS, devices: Path = DEVICES) -> list[str]:
    """The character devices of all namespaces of this machine."""
    try:
        names = sorted(os.listdir(sysfs / _GENERIC))
    except OSError:  # No driver, or one from before Linux 5.13.
        return []
    return [os.fspath(devices / name) for name in names]


class Namespace:
    """An open character device of a namespace of plain blocks. Safe to use from many threads."""

    def __init__(
        self,
        path: str,
        fd: int,
        nsid: int,
        controller: ControllerIdentity,
        own: NamespaceIdentity,
        *,
        writable: bool,
    ) -> None:
        """Takes over fd. path: of the character device."""
        self.path = path
        self.fd = fd
        self.writable = writable
        self.nsid = nsid
        self.controller = controller
        self.own = own
        self._closed = False

    @classmethod
    def open(cls, path: str, *, writable: bool) -> Self:
        """Open a character device. Raises DeviceError, also for a namespace whose blocks carry
        metadata: it would lie in the buffers, or be made by somebody that is not there."""
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(
                f"cannot open {path} for NVMe commands: {error.strerror}. {_PERMISSION}",
                error.errno or 0,
            ) from error
        try:
            nsid = _ioctl(fd, path, commands.IOCTL_ID, None)
            answer = (ctypes.c_uint64 * (commands.IDENTIFY_BYTES // 8))()
            address = ctypes.addressof(answer)
            _send(fd, path, commands.IOCTL_ADMIN, commands.identify_controller(address))
            controller = ControllerIdentity.parse(bytes(answer))
            _send(fd, path, commands.IOCTL_ADMIN, commands.identify_namespace(nsid, address))
            own = NamespaceIdentity.parse(bytes(answer))
            if own.metadata_bytes or own.protection:
                raise DeviceError(
                    f"the blocks of {path} carry {own.metadata_bytes} bytes of metadata each, with "
                    f"protection of type {own.protection}: NVMe commands on such a namespace are "
                    "not supported. Use the engine io_uring, or format it without metadata",
                    errno.EOPNOTSUPP,
                )
            return cls(path, fd, nsid, controller, own, writable=writable)
        except BaseException:
            os.close(fd)
            raise

    def flush(self) -> None:
        """Return when everything written before is durable. Raises DeviceError.

        It is never tried twice: what made it fail may have lost what it was to make durable, and a
        second one would not say so.
        """
        _send(self.fd, self.path, commands.IOCTL_IO, commands.flush(self.nsid))

    def deallocate(self, pieces: list[tuple[int, int]]) -> None:
        """Forget blocks. pieces: (first block, blocks). Raises DeviceError."""
        for start in range(0, len(pieces), commands.RANGES_MAX):
            few = pieces[start : start + commands.RANGES_MAX]
            data = ctypes.create_string_buffer(commands.ranges(few))
            command = commands.deallocate(self.nsid, ctypes.addressof(data), len(few))
            _send(self.fd, self.path, commands.IOCTL_IO, command)

    def transfer_bytes_max(self, queue: Path) -> int:
        """Bytes that one command may move, from and to any address: a power of two, as most
        requests are, so that those above it are split evenly.

        queue: the settings of the namespace's block device. The kernel takes what is within its
        own limits as one command, and refuses the rest.
        """
        limits = [
            commands.BLOCKS_MAX * self.own.block_bytes,
            1024 * _number(queue / "max_hw_sectors_kb"),
            # Memory that does not begin on an OS page takes one segment more.
            (_number(queue / "max_segments") - 1) * os_page_bytes(),
        ]
        if self.controller.transfer_bytes_max is not None:
            limits.append(self.controller.transfer_bytes_max)
        least = min(limits)
        if least < self.own.block_bytes:
            raise DeviceError(
                f"{self.path} moves at most {least} bytes with one command, less than one of its "
                f"blocks of {self.own.block_bytes} bytes",
                errno.EINVAL,
            )
        return 1 << (least.bit_length() - 1)

    def close(self) -> None:
        """Nothing may be in flight. Calling it twice is allowed."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError) as error:
        raise DeviceError(f"the kernel does not tell {path}: {error}", errno.EINVAL) from error


def _send(fd: int, path: str, request: int, command: bytes) -> None:
    """Send one command and wait for its end. Raises DeviceError."""
    status = _ioctl(fd, path, request, ctypes.create_string_buffer(command, len(command)))
    if status:
        raise DeviceError(
            f"{path} refused command {command[0]:#04x}: {commands.status_words(status)}",
            commands.status_errno(status),
        )


def _ioctl(fd: int, path: str, request: int, argument: "ctypes.Array[ctypes.c_char] | None") -> int:
    try:
        return syscalls.ioctl(fd, request, argument)
    except OSError as error:
        raise DeviceError(
            f"{path} takes no NVMe commands: {error.strerror}. {_PERMISSION}", error.errno or 0
        ) from error
