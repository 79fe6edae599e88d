"""dense_causal_attention and merge against the float64 oracle."""

import math

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.paged_attention import dense_causal_attention, merge, paged_attention
from kvtier.kernels.running import Partial
from kvtier.kernels.workspace import Workspace
from tests.kernel_cases import (
    DTYPES,
    Shape,
    assert_close,
    causal,
    make_case,
    oracle,
    poisoned_workspace,
)


@pytest.mark.parametrize("seed", range(4))
def test_merging_any_splits_equals_the_whole(seed: int) -> None:
    case = make_case(Shape(2, 7, 64, 128, tokens=2600, queries=2), seed)
    whole = case.run()
    rng = np.random.default_rng(seed)
    pages = case.frames.shape[1]
    owner = torch.from_numpy(rng.integers(0, 5, pages))
    parts = []
    for part in range(6):  # nothing belongs to the last part
        chosen = (owner == part).nonzero().squeeze(1)
        parts.append(
            paged_attention(
                case.query,
                case.pool,
                case.frames[:, chosen],
                case.widths,
                case.valid[:, chosen],
                scale=case.scale,
                workspace=Workspace(),
            )
        )
    assert_close(merge(parts), whole)
    assert_close(merge([merge(parts[3:]), parts[1], merge([parts[2], parts[0]])]), whole)


def test_merge_of_nothing_visible_is_zero() -> None:
    empty = Partial(torch.zeros(2, 3, 4), torch.full((2, 3), -math.inf))
    full = Partial(torch.ones(2, 3, 4), torch.zeros(2, 3))
    got = merge([empty, empty, empty])
    assert torch.count_nonzero(got.out) == 0
    assert bool((got.lse == -math.inf).all())
    assert_close(merge([empty, full]), full)


def test_merge_refuses_parts_of_other_shapes() -> None:
    part = Partial(torch.zeros(2, 3, 4), torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="parts is empty"):
        merge([])
    with pytest.raises(ConfigError, match=r"parts\[1\]"):
        merge([part, Partial(torch.zeros(2, 3, 5), torch.zeros(2, 3))])


@pytest.mark.parametrize("window", [None, 1, 3, 64, 65, 1000])
@pytest.mark.parametrize("n", [1, 2, 64, 65, 200])
def test_dense_causal_equals_oracle(n: int, window: int | None) -> None:
    case = make_case(Shape(2, 4, 64, 80, tokens=n, queries=n), seed=n)

    def run(workspace: Workspace) -> Partial:
        return dense_causal_attention(
            case.query,
            case.keys,
            case.values,
            scale=case.scale,
            workspace=workspace,
            window=window,
        )

    want = oracle(case.query, case.keys, case.values, causal(n, 0, window), case.scale)
    assert_close(run(poisoned_workspace(run)), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1100, 5.0), (70, None)])
def test_dense_causal_across_key_blocks(
    dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    n = 1300
    case = make_case(Shape(1, 2, 192, 128, tokens=n, queries=n, dtype=dtype), seed=1)
    # Heads side by side in memory, as a model's projection leaves them.
    query, keys, values = (
        tensor.transpose(0, 1).contiguous().transpose(0, 1)
        for tensor in (case.query, case.keys, case.values)
    )
    got = dense_causal_attention(
        query,
        keys,
        values,
        scale=case.scale,
        workspace=Workspace(),
        window=window,
        softcap=softcap,
    )
    mask = causal(n, 0, window)
    want = oracle(case.query, case.keys, case.values, mask, case.scale, softcap)
    assert_close(got, want)


@pytest.mark.parametrize(("past", "n"), [(1, 1), (37, 5), (2100, 70)])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_and_new_chunk_merge_to_the_whole(
    past: int, n: int, window: int | None, dtype: torch.dtype
) -> None:
    case = make_case(Shape(2, 3, 64, 64, tokens=past, queries=n, dtype=dtype), seed=past)
    new = make_case(Shape(2, 3, 64, 64, tokens=n, queries=n, dtype=dtype), seed=past + 1)
    shown = causal(n, past, window)
    visible = None
    if window is not None:
        slots = torch.zeros(n, case.valid.shape[1] * PAGE_TOKENS, dtype=torch.bool)
        slots[:, :past] = torch.from_numpy(shown[:, :past])
        visible = slots.view(n, 1, -1, PAGE_TOKENS)
    workspace = Workspace()
    before = case.run(workspace, visible=visible)
    itself = dense_causal_attention(
        case.query, new.keys, new.values, scale=case.scale, workspace=workspace, window=window
    )
    keys = torch.cat([case.keys, new.keys], 1)
    values = torch.cat([case.values, new.values], 1)
    want = oracle(case.query, keys, values, shown, case.scale)
    assert_close(merge([before, itself]), want)
