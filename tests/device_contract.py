"""What every Device must do. An implementation's tests subclass DeviceContract.

The subclass gives two fixtures: `path`, a device or file of CAPACITY_BYTES that may be overwritten,
and `device`, opened on it.
"""

import errno
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvtier.errors import AlignmentError, ClosedError, ConfigError
from kvtier.io.buffers import BufferPool, aligned_bytes
from kvtier.io.device import Buffers, ByteArray, Device, Int64Array
from kvtier.io.pagecache import cached_bytes

CAPACITY_BYTES = 16 * 1024 * 1024


def integers(*values: int) -> Int64Array:
    """int64 [len(values)]."""
    return np.array(values, np.int64)


def filled(nbytes: int, seed: int) -> ByteArray:
    """Aligned uint8 [nbytes] of random bytes."""
    memory = aligned_bytes(nbytes)
    memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return memory


def mixed_batch(count: int, block_bytes: int, seed: int) -> tuple[Int64Array, Buffers]:
    """`count` requests of 1 to 5 blocks that fill memory and lie shuffled on the device."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, count) * block_bytes
    starts = np.cumsum(lengths) - lengths
    order = rng.permutation(count)
    gaps = rng.integers(0, 2, count) * block_bytes
    offsets = np.empty(count, np.int64)
    offsets[order] = np.cumsum(lengths[order] + gaps) - lengths[order]
    return offsets, Buffers(filled(int(lengths.sum()), seed), starts, lengths)


def empty_like(buffers: Buffers) -> Buffers:
    """The same pieces of other, zeroed memory."""
    return Buffers(aligned_bytes(buffers.memory.size), buffers.starts, buffers.lengths)


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child. Returns 0 if it raised ClosedError, else another number."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 2
        except ClosedError:
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class DeviceContract:
    """The suite. Needs fixtures `path` and `device`."""

    @pytest.mark.parametrize("seed", [1, 2, 3])
    @pytest.mark.parametrize("count", [1, 7, 8, 33, 600])
    def test_batch_round_trip(self, device: Device, count: int, seed: int) -> None:
        offsets, source = mixed_batch(count, device.block_bytes, seed)
        assert offsets.max() + 5 * device.block_bytes < device.capacity_bytes
        device.write(offsets, source)
        # Another order than that of the write, so that order cannot matter.
        order = np.random.default_rng(seed + 100).permutation(count)
        target = Buffers(
            aligned_bytes(source.memory.size), source.starts[order], source.lengths[order]
        )
        device.read(offsets[order], target)
        assert np.array_equal(target.memory, source.memory)

    def test_a_thousand_requests(self, device: Device) -> None:
        offsets = np.random.default_rng(5).permutation(1000).astype(np.int64) * device.block_bytes
        lengths = np.full(1000, device.block_bytes, np.int64)
        starts = np.arange(1000, dtype=np.int64) * device.block_bytes
        source = Buffers(filled(1000 * device.block_bytes, 6), starts, lengths)
        device.write(offsets, source)
        whole = aligned_bytes(1000 * device.block_bytes)
        device.read(integers(0), Buffers.whole(whole))
        expected = source.memory.reshape(1000, -1)[np.argsort(offsets)]
        assert np.array_equal(whole.reshape(1000, -1), expected)

    @pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5])
    def test_a_write_changes_its_blocks_and_no_others(self, device: Device, blocks: int) -> None:
        block = device.block_bytes
        before = filled(12 * block, blocks)
        device.write(integers(0), Buffers.whole(before))
        piece = filled(blocks * block, 50 + blocks)
        device.write(integers(3 * block), Buffers.whole(piece))
        after = aligned_bytes(12 * block)
        device.read(integers(0), Buffers.whole(after))
        expected = before.copy()
        expected[3 * block : (3 + blocks) * block] = piece
        assert np.array_equal(after, expected)

    def test_the_last_block(self, device: Device) -> None:
        source = filled(device.block_bytes, 9)
        offset = integers(device.capacity_bytes - device.block_bytes)
        device.write(offset, Buffers.whole(source))
        target = aligned_bytes(device.block_bytes)
        device.read(offset, Buffers.whole(target))
        assert np.array_equal(target, source)

    @pytest.mark.parametrize("wrong", ["offset", "length", "address"])
    @pytest.mark.parametrize("operation", ["read", "write"])
    def test_unaligned_request(self, device: Device, operation: str, wrong: str) -> None:
        block = device.block_bytes
        memory = filled(8 * block, 4)
        before = memory.copy()
        offsets = integers(0, block + (1 if wrong == "offset" else 0))
        starts = integers(0, block + (8 if wrong == "address" else 0))
        lengths = integers(block, block - (16 if wrong == "length" else 0))
        buffers = Buffers(memory, starts, lengths)
        with pytest.raises(AlignmentError) as caught:
            getattr(device, operation)(offsets, buffers)
        error = caught.value
        address = int(memory.ctypes.data + starts[1])
        numbers = (error.offset, error.length, error.address, error.required)
        assert numbers == (int(offsets[1]), int(lengths[1]), address, block)
        for number in (str(error.offset), str(error.length), f"{address:#x}", str(block)):
            assert number in str(error)
        assert np.array_equal(memory, before), "a request was issued before the check"

    @pytest.mark.parametrize("blocks_past", [0, 1, 1000])
    def test_out_of_range(self, device: Device, blocks_past: int) -> None:
        offset = device.capacity_bytes + blocks_past * device.block_bytes
        with pytest.raises(ConfigError, match=str(device.capacity_bytes)):
            device.read(integers(offset), Buffers.whole(aligned_bytes(device.block_bytes)))
        with pytest.raises(ConfigError):
            device.write(
                integers(-device.block_bytes), Buffers.whole(aligned_bytes(device.block_bytes))
            )

    def test_impossible_buffers(self, device: Device) -> None:
        block = device.block_bytes
        memory = aligned_bytes(4 * block)
        with pytest.raises(ConfigError, match="offsets"):
            device.read(integers(0, block), Buffers.whole(memory))
        with pytest.raises(ConfigError, match="outside its memory"):
            device.read(integers(0), Buffers(memory, integers(3 * block), integers(2 * block)))
        with pytest.raises(ConfigError, match="negative"):
            device.read(integers(0), Buffers(memory, integers(2 * block), integers(-block)))
        memory.flags.writeable = False
        with pytest.raises(ConfigError, match="read-only"):
            device.read(integers(0), Buffers.whole(memory))

    def test_empty_batch(self, device: Device) -> None:
        none = Buffers(aligned_bytes(device.block_bytes), integers(), integers())
        device.write(integers(), none)
        device.read(integers(), none)
        device.discard(integers(), integers())

    def test_request_of_no_bytes(self, device: Device) -> None:
        block = device.block_bytes
        source = filled(block, 3)
        device.write(integers(0), Buffers.whole(source))
        target = aligned_bytes(block)
        device.read(integers(block, 0), Buffers(target, integers(0, 0), integers(0, block)))
        assert np.array_equal(target, source)

    def test_registered_arena(self, device: Device) -> None:
        pool = BufferPool(256 * 1024)
        device.register(pool.memory)
        outside = filled(16 * device.block_bytes, 21)
        with pool.lease(16 * device.block_bytes) as memory:
            memory[:] = filled(memory.size, 20)
            kept = memory.copy()
            device.write(integers(0), Buffers.whole(memory))
            device.write(integers(64 * device.block_bytes), Buffers.whole(outside))
            memory[:] = 0
            device.read(integers(0), Buffers.whole(memory))
            assert np.array_equal(memory, kept)
            device.read(integers(64 * device.block_bytes), Buffers.whole(memory))
            assert np.array_equal(memory, outside)
        again = BufferPool(64 * 1024)
        device.register(again.memory)
        device.read(integers(0), Buffers.whole(again.memory[: kept.size]))
        assert np.array_equal(again.memory[: kept.size], kept)

    def test_flush(self, device: Device) -> None:
        device.write(integers(0), Buffers.whole(filled(device.block_bytes, 1)))
        device.flush()

    def test_discard(self, device: Device) -> None:
        block = 4096
        source = filled(12 * block, 8)
        device.write(integers(0), Buffers.whole(source))
        supported = device.discard(integers(0, 8 * block), integers(4 * block, block))
        target = aligned_bytes(12 * block)
        device.read(integers(0), Buffers.whole(target))
        assert np.array_equal(target[4 * block : 8 * block], source[4 * block : 8 * block])
        assert np.array_equal(target[9 * block :], source[9 * block :])
        if supported:
            assert not target[: 4 * block].any()
            assert not target[8 * block : 9 * block].any()
        with pytest.raises(AlignmentError):
            device.discard(integers(1), integers(block))
        with pytest.raises(ConfigError):
            device.discard(integers(device.capacity_bytes), integers(block))

    def test_nothing_in_the_page_cache(self, device: Device, path: str) -> None:
        """A059."""
        assert device.direct_io, device.direct_io_reason
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        device.write(integers(0), Buffers.whole(filled(1 << 20, 2)))
        device.read(integers(0), Buffers.whole(aligned_bytes(1 << 20)))
        device.flush()
        assert cached_bytes(path) == 0
        with open(path, "rb") as file:
            file.read(1 << 20)
        assert cached_bytes(path) >= 1 << 20, "the measure sees what a buffered read leaves"

    def test_close_twice_and_use_after_close(self, device: Device) -> None:
        device.close()
        device.close()
        one = Buffers.whole(aligned_bytes(device.block_bytes))
        for use in (
            lambda: device.read(integers(0), one),
            lambda: device.write(integers(0), one),
            lambda: device.discard(integers(0), integers(device.block_bytes)),
            device.flush,
        ):
            with pytest.raises(ClosedError):
                use()

    def test_a_forked_child_is_refused(self, device: Device) -> None:
        """A077."""
        source = filled(device.block_bytes, 1)
        device.write(integers(0), Buffers.whole(source))
        one = Buffers.whole(aligned_bytes(device.block_bytes))
        assert in_child(lambda: device.read(integers(0), one)) == 0
        assert in_child(lambda: device.write(integers(0), one)) == 0
        assert in_child(device.flush) == 0
        assert in_child(device.close) == 2, "closing is allowed"
        device.read(integers(0), one)
        assert np.array_equal(one.memory, source), "the parent goes on"

    def test_eight_threads(self, device: Device) -> None:
        wrong: list[str] = []
        share = device.capacity_bytes // 8

        def work(number: int) -> None:
            for turn in range(4):
                offsets, source = mixed_batch(20, device.block_bytes, 1000 * number + turn)
                offsets = offsets + number * share
                device.write(offsets, source)
                target = empty_like(source)
                device.read(offsets, target)
                if not np.array_equal(target.memory, source.memory):
                    wrong.append(f"thread {number}, turn {turn}")

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_close_waits_for_batches(self, device: Device) -> None:
        """Either a batch is whole or it raises ClosedError; never a bad fd, never other bytes."""
        results: list[str] = []
        source = filled(64 * device.block_bytes, 77)
        device.write(integers(0), Buffers.whole(source))
        starts = np.arange(64, dtype=np.int64) * device.block_bytes
        lengths = np.full(64, device.block_bytes, np.int64)

        def work() -> None:
            try:
                while True:
                    target = Buffers(aligned_bytes(source.size), starts, lengths)
                    device.read(starts, target)
                    if not np.array_equal(target.memory, source):
                        results.append("other bytes")
            except ClosedError:
                results.append("closed")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        device.close()
        for thread in threads:
            thread.join(10)
        assert results == ["closed"] * 4


class FileContract(DeviceContract):
    """What can only be provoked with a file under the device."""

    @pytest.mark.parametrize("tail", [0, 100])
    def test_failures_are_listed_and_the_others_completed(
        self, device: Device, path: str, tail: int
    ) -> None:
        block = device.block_bytes
        source = filled(64 * block, 13)
        device.write(integers(0), Buffers.whole(source))
        end = 40 * block
        os.truncate(path, end + tail)
        order = np.random.default_rng(3).permutation(64).astype(np.int64)
        offsets = order * block
        target = Buffers(aligned_bytes(64 * block), offsets, np.full(64, block, np.int64))
        with pytest.raises(OSError, match="24 of 64 reads") as caught:
            device.read(offsets, target)
        failures: list[tuple[int, int]] = caught.value.failures  # type: ignore[attr-defined]
        assert [i for i, _ in failures] == np.flatnonzero(order >= 40).tolist()
        assert {number for _, number in failures} == {errno.EIO}
        assert caught.value.errno == errno.EIO
        assert np.array_equal(target.memory[:end], source[:end])

    def test_a_read_across_the_end_fails(self, device: Device, path: str) -> None:
        """A057."""
        block = device.block_bytes
        device.write(integers(0), Buffers.whole(filled(8 * block, 1)))
        os.truncate(path, 3 * block)
        with pytest.raises(OSError, match="1 of 1 reads"):
            device.read(integers(0), Buffers.whole(aligned_bytes(8 * block)))
