"""What only NVMe passthrough can do wrong: splitting, the drive's status codes, the block device
beside it. The drive is one in this process."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, DeviceError, ForeignDataError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, Device, Int64Array, PendingBatch, Priority
from kvtier.io.nvme_commands import COMMAND
from kvtier.io.pagecache import cached_bytes
from kvtier.io.passthrough import RETRIES_MAX, CommandFlight, PassthroughDevice, pieces_of
from kvtier.io.probe import open_device
from kvtier.io.region import Region
from tests.conftest import LoopMaker
from tests.device_contract import CAPACITY_BYTES, filled, integers
from tests.fake_nvme import (
    DATASET_MANAGEMENT,
    FLUSH,
    READ,
    WRITE,
    FakeDrive,
    FakeKernel,
    FakeMachine,
    drive_on,
    open_files,
)
from tests.pending_cases import BLOCK, settle, stored

pytestmark = pytest.mark.loop
STORE = "7d0a6e5c-1111-4222-8333-944455556666"


@pytest.fixture(params=[(512, 4), (4096, 512)], ids=["512", "4096"])
def machine(request: pytest.FixtureRequest, tmp_path: Path, loop_device: LoopMaker) -> FakeMachine:
    """Blocks of 512 bytes, and one page for each command; or of 4096 bytes, and 256 KiB."""
    block_bytes, most_kib = request.param
    machine = FakeMachine(tmp_path, loop_device(CAPACITY_BYTES, block_bytes))
    machine.set_queue(max_hw_sectors_kb=most_kib)
    return machine


@pytest.fixture
def drive(machine: FakeMachine) -> Iterator[FakeDrive]:
    with drive_on(machine.device) as drive:
        yield drive


@pytest.fixture
def kernel(machine: FakeMachine, drive: FakeDrive, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    return machine.put_in(monkeypatch, drive)


@pytest.fixture
def path(machine: FakeMachine) -> str:
    return machine.device


@pytest.fixture
def device(kernel: FakeKernel, path: str) -> Iterator[PassthroughDevice]:
    device = open_device(path, engine="nvme")
    assert isinstance(device, PassthroughDevice)
    assert (device.engine, device.direct_io) == ("nvme_passthrough", True)
    yield device
    device.close()


# ---- splitting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_pieces_cover_requests_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    most = int(2 ** random.integers(9, 14))
    lengths = random.integers(0, 20, 50) * 512
    request_of, within = pieces_of(lengths, most)
    ends = np.minimum(lengths[request_of], within + most)
    assert ((ends - within > 0) & (ends - within <= most)).all()
    for request, length in enumerate(lengths.tolist()):
        own = request_of == request
        assert within[own].tolist() == list(range(0, length, most))
        assert int((ends - within)[own].sum()) == length


def test_a_long_request_is_many_commands_at_once(
    device: PassthroughDevice, kernel: FakeKernel, drive: FakeDrive
) -> None:
    most, block = device.transfer_bytes_max, device.block_bytes
    assert most == (4096 if block == 512 else 256 * 1024)
    length = 5 * most + block
    source = filled(length + block, 1)
    buffers = Buffers(source, integers(block), integers(length))
    device.write(integers(3 * block), buffers)
    assert drive.log == [
        *((WRITE, 3 + number * most // block, most // block) for number in range(5)),
        (WRITE, 3 + 5 * most // block, 1),
    ]
    drive.log.clear()
    kernel.held = []
    target = aligned_bytes(length)
    batch = device.start_read(integers(3 * block), Buffers.whole(target))
    assert len(kernel.held) == 6, "one after the other"
    kernel.release()
    device.wait(batch)
    assert np.array_equal(target, source[block:])


def test_commands_byte_by_byte(device: PassthroughDevice, drive: FakeDrive) -> None:
    """struct nvme_uring_cmd, as the ioctl interface packs it."""
    block = drive.block_bytes
    offsets = integers((1 << 33) * block, 0)
    memory = aligned_bytes(8 * block)
    buffers = Buffers(memory, integers(0, 4 * block), integers(2 * block, 3 * block))
    for what, opcode in (("read", READ), ("write", WRITE)):
        batch = PendingBatch(what, device.path, offsets, buffers)
        flight = CommandFlight(batch, buffers, Priority.DEMAND, device._namespace, 1 << 20)
        flight.number = 5
        flight.begin(device._arena)
        for index, entry in enumerate(flight.take(2)):
            first = int(offsets[index]) // block
            count = int(buffers.lengths[index]) // block
            address, length = int(buffers.addresses[index]), int(buffers.lengths[index])
            cdw = (first & 0xFFFFFFFF, first >> 32, count - 1, 0, 0, 0)
            packed = COMMAND.pack(opcode, 0, 0, drive.nsid, 0, 0, 0, address, 0, length, *cdw, 0, 0)
            assert entry.tobytes()[48:] == packed + bytes(8)
            assert int(entry[4]) == 5 << 32 | index


def test_requests_of_no_bytes_send_nothing(device: PassthroughDevice, drive: FakeDrive) -> None:
    device.read(integers(0), Buffers(aligned_bytes(BLOCK), integers(0), integers(0)))
    assert drive.log == []


# ---- what the drive says ------------------------------------------------------------------------


def reads(device: Device, count: int, blocks: int = 1) -> tuple[Int64Array, Buffers]:
    """Requests of so many blocks, one behind the other, from the beginning of the device."""
    lengths = np.full(count, blocks * device.block_bytes, np.int64)
    starts = np.cumsum(lengths) - lengths
    return starts, Buffers(aligned_bytes(int(lengths.sum())), starts, lengths)


@pytest.mark.parametrize("status", [0x281, 0x4281])
def test_a_bad_block_fails_alone_and_in_words(
    device: PassthroughDevice, drive: FakeDrive, status: int
) -> None:
    """Without the drive's word that it is in vain, it is tried a few times more."""
    source = stored(device, 64)
    drive.statuses[10] = [status]
    drive.log.clear()
    offsets, target = reads(device, 40)
    words = rf"1 of 40 reads .* \(ENODATA\), NVMe status {status:#x}: unrecovered read error"
    with pytest.raises(DeviceError, match=words) as caught:
        device.read(offsets, target)
    assert caught.value.failures == [(10, errno.ENODATA)]
    expected = source[: 40 * device.block_bytes].reshape(40, -1)
    found = target.memory.reshape(40, -1)
    assert np.array_equal(np.delete(found, 10, 0), np.delete(expected, 10, 0))
    tries = 2 * (1 if status & 0x4000 else 1 + RETRIES_MAX)
    assert drive.log.count((READ, 10, 1)) == tries, "in the batch, and once more alone"


def test_a_block_that_is_read_at_last_is_no_failure(
    device: PassthroughDevice, drive: FakeDrive
) -> None:
    source = stored(device, 64)
    drive.statuses[3] = [0x281, -errno.EAGAIN, 0x82, -errno.EINTR, 0]
    offsets, target = reads(device, 10)
    device.read(offsets, target)
    assert np.array_equal(target.memory, source[: target.memory.size])
    assert drive.log.count((READ, 3, 1)) == 5


def test_a_bad_piece_fails_its_request(device: PassthroughDevice, drive: FakeDrive) -> None:
    """Every other request is whole, also one that is split itself."""
    block = device.block_bytes
    blocks = 3 * device.transfer_bytes_max // block
    source = filled(3 * blocks * block, 4)
    device.write(integers(0), Buffers.whole(source))
    bad = blocks + 2 * blocks // 3 + 1
    drive.statuses[bad] = [0x4281]
    offsets, target = reads(device, 3, blocks)
    batch = device.start_read(offsets, target)
    with pytest.raises(DeviceError, match=r"1 of 3 reads .*unrecovered read error") as caught:
        device.wait(batch)
    assert caught.value.failures == [(1, errno.ENODATA)]
    assert np.array_equal(target.memory[: blocks * block], source[: blocks * block])
    assert np.array_equal(target.memory[2 * blocks * block :], source[2 * blocks * block :])


@pytest.mark.parametrize("split", [False, True])
def test_past_the_end(device: PassthroughDevice, drive: FakeDrive, split: bool) -> None:
    """A drive that has become smaller than it was when it was opened."""
    drive.blocks = 100
    length = device.transfer_bytes_max * (2 if split else 1)
    target = Buffers.whole(aligned_bytes(length))
    offset = integers(101 * device.block_bytes)
    words = r"1 of 1 reads .*\(EREMOTEIO\), NVMe status 0x4080: LBA out of range"
    with pytest.raises(DeviceError, match=words) as caught:
        device.read(offset, target)
    assert caught.value.errno == errno.EREMOTEIO
    with pytest.raises(DeviceError, match=r"1 of 1 writes .*LBA out of range"):
        device.write(offset, target)


def test_an_errno_of_the_kernel_has_no_words_of_the_drive(
    device: PassthroughDevice, drive: FakeDrive
) -> None:
    drive.statuses[0] = [-errno.ENODEV]
    offsets, target = reads(device, 1)
    with pytest.raises(DeviceError, match=r"No such device \(ENODEV\)$"):
        device.read(offsets, target)


def test_a_flush_is_a_command_and_its_failure_counts(
    device: PassthroughDevice, drive: FakeDrive
) -> None:
    device.flush()
    assert drive.log == [(FLUSH, 0, 0)]
    assert device.volatile_cache
    drive.flush_status = 0x4006
    with pytest.raises(DeviceError, match="internal error"):
        device.flush()
    assert device.failed_flushes == 1


def test_discard_is_a_command(device: PassthroughDevice, drive: FakeDrive) -> None:
    block = device.block_bytes
    assert device.discard(integers(block, 0, 9 * block), integers(2 * block, 0, block))
    assert drive.log == [(DATASET_MANAGEMENT, 1, 2), (DATASET_MANAGEMENT, 9, 1)]


def test_a_drive_that_does_not_deallocate(kernel: FakeKernel, drive: FakeDrive, path: str) -> None:
    drive.deallocates = False
    with contextlib.closing(open_device(path, engine="nvme")) as device:
        assert not device.discard(integers(0), integers(4096))
        with pytest.raises(ConfigError):
            device.discard(integers(CAPACITY_BYTES), integers(4096))
    assert drive.log == []


def test_what_is_opened_for_reading_is_not_written(
    kernel: FakeKernel, drive: FakeDrive, path: str
) -> None:
    """The kernel would let it happen: for who has its capability, it does not look at the file."""
    with contextlib.closing(open_device(path, engine="nvme", writable=False)) as device:
        memory = Buffers.whole(aligned_bytes(4096))
        for forbidden in (
            lambda: device.write(integers(0), memory),
            lambda: device.start_write(integers(0), memory),
            lambda: device.discard(integers(0), integers(4096)),
        ):
            with pytest.raises(DeviceError, match="for reading only") as caught:
                forbidden()
            assert caught.value.errno == errno.EBADF
        assert drive.log == []
        device.read(integers(0), memory)


def test_demand_comes_before_what_waits(
    device: PassthroughDevice, kernel: FakeKernel, drive: FakeDrive
) -> None:
    kernel.held = []
    scrub = device.start_read(*reads(device, 200), Priority.SCRUB)
    begun = len(drive.log)
    assert 0 < begun < 200
    target = Buffers.whole(aligned_bytes(device.block_bytes))
    demand = device.start_read(integers(300 * device.block_bytes), target)
    kernel.release()
    settle(device, [demand, scrub])
    assert drive.log[begun] == (READ, 300, 1)
    assert len(drive.log) == 201


# ---- the block device beside it -----------------------------------------------------------------


def test_nobody_else_may_write_or_mount_meanwhile(device: PassthroughDevice, path: str) -> None:
    for engine in ("nvme", "io_uring", "threads"):
        with pytest.raises(ForeignDataError, match="in use"):
            open_device(path, engine=engine)
    reader = open_device(path, engine="nvme", writable=False)
    source = stored(device)
    target = aligned_bytes(source.size)
    reader.read(integers(0), Buffers.whole(target))
    assert np.array_equal(target, source)
    reader.close()
    device.close()
    open_device(path, engine="threads").close()


def test_what_others_left_in_the_page_cache_is_not_believed(
    kernel: FakeKernel, drive: FakeDrive, path: str
) -> None:
    """Dirty pages are written before the first command; clean ones do not outlive it."""
    with open(path, "r+b", buffering=0) as other:
        other.write(b"\xee" * 4096)
        with contextlib.closing(open_device(path, engine="nvme")) as device:
            target = Buffers.whole(aligned_bytes(4096))
            device.read(integers(0), target)
            assert (target.memory == 0xEE).all()
            assert cached_bytes(path) == 0
            other.seek(0)
            assert other.read(8192)
            source = filled(4096, 3)
            device.write(integers(0), Buffers.whole(source))
        other.seek(0)
        assert other.read(4096) == source.tobytes()


def test_a_region_is_made_and_found_again(kernel: FakeKernel, path: str) -> None:
    """The look for foreign data goes by the block device, the superblocks by commands."""
    with Region.create(open_device(path, engine="nvme"), STORE) as region:
        assert region.path == path
    for engine in ("nvme", "threads"):
        with Region.open(open_device(path, engine=engine), STORE) as region:
            assert region.notes == []
    with open(path, "r+b") as other:
        other.write(b"\xee" * 4096)
    device = open_device(path, engine="nvme")
    with pytest.raises(ForeignDataError):
        Region.create(device, "00000000-1111-4222-8333-944455556666")
    device.close()


def test_sizes_that_differ_are_refused(kernel: FakeKernel, drive: FakeDrive, path: str) -> None:
    files = open_files()
    drive.blocks += 1
    with pytest.raises(DeviceError, match=f"{drive.blocks * drive.block_bytes} bytes .*rescan"):
        open_device(path, engine="nvme")
    assert open_files() == files
    drive.blocks -= 1
    open_device(path, engine="threads").close()


def test_the_page_cache_may_not_be_asked_for(kernel: FakeKernel, path: str) -> None:
    with pytest.raises(ConfigError, match="page cache"):
        open_device(path, engine="nvme", direct="off")


def test_an_old_kernel(kernel: FakeKernel, path: str) -> None:
    kernel.big_entries = False
    with pytest.raises(DeviceError, match=r"Linux 5\.19") as caught:
        open_device(path, engine="nvme")
    assert caught.value.errno == errno.ENOSYS
    with pytest.raises(DeviceError, match=r"Linux 5\.19"):
        PassthroughDevice.open(path)
    open_device(path, engine="threads").close()


def test_an_arena_is_not_registered(device: PassthroughDevice) -> None:
    assert not device.register(aligned_bytes(1 << 20))
    assert "as it is" in device.registered_reason
