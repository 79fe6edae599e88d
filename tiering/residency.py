"""Which tiers hold a valid copy of each Page now, and which Pages may not be evicted.

Pages are addressed by (layer, slot, kv head, page): a slot is the small number that a Segment in
use has in these arrays. There is no Python object per page or token.

Invariants:
- frames[layer][slot, head, page] is a Frame of that tier or NO_FRAME; pages[layer, slot] counts
  the former.
- A unit (layer, slot) with leases > 0 is never a victim.
- A unit that is not on NVME has its only copy in HOT and is never a victim.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtier.tiering.frames import FrameArray, MemoryTier
from kvtier.tiering.geometry import SEGMENT_PAGES, Geometry

NO_FRAME = -1
SLOTS_AT_FIRST = 16

SlotArray = npt.NDArray[np.int64]


class TierMap:
    """Residency in one memory tier."""

    def __init__(self, tier: MemoryTier, geometry: Geometry) -> None:
        self.tier = tier
        self.frames = [
            np.full((SLOTS_AT_FIRST, layer.kv_heads, SEGMENT_PAGES), NO_FRAME, np.int32)
            for layer in geometry.layers
        ]
        self.pages = np.zeros((len(geometry.layers), SLOTS_AT_FIRST), np.int32)
        self.used_at = np.zeros((len(geometry.layers), SLOTS_AT_FIRST), np.int64)

    def grow(self, slots: int) -> None:
        added = slots - self.pages.shape[1]
        self.frames = [
            np.concatenate([each, np.full((added, *each.shape[1:]), NO_FRAME, np.int32)])
            for each in self.frames
        ]
        self.pages = np.pad(self.pages, ((0, 0), (0, added)))
        self.used_at = np.pad(self.used_at, ((0, 0), (0, added)))

    def put(self, layer: int, slot: int, first_page: int, frames: FrameArray) -> None:
        """Record Frames [heads, n] for the Pages from `first_page` on."""
        where = self.frames[layer][slot, :, first_page : first_page + frames.shape[1]]
        assert (where == NO_FRAME).all()
        where[:] = frames
        self.pages[layer, slot] += frames.size

    def held(self, layer: int, slot: int) -> FrameArray:
        """Every Frame of a unit, as a vector."""
        frames = self.frames[layer][slot].astype(np.int64)
        held: FrameArray = frames[frames != NO_FRAME]
        return held

    def drop(self, layer: int, slot: int) -> None:
        """Forget a unit and give its Frames back to the tier."""
        if self.pages[layer, slot]:
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
        self.clock = 1
        self.pass_began = 0
        self.last_pass_began = 0
        self._free_slots = list(range(SLOTS_AT_FIRST - 1, -1, -1))

    @property
    def slots(self) -> int:
        return int(self.on_nvme.shape[1])

    def take_slot(self) -> int:
        if not self._free_slots:
            old, new = self.slots, 2 * self.slots
            self.hot.grow(new)
            self.host.grow(new)
            self.on_nvme = np.pad(self.on_nvme, ((0, 0), (0, new - old)))
            self.leases = np.pad(self.leases, ((0, 0), (0, new - old)))
            self._free_slots = list(range(new - 1, old - 1, -1))
        return self._free_slots.pop()

    def holds(self, slot: int) -> bool:
        """Whether some memory tier holds a Page of this Segment."""
        return bool(self.hot.pages[:, slot].any() or self.host.pages[:, slot].any())

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def give_slot(self, slot: int) -> None:
        """Forget a Segment: its Frames go back, its slot may be used again."""
        assert not self.leases[:, slot].any()
        for layer in range(len(self.leases)):
            self.hot.drop(layer, slot)
            self.host.drop(layer, slot)
        self.on_nvme[:, slot] = False
        self._free_slots.append(slot)

    def begin_pass(self) -> None:
        """Called when a model starts again at its first layer: what was used before the pass
        before this one is idle."""
        # A tick of its own: the unit touched last before the pass must count as before it.
        self.clock += 1
        self.last_pass_began, self.pass_began = self.pass_began, self.clock

    def touch(self, layers: SlotArray, slots: SlotArray) -> None:
        """These units are used now."""
        self.clock += 1
        self.hot.used_at[layers, slots] = self.clock

    @contextmanager
    def lease(self, layers: SlotArray, slots: SlotArray) -> Iterator[None]:
        """A promise not to evict these units while the block runs."""
        np.add.at(self.leases, (layers, slots), 1)
        try:
            yield
        finally:
            np.subtract.at(self.leases, (layers, slots), 1)
