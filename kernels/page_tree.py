"""The order of pages: a tree of 2-means splits, rounded to whole pages, for many sets at once.

Pages are [sets, pages, page tokens, width]; only the last page of a set may hold fewer tokens than
its slots, and rows of the slots that hold none are 0. All numbers that are summed are whole and
small enough for float32 (see `level_of`), so sums are exact: neither the order of summation nor the
other sets of a batch, nor threads, can change a result.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

START_STEPS = 4
"""Power iterations that find the direction in which a node is longest."""
SPLIT_STEPS = 3
"""Lloyd iterations of each split. Two more of each gain 0.3% after the exchange, for a third more
time."""

_EXACT = 1 << 24
"""Up to here float32 has all whole numbers."""
BEHIND = float(1 << 25)
"""The projection of a slot that holds no token: behind all others."""
_NODE_SHIFT = 27
"""Bits that a projection takes, and where a node's number begins, in what is sorted by both."""


def level_of(width: int) -> int:
    """Rows and directions are whole numbers from -level to level: then a sum over the width of
    products of two of them is exact in float32. At most 255, so that they are also in bfloat16,
    which torch may be set to multiply in."""
    return min(255, math.isqrt(_EXACT // width))


def whole_directions(vectors: Tensor, level: int) -> Tensor:
    """float [n, width] -> whole numbers from -level to level that point the same way."""
    largest = vectors.abs().amax(-1, keepdim=True).clamp_(min=1e-30)
    return (vectors * (level / largest)).round_()


def projections(rows: Tensor, directions: Tensor) -> Tensor:
    """rows [n, m, width], directions [n, width] -> [n, m]."""
    # This way round it takes a third of the time of rows times columns.
    return torch.bmm(directions[:, None], rows.transpose(1, 2))[:, 0]


def weighted_sums(weights: Tensor, rows: Tensor) -> Tensor:
    """weights [n, m], rows [n, m, width] -> [n, width]."""
    return torch.bmm(weights[:, None], rows)[:, 0]


def slots_in_use(pages: Tensor, tokens: int) -> Tensor:
    """bool [sets * pages, page tokens]."""
    sets, count, slots, _ = pages.shape
    return (torch.arange(count * slots) < tokens).view(count, slots).repeat(sets, 1)


@dataclass(slots=True)
class _Tree:
    """A tree that grows: which token lies in which slot, and which pages form a node."""

    order: Tensor
    """int64 [sets, slots]: which row of its set lies in each."""
    rows: Tensor
    """[sets * pages, page tokens, width], in this order."""
    first: Tensor
    """int64 [sets * pages]: the first page, in its set, of the node that a page belongs to."""
    size: Tensor
    """int64 [sets * pages]: how many pages that node has."""
    direction: Tensor
    """[sets * pages, width]: along which its parent was split."""


@dataclass(slots=True)
class _Nodes:
    """The nodes of one level that have several pages: their pages as rows of one array."""

    pages: Tensor
    """int64 [n]: which pages, of all sets, these are."""
    node: Tensor
    """int64 [n]: the node of each, ascending."""
    rows: Tensor
    """[n, page tokens, width]."""
    used: Tensor | None
    """float [n, page tokens]: 1 where a slot holds a token; None: all do."""
    heads: Tensor
    """int64 [nodes]: where in `pages` each node begins."""
    counts: Tensor = field(init=False)
    """float64 [nodes]: tokens of each."""
    totals: Tensor = field(init=False)
    """float64 [nodes, width]: the sum of its rows."""

    def summed(self, values: Tensor) -> Tensor:
        """[n, ...] -> [nodes, ...]: sums over each node's pages."""
        return values.new_zeros(len(self.heads), *values.shape[1:]).index_add_(0, self.node, values)

    def spread(self, values: Tensor) -> Tensor:
        """[nodes, ...] -> [n, ...]: to each of a node's pages."""
        return values.index_select(0, self.node)

    def masked(self, values: Tensor) -> Tensor:
        """values [n, page tokens], 0 where no token is."""
        return values if self.used is None else values * self.used


def tree_order(pages: Tensor, tokens: int) -> Generator[None, None, tuple[Tensor, Tensor]]:
    """Bring tokens with similar rows into the same page, and similar pages beside each other.

    pages: whole numbers in float32, up to level_of(width) in size. tokens: of each set. In steps;
    its value is order int64 [sets, pages * page tokens], which row lies in each slot, and the
    pages so ordered.
    """
    sets, count, slots, width = pages.shape
    level = level_of(width)
    flat = pages.reshape(-1, width)
    used = None if tokens == count * slots else slots_in_use(pages, tokens).to(torch.float32)
    set_starts = torch.arange(sets)[:, None] * (count * slots)
    tree = _Tree(
        order=torch.arange(count * slots).repeat(sets, 1),
        rows=pages.reshape(-1, slots, width),
        first=torch.zeros(sets * count, dtype=torch.int64),
        size=torch.full((sets * count,), count),
        direction=torch.zeros(sets * count, width),
    )
    while bool((tree.size > 1).any()):
        nodes = _splittable(tree, count, used)
        direction = _longest(nodes, level)
        yield
        direction, projected, lower = _two_means(nodes, direction, level)
        # Neighbours across the border of two nodes are alike if all splits run the same way.
        turned = (direction * tree.direction[nodes.pages[nodes.heads]]).sum(1) < 0
        yield
        sign = torch.where(turned, -1.0, 1.0)
        direction *= sign[:, None]
        projected *= nodes.spread(sign)[:, None]
        lower = torch.where(turned, nodes.counts - lower, lower)
        if nodes.used is not None:
            projected.masked_fill_(nodes.used == 0, BEHIND)
        # Nodes are runs of pages, so one sort of a whole set sorts within each of them.
        keys = (tree.first << _NODE_SHIFT)[:, None].repeat(1, slots)
        keys.index_add_(0, nodes.pages, projected.to(torch.int64))
        moved = keys.view(sets, -1).sort(dim=1, stable=True).indices
        tree.order = tree.order.gather(1, moved)
        tree.rows = flat.index_select(0, (tree.order + set_starts).view(-1)).view_as(tree.rows)
        _cut(tree, nodes, direction, lower, count)
        yield
    return tree.order, tree.rows.view_as(pages)


def _splittable(tree: _Tree, count: int, used: Tensor | None) -> _Nodes:
    """The nodes that have several pages. count: pages of a set."""
    pages = (tree.size > 1).nonzero()[:, 0]
    whole = len(pages) == len(tree.size)
    rows = tree.rows if whole else tree.rows.index_select(0, pages)
    first = pages - (pages % count) + tree.first[pages]
    heads = (pages == first).nonzero()[:, 0]
    node = (pages == first).cumsum(0) - 1
    nodes = _Nodes(pages, node, rows, None if used is None else used[pages], heads)
    tokens = torch.full((len(pages),), rows.shape[1], dtype=torch.float64)
    nodes.counts = nodes.summed(tokens if nodes.used is None else nodes.used.sum(1).double())
    nodes.totals = nodes.summed(rows.sum(1)).to(torch.float64)
    return nodes


def _longest(nodes: _Nodes, level: int) -> Tensor:
    """[nodes, width]: about the first principal component of each node, by power iterations."""
    count, width = nodes.totals.shape
    # Numbers without a pattern that keys could have; the same for all.
    start = (torch.arange(width) * 7919 % (2 * level + 1) - level).to(torch.float32)
    direction = start.expand(count, width)
    means = (nodes.totals / nodes.counts[:, None]).to(torch.float32)
    weight_max = (_EXACT / (level * nodes.counts)).floor_().to(torch.float32)
    for _ in range(START_STEPS):
        centre = (nodes.totals * direction).sum(1) / nodes.counts
        along = projections(nodes.rows, nodes.spread(direction))
        along = nodes.masked(along - nodes.spread(centre.to(torch.float32))[:, None])
        largest = along.new_zeros(count)
        largest.scatter_reduce_(0, nodes.node, along.abs().amax(1), "amax")
        # Whole again: a sum of weighted rows must be exact as well.
        weights = (along * nodes.spread(weight_max / largest.clamp_(min=1))[:, None]).round_()
        sums = nodes.summed(weighted_sums(weights, nodes.rows))
        sums -= means * nodes.summed(weights.sum(1))[:, None]
        direction = whole_directions(sums, level)
    return direction


def _two_means(nodes: _Nodes, direction: Tensor, level: int) -> tuple[Tensor, Tensor, Tensor]:
    """2-means of each node, begun at its mean along `direction`.

    Returns the direction from one mean to the other [nodes, width], the projections of all rows on
    it [n, page tokens], and how many of a node's lie on the lower side, float64 [nodes].
    """
    threshold = (nodes.totals * direction).sum(1) / nodes.counts
    for step in range(SPLIT_STEPS + 1):
        along = projections(nodes.rows, nodes.spread(direction))
        # A whole number is above a threshold if it is above the next whole number below.
        above = along > nodes.spread(threshold.floor_().to(torch.float32))[:, None]
        upper = nodes.masked(above.to(torch.float32))
        uppers = nodes.summed(upper.sum(1)).to(torch.float64)
        if step == SPLIT_STEPS:
            break
        sums = nodes.summed(weighted_sums(upper, nodes.rows)).to(torch.float64)
        lowers = nodes.counts - uppers
        upper_mean = sums / uppers.clamp(min=1)[:, None]
        lower_mean = (nodes.totals - sums) / lowers.clamp(min=1)[:, None]
        direction = whole_directions((upper_mean - lower_mean).to(torch.float32), level)
        threshold = (sums * direction).sum(1) / uppers.clamp(min=1)
        threshold += ((nodes.totals - sums) * direction).sum(1) / lowers.clamp(min=1)
        threshold /= 2
    return direction, along, nodes.counts - uppers


def _cut(tree: _Tree, nodes: _Nodes, direction: Tensor, lower: Tensor, count: int) -> None:
    """Make two nodes of each: where its two means are parted, rounded to whole pages."""
    slots = tree.rows.shape[1]
    size = tree.size[nodes.pages[nodes.heads]]
    cut = torch.minimum((lower / slots).round().to(torch.int64).clamp(min=1), size - 1)
    # Rows that are all the same have no two means. Halves keep the tree low.
    cut = torch.where((lower == 0) | (lower == nodes.counts), size // 2, cut)
    cuts = nodes.spread(cut)
    first, size = tree.first[nodes.pages], tree.size[nodes.pages]
    behind = nodes.pages % count >= first + cuts
    tree.first[nodes.pages] = torch.where(behind, first + cuts, first)
    tree.size[nodes.pages] = torch.where(behind, size - cuts, cuts)
    tree.direction.index_copy_(0, nodes.pages, nodes.spread(direction))
