"""Whether the rows of slabs and Blobs can be true: what is read from disk is checked before it is
used."""

import math

from kvtier.errors import FormatError
from kvtier.io.catalog import unpack_extents
from kvtier.io.catalog_schema import BlobRow, SlabRow
from kvtier.io.extent import Extent
from kvtier.tiering.catalog_rows import SECONDS_MAX
from kvtier.tiering.slab_limits import ENTRIES_MAX, HEADERS_BYTES, KEY_BYTES_MAX


def slab_extent(row: SlabRow) -> Extent:
    """The Extent that a slab's row names. Raises FormatError for an impossible one."""
    if not isinstance(row.extent, bytes):
        raise FormatError(f"slab {row.id} names no extent")
    try:
        extents = unpack_extents(row.extent)
    except FormatError as error:
        raise FormatError(f"slab {row.id}: {error}") from error
    if len(extents) != 1 or extents[0].length <= HEADERS_BYTES:
        raise FormatError(f"slab {row.id} names {len(extents)} extents, or one that is too short")
    return extents[0]


def slab_problem(row: SlabRow) -> str | None:
    """What is wrong with a slab's row beside its Extent, in words; None: nothing."""
    whole = (row.fingerprint_id, row.generation)
    if not all(isinstance(value, int) for value in whole):
        return "a field has another type than it was written with"
    if not all(_is_time(value) for value in (row.created, row.used)):
        return "one of its times cannot be"
    if not 0 < row.generation < 1 << 63:
        return f"its generation {row.generation} cannot be"
    return None


class BlobChecker:
    """Takes the rows of one slab's Blobs, and says what is wrong with each."""

    def __init__(self, fingerprint_id: int, extent: Extent) -> None:
        """Of the slab."""
        self._fingerprint_id = fingerprint_id
        self._extent = extent
        self._entries: set[int] = set()

    def problem(self, row: BlobRow) -> str | None:
        """What is wrong with a row, in words; None: nothing."""
        numbers = (row.fingerprint_id, row.entry, row.offset, row.length, row.checksum)
        if not all(isinstance(value, int) for value in numbers) or not isinstance(row.key, bytes):
            return "a field has another type than it was written with"
        if not _is_time(row.created) or not 1 <= len(row.key) <= KEY_BYTES_MAX:
            return f"its time {row.created} or its key of {len(row.key)} bytes cannot be"
        if row.fingerprint_id != self._fingerprint_id:
            return "it has another fingerprint than its slab"
        if row.offset < HEADERS_BYTES or row.length < 0:
            return f"it begins at byte {row.offset} of its slab, with {row.length} bytes"
        if row.offset + row.length > self._extent.length:
            return f"it ends behind its slab of {self._extent.length} bytes"
        if not 0 <= row.entry < ENTRIES_MAX or row.entry in self._entries:
            return f"its entry {row.entry} cannot be, or is another Blob's"
        self._entries.add(row.entry)
        return None


def _is_time(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and 0 <= value <= SECONDS_MAX
