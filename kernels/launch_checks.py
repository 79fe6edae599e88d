"""Checks of the arguments of the attention kernels, made before any byte is read.

Each failure is a ConfigError that names the argument, what it got and what it takes.
"""

import torch
from torch import Tensor

from kvtier.errors import ConfigError

PAGE_TOKENS = 16

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_paged(
    query: Tensor,
    pool: Tensor,
    frames: Tensor,
    widths: tuple[int, int],
    valid: Tensor | int | None,
    visible: Tensor | None,
) -> None:
    """Raise ConfigError unless these fit together; see paged_attention for what they take."""
    if _usual(query, pool, frames, widths, valid) and visible is None:
        return
    _check_query(query)
    q_heads, n, query_width = query.shape
    key_width, value_width = widths
    if key_width != query_width or value_width < 1:
        raise ConfigError(
            f"widths is {widths}; it takes (Dk, Dv) with Dk = {query_width}, the last dimension "
            "of query, and Dv at least 1"
        )
    row = PAGE_TOKENS * (key_width + value_width)
    _check_tensor("pool", pool, (None, row), (query.dtype,))
    if not pool.is_contiguous():
        raise ConfigError(
            f"pool has strides {pool.stride()}; it takes a contiguous tensor with rows of "
            f"{row} elements ({row * pool.element_size()} bytes)"
        )
    _check_tensor("frames", frames, (None, None), (torch.int64,))
    kv_heads, pages = frames.shape
    _check_heads("frames", q_heads, kv_heads)
    if isinstance(valid, int):
        if not 1 <= valid <= PAGE_TOKENS or not pages:
            raise ConfigError(
                f"valid is {valid} slots of the last of {pages} pages; it takes 1 to {PAGE_TOKENS} "
                "and a page"
            )
    elif valid is not None:
        _check_tensor("valid", valid, (kv_heads, None, PAGE_TOKENS), (torch.bool,))
        if valid.shape[1] > pages:
            raise ConfigError(
                f"valid is for the last {valid.shape[1]} pages; frames has {pages} of them"
            )
    if visible is not None:
        heads = 1 if visible.dim() == 4 and visible.shape[1] == 1 else kv_heads
        _check_tensor("visible", visible, (n, heads, pages, PAGE_TOKENS), (torch.bool,))


def _usual(
    query: Tensor,
    pool: Tensor,
    frames: Tensor,
    widths: tuple[int, int],
    valid: Tensor | int | None,
) -> bool:
    """Whether these fit together and are what most steps of a decode ask with: a few looks in place
    of all checks, which would be done in every layer of every step."""
    asked, rows, placed = query.shape, pool.shape, frames.shape
    return (
        len(asked) == 3
        and len(rows) == 2
        and len(placed) == 2
        and asked[0] > 0
        and placed[0] > 0
        and asked[0] % placed[0] == 0
        and widths[0] == asked[2] > 0
        and widths[1] > 0
        and rows[1] == PAGE_TOKENS * (widths[0] + widths[1])
        and query.dtype is pool.dtype
        and query.dtype in _DTYPES
        and frames.dtype is torch.int64
        and query.is_cpu
        and pool.is_cpu
        and frames.is_cpu
        and pool.is_contiguous()
        and query.stride(-1) == 1
        and (valid is None or (type(valid) is int and 1 <= valid <= PAGE_TOKENS and placed[1] > 0))
    )


def require_in_pool(frames: Tensor, pool: Tensor) -> None:
    """Raise ConfigError unless all frames are rows of the pool.

    For when gathering them failed: torch looks at every index anyway, and a pass over the frames of
    a million tokens in every layer of every step would cost more than all other checks.
    """
    low, high = (int(bound) for bound in torch.aminmax(frames))
    if low < 0 or high >= pool.shape[0]:
        raise ConfigError(
            f"frames holds indices {low} to {high}; it takes 0 to {pool.shape[0] - 1}, the "
            "frames of pool"
        )


def check_dense(query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> None:
    """Raise ConfigError unless these fit together; see dense_causal_attention."""
    _check_query(query)
    q_heads, n, width = query.shape
    _check_tensor("keys", keys, (None, n, width), (query.dtype,))
    kv_heads = keys.shape[0]
    _check_heads("keys", q_heads, kv_heads)
    _check_tensor("values", values, (kv_heads, n, None), (query.dtype,))
    for name, tensor in (("keys", keys), ("values", values)):
        _check_last_contiguous(name, tensor)
    if window is not None and window < 1:
        raise ConfigError(f"window is {window}; it takes at least 1 token, or None")


def _check_query(query: Tensor) -> None:
    _check_tensor("query", query, (None, None, None), _DTYPES)
    _check_last_contiguous("query", query)
    if query.shape[0] < 1 or query.shape[2] < 1:
        raise ConfigError(
            f"query has shape {list(query.shape)}; it takes [q_heads, n, Dk] with at least one "
            "head and a width of at least 1"
        )


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """None in `shape` stands for any size."""
    if not tensor.is_cpu:
        raise ConfigError(f"{name} is on {tensor.device}; this kernel takes tensors on the cpu")
    got = tensor.shape
    # A loop, not any(): this is done for every argument of every layer of every step.
    fits = len(got) == len(shape)
    if fits:
        for have, want in zip(got, shape, strict=True):
            if want is not None and have != want:
                fits = False
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ConfigError(f"{name} has shape {list(got)}; it takes [{wanted}]")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ConfigError(f"{name} has dtype {tensor.dtype}; it takes {wanted}")


def _check_last_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ConfigError(
            f"{name} has strides {tensor.stride()}; it takes a last dimension with stride 1: call "
            "contiguous() first"
        )


def _check_heads(name: str, q_heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or q_heads % kv_heads != 0:
        raise ConfigError(
            f"{name} has {kv_heads} kv heads, query has {q_heads} heads; it takes a divisor of "
            "the heads of query"
        )
