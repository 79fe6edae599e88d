"""The device contract for each engine, on a file and on loop devices, and the engines' faults."""

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigError, DeviceError, KvtierError
from kvtier.io import ring_arena, syscalls, uring_flight
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, Device
from kvtier.io.probe import Engine, io_uring_report, open_device
from kvtier.io.rawfile import create_region_file
from kvtier.io.ring import Entries, Ring
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import NO_FAULTS, Faults
from kvtier.io.uring import UringDevice
from tests.conftest import LoopMaker
from tests.device_contract import (
    CAPACITY_BYTES,
    DeviceContract,
    FileContract,
    empty_like,
    filled,
    integers,
    mixed_batch,
)

needs_io_uring = pytest.mark.skipif(
    not io_uring_report().usable, reason="io_uring is refused by this kernel"
)

UNNOTICED = Faults(volatile_cache=True, shuffled=True, short_rate=0.5)


@pytest.fixture
def region_file(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "region")
    create_region_file(path, CAPACITY_BYTES)
    yield path
    os.unlink(path)


def opened(path: str, engine: Engine) -> Iterator[Device]:
    device = open_device(path, engine=engine, direct="required")
    assert device.engine == engine
    yield device
    device.close()


@needs_io_uring
class TestUringFile(FileContract):
    @pytest.fixture
    def path(self, region_file: str) -> str:
        return region_file

    @pytest.fixture
    def device(self, path: str) -> Iterator[Device]:
        yield from opened(path, "io_uring")


class TestThreadsFile(FileContract):
    @pytest.fixture
    def path(self, region_file: str) -> str:
        return region_file

    @pytest.fixture
    def device(self, path: str) -> Iterator[Device]:
        yield from opened(path, "threads")


class LoopContract(DeviceContract):
    @pytest.fixture(params=[512, 4096])
    def path(self, request: pytest.FixtureRequest, loop_device: LoopMaker) -> str:
        return loop_device(CAPACITY_BYTES, request.param)

    def test_sizes_are_those_of_the_device(self, device: Device, path: str) -> None:
        name = os.path.basename(path)
        block = int(Path(f"/sys/block/{name}/queue/logical_block_size").read_text())
        assert (device.block_bytes, device.capacity_bytes) == (block, CAPACITY_BYTES)


@pytest.mark.loop
@needs_io_uring
class TestUringLoop(LoopContract):
    @pytest.fixture
    def device(self, path: str) -> Iterator[Device]:
        yield from opened(path, "io_uring")


@pytest.mark.loop
class TestThreadsLoop(LoopContract):
    @pytest.fixture
    def device(self, path: str) -> Iterator[Device]:
        yield from opened(path, "threads")


class TestSimulated(DeviceContract):
    """Also with the faults that no caller may notice. It never touches the file at `path`."""

    @pytest.fixture
    def path(self, region_file: str) -> str:
        return region_file

    @pytest.fixture(params=[(512, NO_FAULTS), (512, UNNOTICED), (4096, UNNOTICED)])
    def device(self, request: pytest.FixtureRequest, path: str) -> Iterator[Device]:
        block, faults = request.param
        device = SimulatedDevice.open(
            CAPACITY_BYTES, block_bytes=block, seed=1, faults=faults, path=path
        )
        yield device
        device.close()


def round_trip(device: Device, count: int = 40) -> None:
    offsets, source = mixed_batch(count, device.block_bytes, count)
    device.write(offsets, source)
    target = empty_like(source)
    device.read(offsets, target)
    assert np.array_equal(target.memory, source.memory)


@pytest.mark.parametrize("count", [1, 40])
def test_threads_continue_short_transfers(
    region_file: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A057."""
    calls = 0

    def shorten(views: list[memoryview], block: int) -> list[memoryview]:
        nonlocal calls
        calls += 1
        return [views[0][: max(block, len(views[0]) // 2 // block * block)]]

    real_read, real_write = os.preadv, os.pwritev
    with open_and_close(region_file, "threads") as device:
        block = device.block_bytes
        monkeypatch.setattr(os, "preadv", lambda f, v, o: real_read(f, shorten(v, block), o))
        monkeypatch.setattr(os, "pwritev", lambda f, v, o: real_write(f, shorten(v, block), o))
        round_trip(device, count)
        assert calls > 2 * count


def test_threads_retry_and_then_give_up(region_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read = os.preadv
    refusals = iter([True, True])

    def sometimes(fd: int, views: list[memoryview], offset: int) -> int:
        if next(refusals, False):
            raise BlockingIOError(errno.EAGAIN, "again")
        return real_read(fd, views, offset)

    with open_and_close(region_file, "threads") as device:
        monkeypatch.setattr(os, "preadv", sometimes)
        round_trip(device, 1)
        monkeypatch.setattr("kvtier.io.threads.RETRY_S", 0)
        refusals = iter([True] * 5000)
        with pytest.raises(DeviceError, match="EAGAIN"):
            device.read(integers(0), Buffers.whole(aligned_bytes(device.block_bytes)))


def test_threads_hand_a_crash_to_the_caller(
    region_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A041."""

    def crash(fd: int, views: list[memoryview], offset: int) -> int:
        raise MemoryError("injected")

    with open_and_close(region_file, "threads") as device:
        offsets, source = mixed_batch(20, device.block_bytes, 1)
        monkeypatch.setattr(os, "pwritev", crash)
        with pytest.raises(MemoryError, match="injected"):
            device.write(offsets, source)
        monkeypatch.undo()
        round_trip(device)


@needs_io_uring
@pytest.mark.parametrize("registered", [False, True])
def test_uring_continues_short_transfers(
    region_file: str, monkeypatch: pytest.MonkeyPatch, registered: bool
) -> None:
    """A057: the ring is handed half of what the device asked for, so every completion is short."""
    pushed = 0

    def push_half(ring: Ring, entries: Entries) -> None:
        nonlocal pushed
        halved = entries.copy()
        halved[:, 3] = np.maximum(entries[:, 3] // 2 // 512 * 512, 512)
        pushed += len(entries)
        real_push(ring, halved)

    real_push = Ring.push
    monkeypatch.setattr(Ring, "push", push_half)
    with open_and_close(region_file, "io_uring") as device:
        if device.block_bytes != 512:
            pytest.skip(f"the file system has blocks of {device.block_bytes} bytes")
        offsets, source = mixed_batch(40, 512, 40)
        target = empty_like(source)
        if registered:
            assert device.register(target.memory)
        device.write(offsets, source)
        device.read(offsets, target)
        assert np.array_equal(target.memory, source.memory)
        assert pushed > 80


@needs_io_uring
def test_uring_splits_long_requests_and_arenas(
    region_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A093."""
    monkeypatch.setattr(uring_flight, "TRANSFER_BYTES_MAX", 8192)
    monkeypatch.setattr(ring_arena, "REGISTERED_PIECE_BYTES", 64 * 1024)
    with open_and_close(region_file, "io_uring") as device:
        source = filled(300 * 1024, 5)
        target = aligned_bytes(source.size)
        device.write(integers(0), Buffers.whole(source))
        assert device.register(target)
        device.read(integers(0), Buffers.whole(target))
        assert np.array_equal(source, target)


@needs_io_uring
def test_uring_retries_eagain_and_then_gives_up(
    region_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A057."""
    real_reap = Ring.reap
    lies = 3

    def reap(ring: Ring) -> Any:
        nonlocal lies
        done = real_reap(ring)
        if lies and len(done):
            lies -= 1
            done[0, 1] = -errno.EAGAIN
        return done

    monkeypatch.setattr(Ring, "reap", reap)
    with open_and_close(region_file, "io_uring") as device:
        round_trip(device)
        assert lies == 0
        monkeypatch.setattr(uring_flight, "RETRY_S", 0)
        lies = 5000
        with pytest.raises(DeviceError, match="EAGAIN") as caught:
            device.read(integers(0), Buffers.whole(aligned_bytes(device.block_bytes)))
        assert caught.value.failures == [(0, errno.EAGAIN)]
        lies = 0
        round_trip(device)


@needs_io_uring
def test_uring_enter_is_retried(region_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A057."""
    real_enter = syscalls.io_uring_enter
    errors = [errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.EINTR]

    def enter(fd: int, submit: int, wait: int, flags: int) -> int:
        if errors:
            number = errors.pop()
            raise OSError(number, os.strerror(number))
        return real_enter(fd, submit, wait, flags)

    monkeypatch.setattr(syscalls, "io_uring_enter", enter)
    with open_and_close(region_file, "io_uring") as device:
        round_trip(device)
        assert not errors
        errors = [errno.ENXIO]
        with pytest.raises(DeviceError, match="io_uring failed"):
            device.read(integers(0), Buffers.whole(aligned_bytes(device.block_bytes)))
        round_trip(device)


@needs_io_uring
def test_uring_waits_for_its_requests_when_interrupted(
    region_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C in the middle of a batch nothing may write into its memory any more.
    A037, A038."""
    real_reap = Ring.reap
    interrupted = False

    def reap(ring: Ring) -> Any:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt
        return real_reap(ring)

    with open_and_close(region_file, "io_uring") as device:
        assert isinstance(device, UringDevice)
        offsets, source = mixed_batch(40, device.block_bytes, 1)
        monkeypatch.setattr(Ring, "reap", reap)
        with pytest.raises(KeyboardInterrupt):
            device.write(offsets, source)
        assert device._ring.in_flight == 0
        round_trip(device)


@needs_io_uring
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EPERM])
def test_uring_works_unregistered(
    region_file: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A085."""

    def refuse(ring: Ring, addresses: list[int], lengths: list[int]) -> None:
        raise OSError(number, os.strerror(number))

    with open_and_close(region_file, "io_uring") as device:
        assert isinstance(device, UringDevice)
        memory = aligned_bytes(1 << 20)
        assert device.register(memory)
        assert "registered: 1048576 bytes" in device.registered_reason
        monkeypatch.setattr(Ring, "register_buffers", refuse)
        assert not device.register(memory)
        assert errno.errorcode[number] in device.registered_reason
        assert "memlock" in device.registered_reason
        memory[:] = filled(memory.size, 3)
        device.write(integers(0), Buffers.whole(memory))
        target = aligned_bytes(1 << 20)
        device.read(integers(0), Buffers.whole(target))
        assert np.array_equal(target, memory)


def test_read_only_device_refuses_writes(region_file: str) -> None:
    for engine in ("threads", "io_uring"):
        device = open_device(region_file, engine=engine, writable=False)
        with pytest.raises(DeviceError, match="1 of 1 writes"):
            device.write(integers(0), Buffers.whole(aligned_bytes(device.block_bytes)))
        device.close()


def test_strided_memory_is_refused(region_file: str) -> None:
    with open_and_close(region_file, "threads") as device:
        strided = aligned_bytes(4 * device.block_bytes)[::2]
        with pytest.raises(ConfigError, match="contiguous"):
            device.write(integers(0), Buffers.whole(strided))


def test_a_full_device_is_an_error_of_kvtier_and_of_the_os(region_file: str) -> None:
    os.truncate(region_file, 4096 * 4)
    with open_and_close(region_file, "threads") as device:
        os.truncate(region_file, 4096)
        with pytest.raises(KvtierError) as caught:
            device.read(integers(8192), Buffers.whole(aligned_bytes(4096)))
        assert isinstance(caught.value, OSError)


def open_and_close(path: str, engine: Engine) -> contextlib.closing[Device]:
    return contextlib.closing(open_device(path, engine=engine))


def test_doctor_imports_stay_light() -> None:
    """`kvtier ls` and `kvtier doctor` answer within 0.3 s, so these may not import numpy."""
    names = ("catalog", "lock", "superblock", "probe", "allocator", "foreign")
    code = (
        "import sys\n"
        + "".join(f"import kvtier.io.{name}\n" for name in names)
        + "heavy = {'numpy', 'torch', 'cupy'} & set(sys.modules)\n"
        + "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
