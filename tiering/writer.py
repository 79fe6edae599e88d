"""The write path: tokens into the Tail's Frames, complete layers of Segments onto the device.

Invariants:
- Dirty Pages are those of Tails, of Segments that are being sealed, of Tails that a fork froze and
  nobody has written yet, and of what was one of these and is on its way to the device.
  Together with what passes in progress will still need, they leave room in HOT for one whole
  unit, so that reading can always go on.
- Room for a whole pass is secured when the pass begins, in its first layer, because only between
  passes can a Tail be sealed to make room.
"""

import numpy as np
import torch

from kvtier.errors import ConfigError
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.extent_writer import ExtentWriter, UnitWrite
from kvtier.tiering.geometry import SEGMENT_TOKENS, Geometry, pages_of
from kvtier.tiering.packing import require_rows
from kvtier.tiering.passes import Passes
from kvtier.tiering.registry import Registry
from kvtier.tiering.residency import Residency
from kvtier.tiering.sealing import Sealer
from kvtier.tiering.segment import Segment, SegmentView
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.transfer import Mover

FORK_COPY_TOKENS_MAX = 64
"""A fork copies Tails shorter than this; a longer Tail is frozen and shared, which costs the
original a short Segment."""


def hot_bytes_min(geometry: Geometry) -> int:
    """Least HOT limit: one whole unit to read through, and a Page of a Tail in every layer."""
    layers = range(len(geometry.layers))
    return unit_bytes_max(geometry) + sum(geometry.frames_bytes(layer, 1) for layer in layers)


def unit_bytes_max(geometry: Geometry) -> int:
    """Bytes of the Frames of the largest whole unit."""
    layers = range(len(geometry.layers))
    return max(geometry.frames_bytes(layer, SEGMENT_TOKENS) for layer in layers)


class Writer:
    """Appends to Tails and seals them. Callers hold the store's lock."""

    def __init__(
        self,
        geometry: Geometry,
        residency: Residency,
        mover: Mover,
        extents: ExtentWriter,
        registry: Registry,
    ) -> None:
        self.geometry = geometry
        self.residency = residency
        self.mover = mover
        self.extents = extents
        self.registry = registry
        self.growing: set[Sequence] = set()
        """Sequences that may have a Tail."""
        self._room_bytes = residency.hot.tier.limit_bytes - unit_bytes_max(geometry)
        self._page_bytes = hot_bytes_min(geometry) - unit_bytes_max(geometry)
        self.passes = Passes(residency)
        self.sealer = Sealer(geometry, mover, extents, registry)

    # ---- append -----------------------------------------------------------------------------

    def append(
        self, sequence: Sequence, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> bool:
        """Add tokens to one layer; True when that completed a Segment in all layers.

        keys [kv_heads, n, key_width], values [kv_heads, n, value_width], of the store's dtype.
        Raises ConfigError, CapacityError (HOT or region full), DeviceError.
        """
        require_rows(self.geometry, layer, keys, values)
        completed = self._append(sequence, layer, keys, values)
        if sequence.sealing is not None and sequence.between_passes:
            return self.sealer.advance(sequence, keys.shape[1]) or completed
        return completed

    def _append(
        self, sequence: Sequence, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> bool:
        count = keys.shape[1]
        if sequence.between_passes:
            self._secure_room(sequence, count)
            self.passes.begin(sequence, layer)
        self.passes.last_layer = layer
        self.growing.add(sequence)
        begun = len(sequence.tail)
        if begun == 1 and sequence.tail[0].filled[layer] + count < sequence.tail[0].token_count:
            # Most steps of a decode: nothing begins, and nothing is completed.
            taken = self._append_to_frames(sequence.tail[0], layer, keys, values)
            sequence.reserved_bytes = max(0, sequence.reserved_bytes - taken)
            return False
        parts = self._parts(sequence, layer, count)
        filled = [segment.filled[layer] for segment, _ in parts]
        into_frames = [each for each in parts if not self._goes_straight(*each, layer)]
        completed = [
            self._completed(Unit(segment, layer), keys[:, part], values[:, part])
            for segment, part in parts
            if self._goes_straight(segment, part, layer)
        ]
        try:
            # What may fail comes first, and leaves the Frames of complete units alone.
            for segment, part in into_frames:
                taken = self._append_to_frames(segment, layer, keys[:, part], values[:, part])
                sequence.reserved_bytes = max(0, sequence.reserved_bytes - taken)
            self.extents.write(completed)
        except BaseException:
            for (segment, _), before in zip(parts, filled, strict=True):
                segment.filled[layer] = before
            self.forget(sequence.tail[begun:])
            del sequence.tail[begun:]
            raise
        for each in completed:
            self._settle(each)
        return self._collect(sequence)

    def _parts(self, sequence: Sequence, layer: int, count: int) -> list[tuple[Segment, slice]]:
        """Which Segments `count` more tokens of a layer go to; all but the last become full."""
        parts: list[tuple[Segment, slice]] = []
        growing = [each for each in sequence.tail if each.filled[layer] < each.token_count]
        done = 0
        while done < count:
            segment = growing.pop(0) if growing else self._begin_segment(sequence, count - done)
            take = min(count - done, segment.token_count - segment.filled[layer])
            parts.append((segment, slice(done, done + take)))
            done += take
        return parts

    def _goes_straight(self, segment: Segment, part: slice, layer: int) -> bool:
        """Whether a unit goes to the drive now: it is whole, and its order need not wait."""
        begun = segment.filled[layer]
        whole = begun + part.stop - part.start == segment.token_count
        return whole and not (begun and self.extents.placement.in_steps)

    def _completed(self, unit: Unit, keys: torch.Tensor, values: torch.Tensor) -> UnitWrite:
        """A unit made of what its Frames hold, if anything, and its last tokens."""
        if unit.segment.filled[unit.layer]:
            begun = self.mover.tensors(unit)
            keys, values = torch.cat([begun[0], keys], 1), torch.cat([begun[1], values], 1)
        return UnitWrite(unit, keys, values)

    def _settle(self, write: UnitWrite) -> None:
        """After the write of a complete unit began: HOT has it as the device will, or not at
        all."""
        segment, layer = write.unit.segment, write.unit.layer
        segment.filled[layer] = segment.token_count
        was_hot = bool(self.residency.hot.pages[layer, segment.slot])
        self.residency.hot.drop(layer, segment.slot)
        self.mover.keep(write, idle_only=not was_hot)
        if was_hot and self.residency.hot.pages[layer, segment.slot]:
            # It had its place among the dirty Pages, and keeps it until the drive has it.
            self.residency.on_nvme[layer, segment.slot] = self.extents.is_on_device(write.unit)
        else:
            self.residency.on_nvme[layer, segment.slot] = True

    def forget(self, segments: list[Segment]) -> None:
        """Give up Segments that nobody else has seen."""
        for segment in segments:
            self.registry.forget(segment)

    def _begin_segment(self, sequence: Sequence, to_come: int) -> Segment:
        """A new Segment of the Tail. to_come: tokens of this pass that are not placed yet."""
        if sequence.tail:
            last = sequence.tail[-1]
            parent: SegmentView | None = SegmentView(last, last.token_count)
        else:
            parent = sequence.views[-1] if sequence.views else None
        room = min(to_come, SEGMENT_TOKENS) if sequence.pass_goes_straight else SEGMENT_TOKENS
        segment = Segment(
            start=parent.end if parent else 0,
            layers=len(self.geometry.layers),
            provenance=sequence.provenance,
            parent=parent,
            token_count=room,
            slot=self.residency.take_slot(),
            references=1,
        )
        sequence.tail.append(segment)
        return segment

    def _append_to_frames(
        self, segment: Segment, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> int:
        """Returns how many bytes of Frames it took."""
        taken_bytes = self.mover.append(segment, layer, keys, values)
        self.residency.touch_unit(layer, segment.slot)
        return taken_bytes

    def _collect(self, sequence: Sequence) -> bool:
        """Move Segments that are complete in all layers from the Tail to the views."""
        moved = False
        while sequence.tail and min(sequence.tail[0].filled) == sequence.tail[0].token_count:
            # Where passes are long, it is not worth while to do it in steps.
            self.sealer.finish(sequence)
            segment = sequence.tail.pop(0)
            segment.freeze()
            before = sequence.views
            sequence.views = (*before, SegmentView(segment, segment.token_count))
            if self.extents.placement.in_steps:
                self.sealer.begin(sequence, segment, before)
            moved = True
        return moved

    # ---- room -------------------------------------------------------------------------------

    def _secure_room(self, sequence: Sequence, count: int) -> None:
        """Make sure that a pass of `count` tokens will find Frames for its Tail, or needs none."""
        sequence.reserved_bytes = 0
        sequence.pass_goes_straight = False
        needed = self._pass_bytes(sequence, count)
        if not self._has_room_for(needed):
            # What is being sealed, or on its way, is clean when it arrives.
            for each in self.growing:
                self.sealer.finish(each)
            self.extents.finish_all()
        if not self._has_room_for(needed):
            for each in self._sealable():
                self.seal(each)
                self.extents.finish_segments([view.segment for view in each.views])
                needed = self._pass_bytes(sequence, count)
                if self._has_room_for(needed):
                    break
        if self._has_room_for(needed):
            sequence.reserved_bytes = needed
        else:
            assert not sequence.tail
            sequence.pass_goes_straight = True

    def _pass_bytes(self, sequence: Sequence, count: int) -> int:
        """Bytes of the Frames that `count` more tokens take in all layers, at most."""
        filled = sequence.length() - sequence.sealed_tokens
        total = filled + count
        if total < SEGMENT_TOKENS:
            new = pages_of(total) - pages_of(filled)
        else:
            # A Segment that was begun is completed in Frames; whole ones bypass them.
            completed = pages_of(SEGMENT_TOKENS) - pages_of(filled) if filled else 0
            new = completed + pages_of(total % SEGMENT_TOKENS)
        return new * self._page_bytes

    def _has_room_for(self, needed_bytes: int) -> bool:
        """Whether so many bytes can be promised to a pass, and one whole unit be read through."""
        used_bytes = self.residency.hot.tier.used_bytes + self._promised_bytes()
        # Mostly there is room even if all that HOT holds were dirty: then nobody need look.
        return needed_bytes <= self._room_bytes - used_bytes or needed_bytes <= self._clean_bytes()

    def _promised_bytes(self) -> int:
        return sum([each.reserved_bytes for each in self.growing])

    def _clean_bytes(self) -> int:
        """Bytes of HOT beyond Frames that hold the only copy of their Pages, those promised, those
        that reads on their way will fill, and room for one whole unit; below 0: of that lacking."""
        dirty = np.einsum("ij,ij->i", self.residency.hot.pages, ~self.residency.on_nvme)
        dirty_bytes = int(dirty @ self.mover.room.frame_bytes)
        return self._room_bytes - dirty_bytes - self._promised_bytes() - self.mover.flying_bytes

    def spare_bytes(self) -> int:
        """Bytes of HOT that reads on their way may take beyond those they have, so that passes
        keep what they were promised and one whole unit can be read through."""
        return max(0, self._clean_bytes())

    def _sealable(self) -> list[Sequence]:
        """Sequences whose Pages in HOT alone may be written now, the longest Tail first."""
        return sorted(
            (
                each
                for each in self.growing
                if each.between_passes and (each.tail or self.sealer.unwritten(each))
            ),
            key=lambda each: each.length() - each.sealed_tokens,
            reverse=True,
        )

    # ---- sealing ----------------------------------------------------------------------------

    def freeze(self, sequence: Sequence) -> Segment | None:
        """End the Tail: it becomes a short Segment, still in HOT alone. None: it was empty.

        Raises ConfigError during a pass.
        """
        sequence.require_between_passes()
        sequence.reserved_bytes = 0
        if not sequence.tail:
            return None
        assert len(sequence.tail) == 1, "complete Segments leave the Tail at once"
        segment = sequence.tail.pop()
        segment.freeze()
        sealing = sequence.sealing
        sequence.views = (*sequence.views, SegmentView(segment, segment.token_count))
        sequence.sealing = sealing
        return segment

    def seal(self, sequence: Sequence) -> None:
        """End the Tail and write what is not on the device yet."""
        self.freeze(sequence)
        self.sealer.finish(sequence)
        self.sealer.write_out(sequence)

    def unsaved_bytes(self, sequence: Sequence) -> int:
        """Bytes that the Extents of a Sequence take which no row of the catalog names yet."""
        counts = [v.segment.token_count for v in sequence.views if v.segment.catalog_id is None]
        counts.append(sequence.length() - sequence.sealed_tokens)
        layers = range(len(self.geometry.layers))
        return sum(self.extents.stored_bytes(each, n) for n in counts if n for each in layers)

    # ---- copy-on-write ----------------------------------------------------------------------

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Give an empty Sequence the same tokens."""
        sequence.require_between_passes()
        if sequence.length() - sequence.sealed_tokens >= FORK_COPY_TOKENS_MAX:
            self.freeze(sequence)
        twin.tokens = sequence.tokens
        twin.views, twin.sealing = sequence.views, sequence.sealing
        for view in twin.views:
            view.segment.references += 1
        # What is shared but not written yet stays sealable when the original is gone.
        self.growing.add(twin)
        if sequence.tail:
            self._copy_into_tail(twin, sequence.tail[0], sequence.tail[0].filled[0])

    def _copy_into_tail(self, sequence: Sequence, source: Segment, count: int) -> None:
        """Give a Sequence without Tail the first tokens of a Segment, as its own."""
        self.growing.add(sequence)
        self._secure_room(sequence, count)
        for layer in range(sequence.layers):
            self.mover.load([Unit(source, layer)])
            keys, values = self.mover.tensors(Unit(source, layer))
            self._append(sequence, layer, keys[:, :count], values[:, :count])

    def crop(self, sequence: Sequence, length: int) -> list[Segment]:
        """Forget tokens from `length` on; returns the Segments that this Sequence let go.

        During a pass, `length` may be at most what every layer holds: that abandons the pass.
        """
        held = int(sequence.lengths.min())
        if not 0 <= length <= held:
            raise ConfigError(f"cannot crop to {length} tokens: {held} are held")
        before = sequence.views, sequence.tail, sequence.tokens
        sequence.tokens = sequence.tokens[:length]
        if length == held and sequence.between_passes:
            return []
        sequence.reserved_bytes = 0
        dropped = list(sequence.tail)
        sequence.tail = []
        while sequence.views and sequence.views[-1].end > length:
            dropped.insert(0, sequence.views[-1].segment)
            sequence.views = sequence.views[:-1]
        cut = next((each for each in dropped if each.start < length), None)
        if cut is not None and cut.catalog_id is not None:
            sequence.views = (*sequence.views, SegmentView(cut, length - cut.start))
            dropped.remove(cut)
        elif cut is not None:
            kept = len(sequence.views)
            try:
                self._copy_into_tail(sequence, cut, length - cut.start)
            except BaseException:
                copies = [view.segment for view in sequence.views[kept:]]
                self.forget([*copies, *sequence.tail])
                sequence.views, sequence.tail, sequence.tokens = before
                raise
        return dropped
