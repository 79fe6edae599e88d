"""bench/decode.py: contexts that are made longer, what is counted, and what is compared."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.decode import AMPLIFICATION, REPLAYED, Found, in_turns, per_page, ratio, spread
from bench.decode_context import RUN_TOKENS, TAIL_TOKENS, Context, Layer, drawn, turned
from bench.decode_replay import (
    BUDGET,
    FORMS,
    Contexts,
    Counts,
    Plain,
    are_identical,
    largest_difference,
    nothing_ahead,
)
from kvtier.kernels.rotary import Rotary, unrotated

ROTARY = Rotary((1.0, 0.3, 0.05, 0.01), scaling=1.2)
HEADS, WIDTH, STEPS = 2, 8, 5


def a_context(tokens: int = 512 + TAIL_TOKENS, layers: int = 2) -> Context:
    chance = torch.Generator().manual_seed(1)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn((*shape, WIDTH), generator=chance)

    made = [
        Layer(rows(HEADS, tokens), rows(HEADS, tokens), 3 * rows(STEPS, 2 * HEADS))
        for _ in range(layers)
    ]
    return Context(np.arange(tokens + STEPS), made, [ROTARY] * layers)


@pytest.mark.parametrize("tokens", [1000, 1001])
def test_drawn_in_runs_between_the_first_page_and_the_last_tokens(tokens: int) -> None:
    found = drawn(300, tokens, torch.Generator().manual_seed(1)).tolist()
    assert len(found) == tokens
    assert found[:16] == list(range(16))
    assert found[-TAIL_TOKENS:] == list(range(300 - TAIL_TOKENS, 300))
    middle = found[16:-TAIL_TOKENS]
    assert min(middle) >= 16
    assert max(middle) < 300 - TAIL_TOKENS
    for first in range(0, len(middle), RUN_TOKENS):
        run = middle[first : first + RUN_TOKENS]
        assert run == list(range(run[0], run[0] + len(run)))


def test_turned_is_undone_by_unrotated() -> None:
    rows, positions = torch.randn(3, 40, WIDTH), torch.arange(7, 47)
    back = unrotated(turned(rows, positions, ROTARY), positions, ROTARY)
    torch.testing.assert_close(back, rows, atol=1e-5, rtol=1e-5)


def test_a_longer_context_has_the_same_scores_where_tokens_stayed() -> None:
    context = a_context()
    longer = context.lengthened(1024 + TAIL_TOKENS)
    assert (longer.tokens, longer.steps) == (1024 + TAIL_TOKENS, STEPS)
    assert len(longer.ids) == longer.tokens + STEPS
    for before, after in zip(context.layers, longer.layers, strict=True):
        # The last tokens are as far from the queries as they were.
        scores = [
            torch.einsum("sgd,nd->sgn", each.queries[:, :2], each.keys[0, -TAIL_TOKENS:])
            for each in (before, after)
        ]
        torch.testing.assert_close(scores[1], scores[0], atol=2e-3, rtol=1e-3)
        assert torch.equal(after.values[:, :16], before.values[:, :16])
        assert float(after.values.std()) == pytest.approx(float(before.values.std()), rel=0.1)


def test_a_context_is_kept(tmp_path: Path) -> None:
    context = a_context()
    context.save(tmp_path / "a.npz")
    found = Context.load(tmp_path / "a.npz", context.rotaries)
    assert np.array_equal(found.ids, context.ids)
    for one, other in zip(found.layers, context.layers, strict=True):
        assert all(
            torch.equal(getattr(one, each), getattr(other, each)) for each in Layer.__slots__
        )
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_figures() -> None:
    assert ratio([2.0, 6.0, 8.0], [1.0, 2.0, 2.0]) == 3.0
    assert per_page([Counts(9, 4, 1, 100, 100), Counts(9, 4, 3, 100, 150)]) == (0.5, 1.25)
    assert per_page([Counts(9, 0, 0, 0, 0)]) == (0.0, 0.0)
    assert spread(24, 4) == [0, 8, 15, 23]
    found = Found()
    assert found.worst(REPLAYED) is None
    for value in (0.5, 0.7):
        found.add(REPLAYED, value)
        found.add(AMPLIFICATION, value)
    assert found.worst(REPLAYED) == 0.5
    assert found.worst(AMPLIFICATION) == 0.7


def test_all_take_the_same_steps() -> None:
    asked: dict[str, list[int]] = {"a": [], "b": []}

    def step(name: str, number: int) -> float:
        asked[name].append(number)
        return float(number)

    took = in_turns({name: partial(step, name) for name in asked}, 4)
    assert took["a"] == took["b"] == [20.0, 21.0, 22.0, 23.0]
    assert asked["a"] == asked["b"] == list(range(24))


@pytest.mark.parametrize("form", FORMS)
def test_a_budget_of_one_is_full_attention(form: str, tmp_path: Path) -> None:
    context = a_context()
    with ExitStack() as stack:
        dram = Contexts(tmp_path, context, stack).resident("dram", 1.2)
        plain = Plain(context, torch.float32, form)
        assert largest_difference(dram, plain.attend, 1.0) < 5e-3
        assert largest_difference(dram, plain.attend, BUDGET) > 5e-3


def test_from_the_drive_as_from_memory(tmp_path: Path) -> None:
    context = a_context(2048 + TAIL_TOKENS)
    with ExitStack() as stack:
        contexts = Contexts(tmp_path, context, stack)
        dram, nvme = contexts.resident("dram", 1.2), contexts.resident("nvme", 0.4)
        nvme.step(0, BUDGET)
        nvme.go_cold()
        with nothing_ahead(nvme.store):
            counts = nvme.counted(partial(nvme.step, 1, BUDGET))
        assert counts.missed == counts.wanted == 2 * HEADS * round(BUDGET * 128)
        assert 0 < counts.reads <= counts.missed
        assert counts.bytes_wanted == counts.missed * 16 * 2 * WIDTH * 2 <= counts.bytes_read
        assert are_identical(dram, nvme, BUDGET, range(STEPS))
        assert dram.counted(partial(dram.step, 1, BUDGET)).reads == 0
        assert nvme.digest_bytes() == dram.digest_bytes() > 0
        found = nvme.store.stats()
        assert (found.digests_read, found.digests_made) == (2 * 4, 0), "of 4 Segments in 2 layers"
        assert dram.select(0) > 0
        before = nvme.counters.pages_ahead
        nvme.go_cold()
        nvme.step(2, BUDGET)
        assert nvme.counters.pages_ahead > before
