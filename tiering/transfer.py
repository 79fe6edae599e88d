"""Brings Pages into HOT, from HOST, from the drive and from a model's tensors.

Invariants:
- Room is made, and Frames are taken, before bytes are read; a unit is in HOT whole or not at all.
- Frames of units on their way are in no TierMap, and belong to their Flight. They go back when the
  load ends early, but not before the device is done with them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain

import numpy as np
import torch

from kvtier.errors import CapacityError, FormatError
from kvtier.tiering.ahead import ReadAhead
from kvtier.tiering.extent_io import ExtentIO, Unit, batches
from kvtier.tiering.extent_writer import UnitWrite
from kvtier.tiering.flight import Flight, Flights, Flying
from kvtier.tiering.frames import bits_of
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry, pages_of
from kvtier.tiering.packing import gather, pack, rearranged, scatter
from kvtier.tiering.residency import NO_FRAME, Residency, SlotArray
from kvtier.tiering.room import Newcomers, Room, move_up
from kvtier.tiering.segment import Segment
from kvtier.tiering.sequence import Sequence as Stream
from kvtier.tiering.steps import Pause, Reading, Steps, run

HEAVY_BYTES = 1 << 20
"""A unit larger than this takes a millisecond or so to check and copy."""
HEAVY_BYTES_IN_PLACE = 8 << 20
"""The same where it need not be copied."""
TURN_BYTES = 1 << 20
"""Bytes of units that are checked, where others wait for their turn, before it is theirs."""


def _places(units: Sequence[Unit]) -> tuple[SlotArray, SlotArray]:
    """Layers and slots of units."""
    layers = np.array([unit.layer for unit in units], np.int64)
    return layers, np.array([unit.segment.slot for unit in units], np.int64)


class Mover:
    """Applies movements between HOT, HOST and NVME. Callers hold the store's lock."""

    def __init__(
        self, geometry: Geometry, residency: Residency, room: Room, extents: ExtentIO
    ) -> None:
        self.geometry = geometry
        self.residency = residency
        self.room = room
        self.extents = extents
        self.flights = Flights(residency, extents)
        self.ahead = ReadAhead(self.flights, room)

    @property
    def flying_bytes(self) -> int:
        """Bytes of the Frames of units on their way, but for those read ahead."""
        self.flights.reap()
        return self.flights.frames_bytes - self.ahead.air_bytes

    # ---- into HOT ---------------------------------------------------------------------------

    def load(self, units: Sequence[Unit], *, idle_only: bool = False) -> int:
        """Bring whole units into HOT, in order; returns how many are there when it ends.

        Stops early where HOT has no room (with idle_only: none that is free or idle). Raises
        FormatError or DeviceError for bytes that cannot be had, after marking their Segments.
        """
        layers, slots = _places(units)
        done = len(units)
        if not self.residency.hot.pages[layers, slots].all():
            loading = self.loading(units, self.extents.blocking, idle_only=idle_only)
            done = run(loading, self.extents.device)
        self.ahead.used(layers[:done], slots[:done])
        self.residency.touch(layers[:done], slots[:done])
        return done

    def touch(self, units: Sequence[Unit]) -> None:
        """These units are used now."""
        self.residency.touch(*_places(units))

    def lease(self, units: Sequence[Unit]) -> AbstractContextManager[None]:
        """A promise not to evict these while the block runs."""
        return self.residency.lease(*_places(units))

    # ---- read ahead -------------------------------------------------------------------------

    def read_on(self, stream: Stream, layer: int, rest: Iterable[Unit]) -> None:
        """While a part of a layer is attended to, which is leased: begin to read the `rest` of it,
        and then the layers behind it, as far as there is room."""
        self.ahead.go_on(chain(rest, self._behind(stream, layer)))

    def read_on_behind(self, stream: Stream, layer: int, slots: SlotArray) -> None:
        """The same while all of a layer, in HOT at these slots, is attended to."""
        if self.ahead.held_bytes:
            self.ahead.used(np.full(len(slots), layer), slots)
        if stream.all_hot_at != (stream.views, sum(self.residency.hot.drops)):
            with self.residency.lease(np.full(len(slots), layer), slots):
                self.read_on(stream, layer, ())

    def _behind(self, stream: Stream, layer: int) -> Iterator[Unit]:
        """What HOT lacks of the layers behind this one: behind the last come those of the next
        step, and at the end this one."""
        hot, views = self.residency.hot, stream.views
        now = views, sum(hot.drops)
        if not views or stream.all_hot_at == now:
            return
        slots = np.array([view.segment.slot for view in views], np.int64)
        ends = np.array([view.end for view in views], np.int64)
        some = False
        count = len(self.geometry.layers)
        for behind in [*range(layer + 1, count), *range(layer + 1)]:
            first = self.geometry.layers[behind].first_seen(stream.length(behind))
            missing = (hot.pages[behind, slots] == 0) & (ends > first)
            for index in np.flatnonzero(missing).tolist():
                some = True
                yield Unit(views[index].segment, behind)
        if not some:
            stream.all_hot_at = now

    # ---- into HOT, in steps -----------------------------------------------------------------

    def loading(self, units: Sequence[Unit], reading: Reading, *, idle_only: bool) -> Steps[int]:
        """What `load` does, in steps. Callers see to it that their Segments keep their slots."""
        yield from self.ahead.landing(units)
        sizes = [
            extent.length if (extent := unit.segment.extents[unit.layer]) else 0 for unit in units
        ]
        done = 0
        flights: deque[Flight] = deque()
        # Making room for a later unit must not evict an earlier one.
        with ExitStack() as leases:
            try:
                for part in batches(sizes, reading.batch_bytes, reading.units_max):
                    yield Pause.SHORT
                    while len(flights) >= reading.flights_max:
                        yield from self._land(flights, reading)
                    flights.append(Flight(self.extents))
                    secured = self._secure(units[part], flights[-1], leases, reading, idle_only)
                    yield from self._begin(flights, reading)
                    done += secured
                    if secured < part.stop - part.start:
                        break
                while flights:
                    yield from self._land(flights, reading)
            except GeneratorExit:
                raise
            except BaseException:
                # Whoever comes next finds their Frames free again.
                for flight in flights:
                    yield from flight.settling()
                raise
            finally:
                for flight in flights:
                    self.flights.give_up(flight)
        return done

    def _secure(
        self,
        units: Sequence[Unit],
        flight: Flight,
        leases: ExitStack,
        reading: Reading,
        idle_only: bool,
    ) -> int:
        """Have units in HOT, or with Frames in `flight`; returns for how many there is room."""
        residency = self.residency
        layers, slots = _places(units)
        there = residency.hot.pages[layers, slots].tolist()
        absent = [unit for unit, pages in zip(units, there, strict=True) if not pages]
        self.extents.require_written(self._not_in_host(absent))
        total = sum([self.flights.unit_bytes(each) for each in absent])
        newcomers = (layers, slots) if idle_only else None
        count = len(units)
        with ExitStack() as kept:
            kept.enter_context(residency.lease(layers, slots))
            if self._has_room(total, reading, newcomers):
                self._bring(absent, flight)
            else:
                # One after the other, as far as it goes: later units may have to leave.
                kept.close()
                count = self._secure_singly(units, flight, kept, reading, newcomers)
            if not reading.shared:
                # What is shared is not leased: a lease would last until others had their turn.
                leases.enter_context(kept.pop_all())
        if reading.shared:
            residency.touch(layers[:count], slots[:count])
        return count

    def _secure_singly(
        self,
        units: Sequence[Unit],
        flight: Flight,
        kept: ExitStack,
        reading: Reading,
        newcomers: Newcomers | None,
    ) -> int:
        for index, unit in enumerate(units):
            kept.enter_context(self.residency.lease(*_places([unit])))
            if self.flights.is_hot(unit):
                continue
            if not self._has_room(self.flights.unit_bytes(unit), reading, newcomers):
                return index
            self._bring([unit], flight)
        return len(units)

    def _bring(self, units: Sequence[Unit], flight: Flight) -> None:
        """Have units in HOT, where there is room for them, or with Frames in `flight`."""
        lower = self._not_in_host(units)
        if len(lower) < len(units):
            for unit in units:
                if self.residency.host.pages[unit.layer, unit.segment.slot]:
                    move_up(unit.layer, unit.segment.slot, self.residency)
        self.flights.add(flight, lower)

    def _not_in_host(self, units: Sequence[Unit]) -> Sequence[Unit]:
        host = self.residency.host
        if not host.tier.used_bytes:
            return units
        return [each for each in units if not host.pages[each.layer, each.segment.slot]]

    def _has_room(self, needed_bytes: int, reading: Reading, newcomers: Newcomers | None) -> bool:
        return needed_bytes <= reading.spare_bytes() and self.make_room(needed_bytes, newcomers)

    def _begin(self, flights: "deque[Flight]", reading: Reading) -> Steps[None]:
        """Let the last flight begin. While there is no buffer for it, others land."""
        flight = flights[-1]
        needed = flight.bounce_bytes
        if needed:
            while (piece := reading.buffers.take(needed)) is None and len(flights) > 1:
                yield from self._land(flights, reading)
            flight.bounce(piece or (yield from reading.piece(needed)))
        yield from flight.starting(reading.priority)

    def _land(self, flights: "deque[Flight]", reading: Reading) -> Steps[None]:
        """Wait for the first flight, and bring its units into HOT."""
        flight = flights[0]
        failed = yield from flight.landing()
        if failed:
            raise self.extents.blame_unread([(each.unit, errno) for each, errno in failed.items()])
        checked: list[Flying] = []
        try:
            yield from self._check(flight, checked, reading)
        finally:
            # Also where one of them is damaged, or the work is given up: the others are read.
            self.flights.arrive(flight, checked)
        if reading.shared:
            self.residency.touch(*_places([each.unit for each in checked]))
        self.flights.give_up(flights.popleft())

    def _check(self, flight: Flight, checked: list[Flying], reading: Reading) -> Steps[None]:
        """Check what a flight brought, and note in `checked` what is sound."""
        nbytes = 0
        for each in flight.flying:
            if reading.shared:
                size = each.shape.frames_bytes
                nbytes += size
                if size > (HEAVY_BYTES if each.bounced else HEAVY_BYTES_IN_PLACE):
                    yield Pause.HEAVY
                elif nbytes > TURN_BYTES:
                    yield Pause.SHORT
                    nbytes = size
                if self.flights.is_hot(each.unit):
                    # Somebody else brought it meanwhile.
                    continue
            try:
                self.flights.check(each)
            except FormatError as error:
                self.extents.blame_damaged(each.unit, error)
                raise
            checked.append(each)

    def make_room(self, needed_bytes: int, newcomers: Newcomers | None = None) -> bool:
        """What `Room.make` does, at the cost of what was read ahead if need be: its Frames are
        waited for. newcomers: what must not cost anybody who is in use, nor that."""
        all_back = self.flights.reap()
        if self.room.make(needed_bytes, idle_only=newcomers is not None, newcomers=newcomers):
            return True
        if newcomers is not None or (all_back and not self.ahead.held_bytes):
            return False
        self.ahead.give_up()
        self.flights.wait()
        return self.room.make(needed_bytes)

    # ---- Frames -----------------------------------------------------------------------------

    def keep(self, write: UnitWrite, *, idle_only: bool) -> None:
        """Have a unit that was just written in HOT as well, where there can be room for it (with
        idle_only: where that costs only idle Pages)."""
        unit = write.unit
        if not self.room.make(self.flights.unit_bytes(unit), idle_only=idle_only):
            return
        self._place_tensors(write)
        self.touch([unit])

    def reorder(self, write: UnitWrite) -> None:
        """Bring the Frames of a unit that was written from a Tail into the order it was written
        in, so that a Page is the same Page in every tier."""
        if write.unit.segment.orders[write.unit.layer] is not None:
            self.residency.hot.drop(write.unit.layer, write.unit.segment.slot)
            self._place_tensors(write)

    def _place_tensors(self, write: UnitWrite) -> None:
        """Copy a whole unit into new Frames, which are HOT's copy from now on."""
        unit, hot = write.unit, self.residency.hot
        shape = self.extents.shape(unit)
        packed = write.keys.new_empty(write.keys.numel() + write.values.numel())
        pack(write.keys, write.values, unit.segment.orders[unit.layer], packed)
        frames = hot.tier.take(unit.layer, shape.frames).reshape(shape.heads, shape.pages)
        scatter(packed, shape.layout, hot.tier.memory(unit.layer), torch.from_numpy(frames))
        hot.put(unit.layer, unit.segment.slot, 0, frames)

    # ---- Frames of a Tail -------------------------------------------------------------------

    def append(self, segment: Segment, layer: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Write tokens [heads, n, Dk] and [heads, n, Dv] behind those a growing unit has; returns
        how many bytes of Frames it took for them.

        Raises CapacityError when HOT cannot make room.
        """
        hot = self.residency.hot
        shape = self.geometry.layers[layer]
        first = segment.filled[layer]
        last = first + keys.shape[1]
        have = int(hot.pages[layer, segment.slot]) // shape.kv_heads
        missing = pages_of(last) - have
        needed = 0
        if missing > 0:
            needed = missing * shape.kv_heads * int(self.room.frame_bytes[layer])
            if not self.make_room(needed):
                tier = hot.tier
                raise CapacityError(tier.name, needed, tier.free_bytes, tier.limit_bytes)
            taken = hot.tier.take(layer, shape.kv_heads * missing)
            hot.put(layer, segment.slot, have, taken.reshape(shape.kv_heads, missing))
        key_rows, value_rows = hot.tier.token_rows(layer)
        key_bits, value_bits = bits_of(keys), bits_of(values)
        if last - first == 1:
            # A step of a decode: no arrays of places.
            page, place = divmod(first, PAGE_TOKENS)
            frames = hot.frames[layer][segment.slot, :, page]
            key_rows[frames, place] = key_bits[:, 0]
            value_rows[frames, place] = value_bits[:, 0]
        else:
            places = np.arange(first, last)
            frames = hot.frames[layer][segment.slot][:, places // PAGE_TOKENS]
            key_rows[frames, places % PAGE_TOKENS] = key_bits
            value_rows[frames, places % PAGE_TOKENS] = value_bits
        segment.filled[layer] = last
        return needed

    def tensors(self, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that a unit has in HOT, in the order of positions."""
        hot = self.residency.hot
        tokens = unit.segment.filled[unit.layer]
        frames = hot.frames[unit.layer][unit.segment.slot, :, : pages_of(tokens)]
        assert (frames != NO_FRAME).all()
        index = torch.from_numpy(frames.astype(np.int64))
        keys, values = gather(
            hot.tier.memory(unit.layer), index, self.geometry.layers[unit.layer], tokens
        )
        order = unit.segment.orders[unit.layer]
        if order is None:
            return keys, values
        # A unit that was written lies in the order that its placement chose.
        places = np.argsort(order, axis=1)
        return rearranged(keys, places), rearranged(values, places)
