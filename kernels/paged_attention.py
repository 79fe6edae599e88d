"""Exact attention over pages of the KV cache, and over a new chunk, in torch on the CPU.

A frame holds up to 16 tokens of one layer and one kv head: a row of 16*Dk + 16*Dv elements, K row
t at [t*Dk, (t+1)*Dk), V row t at 16*Dk + [t*Dv, (t+1)*Dv). A pool is a tensor [frames, row].

Invariants of this file:
- Every result is a Partial: normalised within its part, together with its natural log-sum-exp, so
  that parts over disjoint tokens can be merged in any order and any grouping.
- All arithmetic is float32, whatever the dtype of the pool.
- Query heads of one kv head are neighbours: query head h reads kv head h // (q_heads / kv_heads).
- Inside, scores are in base 2 (natural scores / ln 2): torch's exp2 takes half the time of exp, and
  exp takes 2 to 30 times longer where its results are 0 or denormal, which masked scores are.
- A Partial never shares memory with a Workspace.
- No step allocates a large temporary; large arrays live in the caller's Workspace.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.launch_checks import PAGE_TOKENS, check_dense, check_paged, require_in_pool
from kvtier.kernels.masks import Mask, chunk_mask, hidden_slots

CHUNK_PAGES = 128
"""Pages of one kv head gathered at a time (2048 tokens)."""
CHUNK_PAGES_ALL_HEADS = 1024
"""Pages of all kv heads gathered at a time, so that many kv heads do not widen the buffers."""
SCORES_MAX = 1 << 21
"""Elements of the score buffer; they bound a block of queries (one query always fits)."""
DENSE_QUERIES = 64
"""Queries and keys of one block of dense_causal_attention; the fastest of those measured."""
DENSE_KEYS = 1024

_LOG2_E = math.log2(math.e)


class Workspace:
    """Buffers kept between calls; one per thread that calls, not thread-safe.

    Invariants: a buffer only grows, to the next power of two elements; its contents mean nothing
    between calls. With P = min(128 * kv_heads, 1024) pages (kv_heads up to 1024) it holds, before
    rounding up, at most 16 * P * (Dk + Dv) * 4 bytes of keys and values, for a 16-bit pool half
    of the larger of the two again, 8 MiB of scores, 2 MiB of masks, and 8 MiB of queries and
    results.
    """

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all kept buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The kept buffers, flat; for tests and statistics."""
        return tuple(self._buffers.values())

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous view of the named buffer with this shape; its contents are undefined."""
        count = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < count:
            # A buffer made under inference_mode could not be written outside of it afterwards.
            with torch.inference_mode(False):
                buffer = torch.empty(1 << max(count - 1, 0).bit_length(), dtype=dtype)
            self._buffers[(name, dtype)] = buffer
        return buffer[:count].view(shape)


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a part of the context.

    `out`: float32 [q_heads, n, Dv], normalised within the part; 0 where nothing was visible.
    `lse`: float32 [q_heads, n], natural log-sum-exp of the scores; -inf where nothing was visible.
    """

    out: Tensor
    lse: Tensor


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
    valid: Tensor | None = None,
    *,
    scale: float,
    workspace: Workspace,
    softcap: float | None = None,
    visible: Tensor | None = None,
) -> Partial:
    """Exact attention of every query over the given pages.

    `query` [q_heads, n, Dk]; `pool` [frames, 16*(Dk+Dv)], contiguous, same dtype; `frames` int64
    [kv_heads, pages]; `widths` (Dk, Dv). `valid` bool [kv_heads, m, 16] marks the slots that count
    of the last m pages; those of pages before them all do (None: all of them). The bytes of other
    slots cannot influence the result. A kv head with fewer pages than another repeats any frame
    with all its slots invalid. `visible` bool [n, kv_heads or 1, pages, 16] hides slots from single
    queries. A slot that some queries see and others do not must hold finite values, else 0 * inf
    reaches those that do not see it.
    Scores are query . key * scale, then softcap * tanh(score / softcap) when there is a softcap.
    Raises ConfigError for arguments that do not fit together.
    """
    check_paged(query, pool, frames, widths, valid, visible)
    rule = _Rule.of(scale, softcap)
    (q_heads, n, _), (kv_heads, pages) = query.shape, frames.shape
    chunk_pages = max(1, min(pages, CHUNK_PAGES, CHUNK_PAGES_ALL_HEADS // kv_heads))
    step = max(1, SCORES_MAX // (q_heads * max(chunk_pages * PAGE_TOKENS, sum(widths))))
    with torch.no_grad():
        result, outs, lses = _empty_partial(query, kv_heads, widths[1])
        for first in range(0, n, step):
            last = min(n, first + step)
            folded = _fold(query, kv_heads, first, last, rule, workspace)
            running = _Running(workspace, folded, widths[1])
            seen = None if visible is None else visible[first:last]
            for start in range(0, pages, chunk_pages):
                part = slice(start, min(pages, start + chunk_pages))
                hidden = hidden_slots(valid, part, pages)
                mask = chunk_mask(hidden, seen, part, kv_heads, workspace)
                if mask is not None and mask.hidden.numel() == mask.slots:
                    continue
                _add_chunk(running, _Chunk(pool, frames[:, part], widths), mask, rule)
            running.finish(outs[:, :, first:last], lses[:, :, first:last])
    return result


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
    rule = _Rule.of(scale, softcap)
    (_, n, _), kv_heads = query.shape, keys.shape[0]
    reach = n if window is None else window
    tokens = max(1, min(DENSE_KEYS, CHUNK_PAGES_ALL_HEADS * PAGE_TOKENS // kv_heads))
    step = max(1, min(DENSE_QUERIES, SCORES_MAX // (query.shape[0] * tokens)))
    with torch.no_grad():
        result, outs, lses = _empty_partial(query, kv_heads, values.shape[2])
        for first in range(0, n, step):
            last = min(n, first + step)
            folded = _fold(query, kv_heads, first, last, rule, workspace)
            running = _Running(workspace, folded, values.shape[2])
            for start in range(max(0, first - reach + 1), last, tokens):
                stop = min(last, start + tokens)
                block_keys = _as_float32(keys[:, start:stop], "keys", workspace)
                scores = running.scores(block_keys, rule)
                _hide_edges(
                    scores.view(kv_heads, -1, last - first, stop - start), first, start, reach
                )
                running.add(scores, _as_float32(values[:, start:stop], "values", workspace))
            running.finish(outs[:, :, first:last], lses[:, :, first:last])
    return result


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a dot product becomes a base-2 score: the query's factor, and the softcap behind it."""

    factor: float
    softcap: float | None

    @classmethod
    def of(cls, scale: float, softcap: float | None) -> "_Rule":
        if not math.isfinite(scale):
            raise ConfigError(f"scale is {scale}; it takes a finite number")
        if softcap is None:
            return cls(scale * _LOG2_E, None)
        if not (math.isfinite(softcap) and softcap > 0):
            raise ConfigError(f"softcap is {softcap}; it takes a finite number above 0, or None")
        return cls(scale / softcap, softcap * _LOG2_E)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Pages that are gathered together: frames int64 [kv_heads, pages of this chunk]."""

    pool: Tensor
    frames: Tensor
    widths: tuple[int, int]


class _Running:
    """Softmax over a row of scores that arrives in pieces: running peak, sum and weighted values.

    Invariant: after each `add`, out / total is the attention over everything added so far and
    peak + log2(total) its base-2 log-sum-exp; a row with nothing visible has peak -inf, total 0
    and out 0.
    """

    __slots__ = ("out", "peak", "query", "started", "total", "workspace")

    def __init__(self, workspace: Workspace, query: Tensor, value_width: int) -> None:
        heads, rows, _ = query.shape
        self.workspace = workspace
        self.query = query
        self.out = workspace.take("out", (heads, rows, value_width))
        self.peak = torch.full((heads, rows, 1), -math.inf)
        self.total = torch.zeros((heads, rows, 1))
        self.started = False

    def scores(self, keys: Tensor, rule: _Rule) -> Tensor:
        """Base-2 scores [kv_heads, rows, tokens] of keys [kv_heads, tokens, Dk]; a kept buffer."""
        scores = self.workspace.take("scores", (*self.query.shape[:2], keys.shape[1]))
        torch.bmm(self.query, keys.transpose(1, 2), out=scores)
        if rule.softcap is not None:
            scores.tanh_().mul_(rule.softcap)
        return scores

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add values [kv_heads, tokens, Dv] under `scores`, which are overwritten."""
        peak = torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        # A row that has seen nothing keeps peak -inf; -inf - -inf would be NaN.
        base = peak.masked_fill(peak == -math.inf, 0.0)
        scores.sub_(base).exp2_()
        shrink = (self.peak - base).exp2_()
        self.total.mul_(shrink).add_(scores.sum(-1, keepdim=True))
        if self.started:
            self.out.mul_(shrink).baddbmm_(scores, values)
        else:
            # The kept buffer may hold NaN, so the first product must not read it.
            torch.bmm(scores, values, out=self.out)
        self.peak = peak
        self.started = True

    def finish(self, out: Tensor, lse: Tensor) -> None:
        """Write the normalised result to out [kv_heads, group, n, Dv], lse [kv_heads, group, n]."""
        if not self.started:
            return
        self.out.div_(self.total.masked_fill(self.total == 0.0, 1.0))
        out.copy_(self.out.view(out.shape))
        lse.copy_(self.total.log2_().add_(self.peak).mul_(math.log(2)).view(lse.shape))


def _empty_partial(
    query: Tensor, kv_heads: int, value_width: int
) -> tuple[Partial, Tensor, Tensor]:
    """A Partial over nothing, and its out and lse seen as [kv_heads, group, n, ...]."""
    q_heads, n, _ = query.shape
    out = torch.zeros((q_heads, n, value_width))
    lse = torch.full((q_heads, n), -math.inf)
    group = q_heads // kv_heads
    return (
        Partial(out, lse),
        out.view(kv_heads, group, n, value_width),
        lse.view(kv_heads, group, n),
    )


def _fold(
    query: Tensor, kv_heads: int, first: int, last: int, rule: _Rule, workspace: Workspace
) -> Tensor:
    """Queries [first, last) scaled, as float32 [kv_heads, group * (last - first), Dk].

    The query group is folded into the query length, so that one product per kv head serves it.
    """
    q_heads, _, width = query.shape
    folded = workspace.take("query", (kv_heads, q_heads // kv_heads * (last - first), width))
    # Copied before it is scaled: a product in 16 bits would be rounded to 16 bits.
    folded.view(q_heads, last - first, width).copy_(query[:, first:last])
    return folded.mul_(rule.factor)


def _as_float32(block: Tensor, name: str, workspace: Workspace) -> Tensor:
    if block.dtype == torch.float32:
        return block
    return workspace.take(name, tuple(block.shape)).copy_(block)


def _hide_edges(scores: Tensor, first: int, start: int, reach: int) -> None:
    """Hide the future and what the window has left behind, where a block of scores has any.

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


def _add_chunk(running: _Running, chunk: _Chunk, mask: Mask | None, rule: _Rule) -> None:
    """Gather the pages of a chunk and add them to a running softmax."""
    key_width, value_width = chunk.widths
    kv_heads = chunk.frames.shape[0]
    cut = PAGE_TOKENS * key_width
    rows = chunk.frames.reshape(-1)
    try:
        keys = _gather(chunk.pool[:, :cut], rows, "keys", running.workspace)
        values = _gather(chunk.pool[:, cut:], rows, "values", running.workspace)
    except (IndexError, RuntimeError):
        require_in_pool(chunk.frames, chunk.pool)
        raise
    scores = running.scores(keys.view(kv_heads, -1, key_width), rule)
    if mask is not None:
        # A weight of 0 does not silence a value of NaN or Inf, so hidden values become 0. Only
        # the hidden rows are touched, and whole pages cost nothing.
        values.view(-1, value_width).index_fill_(0, mask.hidden, 0.0)
        # A mask with one row of queries is the same for all of them, and for the whole group.
        queries, tokens = mask.scores.shape[2:]
        scores.view(kv_heads, -1, queries, tokens).masked_fill_(mask.scores, -math.inf)
    running.add(scores, values.view(kv_heads, -1, value_width))


def _gather(half: Tensor, rows: Tensor, name: str, workspace: Workspace) -> Tensor:
    """The K or V half of the pool's given rows, as float32 [rows, 16 * width] in a kept buffer."""
    shape = (rows.numel(), half.shape[1])
    kept = workspace.take(name, shape)
    if half.dtype == torch.float32:
        return torch.index_select(half, 0, rows, out=kept)
    staged = workspace.take("staged", shape, half.dtype)
    return kept.copy_(torch.index_select(half, 0, rows, out=staged))
