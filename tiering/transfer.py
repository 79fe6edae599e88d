"""Moves Pages between tiers: the one place that applies what the eviction policy plans.

Invariants:
- A unit (layer, slot) leaves HOT only when a valid copy is on NVME.
- Room is made, and Frames are taken, before bytes are read; a unit is in HOT whole or not at all.
- Frames of units on their way are in no TierMap. They go back when the load ends early; what the
  device still writes into is a bounce buffer and never a Frame.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.errors import CapacityError
from kvtier.io.buffers import BufferPiece
from kvtier.tiering.eviction import Usage, plan_eviction
from kvtier.tiering.extent_io import ExtentIO, Unit, UnitWrite, batches
from kvtier.tiering.frames import FrameArray
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry, pages_of
from kvtier.tiering.packing import gather, pack, rearranged, scatter
from kvtier.tiering.residency import NO_FRAME, Residency, TierMap
from kvtier.tiering.segment import Segment
from kvtier.tiering.steps import Pause, Reading, Steps, run

HEAVY_BYTES = 1 << 20
"""A unit larger than this takes a millisecond or so to check and copy."""


@dataclass(frozen=True, slots=True, eq=False)
class _Flying:
    """A unit on its way into Frames [heads, pages] that were taken for it."""

    unit: Unit
    frames: FrameArray


class Mover:
    """Applies movements between HOT, HOST and NVME. Callers hold the store's lock."""

    def __init__(self, geometry: Geometry, residency: Residency, extents: ExtentIO) -> None:
        self.geometry = geometry
        self.residency = residency
        self.extents = extents
        self.pages_evicted = 0
        self.flying_bytes = 0
        """Bytes of the Frames of units on their way."""
        self.frame_bytes = np.array(
            [geometry.frame_bytes(layer) for layer in range(len(geometry.layers))], np.int64
        )

    def unit_frames_bytes(self, unit: Unit) -> int:
        """Bytes of the Frames that a whole unit needs."""
        return self.geometry.frames_bytes(unit.layer, unit.segment.token_count)

    # ---- making room ------------------------------------------------------------------------

    def make_room(self, needed_bytes: int, *, idle_only: bool = False) -> bool:
        """Evict clean Pages until HOT has needed_bytes free. False: there is not that much."""
        return self._free_up(self.residency.hot, needed_bytes, idle_only=idle_only)

    def _free_up(self, tier: TierMap, needed_bytes: int, *, idle_only: bool) -> bool:
        missing = needed_bytes - tier.tier.free_bytes
        if missing <= 0:
            return True
        if needed_bytes > tier.tier.limit_bytes:
            return False
        victims = plan_eviction(self._usage(tier), missing, idle_only=idle_only)
        if victims.freed_bytes < missing:
            return False
        for layer, slot in zip(victims.layers.tolist(), victims.slots.tolist(), strict=True):
            if tier is self.residency.hot:
                self._keep_in_host(layer, slot)
                self.pages_evicted += int(tier.pages[layer, slot])
            tier.drop(layer, slot)
        return True

    def _usage(self, tier: TierMap) -> Usage:
        residency = self.residency
        evictable = (tier.pages > 0) & (residency.leases == 0) & residency.on_nvme
        layers, slots = np.nonzero(evictable)
        return Usage(
            layers,
            slots,
            tier.pages[layers, slots] * self.frame_bytes[layers],
            tier.used_at[layers, slots],
            residency.last_pass_began,
        )

    def _keep_in_host(self, layer: int, slot: int) -> None:
        """Copy a unit that leaves HOT to HOST, where HOST can have room for it."""
        hot, host = self.residency.hot, self.residency.host
        needed = int(hot.pages[layer, slot]) * int(self.frame_bytes[layer])
        if host.pages[layer, slot] or not self._free_up(host, needed, idle_only=False):
            return
        host.used_at[layer, slot] = hot.used_at[layer, slot]
        self._copy(layer, slot, hot, host)

    @staticmethod
    def _copy(layer: int, slot: int, source: TierMap, target: TierMap) -> None:
        held = source.frames[layer][slot]
        heads = held.shape[0]
        pages = int(source.pages[layer, slot]) // heads
        frames = target.tier.take(layer, heads * pages).reshape(heads, pages)
        rows = torch.from_numpy(held[:, :pages].reshape(-1).astype(np.int64))
        target.tier.memory(layer).index_copy_(
            0,
            torch.from_numpy(frames.reshape(-1)),
            source.tier.memory(layer).index_select(0, rows),
        )
        target.put(layer, slot, 0, frames)

    # ---- into HOT ---------------------------------------------------------------------------

    def load(self, units: Sequence[Unit], *, idle_only: bool = False) -> int:
        """Bring whole units into HOT, in order; returns how many are there when it ends.

        Stops early where HOT has no room (with idle_only: none that is free or idle). Raises
        FormatError or DeviceError for bytes that cannot be had, after marking their Segments.
        """
        layers = np.array([unit.layer for unit in units], np.int64)
        slots = np.array([unit.segment.slot for unit in units], np.int64)
        done = len(units)
        if not self.residency.hot.pages[layers, slots].all():
            loading = self.loading(units, self.extents.blocking, idle_only=idle_only)
            done = run(loading, self.extents.device)
        self.residency.touch(layers[:done], slots[:done])
        return done

    def touch(self, units: Sequence[Unit]) -> None:
        """These units are used now."""
        layers = np.array([unit.layer for unit in units], np.int64)
        slots = np.array([unit.segment.slot for unit in units], np.int64)
        self.residency.touch(layers, slots)

    def loading(self, units: Sequence[Unit], reading: Reading, *, idle_only: bool) -> Steps[int]:
        """What `load` does, in steps. Callers see to it that their Segments keep their slots."""
        sizes = [
            extent.length if (extent := unit.segment.extents[unit.layer]) else 0 for unit in units
        ]
        done = 0
        # Making room for a later unit must not evict an earlier one.
        with ExitStack() as leases:
            for part in batches(sizes, reading.batch_bytes, reading.units_max):
                yield Pause.SHORT
                flying: list[_Flying] = []
                piece = None
                if not all(self._is_hot(unit) for unit in units[part]):
                    piece = yield from reading.piece(sum(sizes[part]))
                try:
                    secured = self._secure(units[part], flying, leases, reading, idle_only)
                    if piece is not None:
                        yield from self._fill(flying, piece, reading)
                finally:
                    for each in flying:
                        self._give(each)
                    if piece is not None:
                        piece.give_back()
                done += secured
                if secured < part.stop - part.start:
                    break
        return done

    def _is_hot(self, unit: Unit) -> bool:
        return bool(self.residency.hot.pages[unit.layer, unit.segment.slot])

    def _secure(
        self,
        units: Sequence[Unit],
        flying: list["_Flying"],
        leases: ExitStack,
        reading: Reading,
        idle_only: bool,
    ) -> int:
        """Have units in HOT, or Frames for them in `flying`; returns for how many there is room."""
        hot, host = self.residency.hot, self.residency.host
        for count, unit in enumerate(units):
            layer, slot = unit.layer, unit.segment.slot
            if not hot.pages[layer, slot]:
                size = self.unit_frames_bytes(unit)
                if size > reading.spare_bytes() or not self.make_room(size, idle_only=idle_only):
                    return count
                if host.pages[layer, slot]:
                    self._copy(layer, slot, host, hot)
                else:
                    flying.append(_Flying(unit, self._take(unit)))
                    self.flying_bytes += size
            if reading.shared:
                # A lease would last until others had their turn, who need room as well.
                self.residency.touch(np.array([layer]), np.array([slot]))
            else:
                leases.enter_context(self.residency.lease(np.array([layer]), np.array([slot])))
        return len(units)

    def _fill(self, flying: list["_Flying"], piece: BufferPiece, reading: Reading) -> Steps[None]:
        """Read what is on its way, and put it into its Frames unit by unit."""
        if not flying:
            return
        blocks = yield from self.extents.reading([each.unit for each in flying], piece)
        for block in blocks:
            yield Pause.HEAVY if len(block) > HEAVY_BYTES else Pause.SHORT
            each = flying[0]
            unit = each.unit
            if self._is_hot(unit):
                # Somebody else brought it meanwhile.
                self._give(flying.pop(0))
                continue
            payload = self.extents.payload(unit, block)
            del flying[0]
            self.flying_bytes -= self.unit_frames_bytes(unit)
            self._put(unit, each.frames, payload)
            if reading.shared:
                self.residency.touch(np.array([unit.layer]), np.array([unit.segment.slot]))

    def _take(self, unit: Unit) -> FrameArray:
        """New Frames [heads, pages] for a whole unit."""
        layout = self.extents.layout(unit)
        heads = layout.layer.kv_heads
        frames = self.residency.hot.tier.take(unit.layer, heads * layout.pages)
        return frames.reshape(heads, layout.pages)

    def _give(self, flying: "_Flying") -> None:
        """Give Frames back that nothing was put into."""
        self.flying_bytes -= self.unit_frames_bytes(flying.unit)
        self.residency.hot.tier.give(flying.unit.layer, flying.frames.reshape(-1))

    def _put(self, unit: Unit, frames: FrameArray, payload: torch.Tensor) -> None:
        """Copy a payload into Frames that were taken, which are HOT's copy from now on."""
        hot = self.residency.hot
        layout = self.extents.layout(unit)
        scatter(payload, layout, hot.tier.memory(unit.layer), torch.from_numpy(frames))
        hot.put(unit.layer, unit.segment.slot, 0, frames)

    def keep(self, write: UnitWrite, *, idle_only: bool) -> None:
        """Have a unit that was just written in HOT as well, where there can be room for it (with
        idle_only: where that costs only idle Pages)."""
        unit = write.unit
        if not self.make_room(self.unit_frames_bytes(unit), idle_only=idle_only):
            return
        self._place_tensors(write)
        self.residency.touch(np.array([unit.layer]), np.array([unit.segment.slot]))

    def reorder(self, write: UnitWrite) -> None:
        """Bring the Frames of a unit that was written from a Tail into the order it was written
        in, so that a Page is the same Page in every tier."""
        if write.unit.segment.orders[write.unit.layer] is not None:
            self.residency.hot.drop(write.unit.layer, write.unit.segment.slot)
            self._place_tensors(write)

    def _place_tensors(self, write: UnitWrite) -> None:
        packed = write.keys.new_empty(write.keys.numel() + write.values.numel())
        order = write.unit.segment.orders[write.unit.layer]
        pack(write.keys, write.values, order, packed)
        self._put(write.unit, self._take(write.unit), packed)

    # ---- Frames of a Tail -------------------------------------------------------------------

    def append(
        self, segment: Segment, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write tokens [heads, n, Dk] and [heads, n, Dv] behind those a growing unit has.

        Raises CapacityError when HOT cannot make room.
        """
        hot = self.residency.hot
        shape = self.geometry.layers[layer]
        first = segment.filled[layer]
        last = first + keys.shape[1]
        have = int(hot.pages[layer, segment.slot]) // shape.kv_heads
        missing = pages_of(last) - have
        if missing > 0:
            needed = missing * shape.kv_heads * int(self.frame_bytes[layer])
            if not self.make_room(needed):
                tier = hot.tier
                raise CapacityError(tier.name, needed, tier.free_bytes, tier.limit_bytes)
            frames = hot.tier.take(layer, shape.kv_heads * missing)
            hot.put(layer, segment.slot, have, frames.reshape(shape.kv_heads, missing))
        memory = hot.tier.memory(layer)
        split = PAGE_TOKENS * shape.key_width
        rows = memory.shape[0]
        key_rows = memory[:, :split].view(rows, PAGE_TOKENS, shape.key_width)
        value_rows = memory[:, split:].view(rows, PAGE_TOKENS, shape.value_width)
        places = np.arange(first, last)
        frames = hot.frames[layer][segment.slot][:, places // PAGE_TOKENS].astype(np.int64)
        index = torch.from_numpy(frames), torch.from_numpy(places % PAGE_TOKENS)
        key_rows[index] = keys
        value_rows[index] = values
        segment.filled[layer] = last

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
