"""Which Pages leave a memory tier: a pure function from usage to victims.

A decode step walks over the layers in turn and over a whole context in each, so among the Pages
in use the one used last is the one needed last again: recency is the wrong order there, and the
best victims of such a cycle are the most recent. Pages that a whole pass did not use are idle
and go first, oldest first.
"""

from dataclasses import dataclass

import numpy as np

from kvtier.io.device import Int64Array
from kvtier.tiering.residency import SlotArray


@dataclass(frozen=True, slots=True)
class Usage:
    """Units (layer, slot) that may be evicted, as parallel arrays."""

    layers: SlotArray
    slots: SlotArray
    unit_bytes: Int64Array
    used_at: Int64Array
    idle_before: int
    """A unit whose used_at is smaller was not used in the last whole pass."""


@dataclass(frozen=True, slots=True)
class Victims:
    layers: SlotArray
    slots: SlotArray
    freed_bytes: int


def plan_eviction(usage: Usage, needed_bytes: int, *, idle_only: bool) -> Victims:
    """Units whose eviction frees at least needed_bytes, or as much as there is."""
    idle = usage.used_at < usage.idle_before
    # Idle units first, oldest first; then the others, most recent first.
    key = np.where(idle, usage.used_at, np.iinfo(np.int64).max - usage.used_at)
    order = np.argsort(key, kind="stable")
    if idle_only:
        order = order[: int(idle.sum())]
    freed = np.cumsum(usage.unit_bytes[order])
    count = min(int(np.searchsorted(freed, needed_bytes)) + 1, len(order))
    if needed_bytes <= 0:
        count = 0
    chosen = order[:count]
    return Victims(usage.layers[chosen], usage.slots[chosen], int(freed[count - 1]) if count else 0)
