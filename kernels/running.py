"""Softmax over scores that arrive in pieces, as exact attention needs it.

Scores are in base 2 (natural scores / ln 2): torch's exp2 takes half the time of exp, and exp takes
2 to 30 times longer where its results are 0 or denormal, which masked scores are.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.workspace import Rows

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a part of the context.

    `out`: [q_heads, n, Dv], normalised within the part; 0 where nothing was visible. float32,
    unless a part that is not to be merged was asked for in another dtype.
    `lse`: float32 [q_heads, n], natural log-sum-exp of the scores; -inf where nothing was visible.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """How a dot product becomes a base-2 score: the query's factor, and the softcap behind it."""

    factor: float
    softcap: float | None


@lru_cache
def rule_of(scale: float, softcap: float | None) -> Rule:
    """Raises ConfigError for numbers that no score can have."""
    if not math.isfinite(scale):
        raise ConfigError(f"scale is {scale}; it takes a finite number")
    if softcap is None:
        return Rule(scale * _LOG2_E, None)
    if not (math.isfinite(softcap) and softcap > 0):
        raise ConfigError(f"softcap is {softcap}; it takes a finite number above 0, or None")
    return Rule(scale / softcap, softcap * _LOG2_E)


class Running:
    """Attention of one block of queries: running peak, sum and weighted values.

    Scores of a piece are weighed, and then its values added, in any number of parts. Invariant:
    after the last of them out / total is the attention over everything so far and peak +
    log2(total) its base-2 log-sum-exp; a row with nothing visible has peak -inf, total 0 and out 0.
    """

    __slots__ = ("rows", "rule", "sees_all", "started")

    def __init__(self, rows: Rows, query: Tensor, rule: Rule) -> None:
        """query [q_heads, n, Dk], n of them as many as rows are for."""
        self.rows = rows
        self.rule = rule
        self.started = False
        self.sees_all = False
        """Whether it is known that each row has seen something."""
        asked = rows.asked
        query = query.view(asked.shape)
        if query.dtype == torch.float32:
            torch.mul(query, rule.factor, out=asked)
        else:
            # Copied before it is scaled: a product in 16 bits would be rounded to 16 bits.
            asked.copy_(query).mul_(rule.factor)

    def score(self, keys: Tensor, scores: Tensor) -> None:
        """Base-2 scores [kv_heads, rows, tokens] of keys [kv_heads, Dk, tokens]."""
        torch.bmm(self.rows.query, keys, out=scores)
        softcap = self.rule.softcap
        if softcap is not None:
            scores.tanh_().mul_(softcap)

    def weigh(self, scores: Tensor, hides: bool) -> None:
        """Turn scores [chunks, kv_heads, rows, tokens] into weights, for whose values room is made.
        hides: whether a row may have seen nothing of them."""
        rows = self.rows
        self.sees_all = self.sees_all or not hides
        if not self.started:
            torch.amax(scores, (0, 3), keepdim=True, out=rows.peak)
            scores.sub_(self._base(rows.peak)).exp2_()
            torch.sum(scores, (0, 3), keepdim=True, out=rows.total)
            return
        peak = scores.amax((0, 3), keepdim=True)
        torch.maximum(peak, rows.peak, out=peak)
        base = self._base(peak)
        scores.sub_(base).exp2_()
        shrink = torch.sub(rows.peak, base).exp2_()
        rows.peak.copy_(peak)
        rows.total.mul_(shrink).add_(scores.sum((0, 3), keepdim=True))
        rows.out.mul_(shrink[0])

    def add(self, weights: Tensor, values: Tensor) -> None:
        """Add values [kv_heads, tokens, Dv] under weights [kv_heads, rows, tokens]."""
        if self.started:
            self.rows.out.baddbmm_(weights, values)
        else:
            # The kept buffer may hold NaN, so the first product must not read it.
            torch.bmm(weights, values, out=self.rows.out)
            self.started = True

    def _base(self, peak: Tensor) -> Tensor:
        """What scores are taken relative to."""
        # A row that has seen nothing keeps peak -inf; -inf - -inf would be NaN.
        return peak if self.sees_all else peak.masked_fill(peak == -math.inf, 0.0)

    def result(self, out_dtype: torch.dtype) -> Partial:
        """The attention, out [q_heads, n, Dv] in a dtype."""
        rows = self.rows
        heads, group, n, width = rows.answer.shape
        if not self.started:
            empty = torch.full((heads * group, n), -math.inf)
            return Partial(torch.zeros((heads * group, n, width), dtype=out_dtype), empty)
        totals = rows.totals
        if not self.sees_all:
            totals = totals.masked_fill(totals == 0.0, 1.0)
        out = torch.empty((heads, group, n, width), dtype=out_dtype)
        torch.div(rows.answer, totals, out=out)
        lse = rows.totals.log().add_(rows.peaks, alpha=math.log(2))
        return Partial(out.view(heads * group, n, width), lse.view(heads * group, n))


def join_queries(blocks: list[Partial]) -> Partial:
    """One Partial for blocks of queries that follow each other."""
    if len(blocks) == 1:
        return blocks[0]
    return Partial(
        torch.cat([each.out for each in blocks], 1), torch.cat([each.lse for each in blocks], 1)
    )
