"""What an exact step costs beside a sparse one at a long context; the model's own work included.

The attention of a few layers is replayed from a store with synthetic KV in the model's geometry,
and counted for all of its layers; the model's own work is that of one token behind a short prompt,
which is the same at any length. Neighbouring keys share a theme, and a query changes little from
one step to the next, so that most Pages are wanted again, as they are in an answer.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tools.bench_rig import interleave

MIB = 1 << 20
LAYERS = 4
"""Of the replayed store."""
TAIL_TOKENS = 64
THEMES = 512
KEPT_OF_QUERY = 0.95
"""Of a query's variance, from one step to the next."""
STEPS = 8
"""Sparse steps that are timed as one figure."""
SHORT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, medians. sparse, exact: attention of all the model's layers in one step; after: in
    the sparse steps that follow an exact one. model: what the model computes besides."""

    model: float
    sparse: float
    exact: float
    after: float

    @property
    def sparse_step(self) -> float:
        return self.model + self.sparse

    @property
    def exact_step(self) -> float:
        """With what the sparse steps behind it lose, because it pushed their Pages out."""
        return self.model + self.exact + STEPS * max(0.0, self.after - self.sparse)


class SyntheticContext:
    """A long context in a store, of which HOT holds a share."""

    def __init__(self, folder: Path, model: PreTrainedModel, tokens: int) -> None:
        config: Any = model.config
        heads = config.num_key_value_heads
        width = config.hidden_size // config.num_attention_heads
        self.factor = int(config.num_hidden_layers) / LAYERS
        self.q_heads = config.num_attention_heads
        self.folder = folder
        self.geometry = Geometry.uniform(LAYERS, heads, width, dtype="float16")
        self.ids = np.random.default_rng(1).integers(0, 50_000, tokens).astype(np.uint32)
        self.chance = torch.Generator().manual_seed(1)
        self.themes = self._random(LAYERS, heads, THEMES, width)
        self.query = self._random(LAYERS, self.q_heads, width)
        self.nbytes = tokens * self.geometry.token_bytes

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.chance)

    def open(self, share: float) -> Store:
        is_new = not (self.folder / "store.yaml").exists()
        size = 2 * self.nbytes + 64 * MIB if is_new else None
        hot = round(share * self.nbytes) + 16 * MIB
        config = Config(size, hot=hot, calibrate=False)
        return Store.open(self.folder, self.geometry, Fingerprint.of({"bench": "g"}), config)

    def make(self) -> None:
        """Write all but the last tokens, which are the Tail of who asks."""
        sealed = len(self.ids) - TAIL_TOKENS
        with self.open(1.1) as store:
            sequence = store.sequence()
            store.name_tokens(sequence, self.ids[:sealed])
            for layer in range(LAYERS):
                store.append(sequence, layer, *self._rows(layer, sealed))
            store.save(sequence, "context", self.ids[:sealed])

    def resumed(self, store: Store) -> Sequence:
        sequence = store.resume(self.ids[: len(self.ids) - TAIL_TOKENS], lazily=True)
        for layer in range(LAYERS):
            store.append(sequence, layer, *self._rows(layer, TAIL_TOKENS))
        return sequence

    def _rows(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values; neighbours share a theme, and its keys most of their direction."""
        heads, _, width = self.themes[layer].shape
        which = torch.randint(0, THEMES, (math.ceil(tokens / 16),), generator=self.chance)
        keys = self.themes[layer][:, which.repeat_interleave(16)[:tokens]]
        keys = keys + 0.5 * self._random(heads, tokens, width)
        return keys.half(), self._random(heads, tokens, width).half()

    def step(self, store: Store, sequence: Sequence, budget: float | None) -> float:
        """Attention to the next query: seconds, of as many layers as the model has."""
        fresh = self._random(*self.query.shape)
        self.query = KEPT_OF_QUERY**0.5 * self.query + (1 - KEPT_OF_QUERY) ** 0.5 * fresh
        begun = time.perf_counter()
        for layer in range(LAYERS):
            store.attend(sequence, layer, self.query[layer][:, None].half(), budget=budget)
        return (time.perf_counter() - begun) * self.factor


def model_step(model: PreTrainedModel) -> Callable[[], float]:
    """Reads a token behind a short prompt; the seconds that it took."""
    module: Any = model
    cache = DynamicCache(config=module.config)
    token = torch.tensor([[1]])

    def read(ids: Tensor) -> float:
        begun = time.perf_counter()
        with torch.inference_mode():
            module(ids, cache=cache, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begun

    read(token.expand(1, SHORT_TOKENS))
    return lambda: read(token)


def costs(
    model: PreTrainedModel, tokens: int, budget: float, share: float, rounds: int, folder: Path
) -> Costs:
    """At a context of so many tokens, of which HOT holds a share."""
    computes = model_step(model)
    with TemporaryDirectory(dir=folder, prefix="kvtier-guard-") as name:
        context = SyntheticContext(Path(os.fspath(name)) / "kv", model, tokens)
        context.make()
        with context.open(share) as store:
            sequence = context.resumed(store)

            def sparse() -> float:
                return median(context.step(store, sequence, budget) for _ in range(STEPS))

            def exact() -> float:
                sparse()
                return context.step(store, sequence, None)

            def after() -> float:
                context.step(store, sequence, None)
                took = [context.step(store, sequence, budget) for _ in range(STEPS)]
                return sum(took) / STEPS

            def settled() -> float:
                after()
                took = [context.step(store, sequence, budget) for _ in range(STEPS)]
                return sum(took) / STEPS

            methods = {"model": computes, "sparse": settled, "exact": exact, "after": after}
            for each in methods.values():
                each()
            found = interleave(methods, rounds=rounds, pause_s=0.0)
    return Costs(**{name: median(each) for name, each in found.items()})
