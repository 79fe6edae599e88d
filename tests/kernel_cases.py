"""Inputs of the attention kernels for their tests, and what the oracle says about them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.oracle import attention_oracle
from kvtier.kernels.paged_attention import paged_attention
from kvtier.kernels.running import Partial
from kvtier.kernels.workspace import Workspace

TOLERANCE = 2e-5
"""Absolute, for the output and the log-sum-exp of inputs with unit variance. The oracle reads the
same rounded 16-bit inputs and the kernels compute in float32, so it holds for every dtype."""
POISONS = (math.nan, math.inf, -math.inf, 1e38)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Shape:
    """q_heads = kv_heads * group."""

    kv_heads: int
    group: int
    key_width: int
    value_width: int
    tokens: int
    queries: int = 1
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Case:
    """Keys and values in token order, and the same in a pool of frames in random order."""

    query: Tensor
    keys: Tensor
    values: Tensor
    pool: Tensor
    frames: Tensor
    valid: Tensor
    widths: tuple[int, int]
    scale: float

    def run(
        self,
        workspace: Workspace | None = None,
        softcap: float | None = None,
        visible: Tensor | None = None,
    ) -> Partial:
        return paged_attention(
            self.query,
            self.pool,
            self.frames,
            self.widths,
            self.valid,
            scale=self.scale,
            workspace=workspace or Workspace(),
            softcap=softcap,
            visible=visible,
        )


def make_case(shape: Shape, seed: int, poison: float = math.nan) -> Case:
    """Frames that no page uses, and slots past the last token, hold `poison`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(shape.dtype)

    heads, pages = shape.kv_heads, -(-shape.tokens // PAGE_TOKENS)
    query = normal(heads * shape.group, shape.queries, shape.key_width)
    keys = normal(heads, shape.tokens, shape.key_width)
    values = normal(heads, shape.tokens, shape.value_width)
    row = PAGE_TOKENS * (shape.key_width + shape.value_width)
    pool = torch.full((heads * pages + 3, row), poison).to(shape.dtype)
    order = torch.randperm(heads * pages + 3, generator=generator)
    frames = order[: heads * pages].view(heads, pages)
    valid = torch.zeros(heads, pages, PAGE_TOKENS, dtype=torch.bool)
    valid.view(heads, -1)[:, : shape.tokens] = True
    cut = PAGE_TOKENS * shape.key_width
    for head in range(heads):
        for page in range(pages):
            part = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
            frame = pool[frames[head, page]]
            for half, source in ((frame[:cut], keys), (frame[cut:], values)):
                flat = source[head, part].reshape(-1)
                half[: flat.numel()] = flat
    widths = (shape.key_width, shape.value_width)
    scale = 1 / math.sqrt(shape.key_width)
    return Case(query, keys, values, pool, frames, valid, widths, scale)


def oracle(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: NDArray[np.bool_],
    scale: float,
    softcap: float | None = None,
) -> Partial:
    arrays = [tensor.double().numpy() for tensor in (query, keys, values)]
    out, lse = attention_oracle(arrays[0], arrays[1], arrays[2], mask, scale, softcap)
    return Partial(torch.from_numpy(out), torch.from_numpy(lse))


ALL = np.ones((1, 1, 1), dtype=np.bool_)


def assert_close(got: Partial, want: Partial, tolerance: float = TOLERANCE) -> None:
    assert got.out.dtype == torch.float32
    assert got.lse.dtype == torch.float32
    torch.testing.assert_close(got.out.double(), want.out.double(), atol=tolerance, rtol=0)
    torch.testing.assert_close(got.lse.double(), want.lse.double(), atol=tolerance, rtol=0)


def poisoned_workspace(*warm_up: Callable[[Workspace], object]) -> Workspace:
    """A workspace whose buffers are as the given calls leave them, then filled with NaN."""
    workspace = Workspace()
    for call in warm_up:
        call(workspace)
    for buffer in workspace.buffers:
        buffer.fill_(math.nan if buffer.dtype.is_floating_point else True)
    return workspace


def causal(queries: int, past: int, window: int | None) -> NDArray[np.bool_]:
    position = np.arange(past, past + queries)[:, None]
    token = np.arange(past + queries)[None, :]
    shown = token <= position
    if window is not None:
        shown &= token > position - window
    return shown
