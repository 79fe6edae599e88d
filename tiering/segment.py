"""Segments: runs of tokens in all layers, growing in a Tail, then sealed and immutable.

Invariants:
- While it grows, a Segment belongs to one Sequence's Tail and filled[layer] only rises.
- Once frozen, token_count and every Page are final; filled[layer] == token_count in all layers.
- extents[layer] is set while the layer's bytes are on the device or on their way there, catalog_id
  when the catalog names the Segment. A Segment without catalog_id is known to this process alone.
- references counts the views of Sequences; a Tail counts as one. A Segment that was never committed
  is forgotten with its last view; a committed one stays known.
"""

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.errors import KvtierError
from kvtier.io.extent import Extent
from kvtier.tiering.chain import Tokens
from kvtier.tiering.extent_format import Directory
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.page_layout import Order

if TYPE_CHECKING:
    # What a store holds is listed without torch.
    from kvtier.kernels.digests import PageDigests

NO_SLOT = -1
NO_DRIVE = -1


@dataclass(frozen=True, slots=True)
class History:
    """How a Segment was used when it had a slot last, in ticks of the residency's clock.

    began_at: when its last session began. interval: from session to session; 0: there was one.
    """

    began_at: int
    interval: int


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
    filled: list[int] = field(default_factory=list)
    extents: list[Extent | None] = field(default_factory=list)
    directories: list[Directory | None] = field(init=False)
    """Per layer, from its write to the commit: a hundred times what all else of a Segment takes.
    Then the header on the device has it, and this list is empty."""
    payload_checksums: list[int] = field(init=False)
    """Per layer; 0: not known yet, because another process wrote it."""
    orders: list[Order | None] = field(init=False)
    """Per layer; None: in the order of positions, or not known yet; see knows_order."""
    digests: "dict[int, PageDigests | None]" = field(default_factory=dict)
    """By layer: of those that a sparse query chose from, while it has a slot. None: its Extent has
    none that are of use."""
    generation: int = 0
    tokens: Tokens | None = None
    start_digest: bytes = b""
    end_digest: bytes = b""
    catalog_id: int | None = None
    quarantined: bool = False
    """It is not handed out, for now or for good."""
    damaged: bool = False
    """Its bytes are wrong: quarantined for good. Else the device could not read them."""
    unavailable: bool = False
    """It lies on a drive that is not there, and comes back with it."""
    write_error: KvtierError | OSError | None = None
    """Why a layer has no Extent though it was written: the device did not take it."""
    drive: int = NO_DRIVE
    """The number of the drive that its Extents are to lie on; see DriveSpace.drive_for."""
    history: History | None = None
    references: int = 0
    flush_epoch: int = 0
    """Device.failed_flushes when its first bytes set out: until it is committed, a flush that fails
    may have lost them."""

    def __post_init__(self) -> None:
        self.filled = self.filled or [0] * self.layers
        self.extents = self.extents or [None] * self.layers
        self.directories = [None] * (self.layers if self.catalog_id is None else 0)
        self.payload_checksums = [0] * self.layers
        self.orders = [None] * self.layers
        self.generation = self.generation or secrets.randbits(63) | 1

    @property
    def written(self) -> bool:
        """Every layer's bytes are on the device (which does not mean durable), or on their way."""
        return None not in self.extents

    @property
    def lost(self) -> bool:
        """It is not handed out: a hole, until its tokens are stored anew or it comes back."""
        return self.quarantined or self.unavailable

    @property
    def nbytes(self) -> int:
        """Bytes of its Extents."""
        return sum(each.length for each in self.extents if each is not None)

    @property
    def named_tokens(self) -> Tokens:
        """Its ids, which must have been named."""
        assert self.tokens is not None
        return self.tokens

    def knows_order(self, layer: int) -> bool:
        """Whether orders[layer] says it. The order of a Segment that the catalog named becomes
        known when the layer's header is read."""
        return self.catalog_id is None or self.payload_checksums[layer] != 0

    def commit(self, catalog_id: int) -> None:
        """The catalog names it from now on, and its headers are on the device."""
        self.catalog_id = catalog_id
        self.directories = []

    def freeze(self) -> None:
        """Nothing more will be appended."""
        assert len(set(self.filled)) == 1, "a Segment is frozen between passes"
        assert self.filled[0] > 0
        self.token_count = self.filled[0]


@dataclass(frozen=True, slots=True)
class SegmentView:
    """The first `limit` tokens of a frozen Segment."""

    segment: Segment
    limit: int

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.segment.start + self.limit
