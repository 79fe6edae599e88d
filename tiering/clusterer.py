"""Placement by keys: in which order the tokens of a unit lie in its Pages.

An order is made once for a unit, when it is complete and about to be packed (a layer of a Segment
that is whole, or of a Tail that is sealed): in the write path, never while a query waits for it.
Units that become complete together should come together, because one call for all layers and heads
costs little more than one for a few.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.errors import ConfigError
from kvtier.kernels.clustering import balanced_order
from kvtier.kernels.rotary import Rotary, unrotated
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry
from kvtier.tiering.page_layout import Order

SINK_TOKENS = 16
"""The first tokens of a stream attract attention whatever they say: they lie in one Page, which is
always read."""


@dataclass(frozen=True, slots=True)
class UnitKeys:
    """The keys of one unit, in the order of positions: [kv_heads, tokens, key_width]. start: the
    position of the first."""

    layer: int
    start: int
    keys: torch.Tensor


class Placement(ABC):
    """Policy: in which order the tokens of units lie in their Pages. Pure."""

    @abstractmethod
    def orders(self, units: Sequence[UnitKeys]) -> list[Order | None]:
        """For each unit a permutation of its tokens per kv head; None: the order of positions."""


class ByPosition(Placement):
    """Tokens lie in the order of their positions."""

    def orders(self, units: Sequence[UnitKeys]) -> list[Order | None]:
        return [None] * len(units)


class ByKeys(Placement):
    """Tokens whose keys are similar lie in the same Page, and similar Pages beside each other.

    Keys are compared as they were before their positions were put in. The first Page of a stream
    holds its first tokens. Layers with a window keep the
    order of positions, because what they read is a run of it. So do units of a single Page, and
    units whose keys are not all finite: their bytes are kept like any others, but no order of them
    would mean anything.
    """

    def __init__(self, geometry: Geometry, rotary: Sequence[Rotary | None] | None = None) -> None:
        """rotary: how each layer's keys carry their positions; None for one: they do not, and are
        compared as they are; None for all: so in every layer. Raises ConfigError."""
        layers = geometry.layers
        rotary = [None] * len(layers) if rotary is None else list(rotary)
        if len(rotary) != len(layers):
            raise ConfigError(f"rotary is for {len(rotary)} layers; the model has {len(layers)}")
        for index, (layer, each) in enumerate(zip(layers, rotary, strict=True)):
            if each is not None and each.rotated > layer.key_width:
                raise ConfigError(
                    f"rotary of layer {index} turns {each.rotated} dimensions; its keys have "
                    f"{layer.key_width}"
                )
        self._rotary = rotary
        self._windowed = [layer.window is not None for layer in layers]

    def orders(self, units: Sequence[UnitKeys]) -> list[Order | None]:
        orders: list[Order | None] = [None] * len(units)
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        compared: dict[int, torch.Tensor] = {}
        for index, unit in enumerate(units):
            keys = self._comparable(unit)
            if keys is not None:
                compared[index] = keys
                alike[keys.shape[1], keys.shape[2]].append(index)
        for indices in alike.values():
            found = balanced_order(torch.cat([compared[index] for index in indices]), PAGE_TOKENS)
            rows = found.numpy()
            for index in indices:
                heads, first = len(compared[index]), _sinks(units[index])
                own, rows = rows[:heads] + first, rows[heads:]
                kept = np.broadcast_to(np.arange(first), (heads, first))
                orders[index] = np.concatenate([kept, own], 1)
        return orders

    def _comparable(self, unit: UnitKeys) -> torch.Tensor | None:
        """A unit's keys as they are compared, float32; None: it keeps the order of positions."""
        given = unit.keys[:, _sinks(unit) :]
        tokens = given.shape[1]
        if self._windowed[unit.layer] or tokens <= PAGE_TOKENS:
            return None
        rotary = self._rotary[unit.layer]
        if rotary is None:
            keys = given.to(torch.float32)
        else:
            # Places in the Segment do for positions: another start turns all keys of a head by the
            # same angles, which leaves their distances as they are.
            keys = unrotated(given, torch.arange(tokens), rotary)
        return keys if bool(torch.isfinite(keys).all()) else None


def _sinks(unit: UnitKeys) -> int:
    """How many tokens of a unit stay where they are, at its beginning."""
    return 0 if unit.start else SINK_TOKENS
