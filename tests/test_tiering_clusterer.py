"""Placement: orders of units, and that they are those of their keys without positions."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.clustering import balanced_order, to_end
from kvtier.kernels.rotary import Rotary
from kvtier.tiering import clusterer
from kvtier.tiering.clusterer import ByKeys, ByPosition, UnitKeys
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.page_layout import Order

WIDTH = 32
HALF = Rotary(tuple(10000.0 ** -(i / 16) for i in range(16)))
PARTIAL = Rotary((1.0, 0.2), 1.3, "interleaved")
GEOMETRY = Geometry(
    (
        LayerGeometry(2, WIDTH, WIDTH),
        LayerGeometry(2, WIDTH, WIDTH),
        LayerGeometry(3, WIDTH, 8),
        LayerGeometry(2, WIDTH, WIDTH, 100),
    ),
    "float32",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations: on a busy machine threads would wait for each other all the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blobs(heads: int, tokens: int, seed: int) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Keys around centres far from each other, 16 tokens to each, and each token's centre."""
    random = np.random.default_rng(seed)
    owner = np.stack([random.permutation(tokens) // 16 for _ in range(heads)])
    centres = random.standard_normal((tokens // 16 + 1, WIDTH)) * 10
    keys = centres[owner] + random.standard_normal((heads, tokens, WIDTH)) * 0.1
    return torch.from_numpy(keys).to(torch.float32), owner


def turned(keys: Tensor, rotary: Rotary, start: int) -> Tensor:
    """Positions put into keys, pair by pair as complex numbers: not with the code under test."""
    first = keys[..., : rotary.rotated]
    half = rotary.style == "half"
    shape = (*keys.shape[:2], 2, -1) if half else (*keys.shape[:2], -1, 2)
    pairs = first.view(shape).transpose(-1, -2) if half else first.view(shape)
    numbers = torch.view_as_complex(pairs.to(torch.float64).contiguous())
    positions = torch.arange(start, start + keys.shape[1])
    angles = positions[:, None] * torch.tensor(rotary.inverse_frequencies, dtype=torch.float64)
    after = torch.view_as_real(
        numbers * torch.polar(torch.full_like(angles, rotary.scaling), angles)
    )
    after = after.transpose(-1, -2) if half else after
    return torch.cat([after.reshape(first.shape).to(keys.dtype), keys[..., rotary.rotated :]], -1)


def assert_pages_are_blobs(order: Order | None, owner: np.ndarray[Any, Any]) -> None:
    assert order is not None
    by_page = np.take_along_axis(owner, order, 1)
    by_page = by_page.reshape(len(owner), -1, 16)
    assert (by_page == by_page[..., :1]).all()


@pytest.mark.parametrize("start", [0, 512, 51200])
def test_by_keys_sees_through_positions(start: int) -> None:
    rotary = [HALF, PARTIAL, None, None]
    given = [blobs(2, 256, 1), blobs(2, 256, 2), blobs(3, 512, 3)]
    units = [
        UnitKeys(layer, 512, keys if how is None else turned(keys, how, start))
        for layer, ((keys, _), how) in enumerate(zip(given, rotary, strict=False))
    ]
    orders = ByKeys(GEOMETRY, rotary).orders(units)
    for order, (_, owner) in zip(orders, given, strict=True):
        assert_pages_are_blobs(order, owner)
    # Without knowing of positions it could not.
    order = ByKeys(GEOMETRY).orders(units[:1])[0]
    with pytest.raises(AssertionError):
        assert_pages_are_blobs(order, given[0][1])


def test_units_that_come_together_get_what_they_would_get_alone() -> None:
    placement = ByKeys(GEOMETRY, [HALF, PARTIAL, None, None])
    random = torch.Generator().manual_seed(4)
    units = [
        UnitKeys(layer, 512, torch.randn(heads, tokens, WIDTH, generator=random).to(dtype))
        for layer, heads, tokens, dtype in (
            (0, 2, 512, torch.float32),
            (1, 2, 512, torch.float16),
            (2, 3, 100, torch.bfloat16),
            (0, 2, 100, torch.float32),
            (1, 2, 17, torch.float32),
        )
    ]
    together = placement.orders(units)
    for unit, order in zip(units, together, strict=True):
        assert order is not None
        assert order.dtype == np.int64
        assert order.shape == unit.keys.shape[:2]
        assert (np.sort(order, 1) == np.arange(order.shape[1])).all()
        (alone,) = placement.orders([unit])
        assert alone is not None
        assert (alone == order).all()


@pytest.mark.parametrize("elements", [1, 2 * 512 * WIDTH, 1 << 30])
def test_steps_make_the_same_orders(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """However many units are ordered together, of whichever shapes."""
    monkeypatch.setattr(clusterer, "STEP_ELEMENTS", elements)
    placement = ByKeys(GEOMETRY, [HALF, PARTIAL, None, None])
    units = [
        UnitKeys(layer, start, blobs(GEOMETRY.layers[layer].kv_heads, tokens, at)[0])
        for at, (layer, start, tokens) in enumerate(
            [(0, 512, 512), (3, 512, 512), (1, 0, 512), (2, 512, 512), (0, 512, 16), (1, 512, 90)]
        )
    ]
    units[2].keys[1, 30] = torch.inf
    asked: list[int] = []

    def lazily() -> Iterator[UnitKeys]:
        for number, unit in enumerate(units):
            asked.append(number)
            yield unit

    steps = placement.ordering(lazily())
    next(steps)
    assert asked == [0]
    found = to_end(steps)
    together = placement.orders(units)
    for number, order in enumerate(together):
        if order is None:
            assert number not in found
        else:
            assert np.array_equal(found[number], order)
    assert sorted(found) == [0, 3, 5]


def test_a_placement_without_steps_takes_one() -> None:
    units = [UnitKeys(0, 512, blobs(2, 64, 1)[0])] * 2
    assert not ByPosition().in_steps
    assert to_end(ByPosition().ordering(units)) == {}


def test_every_head_has_an_order_of_its_own() -> None:
    keys = torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(5))
    (order,) = ByKeys(GEOMETRY).orders([UnitKeys(0, 512, keys)])
    assert order is not None
    assert (order == balanced_order(keys).numpy()).all()
    assert (order[0] != order[1]).any()


def test_what_keeps_the_order_of_positions() -> None:
    keys = torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(6))
    endless = keys.clone()
    endless[1, 5, 3] = torch.inf
    unknown = keys.clone()
    unknown[0, 0, 0] = torch.nan
    units = [
        UnitKeys(3, 512, keys),  # a window
        UnitKeys(0, 512, keys[:, :16]),
        UnitKeys(0, 512, endless),
        UnitKeys(0, 512, unknown),
        UnitKeys(0, 512, keys),
    ]
    orders = ByKeys(GEOMETRY, [HALF] * 4).orders(units)
    assert [order is None for order in orders] == [True, True, True, True, False]
    assert ByKeys(GEOMETRY).orders([]) == []
    assert ByPosition().orders(units) == [None] * 5


def test_refuses_rotary_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="for 2 layers"):
        ByKeys(GEOMETRY, [HALF, None])
    with pytest.raises(ConfigError, match="layer 1"):
        ByKeys(GEOMETRY, [None, Rotary((1.0,) * 17), None, None])


def test_the_first_tokens_of_a_stream_keep_their_page() -> None:
    """Whatever their keys: they are read in any case, and should not bring others along."""
    geometry = Geometry.uniform(1, 2, 32)
    keys = torch.randn(2, 200, 32, generator=torch.Generator().manual_seed(3))
    [begun] = ByKeys(geometry).orders([UnitKeys(0, 0, keys)])
    [rest] = ByKeys(geometry).orders([UnitKeys(0, 16, keys[:, 16:])])
    assert begun is not None
    assert rest is not None
    assert (begun[:, :16] == np.arange(16)).all()
    assert (begun[:, 16:] == rest + 16).all()
    assert ByKeys(geometry).orders([UnitKeys(0, 0, keys[:, :32])]) == [None]
