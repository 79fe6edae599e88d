"""Pages as bytes: how the tokens of a Segment's layer become the payload of an Extent, and back.

A payload holds the Pages of kv head 0, then those of head 1, and so on. A Page is packed: all
its K rows, then all its V rows, with no padding. In a Frame the V rows begin after room for 16
K rows, whatever the Page holds. Placement decides the order of tokens.
"""

import ctypes

import numpy as np
import torch

from kvtier.errors import ConfigError
from kvtier.io.device import ByteArray
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry, LayerGeometry
from kvtier.tiering.page_layout import Order, PageLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


_STRIDED = torch.strided
"""Here, because looking it up in torch costs as much as the check that needs it."""
_dispatch_keys, _NEGATIVE = torch._C._dispatch_keys, torch._C.DispatchKey.Negative


def rearranged(rows: torch.Tensor, order: Order) -> torch.Tensor:
    """Rows [heads, tokens, width] in another order of tokens for each head."""
    # Indexing copies bits; torch.gather takes 16-bit floats through float32 on the CPU, which
    # rewrites NaNs.
    return rows[torch.arange(len(order))[:, None], torch.from_numpy(order)]


def pack(keys: torch.Tensor, values: torch.Tensor, order: Order | None, target: ByteArray) -> None:
    """Lay keys [heads, tokens, Dk] and values [heads, tokens, Dv] out as a payload.

    target: uint8, in one piece, the bytes of heads * tokens * (Dk + Dv) numbers.

    Rows whose tokens lie one behind the other are copied without letting go of the interpreter's
    lock: whoever packs holds the store's lock, for which a thread that got the other one would
    wait at once, and to hand it over and back takes longer than the copy.
    """
    if order is not None:
        keys, values = rearranged(keys, order), rearranged(values, order)
    heads, tokens, _ = keys.shape
    whole, rest = divmod(tokens, PAGE_TOKENS)
    by_head = target.reshape(heads, -1)
    page_bytes = PAGE_TOKENS * by_head.shape[1] // tokens
    pages = by_head[:, : whole * page_bytes].reshape(heads, whole, page_bytes)
    last = by_head[:, whole * page_bytes :]
    in_page = in_last = 0
    for rows in (keys, values):
        row_bytes = rows.shape[2] * rows.element_size()
        if not row_bytes:
            continue
        source = _by_head(rows)
        cut, size = whole * PAGE_TOKENS * row_bytes, PAGE_TOKENS * row_bytes
        # One element of numpy for each Page: of a few hundred it copies with the lock.
        block = np.dtype((np.void, size))
        there = source[:, :cut].reshape(heads, whole, size).view(block)
        pages[:, :, in_page : in_page + size].view(block)[:] = there
        last[:, in_last : in_last + rest * row_bytes] = source[:, cut:]
        in_page, in_last = in_page + size, in_last + rest * row_bytes


def _by_head(rows: torch.Tensor) -> ByteArray:
    """The bytes of rows [heads, tokens, width] as uint8 [heads, n]: their memory, which `rows`
    must keep alive, or a copy where the tokens of a head do not follow each other in it."""
    heads, tokens, width = rows.shape
    head_step, token_step, step = rows.stride()
    address = rows.data_ptr() if (token_step, step) == (width, 1) else 0
    if not address:
        copied: ByteArray = rows.contiguous().view(-1).view(torch.uint8).numpy()
        return copied.reshape(heads, -1)
    # Tensor.view lets go of the interpreter's lock.
    item_bytes = rows.element_size()
    head_bytes = tokens * width * item_bytes
    span = (heads - 1) * head_step * item_bytes + head_bytes
    memory = memoryview((ctypes.c_char * span).from_address(address)).cast("B")
    return np.ndarray((heads, head_bytes), np.uint8, memory, 0, (head_step * item_bytes, 1))


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


def as_operand(given: object) -> torch.Tensor:
    """`as_tensor` of what nothing but torch will read, which knows itself what it only notes of a
    tensor: to look whether there is such a note costs ten times the rest."""
    if type(given) is torch.Tensor and given.is_cpu and given.layout is _STRIDED:
        return given
    return as_tensor(given)


def as_tensor(given: object) -> torch.Tensor:
    """What a caller handed in, as a tensor in host memory. Raises ConfigError."""
    # Every layer of every step of a decode comes here: all that is usual is looked at once.
    if isinstance(given, torch.Tensor) and given.is_cpu and given.layout is _STRIDED:
        if given.requires_grad:
            given = given.detach()
        # Numbers whose sign is only noted have no memory of their own that could be copied.
        # Tensor.is_neg says so too, but lets go of the interpreter's lock.
        return given.resolve_neg() if _dispatch_keys(given).has(_NEGATIVE) else given
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
        # Neither numpy nor a copy of bytes would notice that there is nothing to read.
        if not given.data_ptr() and given.numel():
            raise ConfigError(f"{name} of layer {layer} are a tensor without memory")
