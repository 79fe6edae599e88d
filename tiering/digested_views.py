"""What a query chooses from: the Pages of a Sequence's views in one layer, and their digests.

A column is one Page of every kv head, in the order of Segments and of Pages within them.

Invariants:
- Digests speak for all tokens of a Page. Pages that a view cuts, and those of sinks, are `always`
  read, so no Page is ever estimated from tokens that the Sequence does not have.
- What is kept holds for one tuple of views; where views were added or taken away at the end, only
  those are made anew.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.io.device import Int64Array
from kvtier.kernels.digests import LayerDigests, PageDigests
from kvtier.tiering.clusterer import SINK_TOKENS
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry, pages_of
from kvtier.tiering.segment import Segment, SegmentView
from kvtier.tiering.units import Mask

RECENT_TOKENS = 64
"""The last tokens, always read; mostly they are in the Tail."""

DigestOf = Callable[[Segment, int], PageDigests]
"""The digests of one layer of a Segment, its Pages as they lie in Frames."""


@dataclass(frozen=True, slots=True, eq=False)
class Always:
    """Pages that are read whatever they promise: bool [heads, columns]. beyond_bytes: of those that
    are beyond the budget, the most that a head has."""

    pages: torch.Tensor
    beyond_bytes: int

    @classmethod
    def of(cls, pages: Mask, beyond: Mask, page_bytes: Int64Array) -> "Always":
        return cls(torch.from_numpy(pages), int((beyond * page_bytes).sum(1).max()))


@dataclass(slots=True, eq=False)
class DigestedViews:
    """One layer of the views of a Sequence.

    slots, numbers: int64 [columns], of each column its Segment's slot and the Page's number there.
    shown: bool [heads, columns, 16], the slots that count; None: all of every column. always:
    what is read by every query. with_recent: the same where some of the last 64 tokens are here.
    made_of: the digests of each view. page_bytes: int64 [columns]. nbytes: of all columns of a
    head. wanted: slots, heads and numbers of the last choice, for reading ahead.
    """

    views: tuple[SegmentView, ...]
    made_of: list[PageDigests]
    digests: LayerDigests
    slots: Int64Array
    numbers: Int64Array
    shown: torch.Tensor | None
    always: Always
    with_recent: Always
    page_bytes: torch.Tensor
    nbytes: int = 0
    wanted: tuple[Int64Array, Int64Array, Int64Array] | None = None
    moves: int = 0
    """SparseReader's count when it was made."""

    @property
    def held_bytes(self) -> int:
        """Bytes of its digests."""
        return self.digests.held_bytes

    @property
    def tokens(self) -> int:
        return self.views[-1].end if self.views else 0


def digested(
    known: DigestedViews | None,
    views: tuple[SegmentView, ...],
    layer: int,
    geometry: Geometry,
    sketch: tuple[int, int] | None,
    digest_of: DigestOf,
) -> DigestedViews:
    """Of these views, going on from what was known of earlier ones.

    sketch: (bits, seed), or None for means alone. Raises what `digest_of` raises.
    """
    shape = geometry.layers[layer]
    # What may fail comes first. It also tells the orders of units that were not read before.
    made_of = [digest_of(view.segment, layer) for view in views]
    same = 0
    if known is None:
        digests = LayerDigests(shape.kv_heads, (shape.key_width, shape.value_width), sketch)
    else:
        digests = known.digests
        while same < min(len(made_of), len(known.made_of)) and (
            known.made_of[same] is made_of[same]
        ):
            same += 1
        digests.crop(same)
    for of in made_of[same:]:
        digests.add(of)
    counts = [pages_of(view.segment.token_count) for view in views]
    positions = _positions(views, layer, shape.kv_heads, counts)
    end = views[-1].end
    held = positions >= 0
    shown = None if held.all() else torch.from_numpy(held)
    tokens = np.concatenate([_tokens_of_pages(view.segment.token_count) for view in views])
    page_bytes = tokens * geometry.row_bytes(layer)
    # Cut Pages have tokens that the Sequence does not have: they are read, beyond the budget.
    cut = held.sum(2) < tokens
    always = (held & (positions < SINK_TOKENS)).any(2) | cut
    recent = (positions >= end - RECENT_TOKENS).any(2)
    return DigestedViews(
        views=views,
        made_of=made_of,
        digests=digests,
        slots=np.repeat([view.segment.slot for view in views], counts).astype(np.int64),
        numbers=np.concatenate([np.arange(count) for count in counts]).astype(np.int64),
        shown=shown,
        always=Always.of(always, cut, page_bytes),
        with_recent=Always.of(always | recent, cut | (recent & ~always), page_bytes),
        page_bytes=torch.from_numpy(page_bytes),
        nbytes=int(page_bytes.sum()),
    )


def _tokens_of_pages(tokens: int) -> Int64Array:
    """How many tokens each Page of a Segment holds."""
    starts = np.arange(pages_of(tokens), dtype=np.int64) * PAGE_TOKENS
    return np.minimum(tokens - starts, PAGE_TOKENS)


def _positions(
    views: tuple[SegmentView, ...], layer: int, heads: int, counts: list[int]
) -> Int64Array:
    """int64 [heads, columns, 16]: the position in each slot, -1 where it does not count."""
    parts = []
    for view, count in zip(views, counts, strict=True):
        segment = view.segment
        offsets = np.full((heads, count * PAGE_TOKENS), -1, np.int64)
        order = segment.orders[layer]
        held = segment.token_count
        offsets[:, :held] = np.arange(held) if order is None else order
        there = (offsets >= 0) & (offsets < view.limit)
        parts.append(np.where(there, offsets + segment.start, -1))
    return np.concatenate(parts, 1).reshape(heads, -1, PAGE_TOKENS)
