"""Units read ahead of who will need them: begun while others are attended to, and while the model
computes.

Invariants:
- A unit read ahead is on its way, or in HOT under a lease, until somebody uses it, its Segment is
  released, or its memory is needed for something else.
- Nothing read ahead ever fails anybody. What cannot be read, or is not what it should be, is
  forgotten: who needs it reads it again, and that read fails, and says so.
- What is held takes at most `window_bytes` of HOT from units in use; beyond that, only what is free
  or idle.
"""

from collections.abc import Collection, Iterable

from kvtier.errors import ClosedError, DeviceError
from kvtier.io.buffers import BufferPool
from kvtier.io.device import Priority
from kvtier.tiering.extent_io import Unit, bounce_bytes
from kvtier.tiering.flight import Flight, Flights
from kvtier.tiering.residency import SlotArray
from kvtier.tiering.room import Room
from kvtier.tiering.segment import Segment
from kvtier.tiering.steps import Steps, run
from kvtier.tiering.units import Units

AIR_BYTES_MAX = 32 << 20
"""Bytes on their way ahead at once: what a fast drive reads while a layer is computed."""
FLIGHT_BYTES = 4 << 20
"""Bytes of one flight: what is checked at once, and what its memory is waited for."""

Key = tuple[int, int]
"""(layer, slot) of a unit."""


class ReadAhead:
    """Of one store. Callers hold its lock."""

    def __init__(self, flights: Flights, room: Room) -> None:
        self.flights = flights
        self.extents = flights.extents
        self.residency = flights.residency
        self.room = room
        self.buffers = BufferPool(bounce_bytes(self.extents.geometry))
        self.pages = 0
        """Pages whose reading was begun ahead."""
        self.pages_in_vain = 0
        """Of those, given up or damaged: they were not there when somebody wanted them."""
        self.air_bytes = 0
        """Bytes of the Frames of what is on its way."""
        self._landed_bytes = 0
        self._nothing_idle_in = -1
        """The pass in which HOT had nothing idle left."""
        self._air: list[Flight] = []
        self._coming: dict[Key, tuple[Flight, int]] = {}
        """The flight that brings a unit, and its index there."""
        self._landed: dict[Key, Unit] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of HOT that are kept for what nobody has used yet."""
        return self.air_bytes + self._landed_bytes

    @property
    def window_bytes(self) -> int:
        return min(AIR_BYTES_MAX, self.residency.hot.tier.limit_bytes // 2)

    # ---- begun ------------------------------------------------------------------------------

    def go_on(self, upcoming: Iterable[Unit]) -> None:
        """Begin to read what will be needed next, in this order, as far as there is room for it.

        What is needed now must be leased. Never raises for what the device does.
        """
        self._take_in()
        some: list[Unit] = []
        total = 0
        for unit in upcoming:
            if not self._is_wanted(unit):
                continue
            size = self.flights.unit_bytes(unit)
            if some and total + size > self._flight_bytes():
                if not self._begin(some, total):
                    return
                some, total = [], 0
            if self.air_bytes + size > AIR_BYTES_MAX:
                return
            some.append(unit)
            total += size
        if some:
            self._begin(some, total)

    def _flight_bytes(self) -> int:
        """Bytes of the next flight, if a unit is not larger: the window is filled to its end."""
        left = self.window_bytes - self.held_bytes
        most = min(FLIGHT_BYTES, self.window_bytes // 4, AIR_BYTES_MAX - self.air_bytes)
        return min(most, left) if left > 0 else most

    def _is_wanted(self, unit: Unit) -> bool:
        segment, layer = unit.segment, unit.layer
        extent = segment.extents[layer]
        return (
            (layer, segment.slot) not in self._coming
            and not self.flights.is_hot(unit)
            and not self.residency.host.pages[layer, segment.slot]
            and not segment.lost
            and extent is not None
            and not self.extents.space.ledger.started.covers(extent)
        )

    def _begin(self, units: list[Unit], nbytes: int) -> bool:
        """False: there is no room for these, or no device."""
        if self.held_bytes + nbytes <= self.window_bytes:
            if not self.room.make(nbytes):
                return False
        elif not self._find_idle(nbytes):
            return False
        # Layers of several widths are several flights.
        flights = self.flights.add(Units.of(units))
        self.air_bytes += nbytes
        self.pages += sum(map(self._pages, units))
        self._air += flights
        for flight in flights:
            for index, key in enumerate(flight.cargo.keys()):
                self._coming[key] = flight, index
        begun = [self._begin_flight(flight) for flight in flights]
        return all(begun)

    def _begin_flight(self, flight: Flight) -> bool:
        try:
            if flight.bounce_bytes:
                piece = self.buffers.take(flight.bounce_bytes)
                if piece is None:
                    self._drop(flight)
                    return False
                flight.bounce(piece)
            run(flight.starting(Priority.PREFETCH), self.extents.device)
        except (DeviceError, ClosedError):
            self._drop(flight)
            return False
        return True

    def _find_idle(self, nbytes: int) -> bool:
        """Make room of what is free or idle. Looking is not free, and asked for all the time; in
        one pass nothing becomes idle."""
        residency = self.residency
        if residency.hot.tier.free_bytes < nbytes and self._nothing_idle_in == residency.pass_began:
            return False
        found = self.room.make(nbytes, idle_only=True)
        if not found:
            self._nothing_idle_in = residency.pass_began
        return found

    def _pages(self, unit: Unit) -> int:
        return self.extents.shape(unit).frames

    # ---- landed -----------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Bring into HOT what has landed."""
        if not self._air:
            return
        try:
            self.extents.device.poll()
        except ClosedError:
            return
        while self._air and not self._air[0].in_air:
            run(self._land(self._air[0]), self.extents.device)

    def landing(self, units: Iterable[Unit]) -> Steps[None]:
        """Bring into HOT what is on its way of these units."""
        if not self._coming:
            return
        found = [self._coming.get(_key(unit)) for unit in units]
        wanted = {each[0] for each in found if each is not None}
        for flight in list(self._air):
            # Others may land it between the steps of this.
            if flight in self._air and flight in wanted:
                yield from self._land(flight)

    def _land(self, flight: Flight) -> Steps[None]:
        """Wait for a flight, and bring into HOT what is as it should be."""
        self._air.remove(flight)
        try:
            failed = yield from flight.landing()
            self._keep(flight, failed)
        except (DeviceError, ClosedError):
            # Nobody has asked for it yet.
            return
        finally:
            self._drop(flight)

    def _keep(self, flight: Flight, failed: Collection[int]) -> None:
        """Check what was read, and have in HOT, under a lease, what is still to come and sound."""
        cargo = flight.cargo
        there = self.residency.hot.pages[cargo.units.layers, cargo.units.slots] > 0
        left = [each for each in self._still_coming(flight) if not there[each]]
        left = [each for each in left if each not in failed]
        while damaged := self.flights.check(flight, left):
            left = left[left.index(damaged[0]) + 1 :]
        sound = cargo.sound
        self.flights.arrive(cargo)
        for index in sound:
            unit = cargo.units[index]
            del self._coming[_key(unit)]
            self.residency.leases[_key(unit)] += 1
            self._landed[_key(unit)] = unit
            self.air_bytes -= self.flights.unit_bytes(unit)
            self._landed_bytes += self.flights.unit_bytes(unit)

    def _still_coming(self, flight: Flight) -> list[int]:
        """Which of the units are to come with this flight: a Segment may have been forgotten."""
        coming, keys = self._coming, flight.cargo.keys()
        return [index for index, key in enumerate(keys) if coming.get(key) == (flight, index)]

    def used(self, layers: SlotArray, slots: SlotArray) -> None:
        """Somebody uses these units now, or will see to them."""
        if self._landed:
            for key in set(zip(layers.tolist(), slots.tolist(), strict=True)) & self._landed.keys():
                self._unlease(key)

    def _unlease(self, key: Key) -> Unit:
        unit = self._landed.pop(key)
        self.residency.leases[key] -= 1
        self._landed_bytes -= self.flights.unit_bytes(unit)
        return unit

    # ---- given up ---------------------------------------------------------------------------

    def _drop(self, flight: Flight) -> None:
        """Give up what is left of a flight."""
        if flight in self._air:
            self._air.remove(flight)
        cargo = flight.cargo
        self.air_bytes -= int(cargo.sizes.frames_bytes[cargo.held].sum())
        self.pages_in_vain += int(cargo.sizes.frames[cargo.held].sum())
        for index in self._still_coming(flight):
            del self._coming[_key(cargo.units[index])]
        self.flights.give_up(flight)

    def give_up(self) -> None:
        """Give up everything. Frames that the device still writes into come back later."""
        for key in list(self._landed):
            self.pages_in_vain += self._pages(self._unlease(key))
        for flight in list(self._air):
            self._drop(flight)

    def forget(self, segment: Segment) -> None:
        """Nobody views a Segment any more."""
        if not (self._landed or self._coming):
            return
        for layer in range(segment.layers):
            key = layer, segment.slot
            if key in self._landed:
                self.pages_in_vain += self._pages(self._unlease(key))
            # What lands of it goes no further.
            self._coming.pop(key, None)
        for flight in list(self._air):
            if not self._still_coming(flight):
                self._drop(flight)


def _key(unit: Unit) -> Key:
    return unit.layer, unit.segment.slot
