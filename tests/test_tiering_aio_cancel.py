"""Restores that are cancelled leave nothing behind, and the loop is never kept for long."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.io.simulated_faults import Faults
from kvtier.tiering.aio import AsyncStore
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.restorer import HEAVY_TOKENS
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.stepper import Stepper
from kvtier.tiering.store import Store
from tests.aio_cases import (
    ENGINES,
    OF_M,
    SLOW,
    a_store_of,
    callbacks_measured,
    check_at_rest,
    is_at_rest,
    needs_io_uring,
    on_a_loop,
    opened,
    simulated_drives,
    stored,
    until,
)
from tests.store_cases import (
    KV,
    check_bytes,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

HOT = "6MiB"
"""Less than the prompts take."""
LONGEST_S = 0.005


async def a_thousand_restores(aio: AsyncStore, lists: list[list[int]], seed: int) -> int:
    """Start them, cancel half of them at random moments; returns how many were cancelled."""
    chance = random.Random(seed)
    done = 0

    async def restore(tokens: list[int]) -> None:
        nonlocal done
        sequence = await aio.resume(tokens)
        try:
            assert sequence.length() == len(tokens)
            await asyncio.sleep(chance.random() * 0.002)
        finally:
            await aio.release(sequence)
        done += 1

    async def cancel_later(task: "asyncio.Task[None]") -> None:
        # Some before their first step, some in the middle, some when it may be too late.
        for _ in range(chance.choice((0, 1, 2, 5, 20, 100))):
            await asyncio.sleep(0)
        await asyncio.sleep(chance.choice((0, 0, 0.001, 0.02, 0.2)) * chance.random())
        task.cancel()

    tasks, cancels = [], []
    arrays = [np.array(each, np.uint32) for each in lists]
    for number in range(1000):
        tokens: Any = arrays[chance.randrange(len(lists))]
        tasks.append(asyncio.ensure_future(restore(tokens)))
        if number % 2:
            cancels.append(asyncio.ensure_future(cancel_later(tasks[-1])))
        if chance.random() < 0.1:
            await asyncio.sleep(0)
    await asyncio.gather(*cancels)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = [each for each in results if isinstance(each, asyncio.CancelledError)]
    assert len(cancelled) + results.count(None) == 1000, results
    assert results.count(None) == done >= 500
    return len(cancelled)


def cases() -> Iterator[Any]:
    """Every engine with one seed; the others belong to the long tests."""
    for place, engine in enumerate(("io_uring", "threads", "simulated")):
        for seed in (1, 2, 3):
            marks = [pytest.mark.slow] if seed != place + 1 else []
            if engine == "io_uring":
                marks.append(needs_io_uring)
            yield pytest.param(engine, seed, marks=marks)


@pytest.mark.parametrize(("engine", "seed"), [*cases()])
def test_a_thousand_restores_half_of_them_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, seed: int
) -> None:
    """A027, A032: afterwards no lease, reference, Frame or buffer is missing; and all the while no
    callback kept the loop for 5 ms."""
    lists = a_store_of(tmp_path, 50)

    async def work(store: Store) -> None:
        async with AsyncStore.of(store) as aio:
            ticks = [time.perf_counter()]

            async def watch() -> None:
                while True:
                    await asyncio.sleep(0.001)
                    ticks.append(time.perf_counter())

            # Memory that is touched for the first time costs the hypervisor milliseconds, once.
            for memory in (store._residency.hot.tier.pool(0).arena, aio._reading.buffers.memory):
                memory[:] = 0
            watching = asyncio.ensure_future(watch())
            with callbacks_measured(monkeypatch) as taken:
                cancelled = await a_thousand_restores(aio, lists, seed)
            watching.cancel()
            assert cancelled > 150
            # A few are the machine's own: processor time that a hypervisor took counts as ours.
            assert sum(each >= LONGEST_S for each in taken) <= 3, sorted(taken)[-20:]
            # For information: the wall shows what else runs on this machine.
            print(
                f"{engine}: {len(taken)} callbacks, the longest {1000 * max(taken):.2f} ms of "
                f"processor time; longest gap between ticks {1000 * max(np.diff(ticks)):.1f} ms"
            )
            await until(lambda: is_at_rest(aio), 2.0)
            check_at_rest(aio, tmp_path)
            assert store.stats().bytes_read > 5_000_000

    if engine == "simulated":
        faults = Faults(delay_s=0.0003, shuffled=True, short_rate=0.2)
        with simulated_drives(monkeypatch, faults), opened(tmp_path, HOT) as store:
            on_a_loop(lambda: work(store))
    else:
        with opened(tmp_path, HOT, engine=engine) as store:
            on_a_loop(lambda: work(store))


def test_what_is_cancelled_is_given_back_without_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A032, A037: leases and references at once; the Frames and buffers that the drive still writes
    into when that is over, and nobody gets them before."""
    lists = a_store_of(tmp_path, 6)

    async def work(store: Store) -> None:
        async with AsyncStore.of(store) as aio:
            buffers = aio._reading.buffers
            tasks = [asyncio.ensure_future(aio.resume(each)) for each in lists]
            await until(lambda: aio._stepper._batches > 3)
            flying, lent = store._mover.flying_bytes, buffers.used_bytes
            assert flying > 0
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)
            assert not store._residency.leases.any()
            assert all(each.references == 0 for each in store._registry.committed.values())
            assert 0 < store._mover.flying_bytes <= flying, "the drive still writes into these"
            assert 0 < buffers.used_bytes <= lent, "and into these"
            await until(lambda: is_at_rest(aio), 2.0)
            check_at_rest(aio, tmp_path)
            sequences = await asyncio.gather(*[aio.resume(each) for each in lists])
            for sequence, tokens in zip(sequences, lists, strict=True):
                check_bytes(store, OF_M, sequence, tokens)
                await aio.release(sequence)

    with simulated_drives(monkeypatch, SLOW), opened(tmp_path, "4MiB") as store:
        on_a_loop(lambda: work(store))


@pytest.mark.parametrize("restored", [True, False])
def test_a_result_that_nobody_takes_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: bool
) -> None:
    """A027: cancelled in the moment between the call's end and its waiter's turn."""
    tokens = some_tokens(700, 1)
    stored(tmp_path, [tokens])
    real = Stepper._set_result
    caught: list[Sequence] = []
    calls: list[asyncio.Task[Sequence]] = []

    def set_then_cancel(stepper: Stepper, work: Any, result: object) -> None:
        real(stepper, work, result)
        if isinstance(result, Sequence):
            caught.append(result)
            calls[0].cancel()

    async def work() -> None:
        with opened(tmp_path) as store:
            async with AsyncStore.of(store) as aio:
                call = aio.resume(tokens) if restored else aio.sequence()
                calls.append(asyncio.ensure_future(call))
                with pytest.raises(asyncio.CancelledError):
                    await calls[0]
                await until(lambda: caught[0].closed, 2.0)
                check_at_rest(aio, tmp_path)

    monkeypatch.setattr(Stepper, "_set_result", set_then_cancel)
    on_a_loop(work)


def test_a_call_on_the_worker_that_is_cancelled_ends_in_order(tmp_path: Path) -> None:
    tokens = some_tokens(600, 1)

    async def work() -> None:
        with open_store(tmp_path) as store:
            async with AsyncStore.of(store) as aio:
                sequence = await aio.sequence()
                for layer in range(2):
                    await aio.append(sequence, layer, *OF_M.rows(tokens, layer))
                with store._lock:
                    forking = asyncio.ensure_future(aio.fork(sequence))
                    saving = asyncio.ensure_future(aio.save(sequence, "a", tokens))
                    await asyncio.sleep(0.02)
                    forking.cancel()
                    saving.cancel()
                    await asyncio.gather(forking, saving, return_exceptions=True)
                assert forking.cancelled()
                assert saving.cancelled()
                await aio.release(sequence)
                assert await aio.lookup(tokens) in (0, 600)
                await until(lambda: is_at_rest(aio), 2.0)
                check_at_rest(aio, tmp_path)

    on_a_loop(work)


@pytest.mark.parametrize("engine", ENGINES)
def test_large_units_and_long_prompts_do_not_keep_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    """Units of 2 MiB are checked and copied off the loop, and given up there as well."""
    large = Geometry.uniform(2, 8, 64, dtype="float32")
    kv, tokens = KV(large), some_tokens(1500, 3)
    long = some_tokens(HEAVY_TOKENS + 1000, 4)
    config = Config("96MiB", hot="16MiB", engine=engine)

    async def work(store: Store) -> None:
        async with AsyncStore.of(store) as aio:
            arrays = [np.array(each, np.uint32) for each in (tokens, [*tokens, *long])]
            with callbacks_measured(monkeypatch) as taken:
                for turn in range(12):
                    tasks = [asyncio.ensure_future(aio.resume(each)) for each in arrays]
                    for _ in range(turn):
                        await asyncio.sleep(0.002)
                    tasks[turn % 2].cancel()
                    results = await asyncio.gather(*tasks, return_exceptions=True)
                    for sequence in results:
                        if isinstance(sequence, Sequence):
                            await aio.release(sequence)
                    assert isinstance(results[1 - turn % 2], Sequence)
            assert sum(each >= LONGEST_S for each in taken) <= 3, sorted(taken)[-20:]
            await until(lambda: is_at_rest(aio), 2.0)
            again = await aio.resume(arrays[1])
            check_bytes(store, kv, again, tokens)
            await aio.release(again)
            check_at_rest(aio, tmp_path)

    with open_store(tmp_path, large, config) as store:
        put(store, kv, "a", tokens)
    with open_store(tmp_path, large, Config(None, "16MiB", engine=engine)) as store:
        on_a_loop(lambda: work(store))
