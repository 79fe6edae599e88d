"""Started batches: done in any order, whole, heard of by the eventfd, whoever else uses the device.

Every engine passes the same tests.
"""

import errno
import gc
import os
import select
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import AlignmentError, ClosedError, DeviceError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, Device, PendingBatch
from kvtier.io.drives import Drives
from kvtier.io.probe import open_device
from kvtier.io.rawfile import create_region_file
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import NO_FAULTS, BadRange, Faults
from tests.device_contract import (
    CAPACITY_BYTES,
    empty_like,
    in_child,
    integers,
    mixed_batch,
)
from tests.pending_cases import (
    BLOCK,
    HANGS_S,
    check,
    needs_io_uring,
    random_read,
    settle,
    stored,
)

UNNOTICED = Faults(volatile_cache=True, shuffled=True, short_rate=0.5)


@pytest.fixture
def region_file(tmp_path: Path) -> str:
    path = str(tmp_path / "region")
    create_region_file(path, CAPACITY_BYTES)
    return path


@pytest.fixture(
    params=[
        pytest.param("io_uring", marks=needs_io_uring),
        pytest.param("io_uring drives", marks=needs_io_uring),
        "threads",
        "simulated",
        "unnoticed",
    ]
)
def device(request: pytest.FixtureRequest, region_file: str) -> Iterator[Device]:
    if request.param in ("io_uring", "threads"):
        device = open_device(region_file, engine=request.param, direct="required")
    elif request.param == "io_uring drives":
        device = Drives([open_device(region_file, engine="io_uring", direct="required")])
    else:
        faults = UNNOTICED if request.param == "unnoticed" else NO_FAULTS
        device = SimulatedDevice.open(CAPACITY_BYTES, seed=1, faults=faults, path=region_file)
    yield device
    device.close()


# ---- every engine -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_batches_at_once(device: Device, seed: int) -> None:
    """Far more requests than the ring has room for."""
    source, random = stored(device), np.random.default_rng(seed)
    reads = [random_read(random, 512) for _ in range(20)]
    batches = [device.start_read(*each) for each in reads]
    settle(device, batches)
    for batch, (offsets, target) in zip(batches, reads, strict=True):
        batch.result()
        check(source, offsets, target)


def test_the_eventfd_wakes_for_every_batch(device: Device) -> None:
    source = stored(device)
    for turn in range(20):
        target = Buffers.whole(aligned_bytes(BLOCK))
        batch = device.start_read(integers(turn * BLOCK), target)
        settle(device, [batch])
        check(source, integers(turn * BLOCK), target)
    device.poll()
    readable, _, _ = select.select([device.completion_fd], [], [], 0)
    assert not readable, "after a poll nothing is left to hear of"


def test_waiting_for_a_started_batch(device: Device) -> None:
    source, random = stored(device), np.random.default_rng(4)
    reads = [random_read(random, 512) for _ in range(5)]
    batches = [device.start_read(*each) for each in reads]
    for batch, (offsets, target) in reversed(list(zip(batches, reads, strict=True))):
        device.wait(batch)
        assert batch.done
        check(source, offsets, target)


def test_empty_batches_are_done(device: Device) -> None:
    memory = aligned_bytes(BLOCK)
    nothing = device.start_read(integers(), Buffers(memory, integers(), integers()))
    no_bytes = device.start_read(integers(0), Buffers(memory, integers(0), integers(0)))
    settle(device, [nothing, no_bytes])
    nothing.result()
    no_bytes.result()


def test_what_is_wrong_is_refused_at_once(device: Device) -> None:
    with pytest.raises(AlignmentError):
        device.start_read(integers(1), Buffers.whole(aligned_bytes(BLOCK)))
    device.close()
    with pytest.raises(ClosedError):
        device.start_read(integers(0), Buffers.whole(aligned_bytes(BLOCK)))
    with pytest.raises(ClosedError):
        device.poll()
    with pytest.raises(ClosedError):
        device.completion_fd  # noqa: B018


def test_a_forked_child_is_refused(device: Device) -> None:
    source, target = stored(device), Buffers.whole(aligned_bytes(512 * BLOCK))
    batch = device.start_read(integers(0), target)
    other = Buffers.whole(aligned_bytes(BLOCK))

    def start() -> None:
        device.start_read(integers(0), other)

    assert in_child(start) == 0
    assert in_child(device.poll) == 0
    settle(device, [batch])
    check(source, integers(0), target)


def test_callbacks_come_once_and_then_at_once(device: Device) -> None:
    stored(device)
    calls: list[str] = []
    batch = device.start_read(integers(0), Buffers.whole(aligned_bytes(64 * BLOCK)))
    batch.when_done(lambda: calls.append(f"settled {batch.done}"))
    settle(device, [batch])
    batch.when_done(lambda: calls.append("late"))
    assert calls == ["settled True", "late"]


def test_memory_lives_until_the_batch_is_done(device: Device) -> None:
    """A cancelled waiter drops its buffer: the kernel must not write into what was freed."""
    stored(device)
    memory = aligned_bytes(64 * BLOCK)
    alive = weakref.ref(memory)
    batch = device.start_read(integers(0), Buffers.whole(memory))
    del memory
    gc.collect()
    assert batch.done or alive() is not None
    settle(device, [batch])
    deadline = time.monotonic() + HANGS_S
    while alive() is not None:
        # A worker may be about to drop its last reference.
        gc.collect()
        assert time.monotonic() < deadline, "a batch that is done keeps its memory"
        time.sleep(0.001)


def test_close_completes_what_was_started(device: Device) -> None:
    """A031: no write arrives after close, and nothing that was started is left undone."""
    source, random = stored(device), np.random.default_rng(6)
    reads = [random_read(random, 512) for _ in range(8)]
    batches = [device.start_read(*each) for each in reads]
    device.close()
    for batch, (offsets, target) in zip(batches, reads, strict=True):
        assert batch.done
        batch.result()
        check(source, offsets, target)
        target.memory[:] = 0xA5
    time.sleep(0.05)
    for _, target in reads:
        assert (target.memory == 0xA5).all(), "a write came after close"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_beside_readers_and_writers(device: Device, seed: int) -> None:
    source = stored(device)
    failures: list[BaseException] = []
    stop = threading.Event()

    def work(number: int) -> None:
        random = np.random.default_rng(100 * seed + number)
        own = 600 + 100 * number
        try:
            while not stop.is_set():
                read = random_read(random, 512)
                device.read(*read)
                check(source, *read)
                offsets, written = mixed_batch(int(random.integers(1, 20)), BLOCK, number)
                device.write(offsets + own * BLOCK, written)
                target = empty_like(written)
                device.read(offsets + own * BLOCK, target)
                assert np.array_equal(target.memory, written.memory)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    random = np.random.default_rng(seed)
    for _ in range(10):
        reads = [random_read(random, 512) for _ in range(int(random.integers(1, 6)))]
        batches = [device.start_read(*each) for each in reads]
        settle(device, batches)
        for batch, read in zip(batches, reads, strict=True):
            batch.result()
            check(source, *read)
    stop.set()
    for thread in threads:
        thread.join(HANGS_S)
        assert not thread.is_alive(), "a reader hangs"
    assert failures == []


def test_a_thread_that_started_a_batch_may_end(device: Device) -> None:
    source, targets = stored(device), [Buffers.whole(aligned_bytes(64 * BLOCK)) for _ in range(8)]
    batches: list[PendingBatch] = []
    thread = threading.Thread(
        target=lambda: batches.extend(device.start_read(integers(0), each) for each in targets)
    )
    thread.start()
    thread.join()
    settle(device, batches)
    for batch, target in zip(batches, targets, strict=True):
        batch.result()
        check(source, integers(0), target)


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [pytest.param("io_uring", marks=needs_io_uring), "threads"])
def test_failures_are_those_of_a_read(region_file: str, engine: Any) -> None:
    device = open_device(region_file, engine=engine, direct="required")
    source = stored(device, 64)
    os.truncate(region_file, 40 * BLOCK)
    offsets = np.random.default_rng(3).permutation(64).astype(np.int64) * BLOCK
    target = Buffers(aligned_bytes(64 * BLOCK), offsets, np.full(64, BLOCK, np.int64))
    batch = device.start_read(offsets, target)
    settle(device, [batch])
    with pytest.raises(DeviceError, match="24 of 64 reads") as caught:
        batch.result()
    assert [i for i, _ in caught.value.failures] == np.flatnonzero(offsets >= 40 * BLOCK).tolist()
    assert np.array_equal(target.memory[: 40 * BLOCK], source[: 40 * BLOCK])
    device.close()


def test_failures_of_a_simulated_device() -> None:
    bad = Faults(bad_ranges=(BadRange(5 * BLOCK, 1),))
    device = SimulatedDevice.open(64 * BLOCK, faults=bad)
    offsets = np.arange(8, dtype=np.int64) * BLOCK
    target = Buffers(aligned_bytes(8 * BLOCK), offsets, np.full(8, BLOCK, np.int64))
    batch = device.start_read(offsets, target)
    settle(device, [batch])
    with pytest.raises(DeviceError, match="1 of 8 reads") as caught:
        batch.result()
    assert caught.value.failures == [(5, errno.EIO)]
    device.close()


def test_a_simulated_batch_takes_its_time_and_not_the_callers() -> None:
    device = SimulatedDevice.open(64 * BLOCK, faults=Faults(delay_s=0.2))
    batch = device.start_read(integers(0), Buffers.whole(aligned_bytes(BLOCK)))
    other = device.start_read(integers(0), Buffers.whole(aligned_bytes(BLOCK)))
    assert not batch.done
    device.poll()
    assert not batch.done
    settle(device, [batch, other])
    device.close()


def test_started_batches_of_a_simulated_device_are_done_in_any_order() -> None:
    orders = set()
    for seed in range(10):
        device = SimulatedDevice.open(
            64 * BLOCK, seed=seed, faults=Faults(shuffled=True, delay_s=0.01)
        )
        order: list[int] = []
        batches = []
        for number in range(4):
            batch = device.start_read(integers(0), Buffers.whole(aligned_bytes(BLOCK)))
            batch.when_done(partial(order.append, number))
            batches.append(batch)
        settle(device, batches)
        orders.add(tuple(order))
        device.close()
    assert len(orders) > 2
