"""Selection: which Pages a query reads within a budget, and what stands for those it does not read.

Invariants of this file:
- Masses are natural logs per query head, shares are probabilities; a choice is made per kv head, by
  the sum of the shares over its query heads.
- Equal pages are chosen in the order of their index, so a choice depends on its arguments alone.
- What is not read counts as its estimated mass at its mean value: a Partial like any other, which
  `merge` joins with exact attention over what was read.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.running import Partial
from kvtier.kernels.workspace import Workspace

VALUES_AT_ONCE = 1 << 18
"""Elements of mean values turned into floats at a time: 1 MiB."""
FLOOR = -80.0
"""Pages count as at least e^-80 of the heaviest: exp is slow where its result is denormal."""
_INFINITE = np.float32(np.inf).view(np.int32)
_NONE = np.int64(np.iinfo(np.int64).max)


class PageShares(NamedTuple):
    """What each page has of a query head's attention: `weights` float32 [q_heads, pages] add up to
    1, `lse` [q_heads] is the natural log of the mass of all."""

    weights: Tensor
    lse: Tensor


def page_shares(log_mass: Tensor) -> PageShares:
    """Of natural log masses [q_heads, pages]. Raises ConfigError for other shapes."""
    if log_mass.dim() != 2:
        raise ConfigError(f"log_mass has shape {list(log_mass.shape)}; it takes [q_heads, pages]")
    if log_mass.shape[1] == 0:
        return PageShares(log_mass, log_mass.new_full((log_mass.shape[0],), -math.inf))
    with torch.no_grad():
        peak = log_mass.amax(1, keepdim=True)
        weights = torch.sub(log_mass, peak).clamp_(min=FLOOR).exp_()
        total = weights.sum(1, keepdim=True)
        weights.div_(total)
        return PageShares(weights, total.log_().add_(peak).view(-1))


def group_mass(shares: PageShares, group: int) -> Tensor:
    """Probability mass of each page summed over the query heads of a kv head, [kv_heads, pages].

    `group` query heads share a kv head, and have the same say. Raises ConfigError.
    """
    q_heads, pages = shares.weights.shape
    if group < 1 or q_heads % group:
        raise ConfigError(f"group is {group}; it takes a divisor of the {q_heads} query heads")
    return shares.weights.view(q_heads // group, group, pages).sum(1)


def top_pages(mass: Tensor, page_bytes: Tensor, budget_bytes: int, always: Tensor) -> Tensor:
    """The pages to read, bool [kv_heads, pages].

    `mass` [kv_heads, pages], not negative, as group_mass gives it; `page_bytes` int64 [pages] or
    [kv_heads, pages], at least 1; `budget_bytes` for each kv head; `always` bool [pages] or
    [kv_heads, pages]: sinks, recent tokens, and pages that a view cuts. Those come first, even if
    the budget is smaller; then pages by mass per byte, until one does not fit. Raises ConfigError
    for arguments that do not fit together.
    """
    _check_choice(mass, page_bytes, budget_bytes, always)
    sizes, wanted = page_bytes.numpy(), always.numpy()
    heads, pages = mass.shape
    if not pages:
        return torch.zeros((heads, 0), dtype=torch.bool)
    size = int(sizes.flat[0])
    keys = _ranked(mass.detach().numpy() / sizes, wanted)
    if (sizes == size).all():
        count = min(budget_bytes // size, pages)
        least = np.partition(keys, pages - count, 1)[:, pages - count] if count else _NONE
        chosen = keys >= np.reshape(least, (-1, 1))
    else:
        # Where sizes differ it takes their sums in the order of worth.
        order = keys.argsort(1)[:, ::-1]
        ordered = np.take_along_axis(np.broadcast_to(sizes, mass.shape), order, 1)
        chosen = np.empty((heads, pages), np.bool_)
        np.put_along_axis(chosen, order, ordered.cumsum(1) <= budget_bytes, 1)
    return torch.from_numpy(chosen | wanted)


def page_lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen pages of each kv head in ascending order, and how many they are.

    `chosen` bool [kv_heads, pages]. Returns int64 [kv_heads, most], where most is the greatest
    count of a head, and int64 [kv_heads]; heads with fewer are filled up with page 0.
    """
    if chosen.dim() != 2 or chosen.dtype != torch.bool:
        raise ConfigError(
            f"chosen is {chosen.dtype} {list(chosen.shape)}; it takes bool [kv_heads, pages]"
        )
    heads, pages = chosen.numpy().nonzero()
    counts = np.bincount(heads, minlength=chosen.shape[0])
    most = int(counts.max())
    if (counts == most).all():
        by_head = pages.reshape(chosen.shape[0], most)
        return torch.from_numpy(by_head), torch.from_numpy(counts)
    lists = np.zeros((chosen.shape[0], most), np.int64)
    lists[np.arange(most) < counts[:, None]] = pages
    return torch.from_numpy(lists), torch.from_numpy(counts)


def unread_partial(
    shares: PageShares,
    value_means: Tensor,
    value_factors: Tensor | None,
    unread: Tensor,
    workspace: Workspace,
) -> Partial:
    """Attention over the pages not read, each as one token with its mass and its mean value.

    `shares` of each query head; `value_means` [kv_heads, pages, Dv] of any dtype, times
    `value_factors` [kv_heads, pages] unless None; `unread` bool [kv_heads, pages]. The Partial has
    one query: out [q_heads, 1, Dv], lse [q_heads, 1]; with nothing unread 0 and -inf. Raises
    ConfigError for arguments that do not fit together.
    """
    _check_unread(shares, value_means, value_factors, unread)
    heads, pages, width = value_means.shape
    q_heads = shares.weights.shape[0]
    with torch.no_grad():
        weights = shares.weights.view(heads, q_heads // heads, pages) * unread.unsqueeze(1)
        total = weights.sum(2, keepdim=True)
        if value_factors is not None:
            weights.mul_(value_factors.unsqueeze(1))
        out = weights.new_zeros((heads, q_heads // heads, width))
        step = max(1, VALUES_AT_ONCE // (heads * width))
        for first in range(0, pages, step):
            part = slice(first, min(first + step, pages))
            # A block that stays in the processor's cache until it is used.
            values = workspace.take("levels", (heads, part.stop - first, width))
            values.copy_(value_means[:, part])
            out.baddbmm_(weights[:, :, part], values)
        out.div_(total.masked_fill(total == 0.0, 1.0))
        lse = total.log_().view(q_heads, 1).add_(shares.lse.unsqueeze(1))
        return Partial(out.view(q_heads, 1, width), lse)


def _ranked(
    worth: npt.NDArray[np.floating[Any]], first: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Keys that rank worth [rows, n], not negative, the greatest last: what comes `first` behind
    all, and of equals the one with the smaller index. All keys of a row differ.

    Floats that are not negative rank as their bits do, with the index below them. Numpy sorts such
    keys in a seventh of the time that torch takes for a stable sort.
    """
    bits = worth.astype(np.float32).view(np.int32)
    keys = np.where(first, _INFINITE, bits).astype(np.int64)
    keys <<= 32
    keys += np.arange(worth.shape[1] - 1, -1, -1)
    return keys


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
    if page_bytes.numel() and int(page_bytes.numpy().min()) < 1:
        raise ConfigError(f"page_bytes holds {int(page_bytes.min())}; it takes at least 1")
    if budget_bytes < 0:
        raise ConfigError(f"budget_bytes is {budget_bytes}; it takes at least 0")
    if always.dtype != torch.bool or always.shape not in shapes:
        raise ConfigError(
            f"always is {always.dtype} {list(always.shape)}; it takes bool [pages] or "
            f"[kv_heads, pages] like mass, {list(mass.shape)}"
        )


def _check_unread(
    shares: PageShares, value_means: Tensor, value_factors: Tensor | None, unread: Tensor
) -> None:
    if unread.dim() != 2 or unread.shape[0] < 1 or unread.dtype != torch.bool:
        raise ConfigError(
            f"unread is {unread.dtype} {list(unread.shape)}; it takes bool [kv_heads, pages]"
        )
    heads, pages = unread.shape
    weights = shares.weights
    if weights.dim() != 2 or weights.shape[1] != pages or weights.shape[0] % heads:
        raise ConfigError(
            f"shares has weights of {list(weights.shape)}; it takes [q_heads, {pages}] with a "
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
