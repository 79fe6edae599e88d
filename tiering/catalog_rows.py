"""Whether the rows of a catalog can be true: what is read from disk is checked before it is used.

SQLite keeps no checksums and few types, so a row may hold anything. A Segment's row is sound when
its own fields fit together, its parent is sound, and the digests of its ends are those of all
tokens before them: then its tokens are the ones that its KV was computed from, because the headers
of its Extents carry the same digests.
"""

import math
import struct
from dataclasses import dataclass, fields
from types import NoneType

from kvtier.errors import ConfigError, FormatError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.catalog import FingerprintRow, NameRow, SegmentRow, unpack_extents
from kvtier.io.catalog_schema import EXTENT_BYTES
from kvtier.io.extent import Extent
from kvtier.tiering.chain_hash import ChainHash
from kvtier.tiering.fingerprint import Provenance
from kvtier.tiering.geometry import LAYERS_MAX, SEGMENT_TOKENS

POSITION_MAX = 1 << 40
SECONDS_MAX = 1e11
"""Largest time that is taken for one: some 3,000 years after 1970."""

_TYPES: dict[object, tuple[type, ...]] = {
    int: (int,),
    str: (str,),
    bytes: (bytes,),
    float: (float,),
    bool: (bool, int),
    int | None: (int, NoneType),
}


def is_well_typed(row: SegmentRow | NameRow | FingerprintRow) -> bool:
    """Whether every field has the type that it is declared with, and its times can be."""
    values = [(each, getattr(row, each.name)) for each in fields(row)]
    return all(isinstance(value, _TYPES[each.type]) for each, value in values) and all(
        math.isfinite(value) and 0 <= value <= SECONDS_MAX
        for _, value in values
        if isinstance(value, float)
    )


def extents_of(row: SegmentRow) -> list[Extent]:
    """The Extents that a row names, one per layer. Raises FormatError for impossible ones."""
    if not isinstance(row.extents, bytes):
        raise FormatError(f"segment {row.id} names no extents")
    try:
        extents = list(unpack_extents(row.extents))
    except AssertionError as error:
        raise FormatError(f"segment {row.id}: {error}") from error
    if not 1 <= len(extents) <= LAYERS_MAX:
        raise FormatError(f"segment {row.id} names {len(extents)} extents")
    return extents


def record_extents(record: bytes) -> list[Extent]:
    """Where the record of a name or fingerprint lies, if it has one. Raises FormatError."""
    if not isinstance(record, bytes):
        raise FormatError("the catalog names no place for a record")
    return unpack_extents(record)


def extent_count(row: SegmentRow) -> int:
    """How many Extents a row names, without making them. Raises FormatError like `extents_of`."""
    packed = row.extents
    if isinstance(packed, bytes) and len(packed) % EXTENT_BYTES == 0:
        layers = len(packed) // EXTENT_BYTES
        numbers = struct.unpack(f"<{2 * layers}q", packed)
        on_grid = not any(number % GRID_BYTES for number in numbers)
        positive = min(numbers, default=-1) >= 0 and all(numbers[1::2])
        if on_grid and positive and layers <= LAYERS_MAX:
            return layers
    return len(extents_of(row))


@dataclass(frozen=True, slots=True)
class _Sound:
    row: SegmentRow
    before: ChainHash
    after: ChainHash


class RowChecker:
    """Takes the rows of a catalog in the order of their ids, and says what is wrong with each."""

    def __init__(self, layers: int | None = None) -> None:
        """layers: of the model that the rows belong to, if they all belong to one."""
        self._layers = layers
        self._sound: dict[int, _Sound] = {}
        self._places: set[tuple[int | None, int, int, str, bytes]] = set()

    @property
    def sound(self) -> list[SegmentRow]:
        """The rows that nothing is wrong with, so far."""
        return [each.row for each in self._sound.values()]

    def problem(self, row: SegmentRow) -> str | None:
        """What is wrong with a row, in words; None: nothing."""
        return self._own_problem(row) or self._chain_problem(row)

    def _own_problem(self, row: SegmentRow) -> str | None:
        if not is_well_typed(row):
            return "a field has another type than it was written with"
        try:
            layers = extent_count(row)
            Provenance.parse(row.provenance)
        except (ConfigError, FormatError) as error:
            return str(error)
        if self._layers is not None and layers != self._layers:
            return f"it names {layers} extents, the model has {self._layers} layers"
        if not 1 <= row.token_count <= SEGMENT_TOKENS or len(row.tokens) != 4 * row.token_count:
            return f"it counts {row.token_count} tokens and lists {len(row.tokens)} bytes of them"
        if not 0 <= row.start_position <= POSITION_MAX or row.generation <= 0:
            return f"its position {row.start_position} or generation {row.generation} cannot be"
        return None

    def _chain_problem(self, row: SegmentRow) -> str | None:
        start, before = 0, ChainHash.at_start()
        if row.parent_id is not None:
            parent = self._sound.get(row.parent_id)
            if parent is None or parent.row.fingerprint_id != row.fingerprint_id:
                return f"its parent {row.parent_id} is missing"
            before_it = Provenance.parse(parent.row.provenance)
            if not Provenance.parse(row.provenance).may_follow(before_it):
                return f"its parent {row.parent_id} has another provenance"
            if not 0 < row.parent_limit <= parent.row.token_count:
                return f"it begins outside its parent {row.parent_id}"
            start = parent.row.start_position + row.parent_limit
            before = parent.after
            if row.parent_limit < parent.row.token_count:
                before = parent.before.then(parent.row.tokens[: 4 * row.parent_limit])
        if row.start_position != start:
            return f"it begins at {row.start_position}, not at {start}"
        after = before.then(row.tokens)
        if (before.digest, after.digest) != (row.start_digest, row.end_digest):
            return "its digests are not those of its tokens"
        place = (
            row.parent_id,
            row.parent_limit,
            row.fingerprint_id,
            row.provenance,
            row.tokens,
        )
        if place in self._places and not row.quarantined:
            return "another segment holds the same tokens at the same position"
        if not row.quarantined:
            self._places.add(place)
        self._sound[row.id] = _Sound(row, before, after)
        return None
