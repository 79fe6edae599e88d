"""Linux system calls that Python's os module lacks, by ctypes (which releases the GIL).

Every function returns a result or raises the plain OSError of the kernel's errno; the callers know
what the errno means and turn it into an error of kvtier.
"""

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass

_CACHESTAT = 451
_IO_URING_SETUP = 425
_IO_URING_ENTER = 426
_IO_URING_REGISTER = 427
# These numbers are the same on every architecture that has them.

_AT_FDCWD = -100
_STATX_BASIC_STATS = 0x7FF
_STATX_DIOALIGN = 0x2000

SETUP_BIG_ENTRIES = 1 << 10 | 1 << 11
"""Flags of io_uring_setup: submission entries of 128 bytes, completions of 32."""
SETUP_COOPERATIVE = 1 << 8
"""Flag of io_uring_setup (Linux 5.19): a completion does not interrupt the thread that submitted,
which books it at its next system call or interrupt."""
FALLOC_KEEP_SIZE = 1
FALLOC_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
# A function of its own: with the types known, a call takes half the time.
_enter = _libc["syscall"]
_enter.restype = ctypes.c_long
_enter.argtypes = [
    *(ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint),
    *(ctypes.c_void_p, ctypes.c_size_t),
]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class RingParameters(ctypes.Structure):
    """struct io_uring_params. sq_offsets and cq_offsets keep the kernel's order of fields."""

    _fields_ = (
        ("sq_entries", ctypes.c_uint32),
        ("cq_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("sq_thread_cpu", ctypes.c_uint32),
        ("sq_thread_idle", ctypes.c_uint32),
        ("features", ctypes.c_uint32),
        ("wq_fd", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 3),
        ("sq_offsets", ctypes.c_uint32 * 10),
        ("cq_offsets", ctypes.c_uint32 * 10),
    )


class _Statx(ctypes.Structure):
    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("before_alignment", ctypes.c_uint8 * 148),
        ("dio_mem_align", ctypes.c_uint32),
        ("dio_offset_align", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 96),
    )


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


assert ctypes.sizeof(RingParameters) == 120
assert ctypes.sizeof(_Statx) == 256
assert _Statx.dio_mem_align.offset == 152


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """What direct I/O on a file needs, in bytes; offset_bytes 0 means that it is refused."""

    memory_bytes: int
    offset_bytes: int


def _raise_errno() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


def io_uring_setup(entries: int, parameters: RingParameters) -> int:
    """File descriptor of a new ring; fills `parameters`, whose flags are what it got."""
    fd = int(_syscall(_IO_URING_SETUP, ctypes.c_uint(entries), ctypes.byref(parameters)))
    if fd < 0:
        _raise_errno()
    return fd


def cooperative_ring(entries: int, parameters: RingParameters) -> int:
    """The same with SETUP_COOPERATIVE, if the kernel knows it; `parameters` say so."""
    asked = parameters.flags
    parameters.flags = asked | SETUP_COOPERATIVE
    try:
        return io_uring_setup(entries, parameters)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        parameters.flags = asked
        return io_uring_setup(entries, parameters)


def io_uring_enter(ring_fd: int, submit: int, wait: int, flags: int) -> int:
    """Submit requests and wait for completions. Returns how many were submitted."""
    done: int = _enter(_IO_URING_ENTER, ring_fd, submit, wait, flags, None, 0)
    if done < 0:
        _raise_errno()
    return done


def io_uring_register(
    ring_fd: int,
    opcode: int,
    argument: ctypes.Array[ctypes.c_uint64] | ctypes.Array[ctypes.c_int32] | None,
    count: int,
) -> None:
    """Register or unregister buffers or an eventfd."""
    if _syscall(_IO_URING_REGISTER, ring_fd, ctypes.c_uint(opcode), argument, count) < 0:
        _raise_errno()


def ioctl(fd: int, request: int, argument: "ctypes.Array[ctypes.c_char] | None") -> int:
    """ioctl(2), whose result may be a number. That of Python's fcntl keeps the GIL meanwhile."""
    result = int(_libc.ioctl(fd, ctypes.c_ulong(request), argument))
    if result < 0:
        _raise_errno()
    return result


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2) itself: glibc's posix_fallocate would write bytes where it is unsupported."""
    if _libc.fallocate(fd, mode, offset, length) < 0:
        _raise_errno()


def direct_alignment(path: str) -> DirectAlignment | None:
    """What statx says about direct I/O on this file; None where the kernel does not say."""
    result = _Statx()
    mask = ctypes.c_uint(_STATX_BASIC_STATS | _STATX_DIOALIGN)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), 0, mask, ctypes.byref(result)) < 0:
        _raise_errno()
    if not result.mask & _STATX_DIOALIGN:
        return None
    return DirectAlignment(int(result.dio_mem_align), int(result.dio_offset_align))


def cachestat(fd: int) -> int:
    """Pages of this file that are in the page cache."""
    whole, result = _CachestatRange(0, 0), _Cachestat()
    arguments = (ctypes.byref(whole), ctypes.byref(result), ctypes.c_uint(0))
    if _syscall(_CACHESTAT, fd, *arguments) < 0:
        _raise_errno()
    return int(result.cached)


def mincore(address: int, length: int, pages: "ctypes.Array[ctypes.c_ubyte]") -> None:
    """Fill one byte per OS page of the mapping; its lowest bit says that the page is cached."""
    if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), pages) < 0:
        _raise_errno()


def return_pages(address: int, length: int) -> None:
    """madvise(2) with MADV_DONTNEED: whole OS pages go back to the system and read as zeros."""
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), mmap.MADV_DONTNEED) < 0:
        _raise_errno()
