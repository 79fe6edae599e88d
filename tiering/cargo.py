"""Units of one pool that are brought together: where they lie on the device, and where in memory
their bytes go."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvtier.io.device import Int64Array
from kvtier.tiering.extent_io import ExtentIO, Sizes, starts_of
from kvtier.tiering.frame_runs import FrameArray
from kvtier.tiering.frames import FramePool
from kvtier.tiering.units import Mask, Units

RUNS_MAX = 4
"""Runs of neighbours that a unit's Frames may form for it to be read straight into them: more
requests cost more than a copy."""

Rows = tuple[Int64Array, Int64Array, Int64Array, Int64Array]
"""Requests: offsets on the device, starts in memory, lengths, and the numbers of their units."""


class Runs(NamedTuple):
    """Frames that follow each other within a unit: where in the array of Frames they begin, how
    many they are, and the index of the unit."""

    begins: Int64Array
    lengths: Int64Array
    whose: Int64Array

    @classmethod
    def of(cls, frames: FrameArray, firsts: Int64Array, counts: Int64Array) -> "Runs":
        """firsts, counts: where in `frames` those of each unit begin, and how many they are."""
        parted = np.empty(len(frames), np.bool_)
        np.not_equal(frames[1:] - frames[:-1], 1, out=parted[1:])
        parted[:1] = False
        if not parted.any():
            # Nearly always.
            return cls(firsts, counts, np.arange(len(firsts)))
        parted[firsts] = True
        begins = parted.nonzero()[0]
        ends = np.append(begins[1:], len(frames))
        return cls(begins, ends - begins, firsts.searchsorted(begins, "right") - 1)


@dataclass(slots=True, eq=False)
class Cargo:
    """Units as columns, with Frames that were taken for them. Made by `stowed`."""

    first: int
    """The number of its first unit in its flight; the others follow."""
    units: Units
    sizes: Sizes
    pool: FramePool
    frames: FrameArray
    """Those of one unit, [heads, pages], behind the other's."""
    begins: Int64Array
    """Where in `frames` those of each unit begin."""
    places: Int64Array
    """Where on the device each Extent begins."""
    bounced: Mask
    """Whose payload goes through a bounce buffer, as it lies on the device."""
    bounced_at: Int64Array
    """Where their Extents begin in that buffer, once there is one."""
    starts: list[int]
    """Where in the pool's arena the payload of each unit will be; -1: a header comes along, or it
    is bounced or in several runs."""
    held: Mask
    """Whose Frames and room for a header are this flight's still."""
    runs: Runs
    headers: dict[int, int] = field(default_factory=dict)
    """By unit, where in the arena its header will be, where it is not known and not bounced."""
    sound: list[int] = field(default_factory=list)
    """Those that landed and are what they should be, but are not HOT's yet."""

    def indexed(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """The index, and the layer and slot, of each unit."""
        layers, slots = self.units.layers.tolist(), self.units.slots.tolist()
        return enumerate(zip(layers, slots, strict=True))

    def frames_of(self, index: int) -> FrameArray:
        """Of one unit, as a vector."""
        begin = int(self.begins[index])
        return self.frames[begin : begin + int(self.sizes.frames[index])]

    def held_frames(self) -> FrameArray:
        """Of all units that are held, as a vector."""
        if self.held.all():
            return self.frames
        return self.frames[self.held.repeat(self.sizes.frames)]

    def pieces(self, index: int) -> list[slice]:
        """Where in the arena the payload of a unit will be that is not bounced."""
        own = self.runs.whose == index
        starts = self.frames[self.runs.begins[own]] * self.pool.frame_bytes
        ends = starts + self.runs.lengths[own] * self.pool.frame_bytes
        return [slice(*each) for each in zip(starts.tolist(), ends.tolist(), strict=True)]

    def payload_requests(self) -> Rows:
        """What is read straight into Frames."""
        runs, frame_bytes = self.runs, self.pool.frame_bytes
        if self.bounced.any():
            direct = ~self.bounced[runs.whose]
            runs = Runs(runs.begins[direct], runs.lengths[direct], runs.whose[direct])
        payloads = (self.places + self.sizes.header_bytes)[runs.whose]
        return (
            payloads + (runs.begins - self.begins[runs.whose]) * frame_bytes,
            self.frames[runs.begins] * frame_bytes,
            runs.lengths * frame_bytes,
            runs.whose + self.first,
        )

    def header_requests(self) -> Rows:
        """What is read beside the Frames."""
        whose = np.array([*self.headers], np.int64)
        rooms = np.array([*self.headers.values()], np.int64)
        return self.places[whose], rooms, self.sizes.header_bytes[whose], whose + self.first


def stowed(
    first: int, units: Units, frames: FrameArray, pool: FramePool, extents: ExtentIO
) -> Cargo:
    """Units that are on the device, with Frames that were taken for them from this pool, those of
    one behind the other's. first: the number of the first one in its flight."""
    sizes, count = extents.sizes(units), len(units)
    places = np.array([each.offset for each in units.extents() if each is not None], np.int64)
    assert len(places) == count, "what is not on the device cannot be read"
    begins = starts_of(sizes.frames)
    runs = Runs.of(frames, begins, sizes.frames)
    if pool.frame_bytes % extents.device.block_bytes:
        bounced = np.ones(count, np.bool_)
    else:
        # The payload is the same bytes as the Frames where every Page is full.
        bounced = sizes.payload_bytes != sizes.frames_bytes
    starts = frames[begins] * pool.frame_bytes
    if len(runs.whose) > count:
        counts = np.bincount(runs.whose)
        bounced |= counts > RUNS_MAX
        starts[counts > 1] = -1
    headers: dict[int, int] = {}
    for index in extents.unknown_headers(units):
        if not bounced[index]:
            room = pool.take_header()
            if room is None:
                bounced[index] = True
            else:
                headers[index] = room
    starts[bounced] = -1
    if headers:
        starts[[*headers]] = -1
    return Cargo(
        *(first, units, sizes, pool, frames, begins, places, bounced),
        bounced_at=np.zeros(count, np.int64),
        starts=starts.tolist(),
        held=np.ones(count, np.bool_),
        runs=runs,
        headers=headers,
    )
