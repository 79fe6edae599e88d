"""Selectors behind one interface: kvtier's own, and what others do, on the same pages and budget.

For benchmarks and tests. The others are window with sinks (StreamingLLM), accumulated mass (H2O),
bounds of pages (Quest) and the true mass as an upper mark of what a choice of pages can reach.
What others build per page they take from the keys at once; memory is not compared here.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.digests import LayerDigests
from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.page_mass import page_mass
from kvtier.kernels.running import Partial
from kvtier.kernels.selection import group_mass, page_shares, top_pages, unread_partial
from kvtier.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Selection:
    """What one query reads of a layer: `chosen` bool [kv_heads, pages]; `unread` stands for the
    other pages, or is None where they count as nothing."""

    chosen: Tensor
    unread: Partial | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a choice is bound to: `page_bytes` int64 and `always` bool, both [pages] or [kv_heads,
    pages], see top_pages; `scale` of scores."""

    page_bytes: Tensor
    always: Tensor
    scale: float


class Selector(Protocol):
    """Chooses the pages that a query reads."""

    def select(self, query: Tensor, budget_bytes: int) -> Selection:
        """For query [q_heads, Dk] and this many bytes per kv head."""
        ...


class DigestSelector:
    """kvtier: masses from digests, by means or (`refined` above 0) by sketches; with `estimate`
    unread pages count as their mean value."""

    def __init__(
        self, digests: LayerDigests, terms: Terms, refined: float = 0.0, estimate: bool = True
    ) -> None:
        self._digests = digests
        self._terms = terms
        self._refined = refined
        self._estimate = estimate
        self._workspace = Workspace()

    def select(self, query: Tensor, budget_bytes: int) -> Selection:
        digests, workspace = self._digests, self._workspace
        masses = page_mass(
            query,
            digests,
            scale=self._terms.scale,
            workspace=workspace,
            refined=self._refined,
        )
        chosen = _choose(masses, digests.heads, self._terms, budget_bytes)
        if not self._estimate:
            return Selection(chosen)
        means, factors = digests.array("value_means"), digests.array("value_factors")
        return Selection(
            chosen, unread_partial(page_shares(masses), means, factors, ~chosen, workspace)
        )


class WindowSelector:
    """The pages that are always read, and the last ones; for pages in the order of positions."""

    def __init__(self, kv_heads: int, terms: Terms) -> None:
        self._terms = terms
        self._mass = torch.arange(1.0, terms.always.shape[-1] + 1).expand(kv_heads, -1)

    def select(self, query: Tensor, budget_bytes: int) -> Selection:
        sizes = self._terms.page_bytes
        # The mass per byte is what counts, and here that is to be the position.
        mass = self._mass * sizes
        return Selection(top_pages(mass, sizes, budget_bytes, self._terms.always))


class AccumulatedSelector:
    """The pages that earlier queries gave the most mass, whatever the query is."""

    def __init__(self, kv_heads: int, terms: Terms) -> None:
        self._terms = terms
        self._mass = torch.zeros((kv_heads, terms.always.shape[-1]))

    def observe(self, log_mass: Tensor) -> None:
        """Count the true masses [q_heads, pages] of one query, natural logs."""
        self._mass += group_mass(page_shares(log_mass), log_mass.shape[0] // self._mass.shape[0])

    def select(self, query: Tensor, budget_bytes: int) -> Selection:
        terms = self._terms
        return Selection(top_pages(self._mass, terms.page_bytes, budget_bytes, terms.always))


class BoundSelector:
    """The pages with the greatest upper bound of a score, from the least and greatest value of
    every coordinate; `keys` [kv_heads, tokens, Dk] in the order of slots."""

    def __init__(self, keys: Tensor, terms: Terms) -> None:
        pages = _pages_of(keys)
        self._terms = terms
        self._low = pages.nan_to_num(nan=math.inf).amin(2)
        self._high = pages.nan_to_num(nan=-math.inf).amax(2)

    def select(self, query: Tensor, budget_bytes: int) -> Selection:
        heads = self._low.shape[0]
        folded = query.float().view(heads, -1, query.shape[1]) * self._terms.scale
        bounds = folded.clamp(min=0) @ self._high.transpose(1, 2)
        bounds += folded.clamp(max=0) @ self._low.transpose(1, 2)
        return Selection(_choose(bounds.view(query.shape[0], -1), heads, self._terms, budget_bytes))


class OracleSelector:
    """The pages with the greatest true mass; `keys` [kv_heads, tokens, Dk] in slot order."""

    def __init__(self, keys: Tensor, terms: Terms) -> None:
        self._keys = keys
        self._terms = terms

    def select(self, query: Tensor, budget_bytes: int) -> Selection:
        masses = true_mass(query, self._keys, self._terms.scale)
        return Selection(_choose(masses, self._keys.shape[0], self._terms, budget_bytes))


def true_mass(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Natural log of the mass of pages [q_heads, pages], from all keys [kv_heads, tokens, Dk]."""
    heads, tokens, width = keys.shape
    if query.dim() != 2 or query.shape[1] != width or query.shape[0] % heads:
        raise ConfigError(
            f"query has shape {list(query.shape)}; it takes [q_heads, {width}] with a multiple of "
            f"{heads} heads"
        )
    scores = query.float().view(heads, -1, width) @ keys.float().transpose(1, 2) * scale
    padding = -tokens % PAGE_TOKENS
    padded = torch.nn.functional.pad(scores, (0, padding), value=-math.inf)
    return padded.view(query.shape[0], -1, PAGE_TOKENS).logsumexp(2)


def _choose(log_mass: Tensor, kv_heads: int, terms: Terms, budget_bytes: int) -> Tensor:
    mass = group_mass(page_shares(log_mass), log_mass.shape[0] // kv_heads)
    return top_pages(mass, terms.page_bytes, budget_bytes, terms.always)


def _pages_of(keys: Tensor) -> Tensor:
    """Keys [heads, pages, 16, Dk], NaN where the last page has no token."""
    heads, tokens, width = keys.shape
    padded = torch.nn.functional.pad(keys.float(), (0, 0, 0, -tokens % PAGE_TOKENS), value=math.nan)
    return padded.view(heads, -1, PAGE_TOKENS, width)
