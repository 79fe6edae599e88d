"""kvtier itself: a region file, or a raw block device where the place has one.

Store.append and Store.save keep the context; Store.resume loads it into HOT, which has room for it
and is emptied after every load. A resumed Sequence can be decoded with, so the bytes are in memory
and ready at the same moment. `lazily`, it is when the first layer is there; the others come while
layers before them are attended to.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bench.peers.worker import (
    QUERY_HEADS,
    Array,
    Contestant,
    Context,
    Layer,
    Place,
    compete,
)
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import SEGMENT_TOKENS, Geometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store

SPARE_BYTES = 64 << 20


def token_ids(context: Context) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.random.default_rng(context.tokens).integers(0, 50_000, context.tokens)


class KvtierStore(Contestant):
    """Keeps a context in a store of its own."""

    def __init__(self, *, lazily: bool = False) -> None:
        self._lazily = lazily
        self._store: Store | None = None
        self._context = Context(0, 0, 0, 0)
        self._tokens = token_ids(self._context)
        self._sequence: Sequence | None = None

    def _opened(self) -> Store:
        assert self._store is not None
        return self._store

    def store(self, context: Context, place: Place, kv: Array) -> None:
        geometry = Geometry.uniform(context.layers, context.kv_heads, context.width)
        region = place.device or context.nbytes + context.nbytes // 8 + SPARE_BYTES
        hot = geometry.token_bytes * (context.tokens + SEGMENT_TOKENS)
        self._context = context
        self._tokens = token_ids(context)
        self._store = Store.open(
            Path(place.folder) / "store",
            geometry,
            Fingerprint.of({"bench": "restore"}),
            Config(region, hot=hot, direct_io="required", force=place.device is not None),
        )
        sequence = self._store.sequence()
        for layer in range(context.layers):
            keys, values = (torch.from_numpy(rows) for rows in kv[layer])
            self._store.append(sequence, layer, keys, values)
        self._store.save(sequence, "context", self._tokens)
        self._store.release(sequence)
        self._empty_hot()

    def _empty_hot(self) -> None:
        store = self._opened()
        store._room.make(store._residency.hot.tier.limit_bytes)
        assert not store._residency.hot.pages.any(), "HOT still holds Pages"

    def load(self) -> float:
        self._sequence = self._opened().resume(self._tokens, lazily=self._lazily)
        if self._lazily:
            self._attend(0)
        return time.perf_counter()

    def _attend(self, layer: int) -> None:
        assert self._sequence is not None
        query = torch.ones(QUERY_HEADS, 1, self._context.width)
        self._opened().attend(self._sequence, layer, query)

    def step(self) -> None:
        for layer in range(self._context.layers):
            self._attend(layer)

    def loaded(self) -> Iterator[Layer]:
        store, sequence = self._opened(), self._sequence
        assert sequence is not None
        assert sequence.length() == self._context.tokens
        before = store.stats().bytes_read
        for layer in range(self._context.layers):
            yield store.read(sequence, layer)
        assert store.stats().bytes_read == before, "a part was not in HOT after the restore"

    def forget(self) -> None:
        if self._sequence is not None:
            self._opened().release(self._sequence)
            self._sequence = None
        self._empty_hot()

    def close(self) -> None:
        self._opened().close()
        self._store = None


if __name__ == "__main__":
    compete(KvtierStore(lazily="lazily" in sys.argv))
