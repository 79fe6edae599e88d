"""Collects what a scan found: Segments, layer by layer, and records; and what must be erased."""

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.errors import ConfigError, FormatError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.extent import Extent
from kvtier.tiering import record_format
from kvtier.tiering.catalog_rows import SECONDS_MAX
from kvtier.tiering.extent_format import ExtentHeader
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.rebuild_slabs import FoundSlab
from kvtier.tiering.record_format import Record
from kvtier.tiering.region_scan import Find, FoundExtent, FoundRecord


class SegmentKey(NamedTuple):
    """What the headers of all layers of one Segment have in common."""

    fingerprint: bytes
    provenance: str
    start_digest: bytes
    end_digest: bytes
    generation: int
    start_position: int
    token_count: int
    layers: int
    dtype: str


class FoundSegment:
    """The sound Extents of one Segment, found so far."""

    def __init__(self, key: SegmentKey) -> None:
        self.key = key
        self.tokens = b""
        self.missing = key.layers
        self._shapes: list[LayerGeometry | None] = [None] * key.layers
        # Offset and length per layer: a large region has millions of them.
        self._places = array("q", bytes(16 * key.layers))

    def add(self, header: ExtentHeader) -> bool:
        """Take the sound Extent of one layer. False: that layer is there already."""
        identity = header.identity
        if self._shapes[identity.layer] is not None:
            return False
        self._shapes[identity.layer] = header.geometry
        self._places[2 * identity.layer] = identity.device_offset
        self._places[2 * identity.layer + 1] = identity.extent_bytes
        if header.tokens is not None:
            self.tokens = header.tokens.tobytes()
        self.missing -= 1
        return True

    @property
    def extents(self) -> list[Extent]:
        """Those that are there, in the order of layers."""
        pairs = zip(self._places[::2], self._places[1::2], strict=True)
        return [Extent(offset, length) for offset, length in pairs if length]

    def geometry(self) -> Geometry:
        """Of a Segment of which no layer is missing. Raises ConfigError."""
        assert not self.missing
        return Geometry(tuple(each for each in self._shapes if each), self.key.dtype)


@dataclass(frozen=True, slots=True)
class NameRecord:
    """What the record of a name says. created: unix seconds."""

    name: str
    fingerprint: bytes
    generation: int
    end_digest: bytes
    limit: int
    token_count: int
    created: float
    extent: Extent

    @classmethod
    def read(cls, record: Record, extent: Extent) -> "NameRecord":
        """Raises FormatError for what no writer writes."""
        body = record.body
        name, digest, created = (body.get(each) for each in ("name", "end_digest", "created"))
        generation, limit, token_count = (
            body.get(each) for each in ("generation", "limit", "token_count")
        )
        if not record_format.is_name(name):
            raise FormatError("the record of a name holds no name")
        if (
            not isinstance(digest, str)
            or not isinstance(generation, int)
            or not isinstance(limit, int)
            or not isinstance(token_count, int)
            or not isinstance(created, float)
            or not 0 <= created <= SECONDS_MAX
        ):
            raise FormatError(f"the record of the name {name!r} cannot be")
        try:
            end_digest = bytes.fromhex(digest)
        except ValueError as error:
            raise FormatError(f"the record of the name {name!r} holds no digest") from error
        return cls(
            name, record.fingerprint, generation, end_digest, limit, token_count, created, extent
        )


@dataclass(frozen=True, slots=True)
class FingerprintRecord:
    """What the record of a fingerprint says."""

    description: str
    geometry: Geometry
    extent: Extent

    @classmethod
    def read(cls, record: Record, extent: Extent) -> "FingerprintRecord":
        """Raises FormatError for what no writer writes."""
        description = record.body.get("description")
        # A description is ASCII JSON; other text may be what UTF-8 has no bytes for.
        if (
            not isinstance(description, str)
            or not description.isascii()
            or hashlib.sha256(description.encode()).digest() != record.fingerprint
        ):
            raise FormatError("the record of a fingerprint describes another one")
        try:
            geometry = Geometry.from_dict(record.body["geometry"])
        except (AttributeError, ConfigError, LookupError, TypeError, ValueError) as error:
            raise FormatError(f"the record of a fingerprint has no KV shapes: {error}") from error
        return cls(description, geometry, extent)


@dataclass(slots=True)
class Finds:
    """Everything that one scan found."""

    segments: dict[SegmentKey, FoundSegment] = field(default_factory=dict)
    slabs: dict[int, FoundSlab] = field(default_factory=dict)
    """By offset."""
    names: list[NameRecord] = field(default_factory=list)
    fingerprints: dict[bytes, FingerprintRecord] = field(default_factory=dict)
    unusable: Counter[str] = field(default_factory=Counter)
    """How many blocks look like a header or a record and are none of this store, by reason."""
    stale: list[Extent] = field(default_factory=list)
    """First blocks of what will not be named: erased, so that no later scan finds them."""

    def add(self, find: Find, removed: set[int]) -> None:
        """removed: offsets of what a catalog still says was removed and not erased yet."""
        if isinstance(find, FoundExtent):
            self._add_extent(find, find.extent.offset in removed)
        elif isinstance(find, FoundRecord):
            self._add_record(find, find.extent.offset in removed)
        elif isinstance(find, FoundSlab):
            # One that is not sound is met again at the second copy of its header.
            self.slabs.setdefault(find.extent.offset, find)
        else:
            self.unusable[find.why] += 1

    def discard(self, extents: list[Extent]) -> None:
        """These will not be named. Only their first blocks are surely theirs alone."""
        self.stale += [Extent(each.offset, GRID_BYTES) for each in extents]

    def _add_extent(self, find: FoundExtent, is_removed: bool) -> None:
        identity = find.header.identity
        key = SegmentKey(
            identity.fingerprint,
            identity.provenance,
            identity.start_digest,
            identity.end_digest,
            identity.generation,
            identity.start_position,
            identity.token_count,
            find.header.layers,
            find.header.dtype,
        )
        if is_removed:
            self.discard([find.extent])
            return
        segment = self.segments.get(key)
        if segment is None:
            segment = self.segments[key] = FoundSegment(key)
        if not find.sound or not segment.add(find.header):
            self.discard([find.extent])

    def _add_record(self, find: FoundRecord, is_removed: bool) -> None:
        record, extent = find.record, find.extent
        try:
            if is_removed:
                self.discard([extent])
            elif record.kind == record_format.NAME:
                self.names.append(NameRecord.read(record, extent))
            elif record.fingerprint in self.fingerprints:
                self.discard([extent])
            else:
                self.fingerprints[record.fingerprint] = FingerprintRecord.read(record, extent)
        except FormatError as error:
            self.unusable[str(error)] += 1
            self.discard([extent])
