"""A Device on eight worker loops around preadv and pwritev: works on every kernel.

Invariants:
- A batch is done only when no worker touches its memory any more, and a call that waits for one
  returns, also by an exception, only then.
- Each worker takes a list of requests; one request alone is done by the calling thread, if that
  waits for it anyway.
- A request is done when all of its bytes moved or it has an errno.
"""

import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Self

import numpy as np

from kvtier.io.completion_event import CompletionEvent
from kvtier.io.device import Buffers, Int64Array, PendingBatch, check_memory
from kvtier.io.raw_device import RETRIES_MAX, RETRY_S, RawDevice
from kvtier.io.rawfile import DirectMode, RawFile, open_raw

WORKERS = 8


class _Work:
    """A batch, shared by the workers that carry it out."""

    def __init__(
        self, batch: PendingBatch, move: Callable[[int], int], finish: Callable[[], None]
    ) -> None:
        """move: moves request i whole and returns 0 or an errno. finish: called once, last."""
        self.batch = batch
        self._move: Callable[[int], int] | None = move
        self._finish = finish
        self._parts = 0
        self._crash: BaseException | None = None
        self._lock = threading.Lock()

    def expect(self, parts: int) -> None:
        """So many lists of requests make up the batch."""
        self._parts = parts
        if not parts:
            self._settle()

    def run(self, indices: Int64Array) -> None:
        """Move these requests, on the thread of the caller."""
        move = self._move
        assert move is not None
        try:
            for i in indices:
                self.batch.errors[i] = move(int(i))
        except BaseException as error:
            # It belongs to the thread that waits for the batch, which raises it.
            self._crash = error
        with self._lock:
            self._parts -= 1
            last = not self._parts
        if last:
            self._settle()

    def _settle(self) -> None:
        # It holds the batch's memory, which is free from now on.
        self._move = None
        self.batch.settle(self._crash)
        self._finish()


class ThreadsDevice(RawDevice):
    """Open by `ThreadsDevice.open`. Batches of several threads share the workers."""

    engine = "threads"

    def __init__(self, raw: RawFile, workers: int) -> None:
        super().__init__(raw)
        self._event = CompletionEvent()
        self._jobs: queue.SimpleQueue[tuple[_Work, Int64Array] | None] = queue.SimpleQueue()
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
        self._event.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, indices = job
            work.run(indices)
            # Without this an idle worker would keep the last batch's memory alive.
            del job, work, indices

    def start_read(self, offsets: Int64Array, buffers: Buffers) -> PendingBatch:
        return self._begin("read", offsets, buffers, waits=False)

    def _start(self, what: str, offsets: Int64Array, buffers: Buffers) -> PendingBatch:
        return self._begin(what, offsets, buffers, waits=True)

    def _begin(
        self, what: str, offsets: Int64Array, buffers: Buffers, *, waits: bool
    ) -> PendingBatch:
        """waits: the caller waits for the batch at once, so its thread may work for it."""
        self._raw.ensure_open()
        self.check(offsets, buffers)
        check_memory(buffers, reading=what == "read")
        batch = PendingBatch(what, self.path, offsets, buffers)
        memory, starts, lengths = buffers.memory.data, buffers.starts, buffers.lengths
        fd = self._raw.acquire()

        def move(i: int) -> int:
            start = int(starts[i])
            view = memory[start : start + int(lengths[i])]
            return self._move(what == "write", fd, int(offsets[i]), view)

        def finish() -> None:
            if not waits:
                self._event.signal()
            self._raw.release()

        work = _Work(batch, move, finish)
        lists = self._split(lengths)
        work.expect(len(lists))
        if waits and len(lists) == 1:
            work.run(lists[0])
        else:
            for indices in lists:
                self._jobs.put((work, indices))
        return batch

    def wait(self, batch: PendingBatch) -> None:
        batch.join()
        batch.result()

    @property
    def completion_fd(self) -> int:
        with self._raw.use():
            return self._event.fd

    def poll(self) -> None:
        with self._raw.use():
            self._event.clear()

    def _split(self, lengths: Int64Array) -> list[Int64Array]:
        """Lists of neighbouring requests of about the same bytes, at most one per worker."""
        if not len(lengths):
            return []
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
