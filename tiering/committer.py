"""Makes Segments and names durable, and findable.

Invariants, in the order of a commit:
- payloads are written; the catalog notes, in a transaction of its own, that headers and records
  will follow; these are written; the device is flushed; only then does the catalog name the
  Segments, in a second transaction (Ledger); only then can they be found.
- A Segment whose tokens are stored already, below the same position, is not stored twice. One
  whose tokens are lost there takes the place of the lost one, with its names and children.
"""

import errno
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvtier.errors import ConfigError, DeviceError, KvtierError
from kvtier.io.catalog import NameRow, SegmentRow, pack_extents
from kvtier.io.extent import Extent
from kvtier.tiering import record_format
from kvtier.tiering.chain import Tokens, chain_digest
from kvtier.tiering.drive_space import DriveSpace
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.extent_writer import ExtentWriter
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.ledger import Change, Ledger, NewName, NewSegment
from kvtier.tiering.opening import OpenFiles
from kvtier.tiering.record_format import Record
from kvtier.tiering.registry import Registry
from kvtier.tiering.segment import Segment, SegmentView
from kvtier.tiering.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Name:
    """A name to be set, that ends in this Segment."""

    row: NameRow
    segment: Segment

    @property
    def body(self) -> dict[str, Any]:
        """Of its record."""
        segment = self.segment
        return record_format.name_body(self.row, segment.generation, segment.end_digest)


class Committer:
    """Callers hold the store's lock."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        space: DriveSpace,
        extents: ExtentWriter,
        fingerprint_id: int,
    ) -> None:
        self.registry = registry
        self.ledger = ledger
        self.space = space
        self.extents = extents
        self.fingerprint_id = fingerprint_id
        self.kv_bytes = 0
        """Bytes of KV that were committed since the store was opened."""

    # ---- commit -----------------------------------------------------------------------------

    def commit(self, sequence: Sequence) -> None:
        """Commit every Segment of the views that is written and whose tokens are named.

        Raises DeviceError, where the device did not take one of them too.
        """
        self._finish(sequence)
        self._apply(self._fresh(sequence, adopting=False), [])

    def save(self, sequence: Sequence, name: str, token_count: int, held_until: float) -> None:
        """Commit a Sequence that is written, together with a name for it: one durable change.

        held_until: unix seconds; 0: not held. Raises CapacityError, DeviceError.
        """
        self._finish(sequence)
        fresh = self._fresh(sequence, adopting=True)
        view = sequence.views[-1]
        assert view.end == token_count
        segment = view.segment
        key = (self.fingerprint_id, name)
        old = self.ledger.inventory.names.get(key)
        if old is not None and (old.segment_id, old.limit) == (segment.catalog_id, view.limit):
            # Holes before its end may be filled; else nothing but the hold can differ, and that is
            # not on the region.
            self._apply(fresh, [])
            if old.held_until != held_until:
                self.ledger.set_hold(key, held_until)
            return
        self._require_kept([each.segment for each in sequence.views])
        now = max(time.time(), 0.0)
        row = NameRow(name, self.fingerprint_id, 0, view.limit, token_count, b"", held_until, now)
        self._apply(fresh, [_Name(row, segment)])
        self.ledger.touch([each.segment.catalog_id or 0 for each in sequence.views])

    def _require_kept(self, segments: list[Segment]) -> None:
        """Raises DeviceError where a flush failed since a Segment was written."""
        if any(self.extents.may_be_lost(each) for each in segments):
            raise DeviceError(
                f"{self.extents.device.path}: a flush failed while this was saved, and what was "
                "written may be lost: save it again",
                errno.EIO,
            )

    def _finish(self, sequence: Sequence) -> None:
        """Wait for the payloads of what is named and not committed yet. Raises DeviceError where
        the device did not take one, however long ago: nothing behind it can be committed."""
        segments = [
            view.segment
            for view in sequence.views
            if view.segment.catalog_id is None
            and view.segment.start + view.segment.token_count <= len(sequence.tokens)
        ]
        self.extents.finish_segments(segments)
        for segment in segments:
            if segment.write_error is not None and not segment.written:
                layer = segment.extents.index(None)
                raise self.extents.extents.not_written(Unit(segment, layer))

    def _fresh(self, sequence: Sequence, *, adopting: bool) -> list[Segment]:
        """Segments of the views that can be committed now, given their names.

        adopting: have the Sequence go on with stored Segments where its own are the same. That
        costs a read when they are needed next; else its own stay until it is saved or released.
        """
        fresh: list[Segment] = []
        taken: dict[Segment, Segment] = {}
        stored: dict[Segment, Segment] = {}
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
            self._name(sequence, place, stored)
            index = self.registry.index(segment.provenance)
            where = self._place(segment, taken)
            known = index.find(where, segment.named_tokens, segment.provenance)
            if known is None:
                fresh.append(segment)
                self._take_place(segment, taken)
            elif adopting:
                self._replace(sequence, place, known)
            else:
                stored[segment] = known
        return fresh

    def _name(self, sequence: Sequence, place: int, stored: dict[Segment, Segment]) -> None:
        """Give a Segment its tokens, digests and parent. stored: what others are the same as."""
        segment = sequence.views[place].segment
        before = sequence.views[place - 1] if place else None
        if before is not None and before.segment in stored:
            before = SegmentView(stored[before.segment], before.limit)
        segment.parent = before
        end = segment.start + segment.token_count
        tokens = sequence.tokens[segment.start : end]
        if segment.tokens is not None:
            # Named before; its digests are those of the same tokens, and of all before them.
            _require_same(sequence.views[place], tokens, segment.start)
            return
        segment.tokens = tokens.copy()
        segment.start_digest = chain_digest(sequence.tokens[: segment.start])
        segment.end_digest = chain_digest(sequence.tokens[:end])

    def _replace(self, sequence: Sequence, place: int, known: Segment) -> None:
        """Use a stored Segment of the same tokens instead of this Sequence's own."""
        own = sequence.views[place].segment
        self.registry.acquire(known)
        views = list(sequence.views)
        views[place] = SegmentView(known, views[place].limit)
        sequence.views = views
        self.registry.release(own)

    def _apply(self, fresh: list[Segment], names: list[_Name]) -> None:
        """Commit written Segments, and names that end in them or in committed ones."""
        if not fresh and not names:
            return
        taken = self._places_taken(fresh)
        parents = [each.parent.segment for each in fresh if each.parent is not None]
        stored = [each for each in parents if each.catalog_id is not None]
        with self._kept([*taken.values(), *stored]):
            records: list[Extent] = []
            try:
                names = [*names, *self._renamed(taken, names)]
                for each in names:
                    records.append(self.space.allocate(record_format.bytes_of(each.body)))
                self._write_heads(fresh, names, records)
                change = self._change(fresh, taken, names, records)
                ids = self.ledger.apply(change)
            except KvtierError:
                # Nothing of it was done. After an interrupt nobody knows that, and nothing is
                # freed: what was committed must not be erased.
                self.space.free(records)
                raise
        new = iter(ids)
        for segment in fresh:
            if segment in taken:
                self.registry.take_place(segment, taken[segment])
            else:
                self.registry.add(segment, next(new))
            self.kv_bytes += segment.token_count * self.extents.geometry.token_bytes

    def _write_heads(self, fresh: list[Segment], names: list[_Name], records: list[Extent]) -> None:
        """Headers and records, announced before. Raises DeviceError."""
        headed = [each for segment in fresh for each in segment.extents if each is not None]
        self.ledger.announce([*headed, *records])
        self.extents.write_headers(fresh)
        owner = self.extents.extents.owner
        for name, extent in zip(names, records, strict=True):
            record = Record(owner.store_uuid, owner.fingerprint, record_format.NAME, name.body)
            record_format.put(record, extent, self.space.write)
        # Last of all: where writing made room on the drive, that flushed too.
        self._require_kept(fresh)

    def _change(
        self,
        fresh: list[Segment],
        taken: dict[Segment, Segment],
        names: list[_Name],
        records: list[Extent],
    ) -> Change:
        ids = {each: lost.catalog_id for each, lost in taken.items()}
        change = Change()
        added = [segment for segment in fresh if segment not in taken]
        for segment in fresh:
            parent = None if segment.parent is None else segment.parent.segment
            parent_id = None if parent is None else ids.get(parent, parent.catalog_id)
            row = self._row(segment, parent_id)
            if segment in taken:
                change.replaced[ids[segment] or 0] = row
            else:
                place = added.index(parent) if parent is not None and parent_id is None else None
                change.segments.append(NewSegment(row, place))
            # Beside what is stored anew they would be two of the same.
            change.quarantined += [
                each.catalog_id or 0
                for each in self._lost_twins(segment, taken)
                if each is not taken.get(segment)
            ]
        for name, record in zip(names, records, strict=True):
            segment_id = ids.get(name.segment, name.segment.catalog_id)
            place = added.index(name.segment) if segment_id is None else None
            row_of_name = replace(name.row, segment_id=segment_id or 0)
            change.names.append(NewName(row_of_name, record, place))
        return change

    # ---- in the place of what was lost ------------------------------------------------------

    def _place(self, segment: Segment, taken: dict[Segment, Segment]) -> SegmentView | None:
        """Where the index has a Segment, or would have it: its parent takes the place of a lost
        one, below which other Segments hang."""
        parent = segment.parent
        if parent is None or parent.segment not in taken:
            return parent
        return SegmentView(taken[parent.segment], parent.limit)

    def _lost_twins(self, segment: Segment, taken: dict[Segment, Segment]) -> list[Segment]:
        """Lost Segments of the same tokens at the same place."""
        index = self.registry.index(segment.provenance)
        where = self._place(segment, taken)
        return index.find_lost(where, segment.named_tokens, segment.provenance)

    def _places_taken(self, fresh: list[Segment]) -> dict[Segment, Segment]:
        """What takes the place of a lost Segment, and of which."""
        taken: dict[Segment, Segment] = {}
        for segment in fresh:
            self._take_place(segment, taken)
        return taken

    def _take_place(self, segment: Segment, taken: dict[Segment, Segment]) -> None:
        """Note in `taken` of which lost Segment this one takes the place, if of any. What somebody
        views still is not replaced: its whole layers are of use to them."""
        twins = [each for each in self._lost_twins(segment, taken) if not each.references]
        if twins:
            taken[segment] = twins[0]

    @contextmanager
    def _kept(self, segments: Collection[Segment]) -> Iterator[None]:
        """Nothing of them is evicted in the block."""
        for segment in segments:
            self.registry.acquire(segment)
        try:
            yield
        finally:
            for segment in segments:
                self.registry.release(segment)

    def _renamed(self, taken: dict[Segment, Segment], names: list[_Name]) -> list[_Name]:
        """Names that end in lost Segments: their records must say what takes the place."""
        set_anyway = {(each.row.fingerprint_id, each.row.name) for each in names}
        inventory = self.ledger.inventory
        return [
            _Name(inventory.names[key], segment)
            for segment, lost in taken.items()
            for key in sorted(inventory.entries[lost.catalog_id or 0].names - set_anyway)
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
        store_uuid = uuid.UUID(files.region.store_uuid).bytes
        record = Record(store_uuid, fingerprint.digest, record_format.FINGERPRINT, body)
        record_format.put(record, extent, space.write)
        return files.ledger.add_fingerprint(fingerprint.digest, fingerprint.description, extent)
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
