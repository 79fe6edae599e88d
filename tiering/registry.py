"""The Segments of one model that this process knows: found by their tokens, and counted in use.

Invariants:
- What the index finds is committed and sound; what is lost leads it to what lies behind.
- What is approximate may continue what is exact, never the other way round. The index of each
  approximate provenance also has the exact Segments that its own continue.
- A Segment has a slot while a Sequence views it or a memory tier holds a Page of it.
- A Segment that was never committed goes with its last view; a committed one stays known until it
  is removed from the drive.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvtier.errors import FormatError
from kvtier.io.catalog import NameRow, SegmentRow
from kvtier.tiering.catalog_rows import RowChecker
from kvtier.tiering.chain import Tokens
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.ledger import Change, Ledger
from kvtier.tiering.prefix_index import PrefixIndex
from kvtier.tiering.residency import Residency
from kvtier.tiering.segment import NO_SLOT, Segment, SegmentView

_log = logging.getLogger("kvtier")


def _nobody_cares(segment: Segment) -> None:
    """What `on_unused` and `on_moved` do where nobody wants to know."""


class Registry:
    """Callers hold the store's lock."""

    def __init__(self, ledger: Ledger, residency: Residency) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog
        self.inventory = ledger.inventory
        self.residency = residency
        self.indexes: dict[Provenance, PrefixIndex] = {}
        self.committed: dict[int, Segment] = {}
        self.on_unused: Callable[[Segment], None] = _nobody_cares
        """Called when the last view of a Segment goes, while it still has its slot."""
        self.on_moved: Callable[[Segment], None] = _nobody_cares
        """Called when a Segment is about to lose its slot, or Extents that it had: what somebody
        knows of its Pages by slot holds no more."""

    def index(self, provenance: Provenance) -> PrefixIndex:
        return self.indexes.setdefault(provenance, PrefixIndex())

    # ---- finding ----------------------------------------------------------------------------

    def match(self, provenance: Provenance, tokens: Tokens) -> list[SegmentView]:
        """The longest stored prefix of `tokens` for who takes this provenance: exact KV too."""
        exact = self.index(EXACT).match(tokens)
        if provenance == EXACT:
            return exact
        own = self.index(provenance).match(tokens)
        return own if own and own[-1].end > (exact[-1].end if exact else 0) else exact

    def walk(self, provenance: Provenance, tokens: Tokens) -> list[SegmentView]:
        """Every Segment that `tokens` lead to for who takes this provenance, lost ones too."""
        found = self.index(provenance).walk(tokens)
        if provenance != EXACT:
            known = {id(view.segment) for view in found}
            exact = self.index(EXACT).walk(tokens)
            found += [view for view in exact if id(view.segment) not in known]
            found.sort(key=lambda view: (view.segment.start, -view.limit))
        return found

    def _list(self, segment: Segment) -> None:
        """Make a Segment findable, behind the exact ones that it continues."""
        index = self.index(segment.provenance)
        chain = [segment]
        while (parent := chain[-1].parent) is not None and parent.segment not in index:
            if parent.segment.provenance == segment.provenance:
                break
            chain.append(parent.segment)
        for each in reversed(chain):
            index.add(each)

    def _listing(self, segment: Segment) -> list[PrefixIndex]:
        """Every index that a Segment is in."""
        return [index for index in self.indexes.values() if segment in index]

    # ---- from the catalog -------------------------------------------------------------------

    def load(self, rows: Iterable[SegmentRow], layers: int) -> None:
        """Make every Segment of these rows findable: those of one fingerprint, ordered by id.

        A row that cannot be true is left out, with what hangs below it, and a warning says so.
        """
        checker = RowChecker(layers)
        for row in rows:
            problem = checker.problem(row)
            if problem is not None:
                _log.warning("%s: segment %s is not used: %s", self.catalog.path, row.id, problem)
                self.inventory.entries[row.id].sound = False
                continue
            self._load_row(row, layers)

    def _load_row(self, row: SegmentRow, layers: int) -> None:
        parent = None if row.parent_id is None else self.committed[row.parent_id]
        segment = Segment(
            start=row.start_position,
            layers=layers,
            provenance=Provenance.parse(row.provenance),
            parent=None if parent is None else SegmentView(parent, row.parent_limit),
            token_count=row.token_count,
            filled=[row.token_count] * layers,
            extents=list(self.inventory.entries[row.id].extents),
            generation=row.generation,
            tokens=np.frombuffer(row.tokens, "<u4"),
            start_digest=row.start_digest,
            end_digest=row.end_digest,
            catalog_id=row.id,
            quarantined=row.quarantined,
            unavailable=self.inventory.entries[row.id].unavailable,
        )
        self.committed[row.id] = segment
        self._list(segment)

    def add(self, segment: Segment, catalog_id: int) -> None:
        """A Segment is committed now."""
        segment.commit(catalog_id)
        self.committed[catalog_id] = segment
        self._list(segment)

    def tokens_of(self, name: NameRow) -> tuple[Tokens, Provenance]:
        """All tokens that a name stands for. Raises FormatError where its row cannot be true."""
        segment = self.committed.get(name.segment_id)
        if segment is None or not 0 < name.limit <= segment.token_count:
            raise FormatError(f"the catalog's row of the name {name.name!r} is damaged")
        view: SegmentView | None = SegmentView(segment, name.limit)
        parts: list[Tokens] = []
        while view is not None:
            parts.insert(0, view.segment.named_tokens[: view.limit])
            view = view.segment.parent
        tokens: Tokens = np.concatenate(parts)
        if len(tokens) != name.token_count:
            raise FormatError(
                f"the name {name.name!r} counts {name.token_count} tokens, its segments hold "
                f"{len(tokens)}"
            )
        return tokens, segment.provenance

    # ---- use --------------------------------------------------------------------------------

    def in_use(self, catalog_id: int) -> bool:
        """Whether a Sequence views this Segment."""
        segment = self.committed.get(catalog_id)
        return segment is not None and segment.references > 0

    def acquire(self, segment: Segment) -> None:
        """One more view of a Segment; it gets a slot if it has none."""
        segment.references += 1
        if segment.slot == NO_SLOT:
            if not self.residency.has_free_slot:
                self.forget_unused()
            segment.slot = self.residency.take_slot(segment.history)
            self.residency.on_nvme[:, segment.slot] = True

    def release(self, segment: Segment) -> None:
        """One view less. A Segment that was never committed goes with its last view."""
        assert segment.references > 0
        segment.references -= 1
        if segment.references == 0:
            self.on_unused(segment)
            if segment.catalog_id is None:
                self.forget(segment)

    def forget(self, segment: Segment) -> None:
        """Give back the Extents and Frames of a Segment that the catalog does not name."""
        self.free_extents(segment, range(segment.layers))
        self._give_slot(segment)

    def free_extents(self, segment: Segment, layers: Iterable[int]) -> None:
        """Give back Extents of a Segment that the catalog does not name, where it has them."""
        assert segment.catalog_id is None
        layers = list(layers)
        if segment.slot != NO_SLOT:
            self.on_moved(segment)
        held = [segment.extents[layer] for layer in layers]
        self.ledger.release([extent for extent in held if extent is not None])
        for layer in layers:
            segment.extents[layer] = None

    def forget_unused(self) -> None:
        """Give back the slots of committed Segments that nobody views and no memory holds."""
        for segment in self.committed.values():
            slot = segment.slot
            if slot != NO_SLOT and not segment.references and not self.residency.holds(slot):
                self._give_slot(segment)

    def _give_slot(self, segment: Segment) -> None:
        self.on_moved(segment)
        segment.history = self.residency.give_slot(segment.slot)
        segment.slot = NO_SLOT

    # ---- gone -------------------------------------------------------------------------------

    def quarantine(self, segments: Sequence[Segment]) -> None:
        """Segments that were marked so are lost to the index. Of the damaged ones the catalog notes
        it; the device could not read the others, which are tried again at the next open."""
        damaged: list[int] = []
        for segment in segments:
            if segment.catalog_id is None:
                continue
            for index in self._listing(segment):
                index.lose(segment)
            if segment.damaged:
                damaged.append(segment.catalog_id)
        entries = self.inventory.entries
        new = [each for each in damaged if not entries[each].quarantined]
        if new:
            self.ledger.apply(Change(quarantined=new))

    def drop(self, catalog_ids: Iterable[int]) -> None:
        """Forget Segments that were removed from the drive; ids of other models are ignored."""
        for catalog_id in catalog_ids:
            segment = self.committed.pop(catalog_id, None)
            if segment is None:
                continue
            for index in self._listing(segment):
                index.remove(segment)
            self._disown(segment)

    def take_place(self, segment: Segment, lost: Segment) -> None:
        """A Segment is committed now, in the place of a lost one of the same tokens, which nobody
        views: under its id, before what continued it."""
        assert lost.catalog_id is not None
        segment.commit(lost.catalog_id)
        self.committed[lost.catalog_id] = segment
        for index in self._listing(lost):
            index.replace(lost, segment)
        self._disown(lost)

    def _disown(self, segment: Segment) -> None:
        """The catalog gave up a Segment, or its Extents."""
        assert not segment.references
        if segment.slot != NO_SLOT:
            self._give_slot(segment)
        # Whoever still holds the object must not free what belongs to others by now.
        segment.extents = [None] * segment.layers
