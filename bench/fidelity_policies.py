"""The policies that bench/fidelity.py compares, and the context that they choose from."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from bench.fidelity_attention import (
    QUERY_STEP,
    Reading,
    SimulatedLayer,
    order_by_keys,
    read,
    segments,
    terms_of,
)
from kvtier.kernels.digests import LayerDigests, page_digests
from kvtier.kernels.page_mass import refined_share
from kvtier.kernels.rival_selection import (
    AccumulatedSelector,
    BoundSelector,
    DigestSelector,
    OracleSelector,
    Selector,
    Terms,
    WindowSelector,
    true_mass,
)
from kvtier.kernels.rotary import Rotary
from kvtier.tiering.geometry import PAGE_TOKENS
from kvtier.tiering.stored_digests import SKETCH_SEED

PREFILL_TOKENS = 512
"""Read at a time."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How Pages are chosen.

    chooses: "digests" by means, or by sketches of `bits`; "window", "accumulated", "bounds" and
    "oracle" as in rival_selection. by_keys: Pages hold similar keys; else what lies side by side.
    estimates: Pages that are not read count as their mean values.
    """

    chooses: Literal["digests", "window", "accumulated", "bounds", "oracle"] = "digests"
    by_keys: bool = True
    bits: int | None = None
    estimates: bool = False


OURS = "ours-sketch3+estimate"
QUEST = "quest"
POLICIES = {
    OURS: Policy(bits=3, estimates=True),
    "ours-sketch2+estimate": Policy(bits=2, estimates=True),
    "ours-sketch4+estimate": Policy(bits=4, estimates=True),
    "ours-sketch3": Policy(bits=3),
    "ours-means": Policy(),
    "ours-means+estimate": Policy(estimates=True),
    "positions-sketch3+estimate": Policy(by_keys=False, bits=3, estimates=True),
    QUEST: Policy("bounds", by_keys=False),
    "h2o": Policy("accumulated", by_keys=False),
    "window": Policy("window", by_keys=False),
    "oracle": Policy("oracle"),
}


@dataclass(slots=True)
class Held:
    """The KV of a context as a dense prefill left it.

    keys, values: [layers, kv_heads, tokens, width]. queries: [layers, q_heads, n, Dk], those at the
    positions 0, 8, 16, ...
    """

    keys: Tensor
    values: Tensor
    queries: Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]


def prefill(model: PreTrainedModel, ids: list[int]) -> Held:
    """Have the model read the ids densely."""
    config: Any = model.config
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    nothing = torch.zeros(heads, 0, getattr(config, "head_dim", None) or width)
    layers = [SimulatedLayer(nothing, nothing) for _ in range(config.num_hidden_layers)]
    for layer in layers:
        layer.queries = []
    assert PREFILL_TOKENS % QUERY_STEP == 0
    for start in range(0, len(ids), PREFILL_TOKENS):
        read(model, layers, ids[start : start + PREFILL_TOKENS], 1)
    return Held(
        torch.stack([layer.held[0] for layer in layers]),
        torch.stack([layer.held[1] for layer in layers]),
        torch.stack([torch.cat(layer.queries or [], 1) for layer in layers]),
    )


def kept(path: Path, model: PreTrainedModel, ids: list[int]) -> Held:
    """The same from a file, which is made first if it is not there."""
    if not path.exists():
        held = prefill(model, ids)
        tensors = {"keys": held.keys, "values": held.values, "queries": held.queries}
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file(tensors, unfinished)
        unfinished.replace(path)
    found = load_file(path)
    return Held(found["keys"], found["values"], found["queries"])


@dataclass(slots=True)
class Layouts:
    """A context in the two orders of its tokens, and what chooses from them; each is made when it
    is first asked for."""

    held: Held
    rotary: Rotary
    scale: float
    _orders: dict[bool, list[Tensor]] = field(default_factory=dict)
    _selectors: dict[Policy, list[tuple[Selector, Terms]]] = field(default_factory=dict)

    def layer(self, index: int, by_keys: bool) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, tokens, width] of a layer in the order of slots."""
        orders = self._orders.get(by_keys)
        if orders is None:
            plain = torch.arange(self.held.tokens).repeat(self.held.keys.shape[1], 1)
            orders = [
                order_by_keys(keys, self.rotary) if by_keys else plain for keys in self.held.keys
            ]
            self._orders[by_keys] = orders
        rows = torch.arange(len(orders[index]))[:, None], orders[index]
        return self.held.keys[index][rows], self.held.values[index][rows]

    def layers(self, policy: Policy | None, budget: float) -> list[SimulatedLayer]:
        """Layers that read the context by a policy; None: in full."""
        by_keys = policy is not None and policy.by_keys
        made = []
        for index in range(len(self.held.keys)):
            reading = None
            if policy is not None:
                reading = Reading(*self._chosen_by(policy)[index], budget)
            made.append(SimulatedLayer(*self.layer(index, by_keys), reading))
        return made

    def _chosen_by(self, policy: Policy) -> list[tuple[Selector, Terms]]:
        """What chooses in each layer."""
        found = self._selectors.get(policy)
        if found is None:
            found = []
            for index, queries in enumerate(self.held.queries):
                keys, values = self.layer(index, policy.by_keys)
                widths = keys.shape[2], values.shape[2]
                terms = terms_of(self.held.tokens, widths, self.scale)
                found.append((selector_of(policy, (keys, values), queries, terms), terms))
            self._selectors[policy] = found
        return found


def layouts_of(model: PreTrainedModel, held: Held) -> Layouts:
    """With the rotary embedding that the model has."""
    module: Any = model
    embedding = module.model.rotary_emb
    rotary = Rotary(tuple(embedding.inv_freq.tolist()), float(embedding.attention_scaling))
    return Layouts(held, rotary, float(module.model.layers[0].self_attn.scaling))


def selector_of(
    policy: Policy, kv: tuple[Tensor, Tensor], queries: Tensor, terms: Terms
) -> Selector:
    """What chooses from keys and values [kv_heads, tokens, width] in slot order; `queries` are
    those of the context that were kept."""
    keys, values = kv
    if policy.chooses == "window":
        return WindowSelector(len(keys), terms)
    if policy.chooses == "bounds":
        return BoundSelector(keys, terms)
    if policy.chooses == "oracle":
        return OracleSelector(keys, terms)
    if policy.chooses == "accumulated":
        return _accumulated(keys, queries, terms)
    sketch = None if policy.bits is None else (policy.bits, SKETCH_SEED)
    digests = LayerDigests(len(keys), (keys.shape[2], values.shape[2]), sketch)
    for first, behind in segments(keys.shape[1]):
        part = keys[:, first:behind], values[:, first:behind]
        digests.add(page_digests(*part, policy.bits, SKETCH_SEED))
    refined = 0.0 if policy.bits is None else refined_share(digests.pages)
    return DigestSelector(digests, terms, refined, policy.estimates)


def _accumulated(keys: Tensor, queries: Tensor, terms: Terms) -> AccumulatedSelector:
    """By the mass that the context's own queries gave, each of the tokens before it."""
    selector = AccumulatedSelector(len(keys), terms)
    pages = keys.shape[1] // PAGE_TOKENS
    for index in range(queries.shape[1]):
        seen = keys[:, : index * QUERY_STEP + 1]
        masses = torch.full((queries.shape[0], pages), -torch.inf)
        found = true_mass(queries[:, index], seen, terms.scale)
        masses[:, : found.shape[1]] = found
        selector.observe(masses)
    return selector
