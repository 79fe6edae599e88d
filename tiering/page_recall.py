"""Brings single Pages into HOT, for queries that want some Pages of a context and not all.

Invariants:
- A Page is known to PageCache only after its bytes had the checksum of its directory.
- Frames are taken before Pages are read for somebody who waits, and when they have landed for
  what was begun ahead, which only gets what is free or idle.
- Nothing begun ahead ever fails anybody: who needs the Page reads it again, and hears of it.
- A flight ahead has marked its Pages in PageCache. What has another mark when it lands is dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from kvtier.errors import CapacityError, ChecksumMismatch, ClosedError, DeviceError
from kvtier.io.buffers import BufferPool
from kvtier.io.device import Int64Array, Priority
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.frame_runs import FrameArray
from kvtier.tiering.geometry import SEGMENT_PAGES
from kvtier.tiering.page_directory import PageDirectories
from kvtier.tiering.page_flight import PageFetch, PageFlight, PageReads, PageTarget, distinct
from kvtier.tiering.residency import NO_FRAME
from kvtier.tiering.segment import Segment
from kvtier.tiering.steps import Reading, Steps, run
from kvtier.tiering.transfer import Mover

PART_BYTES = 8 << 20
"""Bytes of Pages that one flight brings, and some for holes and rounding."""
FLIGHTS_MAX = 2
"""While one is checked, the next is read."""
BUFFER_BYTES = 32 << 20
AHEAD_BUFFER_BYTES = 16 << 20
HOLE_BYTES = 8 << 10
"""Holes that are read along on any device: to ask once more costs more processor time than they do,
whatever a device was measured to do."""
_FIRST_MARK = NO_FRAME - 1
_LAST_MARK = -(1 << 30)


@dataclass(slots=True)
class RecallCounters:
    """Since the store was opened. bytes_wanted: of Pages whose reading was begun, bytes_read: what
    that took with holes and rounding."""

    pages_wanted: int = 0
    pages_missed: int = 0
    """Of those wanted, that nobody had in HOT, or had begun to read."""
    pages_ahead: int = 0
    """Whose reading was begun ahead."""
    reads: int = 0
    bytes_wanted: int = 0
    bytes_read: int = 0


class PageRecall:
    """Of one store. Callers hold its lock."""

    def __init__(self, mover: Mover) -> None:
        self.extents = mover.extents
        self.device = mover.extents.device
        self.residency = mover.residency
        self.cache = mover.room.page_cache
        self.directories = PageDirectories(mover.extents)
        self.counters = RecallCounters()
        self._make_room = mover.make_room
        self._find_idle: Callable[[int], bool] = lambda nbytes: mover.room.make(
            nbytes, idle_only=True
        )
        # Two, so that what nobody waits for does not hold up others. Address space until used.
        self._reading = Reading(BufferPool(BUFFER_BYTES), PART_BYTES)
        self._buffers_ahead = BufferPool(AHEAD_BUFFER_BYTES)
        self._ahead: dict[int, PageFlight] = {}
        """By their marks."""
        self._mark = _FIRST_MARK

    def require_directories(self, units: Sequence[Unit]) -> None:
        """Know what reading single Pages of these units takes: headers that are not known are read
        together. A Segment keeps its slot while it is used so. Raises FormatError, DeviceError."""
        self.directories.note({each.segment: None for each in units})
        run(self.directories.loading(units, self.extents.blocking), self.device)

    # ---- wanted -----------------------------------------------------------------------------

    @contextmanager
    def recalling(
        self, layer: int, slots: Int64Array, heads: Int64Array, pages: Int64Array
    ) -> Iterator[Callable[[], FrameArray]]:
        """Have these Pages of a layer set out, and give what waits for them: called, it returns the
        Frames of HOT that hold them, int64 [n], which stay what they are while the block runs.
        Others may compute until then.

        slots, heads, pages: int64 [n], in any order; a Page may be named more than once. The
        Segments at `slots` went through require_directories, and HOT or the device has the Pages.
        As many as one unit has always find room. Raises FormatError or DeviceError for bytes that
        cannot be had, after marking their Segments; CapacityError where HOT has no room for all.
        """
        places = self.cache.places(layer, slots, heads, pages)
        frames = self.residency.hot.frames[layer].reshape(-1)[places].astype(np.int64)
        self.counters.pages_wanted += len(places)
        is_single = frames == NO_FRAME
        whole = slots[~is_single]
        with self.cache.lease(), self._leased(layer, whole):
            if len(whole) == len(places):
                yield lambda: frames
                return
            wanted = places[is_single] if len(whole) else places
            fetch = self._set_out(layer, wanted)
            try:

                def landed() -> FrameArray:
                    if fetch is not None:
                        run(self._landing(fetch), self.device)
                    frames[is_single] = self.cache.frames(layer, wanted)
                    assert (frames > NO_FRAME).all()
                    return frames

                yield landed
            finally:
                if fetch is not None:
                    self._settle(fetch)

    def _leased(self, layer: int, whole: Int64Array) -> AbstractContextManager[None]:
        """Units at these slots, if there are any, are used now, and stay while the block runs."""
        if not len(whole):
            return nullcontext()
        layers = np.full(len(whole), layer)
        self.residency.touch(layers, whole)
        return self.residency.lease(layers, whole)

    def _set_out(self, layer: int, wanted: Int64Array) -> PageFetch | None:
        """Have Pages, whose units HOT does not hold, begin to be read that nobody has; None: all
        are there."""
        held = self.cache.frames(layer, wanted)
        there = held > NO_FRAME
        all_there = bool(there.all())
        if all_there:
            self.cache.want(layer, wanted)
        elif there.any():
            self.cache.want(layer, wanted[there])
        if self._ahead:
            self._take_in(layer, wanted, {*held[~there].tolist()})
            held = self.cache.frames(layer, wanted)
            all_there = bool((held > NO_FRAME).all())
        if all_there:
            return None
        missing = distinct(np.sort(wanted[held <= NO_FRAME]))
        self.counters.pages_missed += len(missing)
        fetch = PageFetch(layer, self.cache.take(layer, len(missing), self._make_room))
        try:
            run(self._starting(fetch, missing), self.device)
        except BaseException:
            self._settle(fetch)
            raise
        return fetch

    def _settle(self, fetch: PageFetch) -> None:
        """Give back what a fetch has of buffers and Frames."""
        for flight in fetch.flights:
            flight.piece.give_back()
        fetch.flights.clear()
        if len(fetch.left):
            self.cache.give(fetch.layer, fetch.left)
            fetch.left = fetch.left[:0]

    def _starting(self, fetch: PageFetch, missing: Int64Array) -> Steps[None]:
        """Plan how these Pages, for which there are Frames, are read, and begin with the first."""
        layer = fetch.layer
        missing = self._from_host(fetch, missing)
        if not len(missing):
            return
        slots = distinct(missing // self.cache.unit_places[layer]).tolist()
        if lacking := self.directories.lacking(layer, slots):
            units = self.directories.units(layer, lacking)
            yield from self.directories.loading(units, self.extents.blocking)
        planned = self._plan(missing, *self.directories.ranges(layer, missing))
        fetch.parts.extend(self._part(planned, part) for part in planned.parts(PART_BYTES))
        while fetch.parts and len(fetch.flights) < FLIGHTS_MAX:
            yield from self._start_part(fetch)

    def _start_part(self, fetch: PageFetch) -> Steps[None]:
        some = fetch.parts.popleft()
        piece = yield from self._reading.piece(some.nbytes)
        fetch.flights.append(PageFlight(fetch.layer, some, piece))
        yield from fetch.flights[-1].starting(Priority.DEMAND)
        self._count(some)

    def _landing(self, fetch: PageFetch) -> Steps[None]:
        """Wait until all has landed."""
        while fetch.flights:
            yield from self._land(fetch)
            if fetch.parts:
                yield from self._start_part(fetch)

    def _from_host(self, fetch: PageFetch, missing: Int64Array) -> Int64Array:
        """Copy what HOST has; returns the rest."""
        layer, host, hot = fetch.layer, self.residency.host, self.residency.hot
        if not host.tier.used_bytes:
            return missing
        rows = host.frames[layer].reshape(-1)[missing]
        there = rows != NO_FRAME
        if there.any():
            frames = fetch.some(int(there.sum()))
            hot.tier.pool(layer).bits[frames] = host.tier.pool(layer).bits[rows[there]]
            self.cache.put(layer, missing[there], frames)
        rest: Int64Array = missing[~there]
        return rest

    def _land(self, fetch: PageFetch) -> Steps[None]:
        """Wait for the first flight, and have its Pages in Frames."""
        flight = fetch.flights[0]
        failed = yield from flight.landing()
        pages = np.arange(len(flight.planned.places))
        if failed:
            pages = np.delete(pages, [page for page, _ in failed])
        unsound = self._keep(flight, pages, fetch.some(len(pages)))
        fetch.flights.popleft().piece.give_back()
        if len(unsound):
            raise self._blame_damaged(flight, unsound)
        if failed:
            numbers = dict(failed)
            units = self._units_of(flight, np.array(list(numbers)))
            raise self.extents.blame_unread([(unit, numbers[page]) for page, unit in units.items()])

    def _keep(
        self, flight: PageFlight, pages: Int64Array, frames: FrameArray, *, is_wanted: bool = True
    ) -> Int64Array:
        """Have Pages that landed, by their indices, in these Frames, and PageCache know them;
        returns which of them are not what they should be."""
        layer = flight.layer
        places = flight.planned.places[pages]
        slots = places // self.cache.unit_places[layer]
        sound = flight.unpack(
            pages,
            self.directories.generations(slots.tolist()),
            self.directories.checksums(layer, places),
            frames,
            self._target(layer),
        )
        if sound.all():
            self.cache.put(layer, places, frames, is_wanted=is_wanted)
            return pages[:0]
        self.cache.put(layer, places[sound], frames[sound], is_wanted=is_wanted)
        self.cache.give(layer, frames[~sound])
        return pages[~sound]

    def _target(self, layer: int) -> PageTarget:
        geometry = self.extents.geometry
        pool = self.residency.hot.tier.pool(layer)
        return PageTarget(pool, geometry.layers[layer], geometry.item_bytes)

    def _units_of(self, flight: PageFlight, pages: Int64Array) -> dict[int, Unit]:
        """The units of some Pages of a flight, each by the index of the first of its Pages."""
        slots = flight.planned.places[pages] // self.cache.unit_places[flight.layer]
        slots, firsts = np.unique(slots, return_index=True)
        units = self.directories.units(flight.layer, slots.tolist())
        return dict(zip(pages[firsts].tolist(), units, strict=True))

    def _blame_damaged(self, flight: PageFlight, pages: Int64Array) -> ChecksumMismatch:
        """Mark the units of Pages that are not what they should be; the error to raise."""
        errors = []
        for page, unit in self._units_of(flight, pages).items():
            place = int(flight.planned.places[page]) % self.cache.unit_places[flight.layer]
            head, number = divmod(place, SEGMENT_PAGES)
            where = self.extents.where(unit)
            errors.append(ChecksumMismatch(f"{where}: page {number} of kv head {head} is damaged"))
            self.extents.blame_damaged(unit, errors[-1])
        return errors[0]

    def _plan(self, places: Int64Array, offsets: Int64Array, lengths: Int64Array) -> PageReads:
        device = self.device
        hole_bytes = max(device.merge_gap_bytes, HOLE_BYTES)
        return PageReads.plan(places, offsets, lengths, device.block_bytes, hole_bytes)

    def _part(self, planned: PageReads, part: slice) -> PageReads:
        if part == slice(0, len(planned.places)):
            return planned
        return self._plan(planned.places[part], planned.offsets[part], planned.lengths[part])

    def _count(self, planned: PageReads) -> None:
        nbytes = planned.nbytes
        self.counters.reads += len(planned.reads[0])
        self.counters.bytes_wanted += int(planned.lengths.sum())
        self.counters.bytes_read += nbytes
        self.extents.counters.bytes_read += nbytes

    # ---- ahead ------------------------------------------------------------------------------

    def start(self, layer: int, slots: Int64Array, heads: Int64Array, pages: Int64Array) -> None:
        """Begin to read Pages that a query will probably want; `recalling` of the layer lands them.

        As `recalling` takes them. Reads what is nowhere in memory, of units whose directories are
        known, as far as there are buffers. Never raises for what the device does.
        """
        places = self.cache.places(layer, slots, heads, pages)
        places = places[self.cache.frames(layer, places) == NO_FRAME]
        for tier in (self.residency.hot, self.residency.host):
            if len(places):
                places = places[tier.frames[layer].reshape(-1)[places] == NO_FRAME]
        if not len(places):
            return
        places = distinct(np.sort(places))
        of = places // self.cache.unit_places[layer]
        known = self.directories.known(layer, distinct(of).tolist())
        places = places[np.isin(of, known)]
        if not len(places):
            return
        planned = self._plan(places, *self.directories.ranges(layer, places))
        planned = self._part(planned, planned.parts(PART_BYTES)[0])
        piece = self._buffers_ahead.take(planned.nbytes)
        if piece is None:
            # Of layers that nobody came back to, perhaps.
            self.give_up()
            return
        flight = PageFlight(layer, planned, piece)
        try:
            run(flight.starting(Priority.PREFETCH), self.device)
        except (DeviceError, ClosedError):
            piece.give_back()
            return
        self._mark = self._mark - 1 if self._mark > _LAST_MARK else _FIRST_MARK
        assert self._mark not in self._ahead
        self._ahead[self._mark] = flight
        self.cache.mark(layer, planned.places, self._mark)
        self.counters.pages_ahead += len(planned.places)
        self._count(planned)

    def _take_in(self, layer: int, wanted: Int64Array, marks: set[int]) -> None:
        """Bring into HOT what was begun ahead for a layer, now that its turn has come: what has
        landed, or is wanted. marks: of flights that bring what is wanted."""
        for mark, flight in list(self._ahead.items()):
            if flight.layer != layer:
                continue
            del self._ahead[mark]
            try:
                if mark in marks or not flight.in_air:
                    self._land_ahead(flight, mark, wanted)
            finally:
                self._drop(flight, mark)

    def _land_ahead(self, flight: PageFlight, mark: int, wanted: Int64Array) -> None:
        layer, places = flight.layer, flight.planned.places
        try:
            failed = run(flight.landing(), self.device)
        except (DeviceError, ClosedError):
            return
        lives = self.cache.frames(layer, places) == mark
        lives &= self.residency.hot.frames[layer].reshape(-1)[places] == NO_FRAME
        lives[[page for page, _ in failed]] = False
        self.cache.unmark(layer, places, mark)
        is_wanted = np.isin(places, wanted)
        for wants, make_room in ((True, self._make_room), (False, self._find_idle)):
            pages = (lives & (is_wanted == wants)).nonzero()[0]
            if not len(pages):
                continue
            try:
                frames = self.cache.take(layer, len(pages), make_room)
            except CapacityError:
                continue
            self._keep(flight, pages, frames, is_wanted=wants)

    def _drop(self, flight: PageFlight, mark: int) -> None:
        """Nobody waits for a flight any more. Its buffer comes back when the device is done."""
        self.cache.unmark(flight.layer, flight.planned.places, mark)
        flight.piece.give_back()

    def give_up(self) -> None:
        """Give up all that was begun ahead."""
        ahead, self._ahead = self._ahead, {}
        for mark, flight in ahead.items():
            self._drop(flight, mark)

    def close(self) -> None:
        """Let its memory go, once the device writes into none of it any more."""
        self._reading.buffers.close()
        self._buffers_ahead.close()

    def forget(self, segment: Segment) -> None:
        """A Segment loses its slot or Extents: see Registry.on_moved."""
        self.cache.forget(segment.slot)
        self.directories.forget(segment)
