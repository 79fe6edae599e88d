"""Whose turn it is on a busy device: demand before prefetch before writes before scrub."""

import os
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import AlignmentError, ConfigError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, Device, Int64Array, PendingBatch, Priority
from kvtier.io.rawfile import create_region_file
from kvtier.io.ring import Entries, Ring
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import Faults
from kvtier.io.threads import SLICE_BYTES_MAX, ThreadsDevice
from kvtier.io.uring import UringDevice
from kvtier.io.uring_flight import INDEX_BITS
from kvtier.io.waiting_line import WaitingLine
from tests.device_contract import CAPACITY_BYTES, filled, integers
from tests.pending_cases import BLOCK, HANGS_S, check, needs_io_uring, settle, stored

DEMAND, PREFETCH, WRITE, SCRUB = Priority


@pytest.fixture
def region_file(tmp_path: Path) -> str:
    path = str(tmp_path / "region")
    create_region_file(path, CAPACITY_BYTES)
    return path


def blocks(count: int, first: int = 0, nbytes: int = BLOCK) -> tuple[Int64Array, Buffers]:
    """`count` requests that lie in a row from block `first` of the device on."""
    starts = np.arange(count, dtype=np.int64) * nbytes
    lengths = np.full(count, nbytes, np.int64)
    return starts + first * BLOCK, Buffers(aligned_bytes(count * nbytes), starts, lengths)


def test_a_line_goes_by_priority_and_then_by_time() -> None:
    line: WaitingLine[str] = WaitingLine()
    for name, priority in (("s1", SCRUB), ("d1", DEMAND), ("w", WRITE), ("d2", DEMAND)):
        line.add(name, priority)
    line.add_first("s0", SCRUB)
    line.add("p", PREFETCH)
    assert len(line) == 6
    assert line.remove(lambda name: name == "w") == ["w"]
    assert line.first() == "d1"
    assert len(line) == 5
    assert [line.take() for _ in range(len(line))] == ["d1", "d2", "p", "s0", "s1"]
    line.add("x", WRITE)
    line.clear()
    assert not line
    assert line.first() is None


def start_everything(device: Device) -> list[PendingBatch]:
    """A big batch that fills the device, then one of each priority, the least urgent first."""
    source = filled(100 * BLOCK, 5)
    starts = np.arange(100, dtype=np.int64) * BLOCK
    writes = Buffers(source, starts, np.full(100, BLOCK, np.int64))
    return [
        device.start_read(*blocks(200), PREFETCH),
        device.start_read(*blocks(100), SCRUB),
        device.start_write(starts + 1000 * BLOCK, writes),
        device.start_read(*blocks(50), PREFETCH),
        device.start_read(*blocks(100)),
    ]


@needs_io_uring
def test_a_ring_is_filled_by_priority(region_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[int] = []
    real_push = Ring.push

    def push(ring: Ring, entries: Entries) -> None:
        pushed.extend((entries[:, 4] >> INDEX_BITS).tolist())
        real_push(ring, entries)

    with closing(UringDevice.open(region_file, direct="required", depth=8)) as device:
        stored(device)
        monkeypatch.setattr(Ring, "push", push)
        batches = start_everything(device)
        first = pushed[0]
        assert pushed == [first] * 8, "the ring is full of the first"
        settle(device, batches)
    expected = [first] * 8 + [first + 4] * 100 + [first] * 192 + [first + 3] * 50
    expected += [first + 2] * 100 + [first + 1] * 100
    assert pushed == expected


@needs_io_uring
@pytest.mark.parametrize("depth", [1, 2, 32])
def test_scrub_and_writes_leave_room_for_demand(region_file: str, depth: int) -> None:
    with closing(UringDevice.open(region_file, direct="required", depth=depth)) as device:
        source = stored(device)
        scrub = blocks(200)
        batch = device.start_read(*scrub, SCRUB)
        assert device._ring.in_flight == max(1, depth // 2)
        demand = blocks(7, 100)
        urgent = device.start_read(*demand)
        assert device._ring.in_flight == min(depth, max(1, depth // 2) + 7)
        settle(device, [urgent, batch])
        check(source, *scrub)
        check(source, *demand)


def test_a_worker_looks_for_what_is_urgent_after_each_slice(
    region_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    entered, go_on = threading.Event(), threading.Event()
    real_read, real_write = os.preadv, os.pwritev

    def noted(what: str, move: Callable[..., int], fd: int, views: Any, offset: int) -> int:
        order.append(f"{what} {offset // BLOCK}")
        entered.set()
        assert go_on.wait(HANGS_S)
        return move(fd, views, offset)

    large = 64 << 10
    in_a_slice = SLICE_BYTES_MAX // large
    with closing(ThreadsDevice.open(region_file, direct="required", workers=1)) as device:
        stored(device)
        monkeypatch.setattr(os, "preadv", partial(noted, "read", real_read))
        monkeypatch.setattr(os, "pwritev", partial(noted, "write", real_write))
        scrub = device.start_read(*blocks(200, nbytes=large), SCRUB)
        assert entered.wait(HANGS_S)
        write = device.start_write(*blocks(3, 3900))
        demand = device.start_read(*blocks(3, 4000))
        go_on.set()
        for batch in (scrub, write, demand):
            device.wait(batch)
    step = large // BLOCK
    expected = [f"read {step * i}" for i in range(in_a_slice)]
    expected += ["read 4000", "read 4001", "read 4002", "write 3900", "write 3901", "write 3902"]
    assert order[: len(expected)] == expected
    assert order[len(expected) :] == [f"read {step * i}" for i in range(in_a_slice, 200)]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_simulated_device_takes_the_most_urgent_batch(shuffled: bool) -> None:
    faults = Faults(delay_s=0.05, shuffled=shuffled)
    with closing(SimulatedDevice.open(CAPACITY_BYTES, seed=3, faults=faults)) as device:
        order: list[str] = []
        batches = [device.start_read(*blocks(1), SCRUB)]
        # It has begun, or else it would be overtaken.
        while device.counts.reads == 0:
            threading.Event().wait(0.001)
        for priority in (SCRUB, WRITE, PREFETCH, DEMAND, DEMAND):
            start = device.start_write if priority == WRITE else device.start_read
            batches.append(start(*blocks(1), priority))
            batches[-1].when_done(partial(order.append, priority.name))
        settle(device, batches)
        assert order == ["DEMAND", "DEMAND", "PREFETCH", "WRITE", "SCRUB"]


@pytest.mark.parametrize("engine", [pytest.param(UringDevice, marks=needs_io_uring), ThreadsDevice])
def test_depth_and_workers_are_checked(region_file: str, engine: Any) -> None:
    name = "depth" if engine is UringDevice else "workers"
    for wrong in (0, -1, 5000):
        with pytest.raises(ConfigError, match=str(wrong)):
            engine.open(region_file, **{name: wrong})


# ---- started writes -----------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param("io_uring", marks=needs_io_uring), "threads", "simulated"])
def device(request: pytest.FixtureRequest, region_file: str) -> Any:
    if request.param == "simulated":
        device: Device = SimulatedDevice.open(CAPACITY_BYTES, seed=1, path=region_file)
    elif request.param == "threads":
        device = ThreadsDevice.open(region_file, direct="required")
    else:
        device = UringDevice.open(region_file, direct="required")
    with closing(device):
        yield device


@pytest.mark.parametrize("seed", [1, 2])
def test_a_started_write_arrives(device: Device, seed: int) -> None:
    offsets, written = blocks(300)
    order = np.random.default_rng(seed).permutation(300)
    written.memory[:] = filled(written.memory.size, seed)
    settle(device, [device.start_write(offsets[order], written)])
    device.flush()
    _, target = blocks(300)
    device.read(offsets[order], target)
    assert np.array_equal(target.memory, written.memory)


def test_a_started_write_that_is_wrong_is_refused_at_once(device: Device) -> None:
    with pytest.raises(AlignmentError):
        device.start_write(integers(1), Buffers.whole(aligned_bytes(BLOCK)))
    fixed = aligned_bytes(BLOCK)
    fixed.flags.writeable = False
    settle(device, [device.start_write(integers(0), Buffers.whole(fixed))])
