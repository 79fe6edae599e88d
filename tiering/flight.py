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
from kvtier.tiering.extent_io import ExtentIO, Unit, batches
from kvtier.tiering.packing import scatter
from kvtier.tiering.residency import Residency
from kvtier.tiering.steps import Read, Steps, Wait, apart, failures_of, run, started
from kvtier.tiering.units import Units

REQUEST_BYTES = 1 << 20
"""Extents that touch become one request up to this size."""


class _Requests:
    """Requests of a flight that fill one memory, in the order in which they lie on the device."""

    def __init__(
        self,
        memory: ByteArray,
        rows: Rows,
        batches: list[PendingBatch],
        piece: BufferPiece | None = None,
    ) -> None:
        """batches: where to note what is under way. piece: what `memory` is, if it is leased."""
        self._whose = rows.whose
        self._batches = batches
        self._piece = piece
        self._parts = Read(rows.offsets, Buffers(memory, rows.starts, rows.lengths), self._used_by)
        self.nbytes = int(rows.lengths.sum())
        """Bytes that they read."""
        self.batch: PendingBatch | None = None
        self._read_of: Int64Array | None = None
        """By which read of the batch each part is filled; None: each by its own."""

    def _used_by(self, batch: PendingBatch) -> None:
        self._batches.append(batch)
        if self._piece is not None:
            self._piece.used_by(batch)

    def starting(self, priority: Priority) -> Steps[None]:
        """Let them begin."""
        read = self._parts
        if self._piece is not None:
            # Extents lie in the bounce buffer as they lie on the device.
            merged = merge_ranges(read.offsets, read.buffers.lengths, 0, REQUEST_BYTES)
            first = np.searchsorted(merged.index, np.arange(len(merged.offsets)))
            memory, starts = read.buffers.memory, read.buffers.starts[first]
            read = Read(merged.offsets, Buffers(memory, starts, merged.lengths), self._used_by)
            self._read_of = merged.index
        self.batch = yield from started(read, priority)

    def landing(self) -> Steps[list[tuple[int, int]]]:
        """(whose, errno) of what cannot be read, once they are done. Raises DeviceError where the
        device as a whole fails."""
        assert self.batch is not None
        failed = yield from failures_of(self.batch)
        if not failed:
            return []
        suspects = [index for index, _ in failed]
        if self._read_of is not None:
            suspects = np.flatnonzero(np.isin(self._read_of, suspects)).tolist()
        failures = yield from apart((part, self._parts.alone(part)) for part in suspects)
        return [(int(self._whose[part]), number) for part, number in failures]


class Flight:
    """Some units of a Cargo on their way together. Callers hold the store's lock."""

    def __init__(self, cargo: Cargo, own: slice, rows: Rows, extents: ExtentIO) -> None:
        """own: which of the units. rows: what is read straight into the arena for them."""
        self.cargo = cargo
        self.own = own
        self.extents = extents
        self.batches: list[PendingBatch] = []
        self.piece: BufferPiece | None = None
        self._began = 0.0
        self._requests: list[_Requests] = []
        if len(rows.whose):
            self._requests.append(_Requests(cargo.pool.arena, rows, self.batches))

    @property
    def in_air(self) -> bool:
        """Whether the device may still write into its memory."""
        return not all(batch.done for batch in self.batches)

    @property
    def bounce_bytes(self) -> int:
        """Bytes of the bounce buffer that it needs."""
        bounced = self.cargo.bounced[self.own]
        if not bounced.any():
            return 0
        return int(self.cargo.sizes.extent_bytes[self.own][bounced].sum())

    def bounce(self, piece: BufferPiece) -> None:
        """Give it the bounce buffer that it needs."""
        self.piece = piece
        rows = self.cargo.bounced_requests(self.own)
        self._requests.append(_Requests(piece.memory, rows, self.batches, piece))

    def held(self) -> Int64Array:
        """Indices, in its Cargo, of its units that are held."""
        held: Int64Array = self.cargo.held[self.own].nonzero()[0] + self.own.start
        return held

    def starting(self, priority: Priority) -> Steps[None]:
        """Begin to read. Raises what `Device.start_read` raises."""
        self._began = time.monotonic()
        for requests in self._requests:
            yield from requests.starting(priority)

    def landing(self) -> Steps[dict[int, int]]:
        """By index in its Cargo, the errno of each unit that could not be read, once all batches
        are done. Raises DeviceError where the device as a whole fails."""
        failed: dict[int, int] = {}
        waited = self.in_air
        for requests in self._requests:
            for whose, number in (yield from requests.landing()):
                failed.setdefault(whose, number)
        nbytes = sum([each.nbytes for each in self._requests])
        self.extents.counters.bytes_read += nbytes
        if not failed:
            self.extents.flow.landed(nbytes, self._began, waited=waited)
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

    def add(self, units: Units, batch_bytes: int = 1 << 62) -> list[Flight]:
        """Take Frames for units, for which there is room, and plan how they are brought: by one
        Cargo for each pool, in flights of at most batch_bytes, or of one unit. They are on the
        device (`ExtentIO.require_written`)."""
        tier = self.residency.hot.tier
        parts = [units]
        if len({*self._widths}) > 1:
            # Layers of one width share a pool.
            widths = np.array(self._widths)[units.layers]
            parts = [units.those(widths == each) for each in dict.fromkeys(widths.tolist())]
        flights: list[Flight] = []
        for some in parts:
            layer = int(some.layers[0])
            pool = tier.pool(layer)
            sizes = self.extents.sizes(some)
            frames = tier.take_each(layer, sizes.frames.tolist())
            self.frames_bytes += len(frames) * pool.frame_bytes
            cargo = stowed(some, frames, pool, self.extents)
            own = list(batches(sizes.extent_bytes.tolist(), batch_bytes))
            rows = cargo.requests(own)
            flights += [Flight(cargo, *each, self.extents) for each in zip(own, rows, strict=True)]
        return flights

    def check(self, flight: Flight, indices: Iterable[int]) -> tuple[int, FormatError] | None:
        """Require of units that landed that they are what they should be, and have them in their
        Frames; those are noted as sound. Returns the first that is not, and the error."""
        cargo = flight.cargo
        segments, layers = cargo.units.segments, cargo.layers
        starts, lengths, sound = cargo.starts, cargo.payload_bytes, cargo.sound
        arena = cargo.pool.arena.data
        for index in indices:
            start = starts[index]
            if start < 0:
                try:
                    self._check_singly(flight, index)
                except FormatError as error:
                    return index, error
            else:
                segment = segments[index]
                view = arena[start : start + lengths[index]]
                found = checksum_of_view(view, segment.generation)
                if found != segment.payload_checksums[layers[index]]:
                    return index, self.extents.payload_damaged(cargo.units[index])
            sound.append(index)
        return None

    def _check_singly(self, flight: Flight, index: int) -> None:
        """The same of one whose bytes are not in one piece of the arena. Raises FormatError."""
        cargo, extents = flight.cargo, self.extents
        unit = cargo.units[index]
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

    def arrive(self, cargo: Cargo) -> None:
        """What is sound is HOT's from now on. Where somebody else brought a unit meanwhile, its
        Frames are given back."""
        if not cargo.sound:
            return
        hot = self.residency.hot
        some, cargo.sound = np.array(cargo.sound, np.int64), []
        layers, slots = cargo.units.layers[some], cargo.units.slots[some]
        begins, counts = cargo.begins[some], cargo.sizes.frames[some]
        self._leave(cargo, some)
        taken = hot.put_units(layers, slots, cargo.frames, begins, counts)
        if not taken.all():
            for index in some[~taken].tolist():
                hot.tier.give(cargo.layers[index], cargo.frames_of(index))

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
        held = flight.held()
        if len(held):
            cargo = flight.cargo
            self._leave(cargo, held)
            self.residency.hot.tier.give(cargo.layers[0], cargo.frames_of_all(held))

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
