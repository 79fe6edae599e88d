"""Field reports about failures that others took for success: of a store, of a load, of a worker."""

import errno
import os
import time
from pathlib import Path

import pytest

from kvtier.errors import DeviceError
from kvtier.io.device import Buffers, Int64Array
from kvtier.io.probe import Engine
from kvtier.tiering.config import Config
from kvtier.tiering.verifier import verify
from kvtier.tiering.writer import hot_bytes_min
from tests.field_cases import extents_of, fail_reads, in_threads
from tests.late_writes import at_once
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OF_M = KV(PLAIN)


@pytest.mark.parametrize("failing", [1, 24, 49])
def test_one_failed_store_of_fifty_is_reported_and_not_visible(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A039: the error is raised to the one who saved; the other 49 are exact, also afterwards."""
    lists = [[seed, *some_tokens(29, seed)] for seed in range(50)]
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)) as store:
        device = store._files.region.device

        def fail(offsets: Int64Array, buffers: Buffers) -> None:
            raise DeviceError(f"1 of {len(offsets)} writes failed", errno.EIO, [(0, errno.EIO)])

        for seed, tokens in enumerate(lists):
            if seed != failing:
                put(store, OF_M, f"n{seed}", tokens)
                continue
            sequence = store.sequence()
            extend(store, OF_M, sequence, tokens)
            with monkeypatch.context() as patched:
                patched.setattr(device, "write", fail)
                patched.setattr(device, "start_write", at_once(device))
                with pytest.raises(DeviceError, match="writes failed") as caught:
                    store.save(sequence, f"n{seed}", tokens)
            assert caught.value.errno == errno.EIO
            store.release(sequence)
            assert store.lookup(tokens) == 0
        check_settled(store, tmp_path)
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        assert len(store.names()) == 49
        for seed, tokens in enumerate(lists):
            sequence = store.resume(tokens)
            if seed == failing:
                assert sequence.length() == 0
            else:
                check_bytes(store, OF_M, sequence, tokens)


def test_a_chain_whose_third_part_cannot_be_written_ends_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A039: what was complete before the failure is found, up to the failure and no further."""
    tokens = some_tokens(4 * 512, 1)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)) as store:
        sequence = store.sequence()
        store.name_tokens(sequence, tokens)
        extend(store, OF_M, sequence, tokens[:1024], pieces=512)

        def fail(offsets: Int64Array, buffers: Buffers) -> None:
            raise DeviceError("1 of 1 writes failed", errno.EIO, [(0, errno.EIO)])

        with monkeypatch.context() as patched:
            patched.setattr(store._files.region.device, "write", fail)
            patched.setattr(
                store._files.region.device, "start_write", at_once(store._files.region.device)
            )
            with pytest.raises(DeviceError):
                extend(store, OF_M, sequence, tokens, pieces=512)
        store.release(sequence)
        check_bytes(store, OF_M, store.resume(tokens), tokens[:1024])
    assert verify(tmp_path).ok


@pytest.mark.parametrize("hot", [hot_bytes_min(PLAIN), MIB])
def test_a_failed_load_is_no_hit(tmp_path: Path, hot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A040, A045: counted is what can be used; the answer comes without other traffic."""
    tokens = some_tokens(1200, 1)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)) as store:
        put(store, OF_M, "n", tokens)
    lost = extents_of(tmp_path)[1][1]
    with open_store(tmp_path, PLAIN, Config(hot=hot)) as store:
        fail_reads(store, [lost], monkeypatch)
        began = time.monotonic()
        sequence = store.resume(tokens)
        assert time.monotonic() - began < 20
        assert sequence.length() == 512
        stats = store.stats()
        assert (stats.tokens_looked_up, stats.tokens_matched) == (1200, 512)
        assert (stats.failed_reads, stats.damaged_extents) == (1, 0)
        check_everywhere(store, OF_M, sequence, tokens[:512])


@pytest.mark.parametrize(
    "error", [DeviceError("the drive is gone", errno.ENXIO), MemoryError("none"), OSError("odd")]
)
def test_a_load_that_breaks_off_holds_nothing(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A027, A032, A040: an exception in the middle of a load of ten Segments ends every lease and
    reference at once, with no other call; it counts as no hit, and the next load is whole."""
    tokens = some_tokens(5120, 1)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)) as store:
        put(store, OF_M, "n", tokens)
    with open_store(tmp_path, PLAIN, Config(hot=4 * MIB)) as store:
        device, reads = store._files.region.device, 0
        genuine = device.read

        def fail(offsets: Int64Array, buffers: Buffers) -> None:
            nonlocal reads
            reads += 1
            genuine(offsets, buffers)
            raise error

        monkeypatch.setattr(device, "read", fail)
        monkeypatch.setattr(device, "start_read", at_once(device, "read"))
        with pytest.raises(type(error), match=str(error)):
            store.resume(tokens)
        assert reads == 1
        # Looked at from below: no call of the store comes between.
        assert not store._residency.leases.any()
        assert all(each.references == 0 for each in store._registry.committed.values())
        assert store._extents.buffers.used_bytes == 0
        assert (store.stats().tokens_matched, store.stats().hot_bytes) == (0, 0)
        monkeypatch.undo()
        sequence = store.resume(tokens)
        check_bytes(store, OF_M, sequence, tokens)
        store.release(sequence)
        check_settled(store, tmp_path)


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_truncated_region_stops_no_worker(tmp_path: Path, engine: Engine) -> None:
    """A041: half of the region is cut off and one byte flipped while the store is open; four
    threads get what is left, exactly, and later loads are still served."""
    lists = [some_tokens(300, seed) for seed in range(10)]
    config = Config("32MiB", hot=hot_bytes_min(PLAIN), engine=engine)
    with open_store(tmp_path, PLAIN, config) as store:
        for seed, tokens in enumerate(lists):
            put(store, OF_M, f"n{seed}", tokens)
    extents = extents_of(tmp_path)
    region = tmp_path / "region.kv"
    with open_store(tmp_path, PLAIN, Config(hot=config.hot, engine=engine)) as store:
        os.truncate(region, extents[5][0].offset)
        with region.open("r+b") as file:
            file.seek(extents[2][1].offset + 200)
            byte = file.read(1)[0]
            file.seek(extents[2][1].offset + 200)
            file.write(bytes([byte ^ 1]))
        bad = {2, 5, 6, 7, 8, 9}

        def work(number: int) -> None:
            for turn in range(10):
                seed = (turn + 3 * number) % 10
                with store._lock:
                    sequence = store.resume(lists[seed])
                    check_bytes(store, OF_M, sequence, [] if seed in bad else lists[seed])
                    store.release(sequence)

        for _ in range(2):
            in_threads(work, 4)
        stats = store.stats()
        assert stats.failed_reads >= 5
        assert stats.damaged_extents == 1
        # A read that failed is tried again by the next open, damage is remembered; the lookups of
        # this one are misses without another read.
        assert [store.lookup(tokens) for tokens in lists].count(0) == len(bad)
