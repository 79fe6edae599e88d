"""How much of a file the kernel's page cache holds: the proof that direct I/O bypasses it."""

import ctypes
import errno
import mmap
import os

from kvtier.errors import DeviceError
from kvtier.io import syscalls
from kvtier.io.alignment import align_up, os_page_bytes


def cached_bytes(path: str) -> int:
    """Bytes of this file or block device in the page cache, in whole OS pages.

    By cachestat (kernel 6.5), else by mincore. Raises DeviceError if neither works.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise DeviceError(f"cannot open {path}: {error.strerror}", error.errno or 0) from error
    try:
        try:
            return syscalls.cachestat(fd) * os_page_bytes()
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
                raise
            return _resident_pages(fd) * os_page_bytes()
    except OSError as error:
        raise DeviceError(
            f"the kernel does not tell what the page cache holds of {path}: {error.strerror}",
            error.errno or 0,
        ) from error
    finally:
        os.close(fd)


def _resident_pages(fd: int) -> int:
    nbytes = os.lseek(fd, 0, os.SEEK_END)
    if not nbytes:
        return 0
    pages = (ctypes.c_ubyte * (align_up(nbytes, os_page_bytes()) // os_page_bytes()))()
    # A private writable mapping, because ctypes takes the address of writable memory only.
    with mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as m:
        anchor = ctypes.c_char.from_buffer(m)
        try:
            syscalls.mincore(ctypes.addressof(anchor), nbytes, pages)
        finally:
            del anchor
    return sum(page & 1 for page in pages)
