"""Stored prefixes: found, leased, brought into HOT, and given up where their bytes are damaged."""

import time
from collections.abc import Sequence as Listing

import numpy as np

from kvtier.errors import DeviceError, FormatError
from kvtier.tiering import stored_ranges
from kvtier.tiering.chain import Tokens
from kvtier.tiering.costs import CostMeter
from kvtier.tiering.extent_io import ExtentIO
from kvtier.tiering.fingerprint import Provenance
from kvtier.tiering.frame_table import KeptTables
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.ledger import Ledger
from kvtier.tiering.registry import Registry
from kvtier.tiering.residency import Residency
from kvtier.tiering.segment import NO_SLOT, SegmentView
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.steps import Pause, Reading, Steps, run
from kvtier.tiering.stored_ranges import Range
from kvtier.tiering.transfer import Mover
from kvtier.tiering.units import Units

HEAVY_TOKENS = 16 * 1024
TABLE_BYTES = 16
"""Of tables that are kept, for each Frame that HOT has room for: twice what its number takes."""


class Restorer:
    """Callers hold the store's lock."""

    def __init__(
        self,
        geometry: Geometry,
        residency: Residency,
        mover: Mover,
        extents: ExtentIO,
        registry: Registry,
        ledger: Ledger,
    ) -> None:
        self.geometry = geometry
        self.residency = residency
        self.mover = mover
        self.extents = extents
        self.registry = registry
        self.ledger = ledger
        frame_bytes = min(map(geometry.frame_bytes, range(len(geometry.layers))))
        self.tables = KeptTables(residency.hot.tier.limit_bytes // frame_bytes * TABLE_BYTES)
        self.costs = CostMeter.start()
        extents.flow.tell = self.costs.note_load
        extents.flow.tell_at_most = self.costs.note_load_at_most
        self.tokens_looked_up = 0
        self.tokens_matched = 0
        self.matched_in_hot = self.matched_in_host = 0
        """Tokens of tokens_matched that needed no drive, and for HOST no more than a copy."""

    def resume(self, sequence: Sequence, wanted: Tokens, *, lazily: bool) -> None:
        """Give an empty Sequence the longest stored prefix of `wanted` that passes every check.

        lazily: the check of headers; what they stand for is read layer by layer while others are
        attended to, and checked then. Raises DeviceError when the device as a whole fails,
        CapacityError.
        """
        steps = self.resuming(sequence, wanted, self.extents.blocking, lazily=lazily)
        run(steps, self.extents.device)

    def resuming(
        self, sequence: Sequence, wanted: Tokens, reading: Reading, *, lazily: bool
    ) -> Steps[None]:
        """What `resume` does, in steps. Closed early, it leaves the Sequence empty."""
        self.tokens_looked_up += len(wanted)
        while True:
            if len(wanted) > HEAVY_TOKENS:
                # Their match, and the list of their units, take milliseconds.
                yield Pause.HEAVY
            self.attach(sequence, self.registry.match(sequence.provenance, wanted))
            in_hot, in_host = self._in_memory(sequence)
            if in_hot == sequence.length():
                self._use(sequence, lazily=lazily)
                break
            bring = self._announcing if lazily else self._loading
            if (yield from self._is_sound(sequence, bring(sequence, reading))):
                break
        self.matched_in_hot += in_hot
        self.matched_in_host += in_host
        self.accept(sequence, wanted)

    def extend(self, sequence: Sequence, wanted: Tokens) -> None:
        """See `extending`. Raises DeviceError when the device as a whole fails."""
        run(self.extending(sequence, wanted, self.extents.blocking), self.extents.device)

    def extending(self, sequence: Sequence, wanted: Tokens, reading: Reading) -> Steps[None]:
        """Have a Sequence go on with what is stored of `wanted` from its end on, as far as every
        check is passed. It is named, between passes, and has no Tail where something is attached.

        Closed early, it leaves the Sequence as it was.
        """
        held = len(sequence.views)
        begin = sequence.length()
        while added := stored_ranges.unbroken(self.behind(sequence, wanted), begin):
            self.attach(sequence, added)
            if (yield from self._is_sound(sequence, self._loading(sequence, reading, held), held)):
                break
        sequence.declare(wanted[: sequence.length()])
        self.tokens_matched += sequence.length() - begin
        self.touch(sequence)

    def walk(self, sequence: Sequence, wanted: Tokens) -> list[SegmentView]:
        """All Segments that `wanted` leads to, lost ones too."""
        return self.registry.walk(sequence.provenance, wanted)

    def behind(self, sequence: Sequence, wanted: Tokens) -> list[SegmentView]:
        """What is stored of `wanted` from the end of a Sequence on."""
        return stored_ranges.sound(self.walk(sequence, wanted), sequence.length())

    def stored(
        self, provenance: Provenance, wanted: Tokens
    ) -> tuple[list[SegmentView], list[Range]]:
        """What is stored of `wanted`, behind holes too, and the holes."""
        walked = self.registry.walk(provenance, wanted)
        stored = stored_ranges.chains(walked, self.registry.match(provenance, wanted))
        return stored, stored_ranges.holes(walked, stored_ranges.ranges(stored))

    def _in_memory(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens of what was attached that HOT has in every layer, and that HOT or HOST has."""
        views, end = sequence.views, sequence.length()
        slots = np.array([view.segment.slot for view in views], np.int64)
        if self.residency.hot.pages[:, slots].all():
            return end, 0
        # A layer with a window needs nothing of what lies before it.
        first = np.array([[layer.first_seen(end)] for layer in self.geometry.layers])
        limits = np.array([view.limit for view in views], np.int64)
        unseen = np.array([view.end for view in views], np.int64) <= first
        hot = unseen | (self.residency.hot.pages[:, slots] > 0)
        host = self.residency.host.pages[:, slots] > 0
        in_hot = int(limits @ hot.all(axis=0))
        return in_hot, int(limits @ (hot | host).all(axis=0)) - in_hot

    def _use(self, sequence: Sequence, *, lazily: bool) -> None:
        """Begin to use a match that HOT has all of: nothing is read, and everything was checked."""
        self._begin_session()
        sequence.all_hot_at = sequence.views, sum(self.residency.hot.drops)
        if not lazily:
            self.mover.touch(self.seen(sequence.views, sequence.length()))

    def attach(self, sequence: Sequence, views: Listing[SegmentView]) -> None:
        """Have a Sequence go on with these; nothing is read yet."""
        for view in views:
            self.registry.acquire(view.segment)
        sequence.views = (*sequence.views, *views)

    def detach(self, sequence: Sequence, held: int = 0) -> None:
        """Give up the views of a Sequence that were only attached: all but the first `held`."""
        for view in sequence.views[held:]:
            self.registry.release(view.segment)
        sequence.views = sequence.views[:held]

    def accept(self, sequence: Sequence, wanted: Tokens) -> None:
        """What was attached is there: name its tokens, count it, note its use."""
        tables = self.tables.take(sequence.views)
        for kept in tables.values():
            sequence.views = kept.views
        sequence.table.placed = tables
        sequence.tokens = wanted[: sequence.length()].copy()
        self.tokens_matched += sequence.length()
        self.touch(sequence)

    def touch(self, sequence: Sequence) -> None:
        """Note that the Segments of a Sequence are in use now."""
        ids = [view.segment.catalog_id for view in sequence.views]
        self.ledger.touch([each for each in ids if each is not None])

    def units(self, sequence: Sequence, held: int = 0) -> Units:
        """What a restore brings into HOT, layer by layer: of layers with a window, its Pages.

        held: how many of its views are there already; they are used now, too.
        """
        self._begin_session()
        if held:
            # However old: attention may look before a window where it was cropped.
            self.mover.touch(self.seen(sequence.views[:held], 0))
        return self.seen(sequence.views[held:], sequence.length())

    def _begin_session(self) -> None:
        """Two passes begun: all that HOT holds so far is idle against what is wanted now."""
        self.residency.begin_pass()
        self.residency.begin_pass()

    def seen(self, views: Listing[SegmentView], end: int) -> Units:
        """Units of these views, layer by layer, that the end of a stream sees: of layers with a
        window not what lies before it."""
        return Units.by_layer(views, [layer.first_seen(end) for layer in self.geometry.layers])

    def _loading(self, sequence: Sequence, reading: Reading, held: int = 0) -> Steps[None]:
        """Bring a match into HOT as far as it has room, and check the headers of the rest."""
        units = self.units(sequence, held)
        # Where others act between the steps, the time would tell nothing of the drive.
        nbytes = 0 if reading.shared else self.bytes_to_read(units)
        began = time.perf_counter()
        loaded = yield from self.mover.loading(units, reading, idle_only=True)
        if not reading.shared:
            self.mover.touch(units[:loaded])
            if loaded == len(units):
                self.costs.note_load(nbytes, time.perf_counter() - began)
        yield from self.extents.checking_headers(units[loaded:], reading)

    def _announcing(self, sequence: Sequence, reading: Reading) -> Steps[None]:
        """Check the headers of a match as far as they are not known, and begin to read it."""
        units = self.units(sequence)
        new = Units.of(units[each] for each in self.extents.unknown_headers(units))
        yield from self.extents.checking_headers(new, reading)
        self.mover.ahead.go_on(units)

    def bytes_to_read(self, units: Units) -> int:
        """Bytes of the Extents of what no memory tier has."""
        layers, slots = units.layers, units.slots
        hot, host = self.residency.hot.pages, self.residency.host.pages
        absent = (slots == NO_SLOT) | ((hot[layers, slots] == 0) & (host[layers, slots] == 0))
        return int(self.extents.sizes(units).extent_bytes[absent].sum())

    def _is_sound(self, sequence: Sequence, bringing: Steps[None], held: int = 0) -> Steps[bool]:
        """Bring what was attached behind the first `held` views. False: some of it is damaged, and
        not found again, and all of it is given up.

        Raises DeviceError when the device as a whole fails, after giving it up as well.
        """
        try:
            yield from bringing
        except (FormatError, DeviceError):
            # The catalog may have to note it, which is a transaction.
            yield from self._before_quarantine(sequence, held)
            damaged = self.quarantine(sequence)
            self.detach(sequence, held)
            if not damaged:
                # No Segment is to blame: the device as a whole fails.
                raise
            return False
        except BaseException:
            self.detach(sequence, held)
            raise
        return True

    def _before_quarantine(self, sequence: Sequence, held: int) -> Steps[None]:
        """A pause, in which the work may be given up."""
        try:
            yield Pause.HEAVY
        except BaseException:
            self.detach(sequence, held)
            raise

    def quarantine(self, sequence: Sequence) -> bool:
        """After a failed read: whom it marked is not found again. False: nobody was marked."""
        marked = [view.segment for view in sequence.views if view.segment.quarantined]
        self.registry.quarantine(marked)
        return bool(marked)
