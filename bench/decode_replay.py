"""Replayed decode queries of bench/decode.py: a context in stores and in plain tensors, no model.

Keys and values are 16 bit, so that a Page is one block of 4 KiB. The context's last 64 tokens are
the Tail; all before them is sealed. A store that has the context on NVME has HOT for a share of it.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.decode_context import TAIL_TOKENS, Context
from kvtier.kernels.selection import page_shares
from kvtier.tiering.clusterer import ByKeys, ByPosition
from kvtier.tiering.config import Config, PlacementName
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.page_recall import RecallCounters
from kvtier.tiering.reader import Query
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.writer import hot_bytes_min

MIB = 1 << 20
DTYPE, DTYPE_NAME = torch.float16, "float16"
APPENDED = 4096
"""Tokens that one append brings."""
FORMS = ("sdpa", "products")
BUDGET = 0.125


@dataclass(frozen=True, slots=True)
class Counts:
    """What one step counted, all layers together; as RecallCounters names them."""

    wanted: int
    missed: int
    reads: int
    bytes_wanted: int
    bytes_read: int


class Resident:
    """A store that is open, with the context as a Sequence in it."""

    def __init__(self, store: Store, sequence: Sequence, context: Context) -> None:
        self.store = store
        self.sequence = sequence
        self.context = context
        self.queries = [layer.queries.to(DTYPE) for layer in context.layers]

    def attend(self, layer: int, step: int, budget: float | None) -> Tensor:
        query = self.queries[layer][step % self.context.steps][:, None]
        return self.store.attend(self.sequence, layer, query, budget=budget)

    def step(self, number: int, budget: float | None) -> float:
        """Attend once in every layer; the seconds that it took."""
        begun = time.perf_counter()
        for layer in range(len(self.queries)):
            self.attend(layer, number, budget)
        return time.perf_counter() - begun

    @property
    def counters(self) -> RecallCounters:
        return self.store._sparse.recall.counters

    def counted(self, run: Callable[[], object]) -> Counts:
        """What recall counts while this runs. Missed: what had to be read, ahead or not."""
        of = self.counters
        before = (of.pages_missed + of.pages_ahead, of.reads, of.bytes_wanted, of.bytes_read)
        chosen = self.store._sparse.attention.pages_chosen
        run()
        after = (of.pages_missed + of.pages_ahead, of.reads, of.bytes_wanted, of.bytes_read)
        counts = [now - then for now, then in zip(after, before, strict=True)]
        return Counts(self.store._sparse.attention.pages_chosen - chosen, *counts)

    def go_cold(self) -> None:
        """Nothing of what is sealed is in HOT."""
        sparse, residency = self.store._sparse, self.store._residency
        sparse.recall.give_up()
        sparse.recall.cache.give_up(1 << 60, lately=True)
        self.store._mover.ahead.give_up()
        self.store._mover.flights.wait()
        for view in self.sequence.views:
            for layer in range(len(self.queries)):
                if residency.hot.pages[layer, view.segment.slot]:
                    residency.hot.drop(layer, view.segment.slot)

    def digest_bytes(self) -> int:
        """Of the digests that are kept of the context."""
        known = self.sequence.table.digested.values()
        return sum(each.digests.held_bytes for each in known)

    def select(self, number: int) -> float:
        """Choose Pages in every layer and read none; the seconds that it took."""
        sparse = self.store._sparse
        begun = time.perf_counter()
        for layer, queries in enumerate(self.queries):
            known = self.sequence.table.digested[layer]
            vectors = queries[number % self.context.steps][:, None]
            query = Query(layer, vectors, vectors.shape[2] ** -0.5)
            shares = page_shares(sparse.masses(query, known))
            sparse.attention.choose(self.sequence, layer, known, shares, BUDGET)
        return time.perf_counter() - begun


@contextmanager
def nothing_ahead(store: Store) -> Iterator[None]:
    """Within the block nothing is read ahead for queries with a budget."""
    recall = store._sparse.recall
    start = recall.start
    recall.start = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        recall.start = start  # type: ignore[method-assign]


class Contexts:
    """A context as stores in a folder. Written once; every store that is opened is a copy."""

    def __init__(self, folder: Path, context: Context, stack: ExitStack) -> None:
        self.folder = folder
        self.context = context
        self.stack = stack
        shape = context.layers[0].keys.shape
        self.geometry = Geometry.uniform(len(context.layers), shape[0], shape[2], dtype=DTYPE_NAME)
        self.sealed = context.tokens - TAIL_TOKENS
        self.nbytes = self.sealed * self.geometry.token_bytes

    def hot_bytes(self, share: float) -> int:
        """HOT for this share of the context, and for the Tail."""
        return max(
            hot_bytes_min(self.geometry),
            round(share * self.nbytes) + 2 * TAIL_TOKENS * self.geometry.token_bytes,
        )

    def _open(self, path: Path, hot: int, bits: int, placement: str) -> Store:
        size = None if (path / "store.yaml").exists() else 2 * self.nbytes + 64 * MIB
        order = (
            ByKeys(self.geometry, self.context.rotaries) if placement == "keys" else ByPosition()
        )
        # By keys it stores digests, so that the first step by a budget need not make them.
        config = Config(
            size,
            hot=hot,
            sketch_bits=bits,
            calibrate=False,
            placement=cast(PlacementName, placement),
        )
        return Store.open(path, self.geometry, Fingerprint.of({"bench": "d"}), config, order)

    def write(self, placement: str) -> None:
        with self._open(self.folder / placement, self.hot_bytes(1.1), 3, placement) as store:
            sequence = store.sequence()
            store.name_tokens(sequence, self.context.ids[: self.sealed])
            for first in range(0, self.sealed, APPENDED):
                part = slice(first, min(first + APPENDED, self.sealed))
                for number, layer in enumerate(self.context.layers):
                    keys, values = layer.keys[:, part], layer.values[:, part]
                    store.append(sequence, number, keys.to(DTYPE), values.to(DTYPE))
            store.save(sequence, "context", self.context.ids[: self.sealed])

    def resident(
        self, name: str, share: float, *, bits: int = 3, placement: str = "keys"
    ) -> Resident:
        """A store with HOT for a share of the context; from 1 on all of it is there."""
        if not (self.folder / placement).exists():
            self.write(placement)
        path = self.folder / name
        shutil.copytree(self.folder / placement, path)
        self.stack.callback(shutil.rmtree, path)
        hot = self.hot_bytes(share)
        store = self.stack.enter_context(self._open(path, hot, bits, placement))
        sequence = store.resume(self.context.ids[: self.sealed], lazily=share < 1)
        assert sequence.length() == self.sealed
        tail = slice(self.sealed, self.context.tokens)
        store.name_tokens(sequence, self.context.ids[: self.context.tokens])
        for number, layer in enumerate(self.context.layers):
            keys, values = layer.keys[:, tail], layer.values[:, tail]
            store.append(sequence, number, keys.to(DTYPE), values.to(DTYPE))
        return Resident(store, sequence, self.context)


class Plain:
    """Full attention over contiguous keys and values. One query token of all heads that share a kv
    head is asked as so many rows of it, so that keys are read once."""

    def __init__(self, context: Context, dtype: torch.dtype, form: str) -> None:
        """dtype: of the arithmetic; what is held has gone through 16 bits. form: of FORMS."""
        assert form in FORMS
        self.form = form
        self.held = [
            tuple(rows.to(DTYPE).to(dtype).contiguous() for rows in (each.keys, each.values))
            for each in context.layers
        ]
        heads = context.layers[0].keys.shape[0]
        self.queries = [
            each.queries.to(DTYPE).to(dtype).view(context.steps, heads, -1, each.queries.shape[-1])
            for each in context.layers
        ]
        self.steps = context.steps

    def attend(self, layer: int, step: int) -> Tensor:
        """[q_heads, 1, width]."""
        query, (keys, values) = self.queries[layer][step % self.steps], self.held[layer]
        if self.form == "sdpa":
            out = scaled_dot_product_attention(query[None], keys[None], values[None])[0]
        else:
            scores = (query * query.shape[-1] ** -0.5) @ keys.transpose(1, 2)
            out = scores.float().softmax(-1).to(query.dtype) @ values
        return out.reshape(-1, 1, out.shape[-1])

    def step(self, number: int) -> float:
        begun = time.perf_counter()
        for layer in range(len(self.held)):
            self.attend(layer, number)
        return time.perf_counter() - begun


def fastest_plain(context: Context, rounds: int) -> tuple[str, Plain]:
    """The form and dtype of full attention that is fastest here, measured in turns."""
    best: tuple[float, str] | None = None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for form in FORMS:
            plain = Plain(context, dtype, form)
            plain.step(0)
            took = min(plain.step(number) for number in range(rounds))
            name = f"{form}, {str(dtype).removeprefix('torch.')}"
            if best is None or took < best[0]:
                best, kept = (took, name), plain
    assert best is not None
    return best[1], kept


def largest_difference(one: Resident, other: Callable[[int, int], Tensor], budget: float) -> float:
    """Between the attention of a store and another one's, over all layers and two steps, over the
    largest of the other's."""
    found = []
    for step in range(2):
        for layer in range(len(one.queries)):
            mine, wanted = one.attend(layer, step, budget).float(), other(layer, step).float()
            found.append(float((mine - wanted).abs().max() / wanted.abs().max()))
    return max(found)


def are_identical(one: Resident, other: Resident, budget: float, steps: range) -> bool:
    """Whether two stores attend alike, bit by bit, in all layers of these steps."""
    return all(
        np.array_equal(
            one.attend(layer, step, budget).numpy(), other.attend(layer, step, budget).numpy()
        )
        for step in steps
        for layer in range(len(one.queries))
    )
