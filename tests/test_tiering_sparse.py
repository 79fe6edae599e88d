"""Sparse attention through the store: what a budget reads, wherever the Pages are."""

from collections.abc import Sequence as Listing
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError, FormatError, UnsupportedError
from kvtier.tiering.clusterer import Placement, UnitKeys
from kvtier.tiering.config import Config, PlacementName
from kvtier.tiering.fingerprint import Provenance
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.page_layout import Order
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from tests.store_cases import (
    GEOMETRIES,
    KV,
    TOLERANCE,
    Shuffled,
    a_query,
    expected,
    extend,
    open_store,
    put,
    some_tokens,
)

WIDE = Geometry.uniform(2, 2, 32)
ALL = 1 - 1e-9
"""A budget that is not everything by name, but reads every Page."""


class Themed(KV):
    """Keys of a few themes, which a query can ask for; values as usual."""

    THEMES = 24

    def __init__(self, geometry: Geometry, seed: int) -> None:
        super().__init__(geometry, seed)
        random = np.random.default_rng(seed)
        self.themes = []
        for keys, _ in self._tables:
            heads, rows, width = keys.shape
            themes = torch.from_numpy(random.standard_normal((heads, self.THEMES, width))).float()
            of = torch.from_numpy(random.integers(0, self.THEMES, rows))
            keys.mul_(0.3).add_(2.5 * themes[:, of])
            self.themes.append(themes)

    def asks(self, layer: int, theme: int) -> torch.Tensor:
        """A query [q_heads, 1, width] for one theme of every head."""
        return 2.5 * self.themes[layer][:, theme].repeat_interleave(2, 0)[:, None]


def resumed(store: Store, kv: KV, tokens: list[int], tail: int) -> Sequence:
    """Everything but the last `tail` tokens is sealed."""
    sequence = store.resume(tokens[: len(tokens) - tail])
    assert sequence.length() == len(tokens) - tail
    extend(store, kv, sequence, tokens)
    return sequence


@pytest.mark.parametrize("bits", [0, 2, 3, 4])
@pytest.mark.parametrize("placed", [False, True])
def test_a_budget_of_every_page_is_exact(bits: int, placed: bool, tmp_path: Path) -> None:
    for name, geometry in GEOMETRIES.items():
        kv, tokens = KV(geometry), some_tokens(1203, 1)
        config = Config("32MiB", hot="8MiB", sketch_bits=bits)
        with open_store(
            tmp_path / name, geometry, config, Shuffled(1) if placed else None
        ) as store:
            put(store, kv, "a", tokens[:1150])
            sequence = resumed(store, kv, tokens, 53)
            for layer in range(len(geometry.layers)):
                query = a_query(kv, layer, 1, 3)
                out = store.attend(sequence, layer, query, budget=ALL)
                wanted = expected(kv, tokens, layer, query)
                assert out.dtype == query.dtype
                assert np.abs(out.double().numpy() - wanted).max() < TOLERANCE[geometry.dtype]


@pytest.mark.parametrize(("bits", "error"), [(0, 0.3), (2, 0.05), (3, 0.05), (4, 0.05)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_a_query_asks_for_is_read(bits: int, error: float, seed: int, tmp_path: Path) -> None:
    """An eighth of the Pages, where those of a theme lie together, says nearly all. Means alone do
    not see the last few of a theme in a Page of another one."""
    kv, tokens = Themed(WIDE, seed), some_tokens(2048, seed)
    config = Config("64MiB", hot="16MiB", sketch_bits=bits)
    with open_store(tmp_path, WIDE, config, ByTheme(kv, seed)) as store:
        put(store, kv, "a", tokens)
        sequence = store.resume(tokens)
        for layer in range(2):
            for theme in range(6):
                query = kv.asks(layer, theme)
                out = store.attend(sequence, layer, query, budget=0.125)
                wanted = expected(kv, tokens, layer, query)
                assert np.abs(out.double().numpy() - wanted).max() < error
        stats = store.stats()
        share = stats.pages_chosen / stats.pages_to_choose
        assert share < 0.125 + 2 * 32 / 256, "the last segment's recent pages are beyond the budget"


class Fixed(Placement):
    """Every head of every unit in an order of its own, whenever it is asked for."""

    def orders(self, units: Listing[UnitKeys]) -> list[Order | None]:
        found: list[Order | None] = []
        for unit in units:
            random = np.random.default_rng((unit.layer, unit.start))
            heads, tokens, _ = unit.keys.shape
            found.append(np.stack([random.permutation(tokens) for _ in range(heads)]))
        return found


class ByTheme(Shuffled):
    """Each head's tokens of a Segment sorted by their nearest theme, sinks first."""

    def __init__(self, kv: Themed, seed: int) -> None:
        super().__init__(seed)
        self._layers = [each.float() for each in kv.themes]

    def orders(self, units: Listing[UnitKeys]) -> list[Order | None]:
        found: list[Order | None] = []
        for unit in units:
            scores = torch.einsum("htd,hmd->htm", unit.keys.float(), self._layers[unit.layer])
            theme = scores.argmax(2)
            if not unit.start:
                theme[:, :16] = -1
            found.append(torch.argsort(theme, dim=1, stable=True).numpy())
        return found


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["uniform", "float16", "widths differ"])
def test_it_does_not_matter_what_is_in_memory(name: str, seed: int, tmp_path: Path) -> None:
    """The same choices over a HOT that holds everything and over one far below the context."""
    geometry = GEOMETRIES[name]
    kv, tokens = KV(geometry), some_tokens(4100, seed)
    unit = 512 * max(each.kv_heads * each.row_width for each in geometry.layers) * 4
    results = []
    for hot in (32 << 20, unit + unit // 2):
        path = tmp_path / str(hot)
        with open_store(path, geometry, Config("64MiB", hot=hot), Fixed()) as store:
            put(store, kv, "a", tokens[:4090])
            sequence = resumed(store, kv, tokens, 10)
            outs = []
            for step in range(20):
                for layer in range(len(geometry.layers)):
                    query = a_query(kv, layer, 1, step % 5)
                    outs.append(store.attend(sequence, layer, query, budget=0.05))
            results.append(outs)
            assert store._residency.hot.tier.used_bytes <= hot
    for one, other in zip(*results, strict=True):
        assert (one.float() - other.float()).abs().max() < TOLERANCE[geometry.dtype]


@pytest.mark.parametrize("tail", [1, 16, 17, 45])
@pytest.mark.parametrize("kept", [512, 507, 490])
def test_what_grows_counts_beside_what_was_chosen(kept: int, tail: int, tmp_path: Path) -> None:
    """Behind whole Pages and behind a cut, where some slots of those that are read do not count."""
    kv, tokens = KV(WIDE), some_tokens(512 + 64, 3)
    asked = [*tokens[:kept], *some_tokens(tail, 4)]
    with open_store(tmp_path, WIDE, Config("32MiB", hot="8MiB")) as store:
        put(store, kv, "a", tokens[:512])
        sequence = store.resume(asked)
        assert sequence.length() == kept
        extend(store, kv, sequence, asked)
        for layer in range(2):
            query = a_query(kv, layer, 1, tail)
            out = store.attend(sequence, layer, query, budget=ALL)
            wanted = expected(kv, asked, layer, query)
            assert np.abs(out.double().numpy() - wanted).max() < TOLERANCE["float32"]


def test_an_answer_is_a_tensor_like_any_other(tmp_path: Path) -> None:
    """Inside autograd is off, and what is made so may be neither written nor differentiated."""
    kv, tokens = KV(WIDE), some_tokens(1030, 3)
    with open_store(tmp_path, WIDE, Config("32MiB", hot="8MiB")) as store:
        put(store, kv, "a", tokens[:1024])
        sequence = resumed(store, kv, tokens, 6)
        out = store.attend(sequence, 0, a_query(kv, 0, 1, 1), budget=0.5)
        assert not out.is_inference()
        weight = torch.ones(1, requires_grad=True)
        (grad,) = torch.autograd.grad((out * weight).sum(), weight)
        assert torch.isfinite(grad).all()
        out.zero_()


def test_a_token_that_hot_has_no_room_for_is_read_back(tmp_path: Path) -> None:
    """Other Sequences' tokens are all that HOT can hold beside one unit: a pass goes straight to
    the drive, and the token that it brings is attended to all the same."""
    kv, tokens = KV(WIDE), some_tokens(1100, 13)
    page = 2 * 16 * 64 * 4
    unit = 32 * page
    with open_store(tmp_path, WIDE, Config("64MiB", hot=unit + 2 * page)) as store:
        put(store, kv, "a", tokens[:1024])
        sequence = store.resume(tokens)
        for end in range(1025, 1060):
            for layer in range(2):
                keys, values = (rows[:, end - 1 : end] for rows in kv.rows(tokens[:end], layer))
                if end % 3 == 0 and not layer:
                    # The promise of room is taken back, as where it could not be made.
                    store._writer.seal(sequence)
                    sequence.pass_goes_straight = True
                    store._writer._secure_room = lambda *asked: None  # type: ignore[method-assign]
                store.append(sequence, layer, keys, values)
                query = a_query(kv, layer, 1, end)
                out = store.attend(sequence, layer, query, budget=ALL)
                wanted = expected(kv, tokens[:end], layer, query)
                assert np.abs(out.double().numpy() - wanted).max() < TOLERANCE["float32"]
            sequence.pass_goes_straight = False
            store._writer.__dict__.pop("_secure_room", None)


def test_tokens_beyond_a_view_take_no_part(tmp_path: Path) -> None:
    """Another stream's tokens behind the cut are in the same Pages, and in their digests."""
    kv, tokens = KV(WIDE), some_tokens(1024, 5)
    stream = tokens[:700] + some_tokens(30, 6)
    with open_store(tmp_path, WIDE, Config("64MiB", hot="16MiB"), Shuffled(3)) as store:
        put(store, kv, "a", tokens)
        sequence = store.resume(stream)
        assert sequence.length() == 700
        extend(store, kv, sequence, stream)
        for layer in range(2):
            query = a_query(kv, layer, 1, 9)
            out = store.attend(sequence, layer, query, budget=ALL)
            wanted = expected(kv, stream, layer, query)
            assert np.abs(out.double().numpy() - wanted).max() < TOLERANCE["float32"]


@pytest.mark.parametrize("kept", [500, 700, 1020])
def test_a_cut_leaves_a_budget_what_it_is(kept: int, tmp_path: Path) -> None:
    """Pages that a view cuts are read, and those that it does not go by the budget as ever."""
    kv, tokens = KV(WIDE), some_tokens(1024, 5)
    stream = tokens[:kept] + some_tokens(80, 6)
    with open_store(tmp_path, WIDE, Config("64MiB", hot="16MiB")) as store:
        put(store, kv, "a", tokens)
        sequence = store.resume(stream)
        extend(store, kv, sequence, stream)
        chosen = []
        for budget in (0.125, 0.25, 0.5):
            before = store.stats().pages_chosen
            store.attend(sequence, 1, a_query(kv, 1, 1, 9), budget=budget)
            chosen.append(store.stats().pages_chosen - before)
        whole, heads = -(-kept // 512) * 32, 2
        beyond = whole - kept // 16
        assert chosen == [heads * (round(share * whole) + beyond) for share in (0.125, 0.25, 0.5)]


def test_digests_follow_a_sequence_that_grows_and_is_cropped(tmp_path: Path) -> None:
    kv, tokens = KV(WIDE), some_tokens(1700, 7)
    other = tokens[:900] + some_tokens(700, 8)
    with open_store(tmp_path, WIDE, Config("64MiB", hot="16MiB")) as store:
        sequence = store.sequence()
        for stream in (tokens[:600], tokens, tokens[:900], other):
            if sequence.length() > len(stream):
                store.crop(sequence, len(stream))
            extend(store, kv, sequence, stream)
            twin = store.fork(sequence)
            for each in (sequence, twin):
                query = a_query(kv, 1, 1, len(stream))
                out = store.attend(each, 1, query, budget=ALL)
                wanted = expected(kv, stream, 1, query)
                assert np.abs(out.double().numpy() - wanted).max() < TOLERANCE["float32"]
            store.release(twin)


def test_what_was_decoded_sparsely_goes_on_by_the_same_rule(tmp_path: Path) -> None:
    kv, tokens = KV(WIDE), some_tokens(1400, 9)
    sparse = Provenance.approximate(0.25, "raw")
    with open_store(tmp_path, WIDE, Config("64MiB", hot="16MiB")) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens[:700])
        store.go_on_approximately(sequence, sparse)
        for end in range(701, 1400, 37):
            extend(store, kv, sequence, tokens[:end])
            query = a_query(kv, 0, 1, end)
            out = store.attend(sequence, 0, query, budget=ALL)
            wanted = expected(kv, tokens[:end], 0, query)
            assert np.abs(out.double().numpy() - wanted).max() < TOLERANCE["float32"]


def test_what_is_written_anew_is_digested_anew(tmp_path: Path) -> None:
    """After a flush that failed a unit may come to lie in another order: what its Pages were
    estimated by says nothing about them any more."""
    kv, tokens = Themed(WIDE, 4), some_tokens(1536, 4)
    with open_store(tmp_path, WIDE, Config("64MiB", hot="16MiB"), Shuffled(4)) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens)
        for layer in range(2):
            store.attend(sequence, layer, kv.asks(layer, 1), budget=0.3)
        before = [view.segment.digests[0] for view in sequence.views]
        orders = [view.segment.orders[0] for view in sequence.views]
        store._files.region.device.failed_flushes += 1
        store._writer.sealer.write_out(sequence)
        for view, order in zip(sequence.views, orders, strict=True):
            assert not np.array_equal(view.segment.orders[0], order)  # type: ignore[arg-type]
        for theme in range(6):
            query = kv.asks(0, theme)
            out = store.attend(sequence, 0, query, budget=0.6)
            wanted = expected(kv, tokens, 0, query)
            assert np.abs(out.double().numpy() - wanted).max() < 0.1
        after = [view.segment.digests[0] for view in sequence.views]
        assert all(new is not old for new, old in zip(after, before, strict=True))


def test_a_damaged_page_is_an_error_and_never_an_answer(tmp_path: Path) -> None:
    kv, tokens = KV(WIDE), some_tokens(4096, 10)
    unit = 512 * 2 * 64 * 4
    with open_store(tmp_path, WIDE, Config("64MiB", hot=2 * unit)) as store:
        put(store, kv, "a", tokens)
        sequence = store.resume(tokens)
        query = a_query(kv, 0, 1, 1)
        store.attend(sequence, 0, query, budget=0.1)
        extents = [view.segment.extents[0] for view in sequence.views]
        with (tmp_path / "region.kv").open("r+b") as region:
            for each in extents:
                assert each is not None
                region.seek(each.offset + each.length // 2)
                region.write(b"\xa5" * (each.length // 2))

        def ask() -> None:
            for seed in range(50):
                store.attend(sequence, 0, a_query(kv, 0, 1, seed), budget=0.3)

        with pytest.raises(FormatError, match="damaged"):
            ask()


def test_layers_with_a_window_and_an_empty_context_are_read_exactly(tmp_path: Path) -> None:
    geometry = Geometry((LayerGeometry(2, 8, 8, 20), LayerGeometry(2, 8, 8)), "float32")
    kv, tokens = KV(geometry), some_tokens(40, 11)
    with open_store(tmp_path, geometry) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens)
        for layer in range(2):
            query = a_query(kv, layer, 1, 1)
            out = store.attend(sequence, layer, query, budget=0.01)
            wanted = expected(kv, tokens, layer, query)
            assert np.abs(out.double().numpy() - wanted).max() < TOLERANCE["float32"]


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    kv, tokens = KV(WIDE), some_tokens(600, 12)
    with open_store(tmp_path, WIDE) as store:
        put(store, kv, "a", tokens)
        sequence = store.resume(tokens)
        for budget in (0.0, -0.5, 1.5, float("nan")):
            with pytest.raises(ConfigError, match="a budget is a share"):
                store.attend(sequence, 0, a_query(kv, 0, 1, 1), budget=budget)
        with pytest.raises(UnsupportedError, match="one token at a time"):
            store.attend(sequence, 0, a_query(kv, 0, 2, 1), budget=0.5)
        with pytest.raises(ConfigError, match=r"query|width"):
            store.attend(sequence, 0, torch.zeros(4, 1, 7), budget=0.5)
    with pytest.raises(ConfigError, match="sketch_bits must be"):
        Config(sketch_bits=5)


@pytest.mark.parametrize("placement", ["position", "keys"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
def test_kv_that_cannot_be_estimated_is_refused(
    tmp_path: Path, number: float, placement: PlacementName
) -> None:
    """It is kept like any other, and attended to exactly."""
    config = Config("32MiB", hot="4MiB", placement=placement)
    with open_store(tmp_path, WIDE, config) as store:
        sequence = store.sequence()
        rows = torch.zeros(2, 512, 32)
        rows[0, 5, 3] = number
        for layer in range(2):
            store.append(sequence, layer, rows, rows)
        with pytest.raises(UnsupportedError, match="cannot be attended to by a budget"):
            store.attend(sequence, 0, torch.zeros(4, 1, 32), budget=0.5)
        held, _ = store.read(sequence, 0)
        assert torch.equal(held.view(torch.int32), rows.view(torch.int32))
