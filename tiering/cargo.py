"""Units of one pool that are brought together: where they lie on the device, and where in memory
their bytes go."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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


class Rows(NamedTuple):
    """Requests: offsets on the device, starts in memory, lengths, and the indices of their
    units."""

    offsets: Int64Array
    starts: Int64Array
    lengths: Int64Array
    whose: Int64Array

    def part(self, own: slice) -> "Rows":
        """Some of them."""
        return Rows(*(each[own] for each in self))


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
    """Units as columns, with Frames that were taken for them, planned at once and read in parts.
    Made by `stowed`."""

    units: Units
    sizes: Sizes
    layers: list[int]
    payload_bytes: list[int]
    """Of each unit, as the sizes say."""
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
    """Whose Frames and room for a header belong to those who read them still."""
    runs: Runs
    headers: dict[int, int] = field(default_factory=dict)
    """By unit, where in the arena its header will be, where it is not known and not bounced."""
    sound: list[int] = field(default_factory=list)
    """Those that landed and are what they should be, but are not HOT's yet."""

    def keys(self) -> list[tuple[int, int]]:
        """The layer and slot of each unit."""
        return list(zip(self.layers, self.units.slots.tolist(), strict=True))

    def frames_of(self, index: int) -> FrameArray:
        """Of one unit, as a vector."""
        begin = int(self.begins[index])
        return self.frames[begin : begin + int(self.sizes.frames[index])]

    def frames_of_all(self, indices: Int64Array) -> FrameArray:
        """Of several units, as a vector."""
        if len(indices) == len(self.units):
            return self.frames
        chosen = np.zeros(len(self.units), np.bool_)
        chosen[indices] = True
        return self.frames[chosen.repeat(self.sizes.frames)]

    def pieces(self, index: int) -> list[slice]:
        """Where in the arena the payload of a unit will be that is not bounced."""
        own = self.runs.whose == index
        starts = self.frames[self.runs.begins[own]] * self.pool.frame_bytes
        ends = starts + self.runs.lengths[own] * self.pool.frame_bytes
        return [slice(*each) for each in zip(starts.tolist(), ends.tolist(), strict=True)]

    def requests(self, parts: Sequence[slice]) -> list[Rows]:
        """What is read straight into the arena, headers too, for each of these parts, which follow
        each other: in the order in which it lies on the device."""
        rows = self._payload_requests()
        if self.headers:
            rows = Rows(*map(np.concatenate, zip(rows, self._header_requests(), strict=True)))
        if len(parts) == 1:
            order = rows.offsets.argsort()
            return [Rows(*(each[order] for each in rows))]
        firsts = np.array([each.start for each in parts], np.int64)
        part_of = firsts.searchsorted(rows.whose, "right")
        order = np.lexsort((rows.offsets, part_of))
        rows = Rows(*(each[order] for each in rows))
        ends = part_of[order].searchsorted(np.arange(len(parts) + 1), "right").tolist()
        return [rows.part(slice(*each)) for each in pairwise(ends)]

    def _payload_requests(self) -> Rows:
        runs, frame_bytes = self.runs, self.pool.frame_bytes
        if self.bounced.any():
            direct = ~self.bounced[runs.whose]
            runs = Runs(runs.begins[direct], runs.lengths[direct], runs.whose[direct])
        whose = runs.whose
        payloads = (self.places + self.sizes.header_bytes)[whose]
        return Rows(
            payloads + (runs.begins - self.begins[whose]) * frame_bytes,
            self.frames[runs.begins] * frame_bytes,
            runs.lengths * frame_bytes,
            whose,
        )

    def _header_requests(self) -> Rows:
        whose = np.array([*self.headers], np.int64)
        rooms = np.array([*self.headers.values()], np.int64)
        return Rows(self.places[whose], rooms, self.sizes.header_bytes[whose], whose)

    def bounced_requests(self, own: slice) -> Rows:
        """What is read into a bounce buffer for some of the units, whole Extents in the order in
        which they lie on the device; notes where in the buffer they will be."""
        which = self.bounced[own].nonzero()[0] + own.start
        which = which[self.places[which].argsort()]
        lengths = self.sizes.extent_bytes[which]
        starts = starts_of(lengths)
        self.bounced_at[which] = starts
        return Rows(self.places[which], starts, lengths, which)


def stowed(units: Units, frames: FrameArray, pool: FramePool, extents: ExtentIO) -> Cargo:
    """Units that are on the device, with Frames that were taken for them from this pool, those of
    one behind the other's."""
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
        units=units,
        sizes=sizes,
        layers=units.layers.tolist(),
        payload_bytes=sizes.payload_bytes.tolist(),
        pool=pool,
        frames=frames,
        begins=begins,
        places=places,
        bounced=bounced,
        bounced_at=np.zeros(count, np.int64),
        starts=starts.tolist(),
        held=np.ones(count, np.bool_),
        runs=runs,
        headers=headers,
    )
