"""Arguments that a store must refuse: each one named, with what came and what is taken."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvtier
from kvtier.errors import ConfigError
from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.store import Store
from tests.store_cases import (
    GEOMETRIES,
    KV,
    PLAIN,
    Shuffled,
    a_query,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)

OF_M = KV(PLAIN)
TOKENS = some_tokens(100, 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        yield opened


def rows(heads: int, tokens: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(heads, tokens, width, dtype=dtype)


def without_memory(heads: int, tokens: int, width: int) -> torch.Tensor:
    """As those of models that give their weights' memory back between steps."""
    given = rows(heads, tokens, width)
    given.untyped_storage().resize_(0)
    return given


GOOD = rows(2, 5, 8)
BAD_ROWS: dict[str, tuple[object, object, str]] = {
    "keys heads": (rows(1, 5, 8), GOOD, r"keys.*\[2, tokens, 8\].*got \[1, 5, 8\]"),
    "keys width": (rows(2, 5, 9), GOOD, r"keys.*\[2, tokens, 8\].*got \[2, 5, 9\]"),
    "values width": (GOOD, rows(2, 5, 4), r"values.*\[2, tokens, 8\].*got \[2, 5, 4\]"),
    "values count": (GOOD, rows(2, 6, 8), r"values.*got \[2, 6, 8\]"),
    "keys dimensions": (rows(2, 5, 8)[0], GOOD, r"keys.*got \[5, 8\]"),
    "keys batch": (GOOD[None], GOOD[None], r"keys.*got \[1, 2, 5, 8\]"),
    "values dimensions": (GOOD, GOOD[None], r"values.*got \[1, 2, 5, 8\]"),
    "keys dtype": (rows(2, 5, 8, torch.float16), GOOD, r"keys.*float32: got .* torch\.float16"),
    "values dtype": (GOOD, rows(2, 5, 8, torch.float64), r"values.*float32: got .*float64"),
    "keys integers": (rows(2, 5, 8, torch.int64), GOOD, r"keys.*got .*int64"),
    "a list": ([[0.0]], GOOD, r"torch tensor.*numpy array.*got list"),
    "nothing": (None, GOOD, r"got NoneType"),
    "objects": (np.array([None]), GOOD, r"array of object cannot be used"),
    "sparse": (GOOD.to_sparse(), GOOD, r"dense torch tensor.*got Tensor of layout.*sparse_coo"),
    "sparse values": (GOOD, GOOD.to_sparse(), r"got Tensor of layout torch\.sparse_coo"),
    "another library's": (GOOD.to_mkldnn(), GOOD, r"got Tensor of layout torch\._mkldnn"),
    "not in memory": (torch.empty(2, 5, 8, device="meta"), GOOD, r"host memory.*on meta"),
    "memory given back": (GOOD, without_memory(2, 5, 8), "values of layer 0 .* without memory"),
    "one token": (without_memory(2, 1, 8), rows(2, 1, 8), "keys of layer 0 .* without memory"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_append_names_the_bad_argument(store: Store, case: str) -> None:
    keys, values, message = BAD_ROWS[case]
    sequence = store.sequence()
    extend(store, OF_M, sequence, TOKENS)
    with pytest.raises(ConfigError, match=message):
        store.append(sequence, 0, keys, values)
    check_bytes(store, OF_M, sequence, TOKENS)


@pytest.mark.parametrize("layer", [-1, 2, 99])
def test_a_layer_that_is_not_there_is_refused(store: Store, layer: int) -> None:
    sequence = store.sequence()
    with pytest.raises(ConfigError, match=f"layer {layer} of a model of 2 layers"):
        store.append(sequence, layer, GOOD, GOOD)
    with pytest.raises(ConfigError, match=f"layer {layer} of a model of 2 layers"):
        store.attend(sequence, layer, a_query(OF_M, 0, 1, 1))


def test_numpy_arrays_are_taken_read_only_reversed_or_swapped_ones_too(store: Store) -> None:
    sequence = store.sequence()
    for layer in range(2):
        keys, values = (each.numpy() for each in OF_M.rows(TOKENS, layer))
        keys.setflags(write=False)
        reversed_twice = values[:, ::-1].copy()[:, ::-1]
        store.append(sequence, layer, keys, reversed_twice)
    check_bytes(store, OF_M, sequence, TOKENS)
    with pytest.raises(ConfigError, match="cannot be used"):
        store.append(sequence, 0, keys.astype(">f4"), values)


def test_tensors_with_any_strides_or_a_gradient_are_taken(store: Store) -> None:
    sequence = store.sequence()
    for layer in range(2):
        keys, values = OF_M.rows(TOKENS, layer)
        tokens_first = keys.transpose(0, 1).contiguous().transpose(0, 1)
        store.append(sequence, layer, tokens_first, values.clone().requires_grad_())
    check_bytes(store, OF_M, sequence, TOKENS)


@pytest.mark.parametrize("learns", [False, True])
def test_tensors_whose_sign_is_only_noted_are_taken(store: Store, learns: bool) -> None:
    sequence = store.sequence()
    for layer in range(2):
        keys, values = ((-each)._neg_view() for each in OF_M.rows(TOKENS, layer))
        assert keys.is_neg()
        store.append(sequence, layer, keys.requires_grad_(learns), values)
    check_bytes(store, OF_M, sequence, TOKENS)
    query = a_query(OF_M, 0, 1, 1)
    given = (-query)._neg_view().requires_grad_(learns)
    assert torch.equal(store.attend(sequence, 0, given), store.attend(sequence, 0, query))


def test_the_store_keeps_a_copy(store: Store) -> None:
    """A036: what the caller does to its tensors afterwards is its own affair."""
    sequence = store.sequence()
    long = some_tokens(600, 2)
    for layer in range(2):
        keys, values = (each.clone() for each in OF_M.rows(long, layer))
        store.append(sequence, layer, keys, values)
        keys.zero_()
        values.zero_()
    check_bytes(store, OF_M, sequence, long)


def test_every_bit_pattern_survives_a_placement_and_a_crop(tmp_path: Path) -> None:
    """NaNs carry bits as well: what is put back into the order of positions is copied as it is."""
    geometry = GEOMETRIES["bfloat16"]
    bits = np.random.default_rng(1).integers(-(2**15), 2**15, (2, 512, 16), np.int16)
    given = torch.from_numpy(bits).view(torch.bfloat16)
    with open_store(tmp_path, geometry, None, Shuffled(1)) as store:
        sequence = store.sequence()
        for layer in range(2):
            store.append(sequence, layer, given, given)
        store.crop(sequence, 300)
        held = store._mover.tensors(Unit(sequence.tail[0], 1))
    for each in held:
        assert torch.equal(each.contiguous().view(torch.int16), torch.from_numpy(bits[:, :300]))


BAD_QUERIES: dict[str, tuple[dict[str, Any], str]] = {
    "dimensions": ({"query": rows(4, 1, 8)[0]}, r"query .*\[1, 8\]"),
    "width": ({"query": rows(4, 1, 9)}, r"query|widths"),
    "heads": ({"query": rows(3, 1, 8)}, r"3 heads"),
    "dtype": ({"query": rows(4, 1, 8, torch.float16)}, r"float16.*float32|float32.*float16"),
    "integers": ({"query": rows(4, 1, 8, torch.int32)}, r"query .*int32"),
    "a list": ({"query": [[1.0]]}, r"got list"),
    "sparse": ({"query": rows(4, 1, 8).to_sparse()}, r"got Tensor of layout torch\.sparse_coo"),
    "too many": ({"query": rows(4, 101, 8)}, r"last 101 tokens.*holds 100"),
    "none": ({"query": rows(4, 0, 8)}, r"query"),
    "keys count": ({"keys": rows(2, 3, 8), "values": rows(2, 3, 8)}, r"keys .*\[2, 3, 8\]"),
    "keys heads": ({"keys": rows(1, 1, 8), "values": rows(1, 1, 8)}, r"keys .*\[1, 1, 8\]"),
    "keys width": ({"keys": rows(2, 1, 9), "values": rows(2, 1, 8)}, r"keys .*\[2, 1, 9\]"),
    "values width": ({"keys": rows(2, 1, 8), "values": rows(2, 1, 9)}, r"values .*\[2, 1, 9\]"),
    "values dtype": (
        {"keys": rows(2, 1, 8), "values": rows(2, 1, 8, torch.float16)},
        r"values .*float16",
    ),
    "keys alone": ({"keys": rows(2, 1, 8)}, r"keys and values"),
    "values alone": ({"values": rows(2, 1, 8)}, r"keys and values"),
    "scale": ({"scale": float("nan")}, r"scale is nan"),
    "softcap": ({"softcap": 0.0}, r"softcap is 0"),
}


@pytest.mark.parametrize("case", BAD_QUERIES)
def test_attend_names_the_bad_argument(store: Store, case: str) -> None:
    arguments, message = BAD_QUERIES[case]
    sequence = store.sequence()
    extend(store, OF_M, sequence, TOKENS)
    with pytest.raises(ConfigError, match=message):
        store.attend(sequence, 0, **{"query": rows(4, 1, 8), **arguments})
    check_everywhere(store, OF_M, sequence, TOKENS)


def test_attend_over_nothing_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="holds 0: append keys and values first"):
        store.attend(store.sequence(), 0, rows(4, 1, 8))


@pytest.mark.parametrize(
    "name", ["", "a" * 257, "line\nbreak", "nul\0", "bell\a", "\udcff", "tab\t"], ids=repr
)
def test_a_bad_name_is_refused(store: Store, name: str) -> None:
    sequence = store.sequence()
    extend(store, OF_M, sequence, TOKENS)
    with pytest.raises(ConfigError, match="1 to 256 printable characters"):
        store.save(sequence, name, TOKENS)
    assert store.names() == []


@pytest.mark.parametrize("name", ["a", "a" * 256, "ein Buch/Kapitel 1", "本", "'; DROP TABLE name"])
def test_a_good_name_is_kept(store: Store, tmp_path: Path, name: str) -> None:
    put(store, OF_M, name, TOKENS)
    store.close()
    with open_store(tmp_path) as again:
        assert [each.name for each in again.names()] == [name]


@pytest.mark.parametrize("count", [0, 1, 99, 102, 1000])
def test_save_refuses_a_length_that_does_not_fit(store: Store, count: int) -> None:
    sequence = store.sequence()
    extend(store, OF_M, sequence, TOKENS)
    with pytest.raises(ConfigError, match=rf"{count} tokens are named.*KV of 100"):
        store.save(sequence, "n", some_tokens(count, 1))
    with pytest.raises(ConfigError, match="0 tokens are named"):
        store.save(sequence, "n")
    assert store.names() == []
    assert store.save(sequence, "n", [*TOKENS, 5]) == 100


def test_an_empty_sequence_cannot_be_saved(store: Store) -> None:
    with pytest.raises(ConfigError, match="empty sequence"):
        store.save(store.sequence(), "n", [])


def test_tokens_that_contradict_what_was_named_are_refused(store: Store) -> None:
    sequence = store.sequence()
    store.name_tokens(sequence, TOKENS)
    extend(store, OF_M, sequence, TOKENS)
    others = [*TOKENS[:50], 96 - TOKENS[50] or 1, *TOKENS[51:]]
    message = f"first at position 50: {others[50]} given, {TOKENS[50]} held"
    with pytest.raises(ConfigError, match=message):
        store.name_tokens(sequence, others)
    with pytest.raises(ConfigError, match=message):
        store.save(sequence, "n", others)
    store.crop(sequence, 50)
    extend(store, OF_M, sequence, others)
    store.save(sequence, "n", others)
    check_bytes(store, OF_M, store.resume(others), others)


BAD_TOKENS: dict[str, object] = {
    "negative": [1, 2, -3],
    "float": [1.0, 2.0],
    "nan": [float("nan")],
    "text": "abc",
    "words": ["a", "b"],
    "nested": [[1, 2], [3, 4]],
    "number": 5,
    "bool": [True, False],
    "too large": [2**32],
    "largest": [2**32 - 1],
    "far too large": [2**70],
    "ragged": [[1], [2, 3]],
    "none": None,
    "set": {1, 2},
    "float tensor": torch.tensor([1.0]),
}


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_what_is_not_a_list_of_token_ids_is_refused(store: Store, case: str) -> None:
    tokens = BAD_TOKENS[case]
    sequence = store.sequence()
    calls: list[Callable[[], object]] = [
        lambda: store.resume(tokens),
        lambda: store.lookup(tokens),
        lambda: store.name_tokens(sequence, tokens),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="token"):
            call()


def test_token_ids_of_every_kind_and_the_largest_are_taken(store: Store) -> None:
    largest = [2**32 - 2, 0, 2**31]
    for tokens in (largest, np.array(largest, np.uint64), torch.tensor(largest)):
        sequence = store.sequence()
        extend(store, OF_M, sequence, largest)
        assert store.save(sequence, "n", tokens) == 3
        assert store.lookup(tokens) == 3
    assert store.stats().segments == 1
    assert store.lookup([]) == 0
    assert store.resume([]).length() == 0


@pytest.mark.parametrize("held", [10, 100, 600])
def test_some_layers_only_is_an_unfinished_pass(store: Store, tmp_path: Path, held: int) -> None:
    """A pass broken off cannot be saved or forked; a crop goes back to before it."""
    tokens = some_tokens(held, 1)
    sequence = store.sequence()
    extend(store, OF_M, sequence, tokens)
    store.append(sequence, 0, *(each[:, :5] for each in OF_M.rows(some_tokens(5, 9), 0)))
    assert sequence.lengths.tolist() == [held + 5, held]
    grown = [*tokens, 1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match=rf"between passes.*\[{held}, {held + 5}\]"):
        store.save(sequence, "n", grown)
    with pytest.raises(ConfigError, match="only between passes"):
        store.fork(sequence)
    with pytest.raises(ConfigError, match=f"cannot crop to {held + 1} tokens"):
        store.crop(sequence, held + 1)
    assert store.names() == []
    store.crop(sequence, held)
    check_bytes(store, OF_M, sequence, tokens)
    extend(store, OF_M, sequence, grown)
    store.save(sequence, "n", grown)
    check_bytes(store, OF_M, sequence, grown)
    store.release(sequence)
    check_settled(store, tmp_path)


@pytest.mark.parametrize("length", [-1, 101, 1000])
def test_crop_outside_is_refused(store: Store, length: int) -> None:
    sequence = store.sequence()
    extend(store, OF_M, sequence, TOKENS)
    with pytest.raises(ConfigError, match=f"cannot crop to {length} tokens: 100 are held"):
        store.crop(sequence, length)
    check_bytes(store, OF_M, sequence, TOKENS)


def test_bfloat16_has_no_numpy_form_but_its_tensors_are_taken(tmp_path: Path) -> None:
    geometry = GEOMETRIES["bfloat16"]
    with open_store(tmp_path, geometry) as store:
        sequence = store.sequence()
        with pytest.raises(ConfigError, match=r"bfloat16: got .*float32"):
            store.append(sequence, 0, np.zeros((2, 1, 16), "f4"), np.zeros((2, 1, 16), "f4"))


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "hot": ({"hot": "lots"}, r"hot must be a size.*'lots'"),
    "hot negative": ({"hot": -1}, r"hot must .*got -1"),
    "host": ({"host": "1 parsec"}, "host must be a size"),
    "region unit": ({"region": "5XiB"}, "region must be a size"),
    "region bool": ({"region": True}, "region must be a size"),
    "region zero": ({"region": 0}, "at least 2097152 bytes.*got 0"),
    "region name": ({"region": "text.txt"}, "region must be a size.*got 'text.txt'"),
    "region small": ({"region": 4096}, "at least 2097152 bytes"),
    "engine": ({"engine": "libaio"}, "auto, io_uring, threads or nvme: got 'libaio'"),
    "direct": ({"direct_io": "maybe"}, "direct_io must be required, preferred or off"),
    "no geometry": ({"geometry": None}, "geometry= and fingerprint="),
    "fingerprint": ({"fingerprint": {"a": object()}}, "plain JSON"),
    "both": ({"model": object()}, "not both"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_open_names_the_bad_setting(tmp_path: Path, case: str) -> None:
    settings, message = BAD_SETTINGS[case]
    usual: dict[str, Any] = {"geometry": PLAIN, "fingerprint": "m", "region": "4MiB", "hot": "1MiB"}
    with pytest.raises(ConfigError, match=message):
        kvtier.open(tmp_path / "store", **{**usual, **settings})
    # Whatever it left behind is no store, and does not stand in the way of one.
    with open_store(tmp_path / "store", PLAIN, Config("4MiB", hot="1MiB")) as store:
        check_settled(store, tmp_path / "store")
