"""What the device gives: direct reads of 1 MiB by eight threads into memory that is warm.

No method but a measure: nothing is found, checked or put in place. What is read has the shape that
a DynamicCache keeps, because the file is one context as it is.
"""

import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.peers.worker import Array, Contestant, Context, Layer, Place, compete

READ_BYTES = 1 << 20
THREADS = 8
BLOCK_BYTES = 4096


class PlainReads(Contestant):
    """Keeps a context in one file, or at the start of a block device."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._context = Context(0, 0, 0, 0)
        self._memory: mmap.mmap | None = None
        self._threads = ThreadPoolExecutor(THREADS)

    def store(self, context: Context, place: Place, kv: Array) -> None:
        path = place.device or str(Path(place.folder) / "plain")
        self._context = context
        self._memory = mmap.mmap(-1, -(-context.nbytes // BLOCK_BYTES) * BLOCK_BYTES)
        self._tensor().copy_(torch.from_numpy(kv))
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        view = memoryview(self._memory)
        for start in range(0, len(view), READ_BYTES):
            os.pwritev(self._descriptor, [view[start : start + READ_BYTES]], start)
        os.fsync(self._descriptor)
        self._tensor().fill_(float("nan"))

    def _tensor(self) -> torch.Tensor:
        assert self._memory is not None
        context = self._context
        flat = torch.frombuffer(self._memory, dtype=torch.float32, count=context.nbytes // 4)
        return flat.view(context.shape)

    def _read(self, start: int) -> None:
        assert self._memory is not None
        part = memoryview(self._memory)[start : start + READ_BYTES]
        if os.preadv(self._descriptor, [part], start) != len(part):
            raise OSError(f"a short read at {start}")

    def load(self) -> float:
        assert self._memory is not None
        for _ in self._threads.map(self._read, range(0, len(self._memory), READ_BYTES)):
            pass
        return time.perf_counter()

    def loaded(self) -> Iterator[Layer]:
        for layer in self._tensor():
            yield layer[0], layer[1]

    def forget(self) -> None:
        """The memory stays."""

    def close(self) -> None:
        os.close(self._descriptor)
        self._memory = None


if __name__ == "__main__":
    compete(PlainReads())
