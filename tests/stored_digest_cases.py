"""Digests in Extents, for tests: compared, and where they lie."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvtier.io.extent import Extent
from kvtier.kernels.digests import PageDigests
from kvtier.tiering import extent_format
from kvtier.tiering.catalog_rows import extents_of
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from tests.rebuild_cases import rows
from tests.store_cases import KV, a_query, open_store, put, some_tokens

WIDE = Geometry.uniform(2, 2, 64, dtype="bfloat16")
KEYS = Config("32MiB", hot="16MiB", placement="keys")
TOKENS = some_tokens(1100, 7)
"""Two whole Segments and one of 76 tokens."""
KINDS = [None, 2, 3, 4]


def written(path: Path) -> KV:
    """A store that holds TOKENS under the name a, closed again; what it holds."""
    kv = KV(WIDE)
    with open_store(path, WIDE, KEYS) as store:
        put(store, kv, "a", TOKENS)
    return kv


def arrays(digests: PageDigests) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {}
    for part in (digests, digests.sketch):
        for name in () if part is None else part.__slots__:
            found[name] = getattr(part, name)
    return {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}


def same(one: PageDigests | None, other: PageDigests | None) -> bool:
    """Bit for bit, of the same kind and the same tokens."""
    assert one is not None
    assert other is not None
    mine, its = arrays(one), arrays(other)
    return (
        mine.keys() == its.keys()
        and all(each.dtype == its[name].dtype for name, each in mine.items())
        and all(torch.equal(each, its[name]) for name, each in mine.items())
        and one.tokens == other.tokens
        and (one.sketch is None) == (other.sketch is None)
        and (one.sketch is None or one.sketch.seed == other.sketch.seed)  # type: ignore[union-attr]
    )


def unit_of(layer: int, tokens: int, generation: int = 77) -> Any:
    """As much of a Unit as digests look at."""
    return SimpleNamespace(
        layer=layer, segment=SimpleNamespace(token_count=tokens, generation=generation)
    )


def made(store: Store, sequence: Sequence, layer: int) -> list[PageDigests]:
    """Of each view, from its Pages."""
    rows_of = [store._sparse._rows(view.segment, layer) for view in sequence.views]
    return [store._sparse.kind.make(*each) for each in rows_of]


def ask(store: Store, kv: KV, sequence: Sequence, budget: float = 0.2) -> list[torch.Tensor]:
    """What three queries of each layer get."""
    return [
        store.attend(sequence, layer, a_query(kv, layer, 1, seed), budget=budget)
        for layer in range(len(kv.geometry.layers))
        for seed in range(3)
    ]


def sections(path: Path, geometry: Geometry) -> list[tuple[Extent, int, int, int]]:
    """(extent, layer, tokens, where its digests begin) of all Extents that have some."""
    found = []
    for row in rows(path):
        for layer, extent in enumerate(extents_of(row)):
            start = extent_format.extent_bytes(geometry, layer, row.token_count)
            if extent.length > start:
                found.append((extent, layer, row.token_count, start))
    return found


REOPENED = replace(KEYS, region=None)
