"""Tokens exchanged between pages, so that each lies among its like: balanced 2-means over pairs.

Sums are exact, as in `page_tree`.
"""

from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.kernels.page_tree import (
    BEHIND,
    level_of,
    projections,
    slots_in_use,
    weighted_sums,
    whole_directions,
)

SWEEPS = 2
"""Of a sweep, only the pairs that would exchange tokens when it begins take part, some 4% in the
keys of a real model. So a second sweep is cheap, and gives what the first one made possible."""
PAIR_STEPS = 2
"""Lloyd iterations over a pair."""


@dataclass(slots=True)
class _Pages:
    """Pages of all sets in a row."""

    rows: Tensor
    """[n, page tokens, width]."""
    order: Tensor
    """int64 [n, page tokens]."""
    sums: Tensor
    """[n, width], of the rows."""
    counts: Tensor
    """float [n]: tokens of each."""
    empty: Tensor | None
    """bool [n, page tokens]: slots that hold no token; None: there are none."""


def exchanged(pages: Tensor, order: Tensor, tokens: int) -> Generator[None, None, Tensor]:
    """Which row lies in each slot, int64 [sets, pages * page tokens], after SWEEPS sweeps over all
    pairs of a set's pages. Every page keeps its number of tokens.

    pages, order: as `page_tree.tree_order` returns them. tokens: of each set. In steps.
    """
    sets, count, slots, width = pages.shape
    rows = pages.reshape(-1, slots, width).clone()
    used = slots_in_use(pages, tokens)
    state = _Pages(
        rows=rows,
        order=order.reshape(-1, slots).clone(),
        sums=rows.sum(1),
        counts=used.sum(1, dtype=torch.float32),
        empty=None if tokens == count * slots else ~used,
    )
    for _ in range(SWEEPS):
        pairs, turns = _to_exchange(state, sets)
        yield
        start = 0
        for length in turns:
            _exchange(state, pairs[start : start + length])
            start += length
            yield
    return state.order.view(sets, -1)


def _to_exchange(state: _Pages, sets: int) -> tuple[Tensor, list[int]]:
    """Pairs of pages that have tokens to exchange, int64 [pairs, 2], and how many of them take each
    turn; no page is in two pairs of one turn."""
    count = len(state.rows) // sets
    slots, width = state.rows.shape[1:]
    means = (state.sums / state.counts[:, None]).round_().view(sets, count, width)
    nearness = torch.bmm(state.rows.view(sets, -1, width), means.transpose(1, 2))
    nearness = nearness.view(sets, count, slots, count)
    nearness -= nearness.diagonal(dim1=1, dim2=3).transpose(1, 2)[..., None].clone()
    if state.empty is not None:
        nearness.masked_fill_(state.empty.view(sets, count, slots, 1), -BEHIND)
    # How much nearer to page b than to its own a token of page a is, at most; both ways.
    gain = nearness.amax(2)
    gain = (gain + gain.transpose(1, 2)).triu(1)
    of_set, page, other = (gain > 0).nonzero(as_tuple=True)
    # Who gains most comes first.
    by_gain = gain[of_set, page, other].sort(descending=True, stable=True).indices
    pairs = torch.stack([of_set * count + page, of_set * count + other], 1)[by_gain]
    turns = _turns(pairs.tolist())
    by_turn = turns.sort(stable=True).indices
    return pairs[by_turn], torch.bincount(turns).tolist()


def _turns(pairs: list[list[int]]) -> Tensor:
    """int64 [pairs]: the first turn for each in which neither of its pages is taken by a pair that
    comes before."""
    free: dict[int, int] = defaultdict(int)
    turns = []
    for first, second in pairs:
        turn = max(free[first], free[second])
        turns.append(turn)
        free[first] = free[second] = turn + 1
    return torch.tensor(turns, dtype=torch.int64)


def _exchange(state: _Pages, pairs: Tensor) -> None:
    """Part the tokens of each pair anew between its two pages. No page is in two pairs."""
    count, slots, width = len(pairs), *state.rows.shape[1:]
    level = level_of(width)
    both = pairs.reshape(-1)
    rows = state.rows.index_select(0, both).view(count, 2 * slots, width)
    sums, counts = state.sums[pairs], state.counts[pairs][..., None]
    total = sums.sum(1)
    lower, upper = sums[:, 0], sums[:, 1]
    for step in range(PAIR_STEPS):
        direction = whole_directions(upper / counts[:, 1] - lower / counts[:, 0], level)
        along = projections(rows, direction)
        if state.empty is not None:
            # The slots of a last page that are empty stay behind its tokens.
            along.masked_fill_(state.empty[pairs].view(count, -1), BEHIND)
        order = along.sort(dim=1, stable=True).indices
        if step < PAIR_STEPS - 1:
            weights = torch.ones_like(along).scatter_(1, order[:, :slots], 0.0)
            upper = weighted_sums(weights, rows)
            lower = total - upper
    taken = (order + torch.arange(count)[:, None] * (2 * slots)).view(-1)
    rows = rows.view(-1, width).index_select(0, taken).view(-1, slots, width)
    state.rows.index_copy_(0, both, rows)
    state.sums.index_copy_(0, both, rows.sum(1))
    state.order[both] = state.order[both].view(-1).index_select(0, taken).view(-1, slots)
