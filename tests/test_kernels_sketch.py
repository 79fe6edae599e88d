"""Sketches: the levels, the packed bits, the scores, and that exponentials of them are unbiased."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.rotation import rotated_width, rotation
from kvtier.kernels.sketch import (
    STEPS,
    Sketch,
    level_statistics,
    sketch_keys,
    sketch_scores,
)
from kvtier.kernels.workspace import Workspace
from tests.digest_cases import PAGE, SEEDS, Context, gaussian, numpy_scores

BITS = (2, 3, 4)
# Mean squared error for a unit normal: of the best equally spaced levels (Max 1960, table II), and
# of the best levels of all (his table I, which Lloyd found too).
EQUAL_STEPS = {2: 0.1188, 3: 0.03744, 4: 0.01154}
FREE_LEVELS = {2: 0.1175, 3: 0.03454, 4: 0.009497}
GRID = np.linspace(-9, 9, 400_001)


def normal_mean(values: NDArray[np.float64]) -> float:
    """Mean of values on GRID under the unit normal."""
    weights = np.exp(-0.5 * GRID * GRID)
    return float((values * weights).sum() / weights.sum())


def levels(step: float, bits: int) -> NDArray[np.float64]:
    """Levels of the points of GRID, in units of the step."""
    middle = (2**bits - 1) / 2
    level: NDArray[np.float64] = np.round(GRID / step + middle).clip(0, 2**bits - 1) - middle
    return level


def error(step: float, bits: int) -> float:
    return normal_mean((levels(step, bits) * step - GRID) ** 2)


def sketched(context: Context, bits: int, seed: int = 5) -> Sketch:
    return sketch_keys(context.keys, context.keys.mean(1), bits, seed)


def decoded(sketch: Sketch, width: int) -> NDArray[np.float64]:
    """The keys that a sketch stands for, [heads, tokens, width], read bit by bit."""
    words = sketch.words.numpy()
    bits, heads, pages, quarter = words.shape
    planes = words.view(np.uint8).reshape(bits, heads, pages, quarter * 8)
    bit = (planes[..., None] >> np.arange(8, dtype=np.uint8)) & 1
    # All bits at one place of all planes, lowest first: 8 codes of `bits` bits each.
    lanes = bit.transpose(1, 2, 3, 0, 4).reshape(heads, pages, quarter * 8, 8, bits)
    codes = (lanes * (1 << np.arange(bits))).sum(-1).transpose(0, 1, 3, 2)
    codes = codes.reshape(heads, pages * PAGE, -1)[:, : sketch.tokens]
    logs = (
        sketch.low.double().numpy()[:, None]
        + sketch.codes.numpy().reshape(heads, -1)[:, : sketch.tokens]
        * sketch.step.double().numpy()[:, None]
    )
    rotated = (codes - (2**bits - 1) / 2) * 2.0 ** logs[..., None]
    back = rotated @ rotation(width, sketch.seed).double().numpy().T
    keys: NDArray[np.float64] = back + sketch.centre.double().numpy()[:, None]
    return keys


@pytest.mark.parametrize("bits", BITS)
def test_steps_are_the_best_equal_ones(bits: int) -> None:
    best = error(STEPS[bits], bits)
    assert best == pytest.approx(EQUAL_STEPS[bits], rel=2e-3)
    assert best <= min(error(STEPS[bits] * factor, bits) for factor in (0.98, 1.02))
    assert best / FREE_LEVELS[bits] < {2: 1.02, 3: 1.09, 4: 1.23}[bits]


@pytest.mark.parametrize("bits", BITS)
def test_level_statistics(bits: int) -> None:
    second, product = level_statistics(bits)
    level = levels(STEPS[bits], bits)
    assert second == pytest.approx(normal_mean(level * level), rel=1e-3)
    assert product == pytest.approx(normal_mean(level * GRID), rel=1e-3)


@pytest.mark.parametrize("width", [1, 3, 20, 64, 80, 96, 112, 128, 256])
def test_rotation_is_orthogonal(width: int) -> None:
    matrix = rotation(width, 3).double()
    assert matrix.shape == (width, rotated_width(width))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width, dtype=torch.float64))
    # Every coordinate gets an equal share of every vector of the standard basis.
    torch.testing.assert_close(
        matrix.abs(), torch.full_like(matrix, rotated_width(width) ** -0.5), rtol=1e-6, atol=0
    )


def test_common_widths_need_no_padding() -> None:
    assert [rotated_width(width) for width in (64, 80, 96, 112, 128)] == [64, 80, 96, 120, 128]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [64, 80, 96, 128, 12])
@pytest.mark.parametrize("seed", SEEDS)
def test_packed_bits_hold_the_nearest_levels(bits: int, width: int, seed: int) -> None:
    context = gaussian(seed, tokens=53, width=width)
    found = decoded(sketched(context, bits), width)
    keys = context.keys.double().numpy()
    centred = keys - keys.mean(1, keepdims=True)
    noise = found - keys
    # What is left along the key itself is only the rounding of the scale to 8 bits.
    along = (noise * centred).sum(2) / (centred**2).sum(2)
    assert np.abs(along).max() < 0.012
    second, product = level_statistics(bits)
    expected = (second - product**2) / product**2
    # In few coordinates of one length, rounding leaves less than it does of free normals.
    assert (noise**2).sum() / (centred**2).sum() == pytest.approx(
        expected, rel=0.15 if width >= 64 else 0.35
    )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [64, 80, 96, 128])
@pytest.mark.parametrize("tokens", [1, 17, 48])
def test_scores_are_those_of_the_decoded_keys(bits: int, width: int, tokens: int) -> None:
    context = gaussian(tokens, tokens=tokens, width=width)
    sketch = sketched(context, bits)
    got = sketch_scores(
        context.query, sketch, scale=context.scale, workspace=Workspace(), debias=False
    )
    read = Context(
        context.query, torch.from_numpy(decoded(sketch, width)), context.values, context.scale
    )
    assert got.shape == (6, tokens)
    np.testing.assert_allclose(got.double().numpy(), numpy_scores(read), atol=3e-5)


def directed(seed: int, cosines: tuple[float, ...], tokens: int = 256) -> tuple[Tensor, Tensor]:
    """A query head and kv head for each cosine, its keys all at that angle to the query; behind
    them their opposites, so that their mean is 0."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((len(cosines), 64), generator=generator)
    keys = torch.randn((len(cosines), tokens, 64), generator=generator)
    ahead = (query / query.norm(dim=1, keepdim=True)).unsqueeze(1)
    cosine = torch.tensor(cosines).view(-1, 1, 1)
    keys = keys - (keys * ahead).sum(2, keepdim=True) * ahead
    keys = keys / keys.norm(dim=2, keepdim=True) * (1 - cosine**2).sqrt() + cosine * ahead
    return query, torch.cat((keys, -keys), 1) * 12


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("bits", "raw", "tolerance"), [(2, 0.45, 0.1), (3, 0.15, 0.05)])
@pytest.mark.parametrize("seed", SEEDS)
def test_debiased_exponentials_are_right_on_average(
    bits: int, raw: float, tolerance: float, seed: int, softcap: float | None
) -> None:
    """In nats, over 16 rotations of 256 keys: for keys across the query, which are most, and for
    those that point its way, which matter. Raw scores give far too much across."""
    query, keys = directed(seed, (0.0, 0.4, 0.7))
    truth = torch.from_numpy(numpy_scores(Context(query, keys, keys, 0.25), softcap))
    log_ratios = {}
    for debias in (True, False):
        ratios = torch.zeros(3, dtype=torch.float64)
        for rotation_seed in range(16):
            sketch = sketch_keys(keys, torch.zeros(3, 64), bits, rotation_seed)
            scores = sketch_scores(
                query, sketch, scale=0.25, workspace=Workspace(), softcap=softcap, debias=debias
            )
            ratios += (scores - truth)[:, :256].exp().mean(1) / 16
        log_ratios[debias] = ratios.log()
    assert log_ratios[True].abs().max() < tolerance
    assert log_ratios[False][0] > raw


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_of_16_bits(dtype: torch.dtype) -> None:
    context = gaussian(0)
    keys = context.keys.to(dtype)
    narrow = sketch_keys(keys, keys.float().mean(1), 3, 1)
    wide = sketch_keys(keys.float(), keys.float().mean(1), 3, 1)
    assert torch.equal(narrow.words, wide.words)
    assert torch.equal(narrow.codes, wide.codes)


def test_equal_keys_have_the_score_of_their_centre() -> None:
    keys = torch.full((1, 20, 64), 2.5)
    query = torch.ones((2, 64))
    sketch = sketch_keys(keys, keys.mean(1), 3, 0)
    scores = sketch_scores(query, sketch, scale=0.1, workspace=Workspace())
    torch.testing.assert_close(scores, torch.full((2, 20), 16.0))


def test_one_long_key_leaves_the_others_their_precision() -> None:
    context = gaussian(0)
    context.keys[:, 7] *= 40
    got = sketch_scores(
        context.query, sketched(context, 4), scale=context.scale, workspace=Workspace()
    )
    off = np.abs(got.numpy() - numpy_scores(context))
    # All keys lie away from a centre that the long one pulls along, so their noise is greater, too.
    assert np.median(np.delete(off, 7, axis=1)) < 0.5


def test_bytes() -> None:
    sketch = sketched(gaussian(0, tokens=512), 3)
    assert sketch.held_bytes == 2 * (512 * (24 + 1) + 8)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"bits": 5}, "bits"),
        ({"keys": torch.zeros(3, 4)}, "keys"),
        ({"keys": torch.zeros(2, 0, 8)}, "keys"),
        ({"keys": torch.zeros((2, 4, 8), dtype=torch.int32)}, "keys"),
        ({"keys": torch.full((2, 4, 8), math.nan)}, "keys"),
        ({"centre": torch.zeros(2, 9)}, "centre"),
    ],
)
def test_wrong_keys(change: dict[str, object], name: str) -> None:
    arguments: dict[str, object] = {
        "keys": torch.zeros(2, 4, 8),
        "centre": torch.zeros(2, 8),
        "bits": 3,
        "seed": 0,
    }
    with pytest.raises(ConfigError, match=name):
        sketch_keys(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"query": torch.zeros(6, 63)}, "query"),
        ({"query": torch.zeros(5, 64)}, "query"),
        ({"query": torch.zeros((6, 64), dtype=torch.int64)}, "query"),
        ({"scale": math.inf}, "scale"),
        ({"softcap": 0.0}, "softcap"),
    ],
)
def test_wrong_query(change: dict[str, object], name: str) -> None:
    arguments: dict[str, object] = {
        "query": torch.zeros(6, 64),
        "sketch": sketched(gaussian(0), 3),
        "scale": 0.1,
        "workspace": Workspace(),
    }
    with pytest.raises(ConfigError, match=name):
        sketch_scores(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", BITS)
def test_keys_whose_scores_are_no_floats_are_refused(bits: int) -> None:
    """Fourth powers of scores are taken: with larger keys an estimate would be none."""
    context = gaussian(1)
    keys = context.keys * 2e5
    largest = sketch_keys(keys, keys.mean(1), bits, 1)
    scores = sketch_scores(context.query, largest, scale=1.0, workspace=Workspace())
    assert bool(torch.isfinite(scores).all())
    for factor in (1e7, 1e18, 1e30):
        keys = context.keys * factor
        with pytest.raises(ConfigError, match="scales above"):
            sketch_keys(keys, keys.mean(1), bits, 1)
