"""Where the Pages of a Sequence lie when HOT holds all of them: Frames, ready for the kernel.

A decode step asks for the Frames of the whole context in every layer, and from step to step only
the last Page changes. So those of the views are kept, for whoever comes back to the same ones too,
and only those of the Tail looked up.

Invariants:
- What is kept for a layer holds for one tuple of views (by identity, as tuples never change) as
  long as none of their units has left HOT since (residency.py): no Frame of a unit that was there
  all the time has changed. Anything else is made anew.
- A table belongs to one Sequence, or to KeptTables.
- Attention does not care about the order of tokens, so the Pages of which every slot counts come
  first, whatever Segment they lie in, and one mask covers the last few.
- The columns behind `fixed` are room for a Tail. They are written at each use, and read before the
  next: whoever asks holds the store's lock until attention is done.
"""

from collections import OrderedDict
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
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
    count; a number: how many of each head's last Page, the first ones; None: all. slots: of the
    views' Segments, the same array from call to call."""

    frames: torch.Tensor
    valid: torch.Tensor | int | None
    slots: SlotArray


class Shown(NamedTuple):
    """Which Pages show tokens of views: the same in every layer that looks alike.

    pages: int64, as 32 * view + page, in the order of a table's columns. cut: bool [m, 16], which
    slots of the last m of them count, were their Segments in the order of positions. owners: int64
    [m], which view each of these is of. scattered: views that end within a Segment in another
    order.
    """

    slots: SlotArray
    pages: npt.NDArray[np.int64]
    cut: BoolArray
    owners: npt.NDArray[np.int64]
    scattered: tuple[int, ...]


@dataclass(slots=True, eq=False)
class PlacedViews:
    """One layer of the views of a Sequence, all of it in HOT.

    drops: HOT's of the layer, when it was made or found to hold still. frames, array: the same
    int64 [heads, fixed + room for a Tail]. cut: bool [heads, m, 16], for the last m of the first
    `fixed` columns.
    """

    views: tuple[SegmentView, ...]
    drops: int
    shown: Shown
    frames: torch.Tensor
    array: npt.NDArray[np.int64]
    fixed: int
    cut: BoolArray
    beginnings: dict[int, torch.Tensor]
    """Views of the first columns of `frames`, by number: to slice costs as much as the rest."""
    tail: tuple[Segment, int] | None = None
    """Whose first Pages the columns behind `fixed` are, and how many: in most steps of a decode
    the same as in the one before."""
    is_cut: bool = field(init=False)
    """Whether some of the first `fixed` columns do not count as a whole."""

    def __post_init__(self) -> None:
        self.is_cut = self.cut.shape[1] > 0

    @property
    def slots(self) -> SlotArray:
        """Of the views' Segments."""
        return self.shown.slots

    def first(self, columns: int) -> torch.Tensor:
        """frames [heads, columns]."""
        found = self.beginnings.get(columns)
        if found is None:
            found = self.beginnings[columns] = self.frames[:, :columns]
        return found

    def holds(self, hot: TierMap, layer: int, views: tuple[SegmentView, ...]) -> bool:
        """Whether it is still what it was made of."""
        if self.views is not views:
            return False
        if self.drops != hot.drops[layer]:
            if (hot.dropped_at[layer, self.slots] > self.drops).any():
                return False
            self.drops = hot.drops[layer]
        return True


class KeptTables:
    """Tables of views that no open Sequence has, for the next one that begins with the same views:
    those that came last, up to a limit in bytes."""

    def __init__(self, bytes_max: int) -> None:
        self.nbytes = 0
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[SegmentView, ...], dict[int, PlacedViews]] = OrderedDict()

    def keep(self, views: tuple[SegmentView, ...], tables: dict[int, PlacedViews]) -> None:
        """Keep what was made of these views, of all that a Sequence leaves behind."""
        made = {layer: each for layer, each in tables.items() if each.views is views}
        if not views or not made:
            return
        for each in made.values():
            each.tail = None
        self.take(views)
        self._kept[views] = made
        self.nbytes += _bytes_of(made)
        while self.nbytes > self._bytes_max:
            self.nbytes -= _bytes_of(self._kept.popitem(last=False)[1])

    def take(self, views: tuple[SegmentView, ...]) -> dict[int, PlacedViews]:
        """What is kept of equal views, if anything; their tuple is that of the tables."""
        made = self._kept.pop(views, {})
        self.nbytes -= _bytes_of(made)
        # While nobody viewed them, Segments may have got other slots, and others theirs.
        slots = [view.segment.slot for view in views]
        return {layer: each for layer, each in made.items() if each.slots.tolist() == slots}


def _bytes_of(tables: dict[int, PlacedViews]) -> int:
    return sum(each.array.nbytes for each in tables.values())


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
        # Layers mostly look alike: what one shows serves all of them.
        alike = next((each.shown for each in kept.values() if each.views is views), None)
        base = _place(hot, layer, views, alike)
        if base is None:
            kept.pop(layer, None)
            return None
        kept[layer] = base
    if not tail:
        valid = torch.from_numpy(base.cut) if base.is_cut else None
        return Placed(base.first(base.fixed), valid, base.slots)
    if len(tail) == 1 and base.tail is not None:
        segment, tokens = tail[0]
        if base.tail[0] is segment and base.tail[1] == pages_of(tokens):
            return _with_ends(base, base.fixed + base.tail[1], tail)
    return _with_tail(base, hot, layer, tail)


def _place(
    hot: TierMap, layer: int, views: tuple[SegmentView, ...], alike: Shown | None
) -> PlacedViews | None:
    """alike: what another layer shows of the same views."""
    if alike is None:
        alike = _shown(views, np.array([each.segment.slot for each in views], np.int64), ())
    slots = alike.slots
    if not hot.pages[layer, slots].all():
        return None
    # Of a view that ends within a Segment in another order, every Page may hold what is shown.
    cut = [index for index, each in enumerate(views) if each.limit < each.segment.token_count]
    if not all(views[index].segment.knows_order(layer) for index in cut):
        return None
    scattered = tuple(i for i in cut if views[i].segment.orders[layer] is not None)
    shown = alike if alike.scattered == scattered else _shown(views, slots, scattered)
    # [heads, 32 * views]
    by_head = hot.frames[layer][slots].transpose(1, 0, 2)
    heads, count = len(by_head), len(shown.pages)
    array = np.empty((heads, count + SEGMENT_PAGES), np.int64)
    array[:, :count] = by_head.reshape(heads, len(views) * SEGMENT_PAGES)[:, shown.pages]
    assert (array[:, :count] != NO_FRAME).all()
    shows = np.repeat(shown.cut[None], heads, 0)
    for index in scattered:
        shows[:, shown.owners == index] = _shown_slots(views[index], layer)
    frames = torch.from_numpy(array)
    return PlacedViews(views, hot.drops[layer], shown, frames, array, count, shows, {})


def _shown(views: tuple[SegmentView, ...], slots: SlotArray, scattered: tuple[int, ...]) -> Shown:
    limits = np.array([each.limit for each in views], np.int64)
    whole = (limits // PAGE_TOKENS)[:, None]
    pages = -(-limits // PAGE_TOKENS)[:, None]
    for index in scattered:
        whole[index], pages[index] = 0, pages_of(views[index].segment.token_count)
    is_cut = (whole <= _PAGES) & (pages > _PAGES)
    owners, page = np.nonzero(is_cut)
    cut = page[:, None] * PAGE_TOKENS + _IN_PAGE < limits[owners][:, None]
    ordered = np.concatenate([np.flatnonzero(whole > _PAGES), np.flatnonzero(is_cut)])
    return Shown(slots, ordered, cut, owners, scattered)


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
    if base.is_cut or len(tail) > 1:
        return Placed(base.first(columns), _mask_with_tail(base.cut, tail), base.slots)
    return Placed(base.first(columns), tail[0][1] % PAGE_TOKENS or None, base.shown.slots)


def _mask_with_tail(cut: BoolArray, tail: Listing[tuple[Segment, int]]) -> torch.Tensor:
    parts = [cut]
    for _, tokens in tail:
        shown = np.arange(pages_of(tokens) * PAGE_TOKENS).reshape(-1, PAGE_TOKENS) < tokens
        parts.append(np.repeat(shown[None], len(cut), 0))
    return torch.from_numpy(np.concatenate(parts, axis=1))
