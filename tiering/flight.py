"""Units on their way from the drive into Frames: what is asked of the device, and what came of it.

Pages are read straight into Frames where these are few runs of neighbours, and headers beside them;
else whole Extents go through a bounce buffer, those that touch as one request.

Invariants:
- What the device may still write into (Frames, header rooms, a bounce buffer) belongs to the flight
  and to nobody else until its batches are done.
- Bytes in Frames of a flight are unchecked: no TierMap has them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kvtier.errors import DeviceError
from kvtier.io.buffers import BufferPiece
from kvtier.io.device import Buffers, ByteArray, Int64Array, PendingBatch, Priority
from kvtier.io.ranges import merge_ranges
from kvtier.tiering.extent_io import ExtentIO, Unit, UnitShape
from kvtier.tiering.frame_runs import FrameArray
from kvtier.tiering.frames import FramePool
from kvtier.tiering.packing import scatter
from kvtier.tiering.residency import Residency
from kvtier.tiering.steps import Read, Steps, Wait, apart, run, started

RUNS_MAX = 4
"""Runs of neighbours that a unit's Frames may form for it to be read straight into them: more
requests cost more than a copy."""
REQUEST_BYTES = 1 << 20
"""Extents that touch become one request up to this size."""


@dataclass(slots=True, eq=False)
class Flying:
    """A unit on its way into Frames [heads, pages] that were taken for it."""

    unit: Unit
    shape: UnitShape
    frames: FrameArray
    header: ByteArray | None = None
    """What will be its header; None: what it says is known."""
    header_at: int | None = None
    """The header's room in the pool of its Frames."""
    payload: list[ByteArray] = field(default_factory=list)
    """What will be its payload, in this order."""
    bounced: bool = False
    """The payload is not in the Frames yet."""


class _Requests:
    """Requests of a flight that fill one memory."""

    def __init__(
        self, memory: ByteArray, batches: list[PendingBatch], piece: BufferPiece | None = None
    ) -> None:
        """batches: where to note what is under way. piece: what `memory` is, if it is leased."""
        self.memory = memory
        self._batches = batches
        self._piece = piece
        self._rows: list[Int64Array] = []
        """Each [4, requests]: offset on the device, start in memory, length, whose."""
        self.nbytes = 0
        self.batch: PendingBatch | None = None
        self._parts: Read | None = None
        self._read_of: Int64Array = np.zeros(0, np.int64)
        """By which read of the batch each part is filled."""
        self._whose: Int64Array = np.zeros(0, np.int64)

    def add(self, *rows: Int64Array | Sequence[int]) -> None:
        """rows: offsets on the device, starts in memory, lengths, and whose they are."""
        table: Int64Array = np.array(rows, np.int64)
        self._rows.append(table)
        self.nbytes += int(table[2].sum())

    def _used_by(self, batch: PendingBatch) -> None:
        self._batches.append(batch)
        if self._piece is not None:
            self._piece.used_by(batch)

    def starting(self, priority: Priority) -> Steps[None]:
        """Let them begin, in the order in which they lie on the device."""
        table = np.concatenate(self._rows, axis=1)
        offsets, starts, lengths, self._whose = table[:, np.argsort(table[0])]
        read = self._parts = Read(offsets, Buffers(self.memory, starts, lengths), self._used_by)
        self._read_of = np.arange(len(offsets))
        if self._piece is not None:
            # Extents lie in the bounce buffer as they lie on the device.
            merged = merge_ranges(offsets, lengths, 0, REQUEST_BYTES)
            first = np.searchsorted(merged.index, np.arange(len(merged.offsets)))
            buffers = Buffers(self.memory, starts[first], merged.lengths)
            read = Read(merged.offsets, buffers, self._used_by)
            self._read_of = merged.index
        self.batch = yield from started(read, priority)

    def landing(self) -> Steps[list[tuple[int, int]]]:
        """(whose, errno) of what cannot be read, once they are done. Raises DeviceError where the
        device as a whole fails."""
        assert self.batch is not None
        assert self._parts is not None
        try:
            yield Wait(self.batch)
            return []
        except DeviceError as error:
            if not error.failures:
                raise
            failed = error
        suspects = np.flatnonzero(np.isin(self._read_of, [index for index, _ in failed.failures]))
        failures = yield from apart((part, self._parts.alone(part)) for part in suspects.tolist())
        return [(int(self._whose[part]), number) for part, number in failures]


class Flight:
    """Some units on their way together. Callers hold the store's lock."""

    def __init__(self, extents: ExtentIO) -> None:
        self.extents = extents
        self.flying: list[Flying] = []
        """Those that have not landed."""
        self.batches: list[PendingBatch] = []
        self.piece: BufferPiece | None = None
        self._began = 0.0
        self._all: list[Flying] = []
        self._requests: dict[int, _Requests] = {}

    @property
    def in_air(self) -> bool:
        """Whether the device may still write into its memory."""
        return not all(batch.done for batch in self.batches)

    def add(self, units: Sequence[Unit], frames: FrameArray, pool: FramePool) -> None:
        """More units. frames: taken for them from this pool, those of one behind the other's."""
        shapes = [self.extents.shape(each) for each in units]
        ends = np.cumsum([each.frames for each in shapes])
        begins = ends - [each.frames for each in shapes]
        added = [
            Flying(unit, shape, frames[begin:end].reshape(shape.heads, shape.pages))
            for unit, shape, begin, end in zip(
                units, shapes, begins.tolist(), ends.tolist(), strict=True
            )
        ]
        first = len(self._all)
        self._all += added
        self.flying += added
        runs = _runs(frames, ends)
        self._choose(added, np.bincount(runs.whose, minlength=len(added)), pool)
        offsets = [self._head(each, pool, first + i) for i, each in enumerate(added)]
        direct = np.array([not each.bounced for each in added])[runs.whose]
        whose = runs.whose[direct]
        at, lengths = runs.begins[direct], runs.lengths[direct] * pool.frame_bytes
        if not len(whose):
            return
        starts = frames[at] * pool.frame_bytes
        behind = (at - begins[whose]) * pool.frame_bytes
        arena = pool.arena
        places = np.array(offsets, np.int64)[whose] + behind
        self._of(arena).add(places, starts, lengths, whose + first)
        for each, start, length in zip(
            whose.tolist(), starts.tolist(), lengths.tolist(), strict=True
        ):
            added[each].payload.append(arena[start : start + length])

    def _choose(self, added: Sequence[Flying], runs: Int64Array, pool: FramePool) -> None:
        """Say which of them are read straight into their Frames. runs: how many these form."""
        unaligned = pool.frame_bytes % self.extents.device.block_bytes != 0
        for each, count in zip(added, runs.tolist(), strict=True):
            # The payload is the same bytes as the Frames where every Page is full.
            cut = each.shape.payload_bytes != each.shape.frames_bytes
            each.bounced = cut or unaligned or count > RUNS_MAX

    def _head(self, flying: Flying, pool: FramePool, whose: int) -> int:
        """Ask for its header where that is not known; returns where on the device its payload is.
        Where there is no room for a header, the unit goes through a bounce buffer."""
        unit = flying.unit
        extent = unit.segment.extents[unit.layer]
        assert extent is not None
        size = flying.shape.header_bytes
        if not flying.bounced and not self.extents.knows_header(unit):
            at = flying.header_at = pool.take_header()
            if at is None:
                flying.bounced = True
            else:
                flying.header = pool.arena[at : at + size]
                self._of(pool.arena).add([extent.offset], [at], [size], [whose])
        return extent.offset + size

    def _of(self, arena: ByteArray) -> _Requests:
        if id(arena) not in self._requests:
            self._requests[id(arena)] = _Requests(arena, self.batches)
        return self._requests[id(arena)]

    @property
    def bounce_bytes(self) -> int:
        """Bytes of the bounce buffer that this flight needs."""
        return sum(
            extent.length
            for each in self._all
            if each.bounced and (extent := each.unit.segment.extents[each.unit.layer])
        )

    def bounce(self, piece: BufferPiece) -> None:
        """Give it the bounce buffer that it needs."""
        self.piece = piece
        requests = self._requests[id(piece)] = _Requests(piece.memory, self.batches, piece)
        places = []
        for whose, each in enumerate(self._all):
            extent = each.unit.segment.extents[each.unit.layer]
            if each.bounced and extent is not None:
                places.append((extent.offset, extent.length, whose))
        start = 0
        for offset, length, whose in sorted(places):
            each = self._all[whose]
            block = piece.memory[start : start + length]
            head = each.shape.header_bytes
            each.header = None if self.extents.knows_header(each.unit) else block[:head]
            each.payload = [block[head : head + each.shape.payload_bytes]]
            requests.add([offset], [start], [length], [whose])
            start += length

    def starting(self, priority: Priority) -> Steps[None]:
        """Begin to read. Raises what `Device.start_read` raises."""
        self._began = time.monotonic()
        for requests in self._requests.values():
            yield from requests.starting(priority)

    @property
    def nbytes(self) -> int:
        """Bytes that it reads."""
        return sum(each.nbytes for each in self._requests.values())

    def landing(self) -> Steps[dict[Flying, int]]:
        """What could not be read, with its errno, once all batches are done. Raises DeviceError
        where the device as a whole fails."""
        failed: dict[Flying, int] = {}
        waited = self.in_air
        for requests in self._requests.values():
            for whose, number in (yield from requests.landing()):
                failed.setdefault(self._all[whose], number)
        self.extents.counters.bytes_read += self.nbytes
        if not failed:
            self.extents.flow.landed(self.nbytes, self._began, waited=waited)
        return failed

    def settling(self) -> Steps[None]:
        """Wait until the device writes into nothing of it any more, whatever came of it."""
        for batch in list(self.batches):
            try:
                yield Wait(batch)
            except DeviceError:
                # Whoever needs these bytes asks for them again.
                continue


class _Runs(NamedTuple):
    """Frames that follow each other within a unit: where in the array of Frames they begin, how
    many they are, and the index of the unit."""

    begins: Int64Array
    lengths: Int64Array
    whose: Int64Array


def _runs(frames: FrameArray, ends: Int64Array) -> _Runs:
    """ends: where in `frames` those of each unit end."""
    parted = np.diff(frames) != 1
    parted[ends[:-1] - 1] = True
    begins = np.flatnonzero(np.concatenate([[True], parted]))
    lengths = np.diff(begins, append=len(frames))
    return _Runs(begins, lengths, np.searchsorted(ends, begins, "right"))


class Flights:
    """What all flights into HOT hold. Callers hold the store's lock."""

    def __init__(self, residency: Residency, extents: ExtentIO) -> None:
        self.residency = residency
        self.extents = extents
        self.frames_bytes = 0
        """Bytes of the Frames of units on their way."""
        self._adrift: list[Flight] = []
        """Given up while the device still wrote into their memory."""

    def is_hot(self, unit: Unit) -> bool:
        return bool(self.residency.hot.pages[unit.layer, unit.segment.slot])

    def unit_bytes(self, unit: Unit) -> int:
        """Bytes of the Frames that a whole unit needs."""
        return self.extents.shape(unit).frames_bytes

    def add(self, flight: Flight, units: Sequence[Unit]) -> None:
        """Take Frames for units, for which there is room, and let this flight bring them. They are
        on the device (`ExtentIO.require_written`)."""
        tier = self.residency.hot.tier
        by_pool: dict[FramePool, list[Unit]] = {}
        for unit in units:
            by_pool.setdefault(tier.pool(unit.layer), []).append(unit)
        for pool, some in by_pool.items():
            shapes = [self.extents.shape(each) for each in some]
            frames = tier.take_each(some[0].layer, [each.frames for each in shapes])
            self.frames_bytes += sum(each.frames_bytes for each in shapes)
            flight.add(some, frames, pool)

    def check(self, flying: Flying) -> None:
        """Require that a unit that landed is what it should be, and have it in its Frames.

        Raises FormatError.
        """
        unit = flying.unit
        self.extents.check(unit, flying.header, flying.payload)
        if flying.bounced:
            [payload] = flying.payload
            pool = self.residency.hot.tier.memory(unit.layer)
            frames = torch.from_numpy(flying.frames)
            scatter(self.extents.typed(payload), flying.shape.layout, pool, frames)

    def arrive(self, flight: Flight, checked: Sequence[Flying]) -> None:
        """Units were checked: their Frames are HOT's copies from now on. Where somebody else
        brought one meanwhile they are given back."""
        hot = self.residency.hot
        late = [each for each in checked if self.is_hot(each.unit)]
        if late:
            self.give(flight, late)
            checked = [each for each in checked if not self.is_hot(each.unit)]
        self._leave(flight, checked)
        for each in checked:
            hot.put_unit(each.unit.layer, each.unit.segment.slot, each.frames)

    def give(self, flight: Flight, unwanted: Sequence[Flying]) -> None:
        """Give Frames back that HOT did not get."""
        self._leave(flight, unwanted)
        for each in unwanted:
            self.residency.hot.tier.give(each.unit.layer, each.frames.reshape(-1))

    def _leave(self, flight: Flight, some: Sequence[Flying]) -> None:
        if len(some) == len(flight.flying):
            flight.flying = []
        else:
            gone = {*some}
            flight.flying = [each for each in flight.flying if each not in gone]
        for each in some:
            self.frames_bytes -= each.shape.frames_bytes
            if each.header_at is not None:
                self.residency.hot.tier.pool(each.unit.layer).give_header(each.header_at)

    def give_up(self, flight: Flight) -> None:
        """Give back what a flight has, at once or when the device is done with it."""
        if flight.piece is not None:
            flight.piece.give_back()
        if flight.in_air:
            self._adrift.append(flight)
            return
        self.give(flight, flight.flying)

    def reap(self) -> bool:
        """Give back what flights had that were given up and are over. False: some are not."""
        if self._adrift:
            self.extents.device.poll()
            adrift, self._adrift = self._adrift, []
            for flight in adrift:
                self.give_up(flight)
        return not self._adrift

    def wait(self) -> None:
        """Return when all that was given up has come back."""
        while not self.reap():
            run(self._adrift[0].settling(), self.extents.device)
