"""Stores for tests: KV that follows from the tokens alone, the reference, what must always hold.

Keys and values of a position are a function of all tokens up to it, as a model's are. So the list
of its tokens is the whole reference of a Sequence, whatever was shared, cropped or deduplicated.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.kernels.oracle import attention_oracle
from kvtier.tiering.clusterer import Ordering, Placement, UnitKeys
from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.listing import describe
from kvtier.tiering.packing import TORCH_DTYPES
from kvtier.tiering.page_layout import Order
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify

MIB = 1 << 20
VOCABULARY = 97
GROUP = 2
"""Query heads per kv head."""
CHAIN_ROWS = 4099
TOLERANCE = {"float32": 3e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Against an output of magnitude 1 that is rounded to the dtype."""

PLAIN = Geometry.uniform(2, 2, 8)
GEOMETRIES = {
    "uniform": Geometry.uniform(3, 2, 8),
    "heads differ": Geometry(
        (LayerGeometry(1, 8, 8), LayerGeometry(4, 8, 8), LayerGeometry(2, 8, 8)), "float32"
    ),
    "widths differ": Geometry((LayerGeometry(2, 8, 16), LayerGeometry(2, 24, 8)), "float32"),
    "windows": Geometry(
        (LayerGeometry(2, 8, 8), LayerGeometry(2, 8, 8, 20), LayerGeometry(2, 8, 8, 600)),
        "float32",
    ),
    "float16": Geometry.uniform(2, 2, 16, dtype="float16"),
    "bfloat16": Geometry.uniform(2, 2, 16, dtype="bfloat16"),
}


class Shuffled(Placement):
    """Every head of every Segment in an order of its own."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def orders(self, units: Listing[UnitKeys]) -> list[Order | None]:
        return [self._order(*unit.keys.shape[:2]) for unit in units]

    def _order(self, heads: int, tokens: int) -> Order:
        return np.stack([self._random.permutation(tokens) for _ in range(heads)])


class ShuffledInSteps(Shuffled):
    """The same in steps, one for each unit, as orders by keys come. taken: how many were taken."""

    in_steps = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.taken = 0

    def ordering(self, units: Iterable[UnitKeys]) -> Ordering:
        orders: dict[int, Order] = {}
        for number, unit in enumerate(units):
            (order,) = self.orders([unit])
            if order is not None:
                orders[number] = order
            self.taken += 1
            yield
        return orders


class KV:
    """Keys and values of any token list. `salt` stands for the weights."""

    def __init__(self, geometry: Geometry, salt: int = 0) -> None:
        self.geometry = geometry
        random = np.random.default_rng(1000 + salt)
        dtype = TORCH_DTYPES[geometry.dtype]
        self._tables = [
            tuple(
                torch.from_numpy(random.standard_normal((each.kv_heads, CHAIN_ROWS, width))).to(
                    dtype
                )
                for width in (each.key_width, each.value_width)
            )
            for each in geometry.layers
        ]

    def rows(self, tokens: Listing[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """keys [kv_heads, tokens, Dk], values [kv_heads, tokens, Dv]."""
        chain, places = 17, []
        for token in tokens:
            chain = (chain * 1_000_003 + token + 1) & 0xFFFFFFFFFF
            places.append(chain % CHAIN_ROWS)
        keys, values = self._tables[layer]
        index = torch.tensor(places, dtype=torch.int64)
        return keys[:, index], values[:, index]


class Remembered(KV):
    """Computes the rows of a token list once: for tests that compare thousands of times."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self._known: dict[tuple[tuple[int, ...], int], tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(self, tokens: Listing[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = (tuple(tokens), layer)
        if key not in self._known:
            self._known[key] = super().rows(tokens, layer)
        return self._known[key]


def open_store(
    path: Path,
    geometry: Geometry = PLAIN,
    config: Config | None = None,
    placement: Placement | None = None,
    model: str = "m",
) -> Store:
    """The store in `path`; 32 MiB for a new one unless `config` says otherwise."""
    is_new = not (path / "store.yaml").exists()
    config = config or Config("32MiB" if is_new else None, hot="4MiB")
    return Store.open(path, geometry, Fingerprint.of({"model": model}), config, placement)


def some_tokens(count: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
    return found


def extend(
    store: Store, kv: KV, sequence: Sequence, tokens: Listing[int], *, pieces: int = 10**9
) -> None:
    """Append what `tokens` has and the Sequence has not, `pieces` tokens to a pass."""
    rows = [kv.rows(tokens, layer) for layer in range(len(kv.geometry.layers))]
    first = sequence.length()
    while first < len(tokens):
        last = min(first + pieces, len(tokens))
        for layer, (keys, values) in enumerate(rows):
            store.append(sequence, layer, keys[:, first:last], values[:, first:last])
        first = last


def put(store: Store, kv: KV, name: str, tokens: Listing[int], *, pieces: int = 10**9) -> None:
    """Compute, save and release a token list, as a caller without any cache would."""
    sequence = store.sequence()
    extend(store, kv, sequence, tokens, pieces=pieces)
    assert store.save(sequence, name, tokens) == len(tokens)
    store.release(sequence)


def expected(kv: KV, tokens: Listing[int], layer: int, query: torch.Tensor) -> NDArray[np.float64]:
    """What the oracle makes of it: [q_heads, n, value_width]."""
    shape = kv.geometry.layers[layer]
    keys, values = kv.rows(tokens, layer)
    asking = np.arange(len(tokens) - query.shape[1], len(tokens))[:, None]
    positions = np.arange(len(tokens))[None]
    mask = positions <= asking
    if shape.window is not None:
        mask &= positions > asking - shape.window
    out, _ = attention_oracle(
        query.double().numpy(),
        keys.double().numpy(),
        values.double().numpy(),
        mask[None],
        shape.key_width**-0.5,
        None,
    )
    return out


def a_query(kv: KV, layer: int, count: int, seed: int) -> torch.Tensor:
    shape = kv.geometry.layers[layer]
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(GROUP * shape.kv_heads, count, shape.key_width, generator=generator)
    return query.to(TORCH_DTYPES[kv.geometry.dtype])


def check_attend(
    store: Store,
    kv: KV,
    sequence: Sequence,
    tokens: Listing[int],
    *,
    layer: int,
    count: int = 1,
    given: bool = False,
) -> None:
    """Attention of the last `count` tokens is the oracle's. given: hand in their own rows."""
    query = a_query(kv, layer, count, len(tokens))
    keys = values = None
    if given:
        keys, values = (rows[:, -count:] for rows in kv.rows(tokens, layer))
    out = store.attend(sequence, layer, query, keys=keys, values=values)
    assert out.dtype == query.dtype
    difference = np.abs(out.double().numpy() - expected(kv, tokens, layer, query)).max()
    assert difference < TOLERANCE[kv.geometry.dtype], f"off by {difference}"


def check_everywhere(store: Store, kv: KV, sequence: Sequence, tokens: Listing[int]) -> None:
    assert sequence.length() == len(tokens)
    for layer in range(len(kv.geometry.layers)):
        check_attend(store, kv, sequence, tokens, layer=layer)


def check_bytes(store: Store, kv: KV, sequence: Sequence, tokens: Listing[int]) -> None:
    """Every key and value that the store holds for a Sequence is bit for bit what was appended."""
    assert sequence.length() == len(tokens)
    parts = [(view.segment, view.limit) for view in sequence.views]
    parts += [(segment, segment.filled[0]) for segment in sequence.tail]
    for layer in range(len(kv.geometry.layers)):
        keys, values = kv.rows(tokens, layer)
        for segment, limit in parts:
            assert store._mover.load([Unit(segment, layer)]) == 1
            held = store._mover.tensors(Unit(segment, layer))
            place = slice(segment.start, segment.start + limit)
            assert torch.equal(held[0][:, :limit], keys[:, place])
            assert torch.equal(held[1][:, :limit], values[:, place])


def check_settled(store: Store, path: Path) -> None:
    """What holds when every Sequence was released: no lease, no leaked byte, nothing damaged."""
    assert not store._residency.leases.any()
    for each in store._registry.committed.values():
        assert each.references == 0
    store._files.allocator.check()
    stats = store.stats()
    assert stats.hot_bytes_max <= stats.hot_limit_bytes
    assert stats.host_bytes <= stats.host_limit_bytes
    assert stats.device_bytes == describe(path).used_bytes
    assert verify(path).findings == []


def shared(left: Listing[int], right: Listing[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))
