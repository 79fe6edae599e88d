"""Makes room in the memory tiers: the one place that applies what the eviction policy plans.

Invariants:
- A unit (layer, slot) leaves HOT only when a valid copy is on NVME, and never while it is leased.
- No unit is evicted unless that frees enough.
- A unit in HOST is not in HOT: what moves up leaves its place to what moves down. (Two reads of one
  unit at once are the exception; HOST then has it already when it leaves HOT.)
"""

import numpy as np
import torch

from kvtier.tiering import eviction
from kvtier.tiering.eviction import ReadCost, Usage
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.page_cache import PageCache
from kvtier.tiering.residency import Residency, SlotArray, TierMap

Newcomers = tuple[SlotArray, SlotArray]
"""Layers and slots of what room is made for."""


class Room:
    """Of HOT and HOST. Callers hold the store's lock."""

    def __init__(self, geometry: Geometry, residency: Residency) -> None:
        self.residency = residency
        self.cost = ReadCost()
        self.page_cache = PageCache(geometry, residency)
        self.pages_evicted = 0
        """From HOT."""
        self.frame_bytes = np.array(
            [geometry.frame_bytes(layer) for layer in range(len(geometry.layers))], np.int64
        )

    def make(
        self,
        needed_bytes: int,
        *,
        idle_only: bool = False,
        newcomers: Newcomers | None = None,
    ) -> bool:
        """Evict clean Pages until HOT has needed_bytes free. False: there is not that much.

        idle_only: at the cost of nobody who is in use. newcomers: for these; with idle_only what
        came back before gives way only to what came back as well.
        """
        residency = self.residency
        tier = residency.hot.tier
        missing = needed_bytes - tier.free_bytes
        if missing <= 0:
            return True
        if needed_bytes > tier.limit_bytes:
            return False
        # Single Pages that were not wanted lately go before whole units, the others after them.
        missing -= self.page_cache.give_up(missing)
        if missing <= 0:
            return True
        residency.settle()
        usage = self._usage(residency.hot)
        spared = ~eviction.idle(usage) if idle_only else None
        if spared is not None and newcomers is not None and not residency.interval[newcomers].any():
            spared |= eviction.comes_back(usage)
        victims = eviction.plan_eviction(usage, self.cost, missing, spared)
        short = missing - victims.freed_bytes
        if short > 0 and (idle_only or self.page_cache.leaving_bytes < short):
            return False
        self.pages_evicted += int(residency.hot.pages[victims.layers, victims.slots].sum())
        self.keep_in_host(victims.layers, victims.slots)
        for layer, slot in zip(victims.layers.tolist(), victims.slots.tolist(), strict=True):
            residency.hot.drop(layer, slot)
        if short > 0:
            self.page_cache.give_up(short, lately=True)
        return True

    def _usage(self, tier: TierMap) -> Usage:
        """Units of a tier that may leave it."""
        residency = self.residency
        layers, slots = np.nonzero((tier.pages > 0) & (residency.leases == 0) & residency.on_nvme)
        return self._usage_of(layers, slots, tier.pages[layers, slots].astype(np.int64))

    def _usage_of(self, layers: SlotArray, slots: SlotArray, pages: SlotArray) -> Usage:
        residency = self.residency
        return Usage(
            layers,
            slots,
            pages * self.frame_bytes[layers],
            residency.used_at[layers, slots],
            residency.began_at[layers, slots],
            residency.interval[layers, slots],
            residency.clock,
            residency.last_pass_began,
        )

    def keep_in_host(self, layers: SlotArray, slots: SlotArray) -> None:
        """Copy those of these units, which are about to leave HOT, to HOST that are worth more than
        what is there, which leaves it for them."""
        hot, host = self.residency.hot, self.residency.host
        if not host.tier.limit_bytes:
            return
        absent = host.pages[layers, slots] == 0
        layers, slots = layers[absent], slots[absent]
        held = self._usage(host)
        both = self._usage_of(
            np.concatenate([held.layers, layers]),
            np.concatenate([held.slots, slots]),
            np.concatenate([host.pages[held.layers, held.slots], hot.pages[layers, slots]]).astype(
                np.int64
            ),
        )
        # What cannot leave now keeps its place.
        room = host.tier.free_bytes + int(held.unit_bytes.sum())
        kept = eviction.plan_admission(both, self.cost, room)
        count = len(held.slots)
        for index in np.flatnonzero(~kept[:count]).tolist():
            host.drop(int(held.layers[index]), int(held.slots[index]))
        for index in np.flatnonzero(kept[count:]).tolist():
            copy_unit(int(layers[index]), int(slots[index]), hot, host)


def copy_unit(layer: int, slot: int, source: TierMap, target: TierMap) -> None:
    """Give `target`, which has room, a copy of the unit that `source` holds, and is to drop."""
    held = source.frames[layer][slot]
    heads = held.shape[0]
    pages = int(source.pages[layer, slot]) // heads
    frames = target.tier.take(layer, heads * pages)
    rows = held[:, :pages].reshape(-1).astype(np.int64)
    here, there = target.tier.memory(layer), source.tier.memory(layer)
    if (np.diff(frames) == 1).all() and (np.diff(rows) == 1).all():
        # Mostly both are neighbours, and to copy them in one piece takes half the time.
        count = len(frames)
        here[frames[0] : frames[0] + count] = there[rows[0] : rows[0] + count]
    else:
        here.index_copy_(0, torch.from_numpy(frames), there.index_select(0, torch.from_numpy(rows)))
    target.put(layer, slot, 0, frames.reshape(heads, pages))


def move_up(layer: int, slot: int, residency: Residency) -> None:
    """Move a unit from HOST to HOT, which has room."""
    copy_unit(layer, slot, residency.host, residency.hot)
    residency.host.drop(layer, slot)
