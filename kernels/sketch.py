"""Sketches of keys: 2 to 4 bits a coordinate, from which scores and attention masses are estimated.

What a Sketch keeps of a key, relative to the centre (the mean key of its Segment and head): each
coordinate is divided by a weight, the vector is rotated by random signs and a Hadamard matrix and
divided by its root mean square, and each coordinate is rounded to one of 2^bits equally spaced
levels, the best such levels for a unit normal (the rotation makes coordinates nearly normal,
whatever the key was). Equal steps make 1 % more noise at 2 bits than Lloyd and Max's free levels do
and 8 % more at 3, and let scores be computed from the codes as they are: a level is the step times
the code, less a constant.

The rotation spreads the noise evenly over the coordinates, also to those where keys hardly differ;
if queries are large just there, as in the first layer of some models, noise drowns everything.
Weights even that out (coordinate_weights): a query is multiplied by what keys were divided by.

Each token has a scale, stored as 8 bits on a logarithmic grid between the least and the greatest
of its Segment and head. It is chosen so that the product of the key with its sketch is the square
of the key's length: then the noise n = sketch - key has no component along the key, and over
random rotations the score of a query with the sketch is right on average.

Debiasing. exp() of an unbiased score is not unbiased. The noise spreads evenly over the directions
across the key, with a variance v per coordinate, so the noise of q.k*scale is nearly normal with
variance w = scale^2 * v * (|q|^2 - (q.k)^2 / |k|^2). As E[exp(x + n)] = exp(x + w/2), half of that
is taken off every score. In units of the token's scale, v = E[l^2] - E[l z]^2, where l is the level
of a unit normal z, and E[l z] is what the choice of the scale has divided by.

Invariants of this file:
- Pages have 16 slots, the last of a Segment maybe fewer tokens; what lies in slots without a token
  never reaches a result.
- Scores are natural; inside they are in base 2, like those of paged_attention.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.packed_codes import FIELDS, lifts, pack, unpack
from kvtier.kernels.rotation import rotation
from kvtier.kernels.workspace import Workspace

STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352}
"""Distance of neighbouring levels for a unit normal, by bits (Max 1960, table II)."""
BLOCK_PAGES = 2048
"""Pages of all heads whose codes are unpacked at a time."""
FLOOR_LOG2 = -100.0
"""Tokens count as at least 2^-100 of the heaviest: exp2 is slow where its result is denormal."""

_SLOTS = PAGE_TOKENS // FIELDS
_CODES_MAX = 255
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


@dataclass(frozen=True, slots=True)
class Sketch:
    """Sketched keys of whole pages, heads leading.

    `words` int64 [bits, heads, pages, width / 4], width being that of rotated keys; `codes` uint8
    [heads, pages, 16], the scales of tokens: 2^(low + code * step), with `low` and `step` float32
    [heads]; `centre` and `weights` float32 [heads, Dk]; `tokens`, of which the last page may hold
    fewer than 16.
    """

    words: Tensor
    codes: Tensor
    low: Tensor
    step: Tensor
    centre: Tensor
    weights: Tensor
    tokens: int
    seed: int

    @property
    def bits(self) -> int:
        return self.words.shape[0]

    @property
    def held_bytes(self) -> int:
        """Bytes of the sketch, without the centre and the weights."""
        held = (self.words, self.codes, self.low, self.step)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


@dataclass(frozen=True, slots=True)
class SketchedPages:
    """Some pages of each head as one query meets them.

    `words` int64 [bits, heads, pages, width / 4]; `scales` float32 [8, heads, pages, 2], see
    by_field, 0 in slots without a token; `short`: whether there are such slots.
    """

    words: Tensor
    scales: Tensor
    short: bool


@dataclass(frozen=True, slots=True)
class SketchQuery:
    """What the scores of a query with sketches need of the query, scores being in base 2.

    `rotated` [heads, group, width]; `factors` [8 * heads, group, 2]: what a token's scale and
    its square are multiplied with, for the middle of the codes and for the debiasing term;
    `spread`: what the square of a score is multiplied with in that term.
    """

    rotated: Tensor
    factors: Tensor
    spread: float


@lru_cache(maxsize=3)
def level_statistics(bits: int) -> tuple[float, float]:
    """E[l^2] and E[l z] of the level l of a unit normal z, in units of the step."""
    step = STEPS[bits]
    second = product = 0.0
    for code in range(1 << bits):
        level = code - (2**bits - 1) / 2
        low = -math.inf if code == 0 else (level - 0.5) * step
        high = math.inf if code == 2**bits - 1 else (level + 0.5) * step
        below, above = (math.exp(-0.5 * edge * edge) for edge in (low, high))
        share = 0.5 * (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2)))
        second += level * level * share
        product += level * (below - above) / math.sqrt(2 * math.pi)
    return second, product


def coordinate_weights(keys: Tensor, queries: Tensor | None = None) -> Tensor:
    """Weights float32 [heads, Dk] that make for little noise in scores.

    From keys [heads, tokens, Dk] such as those to be sketched, and if there are some, queries
    [q_heads, n, Dk] such as will be asked. The noise of a score grows with the mean of (key /
    weight)^2 times the sum of (query * weight)^2, which is least for the root of deviation of keys
    / size of queries. Of unknown queries it is only certain that some are large where keys differ
    little; then the deviation to the power of 3/4 has served best.
    """
    heads, _, width = keys.shape
    deviation = keys.float().std(1, correction=0)
    weights = deviation.pow(0.75)
    if queries is not None:
        check_query(queries[:, 0], heads, width)
        size = queries.float().reshape(heads, -1, width).square().mean(1).sqrt_()
        weights = (deviation / size.clamp_(min=1e-6)).sqrt_()
    most = weights.amax(1, keepdim=True)
    return torch.where(most > 0, weights / most, 1.0).clamp_(min=1e-3)


def sketch_keys(
    keys: Tensor, centre: Tensor, bits: int, seed: int, weights: Tensor | None = None
) -> Sketch:
    """Sketch keys [heads, tokens, Dk] in slot order, relative to centre [heads, Dk].

    Keys are 32 or 16 bit floats; `weights` [heads, Dk], above 0, are all 1 if None. Queries find
    the rotation again by `seed`. Raises ConfigError for arguments that do not fit together.
    """
    weights = torch.ones_like(centre) if weights is None else weights
    _check_keys(keys, centre, weights, bits)
    heads, tokens, width = keys.shape
    with torch.no_grad():
        centred = keys.float() - centre.float().unsqueeze(1)
        rotated = centred.div_(weights.unsqueeze(1)) @ rotation(width, seed)
        square = rotated.square().sum(-1)
        step = STEPS[bits] * (square / rotated.shape[2]).sqrt().clamp_(min=1e-30)
        middle = (2**bits - 1) / 2
        codes = (rotated / step.unsqueeze(-1) + middle).round_().clamp_(0, 2**bits - 1)
        # <key, (code - middle) * scale> = |key|^2; a key at the centre has scale 0, or nearly.
        scales = square / ((codes - middle) * rotated).sum(-1).clamp_(min=1e-30)
        scale_codes, low, grid = _log_codes(scales)
        pages = -(-tokens // PAGE_TOKENS)
        padded = torch.zeros((heads, pages * PAGE_TOKENS, rotated.shape[2]), dtype=torch.uint8)
        padded[:, :tokens] = codes
        slots = torch.zeros((heads, pages * PAGE_TOKENS), dtype=torch.uint8)
        slots[:, :tokens] = scale_codes
    return Sketch(
        pack(padded.view(heads, pages, -1), bits),
        slots.view(heads, pages, PAGE_TOKENS),
        low,
        grid,
        centre.float(),
        weights.float(),
        tokens,
        seed,
    )


def sketch_scores(
    query: Tensor,
    sketch: Sketch,
    *,
    scale: float,
    workspace: Workspace,
    softcap: float | None = None,
    debias: bool = True,
) -> Tensor:
    """Natural scores [q_heads, tokens] of query [q_heads, Dk] with every sketched key.

    Debiased: the exponential of a score is right on average. With `debias` False the score itself
    is. Raises ConfigError for arguments that do not fit together.
    """
    heads, pages = sketch.codes.shape[:2]
    check_query(query, heads, sketch.centre.shape[1])
    check_scale(scale, softcap)
    with torch.no_grad():
        ready = sketch_query(query, sketch.weights, (sketch.bits, sketch.seed), scale, debias)
        scales = (sketch.low[:, None, None] + sketch.codes * sketch.step[:, None, None]).exp2_()
        block = SketchedPages(sketch.words, by_field(scales), False)
        folded = fold(query, heads, scale)
        centred = (folded @ sketch.centre.unsqueeze(2)).expand(-1, -1, pages)
        scores = _scores(ready, block, centred, softcap, workspace)
        if softcap is None:
            scores = scores.add_(centred.unsqueeze(-1))
        # From the order of planes, [8, heads, group, pages, 2], to the order of slots.
        ordered = scores.permute(1, 2, 3, 0, 4).reshape(query.shape[0], pages * PAGE_TOKENS)
        return ordered[:, : sketch.tokens] * LN_2


def sketch_query(
    query: Tensor, weights: Tensor, kind: tuple[int, int], scale: float, debias: bool = True
) -> SketchQuery:
    """Prepare query [q_heads, Dk] for sketches with these weights and `kind`, (bits, seed)."""
    bits, seed = kind
    folded = fold(query, weights.shape[0], scale) * weights.unsqueeze(1)
    rotated = folded @ rotation(query.shape[1], seed)
    second, product = level_statistics(bits)
    # Half a variance in nats is ln 2 times half the variance in bits, in bits.
    noise = 0.5 * LN_2 * (second - product * product) if debias else 0.0
    middle = rotated.sum(-1, keepdim=True) * (-(2**bits - 1) / 2)
    factors = torch.cat((middle, folded.square().sum(-1, keepdim=True) * -noise), -1)
    return SketchQuery(
        rotated,
        factors.repeat(FIELDS, 1, 1),
        # A key's length squared is width * (scale * product)^2, so the token's scale cancels.
        noise / (rotated.shape[2] * product * product),
    )


def sketched_masses(
    ready: SketchQuery,
    block: SketchedPages,
    centred: Tensor,
    softcap: float | None,
    workspace: Workspace,
) -> Tensor:
    """Base-2 log of the estimated mass of pages, [heads, group, pages].

    `centred` [heads, group, pages]: the base-2 score of the query with the centre of each page.
    """
    scores = _scores(ready, block, centred, softcap, workspace)
    # In two steps, each along memory: half the time of one over three dimensions.
    peak = scores.flatten(3).amax(3).amax(0).unsqueeze(2)
    masses = scores.sub_(peak.unsqueeze(3)).clamp_(min=FLOOR_LOG2).exp2_()
    if block.short:
        masses.masked_fill_((block.scales == 0.0).unsqueeze(2), 0.0)
    slots = masses.sum(0)
    total = (slots[..., 0] + slots[..., 1]).log2_().add_(peak)
    return total if softcap is not None else total.add_(centred)


def fold(query: Tensor, heads: int, scale: float) -> Tensor:
    """`query` [q_heads, Dk] as float32 [heads, group, Dk], scaled so that products are base 2."""
    return query.float().view(heads, -1, query.shape[1]) * (scale * LOG2_E)


def _scores(
    ready: SketchQuery,
    block: SketchedPages,
    centred: Tensor,
    softcap: float | None,
    workspace: Workspace,
) -> Tensor:
    """Debiased base-2 scores [8, heads, group, pages, 2]: without a softcap relative to the centre,
    and in a kept buffer; with a softcap whole."""
    scores = _products(ready, block, workspace)
    heads, group, pages = centred.shape
    shape = (FIELDS, heads, group, pages, _SLOTS)
    scales = block.scales.view(FIELDS * heads, 1, -1)
    squares = scales * scales
    if softcap is None:
        terms = torch.cat((scales, squares), 1)
        scores.baddbmm_(ready.factors, terms)
        if ready.spread:
            scores.addcmul_(scores, scores, value=ready.spread)
        return scores.view(shape)
    scores.addcmul_(ready.factors[..., :1], scales)
    # With a softcap f, E[exp(f(x + n))] is nearly exp(f(x) + w/2 * (f'^2 + f'')).
    noise = (ready.factors[..., 1:] * squares).addcmul_(scores, scores, value=ready.spread)
    cap = softcap * LOG2_E
    bent = scores.view(shape).add_(centred.unsqueeze(-1)).div_(cap).tanh_()
    slope = 1 - bent * bent
    return noise.view(shape).mul_(slope).mul_(slope - bent * (2 / softcap)).add_(bent, alpha=cap)


def _products(ready: SketchQuery, block: SketchedPages, workspace: Workspace) -> Tensor:
    """Products of the rotated query and the codes of tokens times their scales, in a kept buffer
    [8 * heads, group, pages * 2]."""
    bits, heads, pages, quarter = block.words.shape
    group, width = ready.rotated.shape[1:]
    codes = workspace.take("codes", (heads, pages, quarter), torch.int64)
    floats = workspace.take("levels", (heads, pages * _SLOTS, width))
    scores = workspace.take("scores", (FIELDS, heads, group, pages * _SLOTS))
    bytes_of_codes = codes.view(torch.uint8).view(floats.shape)
    # One field at a time, so that what is unpacked stays in the cache until it is used.
    for index in range(FIELDS):
        unpack(block.words, index, codes)
        floats.copy_(bytes_of_codes)
        torch.bmm(ready.rotated, floats.transpose(1, 2), out=scores[index])
    scales = block.scales * lifts(bits)
    return scores.mul_(scales.view(FIELDS, heads, 1, -1)).view(FIELDS * heads, group, -1)


def by_field(slots: Tensor) -> Tensor:
    """[heads, pages, 16] in the order of planes: [8, heads, pages, 2]."""
    return slots.view(*slots.shape[:2], FIELDS, _SLOTS).permute(2, 0, 1, 3).contiguous()


def _log_codes(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 of scales [heads, tokens] on a logarithmic grid per head, its low and its step.

    Scales below 1/256 of the greatest count as that: such keys are at the centre, nearly.
    """
    logs = scales.clamp(min=1e-30).log2_()
    high = logs.amax(1)
    low = torch.maximum(logs.amin(1), high - 8)
    step = ((high - low) / _CODES_MAX).clamp_(min=1e-12)
    codes = ((logs - low.unsqueeze(1)) / step.unsqueeze(1)).round_().clamp_(0, _CODES_MAX)
    return codes.to(torch.uint8), low, step


def check_query(query: Tensor, heads: int, width: int) -> None:
    """Raise ConfigError unless query is [q_heads, width] for this many kv heads."""
    if query.dim() != 2 or query.shape[1] != width or query.shape[0] < 1:
        raise ConfigError(f"query has shape {list(query.shape)}; it takes [q_heads, {width}]")
    if query.shape[0] % heads:
        raise ConfigError(f"query has {query.shape[0]} heads; it takes a multiple of {heads}")
    if not query.is_floating_point() or not query.is_cpu:
        raise ConfigError(f"query is {query.dtype} on {query.device}; it takes floats on the cpu")


def check_scale(scale: float, softcap: float | None) -> None:
    """Raise ConfigError unless these can make scores."""
    if not math.isfinite(scale):
        raise ConfigError(f"scale is {scale}; it takes a finite number")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ConfigError(f"softcap is {softcap}; it takes a finite number above 0, or None")


def _check_keys(keys: Tensor, centre: Tensor, weights: Tensor, bits: int) -> None:
    if bits not in STEPS:
        raise ConfigError(f"bits is {bits}; it takes 2, 3 or 4")
    if keys.dim() != 3 or 0 in keys.shape:
        raise ConfigError(f"keys has shape {list(keys.shape)}; it takes [heads, tokens, Dk]")
    if not keys.is_floating_point() or not keys.is_cpu:
        raise ConfigError(f"keys is {keys.dtype} on {keys.device}; it takes floats on the cpu")
    for name, tensor in (("centre", centre), ("weights", weights)):
        if tensor.shape != (keys.shape[0], keys.shape[2]):
            raise ConfigError(
                f"{name} has shape {list(tensor.shape)}; it takes [heads, Dk] like keys, "
                f"{[keys.shape[0], keys.shape[2]]}"
            )
    if not bool((weights > 0).all()):
        raise ConfigError(f"weights holds {float(weights.min())}; it takes numbers above 0")
    # Only sums: a pass over all elements that allocates nothing.
    if not bool(torch.isfinite(keys.float().sum() + centre.float().sum())):
        raise ConfigError("keys or centre holds values that are not finite; it takes finite ones")
