"""Exact attention over pages of the KV cache, and over a new chunk, in torch on the CPU.

A frame holds up to 16 tokens of one layer and one kv head: a row of 16*Dk + 16*Dv elements, K row
t at [t*Dk, (t+1)*Dk), V row t at 16*Dk + [t*Dv, (t+1)*Dv). A pool is a tensor [frames, row].

Invariants of this file:
- Every result is a Partial: normalised within its part, together with its natural log-sum-exp, so
  that parts over disjoint tokens can be merged in any order and any grouping.
- All arithmetic is float32, whatever the dtype of the pool.
- Query heads of one kv head are neighbours: query head h reads kv head h // (q_heads / kv_heads).
- A Partial never shares memory with a Workspace.
- No step allocates a large temporary; large arrays live in the caller's Workspace.
- One query takes as few calls of torch as can be: a call of any size takes 3 to 8 us between calls
  of other kinds, and all arithmetic over 500 tokens takes 60. So where every slot counts, which is
  what a decode mostly asks for, torch's fused kernel does all of a chunk in one call.
- Pages are gathered, also those that lie in runs: products over the pool itself were measured. They
  take one row of each page at a time and lose by it what gathering costs, as long as what is
  gathered stays in the processor's cache. So chunks are small, and where the kernel is not the
  fused one all scores come first, then all values, in one buffer.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.launch_checks import PAGE_TOKENS, check_dense, check_paged, require_in_pool
from kvtier.kernels.masks import Mask, chunk_mask, hidden_slots, split_valid
from kvtier.kernels.running import Partial, Running, join_queries, rule_of
from kvtier.kernels.workspace import Workspace

CHUNK_ELEMENTS = 1 << 18
"""Of keys, or of values, gathered at a time: 1 MiB, in which they stay in the processor's cache.
One page of every kv head always fits."""
SPAN_PAGES = 128
"""Pages of one kv head whose scores are held at a time at least (2,048 tokens)."""
SCORES_MAX = 1 << 21
"""Elements of the score buffer; they bound a block of queries (one query always fits)."""
DENSE_QUERIES = 64
"""Queries and keys of one block of dense_causal_attention; the fastest of those measured."""
DENSE_KEYS = 1024
DENSE_KEYS_ALL_HEADS = 16_384
"""So that many kv heads do not widen the buffers."""


def merge(parts: list[Partial]) -> Partial:
    """One Partial over the union of the tokens of `parts`, which must be disjoint.

    Raises ConfigError when there are no parts or their shapes differ.
    """
    if not parts:
        raise ConfigError("parts is empty; merge takes at least one Partial")
    for index, part in enumerate(parts):
        if part.out.shape != parts[0].out.shape or part.lse.shape != part.out.shape[:-1]:
            raise ConfigError(
                f"parts[{index}] has out {list(part.out.shape)} and lse {list(part.lse.shape)}; "
                f"it takes out {list(parts[0].out.shape)} like parts[0], and lse without the width"
            )
    if len(parts) == 1:
        return parts[0]
    with torch.no_grad():
        weights = torch.stack([part.lse for part in parts])
        peak = weights.amax(0)
        weights.sub_(peak.masked_fill(peak == -math.inf, 0.0)).exp_()
        total = weights.sum(0)
        weights.div_(total.masked_fill(total == 0.0, 1.0))
        out = parts[0].out * weights[0].unsqueeze(-1)
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            out.addcmul_(part.out, weight.unsqueeze(-1))
        return Partial(out, peak + total.log())


def paged_attention(
    query: Tensor,
    pool: Tensor,
    frames: Tensor,
    widths: tuple[int, int],
    valid: Tensor | int | None = None,
    *,
    scale: float,
    workspace: Workspace,
    softcap: float | None = None,
    visible: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Partial:
    """Exact attention of every query over the given pages.

    `query` [q_heads, n, Dk]; `pool` [frames, 16*(Dk+Dv)], contiguous, same dtype; `frames` int64
    [kv_heads, pages]; `widths` (Dk, Dv). `valid` bool [kv_heads, m, 16] marks the slots that count
    of the last m pages; those of pages before them all do (None: all of them). A number, 1 to 16,
    is for what grows, and costs nothing: so many slots of every head's last page count, the first
    ones. The bytes of other slots cannot influence the result. A kv head with fewer pages than
    another repeats any frame with all its slots invalid. `visible` bool [n, kv_heads or 1, pages,
    16] hides slots from single queries. A slot that some queries see and others do not must hold
    finite values, else 0 * inf reaches those that do not see it. `out_dtype`: of the result's
    `out`, for who does not merge it.
    Scores are query . key * scale, then softcap * tanh(score / softcap) when there is a softcap.
    Raises ConfigError for arguments that do not fit together.
    """
    check_paged(query, pool, frames, widths, valid, visible)
    rule = rule_of(scale, softcap)
    (q_heads, n, _), (kv_heads, pages) = query.shape, frames.shape
    group = q_heads // kv_heads
    least = max(1, min(pages, SPAN_PAGES))
    step = max(1, SCORES_MAX // (q_heads * max(least * PAGE_TOKENS, sum(widths))))
    marks, unused = split_valid(valid, kv_heads, visible)
    if marks is None and visible is None and softcap is None and widths[0] == widths[1] and pages:
        return _fused(
            query, _Part(pool, frames, slice(0, pages), unused), scale, out_dtype, workspace
        )
    blocks = []
    with torch.no_grad():
        for first in range(0, n, step):
            count = min(n - first, step)
            rows = workspace.rows((kv_heads, group, count, *widths))
            asked = query if count == n else query[:, first : first + count]
            running = Running(rows, asked, rule)
            seen = None if visible is None else visible[first : first + count]
            hides = _Hides(marks, seen, pages)
            span_pages = max(least, SCORES_MAX // (kv_heads * rows.many * PAGE_TOKENS))
            for start in range(0, pages, span_pages):
                part = slice(start, min(pages, start + span_pages))
                left_out = unused if part.stop == pages else 0
                _add_span(running, _Part(pool, frames, part, left_out), hides, workspace)
            blocks.append(running.result(out_dtype))
        return join_queries(blocks)


def dense_causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    workspace: Workspace,
    window: int | None = None,
    softcap: float | None = None,
) -> Partial:
    """Causal attention of a new chunk to itself.

    `query` [q_heads, n, Dk], `keys` [kv_heads, n, Dk], `values` [kv_heads, n, Dv], one dtype; only
    the last dimension must be contiguous. Query i sees the keys j <= i, and with a window only
    those with j > i - window. All values must be finite. Memory beyond the result does not grow
    with n. Raises ConfigError for arguments that do not fit together.
    """
    check_dense(query, keys, values, window)
    rule = rule_of(scale, softcap)
    (q_heads, n, width), kv_heads = query.shape, keys.shape[0]
    reach = n if window is None else window
    tokens = max(1, min(DENSE_KEYS, DENSE_KEYS_ALL_HEADS // kv_heads))
    step = max(1, min(DENSE_QUERIES, SCORES_MAX // (q_heads * tokens)))
    blocks = []
    with torch.no_grad():
        for first in range(0, n, step):
            count = min(n - first, step)
            last = first + count
            rows = workspace.rows((kv_heads, q_heads // kv_heads, count, width, values.shape[2]))
            running = Running(rows, query[:, first:last], rule)
            for start in range(max(0, first - reach + 1), last, tokens):
                stop = min(last, start + tokens)
                block_keys = _as_float32(keys[:, start:stop], "keys", workspace)
                scores = workspace.take("scores", (kv_heads, rows.many, stop - start))
                running.score(block_keys.transpose(1, 2), scores)
                by_query = scores[:, : rows.count].view(kv_heads, -1, count, stop - start)
                hides = _hide_edges(by_query, first, start, reach)
                running.weigh(scores.unsqueeze(0), hides)
                running.add(scores, _as_float32(values[:, start:stop], "values", workspace))
            blocks.append(running.result(torch.float32))
        return join_queries(blocks)


def _as_float32(block: Tensor, name: str, workspace: Workspace) -> Tensor:
    if block.dtype == torch.float32:
        return block
    return workspace.take(name, tuple(block.shape)).copy_(block)


def _hide_edges(scores: Tensor, first: int, start: int, reach: int) -> bool:
    """Hide the future and what the window has left behind, where a block of scores has any, and
    say whether it has.

    `scores` [kv_heads, group, queries from first, keys from start]. Only the columns that some
    query must not see are touched.
    """
    queries, tokens = scores.shape[2:]
    future = max(0, first + 1 - start)
    past = min(tokens, first + queries - reach - start)
    rows = torch.arange(first, first + queries).unsqueeze(1)
    columns = torch.arange(start, start + tokens)
    if future < tokens:
        scores[..., future:].masked_fill_(columns[future:] > rows, -math.inf)
    if past > 0:
        scores[..., :past].masked_fill_(columns[:past] <= rows - reach, -math.inf)
    return future < tokens or past > 0


class _Hides(NamedTuple):
    """What does not count: `marks` of slots in the last of all pages, and what a block of queries
    sees; both as in paged_attention."""

    marks: Tensor | None
    seen: Tensor | None
    pages: int


class _Part(NamedTuple):
    """Pages of a pool: those of frames int64 [kv_heads, pages] in a slice, without the last slots
    that are not used."""

    pool: Tensor
    frames: Tensor
    pages: slice
    unused: int


def _add_span(running: Running, part: _Part, hides: _Hides, workspace: Workspace) -> None:
    """Add pages to a running softmax: first all scores, then all values, chunk by chunk."""
    rows, frames = running.rows, part.frames
    kv_heads, first = frames.shape[0], part.pages.start
    chunk_pages = max(1, CHUNK_ELEMENTS // (kv_heads * PAGE_TOKENS * max(rows.widths)))
    span = workspace.span(rows, part.pages.stop - first, chunk_pages, part.unused)
    cut = PAGE_TOKENS * rows.widths[0]
    key_half, value_half = part.pool.split_with_sizes((cut, part.pool.shape[1] - cut), 1)
    masks: list[Mask | None] = []
    chunks: list[Tensor] = []
    try:
        for start, scores in zip(span.starts, span.by_chunk, strict=True):
            pages = slice(first + start, first + start + span.chunk_pages)
            of_chunk = frames if span.chunk_pages == frames.shape[1] else frames[:, pages]
            index = of_chunk.reshape(-1)
            _gather(key_half, index, span.gathered_keys, workspace)
            running.score(span.keys, scores)
            hidden = hidden_slots(hides.marks, pages, hides.pages)
            mask = chunk_mask(hidden, hides.seen, pages, kv_heads, workspace)
            if mask is not None:
                mask.hide_scores(scores[:, : rows.count])
            chunks.append(index)
            masks.append(mask)
        for scores in span.left_out:
            scores.fill_(-math.inf)
        running.weigh(span.scores, any(mask is not None for mask in masks))
        for index, mask, weights, values in zip(
            chunks, masks, span.weights, span.values, strict=True
        ):
            _gather(value_half, index, span.gathered_values, workspace)
            if mask is not None:
                mask.silence(span.of_head)
            running.add(weights, values)
    except (IndexError, RuntimeError):
        require_in_pool(frames, part.pool)
        raise


def _fused(
    query: Tensor, part: _Part, scale: float, out_dtype: torch.dtype, workspace: Workspace
) -> Partial:
    """Attention to pages of which all slots count, but the last few that are not used."""
    q_heads, n, width = query.shape
    step = max(1, SCORES_MAX // (q_heads * 2 * width))
    if n <= step and not torch.is_grad_enabled():
        return _attend_fused(query, part, scale, out_dtype, workspace)
    with torch.no_grad():
        blocks = [query[:, first : first + step] for first in range(0, n, step)]
        return join_queries(
            [_attend_fused(each, part, scale, out_dtype, workspace) for each in blocks]
        )


def _attend_fused(
    query: Tensor, part: _Part, scale: float, out_dtype: torch.dtype, workspace: Workspace
) -> Partial:
    """The same for a block of queries: of each chunk by one call, and the results merged."""
    (q_heads, n, width), kv_heads = query.shape, part.frames.shape[0]
    group, pages = q_heads // kv_heads, part.pages.stop
    chunk_pages = max(1, CHUNK_ELEMENTS // (kv_heads * PAGE_TOKENS * width))
    pieces = workspace.pieces((kv_heads, group, n, width), pages, chunk_pages, part.unused)
    rows = group * n
    if pieces.many == rows and query.dtype == torch.float32:
        asked = query.reshape(kv_heads, 1, rows, width)
    else:
        asked = pieces.query
        pieces.asked.copy_(query.view(kv_heads, group, n, width))
    cut = PAGE_TOKENS * width
    key_half, value_half = part.pool.split_with_sizes((cut, cut), 1)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    most = max(2, SCORES_MAX // (q_heads * n * width))
    try:
        for start, keys, values in zip(pieces.starts, pieces.keys, pieces.values, strict=True):
            of_chunk = part.frames
            if pieces.chunk_pages != pages:
                of_chunk = of_chunk[:, start : start + pieces.chunk_pages]
            index = of_chunk.reshape(-1)
            _gather(key_half, index, pieces.gathered_keys, workspace)
            _gather(value_half, index, pieces.gathered_values, workspace)
            # The function that has a public name returns no log-sum-exp.
            out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
                asked, keys, values, scale=scale
            )
            outs.append(out)
            lses.append(lse)
            if len(outs) == most:
                outs, lses = _merged(outs, lses)
    except (IndexError, RuntimeError):
        require_in_pool(part.frames, part.pool)
        raise
    if len(outs) > 1:
        outs, lses = _merged(outs, lses)
    out, lse = outs[0], lses[0]
    if pieces.many != rows:
        out, lse = out[:, :, :rows], lse[:, :, :rows]
    out = out.reshape(q_heads, n, width)
    if out_dtype != torch.float32:
        out = out.to(out_dtype)
    return Partial(out, lse.reshape(q_heads, n))


def _merged(outs: list[Tensor], lses: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """One result for those of chunks; each of their rows has seen something."""
    all_lses = torch.stack(lses)
    weights = all_lses.softmax(0).unsqueeze(-1).unbind()
    out = outs[0].mul_(weights[0])
    for each, weight in zip(outs[1:], weights[1:], strict=True):
        out.addcmul_(each, weight)
    return [out], [all_lses.logsumexp(0)]


def _gather(half: Tensor, index: Tensor, kept: Tensor, workspace: Workspace) -> None:
    """Copy the K or V half of the pool's given rows, as float32."""
    if half.dtype == torch.float32:
        torch.index_select(half, 0, index, out=kept)
    else:
        staged = workspace.take("staged", tuple(kept.shape), half.dtype)
        kept.copy_(torch.index_select(half, 0, index, out=staged))
