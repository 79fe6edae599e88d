"""Stores whose single Pages are recalled: made, opened with little of HOT, and compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.io.device import Int64Array
from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.frame_runs import FrameArray
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry, LayerGeometry, pages_of
from kvtier.tiering.page_recall import PageRecall
from kvtier.tiering.segment import Segment
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from tests.aio_cases import hot_is_accounted_for
from tests.store_cases import KV, Remembered, Shuffled, check_settled, open_store, put, some_tokens

GEOMETRIES = {
    "float16, a block": Geometry.uniform(2, 2, 64, dtype="float16"),
    "float32, a block": Geometry.uniform(2, 3, 32),
    "width 80": Geometry.uniform(2, 3, 80, dtype="float16"),
    "small": Geometry.uniform(3, 2, 8),
    "widths differ": Geometry((LayerGeometry(2, 32, 32), LayerGeometry(4, 24, 16)), "float32"),
}
TOKENS = some_tokens(3 * 512 + 200, 3)
"""Three whole Segments and one whose last Page holds 8 tokens."""


@dataclass(frozen=True, slots=True)
class Wants:
    """Some Pages of one layer: int64 [n] each."""

    slots: Int64Array
    heads: Int64Array
    pages: Int64Array

    def __len__(self) -> int:
        return len(self.slots)

    def both(self, other: "Wants") -> "Wants":
        return Wants(
            np.concatenate([self.slots, other.slots]),
            np.concatenate([self.heads, other.heads]),
            np.concatenate([self.pages, other.pages]),
        )

    def some(self, chosen: Any) -> "Wants":
        return Wants(self.slots[chosen], self.heads[chosen], self.pages[chosen])

    @property
    def arrays(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        return self.slots, self.heads, self.pages


def stored(path: Path, geometry: Geometry, tokens: list[int] = TOKENS) -> Remembered:
    kv = Remembered(geometry)
    with open_store(path, geometry, Config("48MiB", hot="16MiB"), Shuffled(1)) as store:
        put(store, kv, "a", tokens)
    return kv


class Recalled:
    """A store with a Sequence, of which HOT has nothing where it is resumed, and its recall."""

    def __init__(
        self,
        store: Store,
        kv: KV,
        tokens: list[int],
        recall: PageRecall | None = None,
        sequence: Sequence | None = None,
    ) -> None:
        self.store, self.kv, self.tokens = store, kv, tokens
        self.sequence = sequence or store.resume(tokens, lazily=True)
        self.segments: list[Segment] = [view.segment for view in self.sequence.views]
        self.recall = recall or PageRecall(store._mover)
        store._registry.on_moved = self.recall.forget
        if sequence is None:
            self.empty_hot()
        self.recall.require_directories(self.units())

    def units(self) -> list[Unit]:
        return [
            Unit(segment, layer) for segment in self.segments for layer in range(segment.layers)
        ]

    def empty_hot(self) -> None:
        self.store._mover.ahead.give_up()
        self.store._mover.flights.wait()
        assert self.store._room.make(self.store._residency.hot.tier.limit_bytes)

    @property
    def cache(self) -> Any:
        return self.recall.cache

    def all_of(self, layer: int, segments: list[Segment] | None = None) -> Wants:
        """Every Page of a layer."""
        heads = self.kv.geometry.layers[layer].kv_heads
        found = [
            (each.slot, head, page)
            for each in (self.segments if segments is None else segments)
            for head in range(heads)
            for page in range(pages_of(each.token_count))
        ]
        return Wants(*np.array(found, np.int64).T)

    def chosen(self, random: np.random.Generator, layer: int, count: int) -> Wants:
        """So many, some of them twice."""
        every = self.all_of(layer)
        return every.some(random.integers(0, len(every), count))

    def check(self, layer: int, wants: Wants, frames: FrameArray) -> None:
        """Every Frame holds, bit for bit, what was appended."""
        assert frames.dtype == np.int64
        assert frames.shape == wants.slots.shape
        shape = self.kv.geometry.layers[layer]
        keys, values = self.kv.rows(self.tokens, layer)
        by_slot = {each.slot: each for each in self.segments}
        memory = self.store._residency.hot.tier.memory(layer)
        split = PAGE_TOKENS * shape.key_width
        for slot, head, page, frame in zip(
            *(each.tolist() for each in wants.arrays), frames.tolist(), strict=True
        ):
            segment = by_slot[slot]
            order = segment.orders[layer]
            lies = np.arange(segment.token_count) if order is None else order[head]
            at = segment.start + lies[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
            row, count = memory[frame], len(at)
            held = row[:split].view(PAGE_TOKENS, -1), row[split:].view(PAGE_TOKENS, -1)
            for rows, appended in zip(held, (keys, values), strict=True):
                assert torch.equal(rows[:count], appended[head, torch.from_numpy(at)])
                assert not rows[count:].any()

    def brought(self, layer: int, wants: Wants) -> FrameArray:
        """The Frames that hold them, until somebody makes room."""
        with self.recall.recalling(layer, *wants.arrays) as landed:
            return landed()

    def recalled(self, layer: int, wants: Wants) -> None:
        """Recall them, and compare."""
        with self.recall.recalling(layer, *wants.arrays) as landed:
            self.check(layer, wants, landed())
        self.check_limit()

    def check_limit(self) -> None:
        tier = self.store._residency.hot.tier
        assert tier.used_bytes <= tier.used_bytes_max <= tier.limit_bytes
        assert hot_is_accounted_for(self.store)
        check_cache(self)

    def released(self, path: Path) -> None:
        """Release the Sequence; nothing is left of what was recalled."""
        self.recall.give_up()
        self.store.release(self.sequence)
        check_settled(self.store, path)
        self.empty_hot()
        assert self.store._residency.hot.tier.used_bytes == 0
        assert self.recall._reading.buffers.used_bytes == 0


@contextmanager
def opened(
    path: Path,
    kv: KV,
    config: Config,
    tokens: list[int] = TOKENS,
) -> Iterator[Recalled]:
    with open_store(path, kv.geometry, config, Shuffled(2)) as store:
        yield Recalled(store, kv, tokens)


def check_cache(case: Recalled) -> None:
    """What page_cache.py says of itself."""
    cache, taken = case.cache, {pool: [each] for pool, each in case.cache._spare.items()}
    held = total = 0
    queued = {
        (layer, int(place))
        for tick, layer, places in cache._queue
        for place in cache._latest(tick, layer, places)
    }
    for layer, known in enumerate(cache._places):
        if known is None:
            continue
        places = (known.frames >= 0).nonzero()[0]
        held += len(places)
        total += len(places) * case.kv.geometry.frame_bytes(layer)
        assert {(layer, place) for place in places.tolist()} <= queued
        taken[cache._pool[layer]].append(known.frames[places])
        by_slot = np.bincount(places // cache.unit_places[layer], minlength=cache.pages.shape[1])
        assert (cache.pages[layer] == by_slot).all()
    assert (cache.count, cache.page_bytes) == (held, total)
    assert len(queued) == held
    count = 0
    for pool, parts in taken.items():
        frames = np.concatenate(parts)
        assert len(np.unique(frames)) == len(frames)
        count += len(frames) * case.kv.geometry.frame_bytes(pool)
    assert cache.held_bytes == count
