"""The attention mass of every page of a layer, estimated for one query from digests.

Invariants of this file:
- Masses are natural logs outside and base 2 inside, like scores in paged_attention.
- No step allocates more than a few numbers for each page and query head; what is larger lies in the
  caller's Workspace.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.digests import LayerDigests
from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.rotation import rotated_width
from kvtier.kernels.selection import group_mass, page_shares
from kvtier.kernels.sketch import (
    BLOCK_CODES,
    BLOCK_PAGES,
    LN_2,
    LOG2_E,
    check_query,
    check_scale,
    fold,
    padded_group,
    sketch_query,
    sketched_masses,
)
from kvtier.kernels.workspace import Workspace

REFINED_ALL = 1024
"""Up to so many pages it costs no more to take all from sketches than to choose some."""
REFINED = 0.5
"""The share of more pages that is taken from sketches. On a model's own keys the output is as far
from exact attention as with all of them, while with 0.3 it is a fifth farther."""
MEANS_PAGES = 4096
"""Mean keys of all heads turned into floats at a time: 1 MiB at a width of 64."""


def refined_share(pages: int) -> float:
    """What `refined` of page_mass ought to be for a context of so many pages with sketches."""
    return 1.0 if pages <= REFINED_ALL else REFINED


def page_mass(
    query: Tensor,
    digests: LayerDigests,
    *,
    scale: float,
    workspace: Workspace,
    softcap: float | None = None,
    refined: float = 0.0,
) -> Tensor:
    """Natural log of the estimated attention mass of every page, [q_heads, pages].

    `query` [q_heads, Dk]. The mass of a page is the sum of exp(score) over its tokens. It is taken
    from the mean key and the count, which gives too little where keys differ; for the share
    `refined` of each head's pages (0 to 1, those with the most by their means) it is taken from
    the sketch, which is right on average. Where some pages are refined the others are shifted, for
    each query head by the mean difference in those that are, so that both mean the same. Raises
    ConfigError for arguments that do not fit.
    """
    check_query(query, digests.heads, digests.widths[0])
    check_scale(scale, softcap)
    if not 0.0 <= refined <= 1.0:
        raise ConfigError(f"refined is {refined}; it takes a share from 0 to 1")
    if refined and digests.sketch is None:
        raise ConfigError(f"refined is {refined}; it takes 0 where digests has no sketch")
    if digests.pages == 0:
        return torch.empty((query.shape[0], 0))
    with torch.no_grad():
        folded = fold(query, digests.heads, scale)
        source = _Source(folded, digests, _centred(folded, digests), softcap)
        if refined == 1.0:
            masses = _masses_by_sketches(source, None, workspace)
        else:
            masses = _masses_by_means(source, workspace)
            if refined:
                _refine(masses, max(1, round(refined * digests.pages)), source, workspace)
        return masses.view(query.shape[0], -1).mul_(LN_2)


@dataclass(frozen=True, slots=True)
class _Source:
    """What masses are taken from; `centred` [heads, group, pages]: base-2 scores of the centres."""

    folded: Tensor
    digests: LayerDigests
    centred: Tensor
    softcap: float | None


def _centred(folded: Tensor, digests: LayerDigests) -> Tensor:
    per_segment = folded @ digests.array("centres").transpose(1, 2)
    owners = digests.array("owners").expand(*per_segment.shape[:2], -1)
    # Along the last dimension gather takes an eighth of the time of index_select.
    return per_segment.gather(2, owners)


def _masses_by_means(source: _Source, workspace: Workspace) -> Tensor:
    """Base-2 log masses [heads, group, pages] of the mean keys."""
    digests, softcap = source.digests, source.softcap
    heads, group, width = source.folded.shape
    means, pages = digests.array("key_means"), digests.pages
    asked = torch.zeros((heads, padded_group(group), width))
    asked[:, :group] = source.folded
    masses = torch.empty((heads, asked.shape[1], pages))
    step = max(1, MEANS_PAGES // heads)
    for first in range(0, pages, step):
        last = min(pages, first + step)
        block = workspace.take("levels", (heads, last - first, width))
        block.copy_(means[:, first:last])
        torch.bmm(asked, block.transpose(1, 2), out=masses[:, :, first:last])
    factors = digests.array("key_factors").unsqueeze(1)
    masses = torch.addcmul(source.centred, masses[:, :group], factors)
    if softcap is not None:
        masses.div_(softcap * LOG2_E).tanh_().mul_(softcap * LOG2_E)
    if digests.short:
        return masses.add_(digests.array("counts").float().log2_())
    return masses.add_(math.log2(PAGE_TOKENS))


def _best(masses: Tensor, count: int) -> Tensor:
    """The `count` pages of each head with the most mass over its group, int64 [heads, count], in
    ascending order: so gathering walks memory forwards."""
    heads, group, pages = masses.shape
    mass = group_mass(page_shares(masses.view(heads * group, pages) * LN_2), group)
    # numpy takes a third of the time of topk and sort.
    best = np.argpartition(mass.numpy(), pages - count, 1)[:, pages - count :]
    best.sort(1)
    return torch.from_numpy(best)


def _masses_by_sketches(source: _Source, chosen: Tensor | None, workspace: Workspace) -> Tensor:
    """Base-2 log masses [heads, group, n] of the sketches of all pages, or of some, [heads, n]."""
    digests, centred = source.digests, source.centred
    assert digests.sketch is not None
    if chosen is not None:
        centred = centred.gather(2, chosen.unsqueeze(1).expand(-1, centred.shape[1], -1))
    heads, _, count = centred.shape
    masses = torch.empty_like(centred)
    of_page = PAGE_TOKENS * rotated_width(source.folded.shape[2])
    heads_step = max(1, BLOCK_CODES // (of_page * min(count, BLOCK_PAGES)))
    pages_step = max(1, BLOCK_CODES // (of_page * min(heads_step, heads)))
    ready = sketch_query(source.folded, digests.sketch)
    for first_head in range(0, heads, heads_step):
        of_heads = slice(first_head, first_head + heads_step)
        of_query = ready.of(of_heads)
        for first in range(0, count, pages_step):
            part = slice(first, min(first + pages_step, count))
            pages = part if chosen is None else chosen[of_heads, part]
            masses[of_heads, :, part] = sketched_masses(
                of_query,
                digests.sketched(of_heads, pages, workspace),
                centred[of_heads, :, part],
                source.softcap,
                workspace,
            )
    return masses


def _refine(masses: Tensor, count: int, source: _Source, workspace: Workspace) -> None:
    """Overwrite the masses [heads, group, pages] of the best pages by those of their sketches, and
    shift those of the others by what that has changed on average."""
    best = _best(masses, count)
    found = _masses_by_sketches(source, best, workspace)
    places = best.unsqueeze(1).expand_as(found)
    change = found.mean(2, keepdim=True) - masses.gather(2, places).mean(2, keepdim=True)
    masses.add_(change).scatter_(2, places, found)
