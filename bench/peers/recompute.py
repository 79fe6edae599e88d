"""The real model, computing what the others load: the demo's model and the demo's document.

Requests: {"do": "compute", "tokens": N, "data": PATH or null} -> {"seconds", "cpu_s", "context"}.
seconds: one prefill of N tokens into a DynamicCache, after which the first new token is known.
With a path, keys and values are written there as .npy [layers, 2, kv_heads, tokens, width].
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from bench.peers.worker import Array, Context, serve
from kvtier.errors import ConfigError
from kvtier.tools import document, model_source
from kvtier.tools.demo_worker import thread_count

WARM_UP_TOKENS = 16


class Recompute:
    """A loaded model and the document's tokens."""

    def __init__(self, model: PreTrainedModel, tokens: list[int]) -> None:
        self.model = model
        self.tokens = tokens

    @classmethod
    def open(cls) -> "Recompute":
        """Raises ConfigError when the model is not installed."""
        source = model_source.find(None)
        model, tokenizer = model_source.load(source, lambda _: None)
        tokens = document.prompts(document.shipped(), tokenizer)[0]
        with torch.inference_mode():
            model(torch.tensor([tokens[:WARM_UP_TOKENS]]), use_cache=False, logits_to_keep=1)
        return cls(model, tokens)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        wanted = self.tokens[: request["tokens"]]
        if len(wanted) < request["tokens"]:
            raise ConfigError(f"the document has {len(wanted)} tokens, not {request['tokens']}")
        cache = DynamicCache(config=self.model.config)
        cpu, begun = time.process_time(), time.perf_counter()
        with torch.inference_mode():
            self.model(torch.tensor([wanted]), cache=cache, logits_to_keep=1)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        kv = as_array(cache)
        if request["data"]:
            np.save(request["data"], kv)
        layers, _, kv_heads, tokens, width = kv.shape
        context = Context(layers, kv_heads, width, tokens)
        return {"seconds": seconds, "cpu_s": cpu, "context": asdict(context)}


def as_array(cache: DynamicCache) -> Array:
    """Keys and values of a batch of one: [layers, 2, kv_heads, tokens, width]."""
    layers = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer), "every layer keeps plain keys and values"
        assert layer.keys is not None
        assert layer.values is not None
        layers.append([layer.keys[0].numpy(), layer.values[0].numpy()])
    kv: Array = np.array(layers)
    return kv


if __name__ == "__main__":
    serve(Recompute.open().answer, thread_count())
