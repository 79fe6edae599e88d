"""What a chunk of Pages hides from a block of queries: slots that do not count, and those that some
queries do not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtier.kernels.launch_checks import PAGE_TOKENS

if TYPE_CHECKING:
    from kvtier.kernels.paged_attention import Workspace


@dataclass(frozen=True, slots=True)
class Mask:
    """What a chunk hides.

    `hidden`: int64, token rows of [kv_heads * tokens] that no query of the block sees.
    `slots`: how many token rows the chunk has. `scores`: bool, True where a score is hidden,
    [kv_heads, 1, queries or 1, tokens].
    """

    hidden: Tensor
    slots: int
    scores: Tensor


def hidden_slots(valid: Tensor | None, pages: slice, count: int) -> Tensor | None:
    """Token rows [kv_heads, tokens] of these pages, of `count` in all, that do not count; None: all
    of them do. `valid` is for the last pages alone."""
    if valid is None:
        return None
    first = count - valid.shape[1]
    if pages.stop <= first:
        return None
    hidden = ~valid[:, max(0, pages.start - first) : pages.stop - first].flatten(1)
    before = max(0, first - pages.start) * PAGE_TOKENS
    return torch.nn.functional.pad(hidden, (before, 0)) if before else hidden


def chunk_mask(
    hidden: Tensor | None,
    seen: Tensor | None,
    pages: slice,
    kv_heads: int,
    workspace: Workspace,
) -> Mask | None:
    """What these pages hide from a block of queries, or None when all of it is visible."""
    if seen is not None:
        part = seen[:, :, pages].transpose(0, 1)
        shape = (kv_heads, part.shape[1], part.shape[2] * PAGE_TOKENS)
        unseen = workspace.take("mask", shape, torch.bool)
        unseen.view(kv_heads, *part.shape[1:]).copy_(part)
        unseen.logical_not_()
        if hidden is not None:
            unseen.logical_or_(hidden.unsqueeze(1))
        hidden, scores = unseen.all(1), unseen.unsqueeze(1)
    elif hidden is not None and bool(hidden.any()):
        scores = hidden[:, None, None]
    else:
        return None
    return Mask(hidden.reshape(-1).nonzero().squeeze(1), hidden.numel(), scores)
