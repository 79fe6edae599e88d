"""The bytes of an Extent: header, page directory, tokens, payload, digests (`docs/format.md`).

Invariants:
- A header is self-describing and covered by one checksum; it names its store, its Segment, its
  layer and the device offset where it was written, so a stale, misdirected or foreign block is
  recognised whatever its own checksum says.
- Page checksums are seeded with the Segment's generation: bytes of another Segment fail them.
- Header, directory and tokens fill whole grid blocks; the payload begins on the grid, and so do
  the digests behind it.
- `parse_header` bounds every size before it is used.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import BadMagic, ChecksumMismatch, ConfigError, FormatError, VersionMismatch
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.io.device import ByteArray
from kvtier.tiering.chain import Tokens
from kvtier.tiering.fingerprint import PROVENANCE_BYTES
from kvtier.tiering.geometry import PAGE_TOKENS, SEGMENT_TOKENS, Geometry, LayerGeometry, pages_of

MAGIC = b"KVTIEREX"
PLAIN_VERSION = 1
"""Of Extents without digests: they are as they were before there were any."""
FORMAT_VERSION = 2
"""Of Extents with digests."""
HEADER = struct.Struct("<8sII16s32s16s16sQQQIIQQIIIIIHHIIIHBB56sQQ")
HEADER_BYTES = 256
assert HEADER.size == HEADER_BYTES
CHECKSUM_AT = HEADER_BYTES - 8
_PAYLOAD_CHECKSUM_AT = 128
_DIGEST_FIELDS = ((124, "<I"), (182, "<B"), (183, "<B"))
DIGEST_BITS = (0, 2, 3, 4)

DIRECTORY_ENTRY = np.dtype(
    [
        ("offset", "<u4"),
        ("length", "<u4"),
        ("checksum", "<u8"),
        ("tokens", "<u2"),
        ("head_group", "<u2"),
        ("codec", "u1"),
        ("reserved", "u1", (3,)),
        ("positions", "<u2", (PAGE_TOKENS,)),
    ]
)
assert DIRECTORY_ENTRY.itemsize == 56

CODEC_RAW = 0
NO_POSITION = 0xFFFF
"""Fills the positions of the slots that a Page does not use."""
DTYPE_CODES = {"float32": 1, "float16": 2, "bfloat16": 3}

Directory = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class ExtentIdentity:
    """Whose Extent this is and where it must lie."""

    store_uuid: bytes
    fingerprint: bytes
    provenance: str
    start_digest: bytes
    end_digest: bytes
    generation: int
    start_position: int
    token_count: int
    layer: int
    device_offset: int
    extent_bytes: int


@dataclass(frozen=True, slots=True)
class DigestSection:
    """The digests behind the payload: their bytes, without padding, and of what kind they are.

    bits: of each element of a key's sketch; 0: means alone. seed: of the sketch's rotation.
    """

    nbytes: int = 0
    bits: int = 0
    seed: int = 0


NO_DIGESTS = DigestSection()


@dataclass(frozen=True, slots=True)
class ExtentHeader:
    """A parsed and checked header with its directory and, in layer 0, the Segment's tokens."""

    identity: ExtentIdentity
    geometry: LayerGeometry
    dtype: str
    layers: int
    header_bytes: int
    payload_bytes: int
    payload_checksum: int
    directory: Directory
    tokens: Tokens | None
    digests: DigestSection

    @property
    def digests_at(self) -> int:
        """Where the digests begin, or would, in bytes of the Extent."""
        return self.header_bytes + align_up(self.payload_bytes, GRID_BYTES)


def header_bytes(geometry: Geometry, layer: int, token_count: int) -> int:
    """Bytes before the payload of an Extent, on the grid."""
    pages = geometry.layers[layer].kv_heads * pages_of(token_count)
    tokens = 4 * token_count if layer == 0 else 0
    return align_up(HEADER_BYTES + pages * DIRECTORY_ENTRY.itemsize + tokens, GRID_BYTES)


def extent_bytes(geometry: Geometry, layer: int, token_count: int) -> int:
    """Bytes of an Extent of raw pages, on the grid, without digests: what a restore reads."""
    payload = geometry.payload_bytes(layer, token_count)
    return header_bytes(geometry, layer, token_count) + align_up(payload, GRID_BYTES)


checksum_of_view: Callable[[memoryview, int], int] = xxhash.xxh3_64_intdigest
"""xxh3-64 of the bytes, bound to the Segment by its generation."""


def checksum(data: ByteArray, seed: int) -> int:
    """The same of an array."""
    return checksum_of_view(data.data, seed)


def checksum_of_pieces(pieces: Sequence[ByteArray], seed: int) -> int:
    """`checksum` of bytes that lie in several places."""
    if len(pieces) == 1:
        return checksum(pieces[0], seed)
    state = xxhash.xxh3_64(seed=seed)
    for piece in pieces:
        state.update(piece.data)
    return state.intdigest()


def checksum_pages(directory: Directory, payload: ByteArray, generation: int) -> None:
    """Write the checksum of every Page of `payload` into the directory."""
    view = payload.data
    digest = xxhash.xxh3_64_intdigest
    directory["checksum"] = [
        digest(view[offset : offset + length], generation)
        for offset, length in zip(
            directory["offset"].tolist(), directory["length"].tolist(), strict=True
        )
    ]


def damaged_pages(directory: Directory, payload: ByteArray, generation: int) -> list[int]:
    """Indices of the Pages whose bytes do not have their checksum."""
    view = payload.data
    digest = xxhash.xxh3_64_intdigest
    return [
        index
        for index, (offset, length, expected) in enumerate(
            zip(
                directory["offset"].tolist(),
                directory["length"].tolist(),
                directory["checksum"].tolist(),
                strict=True,
            )
        )
        if digest(view[offset : offset + length], generation) != expected
    ]


def write_header(
    target: ByteArray,
    identity: ExtentIdentity,
    geometry: Geometry,
    directory: Directory,
    payload_checksum: int,
    tokens: Tokens,
    *,
    digests: DigestSection = NO_DIGESTS,
) -> None:
    """Fill `target`, exactly the header's grid blocks, with the header of one Extent."""
    layer = geometry.layers[identity.layer]
    stored = tokens if identity.layer == 0 else tokens[:0]
    provenance = identity.provenance.encode()
    assert len(provenance) <= PROVENANCE_BYTES, identity.provenance
    assert target.size == header_bytes(geometry, identity.layer, identity.token_count)
    assert len(directory) == layer.kv_heads * pages_of(identity.token_count)
    target[:] = 0
    target[:HEADER_BYTES] = np.frombuffer(
        _packed(
            *(identity, geometry, (target.size, len(directory), len(stored))),
            *(payload_checksum, digests),
        ),
        np.uint8,
    )
    directory_end = HEADER_BYTES + directory.nbytes
    target[HEADER_BYTES:directory_end] = directory.view(np.uint8)
    target[directory_end : directory_end + stored.nbytes] = stored.view(np.uint8)
    struct.pack_into("<Q", target.data, CHECKSUM_AT, checksum(target, 0))


def _packed(
    identity: ExtentIdentity,
    geometry: Geometry,
    counts: tuple[int, int, int],
    payload_checksum: int,
    digests: DigestSection,
) -> bytes:
    """The fields of a header, its own checksum still zero. counts: bytes of the header, Pages, and
    tokens that it holds."""
    layer = geometry.layers[identity.layer]
    size, pages, stored = counts
    return HEADER.pack(
        MAGIC,
        FORMAT_VERSION if digests.nbytes else PLAIN_VERSION,
        size,
        identity.store_uuid,
        identity.fingerprint,
        identity.start_digest,
        identity.end_digest,
        identity.generation,
        identity.device_offset,
        identity.extent_bytes,
        geometry.payload_bytes(identity.layer, identity.token_count),
        digests.nbytes,
        payload_checksum,
        identity.start_position,
        identity.layer,
        len(geometry.layers),
        layer.kv_heads,
        layer.key_width,
        layer.value_width,
        PAGE_TOKENS,
        DTYPE_CODES[geometry.dtype],
        identity.token_count,
        pages,
        stored,
        1,
        digests.bits,
        digests.seed,
        identity.provenance.encode(),
        layer.window or 0,
        0,
    )


def checksum_in_plain_header(
    block: ByteArray,
    identity: ExtentIdentity,
    geometry: Geometry,
    plain: Directory,
    tokens: Tokens,
) -> int | None:
    """The payload's checksum, if `block` is exactly the header that these would have been written
    with: intact, of this Extent, its Pages in the order of positions. None: something differs, and
    `parse_header` says what, or reads another order.

    plain: that directory without checksums. It compares bytes: a restore does so for every unit.
    """
    stored = tokens if identity.layer == 0 else tokens[:0]
    (found,) = struct.unpack_from("<Q", block.data, _PAYLOAD_CHECKSUM_AT)
    (expected,) = struct.unpack_from("<Q", block.data, CHECKSUM_AT)
    digests = DigestSection(
        *(struct.unpack_from(form, block.data, at)[0] for at, form in _DIGEST_FIELDS)
    )
    fields = _packed(identity, geometry, (block.size, len(plain), len(stored)), found, digests)
    directory_end = HEADER_BYTES + plain.nbytes
    directory = block[HEADER_BYTES:directory_end].view(DIRECTORY_ENTRY).copy()
    directory["checksum"] = 0
    state = xxhash.xxh3_64(fields)
    state.update(block[HEADER_BYTES:].data)
    if (
        state.intdigest() != expected
        or fields[:CHECKSUM_AT] != block[:CHECKSUM_AT].tobytes()
        or directory.tobytes() != plain.tobytes()
        or stored.tobytes() != block[directory_end : directory_end + stored.nbytes].tobytes()
    ):
        return None
    return int(found)


def _intact_header(block: ByteArray, where: str) -> ByteArray:
    """A copy of the header's bytes, once magic, version, size and checksum are right."""
    if block.size < HEADER_BYTES:
        raise FormatError(f"{where}: {block.size} bytes are too few for an extent header")
    magic, version, size = struct.unpack_from("<8sII", block.data)
    (expected,) = struct.unpack_from("<Q", block.data, CHECKSUM_AT)
    if magic != MAGIC:
        raise BadMagic(f"{where}: no extent header here")
    if version not in (PLAIN_VERSION, FORMAT_VERSION):
        raise VersionMismatch(f"{where}: the extent", version, FORMAT_VERSION)
    if not HEADER_BYTES <= size <= block.size:
        raise FormatError(f"{where}: header of {size} bytes does not fit {block.size} bytes")
    covered = block[:size].copy()
    covered[CHECKSUM_AT:HEADER_BYTES] = 0
    if checksum(covered, 0) != expected:
        raise ChecksumMismatch(f"{where}: the extent header is damaged")
    return covered


def parse_header(block: ByteArray, where: str) -> ExtentHeader:
    """Check and parse the header at the start of `block` (uint8, at least the header's bytes).

    where: named in messages. Raises BadMagic, VersionMismatch, ChecksumMismatch, FormatError.
    """
    covered = _intact_header(block, where)
    (
        _magic, version, size, store_uuid, fingerprint, start_digest, end_digest, generation,
        device_offset, total_bytes, payload_bytes, digest_bytes, payload_checksum, start_position,
        layer, layers, kv_heads, key_width, value_width, page_tokens, dtype_code, token_count,
        pages, stored, _head_group, digest_bits, digest_seed, provenance, window, _checksum,
    ) = HEADER.unpack_from(covered.data)  # fmt: skip
    directory_end = HEADER_BYTES + pages * DIRECTORY_ENTRY.itemsize
    digests = DigestSection(digest_bytes, digest_bits, digest_seed)
    dtypes = {code: name for name, code in DTYPE_CODES.items()}
    if (
        page_tokens != PAGE_TOKENS
        or dtype_code not in dtypes
        or not 1 <= token_count <= SEGMENT_TOKENS
        or stored not in (0, token_count)
        or directory_end + 4 * stored > size
        or not _may_have(version, digests)
        or size + payload_bytes + digest_bytes > total_bytes
    ):
        raise FormatError(f"{where}: the extent header contradicts itself")
    directory = covered[HEADER_BYTES:directory_end].view(DIRECTORY_ENTRY)
    ends = directory["offset"].astype(np.int64) + directory["length"]
    if len(directory) and int(ends.max()) > payload_bytes:
        raise FormatError(f"{where}: a page lies outside the payload of {payload_bytes} bytes")
    try:
        geometry = LayerGeometry(kv_heads, key_width, value_width, window or None)
        provenance_text = provenance.rstrip(b"\0").decode()
    except (ConfigError, UnicodeDecodeError) as error:
        raise FormatError(f"{where}: the extent header cannot be: {error}") from error
    return ExtentHeader(
        identity=ExtentIdentity(
            store_uuid=store_uuid,
            fingerprint=fingerprint,
            provenance=provenance_text,
            start_digest=start_digest,
            end_digest=end_digest,
            generation=generation,
            start_position=start_position,
            token_count=token_count,
            layer=layer,
            device_offset=device_offset,
            extent_bytes=total_bytes,
        ),
        geometry=geometry,
        dtype=dtypes[dtype_code],
        layers=layers,
        header_bytes=size,
        payload_bytes=payload_bytes,
        payload_checksum=payload_checksum,
        directory=directory,
        tokens=covered[directory_end : directory_end + 4 * stored].view("<u4") if stored else None,
        digests=digests,
    )


def _may_have(version: int, digests: DigestSection) -> bool:
    """Whether a header of this version can name such digests."""
    if version == PLAIN_VERSION:
        return digests == NO_DIGESTS
    return digests.nbytes > 0 and digests.bits in DIGEST_BITS


def require_identity(header: ExtentHeader, expected: ExtentIdentity, where: str) -> None:
    """Raise ChecksumMismatch, naming what differs, unless the header is the one expected."""
    if header.identity == expected:
        return
    differing = [
        name
        for name in ExtentIdentity.__slots__
        if getattr(header.identity, name) != getattr(expected, name)
    ]
    raise ChecksumMismatch(f"{where}: another extent lies here (its {', '.join(differing)} differ)")
