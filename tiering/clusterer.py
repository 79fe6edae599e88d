"""Placement by keys: in which order the tokens of a unit lie in its Pages.

An order is made once for a unit, when it is complete (a layer of a Segment that is whole, or of a
Tail that is sealed): in the write path, never while a query waits for it. One call for all layers
of a Segment costs a fifth of one for each; for who goes on with other work meanwhile it comes in
steps (sealing.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from kvtier.errors import ConfigError
from kvtier.kernels.clustering import balanced_ordering, to_end
from kvtier.kernels.rotary import Rotary, unrotated
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry
from kvtier.tiering.page_layout import Order

SINK_TOKENS = 16
"""The first tokens of a stream attract attention whatever they say: they lie in one Page, which is
always read."""
STEP_ELEMENTS = 1 << 19
"""Of keys that are ordered together where that comes in steps: 16 heads of 512 tokens of width 64,
which makes steps of 1 to 4 ms. Three times as many at once would save an eighth of the time."""
BATCH_ELEMENTS = 1 << 21
"""The same where somebody waits for all of it."""

Ordering = Generator[None, None, dict[int, Order]]
"""Orders in the making, a step at a time: by the numbers of units, those of positions left out."""


@dataclass(frozen=True, slots=True)
class UnitKeys:
    """The keys of one unit, in the order of positions: [kv_heads, tokens, key_width]. start: the
    position of the first."""

    layer: int
    start: int
    keys: torch.Tensor


class Placement(ABC):
    """Policy: in which order the tokens of units lie in their Pages. Pure.

    in_steps: orders take so long that a decode which fills a Segment should not wait for them.
    """

    in_steps: ClassVar[bool] = False

    @abstractmethod
    def orders(self, units: Sequence[UnitKeys]) -> list[Order | None]:
        """For each unit a permutation of its tokens per kv head; None: the order of positions."""

    def ordering(self, units: Iterable[UnitKeys]) -> Ordering:
        """The same in steps, each unit being asked for when it is its turn."""
        orders = self.orders(list(units))
        yield
        return {number: order for number, order in enumerate(orders) if order is not None}


class ByPosition(Placement):
    """Tokens lie in the order of their positions."""

    def orders(self, units: Sequence[UnitKeys]) -> list[Order | None]:
        return [None] * len(units)


class ByKeys(Placement):
    """Tokens whose keys are similar lie in the same Page, and similar Pages beside each other.

    Keys are compared as they were before their positions were put in. The first Page of a stream
    holds its first tokens. Layers with a window keep the order of positions, because what they read
    is a run of it. So do units of a single Page, and units whose keys are not all finite: their
    bytes are kept like any others, but no order of them would mean anything.
    """

    in_steps = True

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
        orders = to_end(self._ordering(units, BATCH_ELEMENTS))
        return [orders.get(number) for number in range(len(units))]

    def ordering(self, units: Iterable[UnitKeys]) -> Ordering:
        return self._ordering(units, STEP_ELEMENTS)

    def _ordering(self, units: Iterable[UnitKeys], elements_max: int) -> Ordering:
        """elements_max: of keys that are ordered together. An order does not depend on it."""
        orders: dict[int, Order] = {}
        alike: dict[tuple[int, int], _Batch] = {}
        for number, unit in enumerate(units):
            keys = self._comparable(unit)
            if keys is not None:
                batch = alike.setdefault((keys.shape[1], keys.shape[2]), _Batch())
                batch.add(number, _sinks(unit), keys)
                if batch.elements >= elements_max:
                    orders |= yield from batch.ordering()
                    batch.clear()
            yield
        for batch in alike.values():
            if batch.elements:
                orders |= yield from batch.ordering()
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


@dataclass(slots=True)
class _Batch:
    """Units of as many tokens and one key width, that are ordered together."""

    numbers: list[int] = field(default_factory=list)
    sinks: list[int] = field(default_factory=list)
    """How many tokens of each stay where they are, before its keys."""
    keys: list[torch.Tensor] = field(default_factory=list)
    elements: int = 0

    def add(self, number: int, sinks: int, keys: torch.Tensor) -> None:
        self.numbers.append(number)
        self.sinks.append(sinks)
        self.keys.append(keys)
        self.elements += keys.numel()

    def clear(self) -> None:
        self.numbers, self.sinks, self.keys, self.elements = [], [], [], 0

    def ordering(self) -> Ordering:
        found = yield from balanced_ordering(torch.cat(self.keys), PAGE_TOKENS)
        rows = found.numpy()
        orders: dict[int, Order] = {}
        for number, first, keys in zip(self.numbers, self.sinks, self.keys, strict=True):
            heads = len(keys)
            own, rows = rows[:heads] + first, rows[heads:]
            kept = np.broadcast_to(np.arange(first), (heads, first))
            orders[number] = np.concatenate([kept, own], 1)
        return orders


def _sinks(unit: UnitKeys) -> int:
    """How many tokens of a unit stay where they are, at its beginning."""
    return 0 if unit.start else SINK_TOKENS
