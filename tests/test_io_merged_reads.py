"""One bad block fails its request alone, though the kernel may send neighbours as one request."""

import errno
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import DeviceError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, Int64Array, PendingBatch, Priority
from kvtier.io.threads import ThreadsDevice
from kvtier.tiering.steps import Read, Start, Wait, start, whole

BLOCK = 4096
COUNT = 6


class Merging(ThreadsDevice):
    """Fails whole batches of reads in which a bad block is, as a merged request does."""

    bad: frozenset[int] = frozenset()

    def _begin(
        self, batch: PendingBatch, buffers: Buffers, priority: Priority, *, waits: bool
    ) -> None:
        super()._begin(batch, buffers, priority, waits=waits)
        batch.join()
        if batch.what == "read" and self.bad & set(batch.offsets.tolist()):
            batch.errors[:] = errno.ENODATA


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


def a_batch(device: Merging) -> PendingBatch:
    return device.start_read(*request(1))


def test_a_batch_of_steps_is_taken_apart_too(device: Merging) -> None:
    """What drives steps only starts batches and waits: the work itself asks for each alone."""
    offsets, buffers = request(4)
    told: list[PendingBatch] = []
    steps = whole(Read(offsets, buffers, told.append))
    asked = [next(steps), steps.send(a_batch(device))]
    asked.append(steps.throw(DeviceError("merged", errno.EIO, [(1, errno.EIO), (2, errno.EIO)])))
    asked.append(steps.send(a_batch(device)))
    asked.append(next(steps))
    asked.append(steps.send(a_batch(device)))
    with pytest.raises(DeviceError) as caught:
        steps.throw(DeviceError("alone", errno.EIO, [(0, errno.ENODATA)]))
    assert caught.value.failures == [(2, errno.ENODATA)]
    assert [type(each) for each in asked] == [Start, Wait] * 3
    assert [each.read.offsets.tolist() for each in asked if isinstance(each, Start)] == [
        [0, BLOCK, 2 * BLOCK, 3 * BLOCK],
        [BLOCK],
        [2 * BLOCK],
    ]
    device.close()


def test_a_batch_that_was_only_merged_is_whole(device: Merging) -> None:
    device.bad = frozenset({0})
    offsets, buffers = request(2)
    told: list[PendingBatch] = []
    steps = whole(Read(offsets, buffers, told.append))
    first = next(steps)
    assert isinstance(first, Start)
    batch = start(first, device)
    assert told == [batch], "the memory is the batch's from the first moment"
    waiting = steps.send(batch)
    assert isinstance(waiting, Wait)
    assert waiting.batch is batch
    again = steps.throw(DeviceError("merged", errno.EIO, [(0, errno.EIO)]))
    assert isinstance(again, Start)
    device.bad = frozenset()
    steps.send(start(again, device))
    with pytest.raises(StopIteration):
        next(steps)
    device.close()
