"""Tokens written into Frames, one at a time and many, bit for bit and nowhere else."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtier.tiering.frames import MemoryTier, bits_of
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry, LayerGeometry
from kvtier.tiering.packing import TORCH_DTYPES

HEADS = 3

FRAMES = {
    "neighbours": [4, 5, 6],
    "equal distances": [1, 8, 15],
    "unequal distances": [1, 2, 9],
    "backwards": [9, 5, 1],
    "equal distances, but the last": [2, 4, 7],
}
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda rows: rows,
    "cut out of more tokens": lambda rows: rows.repeat(1, 3, 1)[:, 1:2],
    "heads last": lambda rows: rows.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "every other element": lambda rows: rows.repeat_interleave(2, 2)[:, :, ::2],
}


def some_rows(width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits [heads, 1, width], NaNs of every kind among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    given = np.random.default_rng(seed).integers(0, 256, (HEADS, 1, width * size), np.uint8)
    return torch.from_numpy(given).reshape(-1).view(dtype).view(HEADS, 1, width)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.parametrize("value_width", [0, 1, 5])
def test_one_token_goes_to_its_slot_of_each_head(
    dtype: str, strides: str, frames: str, value_width: int
) -> None:
    shape = LayerGeometry(HEADS, 4, value_width)
    tier = MemoryTier("HOT", 1 << 20, Geometry((shape,), dtype))
    pool = bits_of(tier.memory(0))[:20]
    pool[:] = 1
    expected = pool.copy()
    keys = some_rows(4, TORCH_DTYPES[dtype], 1)
    values = some_rows(value_width, TORCH_DTYPES[dtype], 2)
    pages = np.array([[19] * HEADS, FRAMES[frames]], np.int64).T
    place = 11
    for head, frame in enumerate(FRAMES[frames]):
        rows = expected[frame]
        rows[place * 4 : (place + 1) * 4] = bits_of(keys)[head, 0]
        at = PAGE_TOKENS * 4 + place * value_width
        rows[at : at + value_width] = bits_of(values)[head, 0]
    given = [STRIDES[strides](each) for each in (keys, values)]
    tier.token_rows(0).put(pages, PAGE_TOKENS + place, *given)
    assert pool.tobytes() == expected.tobytes()
