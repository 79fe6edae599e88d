"""A store opened for a Hugging Face model: identity read off it, attention set, tokens watched."""

import inspect
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.tiering.adapters import attention
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.adapters.model_identity import fingerprint_of, geometry_of, weights_state
from kvtier.tiering.adapters.model_rotary import rotaries_of
from kvtier.tiering.clusterer import ByKeys
from kvtier.tiering.config import Config
from kvtier.tiering.store import Store

OTHER_INPUTS = ("inputs_embeds", "pixel_values", "input_features", "encoder_outputs")
"""Inputs of a forward pass that are not token ids, and so are not in a name made of those."""
USERS = "_kvtier_users"
"""Attribute of a model: the attention it had, once for every store that is open for it."""
COLD_PASS_TOKENS = 512
"""The first pass also brings weights into memory and code into caches: with fewer tokens than these
its time would tell of that, and not of computing."""


class ModelStore(Store):
    """A Store opened for a model, whose attention is "kvtier" while such a store is open."""

    model: PreTrainedModel
    weights: int
    """State of the model's weights when the store was opened."""
    _hooks: tuple[RemovableHandle, ...] = ()
    _pass: tuple[int, int, float] | None = None
    """Tokens and position of the pass under way, and when it began."""
    _is_warm: bool = False
    """The model made a pass since the store was opened."""

    def attach(self, model: PreTrainedModel) -> None:
        """Set the model's attention, and watch which tokens it is given.

        Raises UnsupportedError for a model whose attention cannot be set.
        """
        attention.register()
        self.model = model
        self.weights = weights_state(model)
        users: list[str] = getattr(model, USERS, [])
        before = users[0] if users else model.config._attn_implementation
        model.set_attn_implementation(attention.NAME)
        if model.config._attn_implementation != attention.NAME:
            raise UnsupportedError(
                f"{type(model).__name__} computes its attention itself: it cannot be set"
            )
        setattr(model, USERS, [*users, before])
        store = weakref.ref(self)

        def watch(
            module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            # A weak reference: the model must neither keep a store open nor copy it.
            opened = store()
            return None if opened is None else opened.watch(module, args, kwargs)

        def note(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            opened = store()
            if opened is not None:
                opened.note_pass()

        self._hooks = (
            model.register_forward_pre_hook(watch, with_kwargs=True),
            model.register_forward_hook(note),
        )

    def close(self) -> None:
        hooks, self._hooks = self._hooks, ()
        for hook in hooks:
            hook.remove()
        if hooks:
            *users, before = getattr(self.model, USERS)
            setattr(self.model, USERS, users)
            if not users:
                self.model.set_attn_implementation(before)
        super().close()

    @property
    def pad_token(self) -> int | None:
        """What `generate` puts behind a row that ended early, unless it is told otherwise."""
        generation: Any = self.model.generation_config
        for name in ("pad_token_id", "eos_token_id"):
            for each in (generation, self.model.config):
                token = getattr(each, name, None)
                if token is not None:
                    return int(token[0] if isinstance(token, list) else token)
        return None

    def watch(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before each forward pass: let a TieredCache know the ids that the model will read.

        Returns the arguments without what the cache holds already; None: as they are.
        """
        self._pass = None
        given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
        given.update(kwargs)
        cache = given.get("cache", given.get("past_key_values"))
        if not isinstance(cache, TieredCache):
            return None
        owner = cache.rows.store
        if getattr(owner, "model", None) is not module:
            raise ConfigError(
                "this cache belongs to a store that was opened for another model: its KV "
                "would be stored under that model's fingerprint"
            )
        if owner is not self:
            return None
        if weights_state(module) != self.weights:
            raise ConfigError(
                "the model's weights were changed since the store was opened: its KV is that of "
                "another model now. Close the store and open it again"
            )
        for name in OTHER_INPUTS:
            if given.get(name) is not None:
                raise UnsupportedError(
                    f"{name} given: KV that depends on more than token ids cannot be named by them"
                )
        ids, positions = given.get("input_ids"), given.get("position_ids")
        if ids is None:
            return None
        again = cache.columns_read_again(ids, positions) if "input_ids" in kwargs else 0
        if again and positions is not None:
            ids, positions = ids[:, again:], positions[..., again:]
        at = cache.get_seq_length()
        cache.observe(ids, positions)
        self._pass = ids.numel(), at, time.perf_counter()
        return (args, {**kwargs, "input_ids": ids, "position_ids": positions}) if again else None

    def note_pass(self) -> None:
        """After each forward pass: tell the planner how long it took."""
        if self._pass is not None:
            tokens, position, began = self._pass
            if self._is_warm or tokens >= COLD_PASS_TOKENS:
                self.costs.note_pass(tokens, position, time.perf_counter() - began)
            self._pass, self._is_warm = None, True


def open_for_model(
    path: str | Path, model: PreTrainedModel, tenant: Any, config: Config
) -> ModelStore:
    """Open the store in a directory for a model, or make one there. See kvtier.open; tenant: as
    fingerprint.tenant makes it."""
    geometry = geometry_of(model)
    fingerprint = fingerprint_of(model, geometry, tenant)
    placement = (
        ByKeys(geometry, rotaries_of(model, geometry)) if config.placement == "keys" else None
    )
    store = ModelStore.open(path, geometry, fingerprint, config, placement)
    try:
        store.attach(model)
    except BaseException:
        store.close()
        raise
    return store
