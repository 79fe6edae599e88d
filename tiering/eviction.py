"""What is worth its place in a memory tier: pure functions from how units were used to who leaves.

The worth of a unit, for each of its bytes: the time it takes to read it again, over the time until
it is wanted again. So the unit that is wanted last leaves first (which is the optimum, where the
guess is right), small units are kept rather than large ones, and recency counts only where nothing
else is known. How long a unit is not wanted is guessed from how it was used:

- A pass walks over the layers in turn and over a whole context in each, so among units that cycle
  (a second pass uses them) the one used last is wanted last: most recent first. A context larger
  than the tier keeps a fixed share of it.
- Units of a context that comes back every so often are wanted when that time is over again.
  Contexts that take turns keep a fixed part as well: the one that had its turn is wanted last.
- What was used in one session only may never be wanted again: it goes before what came back, so
  that one long scan does not push out a context that is used all the time. Idle units of that kind
  go first, oldest first.
- What did not come back when it should have is given as much time again as it has been idle.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.io.device import Int64Array

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

LATE = 2.0
"""A unit that came back every so often is believed to come back for this many times as long."""
SOON = 0.125
"""What is due, or a little late, is wanted in this part of its interval."""


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What reading from the drive costs: latency_s for each unit, and its bytes."""

    latency_s: float = 2e-4
    bytes_per_s: float = 1e9

    def per_byte(self, unit_bytes: Int64Array) -> FloatArray:
        """Seconds for each byte of units of these sizes."""
        seconds: FloatArray = self.latency_s / unit_bytes + 1 / self.bytes_per_s
        return seconds


@dataclass(frozen=True, slots=True)
class Usage:
    """Units (layer, slot) that may leave, as parallel arrays. Times in ticks of one clock.

    began_at: when a unit's last session began. interval: from session to session, 0 where there
    was only one. now: the clock. idle_before: units used before were not used in the last whole
    pass.
    """

    layers: Int64Array
    slots: Int64Array
    unit_bytes: Int64Array
    used_at: Int64Array
    began_at: Int64Array
    interval: Int64Array
    now: int
    idle_before: int


@dataclass(frozen=True, slots=True)
class Victims:
    layers: Int64Array
    slots: Int64Array
    freed_bytes: int


def waits(usage: Usage) -> FloatArray:
    """Ticks until each unit is wanted again, as far as one can guess; at least 1."""
    idle_for = (usage.now - usage.used_at).astype(np.float64)
    since = (usage.now - usage.began_at).astype(np.float64)
    interval = usage.interval.astype(np.float64)
    # When it should come back, and for a while after that; then as late again as it is.
    due = np.maximum(interval - since, SOON * interval)
    wait = np.where(since < LATE * interval, due, idle_for)
    in_use = usage.used_at >= usage.idle_before
    turn = (usage.used_at - usage.idle_before + 1).astype(np.float64)
    cycles = in_use & (usage.began_at < usage.idle_before)
    once = usage.interval == 0
    horizon = float(interval.max(initial=0.0)) + float(usage.now - usage.idle_before)
    wait[once & in_use] = horizon + turn[once & in_use]
    wait[once & ~in_use] = 2 * horizon + idle_for[once & ~in_use]
    wait[cycles] = turn[cycles]
    return np.maximum(wait, 1.0)


def worth(usage: Usage, cost: ReadCost) -> FloatArray:
    """What keeping each unit saves, in seconds of reading for each of its bytes and each tick."""
    saved: FloatArray = cost.per_byte(usage.unit_bytes) / waits(usage)
    return saved


def plan_eviction(
    usage: Usage, cost: ReadCost, needed_bytes: int, spared: BoolArray | None = None
) -> Victims:
    """Units whose eviction frees at least needed_bytes, or as much as there is, those worth least
    first. spared: units that stay whatever is needed."""
    places = np.arange(len(usage.slots)) if spared is None else np.flatnonzero(~spared)
    if needed_bytes <= 0 or not len(places):
        none = np.zeros(0, np.int64)
        return Victims(none, none, 0)
    value = worth(usage, cost)[places]
    sizes = usage.unit_bytes[places]
    # Only so many can be needed; to sort all of them would take most of the time.
    most = min(len(places), -(-needed_bytes // int(sizes.min())))
    if most < len(places):
        lowest = np.argpartition(value, most - 1)[:most]
        # By place where they are worth the same, so that the plan does not depend on the partition.
        order = lowest[np.lexsort((lowest, value[lowest]))]
    else:
        order = np.argsort(value, kind="stable")
    freed = np.cumsum(sizes[order])
    count = min(int(np.searchsorted(freed, needed_bytes)) + 1, len(order))
    chosen = places[order[:count]]
    return Victims(usage.layers[chosen], usage.slots[chosen], int(freed[count - 1]))


def idle(usage: Usage) -> BoolArray:
    """Units that the last whole pass did not use."""
    return usage.used_at < usage.idle_before


def comes_back(usage: Usage) -> BoolArray:
    """Units that came back before, and are not late: a newcomer must not push them out."""
    since = usage.now - usage.began_at
    found: BoolArray = (usage.interval > 0) & (since < LATE * usage.interval)
    return found


def plan_admission(usage: Usage, cost: ReadCost, room_bytes: int) -> BoolArray:
    """Which of these units a tier of so many bytes keeps: those worth most. Some of them are in it
    already, the others leave the tier before it, and are admitted where they are worth more than
    what they would push out."""
    if int(usage.unit_bytes.sum()) <= room_bytes:
        return np.ones(len(usage.slots), np.bool_)
    best_first = np.argsort(-worth(usage, cost), kind="stable")
    kept = np.zeros(len(usage.slots), np.bool_)
    kept[best_first[np.cumsum(usage.unit_bytes[best_first]) <= room_bytes]] = True
    return kept
