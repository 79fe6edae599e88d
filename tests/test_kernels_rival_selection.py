"""Selectors of kvtier and of others, on the same pages and the same budget."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.digests import LayerDigests, page_digests
from kvtier.kernels.paged_attention import merge
from kvtier.kernels.rival_selection import (
    AccumulatedSelector,
    BoundSelector,
    DigestSelector,
    OracleSelector,
    Selector,
    Terms,
    WindowSelector,
    true_mass,
)
from tests.digest_cases import (
    SEEDS,
    Context,
    clustered,
    everything,
    exact,
    gaussian,
    log_sums,
    numpy_scores,
)

PAGE_BYTES = 4096


def terms(context: Context) -> Terms:
    pages = everything(context).shape[1]
    always = torch.zeros(pages, dtype=torch.bool)
    always[0] = always[-1] = True
    return Terms(torch.full((pages,), PAGE_BYTES), always, context.scale)


def digests(context: Context) -> LayerDigests:
    found = LayerDigests(2, (64, 64), (3, 0))
    found.add(page_digests(context.keys, context.values, 3, 0))
    return found


def selectors(context: Context) -> dict[str, Selector]:
    rule, own = terms(context), digests(context)
    accumulated = AccumulatedSelector(2, rule)
    accumulated.observe(true_mass(context.query, context.keys, context.scale))
    return {
        "means": DigestSelector(own, rule),
        "sketch": DigestSelector(own, rule, refined=1.0),
        "window": WindowSelector(2, rule),
        "accumulated": accumulated,
        "bound": BoundSelector(context.keys, rule),
        "oracle": OracleSelector(context.keys, rule),
    }


def covered(context: Context, chosen: Tensor) -> float:
    mass = true_mass(context.query, context.keys, context.scale).softmax(1).view(2, 3, -1)
    return float((mass * chosen.unsqueeze(1)).sum(2).mean())


@pytest.mark.parametrize("seed", SEEDS)
def test_all_keep_the_budget_and_the_oracle_covers_most(seed: int) -> None:
    context = clustered(seed, tokens=1000)
    found = {
        name: selector.select(context.query, 8 * PAGE_BYTES)
        for name, selector in selectors(context).items()
    }
    best = covered(context, found["oracle"].chosen)
    for selection in found.values():
        assert selection.chosen.sum(1).tolist() == [8, 8]
        assert selection.chosen[:, 0].all()
        assert selection.chosen[:, -1].all()
        assert covered(context, selection.chosen) <= best + 1e-5
    assert covered(context, found["window"].chosen) < 0.5 * best
    assert covered(context, found["sketch"].chosen) > 0.9 * best


def test_true_mass() -> None:
    context = gaussian(4, tokens=100)
    want = log_sums(numpy_scores(context))
    got = true_mass(context.query, context.keys, context.scale)
    np.testing.assert_allclose(got.numpy(), want, atol=1e-4)
    with pytest.raises(ConfigError, match="query"):
        true_mass(torch.zeros(3, 64), context.keys, 1.0)


def test_window_takes_the_last_pages() -> None:
    context = gaussian(0, tokens=200)
    chosen = selectors(context)["window"].select(context.query, 5 * PAGE_BYTES).chosen
    assert chosen[0].nonzero().view(-1).tolist() == [0, 9, 10, 11, 12]


def test_bounds_are_bounds() -> None:
    """The page with the greatest bound is taken, by hand for one query head."""
    context = gaussian(2, tokens=150, group=1)
    keys, query = context.keys[0], context.query[0]
    bounds = [
        sum(
            max(float(query[i] * page[:, i].min()), float(query[i] * page[:, i].max()))
            for i in range(64)
        )
        for page in (keys[first : first + 16] for first in range(0, 150, 16))
    ]
    order = sorted(range(1, 9), key=lambda page: -bounds[page])
    chosen = selectors(context)["bound"].select(context.query, 4 * PAGE_BYTES).chosen
    assert chosen[0].nonzero().view(-1).tolist() == sorted([0, 9, *order[:2]])


def test_accumulated_mass_does_not_ask_the_query() -> None:
    context, other = clustered(0, tokens=1000), clustered(9, tokens=1000)
    selector = selectors(context)["accumulated"]
    before = selector.select(context.query, 8 * PAGE_BYTES).chosen
    assert torch.equal(before, selector.select(other.query, 8 * PAGE_BYTES).chosen)
    oracle = selectors(context)["oracle"].select(context.query, 8 * PAGE_BYTES).chosen
    assert torch.equal(before, oracle)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_with_an_estimate_do_unread_pages_count(seed: int) -> None:
    context = clustered(seed, tokens=1000)
    rule, own = terms(context), digests(context)
    full = exact(context, everything(context)).out
    without = DigestSelector(own, rule, 1.0, estimate=False).select(context.query, 8 * PAGE_BYTES)
    selection = DigestSelector(own, rule, 1.0).select(context.query, 8 * PAGE_BYTES)
    assert without.unread is None
    assert torch.equal(without.chosen, selection.chosen)
    assert selection.unread is not None
    read = exact(context, selection.chosen)
    both = merge([read, selection.unread])
    assert (both.out - full).norm() < 0.6 * (read.out - full).norm()
