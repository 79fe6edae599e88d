"""In which order tokens lie on the drive, so that those with similar keys are read together.

Invariants:
- The order of a set depends on its keys alone: not on the other sets of a call, nor on threads.
  Keys become whole numbers first, and all that is summed is exact (see `page_tree`).
- Only distances between keys count: moving, turning or scaling all keys of a set changes nothing
  but what is rounded.
"""

from collections.abc import Generator
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from kvtier.errors import ConfigError
from kvtier.kernels.page_exchange import exchanged
from kvtier.kernels.page_tree import level_of, tree_order

Value = TypeVar("Value")

TOKENS_MAX = 4096
WIDTH_MAX = 16384

_ELEMENTS_AT_ONCE = 1 << 21
"""Of keys; about eight times their bytes in float32 are in use meanwhile."""
_CENTRE_TOKENS = 32
_OUTLYING, _OUTLIERS = 4, 16
"""A coordinate counts up to 4 times the largest one of all tokens but a 16th. What is farther out
is in a page of its like anyway; finer steps are of use to all the others."""


def balanced_order(keys: Tensor, page_tokens: int = 16) -> Tensor:
    """The order that fills pages with tokens of similar keys, and has similar pages side by side.

    keys: float [sets, tokens, width]; a set is what is read together: one layer and kv head of one
    Segment. Returns int64 [sets, tokens]: which token lies in each slot. Every page is full but the
    last. Raises ConfigError, before any work, also for keys that are not finite.
    """
    return to_end(balanced_ordering(keys, page_tokens))


def to_end(steps: Generator[None, None, Value]) -> Value:
    """The value of what comes in steps, for who waits for all of them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: Value = end.value
            return value


def balanced_ordering(keys: Tensor, page_tokens: int = 16) -> Generator[None, None, Tensor]:
    """What `balanced_order` does, in some 40 steps for each batch of sets. Its value is the order.
    For who cannot wait for all of it at once."""
    keys = _checked(keys)
    if page_tokens < 1:
        raise ConfigError(f"page_tokens is {page_tokens}; it takes at least 1")
    sets, tokens, width = keys.shape
    if tokens <= page_tokens or sets == 0:
        return torch.arange(tokens).repeat(sets, 1)
    count = -(-tokens // page_tokens)
    orders = []
    for some in _batches(keys):
        rows = functional.pad(_whole(some), (0, 0, 0, count * page_tokens - tokens))
        yield
        pages = rows.view(len(some), count, page_tokens, width)
        order, pages = yield from tree_order(pages, tokens)
        order = yield from exchanged(pages, order, tokens)
        orders.append(order[:, :tokens])
    return torch.cat(orders)


def _checked(keys: Tensor) -> Tensor:
    """In float32. Raises ConfigError."""
    if keys.ndim != 3 or not keys.dtype.is_floating_point:
        raise ConfigError(
            f"keys is {list(keys.shape)} {keys.dtype}; it takes a float [sets, tokens, width]"
        )
    _, tokens, width = keys.shape
    if not (1 <= tokens <= TOKENS_MAX and 1 <= width <= WIDTH_MAX):
        raise ConfigError(
            f"keys has {tokens} tokens of width {width}; it takes 1 to {TOKENS_MAX} tokens of "
            f"width 1 to {WIDTH_MAX}"
        )
    keys = keys.to(torch.float32)
    if not bool(torch.isfinite(keys).all()):
        raise ConfigError("keys are not all finite in float32; they have no place among others")
    return keys


def _batches(keys: Tensor) -> tuple[Tensor, ...]:
    sets_at_once = max(1, _ELEMENTS_AT_ONCE // (keys.shape[1] * keys.shape[2]))
    return torch.split(keys, sets_at_once)


def _whole(keys: Tensor) -> Tensor:
    """Keys [sets, tokens, width] as whole numbers in float32 from -level to level, near 0.

    Each step looks at single numbers, or chooses one among many; none sums what is not whole.
    """
    sets, tokens, width = keys.shape
    level = level_of(width)
    # To a size about 1, by a power of two: nothing overflows, whatever the keys are.
    exponents = torch.frexp(keys.abs().amax((1, 2))).exponent.clamp_(-100, 100)
    small = keys * torch.ldexp(torch.ones(sets), -exponents)[:, None, None]
    # Middle values of some tokens: a token far out must not move the centre of the others.
    small -= small[:, :: -(-tokens // _CENTRE_TOKENS)].median(1, keepdim=True).values
    reach = small.abs().amax(2)
    usual = reach.kthvalue(tokens - tokens // _OUTLIERS, 1).values
    limit = torch.where(usual > 0, torch.minimum(reach.amax(1), _OUTLYING * usual), reach.amax(1))
    small *= (level / limit.clamp_(min=1e-30))[:, None, None]
    return small.round_().clamp_(-level, level)
