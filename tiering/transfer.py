"""Brings Pages into HOT, from HOST, from the drive and from a model's tensors.

Invariants:
- Room is made, and Frames are taken, before bytes are read; a unit is in HOT whole or not at all.
- Frames of units on their way are in no TierMap, and belong to their Flight. They go back when the
  load ends early, but not before the device is done with them.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listing
from contextlib import AbstractContextManager
from itertools import chain

import numpy as np
import torch

from kvtier.errors import CapacityError
from kvtier.tiering.ahead import ReadAhead
from kvtier.tiering.extent_io import ExtentIO, Unit
from kvtier.tiering.extent_writer import UnitWrite
from kvtier.tiering.flight import Flights
from kvtier.tiering.geometry import Geometry, pages_of
from kvtier.tiering.packing import gather, pack, rearranged, scatter
from kvtier.tiering.residency import NO_FRAME, Residency, SlotArray
from kvtier.tiering.room import Newcomers, Room
from kvtier.tiering.segment import Segment
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.steps import Reading, Steps, run
from kvtier.tiering.unit_load import UnitLoad
from kvtier.tiering.units import Units


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

    def load(self, units: Listing[Unit], *, idle_only: bool = False) -> int:
        """Bring whole units into HOT, in order; returns how many are there when it ends.

        Stops early where HOT has no room (with idle_only: none that is free or idle). Raises
        FormatError or DeviceError for bytes that cannot be had, after marking their Segments.
        """
        units = Units.of(units)
        layers, slots, done = units.layers, units.slots, len(units)
        if not self.residency.hot.pages[layers, slots].all():
            loading = self.loading(units, self.extents.blocking, idle_only=idle_only)
            done = run(loading, self.extents.device)
        self.ahead.used(layers[:done], slots[:done])
        self.residency.touch(layers[:done], slots[:done])
        return done

    def touch(self, units: Listing[Unit]) -> None:
        """These units are used now."""
        units = Units.of(units)
        self.residency.touch(units.layers, units.slots)

    def lease(self, units: Listing[Unit]) -> AbstractContextManager[None]:
        """A promise not to evict these while the block runs."""
        units = Units.of(units)
        return self.residency.lease(units.layers, units.slots)

    # ---- read ahead -------------------------------------------------------------------------

    def read_on(self, sequence: Sequence, layer: int, rest: Iterable[Unit]) -> None:
        """While a part of a layer is attended to, which is leased: begin to read the `rest` of it,
        and then the layers behind it, as far as there is room."""
        self.ahead.go_on(chain(rest, self._behind(sequence, layer)))

    def read_on_behind(self, sequence: Sequence, layer: int, slots: SlotArray) -> None:
        """The same while all of a layer, in HOT at these slots, is attended to."""
        if self.ahead.held_bytes:
            self.ahead.used(np.full(len(slots), layer), slots)
        views = sequence.views
        if views and sequence.all_hot_at != (views, sum(self.residency.hot.drops)):
            with self.residency.lease(np.full(len(slots), layer), slots):
                self.read_on(sequence, layer, ())

    def _behind(self, sequence: Sequence, layer: int) -> Iterator[Unit]:
        """What HOT lacks of the layers behind this one: behind the last come those of the next
        step, and at the end this one."""
        hot, views = self.residency.hot, sequence.views
        now = views, sum(hot.drops)
        if not views or sequence.all_hot_at == now:
            return
        slots = np.array([view.segment.slot for view in views], np.int64)
        ends = np.array([view.end for view in views], np.int64)
        some = False
        count = len(self.geometry.layers)
        for behind in [*range(layer + 1, count), *range(layer + 1)]:
            first = self.geometry.layers[behind].first_seen(sequence.length(behind))
            missing = (hot.pages[behind, slots] == 0) & (ends > first)
            for index in np.flatnonzero(missing).tolist():
                some = True
                yield Unit(views[index].segment, behind)
        if not some:
            sequence.all_hot_at = now

    # ---- into HOT, in steps -----------------------------------------------------------------

    def loading(self, units: Units, reading: Reading, *, idle_only: bool) -> Steps[int]:
        """What `load` does, in steps. Callers see to it that their Segments keep their slots."""
        return UnitLoad(self, units, reading, idle_only=idle_only).steps()

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
        unit, hot = write.unit, self.residency.hot
        layer, slot = unit.layer, unit.segment.slot
        needed = self.flights.unit_bytes(unit)
        follows = layer == 0 or bool(hot.pages[layer - 1, slot])
        if idle_only and follows and needed > hot.tier.free_bytes:
            # The layers behind it come soon: one look at what is idle serves them all.
            layers = range(layer, len(self.geometry.layers))
            tokens = unit.segment.token_count
            rest = sum([self.geometry.frames_bytes(each, tokens) for each in layers])
            self.room.make(rest, idle_only=True)
        if not self.room.make(needed, idle_only=idle_only):
            return
        self._place_tensors(write)
        self.residency.touch_unit(layer, slot)

    def reorder(self, write: UnitWrite) -> None:
        """Bring the Frames of a unit that was written from a Tail into the order it was written
        in, so that a Page is the same Page in every tier."""
        if write.unit.segment.orders[write.unit.layer] is not None:
            self.residency.hot.drop(write.unit.layer, write.unit.segment.slot)
            self._place_tensors(write)

    def _place_tensors(self, write: UnitWrite) -> None:
        """Copy a whole unit into new Frames, which are HOT's copy from now on."""
        unit, hot = write.unit, self.residency.hot
        shape, order = self.extents.shape(unit), unit.segment.orders[unit.layer]
        frames = hot.tier.take(unit.layer, shape.frames)
        by_head = frames.reshape(shape.heads, shape.pages)
        pool = hot.tier.pool(unit.layer)
        if shape.frames_bytes == shape.payload_bytes and frames[-1] - frames[0] + 1 == len(frames):
            # Whole Pages in neighbouring Frames are a payload. They come in ascending order.
            start = int(frames[0]) * pool.frame_bytes
            pack(write.keys, write.values, order, pool.arena[start : start + shape.frames_bytes])
        else:
            packed = np.empty(shape.payload_bytes, np.uint8)
            pack(write.keys, write.values, order, packed)
            payload = self.extents.typed(packed)
            scatter(payload, shape.layout, pool.memory, torch.from_numpy(by_head))
        hot.put(unit.layer, unit.segment.slot, 0, by_head)

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
        hot.tier.token_rows(layer).put(hot.frames[layer][segment.slot], first, keys, values)
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
