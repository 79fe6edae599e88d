"""Makes Segments durable and findable, and finds them again.

Invariants, in the order of a commit:
- payloads, then headers, are written; the device is flushed; only then does the catalog name the
  Segments, in one fully synchronous transaction; only then can they be found.
- A Segment whose tokens are stored already, below the same position, is not stored twice.
"""

import logging
import time

import numpy as np

from kvtier.errors import ConfigError
from kvtier.io.catalog import Catalog, NameRow, SegmentRow, pack_extents
from kvtier.tiering.catalog_rows import RowChecker, extents_of
from kvtier.tiering.chain import Tokens, chain_digest
from kvtier.tiering.extent_io import ExtentIO
from kvtier.tiering.fingerprint import Provenance
from kvtier.tiering.prefix_index import PrefixIndex
from kvtier.tiering.residency import Residency
from kvtier.tiering.segment import NO_SLOT, Segment, SegmentView
from kvtier.tiering.sequence import Sequence

_log = logging.getLogger("kvtier")


class Committer:
    """The catalog, the prefix index and the life of Segments. Callers hold the store's lock."""

    def __init__(
        self, catalog: Catalog, fingerprint_id: int, residency: Residency, extents: ExtentIO
    ) -> None:
        self.catalog = catalog
        self.fingerprint_id = fingerprint_id
        self.residency = residency
        self.extents = extents
        self.indexes: dict[Provenance, PrefixIndex] = {}
        self.committed: dict[int, Segment] = {}
        self._failed: list[Segment] = []
        """Segments that the device could not read since the store was opened."""

    def index(self, provenance: Provenance) -> PrefixIndex:
        return self.indexes.setdefault(provenance, PrefixIndex())

    # ---- from the catalog -------------------------------------------------------------------

    def load(self) -> None:
        """Make every Segment of this fingerprint that the catalog names findable.

        A row that cannot be true is left out, with what hangs below it, and a warning says so.
        """
        layers = len(self.extents.geometry.layers)
        checker = RowChecker(layers)
        for row in self.catalog.segments(self.fingerprint_id):
            problem = checker.problem(row)
            if problem is not None:
                _log.warning("%s: segment %s is not used: %s", self.catalog.path, row.id, problem)
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
            frozen=True,
            filled=[row.token_count] * layers,
            extents=list(extents_of(row)),
            generation=row.generation,
            tokens=np.frombuffer(row.tokens, "<u4"),
            start_digest=row.start_digest,
            end_digest=row.end_digest,
            catalog_id=row.id,
            quarantined=row.quarantined,
        )
        self.committed[row.id] = segment
        if not segment.quarantined:
            self.index(segment.provenance).add(segment)

    # ---- commit -----------------------------------------------------------------------------

    def commit(self, sequence: Sequence) -> None:
        """Commit every Segment of the views that is written and whose tokens are named."""
        fresh: list[Segment] = []
        for place, view in enumerate(sequence.views):
            segment = view.segment
            if segment.catalog_id is not None:
                _require_same(view, sequence.tokens)
                continue
            end = segment.start + segment.token_count
            if len(sequence.tokens) < end or not segment.written:
                break
            self._name(sequence, place)
            known = self.index(segment.provenance).find(segment.parent, segment.named_tokens)
            if known is not None:
                self._replace(sequence, place, known)
            else:
                fresh.append(segment)
        if fresh:
            self._commit(fresh)

    def _name(self, sequence: Sequence, place: int) -> None:
        """Give a Segment its tokens, digests and parent."""
        segment = sequence.views[place].segment
        end = segment.start + segment.token_count
        tokens = sequence.tokens[segment.start : end]
        if segment.tokens is not None:
            _require_same(sequence.views[place], tokens, segment.start)
        segment.tokens = tokens.copy()
        segment.parent = sequence.views[place - 1] if place else None
        segment.start_digest = chain_digest(sequence.tokens[: segment.start])
        segment.end_digest = chain_digest(sequence.tokens[:end])

    def _replace(self, sequence: Sequence, place: int, known: Segment) -> None:
        """Use a stored Segment of the same tokens instead of this Sequence's own."""
        own = sequence.views[place].segment
        self.acquire(known)
        sequence.views[place] = SegmentView(known, sequence.views[place].limit)
        self.release(own)

    def _commit(self, segments: list[Segment]) -> None:
        self.extents.write_headers(segments)
        self.extents.device.flush()
        ids: list[int] = []
        with self.catalog.transaction():
            for segment in segments:
                parent = segment.parent
                parent_id = None
                if parent is not None:
                    parent_id = parent.segment.catalog_id
                    if parent_id is None:
                        parent_id = ids[segments.index(parent.segment)]
                ids.append(self.catalog.add_segment(self._row(segment, parent_id)))
            for failed in self._replaced_by(segments):
                assert failed.catalog_id is not None
                self.catalog.set_quarantined(failed.catalog_id, True)
        for segment, catalog_id in zip(segments, ids, strict=True):
            segment.catalog_id = catalog_id
            self.committed[catalog_id] = segment
            self.index(segment.provenance).add(segment)

    def _replaced_by(self, segments: list[Segment]) -> list[Segment]:
        """Segments that the device could not read and whose tokens are stored anew now: found
        again beside their replacement, they would be two of the same."""
        places = [(each.parent, each.named_tokens.tobytes()) for each in segments]
        return [
            each for each in self._failed if (each.parent, each.named_tokens.tobytes()) in places
        ]

    def _row(self, segment: Segment, parent_id: int | None) -> SegmentRow:
        return SegmentRow(
            id=0,
            fingerprint_id=self.fingerprint_id,
            provenance=segment.provenance.text,
            start_digest=segment.start_digest,
            end_digest=segment.end_digest,
            start_position=segment.start,
            token_count=segment.token_count,
            tokens=segment.named_tokens.astype("<u4").tobytes(),
            parent_id=parent_id,
            parent_limit=segment.parent.limit if segment.parent else 0,
            generation=segment.generation,
            extents=pack_extents([each for each in segment.extents if each is not None]),
            created=time.time(),
            quarantined=False,
        )

    def set_name(self, name: str, sequence: Sequence, token_count: int) -> None:
        """Let a name stand for a Sequence whose Segments are all committed."""
        view = sequence.views[-1]
        assert view.segment.catalog_id is not None
        assert view.end == token_count
        row = NameRow(
            name, self.fingerprint_id, view.segment.catalog_id, view.limit, token_count,
            True, time.time(),
        )  # fmt: skip
        self.catalog.set_name(row)

    # ---- use --------------------------------------------------------------------------------

    def acquire(self, segment: Segment) -> None:
        """One more view of a Segment; it gets a slot if it has none."""
        segment.references += 1
        if segment.slot == NO_SLOT:
            if not self.residency.has_free_slot:
                self.forget_unused()
            segment.slot = self.residency.take_slot()
            self.residency.on_nvme[:, segment.slot] = True

    def release(self, segment: Segment) -> None:
        """One view less. A Segment that was never committed goes with its last view."""
        assert segment.references > 0
        segment.references -= 1
        if segment.references == 0 and segment.catalog_id is None:
            self.extents.free(segment)
            self.residency.give_slot(segment.slot)
            segment.slot = NO_SLOT

    def forget_unused(self) -> None:
        """Give back the slots of committed Segments that nobody views and no memory holds."""
        for segment in self.committed.values():
            slot = segment.slot
            if slot != NO_SLOT and not segment.references and not self.residency.holds(slot):
                self.residency.give_slot(slot)
                segment.slot = NO_SLOT

    def quarantine(self, segments: list[Segment], *, for_good: bool) -> None:
        """Take Segments out of the index. for_good: their bytes are damaged, and the catalog notes
        it; else the device failed, and the next time the store is opened they are tried again."""
        for segment in segments:
            if segment.catalog_id is not None:
                index = self.index(segment.provenance)
                if index.find(segment.parent, segment.named_tokens) is segment:
                    index.remove(segment)
                    if for_good:
                        self.catalog.set_quarantined(segment.catalog_id, True)
                    else:
                        self._failed.append(segment)


def _require_same(view: SegmentView, tokens: Tokens, first: int = 0) -> None:
    """Raise ConfigError where `tokens`, from position `first` on, are not those of the view.

    A fork shares Segments whose tokens one side may have named since.
    """
    start = view.segment.start
    given = tokens[start - first : view.end - first]
    held = view.segment.named_tokens[: len(given)]
    differing = np.flatnonzero(held != given)
    if len(differing):
        at = int(differing[0])
        raise ConfigError(
            "sequences that share a segment name different tokens for it, first at position "
            f"{start + at}: {int(given[at])} given, {int(held[at])} held"
        )
