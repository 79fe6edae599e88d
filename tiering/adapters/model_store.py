"""A store opened for a Hugging Face model: identity read off it, attention set, tokens watched."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.tiering.adapters import attention
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.adapters.model_identity import fingerprint_of, geometry_of
from kvtier.tiering.config import Config
from kvtier.tiering.store import Store

OTHER_INPUTS = ("inputs_embeds", "pixel_values", "input_features", "encoder_outputs")
"""Inputs of a forward pass that are not token ids, and so are not in a name made of those."""


class ModelStore(Store):
    """A Store opened for a model, whose attention is "kvtier" while the store is open."""

    _undo: list[Any]

    def attach(self, model: PreTrainedModel) -> None:
        """Set the model's attention, and watch which tokens it is given."""
        attention.register()
        before = model.config._attn_implementation
        hook = model.register_forward_pre_hook(_observe, with_kwargs=True)
        model.set_attn_implementation(attention.NAME)
        self._undo = [hook.remove, lambda: model.set_attn_implementation(before)]

    def close(self) -> None:
        undo, self._undo = getattr(self, "_undo", []), []
        for each in undo:
            each()
        super().close()


def open_for_model(
    path: str | Path, model: PreTrainedModel, namespace: str, config: Config
) -> ModelStore:
    """Open the store in a directory for a model, or make one there. See kvtier.open."""
    geometry = geometry_of(model)
    fingerprint = fingerprint_of(model, geometry, namespace)
    store = ModelStore.open(path, geometry, fingerprint, config)
    store.attach(model)
    return store


def _observe(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before each forward pass: let a TieredCache know the ids that the model will read."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if not isinstance(cache, TieredCache):
        return
    for name in OTHER_INPUTS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name} given: KV that depends on more than token ids cannot be named by them"
            )
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    if input_ids is not None:
        cache.observe(input_ids)
