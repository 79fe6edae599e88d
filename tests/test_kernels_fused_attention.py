"""paged_attention where every slot counts: torch's fused kernel, a chunk of pages at a time."""

import math

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.kernels import paged_attention as kernel
from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.running import Partial
from kvtier.kernels.workspace import VIEWS_MAX, Workspace
from tests.kernel_cases import (
    ALL,
    DTYPES,
    POISONS,
    Case,
    Shape,
    assert_close,
    make_case,
    oracle,
    poisoned_workspace,
)
from tests.test_kernels_paged_attention import largest_allocation_bytes

FUSED = "_scaled_dot_product_flash_attention_for_cpu"


def run(
    case: Case, workspace: Workspace, out_dtype: torch.dtype = torch.float32, **more: object
) -> Partial:
    """All slots of a case that hold a token."""
    given: dict[str, object] = {"softcap": None, "visible": None, **more}
    return kernel.paged_attention(
        case.query,
        case.pool,
        case.frames,
        case.widths,
        case.keys.shape[1] % PAGE_TOKENS or None,
        scale=case.scale,
        workspace=workspace,
        out_dtype=out_dtype,
        **given,  # type: ignore[arg-type]
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each call of the fused kernel got."""
    tokens: list[int] = []
    real = getattr(torch, FUSED)

    def counting(query: torch.Tensor, keys: torch.Tensor, *rest: object, **more: object) -> object:
        tokens.append(keys.shape[2])
        return real(query, keys, *rest, **more)

    monkeypatch.setattr(torch, FUSED, counting)
    return tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("tokens", [1, 16, 333, 1040])
def test_it_equals_the_oracle_in_any_number_of_chunks(
    tokens: int, group: int, queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN wherever no token is, and in every buffer."""
    queries = min(queries, tokens)
    case = make_case(Shape(2, group, 48, 48, tokens, queries, dtype), seed=tokens)
    want = oracle(case.query, case.keys, case.values, ALL, case.scale)
    for pages in (7, 1000):
        monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", 2 * PAGE_TOKENS * 48 * pages)
        workspace = poisoned_workspace(lambda kept: run(case, kept))
        assert_close(run(case, workspace), want)


def test_each_token_is_attended_to_once(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", 2 * PAGE_TOKENS * 64 * 8)
    run(make_case(Shape(2, 7, 64, 64, tokens=21 * PAGE_TOKENS + 5), seed=1), Workspace())
    assert len(calls) == 3
    assert sum(calls) == 21 * PAGE_TOKENS + 5


@pytest.mark.parametrize("what", ["softcap", "visible", "widths", "marks"])
def test_what_it_cannot_do_is_done_without_it(what: str, calls: list[int]) -> None:
    case = make_case(Shape(2, 4, 64, 32 if what == "widths" else 64, tokens=100), seed=2)
    if what == "softcap":
        run(case, Workspace(), softcap=2.0)
    elif what == "visible":
        run(case, Workspace(), visible=torch.ones(1, 1, 7, PAGE_TOKENS, dtype=torch.bool))
    elif what == "marks":
        case.run()
    else:
        run(case, Workspace())
    assert not calls


@pytest.mark.parametrize("poison", POISONS)
def test_slots_behind_the_last_token_do_not_change_one_bit(poison: float) -> None:
    shape = Shape(2, 7, 64, 64, tokens=2061)
    clean = run(make_case(shape, seed=5, poison=0.0), Workspace())
    dirty = run(make_case(shape, seed=5, poison=poison), Workspace())
    assert torch.equal(clean.out, dirty.out)
    assert torch.equal(clean.lse, dirty.lse)


def test_merging_early_and_blocks_of_queries_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(Shape(2, 2, 64, 64, tokens=700, queries=30), seed=4)
    whole = run(case, Workspace())
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", 2 * PAGE_TOKENS * 64 * 3)
    # Five queries at a time, and no more than two results before they are merged.
    monkeypatch.setattr(kernel, "SCORES_MAX", 2 * 2 * 128 * 5)
    assert_close(run(case, Workspace()), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_comes_in_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    case = make_case(Shape(2, 7, 64, 64, tokens=500, dtype=dtype), seed=6)
    got, exact = run(case, Workspace(), dtype), run(case, Workspace())
    assert got.out.dtype == dtype
    assert torch.equal(got.out, exact.out.to(dtype))
    assert torch.equal(got.lse, exact.lse)


def test_a_result_survives_the_next_call() -> None:
    workspace = Workspace()
    got = run(make_case(Shape(2, 4, 64, 64, tokens=100), seed=1), workspace)
    kept, lse = got.out.clone(), got.lse.clone()
    run(make_case(Shape(2, 4, 64, 64, tokens=100), seed=2), workspace)
    assert torch.equal(got.out, kept)
    assert torch.equal(got.lse, lse)


def test_a_query_that_is_no_single_piece_and_wants_a_gradient_is_only_read() -> None:
    case = make_case(Shape(2, 4, 64, 64, tokens=100, queries=3), seed=3)
    want = run(case, Workspace())
    strided = case.query.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not strided.is_contiguous()
    case = Case(strided, *[getattr(case, name) for name in Case.__slots__ if name != "query"])
    got = run(case, Workspace())
    assert not got.out.requires_grad
    assert torch.equal(got.out, want.out)


@pytest.mark.parametrize("group", [4, 7])
def test_a_query_whose_sign_is_only_noted_is_what_it_stands_for(group: int) -> None:
    """As it is, and copied beside a row that makes up a number."""
    case = make_case(Shape(2, group, 64, 64, tokens=100), seed=3)
    want = run(case, Workspace())
    rest = [getattr(case, name) for name in Case.__slots__ if name != "query"]
    noted = torch._neg_view(-case.query)
    assert noted.is_neg()
    assert torch.equal(run(Case(noted, *rest), Workspace()).out, want.out)


@pytest.mark.parametrize("frame", [-1, 10_000])
def test_a_frame_outside_of_the_pool_is_refused(frame: int) -> None:
    case = make_case(Shape(2, 4, 64, 64, tokens=100), seed=3)
    case.frames[1, 2] = frame
    with pytest.raises(ConfigError, match="frames holds indices"):
        run(case, Workspace())


def test_large_scores_stay_finite() -> None:
    case = make_case(Shape(1, 4, 64, 64, tokens=2500), seed=3)
    case.query.mul_(1000.0)
    got = run(case, Workspace())
    assert_close(got, oracle(case.query, case.keys, case.values, ALL, case.scale), 5e-3)
    assert math.isfinite(float(got.lse.max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_allocates_nothing_large(dtype: torch.dtype) -> None:
    """Torch's kernel has a block of scores of its own for each thread."""
    case = make_case(Shape(2, 7, 64, 64, tokens=4000, dtype=dtype), seed=9)
    workspace = Workspace()
    run(case, workspace)
    addresses = [buffer.data_ptr() for buffer in workspace.buffers]
    block_bytes = (128 << 10) * torch.get_num_threads()
    assert largest_allocation_bytes(lambda: run(case, workspace)) < block_bytes
    assert [buffer.data_ptr() for buffer in workspace.buffers] == addresses


def test_a_workspace_keeps_few_views() -> None:
    workspace = Workspace()
    for tokens in range(1, 2 * VIEWS_MAX):
        run(make_case(Shape(1, 1, 8, 8, tokens=tokens), seed=tokens), workspace)
        assert len(workspace._pieces) <= VIEWS_MAX
