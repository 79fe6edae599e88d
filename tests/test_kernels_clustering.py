"""Orders by similar keys: permutations, planted clusters, and a slow plain twin to compare with."""

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels import clustering
from kvtier.kernels.clustering import balanced_order, balanced_ordering, to_end

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
COUNTS = (1, 2, 15, 16, 17, 31, 32, 33, 100, 511, 512, 700)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations: on a busy machine threads would wait for each other all the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def texture(sets: int, tokens: int, width: int, seed: int) -> Tensor:
    """Keys as models have them, roughly: a common offset, a few strong dimensions, groups of all
    sizes, some drift along the text."""
    random = np.random.default_rng(seed)
    strength = np.exp(random.standard_normal(width))
    centres = random.standard_normal((sets, 40, width))
    share = random.dirichlet(np.full(40, 0.5), sets)
    owner = np.stack([random.choice(40, tokens, p=each) for each in share])
    keys = np.take_along_axis(centres, owner[..., None], 1)
    keys = keys + 0.6 * random.standard_normal((sets, tokens, width))
    keys += np.linspace(0, 0.5, tokens)[:, None]
    return torch.from_numpy(keys * strength + 3 * strength).to(torch.float32)


def blobs(sets: int, pages: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys in groups of 16 far from each other, in an order at random, and the group of each."""
    random = torch.Generator().manual_seed(seed)
    owner = torch.stack([torch.randperm(pages * 16, generator=random) // 16 for _ in range(sets)])
    centres = torch.randn(sets, pages, width, generator=random) * 5
    keys = centres.gather(1, owner[..., None].expand(-1, -1, width))
    return keys + 0.1 * torch.randn(keys.shape, generator=random), owner


def assert_permutations(order: Tensor, keys: Tensor) -> None:
    assert order.dtype == torch.int64
    assert order.shape == keys.shape[:2]
    assert torch.equal(order.sort(1).values, torch.arange(keys.shape[1]).expand(order.shape))


def within_pages(keys: Tensor, order: Tensor, page: int = 16) -> float:
    """Squared distance of tokens to the mean of their page, over all sets."""
    return sum(
        float(((part := one[where].double()) - part.mean(0)).square().sum())
        for one, each in zip(keys, order, strict=True)
        for where in each.split(page)
    )


# ---- a plain twin: one set, one node, one pair at a time, in float64 -------------------------


def twin_order(keys: Floats) -> Indices:
    pages = twin_tree(keys, np.arange(len(keys)))
    full = [each for each in pages if len(each) == 16]
    for first in range(len(full)):
        for second in range(first + 1, len(full)):
            both = np.concatenate([full[first], full[second]])
            for _ in range(2):
                along = keys[both] @ (keys[both[16:]].mean(0) - keys[both[:16]].mean(0))
                both = both[np.argsort(along, kind="stable")]
            full[first], full[second] = both[:16], both[16:]
    return np.concatenate([*full, *(each for each in pages if len(each) < 16)])


def twin_tree(keys: Floats, tokens: Indices) -> list[Indices]:
    if len(tokens) <= 16:
        return [tokens]
    rows = keys[tokens] - keys[tokens].mean(0)
    upper = rows @ np.linalg.svd(rows, full_matrices=False)[2][0] > 0
    for _ in range(8):
        upper_mean, lower_mean = rows[upper].mean(0), rows[~upper].mean(0)
        along = rows @ (upper_mean - lower_mean)
        upper = along > (upper_mean + lower_mean) @ (upper_mean - lower_mean) / 2
    pages = -(-len(tokens) // 16)
    cut = 16 * min(max(1, round(int((~upper).sum()) / 16)), pages - 1)
    tokens = tokens[np.argsort(along, kind="stable")]
    return [*twin_tree(keys, tokens[:cut]), *twin_tree(keys, tokens[cut:])]


# ---- balanced_order --------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", COUNTS)
def test_is_a_permutation_for_any_count(tokens: int) -> None:
    keys = texture(3, tokens, 24, tokens)
    assert_permutations(balanced_order(keys), keys)
    assert_permutations(balanced_order(keys, 4), keys)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens", [512, 500])
def test_is_as_close_as_a_slow_plain_search(seed: int, tokens: int) -> None:
    keys = texture(2, tokens, 32, seed)
    got = within_pages(keys, balanced_order(keys))
    twin = torch.from_numpy(np.stack([twin_order(one) for one in keys.double().numpy()]))
    assert got < 1.02 * within_pages(keys, twin)
    shuffled = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)).expand(2, -1)
    positions = torch.arange(tokens).expand(2, -1)
    assert got < 0.7 * within_pages(keys, positions)
    assert got < 0.7 * within_pages(keys, shuffled)


@pytest.mark.parametrize("width", [2, 64, 300])
@pytest.mark.parametrize("pages", [2, 3, 20, 32])
def test_planted_groups_become_pages(width: int, pages: int) -> None:
    keys, owner = blobs(3, pages, width, pages)
    by_page = owner.gather(1, balanced_order(keys)).view(3, pages, 16)
    alike = (by_page == by_page[..., :1]).all(-1)
    # In a plane some of many groups lie in each other.
    assert bool(alike.all()) or (width == 2 and pages >= 20)


def test_a_short_last_page_takes_part_in_the_exchange() -> None:
    keys, owner = blobs(4, 12, 16, 1)
    keys, owner = keys[:, :-9], owner[:, :-9]
    order = balanced_order(keys)
    # As long as groups were cut, pages cannot be groups; but only few can be of several.
    by_page = owner.gather(1, order)[:, : 11 * 16].view(4, 11, 16)
    assert int((by_page != by_page.mode(-1, keepdim=True).values).sum()) < 4 * 9 * 4
    assert within_pages(keys, order) < 0.3 * within_pages(keys, torch.arange(183).expand(4, -1))


def test_neighbours_on_the_drive_are_alike() -> None:
    keys = texture(4, 512, 32, 9)
    means = keys.gather(1, balanced_order(keys)[..., None].expand(-1, -1, 32))
    means = means.view(4, 32, 16, 32).mean(2)
    distance = torch.cdist(means, means)
    beside = distance.diagonal(1, 1, 2).mean()
    assert beside < 0.85 * distance.sum() / (4 * 32 * 31)


def test_the_same_whatever_else_is_asked_and_by_how_many_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = texture(9, 300, 64, 3)
    whole = balanced_order(keys)
    for one in range(9):
        assert torch.equal(balanced_order(keys[one : one + 1]), whole[one : one + 1])
    assert torch.equal(balanced_order(keys[[8, 2, 5]]), whole[[8, 2, 5]])
    torch.set_num_threads(3)
    assert torch.equal(balanced_order(keys), whole)
    torch.set_num_threads(1)
    monkeypatch.setattr(clustering, "_ELEMENTS_AT_ONCE", 1)
    assert torch.equal(balanced_order(keys), whole)


def test_is_not_drawn_from_a_global_state() -> None:
    keys = texture(2, 200, 16, 5)
    torch.manual_seed(1)
    before = balanced_order(keys)
    torch.manual_seed(2)
    assert torch.equal(balanced_order(keys), before)


@pytest.mark.parametrize("scale", [1e-38, 1e-3, 1e3, 1e36])
def test_size_of_the_numbers_does_not_matter(scale: float) -> None:
    keys, owner = blobs(2, 8, 16, 2)
    order = balanced_order(keys * scale)
    by_page = owner.gather(1, order).view(2, 8, 16)
    assert bool((by_page == by_page[..., :1]).all())


def test_a_token_far_out_leaves_the_others_their_order() -> None:
    keys, owner = blobs(2, 8, 16, 3)
    keys[:, 0] = 1e6
    order = balanced_order(keys)
    by_page = owner.gather(1, order).view(2, 8, 16)
    # It takes a place in a page of another group, whose token goes where it came from.
    assert int((by_page != by_page.mode(-1, keepdim=True).values).sum()) <= 2 * 8


def test_keys_that_are_all_the_same() -> None:
    for keys in (torch.zeros(2, 512, 8), torch.full((2, 100, 8), 3.4e38), torch.ones(1, 33, 1)):
        assert_permutations(balanced_order(keys), keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    keys = texture(2, 100, 16, 6).to(dtype)
    assert torch.equal(balanced_order(keys), balanced_order(keys.to(torch.float32)))


def test_no_sets() -> None:
    assert balanced_order(torch.zeros(0, 40, 8)).shape == (0, 40)


def test_steps_are_many_and_lead_to_the_same_order() -> None:
    keys = texture(8, 512, 64, 4)
    count = 0

    def counting() -> Generator[None, None, Tensor]:
        nonlocal count
        steps = balanced_ordering(keys)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                order: Tensor = end.value
                return order
            count += 1
            yield

    assert torch.equal(to_end(counting()), balanced_order(keys))
    # Three to each level of the tree, which has at least five, and those of the exchange.
    assert 15 < count < 80


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_refuses_keys_that_are_not_finite(wrong: float) -> None:
    keys = torch.zeros(2, 20, 4)
    keys[1, 3, 2] = wrong
    with pytest.raises(ConfigError, match="finite"):
        balanced_order(keys)
    with pytest.raises(ConfigError, match="finite"):
        balanced_order(torch.full((1, 2, 3), 1e300, dtype=torch.float64))


def test_refuses_what_does_not_fit() -> None:
    wrong: list[tuple[Any, str]] = [
        (torch.zeros(2, 3), "float \\[sets"),
        (torch.zeros(2, 3, 4, dtype=torch.int64), "float \\[sets"),
        (torch.zeros(2, 0, 4), "0 tokens"),
        (torch.zeros(2, 4097, 1), "4097 tokens"),
        (torch.zeros(2, 3, 0), "width 0"),
        (torch.zeros(1, 1, 16385), "width 16385"),
    ]
    for keys, what in wrong:
        with pytest.raises(ConfigError, match=what):
            balanced_order(keys)
    with pytest.raises(ConfigError, match="page_tokens"):
        balanced_order(torch.zeros(1, 3, 4), 0)
