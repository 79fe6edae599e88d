"""Field reports about layers that look back a limited way, and models whose layers differ."""

from pathlib import Path

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.writer import hot_bytes_min
from tests.field_cases import extents_of, zero
from tests.store_cases import (
    KV,
    Shuffled,
    check_bytes,
    check_everywhere,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")
WINDOW_16 = Geometry((LayerGeometry(2, 8, 8, 16), LayerGeometry(2, 8, 8)), "float32")
MIXED = Geometry((LayerGeometry(2, 8, 8), LayerGeometry(2, 8, 8, 32)) * 2, "float32")


@pytest.mark.parametrize("length", [36, 24, 16, 5])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_window_can_be_trimmed_to_any_length(tmp_path: Path, length: int, seed: int) -> None:
    """A098: no ring: tokens 21 to 36 are there, in order, after 40 were written; and it goes on."""
    kv, tokens = KV(WINDOW_16), some_tokens(40, seed)
    with open_store(tmp_path, WINDOW_16, placement=Shuffled(seed)) as store:
        put(store, kv, "n", tokens)
    with open_store(tmp_path, WINDOW_16) as store:
        sequence = store.resume(tokens)
        store.crop(sequence, length)
        check_bytes(store, kv, sequence, tokens[:length])
        check_everywhere(store, kv, sequence, tokens[:length])
        grown = tokens[:length] + some_tokens(30, seed + 10)
        extend(store, kv, sequence, grown, pieces=7)
        check_everywhere(store, kv, sequence, grown)
        with pytest.raises(ConfigError):
            store.crop(sequence, len(grown) + 1)


def state(store: Store, sequence: Sequence) -> list[torch.Tensor]:
    found = []
    for layer in range(len(store.geometry.layers)):
        for view in sequence.views:
            unit = Unit(view.segment, layer)
            assert store._mover.load([unit]) == 1
            found += [each.clone() for each in store._mover.tensors(unit)]
    return found


def test_the_fourth_use_of_a_prefix_is_the_first(tmp_path: Path) -> None:
    """A099: two full layers and two with a window of 32; uses in between and a reopening."""
    kv, tokens = KV(MIXED), some_tokens(100, 1)
    states = []
    with open_store(tmp_path, MIXED, placement=Shuffled(3)) as store:
        put(store, kv, "n", tokens)
    config = Config(hot=hot_bytes_min(MIXED))
    for _ in range(2):
        with open_store(tmp_path, MIXED, config) as store:
            for turn in range(2):
                sequence = store.resume(tokens)
                assert sequence.length() == 100
                states.append(state(store, sequence))
                check_everywhere(store, kv, sequence, tokens)
                # The answers differ; nothing of them may reach the prefix.
                grown = tokens + some_tokens(50, turn)
                extend(store, kv, sequence, grown, pieces=1)
                check_everywhere(store, kv, sequence, grown)
                store.release(sequence)
    assert len(states) == 4
    for other in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))


@pytest.mark.parametrize("layer", range(4))
def test_layers_never_match_different_lengths(tmp_path: Path, layer: int) -> None:
    """A100: the match is what all layers have: one unit of one layer lost, whichever kind."""
    kv, tokens = KV(MIXED), some_tokens(1500, 1)
    with open_store(tmp_path, MIXED) as store:
        put(store, kv, "n", tokens)
    zero(tmp_path, extents_of(tmp_path)[1][layer])
    with open_store(tmp_path, MIXED, Config(hot="16MiB")) as store:
        sequence = store.resume(tokens)
        # A windowed layer is only read where the window reaches, so that loss may not matter; but
        # what is matched is one length for all layers, and right.
        assert sequence.length() in ((512,) if layer % 2 == 0 else (512, 1500))
        check_everywhere(store, kv, sequence, tokens[: sequence.length()])
        assert set(sequence.lengths.tolist()) == {sequence.length()}
