"""Pages as bytes: how the tokens of a Segment's layer become the payload of an Extent, and back.

A payload holds the Pages of kv head 0, then those of head 1, and so on. A Page is packed: all
its K rows, then all its V rows, with no padding. In a Frame the V rows begin after room for 16
K rows, whatever the Page holds. Placement decides the order of tokens.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch

from kvtier.errors import ConfigError
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry, LayerGeometry
from kvtier.tiering.page_layout import Order, PageLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


_STRIDED = torch.strided
"""Here, because looking it up in torch costs as much as the check that needs it."""


class Placement(ABC):
    """Policy: in which order a Segment's tokens lie in their Pages. Pure."""

    @abstractmethod
    def order(self, keys: torch.Tensor) -> Order | None:
        """keys [kv_heads, tokens, key_width] -> permutation per head; None: as they came."""


class PositionOrder(Placement):
    """Tokens lie in the order of their positions."""

    def order(self, keys: torch.Tensor) -> Order | None:
        return None


def rearranged(rows: torch.Tensor, order: Order) -> torch.Tensor:
    """Rows [heads, tokens, width] in another order of tokens for each head."""
    # Indexing copies bits; torch.gather takes 16-bit floats through float32 on the CPU, which
    # rewrites NaNs.
    return rows[torch.arange(len(order))[:, None], torch.from_numpy(order)]


def pack(
    keys: torch.Tensor, values: torch.Tensor, order: Order | None, target: torch.Tensor
) -> None:
    """Lay keys [heads, tokens, Dk] and values [heads, tokens, Dv] out as a payload.

    target: one-dimensional, of their dtype, heads * tokens * (Dk + Dv) elements.
    """
    if order is not None:
        keys, values = rearranged(keys, order), rearranged(values, order)
    heads, tokens, key_width = keys.shape
    value_width = values.shape[2]
    by_head = target.view(heads, tokens * (key_width + value_width))
    whole = tokens // PAGE_TOKENS
    cut = whole * PAGE_TOKENS
    page_width = PAGE_TOKENS * (key_width + value_width)
    split = PAGE_TOKENS * key_width
    if whole:
        # Views of the target: rows of a head are not adjacent to those of the next one.
        pages = by_head[:, : whole * page_width].view(heads, whole, page_width)
        pages[:, :, :split] = keys[:, :cut].reshape(heads, whole, split)
        pages[:, :, split:] = values[:, :cut].reshape(heads, whole, page_width - split)
    rest = tokens - cut
    if rest:
        last = by_head[:, whole * page_width :]
        last[:, : rest * key_width] = keys[:, cut:].reshape(heads, -1)
        last[:, rest * key_width :] = values[:, cut:].reshape(heads, -1)


def scatter(
    payload: torch.Tensor, layout: PageLayout, pool: torch.Tensor, frames: torch.Tensor
) -> None:
    """Copy a payload's Pages into Frames.

    payload: one-dimensional. pool [frames, 16 * (Dk + Dv)]. frames: int64 [heads, pages].
    """
    layer, tokens = layout.layer, layout.tokens
    heads = layer.kv_heads
    by_head = payload.view(heads, tokens * layer.row_width)
    whole = tokens // PAGE_TOKENS
    page_width = PAGE_TOKENS * layer.row_width
    if whole:
        for head in range(heads):
            rows = by_head[head, : whole * page_width].view(whole, page_width)
            pool.index_copy_(0, frames[head, :whole], rows)
    rest = tokens - whole * PAGE_TOKENS
    if rest:
        last = by_head[:, whole * page_width :]
        split = PAGE_TOKENS * layer.key_width
        rows = pool.new_zeros(heads, page_width)
        rows[:, : rest * layer.key_width] = last[:, : rest * layer.key_width]
        rows[:, split : split + rest * layer.value_width] = last[:, rest * layer.key_width :]
        pool.index_copy_(0, frames[:, whole], rows)


def gather(
    pool: torch.Tensor, frames: torch.Tensor, layer: LayerGeometry, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [heads, tokens, Dk] and values [heads, tokens, Dv] of Frames, as they lie in them."""
    heads, pages = frames.shape
    split = PAGE_TOKENS * layer.key_width
    rows = pool.index_select(0, frames.reshape(-1)).view(heads, pages, -1)
    keys = rows[:, :, :split].reshape(heads, pages * PAGE_TOKENS, layer.key_width)
    values = rows[:, :, split:].reshape(heads, pages * PAGE_TOKENS, layer.value_width)
    return keys[:, :tokens], values[:, :tokens]


def as_tensor(given: object) -> torch.Tensor:
    """What a caller handed in, as a tensor in host memory. Raises ConfigError."""
    # Every layer of every step of a decode comes here: all that is usual is looked at once.
    if isinstance(given, torch.Tensor) and given.is_cpu and given.layout is _STRIDED:
        if given.requires_grad:
            given = given.detach()
        # Numbers whose sign is only noted have no memory of their own that could be copied.
        return given.resolve_neg() if given.is_neg() else given
    if isinstance(given, np.ndarray):
        try:
            # A copy where torch could not share the memory: read-only, or strides below zero.
            return torch.from_numpy(np.require(given, requirements=("C", "W")))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"an array of {given.dtype} cannot be used: {error}") from error
    what = ""
    if isinstance(given, torch.Tensor):
        what = f" of layout {given.layout}" if given.is_cpu else f" on {given.device}"
    raise ConfigError(
        "a dense torch tensor in host memory or a numpy array is needed: "
        f"got {type(given).__name__}{what}"
    )


def require_rows(geometry: Geometry, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise ConfigError unless these are rows of new tokens for a layer:
    keys [kv_heads, n, key_width], values [kv_heads, n, value_width]."""
    if not 0 <= layer < len(geometry.layers):
        raise ConfigError(f"layer {layer} of a model of {len(geometry.layers)} layers")
    shape = geometry.layers[layer]
    dtype = TORCH_DTYPES[geometry.dtype]
    tokens = keys.shape[1] if keys.ndim == 3 else -1
    for name, given, width in (
        ("keys", keys, shape.key_width),
        ("values", values, shape.value_width),
    ):
        if given.shape != (shape.kv_heads, tokens, width) or given.dtype != dtype:
            raise ConfigError(
                f"{name} of layer {layer} must be [{shape.kv_heads}, tokens, {width}] "
                f"{geometry.dtype}: got {list(given.shape)} {given.dtype}"
            )
