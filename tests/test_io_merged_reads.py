"""One bad block fails its request alone, though the kernel may send neighbours as one request."""

import errno
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import DeviceError
from kvtier.io.buffers import BufferPool, aligned_bytes
from kvtier.io.device import Buffers, Int64Array, PendingBatch
from kvtier.io.threads import ThreadsDevice
from kvtier.tiering.steps import Read, whole

BLOCK = 4096
COUNT = 6


class Merging(ThreadsDevice):
    """Fails whole batches of reads in which a bad block is, as a merged request does."""

    bad: frozenset[int] = frozenset()

    def _start(self, what: str, offsets: Int64Array, buffers: Buffers) -> PendingBatch:
        batch = super()._start(what, offsets, buffers)
        batch.join()
        if what == "read" and self.bad & set(offsets.tolist()):
            batch.errors[:] = errno.ENODATA
        return batch


@pytest.fixture
def device(tmp_path: Path) -> Merging:
    path = tmp_path / "region"
    path.write_bytes(b"".join(bytes([index]) * BLOCK for index in range(COUNT)))
    return Merging.open(str(path))


def request(count: int = COUNT) -> tuple[Int64Array, Buffers]:
    places = BLOCK * np.arange(count, dtype=np.int64)
    return places, Buffers(aligned_bytes(count * BLOCK), places, np.full(count, BLOCK, np.int64))


@pytest.mark.parametrize("bad", [(0,), (3,), (1, 5), (0, 1, 2, 3, 4, 5)])
def test_only_what_is_bad_fails(device: Merging, bad: tuple[int, ...]) -> None:
    device.bad = frozenset(BLOCK * index for index in bad)
    offsets, buffers = request()
    with pytest.raises(DeviceError) as caught:
        device.read(offsets, buffers)
    assert caught.value.failures == [(index, errno.ENODATA) for index in bad]
    for index in set(range(COUNT)) - set(bad):
        assert (buffers.memory[BLOCK * index : BLOCK * (index + 1)] == index).all()
    device.bad = frozenset()
    device.read(offsets, buffers)
    device.close()


def test_a_batch_of_steps_is_taken_apart_too() -> None:
    """On an event loop there is no `read`: the work itself asks for each alone."""
    offsets, buffers = request(4)
    piece = BufferPool(1 << 20).take(4 * BLOCK)
    assert piece is not None
    steps = whole(Read(offsets, buffers, piece))
    asked = [next(steps)]
    answer = DeviceError("merged", errno.EIO, [(1, errno.EIO), (2, errno.EIO)])
    asked.append(steps.throw(answer))
    asked.append(next(steps))
    with pytest.raises(DeviceError) as caught:
        steps.throw(DeviceError("alone", errno.EIO, [(0, errno.ENODATA)]))
    assert caught.value.failures == [(2, errno.ENODATA)]
    assert [each.offsets.tolist() for each in asked if isinstance(each, Read)] == [
        [0, BLOCK, 2 * BLOCK, 3 * BLOCK],
        [BLOCK],
        [2 * BLOCK],
    ]


def test_a_batch_that_was_only_merged_is_whole(device: Merging) -> None:
    offsets, buffers = request(2)
    piece = BufferPool(1 << 20).take(2 * BLOCK)
    assert piece is not None
    steps = whole(Read(offsets, buffers, piece))
    next(steps)
    steps.throw(DeviceError("merged", errno.EIO, [(0, errno.EIO)]))
    with pytest.raises(StopIteration):
        next(steps)
    device.close()
