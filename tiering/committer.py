"""Makes Segments and names durable, and findable.

Invariants, in the order of a commit:
- payloads are written; the catalog notes, in a transaction of its own, that headers and records
  will follow; these are written; the device is flushed; only then does the catalog name the
  Segments, in a second transaction (Ledger); only then can they be found.
- A Segment whose tokens are stored already, below the same position, is not stored twice.
"""

import errno
import time

import numpy as np

from kvtier.errors import ConfigError, DeviceError, KvtierError
from kvtier.io.catalog import NameRow, SegmentRow, pack_extents
from kvtier.tiering import record_format
from kvtier.tiering.chain import Tokens, chain_digest
from kvtier.tiering.drive_space import DriveSpace
from kvtier.tiering.extent_io import ExtentIO
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.ledger import Change, Ledger, NewName, NewSegment
from kvtier.tiering.opening import OpenFiles
from kvtier.tiering.registry import Registry
from kvtier.tiering.segment import Segment, SegmentView
from kvtier.tiering.sequence import Sequence


class Committer:
    """Callers hold the store's lock."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        space: DriveSpace,
        extents: ExtentIO,
        fingerprint_id: int,
    ) -> None:
        self.registry = registry
        self.ledger = ledger
        self.space = space
        self.extents = extents
        self.fingerprint_id = fingerprint_id

    # ---- commit -----------------------------------------------------------------------------

    def commit(self, sequence: Sequence) -> None:
        """Commit every Segment of the views that is written and whose tokens are named."""
        self._apply(self._fresh(sequence), [])

    def save(self, sequence: Sequence, name: str, token_count: int, held_until: float) -> None:
        """Commit a Sequence that is written, together with a name for it: one durable change.

        held_until: unix seconds; 0: not held. Raises CapacityError, DeviceError.
        """
        fresh = self._fresh(sequence)
        view = sequence.views[-1]
        assert view.end == token_count
        segment = view.segment
        key = (self.fingerprint_id, name)
        old = self.ledger.inventory.names.get(key)
        if old is not None and (old.segment_id, old.limit) == (segment.catalog_id, view.limit):
            # Nothing but the hold can differ, and that is not on the region.
            if old.held_until != held_until:
                self.ledger.set_hold(key, held_until)
            return
        now = max(time.time(), 0.0)
        body = {
            "name": name,
            "generation": segment.generation,
            "end_digest": segment.end_digest.hex(),
            "limit": view.limit,
            "token_count": token_count,
            "created": now,
        }
        row = NameRow(
            name, self.fingerprint_id, segment.catalog_id or 0, view.limit, token_count, b"",
            held_until, now,
        )  # fmt: skip
        record = self.space.allocate(record_format.bytes_of(body))
        try:
            # Only now: making room, for the record or before, flushes too.
            self._require_kept(sequence)
            place = None if segment.catalog_id is not None else fresh.index(segment)
            self._apply(fresh, [NewName(row, body, record, place)])
        except KvtierError:
            # Nothing of it was done. After an interrupt nobody knows that, and nothing is freed:
            # what was committed must not be erased.
            self.space.free([record])
            raise
        self.ledger.touch([each.segment.catalog_id or 0 for each in sequence.views])

    def _require_kept(self, sequence: Sequence) -> None:
        """Raises DeviceError where a flush failed since a Segment was written."""
        if any(self.extents.may_be_lost(view.segment) for view in sequence.views):
            raise DeviceError(
                f"{self.extents.device.path}: a flush failed while this was saved, and what was "
                "written may be lost: save it again",
                errno.EIO,
            )

    def _fresh(self, sequence: Sequence) -> list[Segment]:
        """Segments of the views that can be committed now, given their names."""
        fresh: list[Segment] = []
        for place, view in enumerate(sequence.views):
            segment = view.segment
            if segment.catalog_id is not None:
                _require_same(view, sequence.tokens)
                continue
            end = segment.start + segment.token_count
            if len(sequence.tokens) < end or not segment.written:
                break
            if self.extents.may_be_lost(segment):
                break
            self._name(sequence, place)
            index = self.registry.index(segment.provenance)
            known = index.find(segment.parent, segment.named_tokens)
            if known is not None:
                self._replace(sequence, place, known)
            else:
                fresh.append(segment)
        return fresh

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
        self.registry.acquire(known)
        sequence.views[place] = SegmentView(known, sequence.views[place].limit)
        self.registry.release(own)

    def _apply(self, segments: list[Segment], names: list[NewName]) -> None:
        if not segments and not names:
            return
        headed = [each for segment in segments for each in segment.extents if each is not None]
        self.ledger.announce([*headed, *(name.record for name in names)])
        self.extents.write_headers(segments)
        new = [self._new(segment, segments) for segment in segments]
        failed = [each.catalog_id for each in self._replaced_by(segments)]
        change = Change(segments=new, names=names, quarantined=[each for each in failed if each])
        try:
            ids = self.ledger.apply(change)
        except DeviceError as error:
            # A thinly provisioned device without space for the record: see DriveSpace.write.
            nbytes = sum(name.record.length for name in names)
            if error.errno != errno.ENOSPC or not self.space.evict(nbytes, discard=True):
                raise
            ids = self.ledger.apply(change)
        for segment, catalog_id in zip(segments, ids, strict=True):
            self.registry.add(segment, catalog_id)

    def _new(self, segment: Segment, segments: list[Segment]) -> NewSegment:
        parent = None if segment.parent is None else segment.parent.segment
        if parent is None or parent.catalog_id is not None:
            return NewSegment(self._row(segment, None if parent is None else parent.catalog_id))
        return NewSegment(self._row(segment, None), segments.index(parent))

    def _replaced_by(self, segments: list[Segment]) -> list[Segment]:
        """Segments that the device could not read and whose tokens are stored anew now: found
        again beside their replacement, they would be two of the same."""
        places = [(each.parent, each.named_tokens.tobytes()) for each in segments]
        return [
            each
            for each in self.registry.failed
            if (each.parent, each.named_tokens.tobytes()) in places
        ]

    def _row(self, segment: Segment, parent_id: int | None) -> SegmentRow:
        now = max(time.time(), 0.0)
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
            created=now,
            used=now,
            quarantined=False,
        )


def add_fingerprint(
    files: OpenFiles, space: DriveSpace, fingerprint: Fingerprint, geometry: Geometry
) -> int:
    """Id of the model's fingerprint in the catalog, where it is named if it is new.

    Raises ConfigError where the same fingerprint has other KV shapes, CapacityError, DeviceError.
    """
    files.require_geometry(fingerprint.hex, geometry)
    known = files.ledger.find_fingerprint(fingerprint.digest)
    if known is not None:
        return known
    body = {"description": fingerprint.description, "geometry": geometry.to_dict()}
    extent = space.allocate(record_format.bytes_of(body))
    try:
        return files.ledger.add_fingerprint(
            fingerprint.digest, fingerprint.description, body, extent
        )
    except KvtierError:
        space.free([extent])
        raise


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
