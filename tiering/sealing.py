"""Units that HOT alone has, to the drive: at once, or a step at a time while a decode goes on.

A decode that fills a Segment must not wait for the orders of its tokens. So the Segment is frozen
as it lies in Frames, and each pass that follows takes a few steps of its sealing: orders are made,
for many layers together, and then one layer after the other is written.

Invariants:
- Until it is written, such a Segment is what a Tail is that a fork froze: HOT has its only copy, in
  the order of positions, and it can be attended to, cropped, shared and written at any moment.
- Nothing rests on a Sealing. Where one is forgotten, or finds that others wrote what it was about
  to write, the Segment is written like any other that HOT alone has.
"""

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from itertools import groupby

from kvtier.errors import KvtierError
from kvtier.tiering.clusterer import STEP_ELEMENTS, UnitKeys
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.extent_writer import ExtentWriter, UnitWrite
from kvtier.tiering.geometry import SEGMENT_TOKENS, Geometry
from kvtier.tiering.page_layout import Order
from kvtier.tiering.registry import Registry
from kvtier.tiering.segment import Segment, SegmentView
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.transfer import Mover

_log = logging.getLogger("kvtier")

TOKENS_TO_SEAL = 256
"""That follow a Segment until it is sealed, or about so many: it is done before the next one."""
BATCH_STEPS = 60
"""In which STEP_ELEMENTS of keys are ordered: 40 to 45 with the keys of a real model."""


@dataclass(slots=True, eq=False)
class Sealing:
    """Of a Segment that a Sequence, or several that share it, filled.

    before: the views before it. steps: what is to be done; see Sealer. written: how many of its
    layers were written so far.
    """

    segment: Segment
    before: tuple[SegmentView, ...]
    steps: Iterator[None]
    written: int
    done: bool = False

    @property
    def end(self) -> int:
        """Position after the Segment's last token."""
        return self.segment.start + self.segment.token_count


class Sealer:
    """Callers hold the store's lock."""

    def __init__(
        self, geometry: Geometry, mover: Mover, extents: ExtentWriter, registry: Registry
    ) -> None:
        self.mover = mover
        self.residency = mover.residency
        self.extents = extents
        self.registry = registry
        self.placement = extents.placement
        widths = sum(each.kv_heads * each.key_width for each in geometry.layers)
        batches = -(-widths * SEGMENT_TOKENS // STEP_ELEMENTS)
        steps = batches * BATCH_STEPS + 2 * len(geometry.layers)
        self.pace = -(-steps // TOKENS_TO_SEAL)
        """Steps for each token of a pass."""

    # ---- at once ----------------------------------------------------------------------------

    def write_out(self, sequence: Sequence) -> None:
        """Begin to write every frozen Segment of a Sequence that exists in HOT alone, but for what
        is being sealed, and write anew what a flush that failed may have lost."""
        lost = [view.segment for view in sequence.views if self.extents.may_be_lost(view.segment)]
        for _, some in groupby(self.unwritten(sequence), lambda unit: unit.segment.start):
            self._write(list(some))
        for segment in lost:
            # One by one: HOT need not have room for more. Room on the drive may take a flush,
            # which may fail too: then it counts as lost once more.
            epoch = self.extents.device.failed_flushes
            for layer in range(segment.layers):
                unit = Unit(segment, layer)
                self._take_back(unit)
                self._write([unit])
                self.extents.finish([unit])
            segment.flush_epoch = epoch

    def unwritten(self, sequence: Sequence) -> list[Unit]:
        """Units of a Sequence's frozen Segments, but for what is being sealed, that are not on the
        device and that HOT has."""
        sealing = sequence.sealing
        sealed = None if sealing is None or sealing.done else sealing.segment
        return [
            unit
            for view in sequence.views
            if not view.segment.written and view.segment is not sealed
            for unit in self._only_in_hot(view.segment)
        ]

    def _only_in_hot(self, segment: Segment) -> list[Unit]:
        """Units of a Segment that are not on the device and that HOT has. What the device did not
        take may have left HOT: then it is lost."""
        return [
            Unit(segment, layer)
            for layer, extent in enumerate(segment.extents)
            if extent is None and self.residency.hot.pages[layer, segment.slot]
        ]

    def _take_back(self, unit: Unit) -> None:
        """Make HOT the only place of an uncommitted unit. Raises FormatError, DeviceError."""
        segment, layer = unit.segment, unit.layer
        loaded = self.mover.load([unit])
        assert loaded, "HOT always has room for one unit"
        keys, values = self.mover.tensors(unit)
        self.registry.free_extents(segment, [layer])
        segment.orders[layer] = None
        # Frames in the order that a placement chose would be taken for the order of positions.
        self.residency.on_nvme[layer, segment.slot] = False
        self.residency.hot.drop(layer, segment.slot)
        self.residency.host.drop(layer, segment.slot)
        segment.filled[layer] = 0
        self.mover.append(segment, layer, keys, values)

    def _write(self, units: Listing[Unit], orders: dict[int, Order] | None = None) -> None:
        """Begin to write units of frozen Segments that HOT alone has. They stay dirty until the
        drive has them. orders: by layer, where they are known; what has none keeps the order of
        positions. Raises CapacityError, DeviceError."""
        writes = [
            UnitWrite(
                unit,
                *self.mover.tensors(unit),
                order=None if orders is None else orders.get(unit.layer),
                is_ordered=orders is not None,
            )
            for unit in units
        ]
        self.extents.write(writes)
        for write in writes:
            self.mover.reorder(write)

    # ---- in steps ---------------------------------------------------------------------------

    def begin(self, sequence: Sequence, segment: Segment, before: tuple[SegmentView, ...]) -> None:
        """Seal a Segment that a Sequence has just filled, where HOT alone has some of it, while its
        passes go on. before: the views before it."""
        layers = [unit.layer for unit in self._only_in_hot(segment)]
        if layers:
            steps = self._steps(segment, layers)
            sequence.sealing = Sealing(segment, before, steps, segment.layers - len(layers))

    def _steps(self, segment: Segment, layers: list[int]) -> Iterator[None]:
        units = [Unit(segment, layer) for layer in layers]
        keys = (UnitKeys(u.layer, segment.start, self.mover.tensors(u)[0]) for u in units)
        found = yield from self.placement.ordering(keys)
        orders = {layers[number]: order for number, order in found.items()}
        for unit in units:
            self._write([unit], orders)
            yield

    def advance(self, sequence: Sequence, tokens: int) -> bool:
        """A pass of so many tokens has ended. True: what was being sealed is written, and can be
        committed."""
        sealing = sequence.sealing
        if sealing is None:
            return False
        self._take(sealing, tokens * self.pace)
        if not sealing.done:
            return False
        sequence.sealing = None
        return sealing.segment.written

    def finish(self, sequence: Sequence) -> None:
        """Have all of it begin to go to the drive now. Whoever needs it hears of what fails."""
        if sequence.sealing is not None:
            self._take(sequence.sealing, None)

    def end(self, sequence: Sequence, commit: Callable[[Sequence], None]) -> None:
        """A Sequence is released, or its store closed: what it filled is stored, if it is named."""
        sealing = sequence.sealing
        if sealing is None or sealing.end > len(sequence.tokens):
            return
        self.finish(sequence)
        try:
            commit(sequence)
        except KvtierError as error:
            _log.error("tokens up to %d of a sequence are not stored: %s", sealing.end, error)

    def _take(self, sealing: Sealing, steps: int | None) -> None:
        """So many steps; None: all."""
        segment = sealing.segment
        try:
            while not sealing.done and steps != 0:
                # Where others wrote some of it, they write the rest as well.
                if _written(segment) != sealing.written or next(sealing.steps, True):
                    sealing.done = True
                sealing.written = _written(segment)
                steps = None if steps is None else steps - 1
        except KvtierError as error:
            # It stays in HOT, and is written when it is saved, or room is needed.
            sealing.done = True
            where = f"tokens {segment.start} to {sealing.end}"
            _log.error("%s are not written yet: %s", where, error)


def _written(segment: Segment) -> int:
    """How many of its layers are written, or on their way."""
    return segment.layers - segment.extents.count(None)
