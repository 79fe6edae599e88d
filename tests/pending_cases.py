"""Started reads for tests: random ones, compared, and waited for as an event loop does."""

import select
import time

import numpy as np
import pytest

from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, ByteArray, Device, Int64Array, PendingBatch
from kvtier.io.probe import io_uring_report
from tests.device_contract import (
    filled,
    integers,
)

needs_io_uring = pytest.mark.skipif(
    not io_uring_report().usable, reason="io_uring is refused by this kernel"
)
BLOCK = 4096
HANGS_S = 30.0


def settle(device: Device, batches: list[PendingBatch]) -> None:
    """What an event loop does: sleep until the eventfd is readable, poll, look."""
    poller = select.poll()
    poller.register(device.completion_fd, select.POLLIN)
    deadline = time.monotonic() + HANGS_S
    device.poll()
    while not all(batch.done for batch in batches):
        assert poller.poll(1000 * (deadline - time.monotonic())), "nobody woke the loop"
        device.poll()


def stored(device: Device, blocks: int = 512, seed: int = 1) -> ByteArray:
    """Random bytes, written to the first blocks of the device."""
    source = filled(blocks * BLOCK, seed)
    device.write(integers(0), Buffers.whole(source))
    return source


def random_read(random: np.random.Generator, blocks: int) -> tuple[Int64Array, Buffers]:
    """1 to 60 reads of 1 to 4 blocks, anywhere among the first `blocks`."""
    count = int(random.integers(1, 60))
    lengths = random.integers(1, 5, count) * BLOCK
    starts = np.cumsum(lengths) - lengths
    offsets = random.integers(0, blocks - 4, count) * BLOCK
    return offsets, Buffers(aligned_bytes(int(lengths.sum())), starts, lengths)


def check(source: ByteArray, offsets: Int64Array, target: Buffers) -> None:
    for offset, start, length in zip(offsets, target.starts, target.lengths, strict=True):
        piece = target.memory[start : start + length]
        assert np.array_equal(piece, source[offset : offset + length])
