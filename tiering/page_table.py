"""The Pages of a Sequence as arrays: which unit each lies in, and which of its slots count.

A column is one Page of every kv head. For a Segment in position order the arrays below say all;
for a clustered one the positions of a column differ by head and come from the Segment's order.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.io.device import Int64Array
from kvtier.tiering.geometry import PAGE_TOKENS, pages_of
from kvtier.tiering.segment import Segment, SegmentView

BoolArray = npt.NDArray[np.bool_]

_IN_PAGE = np.arange(PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Columns:
    """Parallel arrays, one element per column. `segments` lists what `owner` points into."""

    segments: Listing[Segment]
    owner: Int64Array
    page: Int64Array
    start: Int64Array
    """Position of the Page's first slot, were its Segment in position order."""
    count: Int64Array
    """Slots of the Page that the view shows, were its Segment in position order."""
    limit: Int64Array
    """The view's limit, in tokens of its Segment."""

    def __len__(self) -> int:
        return len(self.owner)

    def part(self, chosen: slice | BoolArray) -> "Columns":
        return Columns(
            self.segments,
            self.owner[chosen],
            self.page[chosen],
            self.start[chosen],
            self.count[chosen],
            self.limit[chosen],
        )

    def between(self, layer: int, first: int, past: int) -> "Columns":
        """Without the columns that hold no position in [first, past)."""
        inside = (self.start + self.count > first) & (self.start < past)
        for index, segment in enumerate(self.segments):
            if _in_order(segment, layer):
                continue
            here = self.owner == index
            inside[here] = segment.start + self.limit[here] > first
            inside[here] &= segment.start < past
        return self if inside.all() else self.part(inside)

    def _disordered(self, layer: int) -> list[int]:
        return [
            index
            for index, segment in enumerate(self.segments)
            if segment.orders[layer] is not None
        ]

    def positions(self, layer: int, heads: int, first: int, past: int) -> Int64Array | None:
        """int64 [heads or 1, columns, 16]: positions, -1 where a slot does not count because it
        is unused, beyond the view's limit or outside [first, past). None: every slot counts,
        and all lie in the order of positions.
        """
        disordered = [i for i in self._disordered(layer) if (self.owner == i).any()]
        inside = (self.start >= first) & (self.start + PAGE_TOKENS <= past)
        if not disordered and bool((inside & (self.count == PAGE_TOKENS)).all()):
            return None
        positions = self.start[:, None] + _IN_PAGE
        positions[self.count[:, None] <= _IN_PAGE] = -1
        by_head = np.repeat(positions[None], heads if disordered else 1, axis=0)
        for index in disordered:
            segment = self.segments[index]
            here = np.flatnonzero(self.owner == index)
            order = segment.orders[layer]
            assert order is not None
            padded = np.full((heads, pages_of(segment.token_count) * PAGE_TOKENS), -1, np.int64)
            padded[:, : segment.token_count] = order
            offsets = padded.reshape(heads, -1, PAGE_TOKENS)[:, self.page[here]]
            shown = (offsets >= 0) & (offsets < self.limit[here][:, None])
            by_head[:, here] = np.where(shown, offsets + segment.start, -1)
        by_head[(by_head < first) | (by_head >= past)] = -1
        return by_head if disordered or bool((by_head < 0).any()) else None


def _in_order(segment: Segment, layer: int) -> bool:
    """Whether this layer is known to lie in the order of positions. The order of a Segment that
    the catalog named becomes known when its layer is read, which may be after its columns."""
    known = segment.catalog_id is None or segment.directories[layer] is not None
    return known and segment.orders[layer] is None


def columns_of(views: Iterable[tuple[Segment, int]], layer: int) -> Columns:
    """Columns of (Segment, limit) pairs that follow each other."""
    segments: list[Segment] = []
    parts: list[Int64Array] = []
    for segment, limit in views:
        pages = pages_of(limit if _in_order(segment, layer) else segment.token_count)
        page = np.arange(pages, dtype=np.int64)
        shown = np.clip(limit - page * PAGE_TOKENS, 0, PAGE_TOKENS)
        part = np.empty((5, pages), np.int64)
        part[0] = len(segments)
        part[1] = page
        part[2] = segment.start + page * PAGE_TOKENS
        part[3] = shown
        part[4] = limit
        parts.append(part)
        segments.append(segment)
    owner, page, start, count, limits = (
        np.concatenate(parts, axis=1) if parts else np.zeros((5, 0), np.int64)
    )
    return Columns(segments, owner, page, start, count, limits)


@dataclass(slots=True)
class PageTable:
    """Columns of one Sequence; those of its views are kept from call to call."""

    _views: tuple[SegmentView, ...] = ()
    _kept: dict[int, Columns] = field(default_factory=dict)

    def columns(self, layer: int, views: Listing[SegmentView], tail: Listing[Segment]) -> Columns:
        """All columns that hold tokens of this layer, in order of Segments."""
        if len(views) != len(self._views) or any(
            new is not old for new, old in zip(views, self._views, strict=True)
        ):
            self._views = tuple(views)
            self._kept = {}
        kept = self._kept.get(layer)
        if kept is None:
            kept = columns_of(((each.segment, each.limit) for each in views), layer)
            self._kept[layer] = kept
        growing = [(each, each.filled[layer]) for each in tail if each.filled[layer]]
        if not growing:
            return kept
        added = columns_of(growing, layer)
        return Columns(
            [*kept.segments, *added.segments],
            np.concatenate([kept.owner, added.owner + len(kept.segments)]),
            np.concatenate([kept.page, added.page]),
            np.concatenate([kept.start, added.start]),
            np.concatenate([kept.count, added.count]),
            np.concatenate([kept.limit, added.limit]),
        )
