"""Geometry: counts of tokens and pages become bytes here and nowhere else."""

import json

import pytest

from kvtier.errors import ConfigError
from kvtier.tiering.geometry import (
    ITEM_BYTES,
    PAGE_TOKENS,
    SEGMENT_TOKENS,
    Geometry,
    LayerGeometry,
    pages_of,
)
from kvtier.tiering.packing import TORCH_DTYPES


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (512, 32)])
def test_pages_round_up(tokens: int, pages: int) -> None:
    assert pages_of(tokens) == pages


def test_bytes_of_a_model_whose_layers_differ() -> None:
    geometry = Geometry(
        (LayerGeometry(3, 64, 64), LayerGeometry(4, 80, 48, window=128), LayerGeometry(1, 576, 0)),
        "bfloat16",
    )
    assert [geometry.row_bytes(layer) for layer in range(3)] == [256, 256, 1152]
    assert [geometry.frame_bytes(layer) for layer in range(3)] == [4096, 4096, 18432]
    assert [geometry.payload_bytes(layer, 37) for layer in range(3)] == [28416, 37888, 42624]
    assert geometry.token_bytes == 3 * 256 + 4 * 256 + 1152


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_item_sizes_are_those_of_torch(dtype: str) -> None:
    assert ITEM_BYTES[dtype] == TORCH_DTYPES[dtype].itemsize
    assert set(ITEM_BYTES) == set(TORCH_DTYPES)


@pytest.mark.parametrize(
    ("heads", "key", "value", "window", "named"),
    [
        (0, 64, 64, None, "kv_heads"),
        (1025, 64, 64, None, "kv_heads"),
        (1, 0, 64, None, "key_width"),
        (1, 8193, 64, None, "key_width"),
        (1, 64, -1, None, "value_width"),
        (1, 64, 8193, None, "value_width"),
        (1, 64, 64, 0, "window"),
        (1, 64, 64, (1 << 40) + 1, "window"),
    ],
)
def test_impossible_layers_are_refused(
    heads: int, key: int, value: int, window: int | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        LayerGeometry(heads, key, value, window)


def test_limits_themselves_are_allowed() -> None:
    layer = LayerGeometry(1, 8192, 8192, 1 << 40)
    assert layer.row_width == 16384
    assert LayerGeometry(1024, 1, 0, 1).row_width == 1


def test_impossible_geometries_are_refused() -> None:
    layer = LayerGeometry(1, 64, 64)
    with pytest.raises(ConfigError, match="dtype"):
        Geometry((layer,), "int8")
    with pytest.raises(ConfigError, match="layers"):
        Geometry((), "float32")
    with pytest.raises(ConfigError, match="layers"):
        Geometry((layer,) * 1025, "float32")


def test_a_layer_whose_payload_offsets_overflow_32_bits_is_refused() -> None:
    """A106."""
    # 256 heads * 512 tokens * 8192 elements * 4 bytes is exactly 2**32.
    with pytest.raises(ConfigError, match="4294967296"):
        Geometry((LayerGeometry(256, 8192, 0),), "float32")
    largest = Geometry((LayerGeometry(255, 8192, 0),), "float32")
    assert largest.payload_bytes(0, SEGMENT_TOKENS) < 2**32


def test_dict_round_trip_through_json() -> None:
    geometry = Geometry((LayerGeometry(3, 64, 80, 7), LayerGeometry(1, 576, 0)), "float16")
    assert Geometry.from_dict(json.loads(json.dumps(geometry.to_dict()))) == geometry


def test_uniform_layers_are_alike() -> None:
    geometry = Geometry.uniform(3, 2, 64)
    assert geometry == Geometry((LayerGeometry(2, 64, 64),) * 3, "float32")
    assert geometry.frame_bytes(2) == PAGE_TOKENS * 128 * 4
