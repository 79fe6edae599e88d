"""What only a ring can do wrong with started batches: lose them, overfill, wait for ever."""

import errno
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import DeviceError
from kvtier.io import syscalls, uring_flight
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, Priority
from kvtier.io.probe import open_device
from kvtier.io.rawfile import create_region_file
from kvtier.io.ring import Ring
from kvtier.io.uring import DEPTH, UringDevice
from tests.device_contract import (
    CAPACITY_BYTES,
    integers,
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


@pytest.fixture
def region_file(tmp_path: Path) -> str:
    path = str(tmp_path / "region")
    create_region_file(path, CAPACITY_BYTES)
    return path


@pytest.fixture
def ring_device(region_file: str) -> Iterator[UringDevice]:
    device = open_device(region_file, engine="io_uring", direct="required")
    assert isinstance(device, UringDevice)
    yield device
    device.close()


@needs_io_uring
@pytest.mark.parametrize("started_first", [True, False])
def test_an_interrupted_read_loses_no_started_batch(
    ring_device: UringDevice, monkeypatch: pytest.MonkeyPatch, started_first: bool
) -> None:
    """Ctrl-C right after completions were taken from the ring: theirs is begun anew."""
    real_reap = Ring.reap
    interrupts = 1

    def reap(ring: Ring) -> Any:
        nonlocal interrupts
        done = real_reap(ring)
        if interrupts and len(done):
            interrupts -= 1
            raise KeyboardInterrupt
        return done

    source, random = stored(ring_device), np.random.default_rng(8)
    monkeypatch.setattr(Ring, "reap", reap)
    reads = [random_read(random, 512) for _ in range(6)]
    own = Buffers.whole(aligned_bytes(BLOCK))
    batches = [ring_device.start_read(*each) for each in reads[: 6 if started_first else 0]]
    with pytest.raises(KeyboardInterrupt):
        ring_device.read(integers(0), own)
    assert started_first or ring_device._ring.in_flight == 0
    batches += [ring_device.start_read(*each) for each in reads[len(batches) :]]
    settle(ring_device, batches)
    for batch, read in zip(batches, reads, strict=True):
        batch.result()
        check(source, *read)
    assert not ring_device._flights


@needs_io_uring
def test_a_broken_enter_is_an_error_of_every_batch(
    ring_device: UringDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stored(ring_device)
    fails = False
    real_enter = syscalls.io_uring_enter

    def enter(fd: int, submit: int, wait: int, flags: int) -> int:
        nonlocal fails
        if fails:
            fails = False
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return real_enter(fd, submit, wait, flags)

    monkeypatch.setattr(syscalls, "io_uring_enter", enter)
    targets = [Buffers.whole(aligned_bytes(300 * BLOCK)) for _ in range(3)]
    batches = [ring_device.start_read(integers(0), each) for each in targets[:2]]
    fails = True
    batches.append(ring_device.start_read(integers(0), targets[2]))
    settle(ring_device, batches)
    assert not fails
    with pytest.raises(DeviceError, match="io_uring failed"):
        batches[2].result()
    again = ring_device.start_read(integers(0), targets[0])
    settle(ring_device, [again])
    again.result()
    check(source, integers(0), targets[0])


@needs_io_uring
def test_cancelled_by_the_kernel_is_begun_anew(
    ring_device: UringDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_reap = Ring.reap
    lies = 5

    def reap(ring: Ring) -> Any:
        nonlocal lies
        done = real_reap(ring)
        if lies and len(done):
            lies -= 1
            done[-1, 1] = -errno.ECANCELED
        return done

    source = stored(ring_device)
    monkeypatch.setattr(Ring, "reap", reap)
    monkeypatch.setattr(uring_flight, "RETRY_S", 0)
    offsets, target = random_read(np.random.default_rng(2), 512)
    batch = ring_device.start_read(offsets, target)
    settle(ring_device, [batch])
    batch.result()
    check(source, offsets, target)
    assert lies < 5


@needs_io_uring
def test_the_ring_is_never_overfull(
    ring_device: UringDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    real_push = Ring.push

    def push(ring: Ring, *arguments: Any) -> None:
        nonlocal most
        real_push(ring, *arguments)
        most = max(most, ring.in_flight)

    source, random = stored(ring_device), np.random.default_rng(9)
    monkeypatch.setattr(Ring, "push", push)
    reads = [random_read(random, 512) for _ in range(30)]
    batches = [ring_device.start_read(*each) for each in reads]
    settle(ring_device, batches)
    for read in reads:
        check(source, *read)
    assert most == DEPTH


@needs_io_uring
@pytest.mark.parametrize("breaks", [False, True])
def test_who_waits_for_the_ring_takes_the_completions_and_says_so(
    ring_device: UringDevice, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """A reader waits for a number of completions: a poll that took one would leave it waiting for
    ever. And what the reader took, or what failed with it, nobody else would hear of."""
    source = stored(ring_device)
    waited, go_on = threading.Event(), threading.Event()
    real_wait = Ring.wait

    def wait(ring: Ring, count: int, submit: int = 0) -> None:
        if threading.current_thread() is not reader:
            real_wait(ring, count, submit)
        else:
            real_wait(ring, ring.in_flight, submit)
            waited.set()
            go_on.wait(HANGS_S)
            if breaks and not failed:
                failed.append("once")
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))

    def read() -> None:
        try:
            ring_device.read(integers(0), Buffers.whole(aligned_bytes(BLOCK)))
        except DeviceError as error:
            failed.append(str(error))

    failed: list[str] = []
    fd = ring_device.completion_fd
    reader = threading.Thread(target=read)
    monkeypatch.setattr(Ring, "wait", wait)
    target = Buffers.whole(aligned_bytes(BLOCK))
    batch = ring_device.start_read(integers(BLOCK), target)
    reader.start()
    assert waited.wait(HANGS_S)
    # Both are complete, and the signals of both are taken.
    time.sleep(0.05)
    ring_device.poll()
    taken_by_the_poll = batch.done
    assert not taken_by_the_poll
    assert select.select([fd], [], [], 0) == ([], [], [])
    go_on.set()
    assert select.select([fd], [], [], HANGS_S)[0] == [fd], "nobody woke the loop"
    reader.join(HANGS_S)
    assert batch.done
    if breaks:
        assert len(failed) == 2
        with pytest.raises(DeviceError, match="io_uring failed"):
            batch.result()
    else:
        batch.result()
        check(source, integers(BLOCK), target)


@needs_io_uring
def test_another_arena_is_announced_while_requests_wait(ring_device: UringDevice) -> None:
    """Requests that are pushed, and those that are not, were made for the arena that was."""
    source = stored(ring_device)
    first, second = aligned_bytes(512 * BLOCK), aligned_bytes(64 * BLOCK)
    assert ring_device.register(first)
    places = np.random.default_rng(3).permutation(512).astype(np.int64) * BLOCK
    starts = np.arange(512, dtype=np.int64) * BLOCK
    target = Buffers(first, starts, np.full(512, BLOCK, np.int64))
    batch = ring_device._start("read", places, target, Priority.DEMAND, waits=True)
    assert ring_device._ring.unsubmitted, "they would be handed over by the wait"
    assert ring_device.register(second)
    own = Buffers.whole(second)
    ring_device.read(integers(0), own)
    ring_device.wait(batch)
    check(source, places, target)
    check(source, integers(0), own)
