"""The simulated device: every fault strikes as described, images, log, and that a seed repeats."""

import errno
import time

import numpy as np
import pytest

from kvtier.errors import DeviceError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, ByteArray
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.io.simulated_log import SimulatedCounts
from tests.device_contract import empty_like, filled, integers, mixed_batch

BLOCK = 4096
BLOCKS = 64
CACHE = Faults(volatile_cache=True)
MANY = Faults(
    volatile_cache=True,
    short_rate=0.4,
    lost_rate=0.15,
    misdirected_rate=0.15,
    rotted_rate=0.15,
    rotted_bits=5,
)


def opened(faults: Faults, seed: int = 0, block_bytes: int = BLOCK) -> SimulatedDevice:
    return SimulatedDevice.open(BLOCKS * BLOCK, block_bytes=block_bytes, seed=seed, faults=faults)


def fill(device: SimulatedDevice, blocks: list[int], value: int, *, at_once: bool = True) -> None:
    """Write these blocks full of a value, as one batch or as one batch each."""
    for part in [blocks] if at_once else [[block] for block in blocks]:
        memory = aligned_bytes(len(part) * BLOCK)
        memory[:] = value
        lengths = np.full(len(part), BLOCK, np.int64)
        starts = np.arange(len(part), dtype=np.int64) * BLOCK
        device.write(np.array(part, np.int64) * BLOCK, Buffers(memory, starts, lengths))


def put(device: SimulatedDevice, offset: int, memory: ByteArray) -> None:
    device.write(integers(offset), Buffers.whole(memory))


def got(device: SimulatedDevice, offset: int, nbytes: int) -> ByteArray:
    memory = aligned_bytes(nbytes)
    device.read(integers(offset), Buffers.whole(memory))
    return memory


def block_values(image: bytes) -> list[int]:
    """The value that fills each block; an assertion if a block is mixed."""
    blocks = np.frombuffer(image, np.uint8).reshape(-1, BLOCK)
    assert (blocks == blocks[:, :1]).all()
    return [int(value) for value in blocks[:, 0]]


def bits_of(left: bytes | ByteArray, right: bytes | ByteArray) -> list[int]:
    """Positions of the bits in which two pieces of memory differ."""
    both = [np.frombuffer(each, np.uint8) for each in (left, right)]
    found: list[int] = np.flatnonzero(np.unpackbits(both[0] ^ both[1], bitorder="little")).tolist()
    return found


# ---- power cuts ---------------------------------------------------------------------------------


def test_without_a_cache_every_write_is_durable() -> None:
    device = opened(Faults())
    put(device, 0, filled(8 * BLOCK, 1))
    device.discard(integers(BLOCK), integers(BLOCK))
    assert device.image("none") == device.live() != bytes(BLOCKS * BLOCK)


def test_a_flush_makes_durable_and_only_a_flush_does() -> None:
    device = opened(CACHE)
    fill(device, [1, 2], 7)
    assert block_values(device.image("none")) == [0] * BLOCKS
    assert device.image("all") == device.live()
    device.flush()
    assert device.image("none") == device.live()
    assert block_values(device.live())[:4] == [0, 7, 7, 0]


def test_an_image_has_what_is_durable_and_any_subset_of_the_rest() -> None:
    device = opened(CACHE)
    fill(device, list(range(BLOCKS)), 1)
    device.flush()
    fill(device, [3, 10, 40, 63], 2)
    seen = set()
    for seed in range(200):
        image = device.image("some", seed=seed)
        assert image == device.image("some", seed=seed)
        values = block_values(image)
        changed = tuple(i for i, value in enumerate(values) if value != 1)
        assert set(changed) <= {3, 10, 40, 63}
        assert {values[i] for i in changed} <= {2}
        seen.add(changed)
    assert len(seen) == 16, "every combination"


def test_one_writes_fate_does_not_follow_from_another() -> None:
    device = opened(CACHE)
    fill(device, list(range(BLOCKS)), 1)
    kept = np.array([block_values(device.image(seed=seed)) for seed in range(200)])
    assert ((kept.mean(axis=0) > 0.3) & (kept.mean(axis=0) < 0.7)).all()
    correlation = np.corrcoef(kept, rowvar=False) - np.eye(BLOCKS)
    assert np.abs(correlation).max() < 0.4


@pytest.mark.parametrize("torn_bytes", [512, 4096])
@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_writes_are_torn_at_exactly_the_sectors(block_bytes: int, torn_bytes: int) -> None:
    device = opened(CACHE, block_bytes=block_bytes)
    first, last = BLOCK + block_bytes, BLOCK * 9 - block_bytes
    memory = aligned_bytes(last - first)
    memory[:] = 5
    put(device, first, memory)
    boundaries: set[int] = set()
    whole = torn = 0
    for seed in range(120):
        image = np.frombuffer(device.image(seed=seed, torn_bytes=torn_bytes), np.uint8)
        edges = set((np.flatnonzero(np.diff(image)) + 1).tolist())
        assert not image[:first].any()
        assert not image[last:].any()
        whole += bool(image[first:last].all())
        torn += bool(edges - {first, last})
        boundaries |= edges
    inside = range(first - first % torn_bytes + torn_bytes, last, torn_bytes)
    assert boundaries - {first, last} == set(inside) - {first, last}
    assert whole > 10
    assert torn > 20


def test_of_two_writes_of_one_block_a_power_cut_leaves_either_or_none() -> None:
    device = opened(CACHE)
    fill(device, [5], 1)
    fill(device, [5], 2)
    values = [block_values(device.image(seed=seed))[5] for seed in range(100)]
    assert set(values) == {0, 1, 2}
    assert values.count(2) > values.count(1), "an older write never lands over a newer one"
    assert block_values(device.image("all"))[5] == 2


def test_discarded_bytes_are_zero_now_and_durably_after_a_flush() -> None:
    device = opened(CACHE)
    fill(device, [0, 1, 2], 9)
    device.flush()
    assert device.discard(integers(BLOCK), integers(BLOCK))
    assert block_values(device.live())[:3] == [9, 0, 9]
    assert block_values(device.image("none"))[:3] == [9, 9, 9]
    assert {block_values(device.image(seed=seed))[1] for seed in range(20)} == {0, 9}
    device.flush()
    assert block_values(device.image("none"))[:3] == [9, 0, 9]


def test_a_flush_that_fails_loses_what_was_unflushed_for_good() -> None:
    device = opened(Faults(volatile_cache=True, failing_flushes=(2,)))
    fill(device, [0], 1)
    device.flush()
    fill(device, [1], 2)
    with pytest.raises(DeviceError, match="durable") as caught:
        device.flush()
    assert caught.value.errno == errno.EIO
    assert block_values(device.live())[:3] == [1, 2, 0], "reads do not show the loss"
    fill(device, [2], 3)
    device.flush()
    assert block_values(device.image("none"))[:3] == [1, 0, 3]
    assert block_values(device.image("all"))[:3] == [1, 0, 3]
    fill(device, [1], 4)
    device.flush()
    assert block_values(device.image("none"))[:3] == [1, 4, 3], "a new write is durable again"
    assert device.counts.flushes == 4


# ---- faults of single requests ------------------------------------------------------------------


def test_requests_complete_in_any_order() -> None:
    """Seen in the log, and in which of four overlapping writes of one batch is on top."""
    memory = np.repeat(np.arange(1, 5, dtype=np.uint8), BLOCK)
    source = aligned_bytes(4 * BLOCK)
    source[:] = memory
    starts, lengths = np.arange(4) * BLOCK, np.full(4, BLOCK, np.int64)
    last, orders = set(), set()
    for seed in range(60):
        device = opened(Faults(shuffled=True), seed)
        device.write(integers(0, 0, 0, 0), Buffers(source, starts, lengths))
        order = tuple(each.data[0] for each in device.log)
        assert sorted(order) == [1, 2, 3, 4]
        assert block_values(device.live())[0] == order[-1]
        orders.add(order)
        last.add(order[-1])
    assert last == {1, 2, 3, 4}
    assert len(orders) > 12
    device = opened(Faults())
    device.write(integers(0, 0, 0, 0), Buffers(source, starts, lengths))
    assert [each.data[0] for each in device.log] == [1, 2, 3, 4]


def test_each_request_takes_its_time_and_lands_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened(Faults(volatile_cache=True, shuffled=True, delay_s=0.25), seed=3)
    slept: list[float] = []
    landed: list[int] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        # As a second thread would: a power cut in the middle of a batch.
        landed.append(sum(block_values(device.image("all"))))

    monkeypatch.setattr(time, "sleep", sleep)
    fill(device, [4, 5, 6, 7], 1)
    assert landed == [0, 1, 2, 3]
    got(device, 0, BLOCK)
    assert slept == [0.25] * 5


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_short_transfers_are_continued(seed: int, block_bytes: int) -> None:
    device = opened(Faults(short_rate=0.8), seed, block_bytes)
    offsets, source = mixed_batch(10, block_bytes, seed)
    device.write(offsets, source)
    written = device.counts.short_transfers
    assert written > 3
    target = empty_like(source)
    device.read(offsets, target)
    assert device.counts.short_transfers > written + 3
    assert np.array_equal(target.memory, source.memory)
    assert len(device.log) == 10
    device.set_faults(Faults(short_rate=1))
    read = device.counts.short_transfers
    assert got(device, 0, BLOCKS * BLOCK).tobytes() == device.live()
    assert device.counts.short_transfers > read + 1, "also what was continued may be short"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_bad_range_fails_what_overlaps_it(operation: str, number: int) -> None:
    device = opened(Faults())
    fill(device, list(range(16)), 1)
    bad = BadRange(5 * BLOCK + 100, BLOCK, number, operation == "read", operation == "write")
    device.set_faults(Faults(shuffled=True, bad_ranges=(BadRange(60 * BLOCK, BLOCK), bad)))
    memory = aligned_bytes(16 * BLOCK)
    memory[:] = 2
    offsets = np.random.default_rng(4).permutation(16).astype(np.int64) * BLOCK
    batch = Buffers(memory, np.arange(16) * BLOCK, np.full(16, BLOCK, np.int64))
    failing = np.flatnonzero((offsets == 5 * BLOCK) | (offsets == 6 * BLOCK)).tolist()
    with pytest.raises(DeviceError, match=f"2 of 16 {operation}s") as caught:
        getattr(device, operation)(offsets, batch)
    assert caught.value.failures == [(i, number) for i in failing]
    assert device.counts.failed_requests == 2
    after = memory.tobytes() if operation == "read" else device.live()[: 16 * BLOCK]
    changed = 1 if operation == "read" else 2
    kept = failing if operation == "read" else [5, 6]
    values = block_values(after)
    assert [i for i, value in enumerate(values) if value == 3 - changed] == kept
    assert values.count(changed) == 14
    # The other operation does not fail, nor does one right beside the range.
    getattr(device, "write" if operation == "read" else "read")(offsets, batch)
    put(device, 59 * BLOCK, aligned_bytes(BLOCK))
    got(device, 61 * BLOCK, BLOCK)
    with pytest.raises(DeviceError, match="1 of 1"):
        got(device, 59 * BLOCK, 4 * BLOCK)


@pytest.mark.parametrize("seed", range(5))
def test_a_lost_write_is_acknowledged_and_never_lands(seed: int) -> None:
    device = opened(Faults(volatile_cache=True, lost_rate=0.5), seed)
    fill(device, list(range(BLOCKS)), 1)
    device.flush()
    assert 15 < device.counts.lost_writes < 50
    assert block_values(device.image("all")).count(0) == device.counts.lost_writes
    assert len(device.log) == BLOCKS + 1


def test_a_misdirected_write_lands_whole_at_another_block() -> None:
    places = set()
    for seed in range(80):
        device = SimulatedDevice.open(8 * BLOCK, seed=seed, faults=Faults(misdirected_rate=1))
        fill(device, [3], 1)
        values = block_values(device.live())
        assert values.count(1) == 1
        places.add(values.index(1))
        assert device.counts.misdirected_writes == 1
        assert device.log[0].offset == 3 * BLOCK, "the log says what was asked for"
    assert places == {0, 1, 2, 4, 5, 6, 7}
    full = SimulatedDevice.open(BLOCK, faults=Faults(misdirected_rate=1))
    fill(full, [0], 1)
    assert full.counts.misdirected_writes == 0
    assert block_values(full.live()) == [1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rot_flips_as_many_bits_of_the_range_as_were_asked_for(seed: int) -> None:
    device = opened(CACHE, seed)
    put(device, 0, filled(8 * BLOCK, 1))
    device.flush()
    put(device, 2 * BLOCK, filled(BLOCK, 2))
    device.discard(integers(3 * BLOCK), integers(BLOCK))
    before = [device.live(), device.image("none"), device.image("all")]
    start, nbytes = 2 * BLOCK - 77, 3 * BLOCK
    flipped = device.rot(start, nbytes, 40)
    assert len(set(flipped.tolist())) == 40
    assert flipped.min() >= 8 * start
    assert flipped.max() < 8 * (start + nbytes)
    after = [device.live(), device.image("none"), device.image("all")]
    for left, right in zip(before, after, strict=True):
        assert bits_of(left, right) == sorted(flipped.tolist())
    device.flush()
    assert device.image("none") == after[0]
    assert sorted(device.rot(start, nbytes, 40).tolist()) != sorted(flipped.tolist())
    assert device.rot(0, 1, 8).tolist() != []
    assert device.live()[0] == after[0][0] ^ 255


@pytest.mark.parametrize("bits", [1, 3])
def test_a_rotted_write_lands_with_its_bits_flipped(bits: int) -> None:
    places = set()
    for seed in range(10):
        device = opened(Faults(volatile_cache=True, rotted_rate=1, rotted_bits=bits), seed)
        source = filled(2 * BLOCK, 1)
        put(device, BLOCK, source)
        device.flush()
        flipped = bits_of(device.image("none")[BLOCK : 3 * BLOCK], source)
        assert len(flipped) == bits
        places.add(tuple(flipped))
        assert device.log[0].data == source.tobytes()
    assert len(places) == 10


# ---- a seed repeats -----------------------------------------------------------------------------


def a_run(seed: int, faults: Faults, *, at_once: bool) -> tuple[list[bytes], SimulatedCounts]:
    device = opened(faults, seed)
    for value, blocks in enumerate(([0, 1, 2, 3, 9, 30], [2, 3, 4], list(range(20, 50))), 1):
        fill(device, blocks, value, at_once=at_once)
        # How often is read between the writes shall not matter to them.
        for _ in range(1 if at_once else 3):
            got(device, 0, BLOCK)
    images = [device.live(), *(device.image(seed=i, torn_bytes=512) for i in range(3))]
    device.flush()
    return [*images, device.image("none")], device.counts


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_repeats_whatever_the_number_of_batches(seed: int) -> None:
    once, counts = a_run(seed, MANY, at_once=True)
    again, counts_again = a_run(seed, MANY, at_once=True)
    assert (once, counts) == (again, counts_again)
    pieces, counts_pieces = a_run(seed, MANY, at_once=False)
    assert once == pieces
    assert counts.lost_writes == counts_pieces.lost_writes > 0
    assert counts.rotted_writes == counts_pieces.rotted_writes > 0
    assert counts.misdirected_writes == counts_pieces.misdirected_writes > 0
    assert a_run(seed + 100, MANY, at_once=True)[0] != once


@pytest.mark.parametrize(
    "faults",
    [
        Faults(shuffled=True),
        Faults(short_rate=0.5),
        Faults(lost_rate=0.3),
        Faults(misdirected_rate=0.3),
        Faults(rotted_rate=0.3),
    ],
)
def test_each_fault_follows_from_the_seed(faults: Faults) -> None:
    def run(seed: int) -> tuple[bytes, int, tuple[int, ...]]:
        device = opened(faults, seed)
        for first in (0, 20):
            fill(device, list(range(first, first + 20)), 1)
        offsets, source = mixed_batch(10, BLOCK, 1)
        device.write(offsets, source)
        order = tuple(each.offset for each in device.log)
        return device.live(), device.counts.short_transfers, order

    runs = [run(seed) for seed in range(5)]
    assert len(set(runs)) > 1
    assert [run(seed) for seed in range(5)] == runs


def test_one_fault_more_does_not_move_the_others() -> None:
    lost = Faults(volatile_cache=True, lost_rate=0.3)
    both = Faults(volatile_cache=True, lost_rate=0.3, shuffled=True, short_rate=0.5)
    assert a_run(1, lost, at_once=True)[0][-1] == a_run(1, both, at_once=True)[0][-1]
