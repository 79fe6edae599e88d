"""How well HOT and HOST keep what is used again: simulated sessions, no drive and no attention.

Drives the store's own Residency and Room with units of a few bytes, and counts how many uses of a
unit needed a read. The same uses are given to a tier that evicts what was used longest ago (LRU),
and to one that knows the future (Belady's optimum), with as much memory.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.tiering.frames import MemoryTier
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.residency import Residency
from kvtier.tiering.room import Room, move_up

Key = tuple[int, int]
"""Layer and slot of a unit; every Segment has a slot from the first use on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A context is resumed and decoded for some passes. first: its first Segment's number."""

    first: int
    segments: int
    passes: int = 2


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of uses that needed no read."""

    kvtier: float
    lru: float
    optimum: float


def uses(turns: Sequence[Turn], layers: int) -> Iterator[Key]:
    """Every use of a unit, in order."""
    for turn in turns:
        for _ in range(turn.passes):
            for layer in range(layers):
                for segment in range(turn.first, turn.first + turn.segments):
                    yield layer, segment


def rates(turns: Sequence[Turn], *, layers: int, hot: int, host: int = 0, skip: int = 0) -> Rates:
    """hot, host: units that these tiers have room for; the rivals get both together. skip: turns
    at the beginning that are not counted."""
    counted = sum(turn.passes * turn.segments for turn in turns[skip:]) * layers
    every = list(uses(turns, layers))
    ignored = len(every) - counted
    own = Simulation(layers, hot, host)
    reads = [own.play(turn) for turn in turns]
    lru = _lru(every, hot + host)[ignored:]
    best = _belady(every, hot + host)[ignored:]
    return Rates(1 - sum(reads[skip:]) / counted, float(np.mean(lru)), float(np.mean(best)))


class Simulation:
    """One store's HOT and HOST. Units are one Page of one kv head each."""

    def __init__(self, layers: int, hot: int, host: int) -> None:
        geometry = Geometry.uniform(layers, 1, 1, dtype="float16")
        self.unit_bytes = geometry.frame_bytes(0)
        self.layers = layers
        self.residency = Residency(
            geometry,
            MemoryTier("HOT", hot * self.unit_bytes, geometry),
            MemoryTier("HOST", host * self.unit_bytes, geometry),
        )
        self.room = Room(geometry, self.residency)
        self._slots: dict[int, int] = {}

    def slot(self, segment: int) -> int:
        if segment not in self._slots:
            self._slots[segment] = self.residency.take_slot()
            self.residency.on_nvme[:, self._slots[segment]] = True
        return self._slots[segment]

    def play(self, turn: Turn) -> int:
        """Resume and decode; returns how many units were read."""
        segments = [self.slot(each) for each in range(turn.first, turn.first + turn.segments)]
        units = [(layer, slot) for layer in range(self.layers) for slot in segments]
        self.residency.begin_pass()
        self.residency.begin_pass()
        reads = self._restore(units)
        for number in range(turn.passes):
            if number:
                self.residency.begin_pass()
            for layer in range(self.layers):
                reads += sum(self._use(layer, slot) for slot in segments)
        return reads

    def _restore(self, units: list[Key]) -> int:
        """As much as there is room for without who is in use, each held until all are there."""
        reads = 0
        for layer, slot in units:
            leased = np.array([layer]), np.array([slot])
            if not self.residency.hot.pages[layer, slot]:
                if not self.room.make(self.unit_bytes, idle_only=True, newcomers=leased):
                    break
                reads += self._bring(layer, slot)
            np.add.at(self.residency.leases, leased, 1)
        self.residency.leases[:] = 0
        layers, slots = (np.array(each) for each in zip(*units, strict=True))
        here = self.residency.hot.pages[layers, slots] > 0
        self.residency.touch(layers[here], slots[here])
        return reads

    def _use(self, layer: int, slot: int) -> int:
        read = 0
        if not self.residency.hot.pages[layer, slot]:
            assert self.room.make(self.unit_bytes), "nothing is leased"
            read = self._bring(layer, slot)
        self.residency.touch_unit(layer, slot)
        return read

    def _bring(self, layer: int, slot: int) -> int:
        """Have a unit in HOT, which has room; 1 where it had to be read."""
        if self.residency.host.pages[layer, slot]:
            move_up(layer, slot, self.residency)
            return 0
        frames = self.residency.hot.tier.take(layer, 1)
        self.residency.hot.put(layer, slot, 0, frames.reshape(1, 1))
        return 1


def _lru(every: Sequence[Key], room: int) -> list[bool]:
    """Which uses find their unit in a tier that evicts what was used longest ago."""
    held: OrderedDict[Key, None] = OrderedDict()
    hits = []
    for key in every:
        hits.append(key in held)
        held[key] = None
        held.move_to_end(key)
        if len(held) > room:
            held.popitem(last=False)
    return hits


def _belady(every: Sequence[Key], room: int) -> list[bool]:
    """The same for one that evicts what will be used last."""
    never = len(every)
    following = [never] * len(every)
    last: dict[Key, int] = {}
    for place in range(len(every) - 1, -1, -1):
        following[place] = last.get(every[place], never)
        last[every[place]] = place
    due: list[tuple[int, Key]] = []
    held: dict[Key, int] = {}
    hits = []
    for place, key in enumerate(every):
        hits.append(key in held)
        if key in held:
            # It was due now, and nothing is due earlier.
            due.pop(0)
        held[key] = following[place]
        insort(due, (following[place], key))
        if len(held) > room:
            del held[due.pop()[1]]
    return hits
