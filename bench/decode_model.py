"""Whole decode steps of the real model for bench/decode.py, each cache reading the same tokens.

The model's own cache attends to everything in plain tensors. TieredCache attends by a budget, once
with all of the context in HOT and once with HOT for a share of it. Keys and values are float32, as
the model computes them.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

import kvtier
from bench.decode_context import TAIL_TOKENS, Context
from bench.decode_replay import MIB, nothing_ahead
from kvtier.tiering.adapters import attention
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.store import Store

FULL, DRAM, NVME, NOT_AHEAD = "full", "dram", "nvme", "nvme, nothing ahead"
SPACE = 3
"""Bytes of the region over those of the context."""


class ModelSteps:
    """One model and a context of it in several caches, which take the same steps in turns."""

    def __init__(self, model: PreTrainedModel, context: Context, folder: Path) -> None:
        attention.register()
        self.model: Any = model
        self.model.set_attn_implementation(attention.NAME)
        self.context = context
        self.folder = folder
        self.sealed = context.tokens - TAIL_TOKENS
        self.stores: dict[str, Store] = {}

    def open(
        self, stack: ExitStack, budget: float, shares: dict[str, float]
    ) -> dict[str, Callable[[int], float]]:
        """Steps by the name of a cache: each takes the number of a step, in order, and returns its
        seconds. shares: of the context that HOT is for."""
        found = {FULL: self._steps(self._dynamic())}
        for name, share in shares.items():
            found[name] = self._steps(self._tiered(name, stack, budget, share))
            if name == NOT_AHEAD:
                stack.enter_context(nothing_ahead(self.stores[name]))
        return found

    def _dynamic(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        for number, layer in enumerate(self.context.layers):
            cache.update(layer.keys[None], layer.values[None], number)
        return cache

    def _tiered(self, name: str, stack: ExitStack, budget: float, share: float) -> TieredCache:
        context, ids = self.context, torch.from_numpy(self.context.ids)
        keys = context.layers[0].keys
        nbytes = 2 * len(context.layers) * keys.shape[0] * keys.shape[2] * 4 * context.tokens
        path = self.folder / name.replace(", ", "-").replace(" ", "-")
        options: dict[str, Any] = {"model": self.model, "placement": "keys"}
        region = SPACE * nbytes + 64 * MIB
        with kvtier.open(path, region=region, hot=2 * nbytes, **options) as store:
            sequence = store.sequence()
            store.name_tokens(sequence, context.ids[: self.sealed])
            for number, layer in enumerate(context.layers):
                part = slice(0, self.sealed)
                store.append(sequence, number, layer.keys[:, part], layer.values[:, part])
            store.save(sequence, "context", context.ids[: self.sealed])
        hot = round(share * nbytes) + 4 * nbytes * TAIL_TOKENS // context.tokens
        store = stack.enter_context(kvtier.open(path, hot=hot, **options))
        self.stores[name] = store
        prompt = ids[: context.tokens]
        cache = stack.enter_context(TieredCache(store, prompt, budget=budget, guard="off"))
        assert cache.restored_tokens == self.sealed
        self._read(cache, prompt[self.sealed :])
        return cache

    def _read(self, cache: Any, ids: torch.Tensor) -> None:
        with torch.inference_mode():
            self.model(input_ids=ids[None], cache=cache, use_cache=True, logits_to_keep=1)

    def _steps(self, cache: Any) -> Callable[[int], float]:
        def step(number: int) -> float:
            at = self.context.tokens + number
            ids = torch.from_numpy(self.context.ids[at : at + 1])
            begun = time.perf_counter()
            self._read(cache, ids)
            return time.perf_counter() - begun

        return step
