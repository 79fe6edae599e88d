"""Slow restores while everything they could be confused with is evicted, removed and used anew."""

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import CapacityError
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import Faults
from kvtier.tiering.aio import AsyncStore
from kvtier.tiering.config import Config
from kvtier.tiering.store import Store
from kvtier.tiering.writer import hot_bytes_min
from tests.aio_cases import (
    OF_M,
    check_at_rest,
    is_at_rest,
    on_a_loop,
    opened,
    simulated_drives,
    until,
)
from tests.store_cases import PLAIN, check_bytes, open_store, put, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

RESTORES = 350
"""Times three seeds: a thousand."""


async def restore(aio: AsyncStore, tokens: list[int], found: dict[str, int]) -> None:
    """Resume, compare every byte, and count how it ended."""
    try:
        sequence = await aio.resume(np.array(tokens, np.uint32))
    except asyncio.CancelledError:
        found["cancelled"] += 1
        return
    length = sequence.length()
    found["whole" if length == len(tokens) else "less"] += 1
    if length:
        with aio.store._lock:
            check_bytes(aio.store, OF_M, sequence, tokens[:length])
    # Cancelled here, it is released all the same.
    with contextlib.suppress(asyncio.CancelledError):
        await aio.release(sequence)


async def save(aio: AsyncStore, name: str, tokens: list[int], found: dict[str, int]) -> None:
    """Store a prompt, which may evict others from the drive."""
    sequence = await aio.sequence()
    try:
        for layer in range(2):
            await aio.append(sequence, layer, *OF_M.rows(tokens, layer))
        await aio.save(sequence, name, tokens)
    except CapacityError:
        # Too much of the region is in use at this moment.
        found["no room"] += 1
    await aio.release(sequence)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_each_restore_gets_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A028, A037: the drive is slow, HOT and the region are small, half of the restores are
    cancelled, and their Extents, Frames and buffers go to others. Exact, or a shorter match."""
    lists = [some_tokens(200 + 37 * each, 100 * seed + each) for each in range(24)]
    chance = random.Random(seed)
    hot = chance.choice((hot_bytes_min(PLAIN), "512KiB"))
    found = {"whole": 0, "less": 0, "cancelled": 0, "no room": 0}

    async def work(store: Store, device: SimulatedDevice) -> None:
        async with AsyncStore.of(store) as aio:
            tasks: list[asyncio.Task[Any]] = []
            for turn in range(RESTORES):
                tasks.append(asyncio.ensure_future(restore(aio, chance.choice(lists), found)))
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.random() * 0.004)
                    tasks[-1].cancel()
                if turn % 6 == 0:
                    number = turn // 6 % len(lists)
                    saving = save(aio, f"n{number}", lists[number], found)
                    tasks.append(asyncio.ensure_future(saving))
                if turn % 30 == 29:
                    await asyncio.gather(*tasks)
                    tasks.clear()
            await asyncio.gather(*tasks)
            await until(lambda: is_at_rest(aio), 2.0)
            # What verifies a store reads the file.
            Path(device.path).write_bytes(device.live())
            check_at_rest(aio, tmp_path)
            assert store.stats().segments_evicted > 5
            assert store.stats().damaged_extents == 0
        no_room = found.pop("no room")
        assert min(found.values()) > 20, found
        assert no_room < 30

    with open_store(tmp_path, config=Config("4MiB", hot="1MiB")) as store:
        for number in range(8):
            put(store, OF_M, f"n{number}", lists[number])
    faults = Faults(delay_s=0.0007, shuffled=True)
    with simulated_drives(monkeypatch, faults) as drives, opened(tmp_path, hot) as store:
        on_a_loop(lambda: work(store, drives.devices[0]))
