"""What every Device on a file descriptor of its own shares, whatever moves its bytes."""

import os
from abc import abstractmethod

import numpy as np

from kvtier.errors import DeviceError
from kvtier.io.device import (
    Buffers,
    Device,
    Int64Array,
    PendingBatch,
    Priority,
    check_memory,
    raise_failures,
)
from kvtier.io.rawfile import RawFile
from kvtier.io.traffic import Traffic, TrafficMeter

RETRIES_MAX = 1000
"""How often one request is issued anew after EAGAIN or EINTR before that counts as a failure."""
RETRY_S = 0.0005
"""How long to wait before that."""


class RawDevice(Device):
    """A Device on a RawFile. `uring.py` and `threads.py` say how a batch is moved."""

    def __init__(self, raw: RawFile) -> None:
        self.path = raw.path
        self.direct_io = raw.direct_io
        self.direct_io_reason = raw.direct_io_reason
        self.capacity_bytes = raw.capacity_bytes
        self.block_bytes = raw.block_bytes
        self._raw = raw
        self._meter = TrafficMeter()
        self._pid = os.getpid()

    @property
    def traffic(self) -> Traffic:
        return self._meter.traffic

    @abstractmethod
    def _begin(
        self, batch: PendingBatch, buffers: Buffers, priority: Priority, *, waits: bool
    ) -> None:
        """Begin to move a batch whose requests were checked. waits: see `_start`, which alone
        calls this."""

    def _start(
        self,
        what: str,
        offsets: Int64Array,
        buffers: Buffers,
        priority: Priority,
        *,
        waits: bool = False,
    ) -> PendingBatch:
        """Begin a batch: the only way to the file for requests that move bytes. waits: the caller
        calls `wait` at once, so its thread may work for it, and nobody polls for it."""
        self._raw.ensure_open()
        self.check(offsets, buffers)
        check_memory(buffers, reading=what == "read")
        batch = PendingBatch(what, self.path, offsets, buffers)
        self._begin(batch, buffers, priority, waits=waits)
        self._meter.count(what, buffers.lengths)
        return batch

    def read(
        self, offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
    ) -> None:
        try:
            self.wait(self._start("read", offsets, buffers, priority, waits=True))
        except DeviceError as error:
            if len(offsets) < 2 or not error.failures:
                raise
            failed = [index for index, _ in error.failures]
            self._read_again(offsets, buffers, failed, priority)

    def _read_again(
        self, offsets: Int64Array, buffers: Buffers, failed: list[int], priority: Priority
    ) -> None:
        """Read one by one what failed in a batch. The kernel may send requests that lie side by
        side as one, which then fail as one though only one block is bad."""
        errors = np.zeros(len(offsets), np.int64)
        causes: dict[int, str] = {}
        for index in failed:
            one = slice(index, index + 1)
            alone = Buffers(buffers.memory, buffers.starts[one], buffers.lengths[one])
            batch = self._start("read", offsets[one], alone, priority, waits=True)
            try:
                self.wait(batch)
            except DeviceError as error:
                if not error.failures:
                    raise
                errors[index] = error.failures[0][1]
                causes.update((index, cause) for cause in batch.causes.values())
        raise_failures("read", self.path, offsets, buffers.lengths, errors, causes=causes)

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        self.wait(self._start("write", offsets, buffers, Priority.WRITE, waits=True))

    def flush(self) -> None:
        try:
            self._raw.flush()
        except DeviceError:
            self.failed_flushes += 1
            raise

    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        return self._raw.discard(offsets, lengths)
