"""Opening a device or region file for direct I/O, and what every engine does with it the same way.

Invariants of RawFile:
- `fd` is closed only when nobody uses it: every system call on it happens inside `use()`, or
  between `acquire` and `release`, and `close` waits for the last one.
- Only the process that opened it may use it.
"""

import errno
import fcntl
import logging
import os
import pwd
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from kvtier.errors import (
    AlignmentError,
    CapacityError,
    ClosedError,
    ConfigError,
    DeviceError,
    ForeignDataError,
    LockedError,
)
from kvtier.io import syscalls
from kvtier.io.alignment import GRID_BYTES, align_down
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Int64Array
from kvtier.io.foreign import in_use_by

DirectMode = Literal["required", "preferred", "off"]

_BLKSSZGET = 0x1268
_BLKDISCARD = 0x1277
_BLKGETSIZE64 = 0x80081272
_BLOCK_BYTES_MIN = 512
_ZERO_WRITE_BYTES = 4 * 1024 * 1024
REFUSED_TO_ROOT = (
    "root is refused it by a container, a cgroup's list of devices or a security module: allow the "
    "device there"
)

_log = logging.getLogger("kvtier")


class RawFile:
    """An open device or file. Sizes in bytes."""

    def __init__(
        self,
        path: str,
        fd: int,
        *,
        sizes: tuple[int, int],
        is_block_device: bool,
        direct: tuple[bool, str],
    ) -> None:
        """sizes: (block_bytes, capacity_bytes). direct: (direct_io, direct_io_reason)."""
        self.path = path
        self.fd = fd
        self.block_bytes, self.capacity_bytes = sizes
        self.is_block_device = is_block_device
        self.direct_io, self.direct_io_reason = direct
        self._pid = os.getpid()
        self._idle = threading.Condition()
        self._users = 0
        self._closed = False
        self._fd_closed = False

    def ensure_open(self) -> None:
        """Raise ClosedError after `close`, or in a process that did not open the file."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self.path} was opened by process {self._pid} and cannot be used in its forked "
                f"child {os.getpid()}: open it anew there"
            )
        if self._closed:
            raise ClosedError(f"{self.path} is closed")

    def acquire(self) -> int:
        """The fd, which stays open until `release`. Raises ClosedError."""
        self.ensure_open()
        with self._idle:
            self.ensure_open()
            self._users += 1
        return self.fd

    def release(self) -> None:
        """Undo one `acquire`, from any thread."""
        with self._idle:
            self._users -= 1
            self._idle.notify_all()

    @contextmanager
    def use(self) -> Iterator[int]:
        """The fd, which stays open for the length of the block. Raises ClosedError."""
        fd = self.acquire()
        try:
            yield fd
        finally:
            self.release()

    def refuse(self) -> None:
        """Let nobody in any more; who is in goes on. The first half of `close`."""
        with self._idle:
            self._closed = True

    def flush(self) -> None:
        """Return when everything written before is durable. Raises DeviceError, ClosedError."""
        with self.use() as fd:
            try:
                os.fdatasync(fd)
            except OSError as error:
                raise DeviceError(
                    f"{self.path} could not be made durable: {error.strerror}", error.errno or 0
                ) from error

    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        """Discard the ranges on a device, punch them out of a file. See Device.discard.

        A hole that was punched into a file must be allocated again by the next write to it, which
        can then fail with ENOSPC.
        """
        ranges = self.ranges_to_discard(offsets, lengths)
        with self.use() as fd:
            for offset, length in ranges:
                if not self._discard_range(fd, offset, length):
                    return False
        return True

    def ranges_to_discard(self, offsets: Int64Array, lengths: Int64Array) -> list[tuple[int, int]]:
        """(offset, length) of every range that is not empty. Raises AlignmentError, ConfigError."""
        if len(offsets) != len(lengths):
            raise ConfigError(f"discard got {len(offsets)} offsets and {len(lengths)} lengths")
        ranges = list(zip(map(int, offsets), map(int, lengths), strict=True))
        for offset, length in ranges:
            if (offset | length) % self.block_bytes:
                raise AlignmentError(offset, length, 0, self.block_bytes)
            if offset < 0 or length < 0 or offset + length > self.capacity_bytes:
                raise ConfigError(
                    f"discard at offset {offset} of {length} bytes lies outside {self.path} of "
                    f"{self.capacity_bytes} bytes"
                )
        return [each for each in ranges if each[1]]

    def close(self) -> None:
        """Wait for system calls in flight and close the fd. Calling it twice is allowed."""
        if os.getpid() != self._pid:
            # A lock that another thread held at the fork is never released here, so take none.
            self._closed = True
            self._close_fd()
            return
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._users)
            if not self._fd_closed and not self.is_block_device:
                # A child that was forked meanwhile shares the lock, and may live longer.
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            self._close_fd()

    def _close_fd(self) -> None:
        if not self._fd_closed:
            self._fd_closed = True
            os.close(self.fd)

    def _discard_range(self, fd: int, offset: int, length: int) -> bool:
        try:
            if self.is_block_device:
                fcntl.ioctl(fd, _BLKDISCARD, struct.pack("QQ", offset, length))
            else:
                mode = syscalls.FALLOC_PUNCH_HOLE | syscalls.FALLOC_KEEP_SIZE
                syscalls.fallocate(fd, mode, offset, length)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS):
                return False
            raise DeviceError(
                f"{self.path} refused to discard {length} bytes at offset {offset}: "
                f"{error.strerror}",
                error.errno or 0,
            ) from error
        return True


def open_raw(path: str, *, writable: bool, direct: DirectMode = "preferred") -> RawFile:
    """Open a block device or a file for direct I/O.

    direct: "required" raises where the file system refuses direct I/O; "preferred" goes through
    the page cache there, says so in `direct_io_reason` and logs one warning; "off" never asks.
    What is opened for writing is opened exclusively. Raises DeviceError, ForeignDataError if a
    device is mounted or otherwise in use, and LockedError if a file has another writer.
    """
    is_block = stat.S_ISBLK(_status(path, writable).st_mode)
    block_bytes, refusal = GRID_BYTES, ""
    if direct == "off":
        refusal = "switched off by the caller"
    elif not is_block:
        block_bytes, refusal = _file_block(path)
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
    if is_block and writable:
        flags |= os.O_EXCL
    fd = -1
    if not refusal:
        fd = _open_fd(path, flags | os.O_DIRECT, writable)
        if fd < 0:
            refusal = "the file system refuses O_DIRECT (EINVAL)"
    direct_io = fd >= 0
    if not direct_io:
        if direct == "required":
            raise DeviceError(
                f"direct I/O was required for {path}, but {refusal}. Put the region on a block "
                "device, ext4 or XFS, or allow the page cache (direct='preferred').",
                errno.EINVAL,
            )
        fd = _open_fd(path, flags, writable)
        if fd < 0:
            raise DeviceError(f"cannot open {path}: {os.strerror(errno.EINVAL)}", errno.EINVAL)
        if direct == "preferred":
            _log.warning("%s goes through the page cache: %s", path, refusal)
    try:
        if writable and not is_block:
            _lock_file(fd, path)
        if is_block:
            block_bytes = _ioctl_number(fd, _BLKSSZGET, "i")
            capacity = _ioctl_number(fd, _BLKGETSIZE64, "Q")
        else:
            capacity = align_down(os.fstat(fd).st_size, block_bytes)
    except LockedError:
        os.close(fd)
        raise
    except OSError as error:
        os.close(fd)
        raise DeviceError(f"{path} does not tell its size: {error}", error.errno or 0) from error
    return RawFile(
        path,
        fd,
        sizes=(block_bytes, capacity),
        is_block_device=is_block,
        direct=(direct_io, "O_DIRECT" if direct_io else f"page cache: {refusal}"),
    )


def _lock_file(fd: int, path: str) -> None:
    """What O_EXCL is for a block device: one writer, whatever store it believes to belong to."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LockedError(
            f"{path} is open for writing already, by another store or a copy of this one. Close "
            "it there",
            errno.EWOULDBLOCK,
        ) from error


def _file_block(path: str) -> tuple[int, str]:
    """Block size of a file for direct I/O, in bytes, and why it is refused ("" if it is not)."""
    try:
        alignment = syscalls.direct_alignment(path)
    except OSError as error:
        raise DeviceError(f"cannot look at {path}: {error.strerror}", error.errno or 0) from error
    if alignment is None:
        # Kernels before 6.1 do not say; every file system in use accepts 4096 bytes.
        return GRID_BYTES, ""
    if not alignment.offset_bytes:
        return GRID_BYTES, "statx says that the file system has no direct I/O for this file"
    return max(alignment.offset_bytes, alignment.memory_bytes, _BLOCK_BYTES_MIN), ""


def _open_fd(path: str, flags: int, writable: bool) -> int:
    """An open fd, or -1 if these flags are refused with EINVAL. Raises DeviceError."""
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return -1
        raise _open_error(path, writable, error) from error


def create_region_file(path: str, nbytes: int) -> None:
    """Make a file of zeros, mode 0600, with all its blocks allocated. Not durable yet.

    nbytes: multiple of GRID_BYTES. Raises CapacityError if the file system has no room, DeviceError
    if the file exists or cannot be made; nothing is left behind then.
    """
    if nbytes <= 0 or nbytes % GRID_BYTES:
        raise ConfigError(f"a region file needs a multiple of {GRID_BYTES} bytes: got {nbytes}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DeviceError(
            f"cannot create the region file {path}: {error.strerror}", error.errno or 0
        ) from error
    try:
        try:
            _allocate(fd, path, nbytes)
        finally:
            os.close(fd)
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, OSError) and not isinstance(error, DeviceError):
            raise DeviceError(
                f"cannot allocate {nbytes} bytes for {path}: {error.strerror}", error.errno or 0
            ) from error
        raise


def _allocate(fd: int, path: str, nbytes: int) -> None:
    room = os.fstatvfs(fd)
    free, limit = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    full = CapacityError(f"the file system of {path}", nbytes, free, limit)
    if nbytes > free:
        raise full
    try:
        try:
            syscalls.fallocate(fd, 0, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            zeros = aligned_bytes(min(nbytes, _ZERO_WRITE_BYTES)).data
            position = 0
            while position < nbytes:
                position += os.pwrite(fd, zeros[: nbytes - position], position)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full from error
        raise


def _status(path: str, writable: bool) -> os.stat_result:
    try:
        status = os.stat(path)
    except OSError as error:
        raise _open_error(path, writable, error) from error
    if stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode):
        return status
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFCHR: "a character device"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "neither a file nor a block device")
    raise DeviceError(
        f"{path} is {kind}: a region needs a block device or a regular file", errno.EINVAL
    )


def _open_error(path: str, writable: bool, error: OSError) -> DeviceError:
    number = error.errno or 0
    if number == errno.ENOENT:
        return DeviceError(f"{path} does not exist: check the path, or create the region", number)
    if number == errno.EBUSY:
        use = in_use_by(path) or "another program has it open exclusively"
        return ForeignDataError(f"{path} is in use: {use}. Release it first.", number)
    if number in (errno.EACCES, errno.EPERM):
        return DeviceError(_permission_message(path, writable), number)
    return DeviceError(f"cannot open {path}: {error.strerror}", number)


def _permission_message(path: str, writable: bool) -> str:
    own = (
        f"this process has uid {os.geteuid()} and groups {sorted({os.getegid(), *os.getgroups()})}"
    )
    try:
        status = os.stat(path)
    except OSError:
        return f"no permission to reach {path}: a directory above it may not be searched; {own}"
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = "no name"
    refused = [
        word
        for word, mode in (("read", os.R_OK), ("write", os.W_OK))
        if (mode == os.R_OK or writable) and not os.access(path, mode, effective_ids=True)
    ]
    remedy = "Add the user to its group, or chmod."
    if os.geteuid() == 0:
        remedy = f"{REFUSED_TO_ROOT.capitalize()}."
    return (
        f"no permission to {' and '.join(refused) or 'open'} {path}: it belongs to uid "
        f"{status.st_uid} ({owner}), gid {status.st_gid}, mode {stat.filemode(status.st_mode)} "
        f"({stat.S_IMODE(status.st_mode):#o}); {own}. {remedy}"
    )


def _ioctl_number(fd: int, request: int, kind: str) -> int:
    buffer = bytearray(struct.calcsize(kind))
    fcntl.ioctl(fd, request, buffer)
    return int(struct.unpack(kind, buffer)[0])
