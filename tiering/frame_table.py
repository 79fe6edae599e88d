"""Where the Pages of a Sequence lie when HOT holds all of them: Frames, ready for the kernel.

A decode step asks for the Frames of the whole context in every layer, and from step to step only
the last Page changes. So those of the views are kept, and only those of the Tail looked up.

Invariants:
- What is kept for a layer holds for one tuple of views (by identity, as tuples never change) and
  one count of drops of that layer (residency.py): while no unit of the layer has left HOT, no Frame
  of a unit that was there has changed. Anything else is made anew.
- Attention does not care about the order of tokens, so the Pages of which every slot counts come
  first, whatever Segment they lie in, and one mask covers the last few.
- The columns behind `fixed` are room for a Tail. They are written at each use, and read before the
  next: whoever asks holds the store's lock until attention is done.
"""

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.tiering.geometry import PAGE_TOKENS, SEGMENT_PAGES, pages_of
from kvtier.tiering.residency import NO_FRAME, SlotArray, TierMap
from kvtier.tiering.segment import Segment, SegmentView

BoolArray = npt.NDArray[np.bool_]

_IN_PAGE = np.arange(PAGE_TOKENS)
_PAGES = np.arange(SEGMENT_PAGES)


class Placed(NamedTuple):
    """frames: int64 [heads, pages]. valid: bool [heads, m, 16], which slots of the last m pages
    count; None: all. slots: of the views' Segments, the same array from call to call."""

    frames: torch.Tensor
    valid: torch.Tensor | None
    slots: SlotArray


@dataclass(slots=True, eq=False)
class PlacedViews:
    """One layer of the views of a Sequence, all of it in HOT.

    frames, array: the same int64 [heads, fixed + room for a Tail]. cut: bool [heads, m, 16], for
    the last m of the first `fixed` columns.
    """

    views: tuple[SegmentView, ...]
    drops: int
    slots: SlotArray
    frames: torch.Tensor
    array: npt.NDArray[np.int64]
    fixed: int
    cut: BoolArray
    beginnings: dict[int, torch.Tensor]
    """Views of the first columns of `frames`, by number: to slice costs as much as the rest."""
    tail: tuple[Segment, int] | None = None
    """Whose first Pages the columns behind `fixed` are, and how many: in most steps of a decode
    the same as in the one before."""

    def first(self, columns: int) -> torch.Tensor:
        """frames [heads, columns]."""
        found = self.beginnings.get(columns)
        if found is None:
            found = self.beginnings[columns] = self.frames[:, :columns]
        return found

    def holds(self, hot: TierMap, layer: int, views: tuple[SegmentView, ...]) -> bool:
        """Whether it is still what it was made of."""
        return self.views is views and self.drops == hot.drops[layer]


def placed(
    kept: dict[int, PlacedViews],
    hot: TierMap,
    layer: int,
    views: tuple[SegmentView, ...],
    tail: Listing[tuple[Segment, int]],
) -> Placed | None:
    """Frames of all views, and of the first tokens of Segments of the Tail, as many as given for
    each; None where HOT does not hold them all. `kept` is what earlier calls kept."""
    base = kept.get(layer)
    if base is None or not base.holds(hot, layer, views):
        # Layers mostly share their slots: one array serves all of them.
        known = next((each.slots for each in kept.values() if each.views is views), None)
        base = _place(hot, layer, views, known)
        if base is None:
            kept.pop(layer, None)
            return None
        kept[layer] = base
    if not tail:
        valid = torch.from_numpy(base.cut) if base.cut.shape[1] else None
        return Placed(base.first(base.fixed), valid, base.slots)
    return _with_tail(base, hot, layer, tail)


def _place(
    hot: TierMap, layer: int, views: tuple[SegmentView, ...], slots: SlotArray | None
) -> PlacedViews | None:
    if slots is None:
        slots = np.array([each.segment.slot for each in views], np.int64)
    cut_views = [(i, each) for i, each in enumerate(views) if each.limit < each.segment.token_count]
    if not hot.pages[layer, slots].all():
        return None
    if not all(each.segment.knows_order(layer) for _, each in cut_views):
        return None
    limits = np.array([each.limit for each in views], np.int64)
    whole = (limits // PAGE_TOKENS)[:, None]
    shown = -(-limits // PAGE_TOKENS)[:, None]
    # Of a view that ends within a Segment in another order, every Page may hold what is shown.
    scattered = [index for index, each in cut_views if each.segment.orders[layer] is not None]
    for index in scattered:
        whole[index], shown[index] = 0, pages_of(views[index].segment.token_count)
    is_whole = whole > _PAGES
    is_cut = (whole <= _PAGES) & (shown > _PAGES)
    # [heads, views, pages]
    by_head = hot.frames[layer][slots].transpose(1, 0, 2)
    heads, count = len(by_head), int(shown.sum())
    array = np.empty((heads, count + SEGMENT_PAGES), np.int64)
    first_cut = int(whole.sum())
    array[:, :first_cut] = by_head[:, is_whole]
    array[:, first_cut:count] = by_head[:, is_cut]
    assert (array[:, :count] != NO_FRAME).all()
    of_cut, page_of_cut = np.nonzero(is_cut)
    cut = np.repeat(
        (page_of_cut[:, None] * PAGE_TOKENS + _IN_PAGE < limits[of_cut][:, None])[None], heads, 0
    )
    for index in scattered:
        cut[:, of_cut == index] = _shown_slots(views[index], layer)
    return PlacedViews(
        views,
        hot.drops[layer],
        slots,
        torch.from_numpy(array),
        array,
        count,
        cut,
        {},
    )


def _shown_slots(view: SegmentView, layer: int) -> BoolArray:
    """bool [heads, pages, 16]: slots of a Segment in another order that its first tokens lie in."""
    order = view.segment.orders[layer]
    assert order is not None
    shown = np.zeros((len(order), pages_of(view.segment.token_count) * PAGE_TOKENS), np.bool_)
    shown[:, : order.shape[1]] = order < view.limit
    return shown.reshape(len(order), -1, PAGE_TOKENS)


def _with_tail(
    base: PlacedViews, hot: TierMap, layer: int, tail: Listing[tuple[Segment, int]]
) -> Placed | None:
    at, heads = base.fixed, len(base.array)
    needed = at + sum(pages_of(tokens) for _, tokens in tail)
    if needed > base.array.shape[1]:
        # Tails of several Segments are those of a pass of many tokens.
        return None
    if len(tail) == 1 and base.tail == (tail[0][0], needed - at):
        return _with_ends(base, needed, tail)
    base.tail = None
    for segment, tokens in tail:
        pages = pages_of(tokens)
        order = segment.orders[layer]
        if hot.pages[layer, segment.slot] < heads * pages or (
            order is not None and tokens < segment.token_count
        ):
            return None
        base.array[:, at : at + pages] = hot.frames[layer][segment.slot, :, :pages]
        at += pages
    if len(tail) == 1:
        base.tail = tail[0][0], needed - base.fixed
    return _with_ends(base, needed, tail)


def _with_ends(base: PlacedViews, columns: int, tail: Listing[tuple[Segment, int]]) -> Placed:
    """The first columns, and which slots of the last ones count."""
    if base.cut.shape[1] or len(tail) > 1:
        return Placed(base.first(columns), _mask_with_tail(base.cut, tail), base.slots)
    rest = tail[0][1] % PAGE_TOKENS
    ends = _ends(len(base.array))[rest] if rest else None
    return Placed(base.first(columns), ends, base.slots)


@cache
def _ends(heads: int) -> tuple[torch.Tensor, ...]:
    """Of a Page of n tokens, the n-th: bool [heads, 1, 16]."""
    shown = np.repeat((_IN_PAGE[:, None] > _IN_PAGE)[:, None, None], heads, 1)
    return torch.from_numpy(shown).unbind()


def _mask_with_tail(cut: BoolArray, tail: Listing[tuple[Segment, int]]) -> torch.Tensor:
    parts = [cut]
    for _, tokens in tail:
        shown = np.arange(pages_of(tokens) * PAGE_TOKENS).reshape(-1, PAGE_TOKENS) < tokens
        parts.append(np.repeat(shown[None], len(cut), 0))
    return torch.from_numpy(np.concatenate(parts, axis=1))
