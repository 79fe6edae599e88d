"""What every Device on a file descriptor of its own shares, whatever moves its bytes."""

import os
from abc import abstractmethod

import numpy as np

from kvtier.errors import DeviceError
from kvtier.io.device import Buffers, Device, Int64Array, PendingBatch, raise_failures
from kvtier.io.rawfile import RawFile

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
        self._pid = os.getpid()

    @abstractmethod
    def _start(self, what: str, offsets: Int64Array, buffers: Buffers) -> PendingBatch:
        """Begin to move a batch that somebody will `wait` for. what: "read" or "write"."""

    def read(self, offsets: Int64Array, buffers: Buffers) -> None:
        try:
            self.wait(self._start("read", offsets, buffers))
        except DeviceError as error:
            if len(offsets) < 2 or not error.failures:
                raise
            self._read_again(offsets, buffers, [index for index, _ in error.failures])

    def _read_again(self, offsets: Int64Array, buffers: Buffers, failed: list[int]) -> None:
        """Read one by one what failed in a batch. The kernel may send requests that lie side by
        side as one, which then fail as one though only one block is bad."""
        errors = np.zeros(len(offsets), np.int64)
        for index in failed:
            one = slice(index, index + 1)
            alone = Buffers(buffers.memory, buffers.starts[one], buffers.lengths[one])
            try:
                self.wait(self._start("read", offsets[one], alone))
            except DeviceError as error:
                if not error.failures:
                    raise
                errors[index] = error.failures[0][1]
        raise_failures("read", self.path, offsets, buffers.lengths, errors)

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        self.wait(self._start("write", offsets, buffers))

    def flush(self) -> None:
        try:
            self._raw.flush()
        except DeviceError:
            self.failed_flushes += 1
            raise

    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        return self._raw.discard(offsets, lengths)
