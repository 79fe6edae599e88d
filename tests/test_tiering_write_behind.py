"""Payloads are written behind the caller: what is on its way is readable, is waited for before it
is named or its space given away, and what the device does not take is lost alone.

Started writes land when they are waited for and no sooner (`late_writes.py`).
"""

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import DeviceError
from kvtier.io.device import Buffers, Int64Array
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.io.simulated_medium import Medium
from kvtier.tiering import extent_writer, opening, verifier
from kvtier.tiering.config import Config
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from kvtier.tiering.writer import hot_bytes_min
from tests.late_writes import LateWrites, half
from tests.store_cases import (
    GEOMETRIES,
    KV,
    MIB,
    PLAIN,
    Shuffled,
    check_bytes,
    check_everywhere,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

OF_M = KV(PLAIN)
SEGMENT = 512
LEAST = hot_bytes_min(PLAIN)
DEVICE_BYTES = 8 * MIB


class Device(LateWrites):
    """Stays open when a store closes it, for the next one; writes of a store that ended land."""

    def close(self) -> None:
        self.land_all()
        self.clear_log()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Device]:
    """What every store of the test lies on."""
    (tmp_path / "device").touch()
    device = Device.open(DEVICE_BYTES, path=str(tmp_path / "device"))
    for module in (opening, verifier):
        monkeypatch.setattr(module, "open_device", lambda path, **wishes: device)
    yield device
    super(Device, device).close()


def opened(path: Path, hot: int = 4 * MIB) -> Store:
    is_new = not (path / "store.yaml").exists()
    return open_store(path, PLAIN, Config(DEVICE_BYTES if is_new else None, hot=hot))


def appended(store: Store, tokens: list[int]) -> Sequence:
    sequence = store.sequence()
    extend(store, OF_M, sequence, tokens)
    return sequence


def settled(path: Path, store: Store) -> None:
    """Nothing is on its way or taken when nobody uses the store."""
    assert not store._ledger.started._by_offset
    assert store._extent_writer.buffers.used_bytes == 0
    assert store._extents.buffers.used_bytes == 0
    store._files.allocator.check()
    assert verify(path).findings == []


@pytest.mark.parametrize("hot", [LEAST, 4 * MIB])
def test_what_is_on_its_way_can_be_read(tmp_path: Path, device: Device, hot: int) -> None:
    """From HOT where it is there, else the read waits for the write first."""
    tokens = some_tokens(3 * SEGMENT, 1)
    with opened(tmp_path / "s", hot) as store:
        sequence = appended(store, tokens)
        assert len(device.waiting) == len(PLAIN.layers)
        check_everywhere(store, OF_M, sequence, tokens)
        check_bytes(store, OF_M, sequence, tokens)
        assert (len(device.waiting) > 0) == (hot == 4 * MIB)
        store.release(sequence)
        settled(tmp_path / "s", store)


def test_a_save_waits_for_all_that_it_names(tmp_path: Path, device: Device) -> None:
    tokens = some_tokens(2 * SEGMENT + 100, 1)
    with opened(tmp_path / "s") as store:
        sequence = appended(store, tokens)
        other = appended(store, some_tokens(SEGMENT, 2))
        before = len(device.waiting)
        store.save(sequence, "n", tokens)
        # What others have on its way is nobody's business.
        assert (before, len(device.waiting)) == (2 * len(PLAIN.layers), len(PLAIN.layers))
        store.release(other)
        assert not device.waiting
    with opened(tmp_path / "s") as store:
        sequence = store.resume(tokens)
        check_bytes(store, OF_M, sequence, tokens)
        store.release(sequence)
        settled(tmp_path / "s", store)


def test_nothing_is_named_that_is_on_its_way(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the wait of a commit forgotten, the Ledger would refuse."""
    tokens = some_tokens(SEGMENT, 1)
    with opened(tmp_path / "s") as store:
        sequence = appended(store, tokens)
        with monkeypatch.context() as patched:
            patched.setattr(store._committer, "_finish", lambda sequence: None)
            with pytest.raises(AssertionError, match="a flush covers only"):
                store.save(sequence, "n", tokens)
        assert store.names() == []
        store.save(sequence, "n", tokens)


@pytest.mark.parametrize("end", ["release", "crop", "a pass that is broken off"])
def test_space_is_given_away_when_nothing_is_written_there_any_more(
    tmp_path: Path, device: Device, end: str
) -> None:
    first, second = some_tokens(SEGMENT, 1), some_tokens(SEGMENT, 2)
    with opened(tmp_path / "s") as store:
        used = store.stats().device_bytes
        sequence = store.sequence()
        if end == "a pass that is broken off":
            keys, values = OF_M.rows(first, 0)
            store.append(sequence, 0, keys, values)
        else:
            extend(store, OF_M, sequence, first)
        (segment,) = sequence.tail or [view.segment for view in sequence.views]
        places = {each.offset for each in segment.extents if each is not None}
        assert device.waiting
        if end == "release":
            store.release(sequence)
        else:
            store.crop(sequence, 0)
        assert (store.stats().device_bytes, device.waiting) == (used, [])
        other = appended(store, second)
        assert {each.offset for each in other.views[0].segment.extents if each} >= places
        # Whatever was started before has landed before: these bytes are the last.
        store.save(other, "n", second)
        store._residency.hot.drop(0, other.views[0].segment.slot)
        check_bytes(store, OF_M, other, second)


def test_a_write_that_fails_once_is_written_from_memory(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(2 * SEGMENT, 1)
    with opened(tmp_path / "s", LEAST) as store:
        sequence = appended(store, tokens)
        for batch in device.waiting:
            device._held().pop(batch)
            batch.errors[:] = errno.EIO
            batch.settle()
        check_everywhere(store, OF_M, sequence, tokens)
        assert store.save(sequence, "n", tokens) == len(tokens)
        assert store.stats().failed_writes == 0
        settled(tmp_path / "s", store)
    with opened(tmp_path / "s") as store:
        check_bytes(store, OF_M, store.resume(tokens), tokens)


def broken(device: Device, layer: int, sequence: Sequence) -> BadRange:
    """From now on the device takes no write into a layer of the Sequence's first Segment."""
    extent = sequence.views[0].segment.extents[layer]
    assert extent is not None
    bad = BadRange(extent.offset, extent.length, reads=False)
    device.set_faults(replace(device.faults, bad_ranges=(bad,)))
    return bad


def test_what_the_device_does_not_take_is_lost_alone(
    tmp_path: Path, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever needs it hears so; no commit names it; its tokens can be stored anew."""
    tokens, others = some_tokens(2 * SEGMENT, 1), some_tokens(2 * SEGMENT, 2)
    with opened(tmp_path / "s", LEAST) as store:
        empty = store.stats().device_bytes
        sequence, other = appended(store, tokens), appended(store, others)
        bad = broken(device, 1, sequence)
        check_everywhere(store, OF_M, other, others)
        with pytest.raises(DeviceError, match=r"layer 1 of tokens 0 to 512 is not on .*anew"):
            check_everywhere(store, OF_M, sequence, tokens)
        with pytest.raises(DeviceError, match="layer 1 of tokens 0 to 512 is not on"):
            store.save(sequence, "n", tokens)
        assert "not written, and so not saved: layer 1 at " in caplog.text
        assert store.stats().failed_writes == 1
        assert store.names() == []
        assert store.lookup(tokens) == 0
        # Nobody is given the bad place again.
        assert store.save(other, "other", others) == len(others)
        anew = appended(store, tokens)
        assert store.save(anew, "n", tokens) == len(tokens)
        for each in (sequence, other, anew):
            store.release(each)
        store.clear()
        assert store.stats().device_bytes == empty
        assert store._files.allocator.used_bytes == empty + bad.length
        settled(tmp_path / "s", store)


def test_a_completed_segment_that_is_lost_is_said_by_append(tmp_path: Path, device: Device) -> None:
    """Its tokens are named, so that `append` promised to keep it."""
    tokens = some_tokens(2 * SEGMENT, 1)
    with opened(tmp_path / "s") as store:
        sequence = store.sequence()
        store.name_tokens(sequence, tokens)
        extend(store, OF_M, sequence, tokens[:SEGMENT])
        assert store.lookup(tokens) == SEGMENT
        device.set_faults(Faults(bad_ranges=(BadRange(0, DEVICE_BYTES, reads=False),)))
        with pytest.raises(DeviceError):
            extend(store, OF_M, sequence, tokens)
        device.set_faults(Faults())
        assert store.lookup(tokens) == SEGMENT


@pytest.mark.parametrize("placement", [None, Shuffled(3)])
def test_a_tail_that_could_not_be_written_stays_in_memory(
    tmp_path: Path, device: Device, placement: Shuffled | None
) -> None:
    """And is saved when the device works again, also if every write has its Pages in another
    order."""
    tokens = some_tokens(300, 1)
    config = Config(DEVICE_BYTES, hot=4 * MIB)
    with open_store(tmp_path / "s", PLAIN, config, placement) as store:
        sequence = appended(store, tokens)
        fine = device.faults
        device.set_faults(replace(fine, bad_ranges=(BadRange(0, DEVICE_BYTES, reads=False),)))
        for _ in range(extent_writer.REFUSED_MAX):
            with pytest.raises(DeviceError, match="not on"):
                store.save(sequence, "n", tokens)
            assert store.names() == []
            # However often it is tried, no more space is lost than a bound.
            lost_bytes = store._files.allocator.used_bytes - store.stats().device_bytes
            assert 0 < lost_bytes <= extent_writer.REFUSED_MAX * 11 * 4096
            check_bytes(store, OF_M, sequence, tokens)
            check_everywhere(store, OF_M, sequence, tokens)
        device.set_faults(fine)
        assert store.save(sequence, "n", tokens) == len(tokens)
        check_bytes(store, OF_M, sequence, tokens)
        store.release(sequence)
        settled(tmp_path / "s", store)
    with open_store(tmp_path / "s", PLAIN, None, placement) as store:
        check_bytes(store, OF_M, store.resume(tokens), tokens)


def test_no_space_below_the_region_evicts_and_writes_once_more(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thinly provisioned device may say so when the caller is long gone."""
    old, new = some_tokens(SEGMENT, 1), some_tokens(SEGMENT, 2)
    with opened(tmp_path / "s", LEAST) as store:
        put(store, OF_M, "old", old)
        sequence = appended(store, new)
        write = device.write
        refused: list[int] = []

        def refuse(offsets: Int64Array, buffers: Buffers) -> None:
            if not refused:
                refused.append(len(offsets))
                raise DeviceError("full", errno.ENOSPC, [(0, errno.ENOSPC)])
            write(offsets, buffers)

        batch = device.waiting[0]
        device._held().pop(batch)
        batch.errors[0] = errno.ENOSPC
        batch.settle()
        monkeypatch.setattr(device, "write", refuse)
        check_everywhere(store, OF_M, sequence, new)
        assert (refused, store.stats().segments_evicted) == ([1], 1)
        assert store.save(sequence, "new", new) == len(new)
        store.release(sequence)
        settled(tmp_path / "s", store)


def test_bytes_on_their_way_are_bounded(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they would be more, the oldest are waited for, and no others."""
    monkeypatch.setattr(extent_writer, "WRITE_BATCH_BYTES", 1 << 16)
    tokens = some_tokens(40 * SEGMENT, 1)
    with opened(tmp_path / "s") as store:
        limit = store._extent_writer.buffers.memory_bytes
        sequence = appended(store, tokens[: 20 * SEGMENT])
        extend(store, OF_M, sequence, tokens)
        waiting = sum(int(each.lengths.sum()) for each in device.waiting)
        assert limit - 2 * (1 << 16) <= waiting <= limit < 40 * 2 * (1 << 15)
        check_bytes(store, OF_M, sequence, tokens)
        store.release(sequence)
        settled(tmp_path / "s", store)


def test_a_flush_that_fails_while_bytes_are_on_their_way_is_believed(
    tmp_path: Path, device: Device
) -> None:
    """They may have been in the drive's cache by then: they are written anew."""
    tokens, others = some_tokens(SEGMENT, 1), some_tokens(100, 2)
    device.set_faults(Faults(volatile_cache=True))
    with opened(tmp_path / "s") as store:
        sequence = appended(store, tokens)
        # One layer landed before the flush fails, one after it.
        device.land(device.waiting[0])
        other = appended(store, others)
        failing = (device.counts.flushes + 1,)
        device.set_faults(replace(device.faults, failing_flushes=failing))
        with pytest.raises(DeviceError):
            store.save(other, "other", others)
        store.save(sequence, "n", tokens)
        store.save(other, "other", others)
        lost_power = device.image("none")
    device._medium = Medium.holding(lost_power)
    with opened(tmp_path / "s") as store:
        for each in (tokens, others):
            check_bytes(store, OF_M, store.resume(each), each)


def test_random_runs_on_a_device_that_is_late_and_fails(tmp_path: Path, device: Device) -> None:
    """Whatever lands when and whatever is refused: exact bytes, or a typed error."""
    geometry = GEOMETRIES["uniform"]
    kv = KV(geometry)
    lost = saved = 0
    for seed in range(4):
        random = np.random.default_rng([5, seed])
        device.held = half(seed)
        path = tmp_path / f"s{seed}"
        config = Config(DEVICE_BYTES, hot=hot_bytes_min(geometry) * int(random.integers(1, 4)))
        device._medium = Medium.blank(DEVICE_BYTES)
        with open_store(path, geometry, config, Shuffled(seed)) as store:
            streams: list[tuple[Sequence, list[int]]] = []
            for step in range(25):
                fails = random.random() < 0.5
                at = int(random.integers(MIB, 4 * MIB))
                bad = (BadRange(at, 600_000, reads=False),) if fails else ()
                device.set_faults(Faults(shuffled=True, bad_ranges=bad))
                try:
                    if random.random() < 0.4 or not streams:
                        tokens = some_tokens(int(random.integers(100, 1300)), 100 * seed + step)
                        sequence = store.sequence()
                        streams.append((sequence, tokens))
                        extend(store, kv, sequence, tokens, pieces=int(random.integers(64, 1300)))
                    sequence, tokens = streams[int(random.integers(len(streams)))]
                    if not sequence.between_passes or sequence.length() < len(tokens):
                        store.release(sequence)
                        streams.remove((sequence, tokens))
                        continue
                    if random.random() < 0.5:
                        store.save(sequence, f"n{step}", tokens)
                        saved += 1
                    check_everywhere(store, kv, sequence, tokens)
                    if random.random() < 0.4:
                        store.release(sequence)
                        streams.remove((sequence, tokens))
                except DeviceError:
                    lost += 1
            device.set_faults(Faults())
            for sequence, _ in streams:
                store.release(sequence)
            names = [(row.name, store.saved(row.name)[0].tolist()) for row in store.names()]
            settled(path, store)
        with open_store(path, geometry, None, Shuffled(seed)) as store:
            for _, tokens in names:
                sequence = store.resume(tokens)
                check_bytes(store, kv, sequence, tokens)
                store.release(sequence)
    assert lost > 5
    assert saved > 5


def test_giving_up_waits_and_leaves_the_others_of_a_batch(tmp_path: Path, device: Device) -> None:
    """Two Segments of one batch: one is given up, the other is kept and still looked at."""
    tokens = some_tokens(2 * SEGMENT, 1)
    with opened(tmp_path / "s", LEAST) as store:
        sequence = appended(store, tokens)
        extents = [each for each in sequence.views[0].segment.extents if each is not None]
        store.crop(sequence, SEGMENT)
        assert all(map(store._ledger.started.covers, extents))
        assert not device.waiting
        check_everywhere(store, OF_M, sequence, tokens[:SEGMENT])
        assert store.save(sequence, "n", tokens[:SEGMENT]) == SEGMENT
        store.release(sequence)
        settled(tmp_path / "s", store)
