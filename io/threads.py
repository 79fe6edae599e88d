"""A Device on worker loops around preadv and pwritev: works on every kernel.

Invariants:
- A batch is done only when no worker touches its memory any more, and a call that waits for one
  returns, also by an exception, only then.
- A worker takes a slice of a batch at a time, of the batch whose turn it is by then: so what is
  more urgent waits for no more than a slice. There is one token for each slice that waits.
- A batch of one slice is moved by the calling thread, if that waits for it anyway.
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

from kvtier.errors import ConfigError
from kvtier.io.completion_event import CompletionEvent
from kvtier.io.device import Buffers, Int64Array, PendingBatch, Priority
from kvtier.io.engine_limits import WORKERS_MAX
from kvtier.io.raw_device import RETRIES_MAX, RETRY_S, RawDevice
from kvtier.io.rawfile import DirectMode, RawFile, open_raw
from kvtier.io.waiting_line import WaitingLine

WORKERS = 8
SLICE_BYTES_MAX = 256 << 10
"""Bytes that a worker moves before it looks for something more urgent, but for longer requests."""


class _Work:
    """A batch, shared by the workers that carry it out."""

    def __init__(
        self,
        batch: PendingBatch,
        move: Callable[[int, int], None],
        finish: Callable[[], None],
        slices: list[int],
    ) -> None:
        """move: moves requests [first, past) whole and notes their errors. finish: called once,
        last. slices: where each slice begins, then the count of requests."""
        self.batch = batch
        self.slices = len(slices) - 1
        self._bounds = slices
        self._taken = 0
        self._move: Callable[[int, int], None] | None = move
        self._finish = finish
        self._left = self.slices
        self._crash: BaseException | None = None
        self._lock = threading.Lock()
        if not self.slices:
            self._settle()

    @property
    def waits(self) -> bool:
        """Whether nobody took its last slice yet. Whoever asks or takes holds the line's lock."""
        return self._taken < self.slices

    def take(self) -> int:
        """The number of the next slice."""
        self._taken += 1
        return self._taken - 1

    def run(self, number: int) -> None:
        """Move a slice, on the thread of the caller."""
        move = self._move
        assert move is not None
        try:
            move(self._bounds[number], self._bounds[number + 1])
        except BaseException as error:
            # It belongs to the thread that waits for the batch, which raises it.
            self._crash = error
        with self._lock:
            self._left -= 1
            last = not self._left
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
        self.workers = workers
        self._event = CompletionEvent()
        self._line: WaitingLine[tuple[_Work, Priority]] = WaitingLine()
        self._line_lock = threading.Lock()
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-io-{i}", daemon=True)
            for i in range(workers)
        ]

    @classmethod
    def open(
        cls,
        path: str,
        *,
        writable: bool = True,
        direct: DirectMode = "preferred",
        workers: int | None = None,
    ) -> Self:
        """Open a block device or file and start the workers; None: WORKERS of them.

        Raises DeviceError, ConfigError.
        """
        workers = WORKERS if workers is None else workers
        if not 1 <= workers <= WORKERS_MAX:
            raise ConfigError(f"the engine threads has 1 to {WORKERS_MAX} workers: got {workers}")
        device = cls(open_raw(path, writable=writable, direct=direct), workers)
        for thread in device._threads:
            thread.start()
        return device

    def close(self) -> None:
        # Batches count as users of the file, so after this no slice is left or can be added.
        self._raw.close()
        if os.getpid() != self._pid:
            return
        threads, self._threads = self._threads, []
        for _ in threads:
            self._tokens.put(False)
        for thread in threads:
            thread.join()
        self._event.close()

    def _work(self) -> None:
        while self._tokens.get():
            with self._line_lock:
                work, priority = self._line.take()
                number = work.take()
                if work.waits:
                    self._line.add_first((work, priority), priority)
            work.run(number)
            # Without this an idle worker would keep the last batch's memory alive.
            del work

    def _begin(
        self, batch: PendingBatch, buffers: Buffers, priority: Priority, *, waits: bool
    ) -> None:
        offsets, memory = batch.offsets, buffers.memory.data
        starts, lengths = buffers.starts, buffers.lengths
        fd = self._raw.acquire()
        system_call = os.pwritev if batch.what == "write" else os.preadv

        def move(first: int, past: int) -> None:
            which = slice(first, past)
            places = zip(
                offsets[which].tolist(),
                starts[which].tolist(),
                lengths[which].tolist(),
                strict=True,
            )
            for i, (offset, start, length) in enumerate(places, first):
                view = memory[start : start + length]
                error = self._move(system_call, fd, offset, view)
                if error:
                    batch.errors[i] = error

        def finish() -> None:
            if not waits:
                self._event.signal()
            self._raw.release()

        work = _Work(batch, move, finish, self._slices(lengths))
        if waits and work.slices == 1:
            work.run(0)
        elif work.slices:
            with self._line_lock:
                self._line.add((work, priority), priority)
            for _ in range(work.slices):
                self._tokens.put(True)

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

    def _slices(self, lengths: Int64Array) -> list[int]:
        """Bounds of slices of about the same bytes: one for each worker, more where those would
        be long."""
        count = len(lengths)
        if count < 2:
            return [0, count][: count + 1]
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        wanted = min(count, max(self.workers, -(-total // SLICE_BYTES_MAX)))
        cuts = np.searchsorted(ends, total * np.arange(1, wanted) / wanted) + 1
        return [0, *sorted({cut for cut in cuts.tolist() if cut < count}), count]

    def _move(
        self,
        system_call: Callable[[int, list[memoryview], int], int],
        fd: int,
        offset: int,
        view: memoryview,
    ) -> int:
        """Move all bytes of one request. Returns 0 or an errno."""
        done = retries = 0
        size = len(view)
        while done < size:
            try:
                moved = system_call(fd, [view[done:] if done else view], offset + done)
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
