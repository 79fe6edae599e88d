"""Selection: which Pages a query reads within a budget, and what stands for those it does not read.

Invariants of this file:
- Masses are natural logs per query head; a choice is made per kv head, by the sum of the
  probabilities over its query heads.
- Equal pages are chosen in the order of their index, so a choice depends on its arguments alone.
- What is not read counts as its estimated mass at its mean value: a Partial like any other, which
  `merge` joins with exact attention over what was read.
"""

import math

import numpy as np
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.running import Partial
from kvtier.kernels.workspace import Workspace

FLOOR = -80.0
"""Pages count as at least e^-80 of the heaviest: exp is slow where its result is denormal."""


def group_mass(log_mass: Tensor, group: int) -> Tensor:
    """Probability mass of each page summed over the query heads of a kv head, [kv_heads, pages].

    `log_mass` [q_heads, pages], natural; `group` query heads share a kv head. Each query head's
    masses are divided by their sum first, so every head has the same say.
    """
    if log_mass.dim() != 2 or group < 1 or log_mass.shape[0] % group:
        raise ConfigError(
            f"group is {group}, log_mass has shape {list(log_mass.shape)}; they take "
            "[q_heads, pages] and a divisor of q_heads"
        )
    if log_mass.shape[1] == 0:
        return log_mass.new_empty((log_mass.shape[0] // group, 0))
    weights = log_mass - log_mass.amax(1, keepdim=True)
    weights.clamp_(min=FLOOR).exp_()
    weights.div_(weights.sum(1, keepdim=True))
    return weights.view(-1, group, log_mass.shape[1]).sum(1)


def top_pages(mass: Tensor, page_bytes: Tensor, budget_bytes: int, always: Tensor) -> Tensor:
    """The pages to read, bool [kv_heads, pages].

    `mass` [kv_heads, pages], not negative, as group_mass gives it; `page_bytes` int64 [pages] or
    [kv_heads, pages], at least 1; `budget_bytes` for each kv head; `always` bool [pages] or
    [kv_heads, pages]: sinks, recent tokens, and pages that a view cuts. Those come first, even if
    the budget is smaller; then pages by mass per byte, until one does not fit. Raises ConfigError
    for arguments that do not fit together.
    """
    _check_choice(mass, page_bytes, budget_bytes, always)
    with torch.no_grad():
        sizes = page_bytes.expand_as(mass)
        worth = mass / sizes
        worth.masked_fill_(always, math.inf)
        order = _descending(worth)
        ordered_sizes = sizes.gather(1, order)
        fits = ordered_sizes.cumsum(1) <= budget_bytes
        chosen = torch.zeros(mass.shape, dtype=torch.bool).scatter_(1, order, fits)
        return chosen.logical_or_(always)


def page_lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen pages of each kv head in ascending order, and how many they are.

    `chosen` bool [kv_heads, pages]. Returns int64 [kv_heads, most], where most is the greatest
    count of a head, and int64 [kv_heads]; heads with fewer are filled up with page 0.
    """
    if chosen.dim() != 2 or chosen.dtype != torch.bool:
        raise ConfigError(
            f"chosen is {chosen.dtype} {list(chosen.shape)}; it takes bool [kv_heads, pages]"
        )
    counts = chosen.sum(1)
    heads, pages = chosen.nonzero(as_tuple=True)
    place = torch.arange(len(pages)) - (counts.cumsum(0) - counts)[heads]
    lists = torch.zeros((chosen.shape[0], int(counts.max())), dtype=torch.int64)
    lists[heads, place] = pages
    return lists, counts


def unread_partial(
    log_mass: Tensor,
    value_means: Tensor,
    value_factors: Tensor | None,
    unread: Tensor,
    workspace: Workspace,
) -> Partial:
    """Attention over the pages not read, each as one token with its mass and its mean value.

    `log_mass` [q_heads, pages], natural; `value_means` [kv_heads, pages, Dv] of any dtype, times
    `value_factors` [kv_heads, pages] unless None; `unread` bool [kv_heads, pages]. The Partial has
    one query: out [q_heads, 1, Dv], lse [q_heads, 1]; with nothing unread 0 and -inf. Raises
    ConfigError for arguments that do not fit together.
    """
    _check_unread(log_mass, value_means, value_factors, unread)
    heads, pages, value_width = value_means.shape
    q_heads = log_mass.shape[0]
    with torch.no_grad():
        shown = unread.unsqueeze(1)
        if pages == 0:
            return Partial(
                torch.zeros((q_heads, 1, value_width)), torch.full((q_heads, 1), -math.inf)
            )
        masses = log_mass.float().view(heads, -1, pages).masked_fill(~shown, -math.inf)
        peak = masses.amax(2, keepdim=True)
        base = peak.masked_fill(peak == -math.inf, 0.0)
        weights = masses.sub_(base).clamp_(min=FLOOR).exp_().mul_(shown)
        total = weights.sum(2, keepdim=True)
        if value_factors is not None:
            weights.mul_(value_factors.unsqueeze(1))
        values = workspace.take("levels", tuple(value_means.shape)).copy_(value_means)
        out = torch.bmm(weights, values)
        out.div_(total.masked_fill(total == 0.0, 1.0))
        return Partial(out.view(q_heads, 1, value_width), (total.log_() + base).view(q_heads, 1))


def _descending(worth: Tensor) -> Tensor:
    """Indices that sort worth [rows, n], not negative, from the greatest on, ties by index.

    Floats that are not negative sort as their bits do. With the index below them all keys differ,
    and numpy sorts such keys in a seventh of the time that torch takes for a stable sort.
    """
    bits = worth.float().contiguous().view(torch.int32)
    keys = (bits.to(torch.int64) << 32) + torch.arange(worth.shape[1] - 1, -1, -1)
    ascending = torch.from_numpy(np.sort(keys.numpy(), axis=1))
    return (worth.shape[1] - 1) - (ascending.flip(1) & 0xFFFFFFFF)


def _check_choice(mass: Tensor, page_bytes: Tensor, budget_bytes: int, always: Tensor) -> None:
    if mass.dim() != 2 or mass.shape[0] < 1 or not mass.is_floating_point():
        raise ConfigError(
            f"mass is {mass.dtype} {list(mass.shape)}; it takes floats [kv_heads, pages]"
        )
    shapes = (mass.shape, mass.shape[1:])
    if page_bytes.dtype != torch.int64 or page_bytes.shape not in shapes:
        raise ConfigError(
            f"page_bytes is {page_bytes.dtype} {list(page_bytes.shape)}; it takes int64 [pages] or "
            f"[kv_heads, pages] like mass, {list(mass.shape)}"
        )
    if page_bytes.numel() and int(page_bytes.min()) < 1:
        raise ConfigError(f"page_bytes holds {int(page_bytes.min())}; it takes at least 1")
    if budget_bytes < 0:
        raise ConfigError(f"budget_bytes is {budget_bytes}; it takes at least 0")
    if always.dtype != torch.bool or always.shape not in shapes:
        raise ConfigError(
            f"always is {always.dtype} {list(always.shape)}; it takes bool [pages] or "
            f"[kv_heads, pages] like mass, {list(mass.shape)}"
        )


def _check_unread(
    log_mass: Tensor, value_means: Tensor, value_factors: Tensor | None, unread: Tensor
) -> None:
    if unread.dim() != 2 or unread.shape[0] < 1 or unread.dtype != torch.bool:
        raise ConfigError(
            f"unread is {unread.dtype} {list(unread.shape)}; it takes bool [kv_heads, pages]"
        )
    heads, pages = unread.shape
    if log_mass.dim() != 2 or log_mass.shape[1] != pages or log_mass.shape[0] % heads:
        raise ConfigError(
            f"log_mass has shape {list(log_mass.shape)}; it takes [q_heads, {pages}] with a "
            f"multiple of {heads} heads"
        )
    if value_means.dim() != 3 or value_means.shape[:2] != unread.shape:
        raise ConfigError(
            f"value_means has shape {list(value_means.shape)}; it takes [{heads}, {pages}, Dv]"
        )
    if value_factors is not None and value_factors.shape != unread.shape:
        raise ConfigError(
            f"value_factors has shape {list(value_factors.shape)}; it takes [{heads}, {pages}]"
        )
