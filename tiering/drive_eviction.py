"""Which Segments leave the drive when it is full: a pure function from usage to victims.

A Segment is of use only with everything before it, so a chain is eaten from its end: a victim has
no child that stays. Among the ends, the one that was used longest ago goes first; what is damaged
itself goes before all others.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.io.device import Int64Array

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class DriveUsage:
    """All Segments of a region as parallel arrays, parents before their children.

    parents: index of the Segment before, or NO_PARENT. kept: in use or held.
    used_at: any clock; smaller is longer ago. lost: its own bytes are damaged.
    """

    parents: Int64Array
    nbytes: Int64Array
    used_at: npt.NDArray[np.float64]
    kept: npt.NDArray[np.bool_]
    lost: npt.NDArray[np.bool_]


DrivePolicy = Callable[[DriveUsage, int], list[int]]
"""From usage and needed bytes to victims: indices, children before their parents."""


def least_recently_used(usage: DriveUsage, needed_bytes: int) -> list[int]:
    """Victims that free at least needed_bytes, or as much as there is."""
    parents, kept = usage.parents.tolist(), usage.kept.tolist()
    children = np.bincount(
        usage.parents[usage.parents != NO_PARENT], minlength=len(parents)
    ).tolist()
    order = np.where(usage.lost, -np.inf, usage.used_at).tolist()
    ends = [
        (order[index], index)
        for index in range(len(parents))
        if not children[index] and not kept[index]
    ]
    heapq.heapify(ends)
    victims: list[int] = []
    freed = 0
    while ends and freed < needed_bytes:
        _, index = heapq.heappop(ends)
        victims.append(index)
        freed += int(usage.nbytes[index])
        parent = parents[index]
        if parent != NO_PARENT:
            children[parent] -= 1
            if not children[parent] and not kept[parent]:
                heapq.heappush(ends, (order[parent], parent))
    return victims
