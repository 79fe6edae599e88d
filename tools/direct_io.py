"""Tries O_DIRECT for real: in a folder with a small file, on a device or region by reading it."""

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import DeviceError

TRIED_BYTES = 4096
_SMALLEST_BLOCK_BYTES = 512
_BLKSSZGET = 0x1268
MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class DirectReport:
    """usable: proven by a transfer. block_bytes: what transfers must be multiples of, if known.

    file_system: its type, such as ext4; None where unknown, and for a block device. missing: there
    was nothing to try.
    """

    path: str
    usable: bool
    reason: str
    block_bytes: int | None
    file_system: str | None = None
    missing: bool = False

    @property
    def in_memory(self) -> bool:
        """Whether the bytes lie in memory: direct I/O is accepted there, but there is no drive."""
        return self.file_system in IN_MEMORY


def file_system_of(path: str, mounts: Path = MOUNTS) -> str | None:
    """The type of the file system that holds `path`; None where the kernel does not tell."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = Path(os.path.realpath(path))
    best, kind = -1, None
    for line in lines:
        # ID PARENT DEVICE ROOT MOUNT-POINT OPTIONS [TAGS] - TYPE SOURCE ..., see proc(5).
        before, _, after = line.partition(" - ")
        escaped = before.split(" ")[4]
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped))
        # A later mount on the same folder hides an earlier one.
        if real.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split(" ")[0]
    return kind


def try_folder(folder: Path) -> DirectReport:
    """Write and read a temporary file in `folder` past the page cache; nothing is left behind."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".kvtier-doctor-", dir=folder)
    except OSError as error:
        return DirectReport(str(folder), False, f"cannot write there: {error.strerror}", None)
    os.close(descriptor)
    try:
        return _try(name, str(folder), write=True)
    finally:
        os.unlink(name)


def try_device(path: str) -> DirectReport:
    """Read the beginning of a block device or region file past the page cache.

    Raises DeviceError if there is nothing of that name, or a folder or character device.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise DeviceError(f"cannot look at {path}: {error.strerror}", error.errno or 0) from error
    if not (stat.S_ISBLK(mode) or stat.S_ISREG(mode)):
        raise DeviceError(
            f"{path} is neither a block device nor a file: name a device such as /dev/nvme0n1, "
            "or a store's region file",
            errno.ENOTBLK,
        )
    return _try(path, path, write=False)


def _try(path: str, shown: str, *, write: bool) -> DirectReport:
    flags = os.O_DIRECT | os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        return DirectReport(shown, False, _refusal(error), None)
    try:
        # An anonymous map is aligned to an OS page, as O_DIRECT wants its memory.
        with mmap.mmap(-1, TRIED_BYTES) as memory:
            if write:
                memory.write(b"\xa5" * TRIED_BYTES)
                os.pwritev(descriptor, [memory], 0)
            count = os.preadv(descriptor, [memory], 0)
            if count != TRIED_BYTES:
                return DirectReport(shown, False, f"a read of 4096 bytes gave {count}", None)
            block = _block_bytes(descriptor, memory)
    except OSError as error:
        return DirectReport(shown, False, _refusal(error), None)
    finally:
        os.close(descriptor)
    kind = None if _is_block_device(path) else file_system_of(path)
    done = "written and read" if write else "read"
    reason = f"{TRIED_BYTES} bytes {done} past the page cache"
    if kind in IN_MEMORY:
        reason = (
            f"accepted, but {kind} is memory, not a drive: what is stored here takes memory and is "
            "lost at restart; use a folder on a drive"
        )
    return DirectReport(shown, True, reason, block, kind)


def _is_block_device(path: str) -> bool:
    return stat.S_ISBLK(os.stat(path).st_mode)


def _block_bytes(descriptor: int, memory: mmap.mmap) -> int:
    """The logical block size of a device; for a file the smallest read that is not refused."""
    if stat.S_ISBLK(os.fstat(descriptor).st_mode):
        answer = fcntl.ioctl(descriptor, _BLKSSZGET, struct.pack("i", 0))
        return int(struct.unpack("i", answer)[0])
    block = _SMALLEST_BLOCK_BYTES
    while block < TRIED_BYTES:
        try:
            os.preadv(descriptor, [memoryview(memory)[:block]], block)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            block *= 2
        else:
            return block
    return block


def _refusal(error: OSError) -> str:
    if error.errno == errno.EINVAL:
        return "the file system refuses direct I/O (EINVAL); transfers go through the page cache"
    name = errno.errorcode.get(error.errno or 0, "no errno")
    words = f"refused: {error.strerror} ({name})"
    if error.errno not in (errno.EACCES, errno.EPERM):
        return words
    if os.geteuid() == 0:
        # Imported here: with it comes numpy, and who is not refused does not wait for that.
        from kvtier.io.rawfile import REFUSED_TO_ROOT

        return f"{words}; {REFUSED_TO_ROOT}"
    return f"{words}; run as a user who may read and write it"
