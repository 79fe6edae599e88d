"""What a chunk of Pages hides from a block of queries: slots that do not count, and those that some
queries do not see.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Mask:
    """What a chunk hides, in the last tokens of each kv head.

    `hidden`: bool [kv_heads, tokens], what no query of the block sees. `scores`: bool, True where a
    score is hidden, [kv_heads, 1, queries or 1, tokens], until the next mask is made.
    """

    hidden: Tensor
    scores: Tensor

    def hide_scores(self, scores: Tensor) -> None:
        """In scores [kv_heads, rows, tokens of the chunk]."""
        heads, _, count = scores.shape
        queries, tokens = self.scores.shape[2:]
        # A mask with one row of queries is the same for all of them, and for the whole group.
        by_query = scores.view(heads, -1, queries, count)
        by_query[..., count - tokens :].masked_fill_(self.scores, -math.inf)

    def silence(self, values: Tensor) -> None:
        """In values [kv_heads, tokens of the chunk, Dv]: a weight of 0 does not silence a value of
        NaN or Inf, so hidden values become 0. Only their rows are touched."""
        head, token = self.hidden.nonzero().unbind(1)
        before = values.shape[1] - self.hidden.shape[1]
        values.index_put_((head, token + before), values.new_zeros(()))


def split_valid(
    valid: Tensor | int | None, kv_heads: int, visible: Tensor | None
) -> tuple[Tensor | None, int]:
    """What `valid` of paged_attention says: marks of slots, and how many slots at the end of every
    kv head are never looked at. A mask of queries covers all slots, so then they are marked."""
    if not isinstance(valid, int):
        return valid, 0
    if visible is None:
        return None, PAGE_TOKENS - valid
    return (torch.arange(PAGE_TOKENS) < valid).expand(kv_heads, 1, PAGE_TOKENS), 0


def hidden_slots(valid: Tensor | None, pages: slice, count: int) -> Tensor | None:
    """Which of the last tokens of these pages, of `count` in all, do not count: [kv_heads, tokens];
    None: all of them do. `valid` is for the last pages alone."""
    if valid is None:
        return None
    first = count - valid.shape[1]
    if pages.stop <= first:
        return None
    return ~valid[:, max(0, pages.start - first) : pages.stop - first].flatten(1)


def chunk_mask(
    hidden: Tensor | None,
    seen: Tensor | None,
    pages: slice,
    kv_heads: int,
    workspace: Workspace,
) -> Mask | None:
    """What these pages hide from a block of queries, or None when all of it is visible."""
    if seen is None:
        return None if hidden is None else Mask(hidden, hidden[:, None, None])
    part = seen[:, :, pages].transpose(0, 1)
    shape = (kv_heads, part.shape[1], part.shape[2] * PAGE_TOKENS)
    unseen = workspace.take("mask", shape, torch.bool)
    unseen.view(kv_heads, *part.shape[1:]).copy_(part)
    unseen.logical_not_()
    if hidden is not None:
        unseen[..., shape[2] - hidden.shape[1] :].logical_or_(hidden.unsqueeze(1))
    return Mask(unseen.all(1), unseen.unsqueeze(1))
