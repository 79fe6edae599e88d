"""A step of a decode keeps the interpreter's lock, so that the threads of other stores go on.

Each call that lets go of it for a moment lets a thread run that waits for it, and the step waits in
line: with eight stores in one process that took ten times as long as the step itself.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtier.tiering import reader
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.packing import TORCH_DTYPES
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.stats_file import StatsFile
from kvtier.tiering.store import Store
from tests.store_cases import open_store

Q_HEADS = 8
STEPS = 60


class Waiting(threading.Thread):
    """Counts how often it gets the interpreter's lock, and gives it back at once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.times = 0
        self.ends = False

    def run(self) -> None:
        while not self.ends:
            self.times += 1
            time.sleep(0)


@contextmanager
def somebody_waiting() -> Iterator[Waiting]:
    """A thread that wants the interpreter's lock all the time, and nobody has to give it up."""
    before = sys.getswitchinterval()
    waiting = Waiting()
    sys.setswitchinterval(1000.0)
    gc.collect()
    gc.disable()
    try:
        waiting.start()
        time.sleep(0.01)
        yield waiting
    finally:
        waiting.ends = True
        gc.enable()
        sys.setswitchinterval(before)
        waiting.join()


def times_let_go(work: Callable[[], None]) -> int:
    """How often the thread that waits got the interpreter's lock meanwhile. 0 where it is kept;
    most of the times that it is let go of are too short for the other thread to wake up."""
    with somebody_waiting() as waiting:
        before = waiting.times
        work()
        return waiting.times - before


@pytest.fixture
def no_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention lets go of the lock while it computes, as it should. Nor are numbers written."""

    def stub(query: torch.Tensor, *args: object, **rest: object) -> SimpleNamespace:
        return SimpleNamespace(out=query)

    monkeypatch.setattr(reader, "paged_attention", stub)
    monkeypatch.setattr(StatsFile, "write_when_due", lambda *_: None)


def begun(store: Store, tokens: int) -> Sequence:
    sequence = store.sequence()
    for layer, shape in enumerate(store.geometry.layers):
        store.append(sequence, layer, *rows(store.geometry, shape, tokens))
    return sequence


def rows(geometry: Geometry, shape: LayerGeometry, tokens: int) -> tuple[torch.Tensor, ...]:
    dtype = TORCH_DTYPES[geometry.dtype]
    return tuple(
        torch.ones(shape.kv_heads, tokens, width, dtype=dtype)
        for width in (shape.key_width, shape.value_width)
    )


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry.uniform(3, 8, 128, dtype="bfloat16"),
        Geometry.uniform(3, 2, 1, dtype="float16"),
        Geometry((LayerGeometry(1, 64, 32), LayerGeometry(4, 16, 80)), "float32"),
    ],
    ids=["many heads", "narrow", "unlike layers"],
)
@pytest.mark.parametrize("tokens", [3, 1100])
@pytest.mark.usefixtures("no_arithmetic")
def test_a_step_keeps_the_interpreters_lock(
    tmp_path: Path, geometry: Geometry, tokens: int
) -> None:
    with open_store(tmp_path, geometry, Config("512MiB", hot="256MiB")) as store:
        sequence = begun(store, tokens)
        one = [rows(geometry, shape, 1) for shape in geometry.layers]
        dtype = TORCH_DTYPES[geometry.dtype]
        asked = [torch.ones(Q_HEADS, 1, each.key_width, dtype=dtype) for each in geometry.layers]

        def steps() -> None:
            for _ in range(STEPS):
                for layer in range(len(geometry.layers)):
                    store.append(sequence, layer, *one[layer])
                    store.attend(sequence, layer, asked[layer])

        steps()
        assert times_let_go(steps) == 0
        assert sequence.length() == tokens + 2 * STEPS


def test_what_lets_go_of_the_lock_is_noticed() -> None:
    """Else the test above could not fail."""
    tensor = torch.ones(1000, 2)

    def lets_go() -> None:
        for _ in range(20_000):
            tensor.numpy()

    assert times_let_go(lets_go) > 0
