"""In which order tokens lie on the drive, so that those with similar keys are read together.

Invariants:
- The order of a set depends on its keys alone: not on the other sets of a call, nor on threads.
  Keys become whole numbers first, and all that is summed is exact (see `page_tree`).
- Only distances between keys count: moving, turning or scaling all keys of a set changes nothing
  but what is rounded.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.errors import ConfigError
from kvtier.kernels.page_exchange import exchanged
from kvtier.kernels.page_tree import level_of, tree_order

TOKENS_MAX = 4096
WIDTH_MAX = 16384
LLOYD_STEPS = 8

_ELEMENTS_AT_ONCE = 1 << 21
"""Of keys; about eight times their bytes in float32 are in use meanwhile."""
_CENTRE_TOKENS = 32
_OUTLYING, _OUTLIERS = 4, 16
"""A coordinate counts up to 4 times the largest one of all tokens but a 16th. What is farther out
is in a page of its like anyway; finer steps are of use to all the others."""


def balanced_order(keys: Tensor, page_tokens: int = 16) -> Tensor:
    """The order that fills pages with tokens of similar keys, and has similar pages side by side.

    keys: float [sets, tokens, width]; a set is what is read together: one layer and kv head of one
    Segment. Returns int64 [sets, tokens]: which token lies in each slot. Every page is full but the
    last. Raises ConfigError, before any work, also for keys that are not finite.
    """
    keys = _checked(keys)
    if page_tokens < 1:
        raise ConfigError(f"page_tokens is {page_tokens}; it takes at least 1")
    sets, tokens, width = keys.shape
    if tokens <= page_tokens or sets == 0:
        return torch.arange(tokens).repeat(sets, 1)
    count = -(-tokens // page_tokens)
    orders = []
    for some in _batches(keys):
        rows = functional.pad(_whole(some), (0, 0, 0, count * page_tokens - tokens))
        pages = rows.view(len(some), count, page_tokens, width)
        order, pages = tree_order(pages, tokens)
        orders.append(exchanged(pages, order, tokens)[:, :tokens])
    return torch.cat(orders)


def capped_clusters(keys: Tensor, mean: int = 16, cap: int = 32) -> tuple[Tensor, Tensor]:
    """Clusters of any size up to `cap`, `mean` tokens on average before larger ones are split: for
    devices whose blocks are so small that a cluster need not fill pages.

    keys: as for `balanced_order`. Returns order int64 [sets, tokens], which token lies in each
    slot, and sizes int64 [sets, clusters]: clusters lie one behind the other, and behind the last
    one's size there are zeros. Within a cluster tokens keep their order. Raises ConfigError.
    """
    keys = _checked(keys)
    if not 1 <= mean <= cap:
        raise ConfigError(f"mean is {mean} and cap {cap}; they take 1 <= mean <= cap")
    tokens = keys.shape[1]
    clusters = max(1, tokens // mean)
    places = clusters + tokens // cap
    orders, sizes = [], []
    for some in _batches(keys):
        owner = _split(_lloyd(_whole(some), clusters), clusters, cap)
        orders.append(owner.sort(dim=1, stable=True).indices)
        found = torch.zeros(len(some), places, dtype=torch.int64)
        found.scatter_add_(1, owner, torch.ones_like(owner))
        sizes.append(found.gather(1, (found == 0).to(torch.int8).sort(dim=1, stable=True).indices))
    return torch.cat(orders), torch.cat(sizes)


def shared_keys(keys: Tensor) -> Tensor:
    """One set for the heads of a group, so that one order serves all of them.

    keys: float [heads, tokens, width] of a layer. Returns float32 [1, tokens, heads * width]: each
    head centred and scaled to the same spread, so that none decides alone. Raises ConfigError.
    """
    keys = _checked(keys)
    heads, tokens, width = keys.shape
    wide = keys.to(torch.float64)
    wide = wide - wide.mean(1, keepdim=True)
    spread = wide.square().mean((1, 2), keepdim=True).sqrt_()
    # A head whose keys are all the same has nothing to say.
    wide = wide / torch.where(spread > 0, spread, 1.0)
    return wide.to(torch.float32).transpose(0, 1).reshape(1, tokens, heads * width)


def _checked(keys: Tensor) -> Tensor:
    """In float32. Raises ConfigError."""
    if keys.ndim != 3 or not keys.dtype.is_floating_point:
        raise ConfigError(
            f"keys is {list(keys.shape)} {keys.dtype}; it takes a float [sets, tokens, width]"
        )
    _, tokens, width = keys.shape
    if not (1 <= tokens <= TOKENS_MAX and 1 <= width <= WIDTH_MAX):
        raise ConfigError(
            f"keys has {tokens} tokens of width {width}; it takes 1 to {TOKENS_MAX} tokens of "
            f"width 1 to {WIDTH_MAX}"
        )
    keys = keys.to(torch.float32)
    if not bool(torch.isfinite(keys).all()):
        raise ConfigError("keys are not all finite in float32; they have no place among others")
    return keys


def _batches(keys: Tensor) -> tuple[Tensor, ...]:
    sets_at_once = max(1, _ELEMENTS_AT_ONCE // (keys.shape[1] * keys.shape[2]))
    return torch.split(keys, sets_at_once)


def _whole(keys: Tensor) -> Tensor:
    """Keys [sets, tokens, width] as whole numbers in float32 from -level to level, near 0.

    Each step looks at single numbers, or chooses one among many; none sums what is not whole.
    """
    sets, tokens, width = keys.shape
    level = level_of(width)
    # To a size about 1, by a power of two: nothing overflows, whatever the keys are.
    exponents = torch.frexp(keys.abs().amax((1, 2))).exponent.clamp_(-100, 100)
    small = keys * torch.ldexp(torch.ones(sets), -exponents)[:, None, None]
    # Middle values of some tokens: a token far out must not move the centre of the others.
    small -= small[:, :: -(-tokens // _CENTRE_TOKENS)].median(1, keepdim=True).values
    reach = small.abs().amax(2)
    usual = reach.kthvalue(tokens - tokens // _OUTLIERS, 1).values
    limit = torch.where(usual > 0, torch.minimum(reach.amax(1), _OUTLYING * usual), reach.amax(1))
    small *= (level / limit.clamp_(min=1e-30))[:, None, None]
    return small.round_().clamp_(-level, level)


def _lloyd(rows: Tensor, clusters: int) -> Tensor:
    """k-means of whole rows [sets, tokens, width]: int64 [sets, tokens], the cluster of each."""
    tokens = rows.shape[1]
    first = torch.arange(clusters) * (tokens - 1) // max(1, clusters - 1)
    means = rows[:, first]
    for step in range(LLOYD_STEPS):
        nearness = torch.bmm(rows, means.transpose(1, 2))
        owner = (nearness - means.square().sum(2)[:, None] / 2).argmax(2)
        if step == LLOYD_STEPS - 1:
            break
        one_hot = functional.one_hot(owner, clusters).to(torch.float32).transpose(1, 2)
        sizes = one_hot.sum(2)[..., None]
        moved = (torch.bmm(one_hot, rows) / sizes.clamp(min=1)).round_()
        means = torch.where(sizes > 0, moved, means)
    return owner


def _split(owner: Tensor, clusters: int, cap: int) -> Tensor:
    """Clusters above the cap cut into equal parts, in the order of tokens: int64 [sets, tokens]."""
    tokens = owner.shape[1]
    sizes = torch.zeros(len(owner), clusters, dtype=torch.int64)
    sizes.scatter_add_(1, owner, torch.ones_like(owner))
    parts = (sizes + cap - 1) // cap
    part_tokens = ((sizes + parts.clamp(min=1) - 1) // parts.clamp(min=1)).clamp_(min=1)
    order = owner.sort(dim=1, stable=True).indices
    in_order = owner.gather(1, order)
    place = torch.arange(tokens) - (sizes.cumsum(1) - sizes).gather(1, in_order)
    split = (parts.cumsum(1) - parts).gather(1, in_order)
    split += place // part_tokens.gather(1, in_order)
    return torch.empty_like(owner).scatter_(1, order, split)
