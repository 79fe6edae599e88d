"""Which tiers hold a valid copy of each Page now, and which Pages may not be evicted.

Pages are addressed by (layer, slot, kv head, page): a slot is the small number that a Segment in
use has in these arrays. There is no Python object per page or token.

Invariants:
- frames[layer][slot, head, page] is a Frame of that tier or NO_FRAME; pages[layer, slot] counts
  the former.
- drops[layer] rises whenever a unit of that layer leaves the tier; dropped_at[layer, slot] is what
  it was when the unit there left last. What was made of Frames holds until a unit of them leaves.
- A unit (layer, slot) with leases > 0 is never a victim.
- A unit that is not on NVME has its only copy in HOT and is never a victim.

How a unit was used is known whether or not a tier holds it, and outlives its slot (History), so
that what comes back in turn is recognised. A use is a session: all passes that follow each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tiering.frame_runs import FrameArray
from kvtier.tiering.frames import MemoryTier
from kvtier.tiering.geometry import SEGMENT_PAGES, Geometry
from kvtier.tiering.segment import History

NO_FRAME = -1
SLOTS_AT_FIRST = 16
FEW_UNITS = 4
NOTED_MAX = 4096
"""Arrays of slots that are kept until their uses are counted."""

SlotArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FrameMap = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Noted:
    """Uses of units of one layer that the arrays do not know yet."""

    layer: int
    slots: SlotArray
    first: int
    last: int
    idle_before: int
    """last_pass_began at the first of them."""


class TierMap:
    """Residency in one memory tier."""

    def __init__(self, tier: MemoryTier, geometry: Geometry) -> None:
        self.tier = tier
        heads = [layer.kv_heads for layer in geometry.layers]
        self._stacks = {
            each: np.full(
                (heads.count(each), SLOTS_AT_FIRST, each, SEGMENT_PAGES), NO_FRAME, np.int32
            )
            for each in set(heads)
        }
        """Frames of layers with as many heads, [layers, slots, heads, pages]."""
        self._heads = np.array(heads, np.int64)
        self._places = np.array([heads[:i].count(each) for i, each in enumerate(heads)], np.int64)
        """Which layer of its stack each one is."""
        self.frames = self._by_layer()
        self.pages = np.zeros((len(geometry.layers), SLOTS_AT_FIRST), np.int32)
        self.drops = [0] * len(geometry.layers)
        self.dropped_at = np.zeros(self.pages.shape, np.int64)
        """By layer and slot: drops[layer] when a unit left it last."""

    def grow(self, slots: int) -> None:
        added = ((0, 0), (0, slots - self.pages.shape[1]))
        self._stacks = {
            heads: np.pad(each, (*added, (0, 0), (0, 0)), constant_values=NO_FRAME)
            for heads, each in self._stacks.items()
        }
        self.frames = self._by_layer()
        self.pages = np.pad(self.pages, added)
        self.dropped_at = np.pad(self.dropped_at, added)

    def _by_layer(self) -> list[FrameMap]:
        places = zip(self._heads.tolist(), self._places.tolist(), strict=True)
        return [self._stacks[heads][place] for heads, place in places]

    def put(self, layer: int, slot: int, first_page: int, frames: FrameArray) -> None:
        """Record Frames [heads, n] for the Pages from `first_page` on."""
        where = self.frames[layer][slot, :, first_page : first_page + frames.shape[1]]
        assert (where == NO_FRAME).all()
        where[:] = frames
        self.pages[layer, slot] += frames.size

    def put_units(
        self,
        layers: SlotArray,
        slots: SlotArray,
        frames: FrameArray,
        begins: SlotArray,
        counts: SlotArray,
    ) -> BoolArray:
        """Record Frames for all Pages of units: `counts` of `frames` for each, from `begins` on.
        bool [units]: False for what has some here already, or is named again, and gets none."""
        taken: BoolArray = self.pages[layers, slots] == 0
        free = taken.nonzero()[0]
        # Of what is named twice the last number stays.
        self.pages[layers[free], slots[free]] = free
        taken[free] = self.pages[layers[free], slots[free]] == free
        if not taken.all():
            layers, slots = layers[taken], slots[taken]
            begins, counts = begins[taken], counts[taken]
        self.pages[layers, slots] = counts
        heads = self._heads[layers]
        single = np.ones(len(slots), np.bool_)
        # Most units of a context have as many Pages; a few are written faster one by one.
        for count in {*counts.tolist()} if len(slots) > FEW_UNITS else ():
            for each, stack in self._stacks.items():
                some = ((counts == count) & (heads == each)).nonzero()[0]
                if len(some) > FEW_UNITS:
                    single[some] = False
                    places = self._places[layers[some]] * stack.shape[1] + slots[some]
                    rows = frames.take(begins[some, None] + np.arange(count))
                    where = stack.reshape(-1, each, SEGMENT_PAGES)
                    where[places, :, : count // each] = rows.reshape(len(some), each, -1)
        cut = single.nonzero()[0]
        columns = (each[cut].tolist() for each in (layers, slots, begins, counts))
        for layer, slot, begin, count in zip(*columns, strict=True):
            where = self.frames[layer][slot]
            where[:, : count // len(where)] = frames[begin : begin + count].reshape(len(where), -1)
        return taken

    def held(self, layer: int, slot: int) -> FrameArray:
        """Every Frame of a unit, as a vector."""
        frames = self.frames[layer][slot].astype(np.int64)
        held: FrameArray = frames[frames != NO_FRAME]
        return held

    def drop(self, layer: int, slot: int) -> None:
        """Forget a unit and give its Frames back to the tier."""
        if self.pages[layer, slot]:
            self.drops[layer] += 1
            self.dropped_at[layer, slot] = self.drops[layer]
            self.tier.give(layer, self.held(layer, slot))
            self.frames[layer][slot] = NO_FRAME
            self.pages[layer, slot] = 0


class Residency:
    """All tiers together."""

    def __init__(self, geometry: Geometry, hot: MemoryTier, host: MemoryTier) -> None:
        self.hot = TierMap(hot, geometry)
        self.host = TierMap(host, geometry)
        layers = len(geometry.layers)
        self.on_nvme = np.zeros((layers, SLOTS_AT_FIRST), np.bool_)
        self.leases = np.zeros((layers, SLOTS_AT_FIRST), np.int32)
        self.used_at = np.zeros((layers, SLOTS_AT_FIRST), np.int64)
        self.began_at = np.zeros((layers, SLOTS_AT_FIRST), np.int64)
        """When its last session began; 0: it was never used."""
        self.interval = np.zeros((layers, SLOTS_AT_FIRST), np.int64)
        """From session to session, later ones counting more; 0: there was one at most."""
        self._noted: dict[tuple[int, int], _Noted] = {}
        self.clock = 1
        self.pass_began = 0
        self.last_pass_began = 0
        self._free_slots = list(range(SLOTS_AT_FIRST - 1, -1, -1))

    @property
    def slots(self) -> int:
        return int(self.on_nvme.shape[1])

    def take_slot(self, history: History | None = None) -> int:
        """A slot for a Segment that was used before as `history` says."""
        if not self._free_slots:
            old, new = self.slots, 2 * self.slots
            self.hot.grow(new)
            self.host.grow(new)
            self.on_nvme = np.pad(self.on_nvme, ((0, 0), (0, new - old)))
            self.leases = np.pad(self.leases, ((0, 0), (0, new - old)))
            self.used_at = np.pad(self.used_at, ((0, 0), (0, new - old)))
            self.began_at = np.pad(self.began_at, ((0, 0), (0, new - old)))
            self.interval = np.pad(self.interval, ((0, 0), (0, new - old)))
            self._free_slots = list(range(new - 1, old - 1, -1))
        slot = self._free_slots.pop()
        self.used_at[:, slot] = 0
        self.began_at[:, slot] = history.began_at if history else 0
        self.interval[:, slot] = history.interval if history else 0
        return slot

    def holds(self, slot: int) -> bool:
        """Whether some memory tier holds a Page of this Segment."""
        return bool(self.hot.pages[:, slot].any() or self.host.pages[:, slot].any())

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def give_slot(self, slot: int) -> History:
        """Forget a Segment: its Frames go back, its slot may be used again. Returns how it was used
        in the layer that was used last."""
        assert not self.leases[:, slot].any()
        # What was noted is of this Segment, not of the next one that gets the slot.
        self.settle()
        layer = int(self.began_at[:, slot].argmax())
        history = History(int(self.began_at[layer, slot]), int(self.interval[layer, slot]))
        for layer in range(len(self.leases)):
            self.hot.drop(layer, slot)
            self.host.drop(layer, slot)
        self.on_nvme[:, slot] = False
        self._free_slots.append(slot)
        return history

    def begin_pass(self) -> None:
        """Called when a model starts again at its first layer: what was used before the pass
        before this one is idle."""
        # A tick of its own: the unit touched last before the pass must count as before it.
        self.clock += 1
        self.last_pass_began, self.pass_began = self.pass_began, self.clock

    def touch(self, layers: SlotArray, slots: SlotArray) -> None:
        """These units are used now."""
        self.clock += 1
        self._count(layers, slots, self.clock, self.last_pass_began)
        self.used_at[layers, slots] = self.clock

    def touch_unit(self, layer: int, slot: int) -> None:
        """This unit is used now."""
        if self.used_at[layer, slot] < self.last_pass_began or not self.used_at[layer, slot]:
            self.touch(np.array([layer]), np.array([slot]))
        else:
            self.clock += 1
            self.used_at[layer, slot] = self.clock

    def _count(self, layers: SlotArray | int, slots: SlotArray, now: int, idle_before: int) -> None:
        """A session begins for those of these units that were idle."""
        idle = self.used_at[layers, slots] < max(idle_before, 1)
        if not idle.any():
            return
        if self._noted:
            self.settle()
            idle = self.used_at[layers, slots] < max(idle_before, 1)
        slots = slots[idle]
        if not isinstance(layers, int):
            layers = layers[idle]
        gap = now - self.began_at[layers, slots]
        known = self.interval[layers, slots]
        interval = np.where(known > 0, (known + gap) // 2, gap)
        self.interval[layers, slots] = np.where(self.began_at[layers, slots] > 0, interval, 0)
        self.began_at[layers, slots] = now

    def note(self, layer: int, slots: SlotArray) -> None:
        """These units of a layer are used now. For who says so in every step, with the same array,
        which must not change: however many there are, this takes no time until `settle`."""
        self.clock += 1
        noted = self._noted.get((layer, id(slots)))
        if noted is not None and noted.last >= self.last_pass_began:
            noted.last = self.clock
            return
        if noted is not None or len(self._noted) >= NOTED_MAX:
            self.settle()
        self._noted[layer, id(slots)] = _Noted(
            layer, slots, self.clock, self.clock, self.last_pass_began
        )

    def settle(self) -> None:
        """Have used_at, began_at and interval include what was noted."""
        all_noted, self._noted = self._noted, {}
        for noted in all_noted.values():
            self._count(noted.layer, noted.slots, noted.first, noted.idle_before)
            used = self.used_at[noted.layer]
            used[noted.slots] = np.maximum(used[noted.slots], noted.last)

    @contextmanager
    def lease(self, layers: SlotArray, slots: SlotArray) -> Iterator[None]:
        """A promise not to evict these units while the block runs."""
        self._lease(layers, slots, np.int32(1))
        try:
            yield
        finally:
            self._lease(layers, slots, np.int32(-1))

    def _lease(self, layers: SlotArray, slots: SlotArray, more: np.int32) -> None:
        # By one index, and a number of the same type, numpy adds several times as fast.
        np.add.at(self.leases.reshape(-1), layers * self.leases.shape[1] + slots, more)
