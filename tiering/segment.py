"""Segments: runs of tokens in all layers, growing in a Tail, then sealed and immutable.

Invariants:
- While it grows, a Segment belongs to one Sequence's Tail and filled[layer] only rises.
- Once frozen, token_count and every Page are final; filled[layer] == token_count in all layers.
- extents[layer] is set when the layer's bytes are on the device, catalog_id when the catalog
  names the Segment. A Segment without catalog_id is known to this process alone.
- references counts the views of Sequences; a Tail counts as one. A Segment that was never committed
  is forgotten with its last view; a committed one stays known.
"""

import secrets
from dataclasses import dataclass, field

from kvtier.io.extent import Extent
from kvtier.tiering.chain import Tokens
from kvtier.tiering.extent_format import Directory
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.page_layout import Order

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Segment:
    """One Segment in use or known from the catalog."""

    start: int
    """Position of its first token in the stream."""
    layers: int
    provenance: Provenance = EXACT
    parent: "SegmentView | None" = None
    slot: int = NO_SLOT
    token_count: int = SEGMENT_TOKENS
    """Tokens it holds; while it grows, tokens it has room for."""
    frozen: bool = False
    filled: list[int] = field(default_factory=list)
    extents: list[Extent | None] = field(default_factory=list)
    directories: list[Directory | None] = field(init=False)
    payload_checksums: list[int] = field(init=False)
    orders: list[Order | None] = field(init=False)
    """Per layer; None: in the order of positions, or not read yet (then directories has None)."""
    generation: int = 0
    tokens: Tokens | None = None
    start_digest: bytes = b""
    end_digest: bytes = b""
    catalog_id: int | None = None
    quarantined: bool = False
    """It is not handed out, for now or for good."""
    damaged: bool = False
    """Its bytes are wrong: quarantined for good. Else the device could not read them."""
    references: int = 0
    flush_epoch: int = 0
    """Device.failed_flushes when its first bytes were written: until it is committed, a flush that
    fails may have lost them."""

    def __post_init__(self) -> None:
        self.filled = self.filled or [0] * self.layers
        self.extents = self.extents or [None] * self.layers
        self.directories = [None] * self.layers
        self.payload_checksums = [0] * self.layers
        self.orders = [None] * self.layers
        self.generation = self.generation or secrets.randbits(63) | 1

    @property
    def written(self) -> bool:
        """Every layer's bytes are on the device (which does not mean durable)."""
        return None not in self.extents

    @property
    def nbytes(self) -> int:
        """Bytes of its Extents."""
        return sum(each.length for each in self.extents if each is not None)

    @property
    def named_tokens(self) -> Tokens:
        """Its ids, which must have been named."""
        assert self.tokens is not None
        return self.tokens

    def freeze(self) -> None:
        """Nothing more will be appended."""
        assert len(set(self.filled)) == 1, "a Segment is frozen between passes"
        assert self.filled[0] > 0
        self.token_count = self.filled[0]
        self.frozen = True


@dataclass(frozen=True, slots=True)
class SegmentView:
    """The first `limit` tokens of a frozen Segment."""

    segment: Segment
    limit: int

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.segment.start + self.limit
