"""A035: sixteen threads, each with Sequences whose every element carries its owner's number."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.io.probe import Engine
from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from tests.store_cases import Shuffled, check_settled, open_store

GEOMETRY = Geometry.uniform(2, 2, 8)
THREADS = 16
STREAMS = 3
"""Streams of each thread: 48 in all."""
TOKENS_MAX = 900
DEADLOCK_S = 60.0


class Worker(threading.Thread):
    """Appends to, saves, drops and restores its own streams, and looks at every element it gets."""

    def __init__(self, store: Store, number: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.number = number
        self.until = time.monotonic() + seconds
        self.random = np.random.default_rng([35, number])
        self.turns = self.elements = self.foreign = self.restored = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.failure = error
            raise

    def _work(self) -> None:
        streams: list[tuple[Sequence, list[int]]] = []
        while time.monotonic() < self.until:
            self.turns += 1
            if len(streams) < STREAMS:
                streams.append((self.store.sequence(), [self.number]))
                self.append(*streams[-1], first=True)
            place = int(self.random.integers(len(streams)))
            sequence, tokens = streams[place]
            step = self.random.random()
            if step < 0.4 and len(tokens) < TOKENS_MAX:
                tokens += self.random.integers(
                    0, 50, int(self.random.choice([1, 40, 300]))
                ).tolist()
                self.append(sequence, tokens)
            elif step < 0.6:
                self.store.save(sequence, f"{self.number}/{place}", tokens)
            elif step < 0.8:
                self.store.save(sequence, f"{self.number}/{place}", tokens)
                self.store.release(sequence)
                sequence = self.store.resume(tokens)
                self.restored += sequence.length()
                del tokens[sequence.length() :]
                streams[place] = (sequence, tokens)
                if not tokens:
                    self.store.release(sequence)
                    del streams[place]
                    continue
            elif step < 0.85:
                self.store.release(sequence)
                del streams[place]
                continue
            self.look(sequence)
        for sequence, _ in streams:
            self.store.release(sequence)

    def append(self, sequence: Sequence, tokens: list[int], *, first: bool = False) -> None:
        count = len(tokens) - (0 if first else sequence.length())
        rows = torch.full((2, count, 8), float(self.number))
        for layer in range(2):
            self.store.append(sequence, layer, rows, rows)

    def look(self, sequence: Sequence) -> None:
        """Attention over equal values is that value; then element by element."""
        layer = int(self.random.integers(2))
        query = torch.from_numpy(self.random.standard_normal((4, 1, 8), np.float32))
        out = self.store.attend(sequence, layer, query)
        self.foreign += int(((out - self.number).abs() > 1e-4).sum())
        with self.store._lock:
            parts = [(view.segment, view.limit) for view in sequence.views]
            parts += [(segment, segment.filled[layer]) for segment in sequence.tail]
            segment, limit = parts[int(self.random.integers(len(parts)))]
            assert self.store._mover.load([Unit(segment, layer)]) == 1
            for rows in self.store._mover.tensors(Unit(segment, layer)):
                held = rows[:, :limit]
                self.elements += held.numel()
                self.foreign += int((held != float(self.number)).sum())


def race(path: Path, seconds: float, engine: Engine) -> list[Worker]:
    """Run all threads on a store whose HOT holds a tenth of what they have."""
    config = Config("24MiB", hot=1 << 20, host=1 << 19, engine=engine)
    with open_store(path, GEOMETRY, config, Shuffled(35)) as store:
        workers = [Worker(store, number, seconds) for number in range(1, THREADS + 1)]
        for each in workers:
            each.start()
        for each in workers:
            each.join(seconds + DEADLOCK_S)
            assert not each.is_alive(), "a thread hangs"
        assert [each.failure for each in workers if each.failure is not None] == []
        assert [each.foreign for each in workers] == [0] * THREADS
        assert all(each.elements for each in workers)
        check_settled(store, path)
    return workers


@pytest.mark.usefixtures("one_thread")
def test_nobody_gets_anothers_kv(tmp_path: Path) -> None:
    race(tmp_path, 3.0, "auto")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_nobody_gets_anothers_kv_in_a_minute(tmp_path: Path, engine: Engine) -> None:
    workers = race(tmp_path, 60.0, engine)
    print(f"{sum(each.turns for each in workers)} turns, "
          f"{sum(each.elements for each in workers)} elements looked at")  # fmt: skip
    assert sum(each.restored for each in workers) > 100_000
