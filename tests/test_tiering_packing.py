"""Packing: Pages as bytes, against a model that places one token at a time."""

from dataclasses import dataclass
from itertools import permutations

import numpy as np
import pytest
import torch

from kvtier.errors import FormatError
from kvtier.tiering.extent_format import DIRECTORY_ENTRY, NO_POSITION
from kvtier.tiering.geometry import PAGE_TOKENS, LayerGeometry, pages_of
from kvtier.tiering.packing import (
    TORCH_DTYPES,
    as_tensor,
    gather,
    pack,
    scatter,
)
from kvtier.tiering.page_layout import Order, PageLayout

COUNTS = [1, 15, 16, 17, 37, 48]
SHAPES = [
    LayerGeometry(1, 64, 64),
    LayerGeometry(3, 80, 80),
    LayerGeometry(2, 96, 40),
    LayerGeometry(1, 576, 0),
    LayerGeometry(5, 3, 7),
]
CASES = [
    (shape, tokens, dtype, ordered)
    for shape in SHAPES
    for tokens in COUNTS
    for dtype in (["float32", "float16", "bfloat16"] if tokens == 37 else ["bfloat16"])
    for ordered in (True, False)
]


@dataclass(frozen=True, slots=True)
class Rows:
    """keys [heads, tokens, Dk], values [heads, tokens, Dv] of random bits, NaNs among them."""

    keys: torch.Tensor
    values: torch.Tensor
    order: Order | None


def random_bits(random: np.random.RandomState, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    item = TORCH_DTYPES[dtype].itemsize
    if not shape[-1]:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    raw = random.randint(0, 256, (*shape[:-1], shape[-1] * item)).astype(np.uint8)
    return torch.from_numpy(raw).view(TORCH_DTYPES[dtype]).view(shape)


def rows_of(shape: LayerGeometry, tokens: int, dtype: str, ordered: bool) -> Rows:
    random = np.random.RandomState(tokens * 1000 + shape.row_width)
    heads = shape.kv_heads
    order = None
    if not ordered:
        order = np.stack([random.permutation(tokens) for _ in range(heads)]).astype(np.int64)
    return Rows(
        random_bits(random, (heads, tokens, shape.key_width), dtype),
        random_bits(random, (heads, tokens, shape.value_width), dtype),
        order,
    )


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def naive_payload(rows: Rows) -> bytes:
    """Head by head, page by page: all K rows, then all V rows, one token at a time."""
    heads, tokens, _ = rows.keys.shape
    pieces: list[bytes] = []
    for head in range(heads):
        places = list(range(tokens)) if rows.order is None else rows.order[head].tolist()
        for first in range(0, tokens, PAGE_TOKENS):
            page = places[first : first + PAGE_TOKENS]
            pieces += [raw(rows.keys[head, token]) for token in page]
            pieces += [raw(rows.values[head, token]) for token in page]
    return b"".join(pieces)


def packed(rows: Rows) -> torch.Tensor:
    target = np.full((rows.keys.numel() + rows.values.numel()) * rows.keys.itemsize, 7, np.uint8)
    pack(rows.keys, rows.values, rows.order, target)
    return torch.from_numpy(target).view(rows.keys.dtype)


@pytest.mark.parametrize(("shape", "tokens", "dtype", "ordered"), CASES)
def test_pack_places_every_token(
    shape: LayerGeometry, tokens: int, dtype: str, ordered: bool
) -> None:
    rows = rows_of(shape, tokens, dtype, ordered)
    assert raw(packed(rows)) == naive_payload(rows)


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("axes", list(permutations(range(3))))
def test_pack_takes_rows_that_lie_otherwise_in_memory(tokens: int, axes: tuple[int, ...]) -> None:
    """Cut out of more tokens, or with the axes in another order, or one head for all."""
    rows = rows_of(LayerGeometry(3, 8, 8), tokens + 4, "bfloat16", True)
    inverse = [axes.index(axis) for axis in range(3)]
    keys, values = (
        each.permute(axes).contiguous().permute(inverse)[:, 3 : 3 + tokens]
        for each in (rows.keys, rows.values)
    )
    assert raw(packed(Rows(keys, values, None))) == naive_payload(Rows(keys, values, None))
    one = Rows(keys[:1].expand(3, -1, -1), values, None)
    assert raw(packed(one)) == naive_payload(one)


@pytest.mark.parametrize(("shape", "tokens", "dtype", "ordered"), CASES)
def test_scatter_and_gather_give_every_token_back(
    shape: LayerGeometry, tokens: int, dtype: str, ordered: bool
) -> None:
    rows = rows_of(shape, tokens, dtype, ordered)
    heads, pages = shape.kv_heads, pages_of(tokens)
    spare = 3
    pool = torch.full(
        (heads * pages + spare, PAGE_TOKENS * shape.row_width), 7, dtype=rows.keys.dtype
    )
    frames = np.random.RandomState(1).permutation(len(pool))
    used = torch.from_numpy(frames[: heads * pages].reshape(heads, pages))
    layout = PageLayout(shape, tokens, rows.keys.dtype.itemsize)
    scatter(packed(rows), layout, pool, used)
    keys, values = gather(pool, used, shape, tokens)
    expected_keys, expected_values = rows.keys, rows.values
    if rows.order is not None:
        expected_keys = torch.stack([rows.keys[h, rows.order[h]] for h in range(heads)])
        expected_values = torch.stack([rows.values[h, rows.order[h]] for h in range(heads)])
    assert raw(keys) == raw(expected_keys)
    assert raw(values) == raw(expected_values)
    # Frames that were not named are not touched.
    assert bool((pool[torch.from_numpy(frames[heads * pages :])] == 7).all())


def test_values_in_a_frame_begin_after_room_for_16_key_rows() -> None:
    shape = LayerGeometry(1, 2, 3)
    keys, values = torch.ones(1, 5, 2), torch.full((1, 5, 3), 2.0)
    pool = torch.full((1, 80), 7.0)
    layout = PageLayout(shape, 5, 4)
    scatter(packed(Rows(keys, values, None)), layout, pool, torch.tensor([[0]]))
    expected = [1.0] * 10 + [0.0] * 22 + [2.0] * 15 + [0.0] * 33
    assert pool[0].tolist() == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [*COUNTS, 512])
def test_directory_tiles_the_payload(shape: LayerGeometry, tokens: int) -> None:
    directory = PageLayout(shape, tokens, 2).directory(None)
    assert directory.dtype == DIRECTORY_ENTRY
    expected = 0
    index = 0
    for head in range(shape.kv_heads):
        for first in range(0, tokens, PAGE_TOKENS):
            entry, count = directory[index], min(PAGE_TOKENS, tokens - first)
            positions = list(range(first, first + count)) + [NO_POSITION] * (PAGE_TOKENS - count)
            assert int(entry["offset"]) == expected
            assert int(entry["length"]) == count * shape.row_width * 2
            assert (int(entry["tokens"]), int(entry["head_group"])) == (count, head)
            assert (int(entry["codec"]), entry["reserved"].tolist()) == (0, [0, 0, 0])
            assert entry["positions"].tolist() == positions
            expected += int(entry["length"])
            index += 1
    assert index == len(directory)
    assert expected == shape.kv_heads * tokens * shape.row_width * 2


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("tokens", COUNTS)
def test_order_survives_the_directory(tokens: int, seed: int) -> None:
    random = np.random.RandomState(seed)
    order = np.stack([random.permutation(tokens) for _ in range(3)]).astype(np.int64)
    layout = PageLayout(LayerGeometry(3, 8, 8), tokens, 2)
    read = layout.order_of(layout.directory(order))
    assert (read is None and tokens == 1) or (read is not None and (read == order).all())
    assert layout.order_of(layout.directory(None)) is None


def test_order_that_is_no_permutation_is_refused() -> None:
    layout = PageLayout(LayerGeometry(2, 8, 8), 20, 2)
    for page, slot, position in [(0, 0, 1), (3, 3, NO_POSITION), (2, 15, 20)]:
        directory = layout.directory(None)
        directory["positions"][page, slot] = position
        with pytest.raises(FormatError, match="permutation"):
            layout.order_of(directory)


@pytest.mark.parametrize("name", ["offset", "length", "tokens", "head_group", "codec"])
def test_directory_of_another_layout_is_refused(name: str) -> None:
    layout = PageLayout(LayerGeometry(2, 8, 8), 37, 2)
    directory = layout.directory(None)
    layout.require_raw(directory, "here")
    directory[name][4] += 1
    with pytest.raises(FormatError, match=f"here: page {name}"):
        layout.require_raw(directory, "here")
    with pytest.raises(FormatError, match="here"):
        layout.require_raw(layout.directory(None)[:-1], "here")


def test_a_usual_tensor_is_taken_as_it_is() -> None:
    """Each layer of each step of a decode hands some in."""
    rows = torch.zeros(2, 1, 8)
    assert as_tensor(rows) is rows
