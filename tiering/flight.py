"""Units on their way from the drive into Frames: what is asked of the device, and what came of it.

Pages are read straight into Frames where these are few runs of neighbours, and headers beside them;
else whole Extents go through a bounce buffer, those that touch as one request.

Invariants:
- What the device may still write into (Frames, header rooms, a bounce buffer) belongs to the flight
  and to nobody else until its batches are done.
- Bytes in Frames of a flight are unchecked: no TierMap has them.
"""

import time
from collections.abc import Iterable

import numpy as np
import torch

from kvtier.errors import DeviceError, FormatError
from kvtier.io.buffers import BufferPiece
from kvtier.io.device import Buffers, ByteArray, Int64Array, PendingBatch, Priority
from kvtier.io.ranges import merge_ranges
from kvtier.tiering.cargo import Cargo, Rows, stowed
from kvtier.tiering.extent_format import checksum_of_view
from kvtier.tiering.extent_io import ExtentIO, Unit, starts_of
from kvtier.tiering.frame_runs import FrameArray
from kvtier.tiering.frames import FramePool
from kvtier.tiering.packing import scatter
from kvtier.tiering.residency import Residency
from kvtier.tiering.steps import Read, Steps, Wait, apart, failures_of, run, started
from kvtier.tiering.units import Units

REQUEST_BYTES = 1 << 20
"""Extents that touch become one request up to this size."""


class _Requests:
    """Requests of a flight that fill one memory."""

    def __init__(
        self, memory: ByteArray, batches: list[PendingBatch], piece: BufferPiece | None = None
    ) -> None:
        """batches: where to note what is under way. piece: what `memory` is, if it is leased."""
        self.memory = memory
        self._batches = batches
        self._piece = piece
        self._rows: list[Rows] = []
        self.nbytes = 0
        """Bytes that they read, once they began."""
        self.batch: PendingBatch | None = None
        self._parts: Read | None = None
        self._read_of: Int64Array = np.zeros(0, np.int64)
        """By which read of the batch each part is filled."""
        self._whose: Int64Array = np.zeros(0, np.int64)

    def add(self, rows: Rows) -> None:
        """More of them."""
        self._rows.append(rows)

    def _used_by(self, batch: PendingBatch) -> None:
        self._batches.append(batch)
        if self._piece is not None:
            self._piece.used_by(batch)

    def starting(self, priority: Priority) -> Steps[None]:
        """Let them begin, in the order in which they lie on the device."""
        tables = [np.array(rows) for rows in self._rows]
        table = tables[0] if len(tables) == 1 else np.concatenate(tables, axis=1)
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
        failed = yield from failures_of(self.batch)
        if not failed:
            return []
        suspects = np.flatnonzero(np.isin(self._read_of, [index for index, _ in failed]))
        failures = yield from apart((part, self._parts.alone(part)) for part in suspects.tolist())
        return [(int(self._whose[part]), number) for part, number in failures]


class Flight:
    """Some units on their way together, by numbers. Callers hold the store's lock."""

    def __init__(self, extents: ExtentIO) -> None:
        self.extents = extents
        self.cargo: list[Cargo] = []
        self.batches: list[PendingBatch] = []
        self.piece: BufferPiece | None = None
        self._began = 0.0
        self._count = 0
        self._requests: dict[int, _Requests] = {}

    @property
    def in_air(self) -> bool:
        """Whether the device may still write into its memory."""
        return not all(batch.done for batch in self.batches)

    def add(self, units: Units, frames: FrameArray, pool: FramePool) -> None:
        """More units. frames: taken for them from this pool, those of one behind the other's."""
        cargo = stowed(self._count, units, frames, pool, self.extents)
        self.cargo.append(cargo)
        self._count += len(units)
        if cargo.headers:
            self._of(pool.arena).add(cargo.header_requests())
        if not cargo.bounced.all():
            self._of(pool.arena).add(cargo.payload_requests())

    def _of(self, arena: ByteArray) -> _Requests:
        if id(arena) not in self._requests:
            self._requests[id(arena)] = _Requests(arena, self.batches)
        return self._requests[id(arena)]

    def unit(self, number: int) -> Unit:
        """One of its units."""
        cargo = next(each for each in reversed(self.cargo) if each.first <= number)
        return cargo.units[number - cargo.first]

    @property
    def bounce_bytes(self) -> int:
        """Bytes of the bounce buffer that this flight needs."""
        return sum(int(each.sizes.extent_bytes[each.bounced].sum()) for each in self.cargo)

    def bounce(self, piece: BufferPiece) -> None:
        """Give it the bounce buffer that it needs."""
        self.piece = piece
        requests = self._requests[id(piece)] = _Requests(piece.memory, self.batches, piece)
        which = [each.bounced.nonzero()[0] for each in self.cargo]
        some = list(zip(self.cargo, which, strict=True))
        places = np.concatenate([each.places[own] for each, own in some])
        lengths = np.concatenate([each.sizes.extent_bytes[own] for each, own in some])
        numbers = np.concatenate([own + each.first for each, own in some])
        order = places.argsort()
        starts = np.empty(len(order), np.int64)
        starts[order] = starts_of(lengths[order])
        requests.add((places, starts, lengths, numbers))
        for each, own in some:
            each.bounced_at[own], starts = starts[: len(own)], starts[len(own) :]

    def starting(self, priority: Priority) -> Steps[None]:
        """Begin to read. Raises what `Device.start_read` raises."""
        self._began = time.monotonic()
        for requests in self._requests.values():
            yield from requests.starting(priority)

    @property
    def nbytes(self) -> int:
        """Bytes that it reads."""
        return sum(each.nbytes for each in self._requests.values())

    def landing(self) -> Steps[dict[int, int]]:
        """The numbers of units that could not be read, with the errno of each, once all batches are
        done. Raises DeviceError where the device as a whole fails."""
        failed: dict[int, int] = {}
        waited = self.in_air
        for requests in self._requests.values():
            for whose, number in (yield from requests.landing()):
                failed.setdefault(whose, number)
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


class Flights:
    """What all flights into HOT hold. Callers hold the store's lock."""

    def __init__(self, residency: Residency, extents: ExtentIO) -> None:
        self.residency = residency
        self.extents = extents
        self.frames_bytes = 0
        """Bytes of the Frames of units on their way."""
        self._adrift: list[Flight] = []
        """Given up while the device still wrote into their memory."""
        self._widths = [each.row_width for each in extents.geometry.layers]

    def is_hot(self, unit: Unit) -> bool:
        return bool(self.residency.hot.pages[unit.layer, unit.segment.slot])

    def unit_bytes(self, unit: Unit) -> int:
        """Bytes of the Frames that a whole unit needs."""
        return self.extents.shape(unit).frames_bytes

    def add(self, flight: Flight, units: Units) -> None:
        """Take Frames for units, for which there is room, and let this flight bring them. They are
        on the device (`ExtentIO.require_written`)."""
        tier = self.residency.hot.tier
        parts = [units]
        if len({*self._widths}) > 1:
            # Layers of one width share a pool.
            widths = np.array(self._widths)[units.layers]
            parts = [units.those(widths == each) for each in dict.fromkeys(widths.tolist())]
        for some in parts:
            layer = int(some.layers[0])
            pool = tier.pool(layer)
            frames = tier.take_each(layer, self.extents.sizes(some).frames.tolist())
            self.frames_bytes += len(frames) * pool.frame_bytes
            flight.add(some, frames, pool)

    def check(
        self, flight: Flight, cargo: Cargo, indices: Iterable[int]
    ) -> tuple[int, FormatError] | None:
        """Require of units that landed that they are what they should be, and have them in their
        Frames; those are noted as sound. Returns the first that is not, and the error."""
        units, starts, sound = cargo.units, cargo.starts, cargo.sound
        segments, layers = units.segments, units.layers.tolist()
        lengths = cargo.sizes.payload_bytes.tolist()
        arena = cargo.pool.arena.data
        for index in indices:
            segment, start = segments[index], starts[index]
            if start < 0:
                try:
                    self._check_singly(flight, cargo, index)
                except FormatError as error:
                    return index, error
            else:
                view = arena[start : start + lengths[index]]
                found = checksum_of_view(view, segment.generation)
                if found != segment.payload_checksums[layers[index]]:
                    return index, self.extents.payload_damaged(units[index])
            sound.append(index)
        return None

    def _check_singly(self, flight: Flight, cargo: Cargo, index: int) -> None:
        """The same of one whose bytes are not in one piece of the arena. Raises FormatError."""
        unit, extents = cargo.units[index], self.extents
        shape = extents.shape(unit)
        header: ByteArray | None = None
        if not cargo.bounced[index]:
            arena, at = cargo.pool.arena, cargo.headers.get(index)
            if at is not None:
                header = arena[at : at + shape.header_bytes]
            extents.check(unit, header, [arena[piece] for piece in cargo.pieces(index)])
            return
        assert flight.piece is not None
        block = flight.piece.memory[int(cargo.bounced_at[index]) :]
        if not extents.knows_header(unit):
            header = block[: shape.header_bytes]
        payload = block[shape.header_bytes : shape.header_bytes + shape.payload_bytes]
        extents.check(unit, header, [payload])
        frames = torch.from_numpy(cargo.frames_of(index).reshape(shape.heads, shape.pages))
        scatter(extents.typed(payload), shape.layout, cargo.pool.memory, frames)

    def arrive(self, flight: Flight) -> None:
        """What is sound is HOT's from now on. Where somebody else brought a unit meanwhile, its
        Frames are given back."""
        hot = self.residency.hot
        for cargo in flight.cargo:
            if not cargo.sound:
                continue
            some, cargo.sound = np.array(cargo.sound, np.int64), []
            layers, slots = cargo.units.layers[some], cargo.units.slots[some]
            begins, counts = cargo.begins[some], cargo.sizes.frames[some]
            self._leave(cargo, some)
            taken = hot.put_units(layers, slots, cargo.frames, begins, counts)
            if not taken.all():
                for index in some[~taken].tolist():
                    hot.tier.give(int(cargo.units.layers[index]), cargo.frames_of(index))

    def _leave(self, cargo: Cargo, some: Int64Array) -> None:
        """Frames of these units are not their flight's any more."""
        assert cargo.held[some].all()
        cargo.held[some] = False
        self.frames_bytes -= int(cargo.sizes.frames_bytes[some].sum())
        if cargo.headers:
            for index in some.tolist():
                room = cargo.headers.pop(index, None)
                if room is not None:
                    cargo.pool.give_header(room)

    def give_up(self, flight: Flight) -> None:
        """Give back what a flight has, at once or when the device is done with it."""
        if flight.piece is not None:
            flight.piece.give_back()
        if flight.in_air:
            self._adrift.append(flight)
            return
        for cargo in flight.cargo:
            if cargo.held.any():
                frames = cargo.held_frames()
                self._leave(cargo, cargo.held.nonzero()[0])
                self.residency.hot.tier.give(int(cargo.units.layers[0]), frames)

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
