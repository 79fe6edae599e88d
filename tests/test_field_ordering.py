"""Field reports about races: reading what is being written, slow reads, closing in the middle."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.errors import ClosedError
from kvtier.io.device import Buffers, Int64Array
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from kvtier.tiering.writer import hot_bytes_min, unit_bytes_max
from tests.field_cases import HANG_S, in_threads
from tests.late_writes import at_once
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_attend,
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
SMALL = Config("32MiB", hot=hot_bytes_min(PLAIN) + unit_bytes_max(PLAIN))


def check_exactly(store: Store, kv: KV, sequence: Sequence, tokens: list[int]) -> None:
    """`check_bytes` beside other threads: it goes below the public methods and their lock."""
    with store._lock:
        check_bytes(store, kv, sequence, tokens)


def slow_down(store: Store, patched: pytest.MonkeyPatch, delay_s: float) -> list[str]:
    """Every batch takes this much longer; returns the list of what is in flight or was."""
    device, log = store._files.region.device, list[str]()
    for name in ("read", "write"):
        genuine = getattr(device, name)

        def slowly(
            offsets: Int64Array, buffers: Buffers, genuine: object = genuine, name: str = name
        ) -> None:
            log.append(f"{name} begins")
            time.sleep(delay_s)
            assert callable(genuine)
            genuine(offsets, buffers)
            log.append(f"{name} ends")

        patched.setattr(device, name, slowly)
        patched.setattr(device, f"start_{name}", at_once(device, name))
    return log


def test_what_is_being_written_is_a_miss_or_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A034: seven threads ask from the beginning on while one saves, on a slow drive."""
    tokens = some_tokens(3000, 1)
    found: list[int] = []
    done = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            try:
                sequence = store.sequence()
                store.name_tokens(sequence, tokens)
                for length in range(200, len(tokens) + 1, 200):
                    extend(store, OF_M, sequence, tokens[:length])
                    time.sleep(0.02)  # The lock is not fair: let the others have it.
                store.save(sequence, "n", tokens)
            finally:
                done.set()
            return
        last_turn = False
        while not last_turn:
            last_turn = done.is_set()
            sequence = store.resume(tokens)
            found.append(sequence.length())
            if sequence.length():
                check_attend(store, OF_M, sequence, tokens[: sequence.length()], layer=number % 2)
            store.release(sequence)
            time.sleep(0.002)

    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)) as store:
        slow_down(store, monkeypatch, 0.01)
        in_threads(work, 8)
        monkeypatch.undo()
        check_bytes(store, OF_M, store.resume(tokens), tokens)
    assert found.count(len(tokens)) >= 7
    # Segments become visible whole, one by one, and never a part of one.
    assert {each % 512 for each in found if each != len(tokens)} == {0}
    assert len(set(found)) > 2, "nobody asked while it was being written"


class Marked(KV):
    """Every element of a token list is its first token: whose it is shows in every element."""

    def rows(self, tokens: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        shape = self.geometry.layers[layer]
        return (
            torch.full((shape.kv_heads, len(tokens), shape.key_width), float(tokens[0])),
            torch.full((shape.kv_heads, len(tokens), shape.value_width), float(tokens[0])),
        )


def marked_traffic(path: Path, sequences: int, threads: int, seconds: float) -> int:
    """Random append, release, resume of many sequences; the number of checks that were made."""
    geometry = Geometry.uniform(2, 2, 8)
    kv, checks = Marked(geometry), [0] * threads
    total = sequences * 700 * geometry.token_bytes
    hot = max(hot_bytes_min(geometry) + unit_bytes_max(geometry), total // 10)
    until = time.monotonic() + seconds
    lists = [[number] * 20 for number in range(sequences)]
    with open_store(path, geometry, Config("128MiB", hot=hot)) as store:

        def work(number: int) -> None:
            random = np.random.default_rng(number)
            mine = [each for each in range(sequences) if each % threads == number]
            while time.monotonic() < until:
                owner = mine[int(random.integers(len(mine)))]
                sequence = store.resume(lists[owner])
                extend(store, kv, sequence, lists[owner])
                if len(lists[owner]) < 700:
                    lists[owner] += [owner] * int(random.integers(1, 90))
                    extend(store, kv, sequence, lists[owner])
                for layer in range(2):
                    query = torch.randn(4, 1, 8)
                    out = store.attend(sequence, layer, query)
                    # Attention over equal values is that value, whatever the weights are.
                    assert torch.allclose(out, torch.full_like(out, float(owner)), rtol=1e-5)
                check_exactly(store, kv, sequence, lists[owner])
                store.save(sequence, f"s{owner}", lists[owner])
                store.release(sequence)
                checks[number] += 1

        in_threads(work, threads, seconds + HANG_S)
        assert store.stats().hot_bytes_max <= hot
        check_settled(store, path)
    return sum(checks)


def test_no_element_of_another_sequence_is_ever_seen(tmp_path: Path) -> None:
    """A028, A035: each sequence is filled with its own id; HOT holds a tenth of them."""
    assert marked_traffic(tmp_path, 20, 5, 4.0) > 10


@pytest.mark.slow
def test_no_element_of_another_sequence_is_seen_for_a_minute(tmp_path: Path) -> None:
    """A035, as long as the report: 50 sequences, 16 threads."""
    assert marked_traffic(tmp_path, 50, 16, 60.0) > 300


def test_a_slow_read_is_not_overtaken_by_reuse_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A028: no lease ends by time: three threads read slowly, the fourth evicts all it can."""
    lists = [some_tokens(600, seed) for seed in range(3)]
    with open_store(tmp_path, PLAIN, SMALL) as store:
        for number, tokens in enumerate(lists):
            put(store, OF_M, f"n{number}", tokens)
        log = slow_down(store, monkeypatch, 0.005)

        def work(number: int) -> None:
            for turn in range(6):
                if number == 3:
                    sequence = store.sequence()
                    extend(store, OF_M, sequence, some_tokens(700, turn), pieces=200)
                else:
                    sequence = store.resume(lists[number])
                    check_everywhere(store, OF_M, sequence, lists[number])
                    check_exactly(store, OF_M, sequence, lists[number])
                store.release(sequence)
                time.sleep(0.005)

        in_threads(work, 4)
        assert store.stats().pages_evicted > 0
        assert log.count("read begins") == log.count("read ends") > 10


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_closing_waits_for_the_loads_that_are_under_way(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A031: eight slow loads and a close at once: each load is exact or refused, none hangs, and
    nothing is in flight after the close."""
    lists = [some_tokens(600, seed) for seed in range(8)]
    config = Config("32MiB", hot=MIB, engine="io_uring" if engine == "io_uring" else "threads")
    with open_store(tmp_path, PLAIN, config) as store:
        for number, tokens in enumerate(lists):
            put(store, OF_M, f"n{number}", tokens)
    store = open_store(tmp_path, PLAIN, Config(hot=MIB, engine=config.engine))
    log = slow_down(store, monkeypatch, 0.1)
    outcomes: list[str] = []

    def work(number: int) -> None:
        try:
            assert store.resume(lists[number]).length() == 600
            outcomes.append("exact")
        except ClosedError:
            outcomes.append("refused")

    def both(number: int) -> None:
        if number < 8:
            work(number)
            return
        while not log:
            time.sleep(0.001)
        store.close()
        assert log.count("read begins") == log.count("read ends")
        log.append("closed")

    in_threads(both, 9)
    assert len(outcomes) == 8
    assert "exact" in outcomes
    assert log[-1] == "closed", "a read began after the close"
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        for tokens in lists:
            check_bytes(store, OF_M, store.resume(tokens), tokens)
    assert verify(tmp_path).ok


def test_room_of_a_broken_write_is_not_reused_before_the_write_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A037: the device ends every request of a batch before the batch fails, and only then is the
    room free; the next save gets it and reads back exactly."""
    first, second = some_tokens(600, 1), some_tokens(600, 2)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)) as store:
        device, genuine = store._files.region.device, store._files.region.device.write
        offsets_seen: list[list[int]] = []

        def late(offsets: Int64Array, buffers: Buffers) -> None:
            offsets_seen.append(offsets.tolist())
            used = store._files.allocator.used_bytes
            genuine(offsets, buffers)
            assert store._files.allocator.used_bytes == used
            raise OSError(5, "the write is late, and then it fails")

        sequence, before = store.sequence(), store.stats().device_bytes
        extend(store, OF_M, sequence, first[:500])
        monkeypatch.setattr(device, "write", late)
        monkeypatch.setattr(device, "start_write", at_once(device))
        with pytest.raises(OSError, match="late"):
            store.save(sequence, "first", first[:500])
        monkeypatch.undo()
        assert store.stats().device_bytes == before
        put(store, OF_M, "second", second)
        assert store.stats().device_bytes > before
        check_bytes(store, OF_M, store.resume(second), second)
        assert store.lookup(first) == 0
        check_bytes(store, OF_M, sequence, first[:500])
        # As a batch, and then one by one.
        assert [len(each) for each in offsets_seen] == [2, 1, 1]
    assert verify(tmp_path).ok
