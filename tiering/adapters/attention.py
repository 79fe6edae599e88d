"""The attention function "kvtier" for Hugging Face models, and its mask function.

The mask function is registered as well, because for a name it does not know the library passes
no mask at all and padding would be ignored.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvtier.errors import UnsupportedError

NAME = "kvtier"
TAG = "_kvtier_layer"
"""Attribute of the keys that a TieredCache returns: the layer that answers for them."""


class TieredKeys(Protocol):
    """What a layer of a TieredCache does for the attention function."""

    def attend(
        self,
        query: torch.Tensor,
        chunk: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [batch, q_heads, n, width], chunk: keys and values of the same n tokens
        -> [batch, n, q_heads, width]."""
        ...

    def require_window(self, window: int | None) -> None:
        """Raise ConfigError unless the layer was opened with this sliding window."""
        ...


def tiered_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over a TieredCache; for any other cache, what "sdpa" computes."""
    layer: TieredKeys | None = getattr(key, TAG, None)
    if kwargs.get("s_aux") is not None:
        raise UnsupportedError("attention with learned sinks is not supported")
    if layer is None:
        mask = _plain_mask(query, key, attention_mask, sliding_window)
        if softcap is not None:
            raise UnsupportedError(
                "logit soft-capping without a TieredCache: set_attn_implementation('eager')"
            )
        plain: tuple[torch.Tensor, torch.Tensor | None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    if dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise UnsupportedError(
            "a TieredCache is for inference: run the model in eval mode under torch.no_grad()"
        )
    layer.require_window(sliding_window)
    return layer.attend(query, (key, value), attention_mask, scaling, softcap), None


def _plain_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    padding: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor | None:
    """Bool [batch or 1, 1, n, keys] for keys that end where the queries end; None: plain causal."""
    count, held = query.shape[2], key.shape[2]
    if padding is not None and padding.ndim == 4:
        return padding
    if padding is not None and padding.shape[1] != held:
        raise UnsupportedError(
            f"an attention_mask of {padding.shape[1]} tokens for {held} keys with attention "
            "'kvtier': pass one of all tokens"
        )
    cut = window is not None and held > window
    if padding is None and not cut and count in (1, held):
        return None
    at = torch.arange(held - count, held, device=key.device)[:, None]
    keys = torch.arange(held, device=key.device)[None]
    seen = keys <= at
    if window is not None:
        seen &= keys > at - window
    if padding is None:
        return seen[None, None]
    return seen[None, None] & padding[:, None, None].bool()


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The padding alone, [batch, keys]; causality and windows are the attention function's."""
    if int(q_offset) + q_length != kv_offset + kv_length:
        raise UnsupportedError(
            f"a cache of fixed length ({kv_length}) with attention 'kvtier': call "
            "model.set_attn_implementation('sdpa')"
        )
    # The library forbids the skip wherever the mask is more than causality and a window.
    if not allow_is_causal_skip:
        raise UnsupportedError(
            "attention 'kvtier' takes causal and sliding-window masks, not packed sequences, "
            "blocks or custom overlays"
        )
    if attention_mask is None:
        return None
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def register() -> None:
    """Make the name known to the library. Harmless when repeated."""
    AttentionInterface.register(NAME, tiered_attention)
    AttentionMaskInterface.register(NAME, padding_mask)
