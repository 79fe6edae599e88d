"""One load of units into HOT, in steps: room, Frames and requests for many units at once, which are
then read and checked in batches.

Invariants:
- Units of one plan are HOT's together, when the last of them has landed, or when the load ends.
- What has Frames is planned, in the air or landed; whatever ends the load, these come back.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from kvtier.tiering.ahead import ReadAhead
from kvtier.tiering.cargo import Cargo
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.flight import Flight, Flights
from kvtier.tiering.room import Newcomers, move_up
from kvtier.tiering.steps import Pause, Reading, Steps
from kvtier.tiering.units import Units

HEAVY_BYTES = 1 << 20
"""A unit larger than this takes a millisecond or so to check and copy."""
HEAVY_BYTES_IN_PLACE = 8 << 20
"""The same where it need not be copied."""
TURN_BYTES = 1 << 20
"""Bytes of units that are checked, where others wait for their turn, before it is theirs."""
GROWTH = 4
"""How many times more the next plan may be than the one before: the first is small, so that the
device begins early, and the others are made while it reads."""


class MakesRoom(Protocol):
    """What a load asks of the Mover."""

    flights: Flights
    ahead: ReadAhead

    def make_room(self, needed_bytes: int, newcomers: Newcomers | None = None) -> bool: ...


class UnitLoad:
    """Callers hold the store's lock, and see to it that the Segments keep their slots."""

    def __init__(
        self, mover: MakesRoom, units: Units, reading: Reading, *, idle_only: bool
    ) -> None:
        self._mover = mover
        self._flights = mover.flights
        self._residency = mover.flights.residency
        self._extents = mover.flights.extents
        self._units = units
        self._reading = reading
        self._idle_only = idle_only
        self._planned: deque[Flight] = deque()
        self._air: deque[Flight] = deque()
        self._landed: list[Flight] = []
        """Those of whose Cargo others have not landed."""

    def steps(self) -> Steps[int]:
        """See `Mover.loading`."""
        yield from self._mover.ahead.landing(self._units)
        # Making room for a later unit must not evict an earlier one.
        with ExitStack() as leases:
            try:
                done = yield from self._bring_all(leases)
                while self._air:
                    yield from self._land()
            except GeneratorExit:
                raise
            except BaseException:
                # Whoever comes next finds their Frames free again.
                for flight in self._air:
                    yield from flight.settling()
                raise
            finally:
                self._end()
        return done

    def _bring_all(self, leases: ExitStack) -> Steps[int]:
        """Have as many units in HOT, or in the air, as there is room for; how many these are."""
        reading, count = self._reading, len(self._units)
        ends = self._extents.sizes(self._units).extent_bytes.cumsum()
        done = taken = 0
        window, growth = reading.plan_bytes, GROWTH
        while done < count:
            yield Pause.SHORT
            past = int(ends.searchsorted(taken + window, "right"))
            past = min(max(past, done + 1), done + reading.units_max)
            singly = window <= reading.batch_bytes
            secured = self._secure(self._units[done:past], leases, singly=singly)
            if secured is None:
                # Room for one batch after the other then.
                window, growth = reading.batch_bytes, 1
                continue
            yield from self._begin()
            done += secured
            if done < past:
                break
            taken = int(ends[done - 1])
            window = min(growth * window, reading.plan_bytes_max)
        return done

    def _end(self) -> None:
        """Have in HOT what is sound, and give back the rest."""
        for flights in (self._landed, self._air, self._planned):
            for flight in flights:
                self._flights.arrive(flight.cargo)
                self._flights.give_up(flight)

    # ---- room -------------------------------------------------------------------------------

    def _secure(self, units: Units, leases: ExitStack, *, singly: bool) -> int | None:
        """Have units in HOT, or planned; returns for how many there is room. singly: where not for
        all, as many as it goes; else None, and nothing happened."""
        residency, reading = self._residency, self._reading
        layers, slots, count = units.layers, units.slots, len(units)
        absent = self._absent(units)
        self._extents.require_written(self._not_in_host(absent))
        newcomers = (layers, slots) if self._idle_only else None
        with ExitStack() as kept:
            kept.enter_context(residency.lease(layers, slots))
            total = int(self._extents.sizes(absent).frames_bytes.sum())
            if not self._has_room(total, newcomers):
                if not singly:
                    return None
                # One after the other, as far as it goes: later units may have to leave.
                kept.close()
                count = self._count_singly(units, kept, newcomers)
                absent = self._absent(units[:count])
            self._plan(absent)
            if not reading.shared:
                # What is shared is not leased: a lease would last until others had their turn.
                leases.enter_context(kept.pop_all())
        if reading.shared:
            residency.touch(layers[:count], slots[:count])
        return count

    def _absent(self, units: Units) -> Units:
        return units.those(self._residency.hot.pages[units.layers, units.slots] == 0)

    def _count_singly(self, units: Units, kept: ExitStack, newcomers: Newcomers | None) -> int:
        """Make room for units in turn; for how many there is some. kept: gets their leases."""
        needed = 0
        for index, unit in enumerate(units):
            kept.enter_context(self._lease(unit))
            if not self._flights.is_hot(unit):
                needed += self._flights.unit_bytes(unit)
                if not self._has_room(needed, newcomers):
                    return index
        return len(units)

    def _lease(self, unit: Unit) -> AbstractContextManager[None]:
        one = Units.of([unit])
        return self._residency.lease(one.layers, one.slots)

    def _has_room(self, needed_bytes: int, newcomers: Newcomers | None) -> bool:
        return needed_bytes <= self._reading.spare_bytes() and self._mover.make_room(
            needed_bytes, newcomers
        )

    def _not_in_host(self, units: Units) -> Units:
        host = self._residency.host
        if not host.tier.used_bytes:
            return units
        return units.those(host.pages[units.layers, units.slots] == 0)

    def _plan(self, units: Units) -> None:
        """Have units in HOT, or planned, for which there is room."""
        lower = self._not_in_host(units)
        if len(lower) < len(units):
            for unit in units:
                if self._residency.host.pages[unit.layer, unit.segment.slot]:
                    move_up(unit.layer, unit.segment.slot, self._residency)
        if len(lower):
            self._planned += self._flights.add(lower, self._reading.batch_bytes)

    # ---- in the air -------------------------------------------------------------------------

    def _begin(self) -> Steps[None]:
        """Let what is planned begin, as far as there are buffers: for others, some must land."""
        reading = self._reading
        while self._planned:
            while len(self._air) >= reading.flights_max:
                yield from self._land()
            flight = self._planned[0]
            needed = flight.bounce_bytes
            if needed:
                while (piece := reading.buffers.take(needed)) is None and self._air:
                    yield from self._land()
                flight.bounce(piece or (yield from reading.piece(needed)))
            self._air.append(self._planned.popleft())
            yield from flight.starting(reading.priority)

    def _land(self) -> Steps[None]:
        """Wait for the flight that began first, and check what it brought."""
        flight = self._air[0]
        failed = yield from flight.landing()
        if failed:
            unread = [(flight.cargo.units[index], errno) for index, errno in failed.items()]
            raise self._extents.blame_unread(unread)
        yield from self._check(flight)
        self._landed.append(self._air.popleft())
        if flight.piece is not None:
            flight.piece.give_back()
        if flight.own.stop == len(flight.cargo.units):
            self._arrive(flight.cargo)

    def _arrive(self, cargo: Cargo) -> None:
        """All flights of a Cargo have landed."""
        self._flights.arrive(cargo)
        if self._reading.shared:
            self._residency.touch(cargo.units.layers, cargo.units.slots)
        for flight in self._landed:
            self._flights.give_up(flight)
        self._landed.clear()

    def _check(self, flight: Flight) -> Steps[None]:
        """Check what a flight brought. Raises FormatError after marking whose bytes are wrong."""
        own = range(flight.own.start, flight.own.stop)
        if not self._reading.shared:
            self._require_sound(flight, own)
            return
        cargo, pages = flight.cargo, self._residency.hot.pages
        layers, slots, sizes = cargo.units.layers, cargo.units.slots, cargo.sizes.frames_bytes
        at, ends = own.start, sizes.cumsum()
        while at < own.stop:
            turn = int(ends[at] - sizes[at]) + TURN_BYTES
            past = min(max(at + 1, int(ends.searchsorted(turn, "right"))), own.stop)
            limit = HEAVY_BYTES if cargo.bounced[at] else HEAVY_BYTES_IN_PLACE
            yield Pause.HEAVY if sizes[at] > limit else Pause.SHORT
            # Somebody else may have brought one meanwhile.
            there = pages[layers[at:past], slots[at:past]].tolist()
            self._require_sound(flight, [at + i for i, count in enumerate(there) if not count])
            at = past

    def _require_sound(self, flight: Flight, indices: Iterable[int]) -> None:
        damaged = self._flights.check(flight, indices)
        if damaged is not None:
            index, error = damaged
            self._extents.blame_damaged(flight.cargo.units[index], error)
            raise error
