"""Stores for tests of the asynchronous face: prompts, engines, and how long the loop works."""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.io.probe import io_uring_report
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import Faults
from kvtier.io.superblock import DATA_START
from kvtier.tiering import opening
from kvtier.tiering.aio import AsyncStore
from kvtier.tiering.config import Config
from kvtier.tiering.store import Store
from tests.store_cases import KV, PLAIN, check_settled, open_store, put, some_tokens

OF_M = KV(PLAIN)
HANGS_S = 60.0
needs_io_uring = pytest.mark.skipif(
    not io_uring_report().usable, reason="io_uring is refused by this kernel"
)
ENGINES = [pytest.param("io_uring", marks=needs_io_uring), "threads"]
SLOW = Faults(delay_s=0.05, shuffled=True)


def prompts(count: int) -> list[list[int]]:
    """Token lists of one to three Segments; every fifth goes on where another one ends."""
    found: list[list[int]] = []
    for number in range(count):
        own = some_tokens(200 + 23 * number, number)
        found.append(found[-1] + own[:300] if number % 5 == 4 else own)
    return found


def stored(path: Path, lists: list[list[int]], **settings: Any) -> None:
    """A store of 48 MiB that holds these."""
    with open_store(path, config=Config("24MiB", hot="4MiB", **settings)) as store:
        for number, tokens in enumerate(lists):
            put(store, OF_M, f"n{number}", tokens)


def a_store_of(path: Path, count: int) -> list[list[int]]:
    """Store so many prompts in `path`; returns them."""
    lists = prompts(count)
    stored(path, lists)
    return lists


def opened(path: Path, hot: int | str = "1MiB", **settings: Any) -> Store:
    """The store that `stored` made."""
    return open_store(path, config=Config(None, hot, **settings))


class SimulatedDrives:
    """Opens the regions of stores as simulated drives, each with `faults`."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.devices: list[SimulatedDevice] = []

    def open_device(self, path: str, **wishes: object) -> SimulatedDevice:
        assert set(wishes) == {"engine", "direct"}
        image = Path(path).read_bytes()
        device = SimulatedDevice.from_image(image, path=path, faults=self.faults, seed=1)
        self.devices.append(device)
        return device


@contextmanager
def simulated_drives(monkeypatch: pytest.MonkeyPatch, faults: Faults) -> Iterator[SimulatedDrives]:
    drives = SimulatedDrives()
    drives.faults = faults
    monkeypatch.setattr(opening, "open_device", drives.open_device)
    yield drives
    for device in drives.devices:
        device.close()


def on_a_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work`; an assertion if it hangs."""

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S):
            await work()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Sleep, and do nothing else, until this holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


def is_at_rest(aio: AsyncStore) -> bool:
    """Nothing is leased, referenced, on its way, or taken from the buffers."""
    store = aio.store
    return (
        not store._residency.leases.any()
        and all(each.references == 0 for each in store._registry.committed.values())
        and store._mover.flying_bytes == 0
        and aio._reading.buffers.used_bytes == 0
        and store._extents.buffers.used_bytes == 0
        and hot_is_accounted_for(store)
    )


def hot_is_accounted_for(store: Store) -> bool:
    """Every Frame that HOT has handed out holds a Page."""
    hot = store._residency.hot
    held = int(hot.pages.sum(axis=1) @ store._room.frame_bytes)
    return held + store._room.page_cache.held_bytes == hot.tier.used_bytes


def check_at_rest(aio: AsyncStore, path: Path) -> None:
    # A batch is done a moment before the thread that ended it gives its buffer back.
    deadline = time.monotonic() + 1
    while not is_at_rest(aio) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert is_at_rest(aio)
    check_settled(aio.store, path)


@contextmanager
def callbacks_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Processor time in seconds of each callback that the loop's thread runs.

    Not wall time: on a busy machine that also measures everybody else.
    """
    taken: list[float] = []
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        run(handle)
        taken.append(time.thread_time() - begun)

    # A collection of everything that torch brought along takes longer than any callback.
    gc.collect()
    gc.freeze()
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.Handle, "_run", measured)
        yield taken
    gc.unfreeze()


def first_extent(path: Path) -> int:
    """Where the first Segment's first Extent begins."""
    with opened(path) as store:
        segment = store._registry.committed[min(store._registry.committed)]
        extent = segment.extents[0]
        assert extent is not None
        assert extent.offset >= DATA_START
        return extent.offset
