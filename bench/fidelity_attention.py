"""Sparse attention simulated exactly: all tokens of a suffix in one pass, each with its own choice.

What a choice leaves out is hidden by a mask, and its estimate is merged by log-sum-exp, as a decode
would that reads one token at a time.

Invariants:
- The context has whole Pages: the first one is the sink, the last four are recent tokens, and
  those between lie in Segments of 512 tokens, in each in the order of a layout.
- Tokens after the context are seen by all behind them, outside of the budget.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtier.kernels.clustering import balanced_order
from kvtier.kernels.paged_attention import merge
from kvtier.kernels.rival_selection import Selector, Terms
from kvtier.kernels.rotary import Rotary, unrotated
from kvtier.kernels.running import Partial
from kvtier.tiering.adapters import attention
from kvtier.tiering.geometry import PAGE_TOKENS

SINK_TOKENS = 16
RECENT_TOKENS = 64
SEGMENT_TOKENS = 512
ELEMENT_BYTES = 2
"""Of the KV that budgets are counted in; as a share it makes no difference."""
QUERY_STEP = 8
"""Of the context's queries so many are one that is kept."""


def segments(tokens: int) -> list[tuple[int, int]]:
    """First token, and the one behind the last, of each run that has an order of its own."""
    last = tokens - RECENT_TOKENS
    starts = list(range(SINK_TOKENS, last, SEGMENT_TOKENS))
    middle = [(start, min(start + SEGMENT_TOKENS, last)) for start in starts]
    return [(0, SINK_TOKENS), *middle, (last, tokens)]


def order_by_keys(keys: Tensor, rotary: Rotary) -> Tensor:
    """Which token lies in each slot, int64 [kv_heads, tokens], of a layer's keys [kv_heads, tokens,
    width]."""
    heads, tokens, _ = keys.shape
    plain = unrotated(keys, torch.arange(tokens), rotary)
    order = torch.arange(tokens).repeat(heads, 1)
    for first, behind in segments(tokens)[1:-1]:
        order[:, first:behind] = first + balanced_order(plain[:, first:behind], PAGE_TOKENS)
    return order


def terms_of(tokens: int, widths: tuple[int, int], scale: float) -> Terms:
    """The Pages of such a context: what each takes, padding included, and which are always read."""
    pages = tokens // PAGE_TOKENS
    always = torch.zeros(pages, dtype=torch.bool)
    always[: SINK_TOKENS // PAGE_TOKENS] = True
    always[pages - RECENT_TOKENS // PAGE_TOKENS :] = True
    page_bytes = PAGE_TOKENS * sum(widths) * ELEMENT_BYTES
    return Terms(torch.full((pages,), page_bytes, dtype=torch.int64), always, scale)


def budget_bytes(terms: Terms, budget: float) -> int:
    """Of each kv head; what is always read is inside."""
    return int(budget * int(terms.page_bytes.sum()))


def visible(chosen: Tensor) -> Tensor:
    """What each token of a suffix sees, bool [kv_heads, suffix, context + suffix], of the Pages
    that it chose, bool [suffix, kv_heads, pages]."""
    suffix, heads, _ = chosen.shape
    context = chosen.transpose(0, 1).repeat_interleave(PAGE_TOKENS, 2)
    causal = torch.ones(suffix, suffix, dtype=torch.bool).tril()
    return torch.cat((context, causal.expand(heads, -1, -1)), 2)


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float
) -> Partial:
    """Attention of query [q_heads, n, Dk] to what it sees, bool [kv_heads, n, tokens]."""
    heads, (q_heads, n, width) = len(keys), query.shape
    scores = query.reshape(heads, -1, width) @ keys.transpose(1, 2) * scale
    by_query = scores.view(heads, -1, n, keys.shape[1])
    by_query.masked_fill_(~seen.unsqueeze(1), -math.inf)
    lse = scores.logsumexp(2, keepdim=True)
    out = scores.sub_(lse).exp_() @ values
    return Partial(out.view(q_heads, n, -1), lse.view(q_heads, n))


@dataclass(slots=True)
class Reading:
    """How a layer reads its context: what chooses, and how much was chosen so far."""

    selector: Selector
    terms: Terms
    budget: float
    pages_chosen: int = 0
    pages_there: int = 0

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [q_heads, n, Dk] of the suffix, keys and values [kv_heads, context + n, width], the
        context in slot order: [q_heads, n, Dv]."""
        limit = budget_bytes(self.terms, self.budget)
        found = [self.selector.select(query[:, at], limit) for at in range(query.shape[1])]
        chosen = torch.stack([each.chosen for each in found])
        self.pages_chosen += int(chosen.sum())
        self.pages_there += chosen.numel()
        read = masked_attention(query, keys, values, visible(chosen), self.terms.scale)
        unread = [each.unread for each in found if each.unread is not None]
        if not unread:
            return read.out
        estimated = Partial(
            torch.cat([each.out for each in unread], 1), torch.cat([each.lse for each in unread], 1)
        )
        return merge([read, estimated]).out


class PluggedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of a simulated cache that plugs into the attention of TieredCache. What it holds, and
    how it attends, is its heirs'."""

    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: shapes are known."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        tagged = key_states.view_as(key_states)
        setattr(tagged, attention.TAG, self)
        return tagged, value_states

    def require_window(self, window: int | None) -> None:
        assert window is None, "only layers that see everything are simulated"

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SimulatedLayer(PluggedLayer):  # type: ignore[no-untyped-call]
    """A layer that holds a context and reads it by a Reading; without one in full, in order."""

    def __init__(self, keys: Tensor, values: Tensor, reading: Reading | None = None) -> None:
        """keys, values: [kv_heads, tokens, width] of the context, in the order of its slots."""
        super().__init__()
        self.held = keys, values
        self.reading = reading
        self.queries: list[Tensor] | None = None
        """If it is a list: every eighth query that was asked, [q_heads, n, Dk]."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.held
        self.held = torch.cat((keys, key_states[0]), 1), torch.cat((values, value_states[0]), 1)
        return super().update(key_states, value_states)

    def attend(
        self,
        query: Tensor,
        chunk: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        """What the attention function of TieredCache asks of a layer: [1, n, q_heads, Dv]."""
        assert attention_mask is None
        assert softcap is None
        keys, values = self.held
        count, held = query.shape[2], keys.shape[1]
        if self.reading is not None:
            assert scale == self.reading.terms.scale
            return self.reading.attend(query[0], keys, values).transpose(0, 1)[None]
        if self.queries is not None:
            self.queries.append(query[0, :, ::QUERY_STEP].clone())
        seen = torch.ones(count, held, dtype=torch.bool).tril(held - count)
        out = scaled_dot_product_attention(
            query, keys[None], values[None], attn_mask=seen, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    def get_seq_length(self) -> int:
        return self.held[0].shape[1]


def read(model: PreTrainedModel, layers: list[SimulatedLayer], ids: list[int], keep: int) -> Tensor:
    """Have the model read ids behind what the layers hold: logits [keep, vocabulary] of what
    follows the last ones."""
    at = layers[0].get_seq_length()
    module: Any = model
    with torch.inference_mode():
        output = module(
            input_ids=torch.tensor([ids]),
            position_ids=torch.arange(at, at + len(ids))[None],
            cache=Cache(layers=list(layers)),
            use_cache=True,
            logits_to_keep=keep,
        )
    logits: Tensor = output.logits[0].float()
    return logits
