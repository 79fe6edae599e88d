"""Field reports about shapes: every layout of a model is kept bit for bit, or refused by name."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.io.alignment import GRID_BYTES
from kvtier.tiering import extent_format
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.listing import describe
from kvtier.tiering.store import Store
from kvtier.tiering.writer import hot_bytes_min
from tests.field_cases import in_threads
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_everywhere,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, TOKENS, WIDTH = 2, 40, 8


def layers_of(kv: KV, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [kv.rows(tokens, layer) for layer in range(len(kv.geometry.layers))]


# What an engine may hold, from keys and values [H, T, D]; and the declared view back.
LAYOUTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "[2, B, T, H, D]": (
        lambda k, v: torch.stack([k, v])[:, None].transpose(2, 3).contiguous(),
        lambda x: (x[0, 0].transpose(0, 1), x[1, 0].transpose(0, 1)),
    ),
    "[B, 2, T, H, D]": (
        lambda k, v: torch.stack([k, v])[None].transpose(2, 3).contiguous(),
        lambda x: (x[0, 0].transpose(0, 1), x[0, 1].transpose(0, 1)),
    ),
    "[B, H, T, 2D]": (
        lambda k, v: torch.cat([k, v], -1)[None].contiguous(),
        lambda x: (x[0, :, :, :WIDTH], x[0, :, :, WIDTH:]),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_declared_layout_is_kept_bit_for_bit(tmp_path: Path, layout: str) -> None:
    """A011: views of the engine's own memory, strided as they come."""
    packed_as, view_of = LAYOUTS[layout]
    kv, tokens = KV(PLAIN), some_tokens(TOKENS, 1)
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        for layer, (keys, values) in enumerate(layers_of(kv, tokens)):
            store.append(sequence, layer, *view_of(packed_as(keys, values)))
        check_bytes(store, kv, sequence, tokens)
        store.save(sequence, "n", tokens)
    with open_store(tmp_path) as store:
        check_bytes(store, kv, store.resume(tokens), tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_undeclared_layout_is_refused(tmp_path: Path, layout: str) -> None:
    """A011: nothing is guessed from a tensor of another rank, order or width."""
    kv, tokens = KV(PLAIN), some_tokens(TOKENS, 1)
    keys, values = layers_of(kv, tokens)[0]
    packed = LAYOUTS[layout][0](keys, values)
    wrong = [
        (packed, packed),
        (packed[0], packed[0]),
        (keys.transpose(0, 1), values.transpose(0, 1)),
        (keys.reshape(TOKENS, HEADS, WIDTH), values.reshape(TOKENS, HEADS, WIDTH)),
        (torch.cat([keys, values], -1), values),
        (keys.reshape(1, TOKENS, -1), values.reshape(1, TOKENS, -1)),
    ]
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        for bad in wrong:
            with pytest.raises(ConfigError, match="keys"):
                store.append(sequence, 0, *bad)
        assert sequence.lengths.tolist() == [0, 0]
        extend(store, kv, sequence, tokens)
        check_bytes(store, kv, sequence, tokens)


UNEQUAL = {
    "latent, value wider": Geometry((LayerGeometry(1, 64, 512),) * 2, "float16"),
    "latent, one vector": Geometry((LayerGeometry(1, 576, 0),) * 2, "bfloat16"),
    "heads per layer": Geometry(
        tuple(LayerGeometry(heads, 8, 8) for heads in (3, 3, 4, 4, 5, 6)), "float32"
    ),
    "value narrower": Geometry((LayerGeometry(4, 192, 128),) * 2, "float16"),
}


@pytest.mark.parametrize("shape", UNEQUAL)
def test_unequal_widths_and_heads_are_kept_per_component(tmp_path: Path, shape: str) -> None:
    """A012, A013: 1 to 5 pages from 8 threads, then read back after the store was opened anew."""
    geometry = UNEQUAL[shape]
    kv = KV(geometry)
    hot = 4 * hot_bytes_min(geometry)
    lists = [some_tokens(16 * (1 + seed % 5) - seed % 3, seed) for seed in range(8)]
    with open_store(tmp_path, geometry, Config("32MiB", hot=hot)) as store:
        in_threads(lambda number: put(store, kv, f"n{number}", lists[number]), 8)
    with open_store(tmp_path, geometry, Config(hot=hot)) as store:
        for tokens in lists:
            sequence = store.resume(tokens)
            check_bytes(store, kv, sequence, tokens)
            if all(each.value_width for each in geometry.layers):
                check_everywhere(store, kv, sequence, tokens)


def test_bytes_of_a_token_are_the_sum_over_layers() -> None:
    """A013."""
    geometry = UNEQUAL["heads per layer"]
    assert geometry.token_bytes == sum((3, 3, 4, 4, 5, 6)) * (8 + 8) * 4
    sizes = [geometry.payload_bytes(layer, 16) for layer in range(6)]
    assert sizes == [heads * 16 * 16 * 4 for heads in (3, 3, 4, 4, 5, 6)]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "float64"])
def test_quantised_kv_is_refused_because_its_scales_would_be_lost(
    tmp_path: Path, dtype: str
) -> None:
    """A014: neither as a geometry, nor as tensors slipped into another."""
    with pytest.raises(ConfigError, match=f"dtype must be one of .*got {dtype}"):
        Geometry.uniform(2, 2, 8, dtype=dtype)
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        rows = torch.zeros(2, 4, 8, dtype=getattr(torch, dtype))
        with pytest.raises(ConfigError, match=rf"float32.*{dtype}|{dtype}.*float32"):
            store.append(sequence, 0, rows, rows)
        assert sequence.length() == 0


# (kv heads, key width, value width, dtype, tokens): payloads of one unit, in bytes.
ODD_SIZES = {
    3_098_112: (3, 1009, 1008, "float16", 256),
    28_824_000: (4, 2402, 2402, "float32", 375),
    512: (1, 128, 128, "float16", 1),
    4094: (1, 1024, 1023, "float16", 1),
    4096: (1, 1024, 1024, "float16", 1),
    4098: (1, 1024, 1025, "float16", 1),
    2: (1, 1, 0, "float16", 1),
    510: (1, 15, 2, "float16", 15),
    514: (1, 257, 0, "float16", 1),
}


@pytest.mark.parametrize(
    ("nbytes", "direct_io"),
    [*((each, "preferred") for each in ODD_SIZES), (3_098_112, "off"), (510, "off")],
)
def test_no_payload_has_to_be_a_multiple_of_a_block(
    tmp_path: Path, nbytes: int, direct_io: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A055, A056, A062: exact length and bits; padding is zero; no word about alignment."""
    heads, key_width, value_width, dtype, count = ODD_SIZES[nbytes]
    geometry = Geometry((LayerGeometry(heads, key_width, value_width),), dtype)
    assert geometry.payload_bytes(0, count) == nbytes
    random = np.random.default_rng(nbytes)
    rows = [
        torch.from_numpy(random.standard_normal((heads, count, width), np.float32)).to(
            getattr(torch, dtype)
        )
        for width in (key_width, value_width)
    ]
    tokens = some_tokens(count, 1)
    config = Config(
        "64MiB",
        hot=hot_bytes_min(geometry),
        direct_io="off" if direct_io == "off" else "preferred",
    )
    with caplog.at_level(logging.DEBUG, "kvtier"), open_store(tmp_path, geometry, config) as store:
        sequence = store.sequence()
        store.append(sequence, 0, *rows)
        store.save(sequence, "n", tokens)
        store.release(sequence)
    if direct_io == "off":
        assert "direct" not in caplog.text.lower()
    check_padding(tmp_path, geometry, count)
    with open_store(tmp_path, geometry, Config(hot=hot_bytes_min(geometry))) as store:
        check_restored(store, tokens, rows)


def check_restored(store: Store, tokens: list[int], rows: list[torch.Tensor]) -> None:
    from kvtier.tiering.extent_io import Unit

    sequence = store.resume(tokens)
    assert sequence.length() == len(tokens)
    unit = Unit(sequence.views[0].segment, 0)
    assert store._mover.load([unit]) == 1
    for held, given in zip(store._mover.tensors(unit), rows, strict=True):
        assert torch.equal(held[:, : len(tokens)], given)


def check_padding(path: Path, geometry: Geometry, tokens: int) -> None:
    """The Extent ends on the grid, and after the payload it is zeros."""
    (segment,) = describe(path).segments
    assert segment.tokens == tokens
    region = (path / "region.kv").read_bytes()
    size = extent_format.extent_bytes(geometry, 0, tokens)
    head = extent_format.header_bytes(geometry, 0, tokens)
    payload = geometry.payload_bytes(0, tokens)
    assert size % GRID_BYTES == 0
    start = region.index(extent_format.MAGIC, MIB)
    assert region[start + head : start + head + payload].strip(b"\0"), "the payload is there"
    assert region[start + head + payload : start + size] == bytes(size - head - payload)


def test_nothing_to_store_is_no_error(tmp_path: Path) -> None:
    """A097: an append of no tokens takes no byte; a layer without heads is refused by name."""
    kv, tokens = KV(PLAIN), some_tokens(20, 1)
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        for layer, (keys, values) in enumerate(layers_of(kv, tokens)):
            store.append(sequence, layer, keys[:, :0], values[:, :0])
        assert (sequence.length(), store.stats().hot_bytes) == (0, 0)
        assert store.resume([]).length() == 0
        with pytest.raises(ConfigError, match="empty sequence"):
            store.save(sequence, "empty", [])
        extend(store, kv, sequence, tokens)
        check_bytes(store, kv, sequence, tokens)
    with pytest.raises(ConfigError, match="kv_heads must be 1 to"):
        LayerGeometry(0, 8, 8)
