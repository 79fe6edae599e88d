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
from kvtier.io.extent import Extent
from kvtier.io.ranges import merge_ranges
from kvtier.tiering.extent_io import ExtentIO, Unit, UnitShape, starts_of
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
    extent: Extent
    frames: FrameArray
    bounced: bool
    """The payload is not in the Frames yet."""
    header: ByteArray | None = None
    """What will be its header; None: what it says is known."""
    header_at: int | None = None
    """The header's room in the pool of its Frames."""
    payload: list[ByteArray] = field(default_factory=list)
    """What will be its payload, in this order."""


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
        """Bytes that they read, once they began."""
        self.batch: PendingBatch | None = None
        self._parts: Read | None = None
        self._read_of: Int64Array = np.zeros(0, np.int64)
        """By which read of the batch each part is filled."""
        self._whose: Int64Array = np.zeros(0, np.int64)

    def add(self, *rows: Int64Array | Sequence[int]) -> None:
        """rows: offsets on the device, starts in memory, lengths, and whose they are."""
        self._rows.append(np.array(rows, np.int64))

    def _used_by(self, batch: PendingBatch) -> None:
        self._batches.append(batch)
        if self._piece is not None:
            self._piece.used_by(batch)

    def starting(self, priority: Priority) -> Steps[None]:
        """Let them begin, in the order in which they lie on the device."""
        table = np.concatenate(self._rows, axis=1)
        offsets, starts, lengths, self._whose = table[:, table[0].argsort()]
        self.nbytes = int(lengths.sum())
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

    def add(
        self,
        units: Sequence[Unit],
        shapes: Sequence[UnitShape],
        frames: FrameArray,
        pool: FramePool,
    ) -> None:
        """More units, of these shapes. frames: taken for them from this pool, those of one behind
        the other's."""
        counts = np.array([each.frames for each in shapes], np.int64)
        begins = starts_of(counts)
        runs = _runs(frames, begins)
        bounced = self._bounced(shapes, runs, pool)
        added = [
            Flying(
                unit,
                shape,
                self.extents.extent(unit),
                frames[at : at + shape.frames].reshape(shape.heads, shape.pages),
                by,
            )
            for unit, shape, at, by in zip(units, shapes, begins.tolist(), bounced, strict=True)
        ]
        first = len(self._all)
        self._all += added
        self.flying += added
        self._add_heads(added, pool, first)
        direct = ~np.array([each.bounced for each in added])[runs.whose]
        whose = runs.whose[direct]
        if not len(whose):
            return
        at, lengths = runs.begins[direct], runs.lengths[direct] * pool.frame_bytes
        starts = frames[at] * pool.frame_bytes
        payloads = [each.extent.offset + each.shape.header_bytes for each in added]
        places = np.array(payloads, np.int64)[whose] + (at - begins[whose]) * pool.frame_bytes
        self._of(pool.arena).add(places, starts, lengths, whose + first)
        ends = (starts + lengths).tolist()
        for each, start, end in zip(whose.tolist(), starts.tolist(), ends, strict=True):
            added[each].payload.append(pool.arena[start:end])

    def _bounced(self, shapes: Sequence[UnitShape], runs: "_Runs", pool: FramePool) -> list[bool]:
        """Which of the units are not read straight into their Frames, which form these runs."""
        if pool.frame_bytes % self.extents.device.block_bytes:
            return [True] * len(shapes)
        # The payload is the same bytes as the Frames where every Page is full.
        return [
            count > RUNS_MAX or shape.payload_bytes != shape.frames_bytes
            for shape, count in zip(shapes, np.bincount(runs.whose).tolist(), strict=True)
        ]

    def _add_heads(self, added: Sequence[Flying], pool: FramePool, first: int) -> None:
        """Ask for headers that are not known, where the payload does not bring them along. Where
        there is no room for a header, its unit goes through a bounce buffer. first: the index of
        the first unit."""
        rows: list[tuple[int, int, int, int]] = []
        for whose, each in enumerate(added, first):
            if each.bounced or self.extents.knows_header(each.unit):
                continue
            at = each.header_at = pool.take_header()
            if at is None:
                each.bounced = True
                continue
            size = each.shape.header_bytes
            each.header = pool.arena[at : at + size]
            rows.append((each.extent.offset, at, size, whose))
        if rows:
            self._of(pool.arena).add(*zip(*rows, strict=True))

    def _of(self, arena: ByteArray) -> _Requests:
        if id(arena) not in self._requests:
            self._requests[id(arena)] = _Requests(arena, self.batches)
        return self._requests[id(arena)]

    @property
    def bounce_bytes(self) -> int:
        """Bytes of the bounce buffer that this flight needs."""
        return sum([each.extent.length for each in self._all if each.bounced])

    def bounce(self, piece: BufferPiece) -> None:
        """Give it the bounce buffer that it needs."""
        self.piece = piece
        requests = self._requests[id(piece)] = _Requests(piece.memory, self.batches, piece)
        places = [
            (each.extent.offset, each.extent.length, whose)
            for whose, each in enumerate(self._all)
            if each.bounced
        ]
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


def _runs(frames: FrameArray, firsts: Int64Array) -> _Runs:
    """firsts: where in `frames` those of each unit begin."""
    parted = np.empty(len(frames), np.bool_)
    parted[1:] = frames[1:] != frames[:-1] + 1
    parted[firsts] = True
    begins = parted.nonzero()[0]
    ends = np.concatenate((begins[1:], [len(frames)]))
    return _Runs(begins, ends - begins, firsts.searchsorted(begins, "right") - 1)


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
        pools = {layer: tier.pool(layer) for layer in {each.layer for each in units}}
        for pool in dict.fromkeys(pools.values()):
            some = [each for each in units if pools[each.layer] is pool]
            shapes = [self.extents.shape(each) for each in some]
            frames = tier.take_each(some[0].layer, [each.frames for each in shapes])
            self.frames_bytes += len(frames) * pool.frame_bytes
            flight.add(some, shapes, frames, pool)

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
        self._leave(flight, checked)
        for each in checked:
            if not hot.put_unit(each.unit.layer, each.unit.segment.slot, each.frames):
                hot.tier.give(each.unit.layer, each.frames.reshape(-1))

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
