"""The attention mass of every page of a layer, estimated for one query from digests.

Invariants of this file:
- Masses are natural logs outside and base 2 inside, like scores in paged_attention.
- No step allocates more than a few numbers for each page and query head; what is larger lies in the
  caller's Workspace.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.digests import LayerDigests
from kvtier.kernels.selection import group_mass
from kvtier.kernels.sketch import (
    BLOCK_PAGES,
    LN_2,
    LOG2_E,
    SketchQuery,
    check_query,
    check_scale,
    fold,
    sketch_query,
    sketched_masses,
)
from kvtier.kernels.workspace import Workspace

MEANS_PAGES = 4096
"""Mean keys of all heads turned into floats at a time: 1 MiB at a width of 64."""


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
    the sketch, which is right on average. Raises ConfigError for arguments that do not fit.
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
        per_segment = folded @ digests.array("centres").transpose(1, 2)
        owners = digests.array("owners").expand(*per_segment.shape[:2], -1)
        # Along the last dimension gather takes an eighth of the time of index_select.
        centred = per_segment.gather(2, owners)
        if digests.sketch is None or not refined:
            masses = _masses_by_means(folded, digests, centred, softcap, workspace)
        else:
            ready = sketch_query(query, digests.weights, digests.sketch, scale)
            source = _Source(ready, digests, centred, softcap)
            if refined == 1.0:
                masses = _masses_by_sketches(source, workspace)
            else:
                masses = _masses_by_means(folded, digests, centred, softcap, workspace)
                count = max(1, round(refined * digests.pages))
                _refine(masses, _best(masses, count), source, workspace)
        return masses.view(query.shape[0], -1).mul_(LN_2)


@dataclass(frozen=True, slots=True)
class _Source:
    """What masses are taken from by sketches."""

    ready: SketchQuery
    digests: LayerDigests
    centred: Tensor
    softcap: float | None


def _masses_by_means(
    folded: Tensor,
    digests: LayerDigests,
    centred: Tensor,
    softcap: float | None,
    workspace: Workspace,
) -> Tensor:
    """Base-2 log masses [heads, group, pages] of the mean keys."""
    heads, pages = digests.heads, digests.pages
    means, masses = digests.array("key_means"), torch.empty_like(centred)
    step = max(1, MEANS_PAGES // heads)
    for first in range(0, pages, step):
        last = min(pages, first + step)
        block = workspace.take("levels", (heads, last - first, digests.widths[0]))
        block.copy_(means[:, first:last])
        torch.bmm(folded, block.transpose(1, 2), out=masses[:, :, first:last])
    masses.mul_(digests.array("key_factors").unsqueeze(1)).add_(centred)
    if softcap is not None:
        masses.div_(softcap * LOG2_E).tanh_().mul_(softcap * LOG2_E)
    return masses.add_(digests.array("counts").float().log2_())


def _best(masses: Tensor, count: int) -> Tensor:
    """The `count` pages of each head with the most mass over its group, int64 [heads, count]."""
    heads, group, pages = masses.shape
    mass = group_mass(masses.reshape(heads * group, pages) * LN_2, group)
    # Ascending, so that gathering walks memory forwards.
    return mass.topk(count, dim=1, sorted=False).indices.sort(1).values


def _masses_by_sketches(source: _Source, workspace: Workspace) -> Tensor:
    """Base-2 log masses [heads, group, pages] of the sketches of all pages."""
    masses = torch.empty_like(source.centred)
    step = max(1, BLOCK_PAGES // masses.shape[0])
    for first in range(0, masses.shape[2], step):
        part = slice(first, min(first + step, masses.shape[2]))
        block, centred = source.digests.sketched(part, workspace), source.centred[:, :, part]
        masses[:, :, part] = sketched_masses(
            source.ready, block, centred, source.softcap, workspace
        )
    return masses


def _refine(masses: Tensor, chosen: Tensor, source: _Source, workspace: Workspace) -> None:
    """Overwrite the masses [heads, group, pages] of chosen pages by those of their sketches."""
    digests = source.digests
    heads, group = masses.shape[:2]
    step = max(1, BLOCK_PAGES // heads)
    for first in range(0, chosen.shape[1], step):
        pages = chosen[:, first : first + step]
        wide = pages.unsqueeze(1).expand(-1, group, -1)
        centred = source.centred.gather(2, wide)
        block = digests.sketched(pages, workspace)
        found = sketched_masses(source.ready, block, centred, source.softcap, workspace)
        masses.scatter_(2, wide, found)
