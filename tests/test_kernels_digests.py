"""Digests of pages, a layer of them that grows, and the masses estimated from them."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.digests import LayerDigests, PageDigests, page_digests
from kvtier.kernels.page_mass import page_mass
from kvtier.kernels.sketch import coordinate_weights, sketch_keys, sketch_scores
from kvtier.kernels.workspace import Workspace
from tests.digest_cases import PAGE, SEEDS, Context, clustered, gaussian, log_sums, numpy_scores

SEED = 7


def pieces(context: Context, cuts: tuple[int, ...], bits: int | None) -> list[PageDigests]:
    """Digests of the Segments between cuts."""
    weights = coordinate_weights(context.keys)
    edges = [0, *cuts, context.keys.shape[1]]
    return [
        page_digests(
            context.keys[:, first:last], context.values[:, first:last], bits, SEED, weights
        )
        for first, last in pairwise(edges)
    ]


def layer(context: Context, cuts: tuple[int, ...] = (), bits: int | None = None) -> LayerDigests:
    heads, _, width = context.keys.shape
    kind = None if bits is None else (bits, SEED)
    digests = LayerDigests(heads, (width, context.values.shape[2]), kind)
    for piece in pieces(context, cuts, bits):
        digests.add(piece)
    return digests


def masses(
    context: Context, digests: LayerDigests, refined: float = 0.0, softcap: float | None = None
) -> Tensor:
    return page_mass(
        context.query,
        digests,
        scale=context.scale,
        workspace=Workspace(),
        softcap=softcap,
        refined=refined,
    )


def page_means(rows: Tensor) -> list[Tensor]:
    return [rows[:, page : page + PAGE].double().mean(1) for page in range(0, rows.shape[1], PAGE)]


@pytest.mark.parametrize("tokens", [1, 16, 17, 100])
@pytest.mark.parametrize("seed", SEEDS)
def test_means_are_those_of_the_pages(tokens: int, seed: int) -> None:
    context = gaussian(seed, tokens)
    found = page_digests(context.keys, context.values)
    keys = found.key_means * found.key_factors.unsqueeze(2) + found.centre.unsqueeze(1)
    values = found.value_means * found.value_factors.unsqueeze(2)
    for got, rows in ((keys, context.keys), (values, context.values)):
        want = torch.stack(page_means(rows), 1)
        # Half a step of 1/127 of the largest coordinate.
        limit = (want - want.mean(1, keepdim=True)).abs().max() / 127 + want.abs().max() / 254
        assert (got - want).abs().max() < limit
    torch.testing.assert_close(found.centre, context.keys.mean(1))


def test_8_bits_are_enough_for_means() -> None:
    """What rounding adds to an estimate is far less than what a mean leaves out."""
    context = clustered(0)
    exact_means = torch.stack(page_means(context.keys), 1).repeat_interleave(context.group, 0)
    scores = (context.query.double().unsqueeze(1) @ exact_means.transpose(1, 2)).squeeze(1)
    unrounded = scores * context.scale + math.log(PAGE)
    rounding = (masses(context, layer(context)) - unrounded).abs().mean()
    left_out = np.abs(unrounded.numpy() - log_sums(numpy_scores(context))).mean()
    assert rounding < 0.02 * left_out


@pytest.mark.parametrize(("bits", "most"), [(None, 3.7), (2, 10.4), (3, 13.5)])
def test_share_of_16_bit_kv(bits: int | None, most: float) -> None:
    context = gaussian(0, tokens=4096)
    cuts = tuple(range(512, 4096, 512))
    digests = layer(context, cuts, bits)
    assert digests.held_bytes / (2 * 4096 * 128 * 2) * 100 < most
    without_owners = sum(piece.held_bytes for piece in pieces(context, cuts, bits))
    pages = 4096 // PAGE
    assert digests.held_bytes == without_owners + pages * 9


@pytest.mark.parametrize("bits", [None, 3])
def test_growing_gives_what_one_piece_after_the_other_holds(bits: int | None) -> None:
    context = gaussian(1, tokens=700)
    cuts = (64, 80, 81, 600)
    digests, parts = layer(context, cuts, bits), pieces(context, cuts, bits)
    for name in ("key_means", "key_factors", "value_means", "value_factors"):
        assert torch.equal(digests.array(name), torch.cat([getattr(p, name) for p in parts], 1))
    assert digests.array("counts").tolist() == [16] * 5 + [1] + [16] * 32 + [7] + [16] * 6 + [4]
    assert digests.array("owners").bincount().tolist() == [4, 1, 1, 33, 7]
    assert (digests.segments, digests.pages) == (5, 46)


def test_growing_copies_in_proportion() -> None:
    """Arrays are made anew a few times, not with every Segment."""
    context = gaussian(0, tokens=16)
    piece = page_digests(context.keys, context.values)
    digests = LayerDigests(2, (64, 64))
    places = set()
    for _ in range(300):
        digests.add(piece)
        places.add(digests.array("key_means").data_ptr())
    assert digests.pages == 300
    assert len(places) < 20


@pytest.mark.parametrize("refined", [0.0, 1.0])
def test_cropped_and_grown_again(refined: float) -> None:
    context, other = gaussian(0, tokens=200), gaussian(5, tokens=90)
    digests = layer(context, (100,), 3)
    weights = coordinate_weights(context.keys)
    digests.crop(1)
    assert (digests.segments, digests.pages) == (1, 7)
    added = page_digests(other.keys, other.values, 3, SEED, weights)
    digests.add(added)
    fresh = LayerDigests(2, (64, 64), (3, SEED))
    fresh.add(pieces(context, (100,), 3)[0])
    fresh.add(added)
    assert torch.equal(masses(context, digests, refined), masses(context, fresh, refined))
    digests.crop(0)
    assert masses(context, digests).shape == (6, 0)
    # With no Segment left, others may come with other weights.
    digests.add(page_digests(other.keys, other.values, 3, SEED))


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_mass_by_means(seed: int, softcap: float | None) -> None:
    context = gaussian(seed, tokens=333)
    got = masses(context, layer(context, (100, 208)), softcap=softcap)
    want = []
    for first, last in ((0, 100), (100, 208), (208, 333)):
        rows = context.keys[:, first:last]
        counts = [min(PAGE, last - first - page) for page in range(0, last - first, PAGE)]
        means = torch.stack(page_means(rows), 1).float()
        scores = numpy_scores(Context(context.query, means, means, context.scale), softcap)
        want.append(scores + np.log(counts))
    np.testing.assert_allclose(got.numpy(), np.concatenate(want, 1), atol=0.1)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("tokens", "cuts"), [(1, ()), (16, ()), (333, (100, 208)), (512, (256,))])
def test_mass_by_sketch_is_the_sum_over_its_scores(
    tokens: int, cuts: tuple[int, ...], bits: int, softcap: float | None
) -> None:
    context = gaussian(tokens, tokens)
    weights, edges = coordinate_weights(context.keys), [0, *cuts, tokens]
    want = []
    for first, last in pairwise(edges):
        rows = context.keys[:, first:last]
        sketch = sketch_keys(rows, rows.mean(1), bits, SEED, weights)
        scores = sketch_scores(
            context.query, sketch, scale=context.scale, workspace=Workspace(), softcap=softcap
        )
        want.append(log_sums(scores.double().numpy()))
    got = masses(context, layer(context, cuts, bits), 1.0, softcap)
    np.testing.assert_allclose(got.numpy(), np.concatenate(want, 1), atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_refined_pages_are_the_best_by_their_means(seed: int) -> None:
    context = clustered(seed, tokens=2000)
    digests = layer(context, (512, 1000), 3)
    means, sketches = masses(context, digests), masses(context, digests, 1.0)
    got = masses(context, digests, 0.25)
    refined = (got != means).view(2, 3, -1)
    assert torch.equal(refined.all(1), refined.any(1))
    assert refined.any(1).sum(1).tolist() == [round(0.25 * digests.pages)] * 2
    mass = means.softmax(1).view(2, 3, -1).sum(1)
    worst_refined = mass.masked_fill(~refined.any(1), math.inf).amin(1)
    assert (mass.masked_fill(refined.any(1), 0).amax(1) <= worst_refined).all()
    by_sketch = refined.view(6, -1)
    torch.testing.assert_close(got[by_sketch], sketches[by_sketch], atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_sketches_know_masses_that_means_miss(seed: int) -> None:
    """In nats, weighted by the true mass: means give too little, sketches are near."""
    context = clustered(seed)
    truth = torch.from_numpy(log_sums(numpy_scores(context)))
    off = {}
    for name, bits, refined in (("means", 3, 0.0), ("2 bits", 2, 1.0), ("3 bits", 3, 1.0)):
        estimate = masses(context, layer(context, (512, 1024), bits), refined)
        off[name] = float((truth.softmax(1) * (estimate - truth)).sum(1).mean())
    assert off["means"] < -1
    assert abs(off["2 bits"]) < 0.3
    assert abs(off["3 bits"]) < 0.15


def test_workspace_with_other_contents_changes_nothing() -> None:
    context, workspace = gaussian(3, tokens=333), Workspace()
    digests = layer(context, (100,), 3)
    for refined in (0.0, 0.5, 1.0):
        want = masses(context, digests, refined)
        for buffer in workspace.buffers:
            buffer.fill_(-1 if buffer.dtype == torch.int64 else math.nan)
        got = page_mass(
            context.query, digests, scale=context.scale, workspace=workspace, refined=refined
        )
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("keys", "values", "name"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 4, 8), "keys"),
        (torch.zeros(2, 0, 8), torch.zeros(2, 0, 8), "keys"),
        (torch.zeros(2, 4, 8), torch.zeros(2, 5, 8), "values"),
        (torch.zeros(2, 4, 8), torch.zeros((2, 4, 8), dtype=torch.int8), "values"),
        (torch.zeros(2, 4, 8), torch.full((2, 4, 8), math.inf), "values"),
        (torch.full((2, 4, 8), math.nan), torch.zeros(2, 4, 8), "keys"),
    ],
)
def test_wrong_tokens(keys: Tensor, values: Tensor, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        page_digests(keys, values)


def test_digests_that_do_not_belong() -> None:
    rows = torch.randn(2, 20, 8)
    digests = LayerDigests(2, (8, 8), (3, SEED))
    digests.add(page_digests(rows, rows, 3, SEED))
    for wrong in (
        page_digests(rows, rows),
        page_digests(rows, rows, 2, SEED),
        page_digests(rows, rows, 3, SEED + 1),
        page_digests(rows, rows, 3, SEED, torch.full((2, 8), 0.5)),
        page_digests(rows, rows[..., :4], 3, SEED),
        page_digests(rows[:1], rows[:1], 3, SEED),
    ):
        with pytest.raises(ConfigError, match="digests"):
            digests.add(wrong)
    assert digests.segments == 1
    with pytest.raises(ConfigError, match="segments"):
        digests.crop(2)
    with pytest.raises(ConfigError, match="heads"):
        LayerDigests(0, (8, 8))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"query": torch.zeros(4, 7)}, "query"),
        ({"query": torch.zeros(3, 8)}, "query"),
        ({"scale": math.nan}, "scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"refined": 1.5}, "refined"),
        ({"refined": 0.5}, "refined"),
    ],
)
def test_wrong_arguments_of_page_mass(change: dict[str, object], name: str) -> None:
    digests = LayerDigests(2, (8, 8))
    digests.add(page_digests(torch.randn(2, 20, 8), torch.randn(2, 20, 8)))
    arguments: dict[str, object] = {"query": torch.zeros(4, 8), "scale": 1.0}
    with pytest.raises(ConfigError, match=name):
        page_mass(
            **(arguments | change),  # type: ignore[arg-type]
            digests=digests,
            workspace=Workspace(),
        )
