"""An io_uring driven from numpy: submission entries are written, completions read, as arrays.

Plain Python has no memory barriers. The submission ring needs none: without a kernel polling thread
the kernel looks at it only inside io_uring_enter, called by the thread that wrote it or, where the
processor keeps stores in order, by one that waits. A completion
is read after the tail that announces it was loaded, turned into a Python int and used for the
shape of an index: what depends on it cannot overtake it.

Invariants:
- One thread at a time pushes, submits and reaps; its owner holds a lock. Another one may be inside
  `wait` meanwhile, and nobody else reaps then.
- `in_flight` counts requests that were pushed and not reaped: their memory must stay alive.
- `_tail` and `_head` are the only writers of the shared indices that belong to us.
"""

import ctypes
import errno
import mmap
import os
import platform
import sys
import time
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier.io import syscalls
from kvtier.io.device import Int64Array

READ, WRITE = 22, 23
READ_FIXED, WRITE_FIXED = 4, 5
_COMMAND = 46
ASYNC = 1 << 4
"""Flag: begin the request on a thread of the kernel, where it would copy from the page cache."""

_ENTER_GETEVENTS = 1
_REGISTER_BUFFERS, _UNREGISTER_BUFFERS = 0, 1
_REGISTER_EVENTFD = 4
_MAP_POPULATE = 0x8000
_SQES_OFFSET = 0x10000000
_BUSY_RETRY_S = 0.0005
_BUSY_RETRIES_MAX = 20_000

_SQE = np.dtype(
    {
        "names": ["opcode", "flags", "fd", "offset", "address", "length", "user_data", "buffer"],
        "formats": ["u1", "u1", "i4", "i8", "i8", "u4", "i8", "u2"],
        "offsets": [0, 1, 4, 8, 16, 24, 32, 40],
        "itemsize": 64,
    }
)
COMMAND_BYTES = 80
_COMMAND_SQE = np.dtype(
    {
        "names": ["opcode", "fd", "operation", "user_data", "command"],
        "formats": ["u1", "i4", "u4", "i8", ("u1", COMMAND_BYTES)],
        "offsets": [0, 4, 8, 32, 48],
        "itemsize": 128,
    }
)
_CQE = np.dtype([("user_data", "i8"), ("result", "i4"), ("flags", "u4")])
_BIG_CQE = np.dtype([*_CQE.descr, ("answer", "u8", 2)])
_STORES_IN_ORDER = platform.machine() == "x86_64"
"""Whether entries that another thread pushes meanwhile are whole when their tail is seen: else the
call of a thread that waits, which does not hold the lock, could hand them over half written."""
assert _SQE.itemsize == 64
assert _CQE.itemsize == 16
assert _COMMAND_SQE.itemsize == 128
assert _BIG_CQE.itemsize == 32

Completions = npt.NDArray[np.int64]
"""int64 [completions, 2 or more]: user_data, and a word of which `results_of` makes the result."""

Entries = npt.NDArray[np.uint64]
"""uint64 [requests, 8]: entries of a submission queue as words, because numpy copies records field
by field. Made by `make_entries`. In a ring of big entries [requests, 16], by
`make_command_entries`."""


def make_entries(
    fd: int,
    opcodes: npt.NDArray[np.uint8] | np.uint8,
    where: tuple[Int64Array, Int64Array, Int64Array],
    buffers: Int64Array | int,
    user_data: Int64Array,
    flags: int = 0,
) -> Entries:
    """Entries for `Ring.push`. where: offsets, addresses, lengths."""
    entries = np.zeros(len(user_data), _SQE)
    entries["opcode"] = opcodes
    entries["flags"] = flags
    entries["fd"] = fd
    entries["offset"], entries["address"], entries["length"] = where
    entries["user_data"] = user_data
    entries["buffer"] = buffers
    return entries.view(np.uint64).reshape(-1, _SQE.itemsize // 8)


def make_command_entries(
    fd: int, operation: int, commands: npt.NDArray[np.uint8], user_data: Int64Array
) -> Entries:
    """Entries for `Ring.push` of a ring of big entries. operation: a command number of the driver
    behind fd. commands: uint8 [requests, COMMAND_BYTES], for the driver."""
    entries = np.zeros(len(user_data), _COMMAND_SQE)
    entries["opcode"] = _COMMAND
    entries["fd"] = fd
    entries["operation"] = operation
    entries["user_data"] = user_data
    entries["command"] = commands
    return entries.view(np.uint64).reshape(-1, _COMMAND_SQE.itemsize // 8)


def results_of(words: Int64Array) -> Int64Array:
    """The results of completions whose second words these are; the rest of a word is flags. A
    result that is not negative is the word itself, where there are none."""
    if sys.byteorder == "little":
        words = words << 32
    return words >> 32


def _index(queues: mmap.mmap, offset: int) -> memoryview:
    """One of the four numbers that ring and kernel share. A memoryview reads and writes a word at
    once, as they need it, and faster than an array of one."""
    return memoryview(queues)[offset : offset + 4].cast("I")


class Ring:
    """A submission and a completion queue shared with the kernel."""

    def __init__(
        self, fd: int, parameters: syscalls.RingParameters, queues: mmap.mmap, entries: mmap.mmap
    ) -> None:
        """Takes over the fd of io_uring_setup; queues, entries: the ring's two mappings."""
        self.fd = fd
        self.depth = int(parameters.sq_entries)
        sq, cq = list(parameters.sq_offsets), list(parameters.cq_offsets)
        self._sq_head = _index(queues, sq[0])
        self._sq_tail = _index(queues, sq[1])
        self._sq_mask = int(np.frombuffer(queues, np.uint32, 1, sq[2])[0])
        self._cq_head = _index(queues, cq[0])
        self._cq_tail = _index(queues, cq[1])
        self._cq_mask = int(np.frombuffer(queues, np.uint32, 1, cq[2])[0])
        entry, completion = _entry_types(parameters)
        parts = completion.itemsize // 8
        completions = np.frombuffer(queues, np.int64, parts * parameters.cq_entries, cq[5])
        self._cqes = completions.reshape(-1, parts)
        words = entry.itemsize // 8
        self._sqes = np.frombuffer(entries, np.uint64, words * self.depth).reshape(-1, words)
        # Entry i of the index array always names submission entry i.
        np.frombuffer(queues, np.uint32, self.depth, sq[6])[:] = np.arange(self.depth)
        self._tail = self._sq_tail[0]
        self._head = self._cq_head[0]
        self.in_flight = 0

    @classmethod
    def open(cls, depth: int, *, big_entries: bool = False) -> Self:
        """A ring for `depth` requests at once. big_entries: for commands to drivers (Linux 5.19).

        Raises the kernel's OSError.
        """
        parameters = syscalls.RingParameters()
        if big_entries:
            parameters.flags = syscalls.SETUP_BIG_ENTRIES
        fd = syscalls.cooperative_ring(depth, parameters)
        try:
            sq, cq = list(parameters.sq_offsets), list(parameters.cq_offsets)
            # Since kernel 5.4 one mapping holds both queues.
            entry, completion = _entry_types(parameters)
            size = max(
                sq[6] + 4 * parameters.sq_entries,
                cq[5] + completion.itemsize * parameters.cq_entries,
            )
            flags = mmap.MAP_SHARED | _MAP_POPULATE
            queues = mmap.mmap(fd, size, flags=flags, offset=0)
            entries = mmap.mmap(
                fd, parameters.sq_entries * entry.itemsize, flags=flags, offset=_SQES_OFFSET
            )
            return cls(fd, parameters, queues, entries)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Release the ring. Nothing may be in flight."""
        os.close(self.fd)

    def register_buffers(self, addresses: list[int], lengths: list[int]) -> None:
        """Pin memory for READ_FIXED and WRITE_FIXED. Raises the kernel's OSError."""
        flat = [value for pair in zip(addresses, lengths, strict=True) for value in pair]
        vectors = (ctypes.c_uint64 * len(flat))(*flat)
        syscalls.io_uring_register(self.fd, _REGISTER_BUFFERS, vectors, len(addresses))

    def unregister_buffers(self) -> None:
        """Undo register_buffers. Raises the kernel's OSError."""
        syscalls.io_uring_register(self.fd, _UNREGISTER_BUFFERS, None, 0)

    def register_event(self, eventfd: int) -> None:
        """Have the kernel signal an eventfd at every completion. Raises the kernel's OSError."""
        syscalls.io_uring_register(self.fd, _REGISTER_EVENTFD, (ctypes.c_int32 * 1)(eventfd), 1)

    def push(self, entries: Entries) -> None:
        """Write entries, as `make_entries` makes them, for `submit` or `wait` to hand over."""
        count = len(entries)
        assert self.in_flight + count <= self.depth, "the ring is full"
        at = self._tail & self._sq_mask
        before_end = self.depth - at
        if count <= before_end:
            self._sqes[at : at + count] = entries
        else:
            self._sqes[at:] = entries[:before_end]
            self._sqes[: count - before_end] = entries[before_end:]
        self._tail = (self._tail + count) & 0xFFFFFFFF
        self.in_flight += count
        self._sq_tail[0] = self._tail

    def submit(self) -> None:
        """Hand over what was pushed. Raises the kernel's OSError."""
        while count := self.unsubmitted:
            self._enter(count, 0)

    def left_to_wait(self) -> int:
        """How many entries `wait` shall hand over; where it may not, they are handed over now."""
        if not _STORES_IN_ORDER:
            self.submit()
        return self.unsubmitted

    def wait(self, count: int, submit: int = 0) -> None:
        """Hand over `submit` entries and return when `count` completions are there, or earlier.

        Where others submit at the same time, it may return before either. Raises the kernel's
        OSError.
        """
        self._enter(submit, count)

    @property
    def unsubmitted(self) -> int:
        """Entries that were pushed and not handed over."""
        # The kernel moves the head when it takes entries, so this also counts what an interrupted
        # call left behind.
        return (self._tail - self._sq_head[0]) & 0xFFFFFFFF

    def _enter(self, submit: int, wait: int) -> None:
        """Retries what a signal interrupted and what the kernel had no room for."""
        for _ in range(_BUSY_RETRIES_MAX):
            try:
                syscalls.io_uring_enter(self.fd, submit, wait, _ENTER_GETEVENTS)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EBUSY):
                    raise
                if wait and self._cq_tail[0] != self._head:
                    return
                time.sleep(_BUSY_RETRY_S)
                continue
            return
        raise OSError(errno.EAGAIN, "io_uring found no room for requests for a long time")

    def reap(self) -> Completions:
        """Every completion that is there."""
        count = (self._cq_tail[0] - self._head) & 0xFFFFFFFF
        at = self._head & self._cq_mask
        if at + count <= self._cq_mask + 1:
            done = self._cqes[at : at + count].copy()
        else:
            done = self._cqes[(at + np.arange(count)) & self._cq_mask]
        # Only now may the kernel write there again.
        self._head = (self._head + count) & 0xFFFFFFFF
        self._cq_head[0] = self._head
        self.in_flight -= count
        return done

    def drain(self) -> None:
        """Wait for everything in flight and drop the results."""
        while self.in_flight:
            self.submit()
            self.wait(self.in_flight)
            self.reap()


def _entry_types(
    parameters: syscalls.RingParameters,
) -> tuple[np.dtype[np.void], np.dtype[np.void]]:
    """What a submission and a completion entry of a ring look like."""
    if parameters.flags & syscalls.SETUP_BIG_ENTRIES:
        return _COMMAND_SQE, _BIG_CQE
    return _SQE, _CQE
