"""Digests of pages, a layer of them that grows, and the masses estimated from them."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import kvtier.kernels.page_mass as page_mass_module
import kvtier.kernels.sketch as sketch_module
from kvtier.errors import ConfigError
from kvtier.kernels.digests import LayerDigests, PageDigests, page_digests
from kvtier.kernels.page_mass import page_mass, refined_share
from kvtier.kernels.rotation import rotation
from kvtier.kernels.sketch import level_statistics, sketch_keys, sketch_scores
from kvtier.kernels.workspace import Workspace
from tests.digest_cases import PAGE, SEEDS, Context, clustered, gaussian, log_sums, numpy_scores

SEED = 7


def pieces(context: Context, cuts: tuple[int, ...], bits: int | None) -> list[PageDigests]:
    """Digests of the Segments between cuts."""
    edges = [0, *cuts, context.keys.shape[1]]
    return [
        page_digests(context.keys[:, first:last], context.values[:, first:last], bits, SEED)
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
    digests.crop(1)
    assert (digests.segments, digests.pages) == (1, 7)
    added = page_digests(other.keys, other.values, 3, SEED)
    digests.add(added)
    fresh = LayerDigests(2, (64, 64), (3, SEED))
    fresh.add(pieces(context, (100,), 3)[0])
    fresh.add(added)
    assert torch.equal(masses(context, digests, refined), masses(context, fresh, refined))
    digests.crop(0)
    assert masses(context, digests).shape == (6, 0)


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
    edges = [0, *cuts, tokens]
    want = []
    for first, last in pairwise(edges):
        rows = context.keys[:, first:last]
        sketch = sketch_keys(rows, rows.mean(1), bits, SEED)
        scores = sketch_scores(
            context.query, sketch, scale=context.scale, workspace=Workspace(), softcap=softcap
        )
        want.append(log_sums(scores.double().numpy()))
    got = masses(context, layer(context, cuts, bits), 1.0, softcap)
    np.testing.assert_allclose(got.numpy(), np.concatenate(want, 1), atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_refined_pages_are_the_best_by_their_means(seed: int) -> None:
    """And those of the others are shifted by what that changes on average."""
    context = clustered(seed, tokens=2000)
    digests = layer(context, (512, 1000), 3)
    means, sketches = masses(context, digests), masses(context, digests, 1.0)
    got = masses(context, digests, 0.25)
    refined = ((got - sketches).abs() < 1e-4).view(2, 3, -1)
    assert torch.equal(refined.all(1), refined.any(1))
    assert refined.any(1).sum(1).tolist() == [round(0.25 * digests.pages)] * 2
    mass = means.softmax(1).view(2, 3, -1).sum(1)
    worst_refined = mass.masked_fill(~refined.any(1), math.inf).amin(1)
    assert (mass.masked_fill(refined.any(1), 0).amax(1) <= worst_refined).all()
    for head, by_sketch in enumerate(refined.view(6, -1)):
        change = (sketches[head] - means[head])[by_sketch].double().mean()
        shifted = means[head].double() + change
        torch.testing.assert_close(
            got[head, ~by_sketch].double(), shifted[~by_sketch], atol=1e-4, rtol=0
        )
        assert abs(change) > 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_long_contexts_refine_a_share_and_choose_nearly_the_same(seed: int) -> None:
    """The eighth of pages with the most mass: of it 3 % may be lost where pages hold a bit of what
    is wanted, far less than by means alone; and the mass of all is the same, within 0.1 nats."""
    context = clustered(seed, tokens=20_000)
    digests = layer(context, (512, 10_000), 3)
    assert refined_share(digests.pages) == 0.5
    assert refined_share(1024) == 1.0
    full, some, means = (masses(context, digests, share) for share in (1.0, 0.5, 0.0))
    shares = [found.softmax(1).view(2, 3, -1).sum(1) for found in (full, some, means)]
    count = digests.pages // 8
    best, got, poor = (shares[0].gather(1, by.topk(count, 1).indices).sum(1) for by in shares)
    assert (got > 0.97 * best).all()
    assert ((best - got) < 0.3 * (best - poor)).all()
    assert (full.logsumexp(1) - some.logsumexp(1)).abs().max() < 0.1


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


def reference_masses(context: Context, cuts: tuple[int, ...]) -> NDArray[np.float64]:
    """By 3-bit sketches, float64, from what the sketches hold, key by key: each token counts as
    exp(score - half the variance of its noise)."""
    heads, tokens, width = context.keys.shape
    second, product = level_statistics(3)
    query = context.query.double().numpy() * context.scale
    turned = query @ rotation(width, SEED).double().numpy()
    found = []
    for first, last in pairwise([0, *cuts, tokens]):
        sketch = page_digests(
            context.keys[:, first:last], context.values[:, first:last], 3, SEED
        ).sketch
        assert sketch is not None
        planes = sketch.words.numpy().view(np.uint8)
        bits = (planes[..., None] >> np.arange(8, dtype=np.uint8)) & 1
        lanes = bits.transpose(1, 2, 3, 0, 4).reshape(*bits.shape[1:4], 8, 3)
        codes = (lanes * np.array([1, 2, 4])).sum(-1).transpose(0, 1, 3, 2)
        levels = codes.reshape(heads, -1, width)[:, : last - first] - 3.5
        logs = sketch.codes.double().flatten(1)[:, : last - first] * sketch.step.unsqueeze(1)
        scales = 2.0 ** (logs + sketch.low.unsqueeze(1)).numpy()
        part = []
        for head, asked in enumerate(turned):
            of = head // context.group
            scores = (levels[of] @ asked) * scales[of]
            half = 0.5 * (second - product**2) * scales[of] ** 2
            scores -= half * (asked @ asked)
            # |key|^2 is width * (scale * product)^2, and the noise lies across the key.
            scores += half * scores**2 / (width * (scales[of] * product) ** 2)
            part.append(scores + query[head] @ sketch.centre[of].double().numpy())
        found.append(log_sums(np.array(part)))
    return np.concatenate(found, 1)


@pytest.mark.parametrize(("heads", "group", "width"), [(2, 7, 64), (8, 4, 128), (3, 1, 12)])
@pytest.mark.parametrize("blocks", ["whole", "small"])
def test_mass_by_sketch_in_float64(
    heads: int, group: int, width: int, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where blocks take in some of the heads and pages, and floats some of a block."""
    cuts = (512, 700, 1212)
    context = gaussian(4, 1300, width, heads, group)
    if blocks == "small":
        monkeypatch.setattr(page_mass_module, "BLOCK_CODES", 2 * 16 * width * 30)
        monkeypatch.setattr(page_mass_module, "BLOCK_PAGES", 30)
        monkeypatch.setattr(sketch_module, "FLOATS", 5 * 30 * width)
    got = masses(context, layer(context, cuts, 3), 1.0)
    want = reference_masses(context, cuts)
    np.testing.assert_allclose(got.numpy(), want, atol=2e-4)
    some = masses(context, layer(context, cuts, 3), 0.4).view(heads, group, -1)
    near = (some - torch.from_numpy(want).view(heads, group, -1)).abs().amax(1) < 2e-4
    assert (near.sum(1) >= round(0.4 * want.shape[1])).all()


def test_threads_change_nothing() -> None:
    context = gaussian(6, 8192, 64, 2, 7)
    digests = layer(context, (512, 4096), 3)
    before = torch.get_num_threads()
    found = {}
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found[threads] = [masses(context, digests, refined) for refined in (0.0, 0.5, 1.0)]
    finally:
        torch.set_num_threads(before)
    for threads in (2, 4):
        for got, want in zip(found[threads], found[1], strict=True):
            assert torch.equal(got, want)


def test_workspace_with_other_contents_changes_nothing() -> None:
    context, workspace = gaussian(3, tokens=333), Workspace()
    digests = layer(context, (100,), 3)
    for refined in (0.0, 0.5, 1.0):
        want = masses(context, digests, refined)
        for buffer in workspace.buffers:
            buffer.fill_(math.nan if buffer.is_floating_point() else -1)
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
