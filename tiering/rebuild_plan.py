"""What a new catalog will say, from what a scan found: a pure function.

A Segment comes back when every layer of it is sound, its digests are those of its tokens, and what
comes before it comes back. Of two Segments with the same tokens at the same place one comes back:
the one that the newest name ends in, else the one that lies first on the region.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvtier.errors import ConfigError
from kvtier.io.extent import Extent
from kvtier.tiering.catalog_rows import POSITION_MAX
from kvtier.tiering.chain_hash import ChainHash
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.rebuild_finds import Finds, FoundSegment, NameRecord
from kvtier.tiering.rebuild_slabs import lost_description

DAMAGED: Final = "a layer is missing or damaged"
IMPOSSIBLE: Final = "its fields cannot be"
OTHER_SHAPES: Final = "its KV shapes are not those of its fingerprint"
NO_CHAIN: Final = "what comes before it is missing"
WRONG_DIGEST: Final = "its digests are not those of its tokens"
TWICE: Final = "its tokens are stored twice"
NAME_OLDER: Final = "a newer record of the same name counts"
NAME_LOST: Final = "its end is missing"
NOT_LOST = (TWICE, NAME_OLDER)
"""Reasons that take nothing from anybody."""

Place = tuple[int, bytes]
"""A position, and the digest of the tokens before it."""
Target = tuple[bytes, int, bytes]
"""Fingerprint, generation and end digest: how a name's record names a Segment."""


@dataclass(frozen=True, slots=True)
class PlannedFingerprint:
    """record: where its record lies; None: it is lost, and the description with it."""

    description: str
    geometry: Geometry
    record: Extent | None


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """parent: index in the plan of the Segment that it continues after `limit` tokens of it."""

    found: FoundSegment
    parent: int | None
    limit: int


@dataclass(frozen=True, slots=True)
class PlannedName:
    """segment: index in the plan. moved: the record names another Segment of the same tokens."""

    record: NameRecord
    segment: int
    moved: bool


@dataclass(slots=True)
class RebuildPlan:
    """Parents come before their children. segments_dropped, names_dropped: how many do not come
    back, by reason; what is to be erased of them is in the Finds."""

    fingerprints: dict[bytes, PlannedFingerprint] = field(default_factory=dict)
    segments: list[PlannedSegment] = field(default_factory=list)
    names: list[PlannedName] = field(default_factory=list)
    segments_dropped: Counter[str] = field(default_factory=Counter)
    names_dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Position:
    """A place of a stream that Segments lead to: behind `limit` tokens of a planned Segment."""

    parent: int | None
    limit: int
    before: ChainHash
    is_end: bool


class Planner:
    """Makes one plan from one scan's Finds, to which it adds what is not used."""

    def __init__(self, finds: Finds) -> None:
        self._finds = finds
        self._plan = RebuildPlan()
        self._targets: dict[Target, tuple[int, bool]] = {}
        """Planned Segment that a name may end in, and whether it takes the place of its own."""
        self._twins: list[tuple[FoundSegment, FoundSegment]] = []
        """Segments that are left out, and the one that is kept instead."""

    def plan(self) -> RebuildPlan:
        """Everything that can come back. Called once."""
        found = self._whole_segments()
        self._plan_fingerprints(found)
        models: dict[bytes, list[FoundSegment]] = defaultdict(list)
        for segment in self._without_twins(self._of_one_shape(found)):
            models[segment.key.fingerprint].append(segment)
        for segments in models.values():
            self._plan_model(segments)
        for left_out, kept in self._twins:
            target = self._targets.get(_target(kept))
            if target is not None:
                self._targets[_target(left_out)] = (target[0], True)
        self._plan_names()
        return self._plan

    def _drop(self, segment: FoundSegment, why: str) -> None:
        self._plan.segments_dropped[why] += 1
        self._finds.discard(segment.extents)

    # ---- what can come back -----------------------------------------------------------------

    def _whole_segments(self) -> list[FoundSegment]:
        whole: list[FoundSegment] = []
        for segment in self._finds.segments.values():
            if segment.missing:
                self._drop(segment, DAMAGED)
            elif not _is_possible(segment):
                self._drop(segment, IMPOSSIBLE)
            else:
                whole.append(segment)
        return whole

    def _plan_fingerprints(self, segments: list[FoundSegment]) -> None:
        """Those that have a record, and those that only Segments name."""
        planned = self._plan.fingerprints
        for digest, record in self._finds.fingerprints.items():
            planned[digest] = PlannedFingerprint(record.description, record.geometry, record.extent)
        shapes: dict[bytes, Counter[Geometry]] = defaultdict(Counter)
        for segment in segments:
            shapes[segment.key.fingerprint][segment.geometry()] += 1
        for digest in shapes.keys() - planned.keys():
            ((geometry, _),) = shapes[digest].most_common(1)
            planned[digest] = PlannedFingerprint(lost_description(geometry), geometry, None)

    def _of_one_shape(self, segments: list[FoundSegment]) -> Iterable[FoundSegment]:
        for segment in segments:
            expected = self._plan.fingerprints[segment.key.fingerprint].geometry
            if segment.geometry() == expected:
                yield segment
            else:
                self._drop(segment, OTHER_SHAPES)

    def _without_twins(self, segments: Iterable[FoundSegment]) -> list[FoundSegment]:
        """One Segment of each place and tokens."""
        newest: dict[Target, float] = {}
        for name in self._finds.names:
            target = (name.fingerprint, name.generation, name.end_digest)
            newest[target] = max(name.created, newest.get(target, 0.0))
        places: dict[tuple[object, ...], list[FoundSegment]] = defaultdict(list)
        for segment in segments:
            key = segment.key
            place = (key.fingerprint, key.provenance, key.start_digest, key.start_position)
            places[*place, segment.tokens].append(segment)
        kept: list[FoundSegment] = []
        for twins in places.values():
            twins.sort(key=lambda each: (-newest.get(_target(each), -1.0), _offset(each)))
            kept.append(twins[0])
            for other in twins[1:]:
                self._drop(other, TWICE)
                self._twins.append((other, twins[0]))
        return kept

    # ---- chains -----------------------------------------------------------------------------

    def _plan_model(self, segments: list[FoundSegment]) -> None:
        """Plan what can be followed from position 0, parents first: exact Segments, and what
        continues them, of each approximate provenance by itself."""
        segments.sort(key=lambda each: (each.key.start_position, _offset(each)))
        wanted = {(each.key.start_position, each.key.start_digest) for each in segments}
        streams: dict[str, list[FoundSegment]] = {EXACT.text: []}
        for segment in segments:
            streams.setdefault(segment.key.provenance, []).append(segment)
        start = ChainHash.at_start()
        exact = {(0, start.digest): _Position(None, 0, start, True)}
        self._plan_stream(streams.pop(EXACT.text), wanted, exact)
        for stream in streams.values():
            self._plan_stream(stream, wanted, dict(exact))

    def _plan_stream(
        self, segments: list[FoundSegment], wanted: set[Place], reached: dict[Place, _Position]
    ) -> None:
        """Plan Segments that go on from what is `reached`, which grows with them. wanted: places
        where one begins."""
        positions = sorted({position for position, _ in wanted})
        for segment in segments:
            key = segment.key
            at = reached.get((key.start_position, key.start_digest))
            if at is None:
                self._drop(segment, NO_CHAIN)
            elif at.before.then(segment.tokens).digest != key.end_digest:
                self._drop(segment, WRONG_DIGEST)
            else:
                self._targets[_target(segment)] = (len(self._plan.segments), False)
                for position in self._positions(segment, at.before, positions):
                    place = (key.start_position + position.limit, position.before.digest)
                    known = reached.get(place)
                    # Any of them is right; a child at an end keeps the least alive.
                    if place in wanted and (known is None or position.is_end > known.is_end):
                        reached[place] = position
                self._plan.segments.append(PlannedSegment(segment, at.parent, at.limit))

    def _positions(
        self, segment: FoundSegment, before: ChainHash, wanted: list[int]
    ) -> Iterable[_Position]:
        """Places inside and at the end of a Segment where another one begins."""
        start, count = segment.key.start_position, segment.key.token_count
        first, past = bisect_right(wanted, start), bisect_right(wanted, start + count)
        for position in wanted[first:past]:
            limit = position - start
            after = before.then(segment.tokens[: 4 * limit])
            yield _Position(len(self._plan.segments), limit, after, limit == count)

    # ---- names ------------------------------------------------------------------------------

    def _plan_names(self) -> None:
        """Of each name the newest record whose end came back."""
        done: set[tuple[bytes, str]] = set()
        for record in sorted(self._finds.names, key=lambda each: -each.created):
            key = (record.fingerprint, record.name)
            target = self._targets.get((record.fingerprint, record.generation, record.end_digest))
            if key in done:
                why = NAME_OLDER
            elif target is None or not self._is_end(record, target[0]):
                why = NAME_LOST
            else:
                done.add(key)
                self._plan.names.append(PlannedName(record, *target))
                continue
            self._plan.names_dropped[why] += 1
            self._finds.discard([record.extent])

    def _is_end(self, record: NameRecord, segment: int) -> bool:
        key = self._plan.segments[segment].found.key
        return (
            0 < record.limit <= key.token_count
            and record.token_count == key.start_position + record.limit
        )


def _is_possible(segment: FoundSegment) -> bool:
    key = segment.key
    try:
        Provenance.parse(key.provenance)
        segment.geometry()
    except ConfigError:
        return False
    return key.start_position <= POSITION_MAX


def _target(segment: FoundSegment) -> Target:
    return segment.key.fingerprint, segment.key.generation, segment.key.end_digest


def _offset(segment: FoundSegment) -> int:
    return segment.extents[0].offset
