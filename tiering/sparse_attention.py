"""The attention of one query with a budget: Pages chosen, read, and what stands for the others.

Invariants:
- The budget is a share of the bytes of the sealed Pages. The Tail is outside of it, and so are
  recent tokens that were sealed just now, and Pages that a view cuts: as many as a Segment has.
- While Pages are read, what is not read is estimated. The Pages themselves are attended to
  together, and a Tail of one Segment with them, so that a result does not depend on which of them
  were where, as long as HOT has room for all of them.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kernels.paged_attention import merge
from kvtier.kernels.running import Partial
from kvtier.kernels.selection import (
    PageShares,
    group_mass,
    page_lists,
    page_shares,
    top_pages,
    unread_partial,
)
from kvtier.kernels.workspace import Workspace
from kvtier.tiering.digested_views import RECENT_TOKENS, DigestedViews
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.geometry import PAGE_TOKENS, SEGMENT_PAGES, pages_of
from kvtier.tiering.page_recall import PageRecall
from kvtier.tiering.reader import Query, Reader
from kvtier.tiering.segment import Segment
from kvtier.tiering.sequence import Sequence


class SparseAttention:
    """Of one store. Callers hold its lock."""

    def __init__(self, reader: Reader, recall: PageRecall, *, estimates: bool) -> None:
        """estimates: whether something stands for what is not read."""
        self.geometry = reader.geometry
        self.residency = reader.residency
        self.mover = reader.mover
        self.recall = recall
        self.estimates = estimates
        self._reader = reader
        self.workspace = Workspace()
        self.pages_to_choose = 0
        self.pages_chosen = 0

    def attend(
        self,
        sequence: Sequence,
        query: Query,
        known: DigestedViews,
        log_mass: torch.Tensor,
        budget: float,
    ) -> torch.Tensor:
        """Attention of the last token, [q_heads, 1, value_width], the query's dtype.

        log_mass: natural, [q_heads, columns], of what `known` has. Raises ConfigError, FormatError,
        DeviceError, CapacityError.
        """
        layer = query.layer
        shares = page_shares(log_mass)
        chosen = self.choose(sequence, layer, known, shares, budget)
        grown = [each for each in sequence.unplaced if each.filled[layer]]
        has_tail = all(self.residency.hot.pages[layer, each.slot] for each in grown)
        # One call for both, and less to merge: a fifth of a step by mean keys.
        tail = grown.pop() if has_tail and len(grown) == 1 else None
        others: list[Partial] = []

        def beside() -> None:
            """What takes no room, while the first Pages are read."""
            if self.estimates:
                others.append(self._estimate(known, shares, chosen))
            if has_tail:
                others.extend(self._attend_tails(grown, query))

        parts = self._attend_chosen(query, known, chosen, beside, tail)
        if not has_tail:
            others += self._attend_tails(grown, query)
        self._read_ahead(sequence, layer)
        return merge(parts + others).out.to(query.vectors.dtype)

    # ---- chosen -----------------------------------------------------------------------------

    def choose(
        self,
        sequence: Sequence,
        layer: int,
        known: DigestedViews,
        shares: PageShares,
        budget: float,
    ) -> torch.Tensor:
        """Which Pages are read, bool [heads, columns]."""
        mass = group_mass(shares, len(shares.weights) // known.digests.heads)
        has_recent = sequence.length(layer) - known.tokens < RECENT_TOKENS
        always = known.with_recent if has_recent else known.always
        limit = round(budget * known.nbytes) + always.beyond_bytes
        mask = top_pages(mass, known.page_bytes, limit, always.pages)
        self.pages_chosen += int(np.count_nonzero(mask.numpy()))
        self.pages_to_choose += mask.numel()
        return mask

    def _estimate(self, known: DigestedViews, shares: PageShares, chosen: torch.Tensor) -> Partial:
        """Of what is not read."""
        digests = known.digests
        return unread_partial(
            shares,
            digests.array("value_means"),
            digests.array("value_factors"),
            ~chosen,
            self.workspace,
        )

    # ---- attended to ------------------------------------------------------------------------

    def _attend_chosen(
        self,
        query: Query,
        known: DigestedViews,
        mask: torch.Tensor,
        beside: Callable[[], None],
        tail: Segment | None,
    ) -> list[Partial]:
        """Over the chosen Pages, bool [heads, columns], and over a Segment that still grows and is
        in HOT. beside: called while Pages are read."""
        hot = self.residency.hot
        lists, counts = page_lists(mask)
        known.wanted = self._named(known, lists, _there(lists, counts))
        whole = hot.pages[query.layer, known.slots] > 0
        if whole.any() and not whole.all():
            in_whole = mask & torch.from_numpy(whole)
            nbytes = int((mask & ~in_whole).sum()) * self.geometry.frame_bytes(query.layer)
            if in_whole.any() and nbytes > hot.tier.free_bytes:
                # What HOT has whole first: it needs no room, and may leave when others do.
                parts = self._attend_pages(query, known, page_lists(in_whole), beside, tail)
                rest = page_lists(mask & ~in_whole)
                return parts + self._attend_pages(query, known, rest, lambda: None, None)
        return self._attend_pages(query, known, (lists, counts), beside, tail)

    def _attend_tails(self, grown: list[Segment], query: Query) -> list[Partial]:
        """Over Segments that have no digests yet, one by one. One that a pass beyond HOT brought is
        read back."""
        return [
            self._reader.attend_frames(query, *self._grown(each, query.layer)) for each in grown
        ]

    def _grown(self, segment: Segment, layer: int) -> tuple[torch.Tensor, int]:
        """Frames [heads, pages] of a Segment that still grows, and how many slots of the last Pages
        count."""
        loaded = self.mover.load([Unit(segment, layer)])
        assert loaded, "HOT always has room for one unit"
        filled = segment.filled[layer]
        pages = slice(0, pages_of(filled))
        frames = self.residency.hot.frames[layer][segment.slot, :, pages].astype(np.int64)
        return torch.from_numpy(frames), (filled - 1) % PAGE_TOKENS + 1

    def _attend_pages(
        self,
        query: Query,
        known: DigestedViews,
        listed: tuple[torch.Tensor, torch.Tensor],
        beside: Callable[[], None],
        tail: Segment | None,
    ) -> list[Partial]:
        """Over these Pages, lists and counts of `page_lists`, as many at a time as HOT surely has
        room for; the first ones with what still grows."""
        all_lists, counts = listed
        all_there = _there(all_lists, counts)
        most = all_lists.shape[1]
        frame_bytes = self.geometry.frames_bytes(query.layer, 1)
        at_once = max(SEGMENT_PAGES, self.residency.hot.tier.limit_bytes // 4 // frame_bytes)
        parts = []
        for first in range(0, most, at_once):
            lists = all_lists[:, first : first + at_once]
            there = None if all_there is None else all_there[:, first : first + at_once]
            with self.recall.recalling(query.layer, *self._named(known, lists, there)) as landed:
                if not first:
                    beside()
                recalled = torch.from_numpy(landed())
                if there is None:
                    frames = recalled.view(lists.shape)
                else:
                    # A head with fewer repeats any Frame, of which nothing counts.
                    frames = torch.full(lists.shape, int(recalled[0]))
                    frames[torch.from_numpy(there)] = recalled
                valid = _valid(known, lists, there)
                if tail is None or first:
                    parts.append(self._reader.attend_frames(query, frames, valid))
                else:
                    joined = _joined(frames, valid, *self._grown(tail, query.layer))
                    parts.append(self._reader.attend_frames(query, *joined))
        if not most:
            beside()
            parts = self._attend_tails([] if tail is None else [tail], query)
        return parts

    @staticmethod
    def _named(
        known: DigestedViews, lists: torch.Tensor, there: "npt.NDArray[np.bool_] | None"
    ) -> "tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]":
        """Slots, heads and numbers of Pages [heads, n] that are there; None: all."""
        columns = lists.numpy()
        heads = np.repeat(np.arange(len(columns)), columns.shape[1])
        columns = columns.reshape(-1)
        if there is not None:
            kept = there.reshape(-1)
            heads, columns = heads[kept], columns[kept]
        return known.slots[columns], heads, known.numbers[columns]

    # ---- ahead ------------------------------------------------------------------------------

    def _read_ahead(self, sequence: Sequence, layer: int) -> None:
        """While others compute: what the next layer wanted in the step before, if HOT lacks it."""
        behind = layer + 1 if layer + 1 < len(self.geometry.layers) else 0
        known = sequence.table.digested.get(behind)
        if known is not None and known.wanted is not None and known.views is sequence.placed_views:
            self.recall.start(behind, *known.wanted)


def _there(lists: torch.Tensor, counts: torch.Tensor) -> "npt.NDArray[np.bool_] | None":
    """Which entries of lists count, bool [heads, n]; None: all."""
    held = counts.numpy()
    if (held == lists.shape[1]).all():
        return None
    there: npt.NDArray[np.bool_] = np.arange(lists.shape[1]) < held[:, None]
    return there


def _joined(
    frames: torch.Tensor, valid: torch.Tensor | None, grown: torch.Tensor, last: int
) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Frames of Pages and of what still grows, and which slots count, as paged_attention takes it.

    valid: of the former, None: all. last: how many slots of the last of `grown` count.
    """
    joined = torch.cat((frames, grown), 1)
    if valid is None:
        return joined, last
    held = torch.ones((*grown.shape, PAGE_TOKENS), dtype=torch.bool)
    held[:, -1, last:] = False
    return joined, torch.cat((valid, held), 1)


def _valid(
    known: DigestedViews, lists: torch.Tensor, there: "npt.NDArray[np.bool_] | None"
) -> torch.Tensor | None:
    """Which slots of these Pages count, as paged_attention takes it."""
    if there is None:
        if known.shown is None:
            return None
        valid = torch.ones((*lists.shape, PAGE_TOKENS), dtype=torch.bool)
    else:
        valid = torch.from_numpy(there)[..., None].expand(*there.shape, PAGE_TOKENS).clone()
    if known.shown is not None:
        valid &= known.shown[torch.arange(len(lists))[:, None], lists]
    return valid
