"""What every Device on a file descriptor of its own shares, whatever moves its bytes."""

import os
from abc import abstractmethod

from kvtier.io.device import Buffers, Device, Int64Array
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
    def _batch(self, what: str, offsets: Int64Array, buffers: Buffers) -> None:
        """Move a batch. what: "read" or "write"."""

    def read(self, offsets: Int64Array, buffers: Buffers) -> None:
        self._batch("read", offsets, buffers)

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        self._batch("write", offsets, buffers)

    def flush(self) -> None:
        self._raw.flush()

    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        return self._raw.discard(offsets, lengths)
