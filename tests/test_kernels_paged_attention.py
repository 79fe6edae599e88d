"""paged_attention against the float64 oracle, on random, adversarial and poisoned input."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtier.kernels import paged_attention as kernel
from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.paged_attention import paged_attention
from kvtier.kernels.running import Partial
from kvtier.kernels.workspace import VIEWS_MAX, Workspace
from tests.kernel_cases import (
    ALL,
    DTYPES,
    POISONS,
    Shape,
    assert_close,
    make_case,
    oracle,
    poisoned_workspace,
)

SHAPES = [
    Shape(1, 1, 64, 64, tokens=1),
    Shape(2, 7, 64, 64, tokens=15),
    Shape(2, 7, 64, 64, tokens=2100),
    Shape(3, 4, 80, 80, tokens=16, queries=2),
    Shape(1, 4, 96, 96, tokens=17, queries=5),
    Shape(3, 1, 256, 256, tokens=333),
    Shape(1, 7, 192, 128, tokens=2049, queries=3),
    Shape(2, 1, 192, 128, tokens=4500, queries=2),
    Shape(2, 4, 5, 3, tokens=40, queries=9),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_equal_oracle(shape: Shape, dtype: torch.dtype) -> None:
    fields = (shape.kv_heads, shape.group, shape.key_width, shape.value_width)
    case = make_case(Shape(*fields, shape.tokens, shape.queries, dtype), seed=shape.tokens)
    want = oracle(case.query, case.keys, case.values, ALL, case.scale)
    workspace = poisoned_workspace(case.run)
    assert_close(case.run(workspace), want)


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_and_holes_equal_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = Shape(
        kv_heads=int(rng.integers(1, 4)),
        group=int(rng.choice([1, 4, 7])),
        key_width=int(rng.choice([64, 80, 96])),
        value_width=int(rng.choice([64, 80, 128])),
        tokens=int(rng.integers(1, 400)),
        queries=int(rng.integers(1, 6)),
    )
    case = make_case(shape, seed, poison=POISONS[seed % 4])
    holes = torch.from_numpy(rng.random(tuple(case.valid.shape)) < rng.choice([0.02, 0.9]))
    case.valid.logical_and_(~holes)
    hidden = ~case.valid
    for head in range(shape.kv_heads):
        for page, slot in hidden[head].nonzero().tolist():
            frame, cut = case.pool[case.frames[head, page]], PAGE_TOKENS * shape.key_width
            frame[:cut].view(PAGE_TOKENS, -1)[slot] = POISONS[(slot + seed) % 4]
            frame[cut:].view(PAGE_TOKENS, -1)[slot] = POISONS[(page + seed) % 4]
    shown = case.valid.flatten(1)[:, : shape.tokens].repeat_interleave(shape.group, 0)
    want = oracle(case.query, case.keys, case.values, shown.unsqueeze(1).numpy(), case.scale)
    assert_close(case.run(poisoned_workspace(case.run)), want)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_invalid_slots_do_not_change_one_bit(dtype: torch.dtype, poison: float) -> None:
    """A104."""
    shape = Shape(2, 7, 64, 64, tokens=2061, queries=2, dtype=dtype)
    clean = make_case(shape, seed=5, poison=0.0).run()
    dirty = make_case(shape, seed=5, poison=poison).run()
    assert torch.equal(clean.out, dirty.out)
    assert torch.equal(clean.lse, dirty.lse)


def test_valid_none_counts_every_slot() -> None:
    case = make_case(Shape(2, 4, 64, 64, tokens=320, queries=2), seed=2)
    got = paged_attention(
        case.query, case.pool, case.frames, (64, 64), scale=case.scale, workspace=Workspace()
    )
    assert_close(got, oracle(case.query, case.keys, case.values, ALL, case.scale))


def test_head_without_visible_slots_is_zero_and_the_other_is_exact() -> None:
    case = make_case(Shape(2, 4, 64, 64, tokens=40, queries=3), seed=8)
    want = case.run()
    case.valid[1] = False
    got = case.run(poisoned_workspace(case.run))
    assert torch.equal(got.out[:4], want.out[:4])
    assert torch.count_nonzero(got.out[4:]) == 0
    assert bool((got.lse[4:] == -math.inf).all())


@pytest.mark.parametrize("last", [0, 1, 3, 127, 128, 129, 200])
def test_valid_of_the_last_pages_is_that_of_all(last: int) -> None:
    """Across chunks of pages; those before them all count."""
    case = make_case(Shape(2, 4, 64, 64, tokens=200 * PAGE_TOKENS, queries=2), seed=last)
    random = torch.Generator().manual_seed(last)
    case.valid.fill_(True)
    if last:
        case.valid[:, -last:] = torch.rand(2, last, PAGE_TOKENS, generator=random) < 0.7
    want = case.run()
    got = paged_attention(
        case.query,
        case.pool,
        case.frames,
        case.widths,
        case.valid[:, 200 - last :],
        scale=case.scale,
        workspace=Workspace(),
    )
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("lie", ["run", "runs", "scattered", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wherever_pages_lie_the_result_is_the_oracles(
    dtype: torch.dtype, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks of several spans, with an end within a page; NaN wherever no token is."""
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", 2 * PAGE_TOKENS * 64 * 24)
    monkeypatch.setattr(kernel, "SPAN_PAGES", 50)
    monkeypatch.setattr(kernel, "SCORES_MAX", 2 * 8 * PAGE_TOKENS * 50)
    shape = Shape(2, 7, 64, 64, tokens=131 * PAGE_TOKENS + 5, dtype=dtype)
    case = make_case(shape, seed=3)
    pages = case.frames.shape[1]
    random = torch.Generator().manual_seed(1)
    by_page = torch.arange(2 * pages).view(-1, 2, 33).transpose(0, 1).reshape(2, -1)
    frames = {
        "run": torch.arange(2 * pages).view(2, pages),
        "runs": by_page,
        "scattered": torch.randperm(2 * pages, generator=random).view(2, pages),
        "mixed": torch.cat([by_page[:, :70], by_page[:, 70:].flip(1)], 1),
    }[lie]
    pool = torch.full((2 * pages + 3, case.pool.shape[1]), math.nan).to(dtype)
    pool[frames.reshape(-1)] = case.pool[case.frames.reshape(-1)]

    def run(workspace: Workspace, valid: torch.Tensor | int = 5) -> Partial:
        return paged_attention(
            case.query, pool, frames, (64, 64), valid, scale=case.scale, workspace=workspace
        )

    want = oracle(case.query, case.keys, case.values, ALL, case.scale)
    got = run(poisoned_workspace(run))
    assert_close(got, want)
    assert_close(run(poisoned_workspace(run), case.valid), want)


@pytest.mark.parametrize("last", range(1, 17))
@pytest.mark.parametrize("queries", [1, 3])
def test_a_number_of_slots_is_as_good_as_marks(last: int, queries: int) -> None:
    case = make_case(Shape(2, 3, 64, 80, tokens=160 + last, queries=queries), seed=last)
    seen = torch.rand(queries, 1, 11, PAGE_TOKENS, generator=torch.Generator().manual_seed(1)) < 0.8
    for visible in (None, seen):
        want = case.run(visible=visible)
        got = paged_attention(
            case.query,
            case.pool,
            case.frames,
            case.widths,
            last,
            scale=case.scale,
            workspace=Workspace(),
            visible=visible,
        )
        assert_close(got, Partial(want.out.double(), want.lse.double()), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 500])
def test_the_result_comes_in_the_dtype_that_is_asked_for(dtype: torch.dtype, tokens: int) -> None:
    case = make_case(Shape(2, 7, 64, 64, tokens=500, queries=2, dtype=dtype), seed=6)
    pages = -(-tokens // PAGE_TOKENS)

    def run(out_dtype: torch.dtype) -> Partial:
        return paged_attention(
            case.query,
            case.pool,
            case.frames[:, :pages],
            case.widths,
            case.valid[:, :pages],
            scale=case.scale,
            workspace=Workspace(),
            out_dtype=out_dtype,
        )

    got, exact = run(dtype), run(torch.float32)
    assert got.out.dtype == dtype
    assert torch.equal(got.out, exact.out.to(dtype))
    assert torch.equal(got.lse, exact.lse)


@pytest.mark.parametrize("group", range(1, 10))
def test_rows_that_make_up_a_number_touch_no_result(group: int) -> None:
    """One workspace for all: what an earlier call left in such rows is NaN or another's."""
    workspace = Workspace()
    for queries in (1, 2, 3):
        case = make_case(Shape(2, group, 64, 64, tokens=60, queries=queries), seed=group)
        case.run(workspace)
        for buffer in workspace.buffers:
            if buffer.dtype.is_floating_point:
                buffer.fill_(math.nan)
        want = oracle(case.query, case.keys, case.values, ALL, case.scale)
        assert_close(case.run(workspace), want)


@pytest.mark.parametrize("pages", [0, 130])
def test_nothing_visible_at_all_is_zero(pages: int) -> None:
    """A105."""
    case = make_case(Shape(2, 4, 64, 64, tokens=130 * PAGE_TOKENS), seed=8)
    case.valid.fill_(False)
    got = paged_attention(
        case.query,
        case.pool,
        case.frames[:, :pages],
        case.widths,
        case.valid[:, :pages],
        scale=case.scale,
        workspace=poisoned_workspace(case.run),
    )
    assert torch.count_nonzero(got.out) == 0
    assert bool((got.lse == -math.inf).all())


@pytest.mark.parametrize("per_head", [False, True])
def test_visible_hides_slots_from_single_queries(
    per_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small blocks, so that the queries are processed in several of them.
    monkeypatch.setattr(kernel, "SCORES_MAX", 2 * 4 * 2048 * 3)
    shape = Shape(2, 4, 64, 80, tokens=2500, queries=7)
    case = make_case(shape, seed=11)
    rng = np.random.default_rng(11)
    slots = case.valid.shape[1] * PAGE_TOKENS
    seen = torch.from_numpy(rng.random((7, 2 if per_head else 1, slots)) < 0.5)
    seen[3] = False
    seen[:, :, 100:300] = False
    shown = seen[:, :, : shape.tokens].expand(7, 2, -1).transpose(0, 1).repeat_interleave(4, 0)
    want = oracle(case.query, case.keys, case.values, shown.numpy(), case.scale)
    visible = seen.view(7, -1, slots // PAGE_TOKENS, PAGE_TOKENS)
    got = case.run(
        poisoned_workspace(lambda kept: case.run(kept, visible=visible)), visible=visible
    )
    assert_close(got, want)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap_equals_oracle(softcap: float) -> None:
    case = make_case(Shape(2, 2, 96, 96, tokens=77, queries=4), seed=21)
    want = oracle(case.query, case.keys, case.values, ALL, case.scale, softcap)
    assert_close(case.run(softcap=softcap), want)
    assert not torch.allclose(case.run().out.double(), want.out, atol=1e-4)


def test_large_scores_stay_finite() -> None:
    case = make_case(Shape(1, 4, 64, 64, tokens=2500), seed=3)
    case.query.mul_(1000.0)
    got = case.run()
    want = oracle(case.query, case.keys, case.values, ALL, case.scale)
    # Scores near 3e3 are themselves rounded to about 2e-4 in float32.
    assert_close(got, want, tolerance=5e-3)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(Shape(2, 2, 64, 64, tokens=500, queries=50), seed=4)
    whole = case.run()
    monkeypatch.setattr(kernel, "SCORES_MAX", 2 * 2 * 512 * 7)
    workspace = Workspace()
    assert_close(case.run(workspace), whole)
    assert max(buffer.numel() for buffer in workspace.buffers) <= 2 * 512 * 64


def test_many_kv_heads_stay_inside_the_stated_bytes() -> None:
    case = make_case(Shape(64, 1, 16, 16, tokens=640), seed=4)
    workspace = Workspace()
    got = case.run(workspace)
    assert_close(got, oracle(case.query, case.keys, case.values, ALL, case.scale))
    sizes = sorted(buffer.numel() for buffer in workspace.buffers)
    assert sizes[-1] <= kernel.CHUNK_ELEMENTS


def test_a_result_survives_the_next_call() -> None:
    workspace = Workspace()
    first = make_case(Shape(2, 4, 64, 64, tokens=100), seed=1)
    got = first.run(workspace)
    kept = got.out.clone()
    make_case(Shape(2, 4, 64, 64, tokens=100), seed=2).run(workspace)
    assert torch.equal(got.out, kept)


def test_a_workspace_warmed_under_inference_mode_serves_outside_of_it() -> None:
    case = make_case(Shape(2, 4, 64, 64, tokens=100), seed=1)
    workspace = Workspace()
    with torch.inference_mode():
        want = case.run(workspace)
    case.query.requires_grad_()
    assert torch.equal(case.run(workspace).out, want.out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_allocates_nothing_large(dtype: torch.dtype) -> None:
    case = make_case(Shape(2, 7, 64, 64, tokens=4000, dtype=dtype), seed=9)
    workspace = Workspace()
    case.run(workspace)
    addresses = [buffer.data_ptr() for buffer in workspace.buffers]
    assert largest_allocation_bytes(lambda: case.run(Workspace())) >= 1 << 20
    assert largest_allocation_bytes(lambda: case.run(workspace)) < 64 << 10
    assert [buffer.data_ptr() for buffer in workspace.buffers] == addresses


def largest_allocation_bytes(call: Callable[[], object]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    return max(int(event.self_cpu_memory_usage) for event in profile.events())


def test_a_workspace_keeps_few_views() -> None:
    """A context that grows makes new ones with every token."""
    workspace = Workspace()
    for tokens in range(1, 3 * VIEWS_MAX):
        make_case(Shape(1, tokens % 40 + 1, 8, 8, tokens=tokens), seed=tokens).run(workspace)
        assert len(workspace._spans) <= VIEWS_MAX
        assert len(workspace._rows) <= VIEWS_MAX


def test_a_growing_context_reallocates_rarely() -> None:
    workspace = Workspace()
    addresses = set()
    for tokens in range(16, 1600, 16):
        make_case(Shape(1, 1, 8, 8, tokens=tokens), seed=tokens).run(workspace)
        addresses.add(tuple(buffer.data_ptr() for buffer in workspace.buffers))
    assert len(addresses) <= 9
