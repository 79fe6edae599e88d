"""Stored prefixes: found, leased, brought into HOT, and given up where their bytes are damaged."""

import numpy as np

from kvtier.errors import DeviceError, FormatError
from kvtier.tiering.chain import Tokens
from kvtier.tiering.extent_io import ExtentIO, Unit
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.ledger import Ledger
from kvtier.tiering.registry import Registry
from kvtier.tiering.residency import Residency
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.steps import Pause, Reading, Steps, run
from kvtier.tiering.transfer import Mover

HEAVY_TOKENS = 16 * 1024


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
        self.tokens_looked_up = 0
        self.tokens_matched = 0
        self.matched_in_hot = self.matched_in_host = 0
        """Tokens of tokens_matched that needed no drive, and for HOST no more than a copy."""

    def resume(self, sequence: Sequence, wanted: Tokens) -> None:
        """Give an empty Sequence the longest stored prefix of `wanted` that passes every check.

        Raises DeviceError when the device as a whole fails, CapacityError.
        """
        run(self.resuming(sequence, wanted, self.extents.blocking), self.extents.device)

    def resuming(self, sequence: Sequence, wanted: Tokens, reading: Reading) -> Steps[None]:
        """What `resume` does, in steps. Closed early, it leaves the Sequence empty."""
        self.tokens_looked_up += len(wanted)
        while True:
            if len(wanted) > HEAVY_TOKENS:
                # Their match, and the list of their units, take milliseconds.
                yield Pause.HEAVY
            self.attach(sequence, wanted)
            in_hot, in_host = self._in_memory(sequence)
            try:
                yield from self._loading(sequence, reading)
            except (FormatError, DeviceError):
                # The catalog may have to note it, which is a transaction.
                yield from self._before_quarantine(sequence)
                damaged = self.quarantine(sequence)
                self.detach(sequence)
                if not damaged:
                    # No Segment is to blame: the device as a whole fails.
                    raise
                continue
            except BaseException:
                self.detach(sequence)
                raise
            break
        self.matched_in_hot += in_hot
        self.matched_in_host += in_host
        self.accept(sequence, wanted)

    def _in_memory(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens of what was attached that HOT has in every layer, and that HOT or HOST has."""
        in_hot = in_host = 0
        end = sequence.length()
        windows = [layer.window for layer in self.geometry.layers]
        for view in sequence.views:
            # A layer with a window needs nothing of what lies before it.
            unseen = np.array([w is not None and view.end <= end - w + 1 for w in windows])
            hot = unseen | (self.residency.hot.pages[:, view.segment.slot] > 0)
            host = self.residency.host.pages[:, view.segment.slot] > 0
            if hot.all():
                in_hot += view.limit
            elif (hot | host).all():
                in_host += view.limit
        return in_hot, in_host

    def attach(self, sequence: Sequence, wanted: Tokens) -> None:
        """View what the index has of `wanted`; nothing is read yet."""
        views = self.registry.index(sequence.provenance).match(wanted)
        for view in views:
            self.registry.acquire(view.segment)
        sequence.views = views

    def detach(self, sequence: Sequence) -> None:
        """Give up the views of a Sequence that was only attached."""
        for view in sequence.views:
            self.registry.release(view.segment)
        sequence.views = []

    def accept(self, sequence: Sequence, wanted: Tokens) -> None:
        """What was attached is there: name its tokens, count it, note its use."""
        sequence.tokens = wanted[: sequence.length()].copy()
        self.tokens_matched += sequence.length()
        self.touch(sequence)

    def touch(self, sequence: Sequence) -> None:
        """Note that the Segments of a Sequence are in use now."""
        ids = [view.segment.catalog_id for view in sequence.views]
        self.ledger.touch([each for each in ids if each is not None])

    def units(self, sequence: Sequence) -> list[Unit]:
        """What a restore brings into HOT, layer by layer: of layers with a window, its Pages."""
        # Two passes begun: all that HOT holds so far is idle against what is wanted now.
        self.residency.begin_pass()
        self.residency.begin_pass()
        end = sequence.length()
        units = []
        for layer, shape in enumerate(self.geometry.layers):
            first = 0 if shape.window is None else max(0, end - shape.window + 1)
            units += [Unit(view.segment, layer) for view in sequence.views if view.end > first]
        return units

    def _loading(self, sequence: Sequence, reading: Reading) -> Steps[None]:
        """Bring a match into HOT as far as it has room, and check the headers of the rest."""
        units = self.units(sequence)
        loaded = yield from self.mover.loading(units, reading, idle_only=True)
        if not reading.shared:
            self.mover.touch(units[:loaded])
        yield from self.extents.checking_headers(units[loaded:], reading)

    def _before_quarantine(self, sequence: Sequence) -> Steps[None]:
        """A pause, in which the work may be given up."""
        try:
            yield Pause.HEAVY
        except BaseException:
            self.detach(sequence)
            raise

    def quarantine(self, sequence: Sequence) -> bool:
        """After a failed read: whom it marked is not found again. False: nobody was marked."""
        marked = [view.segment for view in sequence.views if view.segment.quarantined]
        self.registry.quarantine(marked)
        return bool(marked)
