"""Whether a row of the catalog can be true: what is read from disk is bounded before it is used."""

from kvtier.errors import ConfigError, FormatError
from kvtier.io.catalog import SegmentRow, unpack_extents
from kvtier.io.extent import Extent
from kvtier.tiering.fingerprint import Provenance
from kvtier.tiering.geometry import LAYERS_MAX, SEGMENT_TOKENS

POSITION_MAX = 1 << 40


def extents_of(row: SegmentRow) -> list[Extent]:
    """The Extents that a row names, one per layer. Raises FormatError for impossible ones."""
    try:
        extents = list(unpack_extents(row.extents))
    except AssertionError as error:
        raise FormatError(f"segment {row.id}: {error}") from error
    if not 1 <= len(extents) <= LAYERS_MAX:
        raise FormatError(f"segment {row.id} names {len(extents)} extents")
    return extents


def row_problem(row: SegmentRow, parent: SegmentRow | None, layers: int | None) -> str | None:
    """What is wrong with a Segment's row, in words; None: nothing.

    parent: the row that row.parent_id names, if it is there. layers: of the model, if known.
    """
    try:
        extents = extents_of(row)
        Provenance.parse(row.provenance)
    except (ConfigError, FormatError) as error:
        return str(error)
    if layers is not None and len(extents) != layers:
        return f"it names {len(extents)} extents, the model has {layers} layers"
    if not 1 <= row.token_count <= SEGMENT_TOKENS or len(row.tokens) != 4 * row.token_count:
        return f"it counts {row.token_count} tokens and lists {len(row.tokens)} bytes of them"
    if not 0 <= row.start_position <= POSITION_MAX or row.generation <= 0:
        return f"its position {row.start_position} or generation {row.generation} cannot be"
    return _parent_problem(row, parent)


def _parent_problem(row: SegmentRow, parent: SegmentRow | None) -> str | None:
    start = 0
    if row.parent_id is not None:
        if parent is None or parent.fingerprint_id != row.fingerprint_id or parent.id >= row.id:
            return f"its parent {row.parent_id} is missing"
        if parent.provenance != row.provenance:
            return f"its parent {row.parent_id} has another provenance"
        if not 0 < row.parent_limit <= parent.token_count:
            return f"it begins outside its parent {parent.id}"
        start = parent.start_position + row.parent_limit
    if row.start_position != start:
        return f"it begins at {row.start_position}, not at {start}"
    return None
