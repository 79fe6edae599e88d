"""Choosing pages within a budget, and what stands for those not read."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.digests import LayerDigests, page_digests
from kvtier.kernels.page_mass import page_mass
from kvtier.kernels.paged_attention import merge
from kvtier.kernels.running import Partial
from kvtier.kernels.selection import (
    PageShares,
    group_mass,
    page_lists,
    page_shares,
    top_pages,
    unread_partial,
)
from kvtier.kernels.workspace import Workspace
from tests.digest_cases import SEEDS, Context, clustered, everything, exact


def greedy(mass: Tensor, sizes: Tensor, budget: int, always: Tensor) -> list[list[bool]]:
    """One head and one page at a time."""
    chosen = always.tolist()
    for head, row in enumerate(chosen):
        left = budget - sum(
            size for size, taken in zip(sizes[head].tolist(), row, strict=True) if taken
        )
        worth = (mass[head] / sizes[head]).tolist()
        for page in sorted(range(len(row)), key=lambda page: (-worth[page], page)):
            if row[page]:
                continue
            left -= int(sizes[head, page])
            if left < 0:
                break
            row[page] = True
    return chosen


@pytest.mark.parametrize("pages", [1, 2, 7, 300])
@pytest.mark.parametrize("seed", SEEDS)
def test_choice_is_greedy_by_mass_per_byte(pages: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand((3, pages), generator=generator)
    # Some masses are equal, some 0.
    mass = (mass * 20).round() / 20
    sizes = torch.randint(1, 5, (3, pages), generator=generator) * 512
    always = torch.rand((3, pages), generator=generator) < 0.1
    for budget in (0, 1, 512, 3000, int(sizes.sum())):
        chosen = top_pages(mass, sizes, budget, always)
        assert chosen.tolist() == greedy(mass, sizes, budget, always)
        read = (chosen * sizes).sum(1)
        least = (always * sizes).sum(1)
        assert (read <= torch.maximum(least, torch.tensor(budget))).all()
        assert (chosen | ~always).all()


def test_budget_of_everything_is_everything() -> None:
    sizes = torch.tensor([4096] * 9 + [256])
    mass, always = torch.zeros(2, 10), torch.zeros(10, dtype=torch.bool)
    assert top_pages(mass, sizes, int(sizes.sum()), always).all()
    assert top_pages(mass, sizes, int(sizes.sum()) - 1, always).sum(1).tolist() == [9, 9]


def test_sinks_and_recent_pages_count_within_the_budget() -> None:
    mass = torch.tensor([[0.0, 0.5, 0.3, 0.2, 0.0]])
    sizes = torch.full((5,), 100)
    always = torch.tensor([True, False, False, False, True])
    expected = {
        0: [0, 4],
        150: [0, 4],
        299: [0, 4],
        300: [0, 1, 4],
        450: [0, 1, 2, 4],
        500: [0, 1, 2, 3, 4],
    }
    for budget, pages in expected.items():
        chosen = top_pages(mass, sizes, budget, always)
        assert chosen[0].nonzero().view(-1).tolist() == pages


def test_equal_pages_are_taken_by_their_index() -> None:
    chosen = top_pages(
        torch.ones(1, 1000), torch.ones(1000, dtype=torch.int64), 10, torch.zeros(1000).bool()
    )
    assert chosen[0].nonzero().view(-1).tolist() == list(range(10))


def test_group_mass() -> None:
    log_mass = torch.randn(6, 9) * 3 + torch.tensor([[500.0], [0], [-500], [1], [2], [3]])
    got = group_mass(page_shares(log_mass), 3)
    shifted = log_mass.double().numpy()
    shifted = np.exp(shifted - shifted.max(1, keepdims=True))
    want = (shifted / shifted.sum(1, keepdims=True)).reshape(2, 3, 9).sum(1)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-30)
    assert group_mass(page_shares(torch.empty(6, 0)), 3).shape == (2, 0)


@pytest.mark.parametrize("pages", [0, 1, 40])
def test_page_lists(pages: int) -> None:
    chosen = torch.rand((3, pages), generator=torch.Generator().manual_seed(pages)) < 0.3
    if pages:
        chosen[1] = False
    lists, counts = page_lists(chosen)
    assert counts.tolist() == chosen.sum(1).tolist()
    assert lists.shape == (3, max(counts.tolist()))
    for head, count in enumerate(counts.tolist()):
        assert lists[head, :count].tolist() == chosen[head].nonzero().view(-1).tolist()
        assert not lists[head, count:].any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("as_int8", [False, True])
def test_unread_pages_are_one_token_each(seed: int, as_int8: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_mass = torch.randn((6, 30), generator=generator) * 4 + 300
    values = torch.randn((2, 30, 8), generator=generator)
    factors = None
    if as_int8:
        values = (values * 40).to(torch.int8)
        factors = torch.rand((2, 30), generator=generator)
    unread = torch.rand((2, 30), generator=generator) < 0.6
    got = unread_partial(page_shares(log_mass), values, factors, unread, Workspace())
    means = values.double() if factors is None else values * factors.double().unsqueeze(2)
    for head in range(6):
        seen = unread[head // 3]
        mass = log_mass[head, seen].double()
        torch.testing.assert_close(got.lse[head, 0].double(), mass.logsumexp(0), atol=1e-4, rtol=0)
        want = mass.softmax(0) @ means[head // 3, seen]
        torch.testing.assert_close(got.out[head, 0].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pages", [0, 5])
def test_nothing_unread_is_nothing(pages: int) -> None:
    got = unread_partial(
        page_shares(torch.zeros(4, pages)),
        torch.ones(2, pages, 8),
        None,
        torch.zeros((2, pages), dtype=torch.bool),
        Workspace(),
    )
    assert torch.equal(got.out, torch.zeros(4, 1, 8))
    assert (got.lse == -math.inf).all()
    whole = Partial(torch.ones(4, 1, 8), torch.zeros(4, 1))
    assert torch.equal(merge([whole, got]).out, whole.out)


def error(context: Context, refined: float, estimate: bool, share: float = 0.125) -> float:
    """Of the output, relative, when a share of the bytes is read."""
    digests, workspace = LayerDigests(2, (64, 64), (3, 0)), Workspace()
    for first in range(0, context.keys.shape[1], 512):
        part = slice(first, first + 512)
        digests.add(page_digests(context.keys[:, part], context.values[:, part], 3, 0))
    masses = page_mass(
        context.query, digests, scale=context.scale, workspace=workspace, refined=refined
    )
    sizes = torch.full((digests.pages,), 4096)
    always = torch.zeros(digests.pages, dtype=torch.bool)
    always[0] = always[-4:] = True
    budget = int(share * digests.pages) * 4096
    chosen = top_pages(group_mass(page_shares(masses), context.group), sizes, budget, always)
    found = exact(context, chosen)
    if estimate:
        means, factors = digests.array("value_means"), digests.array("value_factors")
        found = merge(
            [found, unread_partial(page_shares(masses), means, factors, ~chosen, workspace)]
        )
    full = exact(context, everything(context))
    return float((found.out - full.out).norm() / full.out.norm())


@pytest.mark.parametrize("seed", SEEDS)
def test_estimate_by_sketch_brings_an_eighth_near_to_everything(seed: int) -> None:
    context = clustered(seed)
    with_estimate = error(context, 1.0, True)
    assert with_estimate < 0.12
    assert with_estimate < 0.6 * error(context, 1.0, False)
    assert with_estimate < 0.6 * error(context, 0.0, True)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"mass": torch.zeros(5)}, "mass"),
        ({"mass": torch.zeros((2, 5), dtype=torch.int64)}, "mass"),
        ({"page_bytes": torch.ones(4, dtype=torch.int64)}, "page_bytes"),
        ({"page_bytes": torch.ones(5)}, "page_bytes"),
        ({"page_bytes": torch.zeros(5, dtype=torch.int64)}, "page_bytes"),
        ({"budget_bytes": -1}, "budget_bytes"),
        ({"always": torch.zeros(5)}, "always"),
        ({"always": torch.zeros((3, 5), dtype=torch.bool)}, "always"),
    ],
)
def test_wrong_arguments_of_top_pages(change: dict[str, object], name: str) -> None:
    arguments: dict[str, object] = {
        "mass": torch.zeros(2, 5),
        "page_bytes": torch.ones(5, dtype=torch.int64),
        "budget_bytes": 3,
        "always": torch.zeros(5, dtype=torch.bool),
    }
    with pytest.raises(ConfigError, match=name):
        top_pages(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"shares": PageShares(torch.zeros(3, 5), torch.zeros(3))}, "shares"),
        ({"shares": PageShares(torch.zeros(4, 6), torch.zeros(4))}, "shares"),
        ({"value_means": torch.zeros(2, 6, 8)}, "value_means"),
        ({"value_factors": torch.zeros(2, 6)}, "value_factors"),
        ({"unread": torch.zeros(2, 5)}, "unread"),
    ],
)
def test_wrong_arguments_of_unread_partial(change: dict[str, object], name: str) -> None:
    arguments: dict[str, object] = {
        "shares": page_shares(torch.zeros(4, 5)),
        "value_means": torch.zeros(2, 5, 8),
        "value_factors": None,
        "unread": torch.zeros((2, 5), dtype=torch.bool),
        "workspace": Workspace(),
    }
    with pytest.raises(ConfigError, match=name):
        unread_partial(**(arguments | change))  # type: ignore[arg-type]


def test_wrong_arguments_of_the_others() -> None:
    with pytest.raises(ConfigError, match="group"):
        group_mass(page_shares(torch.zeros(4, 5)), 3)
    with pytest.raises(ConfigError, match="log_mass"):
        page_shares(torch.zeros(5))
    with pytest.raises(ConfigError, match="chosen"):
        page_lists(torch.zeros(2, 5))
