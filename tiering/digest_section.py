"""The bytes of an Extent's digests, but for what they mean: their head and their checksum.

    head (24 bytes) | arrays of `stored_digests.py`, without gaps

Invariants:
- The checksum is seeded with the Segment's generation, and the head names the layer: digests of
  other Pages fail, even where they are intact.
- The section begins on the grid behind the payload, and nobody needs it: what is wrong with it, or
  not there, is made anew from the payload. So no read of KV looks at it.
"""

import struct
from dataclasses import dataclass

from kvtier.errors import ChecksumMismatch
from kvtier.io.device import ByteArray
from kvtier.tiering.extent_format import DigestSection, checksum

HEAD = struct.Struct("<QIIHBB4x")
HEAD_BYTES = 24
assert HEAD.size == HEAD_BYTES
_COVERED_FROM = 8


@dataclass(frozen=True, slots=True)
class DigestHead:
    """What a section says of itself, and of which Pages it speaks."""

    section: DigestSection
    layer: int
    token_count: int


def seal(target: ByteArray, head: DigestHead, generation: int) -> None:
    """Write the head and the checksum of a section whose arrays are there already.

    target: uint8, exactly the section's bytes.
    """
    kind = head.section
    assert target.size == kind.nbytes
    fields = (kind.nbytes, head.layer, head.token_count, kind.bits, kind.seed)
    HEAD.pack_into(target.data, 0, 0, *fields)
    struct.pack_into("<Q", target.data, 0, checksum(target[_COVERED_FROM:], generation))


def parse(block: ByteArray, generation: int, where: str) -> DigestHead:
    """The head of the section that `block` begins with, once the section has its checksum.

    where: named in messages. Raises ChecksumMismatch.
    """
    if block.size >= HEAD_BYTES:
        expected, nbytes, layer, tokens, bits, seed = HEAD.unpack_from(block.data)
        covered = block[_COVERED_FROM:nbytes]
        if HEAD_BYTES <= nbytes <= block.size and checksum(covered, generation) == expected:
            return DigestHead(DigestSection(nbytes, bits, seed), layer, tokens)
    raise ChecksumMismatch(f"{where}: the digests are damaged")
