"""An io_uring driven from numpy: submission entries are written, completions read, as arrays.

Plain Python has no memory barriers. The submission ring needs none: without a kernel polling thread
the kernel looks at it only inside io_uring_enter, called by the thread that wrote it. A completion
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
import time
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier.io import syscalls
from kvtier.io.device import Int64Array

READ, WRITE = 22, 23
READ_FIXED, WRITE_FIXED = 4, 5
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
        "formats": ["u1", "u1", "i4", "u8", "u8", "u4", "u8", "u2"],
        "offsets": [0, 1, 4, 8, 16, 24, 32, 40],
        "itemsize": 64,
    }
)
_CQE = np.dtype([("user_data", "u8"), ("result", "i4"), ("flags", "u4")])
assert _SQE.itemsize == 64
assert _CQE.itemsize == 16


class Ring:
    """A submission and a completion queue shared with the kernel."""

    def __init__(
        self, fd: int, parameters: syscalls.RingParameters, queues: mmap.mmap, entries: mmap.mmap
    ) -> None:
        """Takes over the fd of io_uring_setup; queues, entries: the ring's two mappings."""
        self.fd = fd
        self.depth = int(parameters.sq_entries)
        sq, cq = list(parameters.sq_offsets), list(parameters.cq_offsets)
        self._sq_head = np.frombuffer(queues, np.uint32, 1, sq[0])
        self._sq_tail = np.frombuffer(queues, np.uint32, 1, sq[1])
        self._sq_mask = int(np.frombuffer(queues, np.uint32, 1, sq[2])[0])
        self._cq_head = np.frombuffer(queues, np.uint32, 1, cq[0])
        self._cq_tail = np.frombuffer(queues, np.uint32, 1, cq[1])
        self._cq_mask = int(np.frombuffer(queues, np.uint32, 1, cq[2])[0])
        self._cqes = np.frombuffer(queues, _CQE, parameters.cq_entries, cq[5])
        self._sqes = np.frombuffer(entries, _SQE, self.depth)
        # Entry i of the index array always names submission entry i.
        np.frombuffer(queues, np.uint32, self.depth, sq[6])[:] = np.arange(self.depth)
        self._tail = int(self._sq_tail[0])
        self._head = int(self._cq_head[0])
        self.in_flight = 0

    @classmethod
    def open(cls, depth: int) -> Self:
        """A ring for `depth` requests at once. Raises the kernel's OSError."""
        parameters = syscalls.RingParameters()
        fd = syscalls.io_uring_setup(depth, parameters)
        try:
            sq, cq = list(parameters.sq_offsets), list(parameters.cq_offsets)
            # Since kernel 5.4 one mapping holds both queues.
            size = max(sq[6] + 4 * parameters.sq_entries, cq[5] + 16 * parameters.cq_entries)
            flags = mmap.MAP_SHARED | _MAP_POPULATE
            queues = mmap.mmap(fd, size, flags=flags, offset=0)
            entries = mmap.mmap(fd, parameters.sq_entries * 64, flags=flags, offset=_SQES_OFFSET)
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

    def push(
        self,
        fd: int,
        opcodes: npt.NDArray[np.uint8],
        where: tuple[Int64Array, Int64Array, Int64Array],
        buffers: Int64Array,
        user_data: Int64Array,
        flags: int = 0,
    ) -> None:
        """Write entries for `submit` to hand over. where: offsets, addresses, lengths."""
        count = len(user_data)
        assert self.in_flight + count <= self.depth, "the ring is full"
        slots = (self._tail + np.arange(count)) & self._sq_mask
        entries = np.zeros(count, _SQE)
        entries["opcode"] = opcodes
        entries["flags"] = flags
        entries["fd"] = fd
        entries["offset"], entries["address"], entries["length"] = where
        entries["buffer"] = buffers
        entries["user_data"] = user_data
        self._sqes[slots] = entries
        self._tail = (self._tail + count) & 0xFFFFFFFF
        self.in_flight += count
        self._sq_tail[0] = self._tail

    def submit(self) -> None:
        """Hand over what was pushed. Raises the kernel's OSError."""
        while self._unsubmitted:
            self._enter(0)

    def wait(self, count: int) -> None:
        """Return when `count` completions are there, or earlier. Raises the kernel's OSError."""
        self._enter(count)

    @property
    def _unsubmitted(self) -> int:
        # The kernel moves the head when it takes entries, so this also counts what an interrupted
        # call left behind.
        return (self._tail - int(self._sq_head[0])) & 0xFFFFFFFF

    def _enter(self, wait: int) -> None:
        """Without `wait`, submit. Retries what a signal interrupted and what the kernel had no
        room for."""
        for _ in range(_BUSY_RETRIES_MAX):
            # Who waits does not hold the lock, and so leaves alone what others push.
            submit = 0 if wait else self._unsubmitted
            try:
                syscalls.io_uring_enter(self.fd, submit, wait, _ENTER_GETEVENTS)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EBUSY):
                    raise
                if wait and int(self._cq_tail[0]) != self._head:
                    return
                time.sleep(_BUSY_RETRY_S)
                continue
            return
        raise OSError(errno.EAGAIN, "io_uring found no room for requests for a long time")

    def reap(self) -> tuple[Int64Array, Int64Array]:
        """user_data and result of every completion that is there: int64 [completions] each."""
        count = (int(self._cq_tail[0]) - self._head) & 0xFFFFFFFF
        done = self._cqes[(self._head + np.arange(count)) & self._cq_mask]
        self._head = (self._head + count) & 0xFFFFFFFF
        self._cq_head[0] = self._head
        self.in_flight -= count
        return done["user_data"].astype(np.int64), done["result"].astype(np.int64)

    def drain(self) -> None:
        """Wait for everything in flight and drop the results."""
        while self.in_flight:
            self.submit()
            self.wait(self.in_flight)
            self.reap()
