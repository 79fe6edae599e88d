"""Single Pages in HOT of units that HOT does not hold whole: those that queries wanted lately.

A Page is named by its place in the flat arrays of a layer: (slot * heads + head) * 32 + page.

Invariants:
- frames of a place: a Frame of HOT that holds the checked bytes of that Page; NO_FRAME; or below
  that a mark of whoever is bringing it. pages[layer, slot] counts the first kind.
- Each Frame that was taken from HOT holds one Page, or is spare. held_bytes counts them all, and
  HOT's limit does.
- Every Page that is held stands in `_queue`, in the entry of the tick at which it was wanted last.
  What else stands there has no meaning, and is bounded.
- The Page wanted last leaves last, and none that was wanted since the outermost lease began.
- What a place holds is forgotten when its Segment loses its slot or Extents (`forget`), and when
  HOT needs memory and has its unit whole.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import CapacityError
from kvtier.io.device import Int64Array
from kvtier.tiering.frame_runs import FrameArray
from kvtier.tiering.geometry import SEGMENT_PAGES, Geometry
from kvtier.tiering.residency import NO_FRAME, Residency

KEPT_STEPS = 16
"""Pages wanted in so many steps before this one leave after whole units, the others before them."""
QUEUE_FACTOR, QUEUE_SLACK = 8, 16384
"""Places that the queue may have for each Page that is held, and beyond that."""
_NOBODY = 1 << 62


@dataclass(slots=True)
class _Places:
    """Of one layer, by place. wanted: the tick at which a Page was wanted last."""

    frames: npt.NDArray[np.int32]
    wanted: Int64Array


class PageCache:
    """Of one store. Callers hold its lock."""

    def __init__(self, geometry: Geometry, residency: Residency) -> None:
        layers = geometry.layers
        self.residency = residency
        self.tier = residency.hot.tier
        self.held_bytes = 0
        self.count = 0
        """Pages that are held."""
        self.page_bytes = 0
        """Bytes of their Frames: held_bytes without what is spare, or in somebody's hands."""
        self.pages = np.zeros((len(layers), 0), np.int32)
        self._places: list[_Places | None] = [None] * len(layers)
        self.unit_places = [each.kv_heads * SEGMENT_PAGES for each in layers]
        """Places of one unit, by layer."""
        self._frame_bytes = [geometry.frame_bytes(layer) for layer in range(len(layers))]
        widths = [each.row_width for each in layers]
        self._pool = [widths.index(each) for each in widths]
        """By layer, the first one that has its Frames in the same pool."""
        self._spare = {pool: np.zeros(0, np.int64) for pool in self._pool}
        self._tick = 0
        self._queue: deque[tuple[int, int, Int64Array]] = deque()
        """(tick, layer, places), ticks rising."""
        self._queued = 0
        self._steps: deque[int] = deque([0], KEPT_STEPS + 1)
        """The ticks at which the last steps began."""
        self._leased_from = _NOBODY

    # ---- what is there ----------------------------------------------------------------------

    def places(
        self, layer: int, slots: Int64Array, heads: Int64Array, pages: Int64Array
    ) -> Int64Array:
        """Where Pages of a layer lie in its flat arrays."""
        if self._places[layer] is None or self.pages.shape[1] < self.residency.slots:
            self._grow(layer)
        return slots * self.unit_places[layer] + heads * SEGMENT_PAGES + pages

    def _grow(self, layer: int) -> None:
        slots = self.residency.slots
        self.pages = np.pad(self.pages, ((0, 0), (0, slots - self.pages.shape[1])))
        for each, had in enumerate(self._places):
            if had is None and each != layer:
                continue
            size = slots * self.unit_places[each]
            if had is not None and len(had.frames) == size:
                continue
            made = _Places(np.full(size, NO_FRAME, np.int32), np.zeros(size, np.int64))
            if had is not None:
                made.frames[: len(had.frames)] = had.frames
                made.wanted[: len(had.wanted)] = had.wanted
            self._places[each] = made

    def _of(self, layer: int) -> _Places:
        found = self._places[layer]
        assert found is not None, "places of this layer were never asked for"
        return found

    def frames(self, layer: int, places: Int64Array) -> FrameArray:
        """int64, a Frame for each place, or NO_FRAME, or a mark below it."""
        return self._of(layer).frames[places].astype(np.int64)

    def mark(self, layer: int, places: Int64Array, mark: int) -> None:
        """Somebody is bringing these, which are not there. mark: below NO_FRAME."""
        self._of(layer).frames[places] = mark

    def unmark(self, layer: int, places: Int64Array, mark: int) -> None:
        """Nobody does any more."""
        frames = self._of(layer).frames
        frames[places[frames[places] == mark]] = NO_FRAME

    # ---- what was wanted --------------------------------------------------------------------

    def begin_step(self) -> None:
        """Called when a model starts again at its first layer."""
        self._steps.append(self._tick + 1)

    def want(self, layer: int, places: Int64Array) -> None:
        """These Pages, which are held, are wanted now."""
        self._tick += 1
        self._of(layer).wanted[places] = self._tick
        self._queue.append((self._tick, layer, places))
        self._queued += len(places)
        if self._queued > QUEUE_FACTOR * self.count + QUEUE_SLACK:
            self._compact()

    def _note_unwanted(self, layer: int, places: Int64Array) -> None:
        """Have these Pages, which are held, in the queue as if they had been wanted last just
        before the outermost lease began: they leave where what it keeps needs the room."""
        later = []
        while self._queue and self._queue[-1][0] >= self._leased_from:
            later.append(self._queue.pop())
        tick = min(self._tick, self._leased_from - 1)
        self._of(layer).wanted[places] = tick
        self._queue.append((tick, layer, places))
        self._queued += len(places)
        self._queue.extend(reversed(later))

    def _compact(self) -> None:
        """Leave in the queue what has a meaning there."""
        kept = [(each[0], each[1], self._latest(*each)) for each in self._queue]
        self._queue = deque(each for each in kept if len(each[2]))
        self._queued = sum([len(each[2]) for each in self._queue])

    def _latest(self, tick: int, layer: int, places: Int64Array) -> Int64Array:
        """Which of these are held and were not wanted since, as often as they are named."""
        of = self._of(layer)
        latest: Int64Array = places[(of.wanted[places] == tick) & (of.frames[places] > NO_FRAME)]
        return latest

    @contextmanager
    def lease(self) -> Iterator[None]:
        """A promise that no Page leaves that is wanted while the block runs."""
        outer = self._leased_from
        self._leased_from = min(outer, self._tick + 1)
        try:
            yield
        finally:
            self._leased_from = outer

    # ---- Frames -----------------------------------------------------------------------------

    def take(self, layer: int, count: int, make_room: Callable[[int], bool]) -> FrameArray:
        """Frames for Pages of this layer: spare ones, free ones, those of Pages that were not
        wanted lately, and what make_room(bytes) frees. Raises CapacityError."""
        pool = self._pool[layer]
        short = count - len(self._spare[pool])
        if short > 0:
            missing = short * self._frame_bytes[layer] - self.tier.free_bytes
            if missing > 0:
                self._let_go(missing, self._before())
                self._give_spare(but=pool)
                short = count - len(self._spare[pool])
        if short > 0:
            # Out of reach of who makes room, and counts what becomes free.
            own, self._spare[pool] = self._spare[pool], np.zeros(0, np.int64)
            try:
                needed = short * self._frame_bytes[layer]
                if not make_room(needed):
                    tier = self.tier
                    raise CapacityError(tier.name, needed, tier.free_bytes, tier.limit_bytes)
                taken = self.tier.take(layer, short)
                self.held_bytes += needed
                own = np.concatenate([own, taken])
            finally:
                self._add_spare(pool, own)
        spare = self._spare[pool]
        self._spare[pool] = spare[: len(spare) - count]
        return spare[len(spare) - count :]

    def put(
        self, layer: int, places: Int64Array, frames: FrameArray, *, is_wanted: bool = True
    ) -> None:
        """These Pages, each named once, are in these Frames, which were taken for this layer.
        is_wanted: now; else somebody may want them later, and no lease keeps them."""
        of = self._of(layer)
        assert (of.frames[places] <= NO_FRAME).all()
        of.frames[places] = frames
        np.add.at(self.pages[layer], places // self.unit_places[layer], 1)
        self.count += len(places)
        self.page_bytes += len(places) * self._frame_bytes[layer]
        if is_wanted:
            self.want(layer, places)
        else:
            self._note_unwanted(layer, places)

    def give(self, layer: int, frames: FrameArray) -> None:
        """Frames that were taken are not needed after all."""
        self._add_spare(self._pool[layer], frames)

    def _add_spare(self, pool: int, frames: FrameArray) -> None:
        self._spare[pool] = np.concatenate([self._spare[pool], frames])

    def _drop(self, layer: int, places: Int64Array) -> None:
        """These Pages, each named once, leave."""
        frames = self._of(layer).frames
        self._add_spare(self._pool[layer], frames[places].astype(np.int64))
        frames[places] = NO_FRAME
        np.subtract.at(self.pages[layer], places // self.unit_places[layer], 1)
        self.count -= len(places)
        self.page_bytes -= len(places) * self._frame_bytes[layer]

    # ---- given up ---------------------------------------------------------------------------

    def _before(self, *, lately: bool = False) -> int:
        """The tick before which a Page was wanted last that may leave. lately: also of those that
        were wanted in the last steps."""
        if lately:
            return self._leased_from
        return min(self._steps[0] if len(self._steps) > KEPT_STEPS else 0, self._leased_from)

    def give_up(self, nbytes: int, *, lately: bool = False) -> int:
        """Give so many bytes back to HOT, if there are; returns how many it were. lately: at the
        cost of what was wanted in the last steps, too."""
        if not self.held_bytes:
            return 0
        before = self.tier.used_bytes
        self._let_go(nbytes - self._spare_bytes(), self._before(lately=lately))
        self._give_spare()
        return before - self.tier.used_bytes

    @property
    def leaving_bytes(self) -> int:
        """Bytes that `give_up` can give back, lately wanted ones among them."""
        kept = 0
        if self._leased_from != _NOBODY:
            for entry in reversed(self._queue):
                if entry[0] < self._leased_from:
                    break
                kept += len(np.unique(self._latest(*entry))) * self._frame_bytes[entry[1]]
        return self._spare_bytes() + self.page_bytes - kept

    def _spare_bytes(self) -> int:
        return sum([len(frames) * self._frame_bytes[at] for at, frames in self._spare.items()])

    def _give_spare(self, but: int | None = None) -> None:
        """Give spare Frames of all pools back to HOT, but one's."""
        for pool, frames in self._spare.items():
            if pool != but and len(frames):
                self._spare[pool] = frames[:0]
                self.held_bytes -= len(frames) * self._frame_bytes[pool]
                self.tier.give(pool, frames)

    def _let_go(self, nbytes: int, before: int) -> None:
        """Make Frames of so many bytes spare, if there are: of Pages whose units HOT has whole, and
        of those wanted last before this tick, longest ago first."""
        if nbytes > 0:
            nbytes -= self._let_go_whole()
        while nbytes > 0 and self._queue and self._queue[0][0] < before:
            tick, layer, places = self._queue.popleft()
            self._queued -= len(places)
            held = np.unique(self._latest(tick, layer, places))
            most = -(-nbytes // self._frame_bytes[layer])
            if len(held) > most:
                self._queue.appendleft((tick, layer, held[most:]))
                self._queued += len(held) - most
                held = held[:most]
            self._drop(layer, held)
            nbytes -= len(held) * self._frame_bytes[layer]

    def _let_go_whole(self) -> int:
        """The first of these; returns how many bytes."""
        hot = self.residency.hot.pages[:, : self.pages.shape[1]]
        freed = 0
        for layer, slot in zip(*((self.pages > 0) & (hot > 0)).nonzero(), strict=True):
            freed += self._forget_unit(int(layer), int(slot)) * self._frame_bytes[layer]
        return freed

    def forget(self, slot: int) -> None:
        """What is known of the Pages of this slot holds no more."""
        if slot < self.pages.shape[1]:
            for layer, known in enumerate(self._places):
                if known is not None:
                    self._forget_unit(layer, slot)

    def _forget_unit(self, layer: int, slot: int) -> int:
        """Returns how many Pages it had here."""
        first = slot * self.unit_places[layer]
        here = self._of(layer).frames[first : first + self.unit_places[layer]]
        held = (here > NO_FRAME).nonzero()[0]
        if len(held):
            self._drop(layer, held + first)
        here[:] = NO_FRAME
        return len(held)
