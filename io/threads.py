"""A Device on eight worker loops around preadv and pwritev: works on every kernel.

Invariants:
- A batch returns, also by an exception, only when no worker touches its memory any more.
- Each worker takes a list of requests; one request alone is done by the calling thread.
- A request is done when all of its bytes moved or it has an errno.
"""

import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from kvtier.io.device import Buffers, Int64Array
from kvtier.io.raw_device import RETRIES_MAX, RETRY_S, RawDevice
from kvtier.io.rawfile import DirectMode, RawFile, check_memory, open_raw, raise_failures

WORKERS = 8


@dataclass(slots=True)
class _Batch:
    """One call of read or write, shared by the workers that carry it out."""

    move: Callable[[int], int]
    """Moves request i whole and returns 0 or an errno."""
    errors: Int64Array
    parts: int
    """Lists of requests that are not finished yet."""
    finished: threading.Condition = field(default_factory=threading.Condition)
    crash: BaseException | None = None

    def run(self, indices: Int64Array) -> None:
        """Move these requests, on the thread of the caller."""
        try:
            for i in indices:
                self.errors[i] = self.move(int(i))
        except BaseException as error:
            # It belongs to the thread that waits for the batch, which raises it.
            self.crash = error
        with self.finished:
            self.parts -= 1
            self.finished.notify_all()

    def wait(self) -> None:
        with self.finished:
            self.finished.wait_for(lambda: not self.parts)


class ThreadsDevice(RawDevice):
    """Open by `ThreadsDevice.open`. Batches of several threads share the workers."""

    engine = "threads"

    def __init__(self, raw: RawFile, workers: int) -> None:
        super().__init__(raw)
        self._jobs: queue.SimpleQueue[tuple[_Batch, Int64Array] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-io-{i}", daemon=True)
            for i in range(workers)
        ]

    @classmethod
    def open(cls, path: str, *, writable: bool = True, direct: DirectMode = "preferred") -> Self:
        """Open a block device or file and start the workers. Raises DeviceError."""
        device = cls(open_raw(path, writable=writable, direct=direct), WORKERS)
        for thread in device._threads:
            thread.start()
        return device

    def close(self) -> None:
        # Batches count as users of the file, so after this no job is left or can be added.
        self._raw.close()
        if os.getpid() != self._pid:
            return
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, indices = job
            batch.run(indices)
            # Without this an idle worker would keep the last batch's memory alive.
            del job, batch, indices

    def _batch(self, what: str, offsets: Int64Array, buffers: Buffers) -> None:
        with self._raw.use() as fd:
            self.check(offsets, buffers)
            check_memory(buffers, reading=what == "read")
            if not len(offsets):
                return
            memory = buffers.memory.data

            def move(i: int) -> int:
                start, length = int(buffers.starts[i]), int(buffers.lengths[i])
                view = memory[start : start + length]
                return self._move(what == "write", fd, int(offsets[i]), view)

            errors = np.zeros(len(offsets), np.int64)
            lists = self._split(buffers.lengths)
            batch = _Batch(move, errors, len(lists))
            if len(lists) == 1:
                batch.run(lists[0])
            else:
                for indices in lists:
                    self._jobs.put((batch, indices))
            try:
                batch.wait()
            except BaseException:
                # Ctrl-C: the workers still move bytes of our memory.
                batch.wait()
                raise
        if batch.crash is not None:
            raise batch.crash
        raise_failures(what, self.path, offsets, buffers.lengths, errors)

    def _split(self, lengths: Int64Array) -> list[Int64Array]:
        """Lists of neighbouring requests of about the same bytes, at most one per worker."""
        ends = np.cumsum(lengths)
        workers = min(WORKERS, len(lengths))
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, workers) / workers)
        lists = np.split(np.arange(len(lengths)), cuts)
        return [indices for indices in lists if len(indices)]

    def _move(self, writing: bool, fd: int, offset: int, view: memoryview) -> int:
        """Move all bytes of one request. Returns 0 or an errno."""
        done = retries = 0
        while done < len(view):
            try:
                if writing:
                    moved = os.pwritev(fd, [view[done:]], offset + done)
                else:
                    moved = os.preadv(fd, [view[done:]], offset + done)
            except BlockingIOError:
                retries += 1
                if retries > RETRIES_MAX:
                    return errno.EAGAIN
                time.sleep(RETRY_S)
                continue
            except OSError as error:  # Python itself repeats the call after EINTR.
                return error.errno or errno.EIO
            # Nothing moved, or the end of the file inside a block: the bytes are not there.
            if not moved or (self.direct_io and moved % self.block_bytes):
                return errno.EIO
            done += moved
        return 0
