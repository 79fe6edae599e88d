"""A store used by many threads, and by processes that must not use it."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ClosedError, ConfigError, LockedError
from kvtier.io.probe import Engine
from kvtier.tiering.config import Config
from kvtier.tiering.store import Store
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    Shuffled,
    a_query,
    check_attend,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)
from tests.store_worker import in_a_child

THREADS = 8
DEADLOCK_S = 60.0


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_eight_threads_each_get_their_own(tmp_path: Path, engine: Engine) -> None:
    kv = KV(PLAIN)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            tokens: list[int] = []
            sequence = store.sequence()
            for turn, size in enumerate((44, 700, 7, 33)):
                tokens += some_tokens(size, 10 * number + turn)
                extend(store, kv, sequence, tokens, pieces=300)
                check_attend(store, kv, sequence, tokens, layer=turn % 2, count=3)
                twin = store.fork(sequence)
                store.crop(twin, len(tokens) // 2)
                check_attend(store, kv, twin, tokens[: len(tokens) // 2], layer=0)
                store.release_later([twin])
            store.save(sequence, f"n{number}", tokens)
            store.release(sequence)
            sequence = store.resume(tokens)
            check_everywhere(store, kv, sequence, tokens)
            store.release(sequence)
        except BaseException as error:
            failures.append(error)
            raise

    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB, engine=engine), Shuffled(1)) as store:
        workers = [
            threading.Thread(target=work, args=(each,), daemon=True) for each in range(THREADS)
        ]
        for each in workers:
            each.start()
        for each in workers:
            each.join(DEADLOCK_S)
            assert not each.is_alive(), "a thread hangs"
        assert failures == []
        assert len(store.names()) == THREADS
        check_settled(store, tmp_path)


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    """A077."""
    kv, tokens = KV(PLAIN), some_tokens(600, 1)
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens)
        rows = kv.rows(tokens[:1], 0)
        calls: list[Callable[[], object]] = [
            store.sequence,
            store.stats,
            store.names,
            lambda: store.resume(tokens),
            lambda: store.lookup(tokens),
            lambda: store.fork(sequence),
            lambda: store.crop(sequence, 0),
            lambda: store.append(sequence, 0, *rows),
            lambda: store.attend(sequence, 0, a_query(kv, 0, 1, 1)),
            lambda: store.save(sequence, "n", tokens),
            lambda: store.release(sequence),
        ]

        def use() -> None:
            for call in calls:
                with pytest.raises(ClosedError, match=f"by process {os.getppid()}"):
                    call()
            store.close()

        assert in_a_child(use) == 0
        store.save(sequence, "n", tokens)
        check_bytes(store, kv, sequence, tokens)
        with pytest.raises(LockedError):
            open_store(tmp_path)


def test_a_child_that_was_forked_while_a_thread_works_does_not_hang(tmp_path: Path) -> None:
    """The lock that the thread held is never given back in the child."""
    with open_store(tmp_path) as store:
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with store._lock:
                held.set()
                done.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)

        def use() -> None:
            with pytest.raises(ClosedError):
                store.stats()
            store.close()

        try:
            assert in_a_child(use) == 0
        finally:
            done.set()
            thread.join()


def test_a_child_may_open_the_store_when_the_parent_closed_it(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(600, 1)
    with open_store(tmp_path) as store:
        put(store, kv, "n", tokens)

    def use() -> None:
        with open_store(tmp_path) as again:
            check_bytes(again, kv, again.resume(tokens), tokens)

    assert in_a_child(use) == 0


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    """A075."""

    def use() -> None:
        with pytest.raises(LockedError, match=rf"process {os.getppid()} on host"):
            open_store(tmp_path)

    with open_store(tmp_path):
        assert in_a_child(use) == 0
        with pytest.raises(LockedError, match=f"process {os.getpid()} on host"):
            open_store(tmp_path)
    assert in_a_child(lambda: open_store(tmp_path).close()) == 0


def test_use_after_close_is_refused(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(600, 1)
    store = open_store(tmp_path)
    sequence = store.sequence()
    extend(store, kv, sequence, tokens)
    store.close()
    store.close()
    store.release(sequence)
    calls: list[Callable[[], object]] = [
        store.sequence,
        store.stats,
        store.names,
        lambda: store.resume(tokens),
        lambda: store.lookup(tokens),
        lambda: store.fork(sequence),
        lambda: store.crop(sequence, 0),
        lambda: store.append(sequence, 0, *kv.rows(tokens[:1], 0)),
        lambda: store.attend(sequence, 0, a_query(kv, 0, 1, 1)),
        lambda: store.save(sequence, "n", tokens),
        lambda: store.name_tokens(sequence, tokens),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="this store was closed"):
            call()


def test_a_released_sequence_is_refused(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(20, 1)
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens)
        store.release(sequence)
        with pytest.raises(ClosedError, match="this Sequence was closed"):
            extend(store, kv, sequence, tokens)
        with pytest.raises(ClosedError, match="this Sequence was closed"):
            store.attend(sequence, 0, a_query(kv, 0, 1, 1))


def test_a_sequence_of_another_store_is_refused(tmp_path: Path) -> None:
    """Its slots mean other Segments there: it would be given other bytes."""
    kv, tokens = KV(PLAIN), some_tokens(600, 1)

    def calls(store: Store) -> list[Callable[[], object]]:
        return [
            lambda: store.attend(sequence, 0, a_query(kv, 0, 1, 1)),
            lambda: store.append(sequence, 0, *kv.rows(tokens[:1], 0)),
            lambda: store.save(sequence, "n", tokens),
            lambda: store.fork(sequence),
            lambda: store.release(sequence),
        ]

    with open_store(tmp_path / "a") as first, open_store(tmp_path / "b") as second:
        put(second, kv, "n", some_tokens(600, 2))
        sequence = first.sequence()
        extend(first, kv, sequence, tokens)
        for call in calls(second):
            with pytest.raises(ConfigError, match="another store"):
                call()
        check_everywhere(first, kv, sequence, tokens)


def test_one_scrub_at_a_time_and_close_ends_it(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(1500, 1)
    store = open_store(tmp_path)
    put(store, kv, "n", tokens)
    assert store.scrub("1TiB").wait(DEADLOCK_S)
    slow = store.scrub("1KiB")
    with pytest.raises(ConfigError, match="is running"):
        store.scrub()
    check_bytes(store, kv, store.resume(tokens), tokens)
    store.close()
    assert slow.wait(0), "its thread is still there"
    with pytest.raises(ClosedError):
        store.scrub()
