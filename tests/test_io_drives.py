"""Several devices as one: the contract of every Device, and what only several drives can do."""

import errno
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import AlignmentError, ClosedError, ConfigError, DeviceError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, ByteArray, Device, Int64Array
from kvtier.io.drives import Drives, MissingDrive
from kvtier.io.extent import DRIVE_BITS, drive_start
from kvtier.io.probe import open_device
from kvtier.io.rawfile import create_region_file
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import NO_FAULTS, BadRange, Faults
from kvtier.io.threads import ThreadsDevice
from tests.device_contract import CAPACITY_BYTES, FileContract, empty_like, filled, integers
from tests.pending_cases import BLOCK, needs_io_uring, settle

MIB = 1 << 20
COUNT = 3


class TestOneDrive(FileContract):
    """With one member every offset is that of the drive, so the whole contract applies."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        name = str(tmp_path / "region")
        create_region_file(name, CAPACITY_BYTES)
        return name

    @pytest.fixture(params=[pytest.param("io_uring", marks=needs_io_uring), "threads"])
    def device(self, path: str, request: pytest.FixtureRequest) -> Iterator[Device]:
        device = Drives([open_device(path, engine=request.param, direct="required")])
        yield device
        device.close()


def simulated(number: int, faults: Faults = NO_FAULTS) -> SimulatedDevice:
    return SimulatedDevice.open(
        (number + 1) * MIB, seed=number, faults=faults, path=f"drive {number}"
    )


@pytest.fixture
def members() -> list[SimulatedDevice]:
    """Three drives of 1, 2 and 3 MiB."""
    return [simulated(number) for number in range(COUNT)]


@pytest.fixture
def device(members: list[SimulatedDevice]) -> Iterator[Drives]:
    device = Drives(members)
    yield device
    device.close()


def everywhere(count: int, seed: int) -> tuple[Int64Array, Buffers]:
    """`count` requests of one block, anywhere on the three drives, in any order."""
    random = np.random.default_rng(seed)
    drives = random.integers(0, COUNT, count)
    blocks = random.permutation(MIB // BLOCK)[:count]
    lengths = np.full(count, BLOCK, np.int64)
    starts = random.permutation(count).astype(np.int64) * BLOCK
    offsets = (drives << DRIVE_BITS) | blocks * BLOCK
    return offsets.astype(np.int64), Buffers(filled(count * BLOCK, seed), starts, lengths)


def test_what_a_drive_holds_is_what_was_written_to_its_offsets(
    device: Drives, members: list[SimulatedDevice]
) -> None:
    offsets, source = everywhere(200, 1)
    device.write(offsets, source)
    images = [member.live() for member in members]
    for offset, start in zip(offsets.tolist(), source.starts.tolist(), strict=True):
        image, byte = images[offset >> DRIVE_BITS], offset & (drive_start(1) - 1)
        assert image[byte : byte + BLOCK] == source.memory[start : start + BLOCK].tobytes()
    target = empty_like(source)
    device.read(offsets, target)
    assert np.array_equal(target.memory, source.memory)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_batches_of_all_drives_at_once(seed: int) -> None:
    unnoticed = Faults(volatile_cache=True, shuffled=True, short_rate=0.5)
    device = Drives([simulated(number, unnoticed) for number in range(COUNT)])
    offsets, source = everywhere(200, seed)
    writes = [
        device.start_write(offsets[part], Buffers(source.memory, source.starts[part], sizes[part]))
        for sizes in [source.lengths]
        for part in np.array_split(np.random.default_rng(seed).permutation(200), 7)
    ]
    settle(device, writes)
    for batch in writes:
        batch.result()
    target = empty_like(source)
    batch = device.start_read(offsets, target)
    device.wait(batch)
    assert np.array_equal(target.memory, source.memory)
    device.close()


def test_sizes_and_names(device: Drives) -> None:
    assert device.engine == "simulated x3"
    assert device.path == "drive 0, drive 1, drive 2"
    assert device.capacity_bytes == drive_start(2) + 3 * MIB
    assert device.block_bytes == BLOCK
    assert device.direct_io
    assert device.locate(drive_start(2) + 7)[0].path == "drive 2"
    assert device.locate(drive_start(2) + 7)[1] == 7


@pytest.mark.parametrize("offset", [MIB, drive_start(1) + 2 * MIB, drive_start(3), -BLOCK])
def test_between_two_drives_there_is_nothing(device: Drives, offset: int) -> None:
    one = Buffers.whole(aligned_bytes(BLOCK))
    with pytest.raises(ConfigError, match="outside"):
        device.read(integers(offset), one)
    with pytest.raises(ConfigError):
        device.start_write(integers(offset), one)
    with pytest.raises(ConfigError):
        device.discard(integers(offset), integers(BLOCK))
    with pytest.raises(AlignmentError):
        device.read(integers(drive_start(1) + 1), one)


def test_the_largest_block_counts_for_all() -> None:
    small = SimulatedDevice.open(MIB, block_bytes=512)
    device = Drives([small, SimulatedDevice.open(MIB, block_bytes=4096)])
    assert device.block_bytes == 4096
    with pytest.raises(AlignmentError):
        device.read(integers(512), Buffers.whole(aligned_bytes(4096)))


def test_failures_stand_in_their_places(members: list[SimulatedDevice], device: Drives) -> None:
    """Of both drives that fail, beside one that does not, in the order of the batch."""
    source = filled(6 * BLOCK, 1)
    starts = np.arange(6, dtype=np.int64) * BLOCK
    lengths = np.full(6, BLOCK, np.int64)
    offsets = integers(
        drive_start(2), 0, drive_start(1), drive_start(2) + BLOCK, BLOCK, drive_start(1) + BLOCK
    )
    device.write(offsets, Buffers(source, starts, lengths))
    members[2].set_faults(Faults(bad_ranges=(BadRange(BLOCK, BLOCK, errno.ENODATA),)))
    members[0].set_faults(Faults(bad_ranges=(BadRange(0, BLOCK, errno.EIO),)))
    target = aligned_bytes(6 * BLOCK)
    with pytest.raises(DeviceError, match="2 of 6 reads of drive 0, drive 2") as caught:
        device.read(offsets, Buffers(target, starts, lengths))
    assert caught.value.failures == [(1, errno.EIO), (3, errno.ENODATA)]
    batch = device.start_read(offsets, Buffers(target, starts, lengths))
    with pytest.raises(DeviceError) as caught:
        device.wait(batch)
    assert caught.value.failures == [(1, errno.EIO), (3, errno.ENODATA)]
    for index in (0, 2, 4, 5):
        place = slice(index * BLOCK, (index + 1) * BLOCK)
        assert np.array_equal(target[place], source[place])


@pytest.fixture
def degraded(members: list[SimulatedDevice]) -> Iterator[Drives]:
    """The second drive is not there."""
    device = Drives([members[0], MissingDrive("drive 1", 2 * MIB, "gone"), members[2]])
    yield device
    device.close()


def write(device: Device, offsets: Int64Array, source: Buffers, *, started: bool) -> None:
    if started:
        device.wait(device.start_write(offsets, source))
    else:
        device.write(offsets, source)


def test_a_missing_drive_fails_alone(degraded: Drives) -> None:
    offsets, source = everywhere(90, 3)
    there = offsets >> DRIVE_BITS != 1
    for started in (False, True):
        with pytest.raises(DeviceError, match="writes of drive 1") as caught:
            write(degraded, offsets, source, started=started)
        assert caught.value.errno == errno.ENODEV
        assert [index for index, _ in caught.value.failures] == np.flatnonzero(~there).tolist()
    degraded.flush()
    assert degraded.failed_flushes == 0
    target = empty_like(source)
    with pytest.raises(DeviceError):
        degraded.read(offsets, target)
    settled = degraded.start_read(offsets, empty_like(source))
    settle(degraded, [settled])
    with pytest.raises(DeviceError):
        settled.result()
    for index in np.flatnonzero(there).tolist():
        place = slice(int(source.starts[index]), int(source.starts[index]) + BLOCK)
        assert np.array_equal(target.memory[place], source.memory[place])
    assert degraded.engine == "simulated x2"
    assert not degraded.discard(integers(0, drive_start(1)), integers(BLOCK, BLOCK))


def test_one_drive_must_be_there() -> None:
    with pytest.raises(ConfigError, match="one that is there"):
        Drives([MissingDrive("a", MIB, "gone")])


def test_a_flush_that_fails_counts_and_the_others_are_flushed() -> None:
    cached = Faults(volatile_cache=True)
    members = [simulated(0, Faults(failing_flushes=(1,))), simulated(1, cached)]
    device = Drives(members)
    offset = integers(drive_start(1))
    device.write(offset, Buffers.whole(filled(BLOCK, 5)))
    with pytest.raises(DeviceError, match="drive 0 could not be made durable"):
        device.flush()
    assert device.failed_flushes == 1
    assert members[1].image("none")[:BLOCK] == filled(BLOCK, 5).tobytes()
    device.flush()
    assert device.failed_flushes == 1


def test_a_drive_that_is_closed_under_a_batch(
    device: Drives, members: list[SimulatedDevice]
) -> None:
    """What was begun on the others ends before anything is raised."""
    members[1].close()
    offsets, source = everywhere(50, 4)
    with pytest.raises(ClosedError):
        device.write(offsets, source)
    with pytest.raises(ClosedError):
        device.start_read(offsets, empty_like(source))
    target = Buffers.whole(aligned_bytes(BLOCK))
    device.read(integers(drive_start(2)), target)


def test_both_drives_are_read_at_once(tmp_path: Path) -> None:
    """Each of two reads ends only when the other one was begun."""
    met = threading.Barrier(2, timeout=20)
    paths = [str(tmp_path / name) for name in "ab"]
    members: list[ThreadsDevice] = []
    for path in paths:
        create_region_file(path, MIB)
        members.append(ThreadsDevice.open(path))
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        met.wait()
        return real(fd, views, offset)

    device = Drives(members)
    starts, lengths = integers(0, BLOCK), integers(BLOCK, BLOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        memory = aligned_bytes(2 * BLOCK)
        device.read(integers(0, drive_start(1)), Buffers(memory, starts, lengths))
    device.close()


def test_who_holds_a_duplicate_of_the_fd_hears_of_the_end(members: list[SimulatedDevice]) -> None:
    device = Drives(members)
    fd = os.dup(device.completion_fd)
    assert not select.select([fd], [], [], 0)[0]
    device.close()
    assert select.select([fd], [], [], 0)[0] == [fd]
    os.close(fd)
    with pytest.raises(ClosedError):
        device.poll()
    with pytest.raises(ClosedError):
        device.completion_fd  # noqa: B018


def test_registering_reaches_every_drive(tmp_path: Path) -> None:
    seen: list[int] = []

    def register(self: SimulatedDevice, memory: ByteArray) -> bool:
        seen.append(memory.size)
        return True

    members = [simulated(number) for number in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedDevice, "register", register)
        assert Drives(members).register(aligned_bytes(8192))
    assert seen == [8192, 8192]
