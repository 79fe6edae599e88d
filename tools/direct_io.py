"""Tries O_DIRECT for real: in a folder with a small file, on a device or region by reading it."""

import errno
import fcntl
import mmap
import os
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import DeviceError

TRIED_BYTES = 4096
_SMALLEST_BLOCK_BYTES = 512
_BLKSSZGET = 0x1268


@dataclass(frozen=True, slots=True)
class DirectReport:
    """usable: proven by a transfer. block_bytes: what transfers must be multiples of, if known."""

    path: str
    usable: bool
    reason: str
    block_bytes: int | None


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
    done = "written and read" if write else "read"
    return DirectReport(shown, True, f"{TRIED_BYTES} bytes {done} past the page cache", block)


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
    return f"refused: {error.strerror} ({name}); run as a user who may read and write it"
