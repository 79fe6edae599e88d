"""The Pages of a Sequence as arrays: which unit each lies in, and which of its slots count.

A column is one Page of every kv head. For a Segment in position order the arrays below say all;
for a clustered one the positions of a column differ by head and come from the Segment's order.
"""

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

import numpy as np

from kvtier.io.device import Int64Array
from kvtier.tiering.digested_views import DigestedViews
from kvtier.tiering.frame_table import BoolArray, PlacedViews
from kvtier.tiering.geometry import PAGE_TOKENS, pages_of
from kvtier.tiering.segment import Segment, SegmentView

ALIKE = -1

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
        low = self._low
        for index, segment in enumerate(self.owners):
            if _in_order(segment, layer):
                continue
            here = self.owner == low + index
            inside[here] = segment.start + self.limit[here] > first
            inside[here] &= segment.start < past
        return self if inside.all() else self.part(inside)

    @property
    def _low(self) -> int:
        return int(self.owner[0]) if len(self.owner) else 0

    @property
    def owners(self) -> Listing[Segment]:
        """The Segments that its columns lie in, and maybe some between: columns follow each other
        in the order of Segments, so that a group has few of all."""
        return self.segments[self._low : int(self.owner[-1]) + 1] if len(self.owner) else []

    def slots(self) -> Int64Array:
        """The slot of each column's Segment."""
        slots = np.array([each.slot for each in self.owners], np.int64)
        by_column: Int64Array = slots[self.owner - self._low]
        return by_column

    def _disordered(self, layer: int) -> list[int]:
        low = self._low
        return [
            low + index
            for index, segment in enumerate(self.owners)
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
    """Whether this layer is known to lie in the order of positions. What is not known yet may
    become known between the making of columns and their use."""
    return segment.knows_order(layer) and segment.orders[layer] is None


def columns_of(views: Iterable[tuple[Segment, int]], layer: int) -> Columns:
    """Columns of (Segment, limit) pairs that follow each other."""
    pairs = list(views)
    segments = [segment for segment, _ in pairs]
    limits = np.array([limit for _, limit in pairs], np.int64)
    starts = np.array([segment.start for segment in segments], np.int64)
    # Of a Segment in another order, or one that is not known, any Page may hold what is shown.
    held = np.array(
        [limit if _in_order(each, layer) else each.token_count for each, limit in pairs], np.int64
    )
    pages = -(-held // PAGE_TOKENS)
    owner = np.repeat(np.arange(len(pairs)), pages)
    page = np.arange(len(owner)) - np.repeat(np.cumsum(pages) - pages, pages)
    limit = limits[owner]
    shown = np.clip(limit - page * PAGE_TOKENS, 0, PAGE_TOKENS)
    return Columns(segments, owner, page, starts[owner] + page * PAGE_TOKENS, shown, limit)


def _looks_alike(views: Iterable[SegmentView], layer: int) -> bool:
    """Whether the columns of this layer are those of every layer that looks alike."""
    return all(
        each.limit == each.segment.token_count or _in_order(each.segment, layer) for each in views
    )


@dataclass(slots=True)
class PageTable:
    """What is known of one Sequence's Pages from call to call: nothing that its views, one tuple
    that is replaced and never changed, do not say, or the residency's count of drops."""

    placed: dict[int, PlacedViews] = field(default_factory=dict)
    """Per layer, of Sequences that HOT holds whole; see frame_table.py."""
    digested: dict[int, DigestedViews] = field(default_factory=dict)
    """Per layer, of Sequences that are attended to by a budget; see digested_views.py."""
    _views: tuple[SegmentView, ...] = ()
    _kept: dict[int, Columns] = field(default_factory=dict)
    """Per layer; under ALIKE of all layers that look alike."""

    def columns(
        self,
        layer: int,
        views: tuple[SegmentView, ...],
        tail: Listing[Segment],
        first: int = 0,
    ) -> Columns:
        """All columns that hold tokens of this layer, in order of Segments; with `first` without
        those of views that end at or before that position."""
        if first:
            at = bisect_right(views, first, key=lambda each: each.end)
            kept = columns_of(((each.segment, each.limit) for each in views[at:]), layer)
        else:
            kept = self._of_views(layer, views)
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

    def _of_views(self, layer: int, views: tuple[SegmentView, ...]) -> Columns:
        if views is not self._views:
            self._views, self._kept = views, {}
        kept = self._kept.get(layer)
        if kept is None:
            key = ALIKE if _looks_alike(views, layer) else layer
            kept = self._kept.get(key)
            if kept is None:
                kept = columns_of(((each.segment, each.limit) for each in views), layer)
            self._kept[key] = self._kept[layer] = kept
        return kept
