"""What goes wrong under an event loop is a miss or a typed error, and soon."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import CapacityError, DeviceError
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.tiering import stepper
from kvtier.tiering.aio import AsyncStore
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from tests.aio_cases import (
    ENGINES,
    a_store_of,
    check_at_rest,
    first_extent,
    is_at_rest,
    on_a_loop,
    opened,
    simulated_drives,
    stored,
    until,
)
from tests.store_cases import (
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_failed_load_ends_without_other_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A045: one client; one Segment cannot be read, and then the whole drive."""
    lists = a_store_of(tmp_path, 3)

    async def work(store: Store, drives: Any) -> None:
        async with AsyncStore.of(store) as aio:
            sequence = await asyncio.wait_for(aio.resume(lists[0]), 2)
            assert sequence.length() == 0, "a miss"
            await aio.release(sequence)
            assert store.stats().failed_reads == 1
            drives.devices[0].set_faults(Faults(bad_ranges=(BadRange(0, 1 << 40),)))
            for tokens in lists[1:]:
                sequence = await asyncio.wait_for(aio.resume(tokens), 2)
                assert sequence.length() == 0
                await aio.release(sequence)
            check_rest(aio)

    def check_rest(aio: AsyncStore) -> None:
        assert is_at_rest(aio)

    first = first_extent(tmp_path)
    bad = Faults(bad_ranges=(BadRange(first, 1),))
    with simulated_drives(monkeypatch, bad) as drives, opened(tmp_path) as store:
        on_a_loop(lambda: work(store, drives))


def test_a_drive_that_fails_as_a_whole_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = a_store_of(tmp_path, 2)

    async def work() -> None:
        with opened(tmp_path) as store:
            async with AsyncStore.of(store) as aio:

                def refuse(offsets: Any, buffers: Any, priority: Any) -> None:
                    raise DeviceError("the drive is gone", 5)

                monkeypatch.setattr(store._extents.device, "start_read", refuse)
                with pytest.raises(DeviceError, match="gone"):
                    await asyncio.wait_for(aio.resume(lists[0]), 2)
                monkeypatch.undo()
                check_at_rest(aio, tmp_path)

    on_a_loop(work)


@pytest.mark.parametrize("engine", ENGINES)
def test_damaged_bytes_are_a_miss(tmp_path: Path, engine: Any) -> None:
    lists = a_store_of(tmp_path, 8)
    first = first_extent(tmp_path)
    region = next(tmp_path.glob("region*"))
    with region.open("r+b") as file:
        file.seek(first + 4096)
        file.write(b"damaged" * 100)

    async def work() -> None:
        with opened(tmp_path, engine=engine) as store:
            async with AsyncStore.of(store) as aio:
                sequences = await asyncio.gather(*[aio.resume(each) for each in lists])
                lengths = [each.length() for each in sequences]
                assert lengths[0] == 0
                assert lengths[1:] == [len(each) for each in lists[1:]]
                for sequence in sequences:
                    await aio.release(sequence)
                assert store.stats().damaged_extents == 1
                await until(lambda: is_at_rest(aio), 2.0)

    on_a_loop(work)


def test_no_buffer_for_long_is_a_capacity_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A023."""
    lists = a_store_of(tmp_path, 5)
    monkeypatch.setattr(stepper, "BUFFER_WAIT_S", 0.1)

    async def work() -> None:
        with opened(tmp_path) as store:
            async with AsyncStore.of(store) as aio:
                buffers = aio._reading.buffers
                held = buffers.take(buffers.memory_bytes)
                assert held is not None
                restores = [aio.resume(each) for each in lists]
                results = await asyncio.gather(*restores, return_exceptions=True)
                assert [type(each) for each in results] == [CapacityError] * 5
                waiting = [asyncio.ensure_future(aio.resume(each)) for each in lists]
                await asyncio.sleep(0.02)
                assert len(aio._stepper._starved) == 5
                waiting[2].cancel()
                held.give_back()
                results = await asyncio.gather(*waiting, return_exceptions=True)
                assert isinstance(results.pop(2), asyncio.CancelledError)
                for sequence in results:
                    assert isinstance(sequence, Sequence)
                    await aio.release(sequence)
                check_at_rest(aio, tmp_path)

    on_a_loop(work)


def test_the_loop_goes_on_while_another_thread_has_the_store(tmp_path: Path) -> None:
    tokens = some_tokens(700, 1)
    stored(tmp_path, [tokens])
    release = threading.Event()

    def hold(store: Store, held: threading.Event) -> None:
        with store._lock:
            held.set()
            release.wait(20)

    async def work() -> None:
        with opened(tmp_path) as store:
            async with AsyncStore.of(store) as aio:
                held = threading.Event()
                thread = threading.Thread(target=hold, args=(store, held))
                thread.start()
                assert held.wait(10)
                restore = asyncio.ensure_future(aio.resume(tokens))
                ticks = 0
                for _ in range(20):
                    await asyncio.sleep(0.002)
                    ticks += 1
                assert ticks == 20
                assert not restore.done()
                release.set()
                sequence = await restore
                assert sequence.length() == 700
                thread.join()
                await aio.release(sequence)
                check_at_rest(aio, tmp_path)

    on_a_loop(work)
