"""The asynchronous face of a store: the same answers, whoever uses the store beside it."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ClosedError, ConfigError, LockedError
from kvtier.tiering.aio import AsyncStore
from kvtier.tiering.config import Config
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.writer import hot_bytes_min
from tests.aio_cases import (
    ENGINES,
    OF_M,
    SLOW,
    a_store_of,
    check_at_rest,
    on_a_loop,
    opened,
    simulated_drives,
    stored,
    until,
)
from tests.store_cases import (
    PLAIN,
    TOLERANCE,
    a_query,
    check_bytes,
    check_everywhere,
    expected,
    open_store,
    put,
    shared,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("engine", ENGINES)
def test_it_does_what_the_store_does(tmp_path: Path, engine: Any) -> None:
    tokens = some_tokens(700, 1)

    async def work() -> None:
        async with await AsyncStore.open(
            lambda: open_store(tmp_path, config=Config("32MiB", hot="1MiB", engine=engine))
        ) as aio:
            sequence = await aio.sequence()
            await aio.name_tokens(sequence, tokens)
            for layer in range(2):
                await aio.append(sequence, layer, *OF_M.rows(tokens, layer))
            twin = await aio.fork(sequence)
            assert await aio.save(sequence, "a", tokens) == 700
            for each in (sequence, twin):
                await aio.release(each)
            assert await aio.lookup([*tokens[:650], 1, 2]) == shared(tokens, [*tokens[:650], 1, 2])
            again = await aio.resume(np.array(tokens, np.uint32))
            assert again.length() == 700
            query = a_query(OF_M, 1, 3, 5)
            out = await aio.attend(again, 1, query)
            difference = np.abs(out.double().numpy() - expected(OF_M, tokens, 1, query)).max()
            assert difference < TOLERANCE[PLAIN.dtype]
            check_bytes(aio.store, OF_M, again, tokens)
            await aio.release(again)
            check_at_rest(aio, tmp_path)
        assert aio.store._closed

    on_a_loop(work)


@pytest.mark.parametrize("engine", ENGINES)
def test_many_restores_at_once_are_exact(tmp_path: Path, engine: Any) -> None:
    lists = a_store_of(tmp_path, 30)

    async def work() -> None:
        with opened(tmp_path, engine=engine) as store:
            async with AsyncStore.of(store) as aio:
                sequences = await asyncio.gather(*[aio.resume(each) for each in lists])
                for sequence, tokens in zip(sequences, lists, strict=True):
                    check_bytes(store, OF_M, sequence, tokens)
                    check_everywhere(store, OF_M, sequence, tokens)
                    await aio.release(sequence)
                check_at_rest(aio, tmp_path)
            assert store.lookup(lists[0]) == len(lists[0]), "the store stays open"

    on_a_loop(work)


def test_the_least_hot_suffices_beside_blocking_callers(tmp_path: Path) -> None:
    """Restores on their way leave room for a whole unit and for what a pass was promised."""
    lists = a_store_of(tmp_path, 20)

    def block(store: Store, failures: list[BaseException], stop: threading.Event) -> None:
        turn = 0
        try:
            while not stop.is_set():
                turn += 1
                tokens = lists[turn % 20]
                sequence = store.resume(tokens)
                check_everywhere(store, OF_M, sequence, tokens)
                store.release(sequence)
                put(store, OF_M, "own", some_tokens(150 + turn % 500, 5000 + turn), pieces=100)
        except BaseException as error:
            failures.append(error)

    async def work() -> None:
        failures: list[BaseException] = []
        stop = threading.Event()
        for hot in (hot_bytes_min(PLAIN), "512KiB"):
            with opened(tmp_path, hot) as store:
                async with AsyncStore.of(store) as aio:
                    stop.clear()
                    thread = threading.Thread(target=block, args=(store, failures, stop))
                    thread.start()
                    for _ in range(3):
                        sequences = await asyncio.gather(*[aio.resume(each) for each in lists])
                        for sequence, tokens in zip(sequences, lists, strict=True):
                            assert sequence.length() == len(tokens)
                            await aio.release(sequence)
                    stop.set()
                    await asyncio.to_thread(thread.join)
                    assert failures == []
                    check_at_rest(aio, tmp_path)

    on_a_loop(work)


def test_a_save_is_seen_whole_or_not_at_all(tmp_path: Path) -> None:
    """A034: what is being stored is a miss, a shorter match, or exact; never other bytes."""
    tokens = some_tokens(3000, 7)

    async def work() -> None:
        with open_store(tmp_path) as store:
            async with AsyncStore.of(store) as aio:
                sequence = await aio.sequence()
                await aio.name_tokens(sequence, tokens)
                seen = set()

                async def look() -> None:
                    found = await aio.resume(tokens)
                    seen.add(found.length())
                    if found.length():
                        with store._lock:
                            check_bytes(store, OF_M, found, tokens[: found.length()])
                    await aio.release(found)

                async def write() -> None:
                    for first in range(0, 3000, 500):
                        for layer in range(2):
                            keys, values = OF_M.rows(tokens, layer)
                            place = slice(first, first + 500)
                            await aio.append(sequence, layer, keys[:, place], values[:, place])
                    await aio.save(sequence, "a", tokens)

                writing = asyncio.ensure_future(write())
                while not writing.done():
                    await asyncio.gather(*[look() for _ in range(8)])
                await writing
                await look()
                assert {0, 3000} <= seen
                await aio.release(sequence)
                check_at_rest(aio, tmp_path)

    on_a_loop(work)


# ---- the end -----------------------------------------------------------------------------------


def test_close_ends_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A031: eight slow loads; nothing is in flight when close returns, and it opens again."""
    lists = a_store_of(tmp_path, 8)

    async def work(store: Store) -> None:
        aio = AsyncStore.of(store)
        restores = [asyncio.ensure_future(aio.resume(each)) for each in lists]
        await until(lambda: aio._stepper._batches > 3)
        await aio.close()
        await aio.close()
        assert all(each.cancelled() for each in restores)
        check_at_rest(aio, tmp_path)
        buffers = aio._reading.buffers
        buffers.memory[:] = 0xA5
        await asyncio.sleep(0.2)
        assert (buffers.memory == 0xA5).all(), "a write came after close"
        for call in (lambda: aio.resume(lists[0]), aio.sequence, lambda: aio.lookup([1])):
            with pytest.raises(ClosedError):
                await call()
        again = AsyncStore.of(store)
        sequence = await again.resume(lists[0])
        assert sequence.length() == len(lists[0])
        await again.release(sequence)
        await again.close()

    with simulated_drives(monkeypatch, SLOW), opened(tmp_path, "4MiB") as store:
        on_a_loop(lambda: work(store))


@pytest.mark.parametrize("engine", [*ENGINES, "simulated"])
def test_a_store_that_somebody_closes_ends_its_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    """A031: the blocking close completes what is in flight; restores get a typed error."""
    lists = a_store_of(tmp_path, 20)

    async def work(store: Store) -> None:
        async with AsyncStore.of(store) as aio:
            restores = [asyncio.ensure_future(aio.resume(each)) for each in lists]
            await until(lambda: aio._stepper._batches > 0 or restores[0].done())
            store.close()
            results = await asyncio.gather(*restores, return_exceptions=True)
            ended = [each for each in results if isinstance(each, ClosedError)]
            assert len(ended) + sum(isinstance(each, Sequence) for each in results) == 20, results
            assert ended
            assert aio._stepper._batches == 0
            assert store._mover.flying_bytes == 0
            assert aio._reading.buffers.used_bytes == 0

    if engine == "simulated":
        with simulated_drives(monkeypatch, SLOW):
            store = opened(tmp_path)
            on_a_loop(lambda: work(store))
    else:
        store = opened(tmp_path, engine=engine)
        on_a_loop(lambda: work(store))
    with opened(tmp_path) as store:
        sequence = store.resume(lists[0])
        check_bytes(store, OF_M, sequence, lists[0])


def test_a_store_being_opened_for_nobody_is_closed(tmp_path: Path) -> None:
    stored(tmp_path, [some_tokens(10, 1)])
    go_on = threading.Event()

    def slowly() -> Store:
        store = opened(tmp_path)
        go_on.wait(10)
        return store

    async def work() -> None:
        task = asyncio.ensure_future(AsyncStore.open(slowly))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        for _ in range(200):
            try:
                opened(tmp_path).close()
                return
            except LockedError:
                await asyncio.sleep(0.02)
        pytest.fail("the store stayed open")

    on_a_loop(work)


def test_several_faces_of_one_store(tmp_path: Path) -> None:
    """Each hears of its own completions, whoever polled."""
    lists = a_store_of(tmp_path, 10)

    async def work() -> None:
        with opened(tmp_path) as store:
            faces = [AsyncStore.of(store) for _ in range(3)]
            for _ in range(3):
                restores = [each.resume(tokens) for tokens in lists for each in faces]
                for sequence in await asyncio.gather(*restores):
                    await faces[0].release(sequence)
            for each in faces:
                await each.close()

    on_a_loop(work)


def test_another_loop_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, [some_tokens(10, 1)])
    with opened(tmp_path) as store:
        kept: list[AsyncStore] = []

        async def make() -> None:
            kept.append(AsyncStore.of(store))

        async def use() -> None:
            with pytest.raises(ConfigError, match="loop"):
                await kept[0].lookup([1])

        async def both() -> None:
            await make()
            await asyncio.to_thread(lambda: asyncio.run(use()))
            await kept[0].close()

        with pytest.raises(ConfigError, match="running event loop"):
            AsyncStore.of(store)
        on_a_loop(both)


def test_a_close_that_is_cancelled_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = a_store_of(tmp_path, 3)

    async def work(store: Store) -> None:
        aio = AsyncStore.of(store)
        restores = [asyncio.ensure_future(aio.resume(each)) for each in lists]
        await until(lambda: aio._stepper._batches > 0)
        closing = asyncio.ensure_future(aio.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await aio.close()
        assert aio._stepper._batches == 0
        assert all(each.done() for each in restores)
        check_at_rest(aio, tmp_path)

    with simulated_drives(monkeypatch, SLOW), opened(tmp_path, "4MiB") as store:
        on_a_loop(lambda: work(store))
