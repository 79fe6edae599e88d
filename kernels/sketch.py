"""Sketches of keys: 2 to 4 bits a coordinate, from which scores and attention masses are estimated.

What a Sketch keeps of a key, relative to the centre (the mean key of its Segment and head): the
vector is rotated by random signs and a Hadamard matrix and divided by its root mean square, and
each coordinate is rounded to one of 2^bits equally spaced levels, the best such levels for a unit
normal (the rotation makes coordinates nearly normal, whatever the key was). Equal steps make 1 %
more noise at 2 bits than Lloyd and Max's free levels do and 8 % more at 3, and let scores be
computed from the codes as they are: a level is the step times the code, less a constant.

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
from kvtier.kernels.packed_codes import FIELDS, halves, pack, unpack, unpacking
from kvtier.kernels.rotation import rotation
from kvtier.kernels.workspace import Workspace

STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352}
"""Distance of neighbouring levels for a unit normal, by bits (Max 1960, table II)."""
BLOCK_CODES = 1 << 22
"""Of all heads, unpacked and scored at a time: 4 MiB. With fewer, calls outweigh the work."""
FLOATS = 1 << 19
"""Codes turned into floats at a time, 2 MiB, so that these stay in the processor's cache."""
BLOCK_PAGES = 512
"""Pages of a head at a time, if there are as many: products with fewer rows take longer."""
FLOOR_LOG2 = -100.0
"""Tokens count as at least 2^-100 of the heaviest: exp2 is slow where its result is denormal."""

LOG2_MAX = 20.0
"""Of the scale of a key: fourth powers of scores are taken, which must be float32. Any key of
float16 is smaller, and so is any that a model has."""
_CODES_MAX = 255
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


@dataclass(frozen=True, slots=True)
class Sketch:
    """Sketched keys of whole pages, heads leading.

    `words` int64 [bits, heads, pages, width / 4], width being that of rotated keys; `codes` uint8
    [heads, pages, 16], the scales of tokens: 2^(low + code * step), with `low` and `step` float32
    [heads]; `centre` float32 [heads, Dk]; `tokens`, of which the last page may hold
    fewer than 16.
    """

    words: Tensor
    codes: Tensor
    low: Tensor
    step: Tensor
    centre: Tensor
    tokens: int
    seed: int

    @property
    def bits(self) -> int:
        return self.words.shape[0]

    @property
    def held_bytes(self) -> int:
        """Bytes of the sketch, without the centre."""
        held = (self.words, self.codes, self.low, self.step)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


@dataclass(frozen=True, slots=True)
class SketchedPages:
    """Some pages of each head as one query meets them.

    `words` int32 [bits, 2, heads, pages, width / 4], see halves. By place, see Unpacking: `scales`
    float32 [16, heads, pages], and `empty` bool like it, slots without a token; None: there are no
    such slots.
    """

    words: Tensor
    scales: Tensor
    empty: Tensor | None


@dataclass(frozen=True, slots=True)
class SketchQuery:
    """What the scores of a query with sketches need of the query, scores being in base 2.

    `rotated` [16, heads, rows, width], for each place, over its lift: a row for each query head of
    a group, maybe more, see padded_group, all 0. `factors` [16, heads, rows, 2]: what a token's
    scale and its square are multiplied with, for the middle of the codes and for the debiasing
    term; `spread`: what the square of a score is multiplied with in that term.
    """

    rotated: Tensor
    factors: Tensor
    spread: float

    def of(self, heads: slice) -> "SketchQuery":
        """That of some kv heads."""
        return SketchQuery(self.rotated[:, heads], self.factors[:, heads], self.spread)


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


def sketch_keys(keys: Tensor, centre: Tensor, bits: int, seed: int) -> Sketch:
    """Sketch keys [heads, tokens, Dk] in slot order, relative to centre [heads, Dk].

    Keys are 32 or 16 bit floats. Queries find the rotation again by `seed`. Raises ConfigError for
    arguments that do not fit together, and for keys that are too large.
    """
    _check_keys(keys, centre, bits)
    heads, tokens, width = keys.shape
    with torch.no_grad():
        centred = keys.float() - centre.float().unsqueeze(1)
        rotated = centred @ rotation(width, seed)
        square = rotated.square().sum(-1)
        step = STEPS[bits] * (square / rotated.shape[2]).sqrt().clamp_(min=1e-30)
        middle = (2**bits - 1) / 2
        codes = (rotated / step.unsqueeze(-1) + middle).round_().clamp_(0, 2**bits - 1)
        # <key, (code - middle) * scale> = |key|^2; a key at the centre has scale 0, or nearly.
        scales = square / ((codes - middle) * rotated).sum(-1).clamp_(min=1e-30)
        scale_codes, low, grid = _log_codes(scales)
        if not bool((low + _CODES_MAX * grid <= LOG2_MAX).all()):
            raise ConfigError(f"keys have scales above 2^{LOG2_MAX:.0f}; it takes smaller ones")
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
        folded = fold(query, heads, scale)
        ready = sketch_query(folded, (sketch.bits, sketch.seed), debias)
        codes = in_order(sketch.codes, sketch.bits)
        grids = torch.stack((sketch.low, sketch.step)).unsqueeze(2).expand(-1, -1, pages)
        block = SketchedPages(halves(sketch.words), scales_of(codes, grids), None)
        centred = (folded @ sketch.centre.unsqueeze(2)).expand(-1, -1, pages)
        scores = _scores(ready, block, centred, softcap, workspace)
        if softcap is None:
            scores = scores + centred
        by_slot = scores[unpacking(sketch.bits).slots.argsort()].permute(1, 2, 3, 0)
        return by_slot.reshape(query.shape[0], -1)[:, : sketch.tokens] * LN_2


def sketch_query(folded: Tensor, kind: tuple[int, int], debias: bool = True) -> SketchQuery:
    """Prepare a folded query [heads, group, Dk] for sketches of a `kind`, (bits, seed)."""
    bits, seed = kind
    heads, group, width = folded.shape
    turns = rotation(width, seed)
    rotated = torch.zeros((heads, padded_group(group), turns.shape[1]))
    rotated[:, :group] = folded @ turns
    second, product = level_statistics(bits)
    # Half a variance in nats is ln 2 times half the variance in bits, in bits.
    noise = 0.5 * LN_2 * (second - product * product) if debias else 0.0
    middle = rotated.sum(-1, keepdim=True) * (-(2**bits - 1) / 2)
    factors = torch.cat((middle, rotated.square().sum(-1, keepdim=True) * -noise), -1)
    lifts = unpacking(bits).lifts.view(PAGE_TOKENS, 1, 1, 1)
    return SketchQuery(
        lifts * rotated,
        factors.expand(PAGE_TOKENS, -1, -1, -1).contiguous(),
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
    peak = scores.amax(0)
    masses = scores.sub_(peak).clamp_(min=FLOOR_LOG2).exp2_()
    if block.empty is not None:
        masses.masked_fill_(block.empty.unsqueeze(2), 0.0)
    total = masses.sum(0).log2_().add_(peak)
    return total if softcap is not None else total.add_(centred)


def fold(query: Tensor, heads: int, scale: float) -> Tensor:
    """`query` [q_heads, Dk] as float32 [heads, group, Dk], scaled so that products are base 2."""
    return query.float().view(heads, -1, query.shape[1]) * (scale * LOG2_E)


def padded_group(group: int) -> int:
    """Rows of a product that serves a group: one of 3 or 7 takes longer than one of 4 or 8."""
    return group + (group in (3, 7))


def _scores(
    ready: SketchQuery,
    block: SketchedPages,
    centred: Tensor,
    softcap: float | None,
    workspace: Workspace,
) -> Tensor:
    """Debiased base-2 scores [16, heads, group, pages], by place and in a kept buffer: without a
    softcap relative to the centre, with a softcap whole."""
    products = _products(ready, block, workspace)
    heads, group, pages = centred.shape
    scales = block.scales.view(PAGE_TOKENS * heads, 1, pages)
    terms = workspace.take("terms", (2, PAGE_TOKENS * heads, pages))
    torch.mul(block.scales, block.scales, out=terms[1].view(block.scales.shape))
    products.mul_(scales)
    factors = ready.factors.flatten(0, 1)
    shown = products.view(PAGE_TOKENS, heads, -1, pages)[:, :, :group]
    if softcap is None:
        terms[0].copy_(scales.squeeze(1))
        products.baddbmm_(factors, terms.transpose(0, 1))
        # The square should be that of the score before noise was taken off: 0.01 nats at most.
        return shown.addcmul_(shown, shown, value=ready.spread) if ready.spread else shown
    products.addcmul_(factors[..., :1], scales)
    # With a softcap f, E[exp(f(x + n))] is nearly exp(f(x) + w/2 * (f'^2 + f'')).
    noise = factors[..., 1:] * terms[1].unsqueeze(1)
    noise.addcmul_(products, products, value=ready.spread)
    noise = noise.view(PAGE_TOKENS, heads, -1, pages)[:, :, :group]
    cap = softcap * LOG2_E
    bent = shown.add_(centred).div_(cap).tanh_()
    slope = 1 - bent * bent
    noise.mul_(slope).mul_(slope - bent * (2 / softcap))
    return bent.mul_(cap).add_(noise)


def _products(ready: SketchQuery, block: SketchedPages, workspace: Workspace) -> Tensor:
    """Products of the rotated query and the codes of tokens, in a kept buffer [16 * heads, rows,
    pages]."""
    shape = block.words.shape[1:]
    rotated, pages = ready.rotated.flatten(0, 1), shape[2]
    batch, many, width = rotated.shape
    codes = workspace.take("codes", (FIELDS, *shape), torch.int32)
    spare = workspace.take("spare", (2, *shape), torch.int32)
    unpack(block.words, codes, spare)
    by_place = codes.view(torch.uint8).view(batch, pages, width)
    scores = workspace.take("scores", (batch, many, pages))
    step = max(1, FLOATS // (pages * width))
    for first in range(0, batch, step):
        part = slice(first, first + step)
        some = by_place[part]
        floats = workspace.take("levels", (some.shape[0], pages, width)).copy_(some)
        torch.bmm(rotated[part], floats.transpose(1, 2), out=scores[part])
    return scores


def in_order(slots: Tensor, bits: int) -> Tensor:
    """[heads, pages, 16] by slot, as codes are unpacked: by place."""
    return slots.index_select(2, unpacking(bits).slots)


def scales_of(codes: Tensor, grids: Tensor) -> Tensor:
    """Scales float32 [16, heads, pages] of uint8 codes [heads, pages, 16], both by place, and
    `grids` [2, heads, pages], the low and the step of each page."""
    low, step = grids
    by_place = codes.permute(2, 0, 1).contiguous()
    return by_place.float().mul_(step).add_(low).exp2_()


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


def _check_keys(keys: Tensor, centre: Tensor, bits: int) -> None:
    if bits not in STEPS:
        raise ConfigError(f"bits is {bits}; it takes 2, 3 or 4")
    if keys.dim() != 3 or 0 in keys.shape:
        raise ConfigError(f"keys has shape {list(keys.shape)}; it takes [heads, tokens, Dk]")
    if not keys.is_floating_point() or not keys.is_cpu:
        raise ConfigError(f"keys is {keys.dtype} on {keys.device}; it takes floats on the cpu")
    if centre.shape != (keys.shape[0], keys.shape[2]):
        raise ConfigError(
            f"centre has shape {list(centre.shape)}; it takes [heads, Dk] like keys, "
            f"{[keys.shape[0], keys.shape[2]]}"
        )
    # Only sums: a pass over all elements that allocates nothing.
    if not bool(torch.isfinite(keys.float().sum() + centre.float().sum())):
        raise ConfigError("keys or centre holds values that are not finite; it takes finite ones")
