"""Greedy output with a TieredCache is, token by token, that of a DynamicCache."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtier
from kvtier.io.probe import Engine
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.extent_io import Unit
from tests.conftest import LoopMaker
from tests.model_cases import (
    FAMILIES,
    HOT_SMALL,
    TOKEN_BYTES,
    expected,
    gemma3,
    generate,
    padded,
    prompt,
    qwen2,
    require_varied,
)

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")


def opened(path: Path, model: Any, hot: int = 8 << 20, engine: Engine = "auto") -> kvtier.Store:
    return kvtier.open(path / "kv", model=model, region="16MiB", hot=hot, engine=engine)


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        *(("gemma3", tokens) for tokens in (20, 63, 150)),
        *((family, tokens) for family in ("qwen2", "mistral", "gemma2") for tokens in (20, 150)),
        ("llama", 63),
    ],
)
def test_generated_saved_and_generated_again(family: str, tokens: int, tmp_path: Path) -> None:
    """A017, A103: prompts below, at and above the window of 64; the answer crosses it."""
    ids = prompt(tokens, tokens)
    reference = expected(family, ids, 50)
    with opened(tmp_path, FAMILIES[family]()) as store:
        cache = TieredCache(store, ids)
        assert cache.restored_tokens == 0
        output = generate(store.model, ids, cache, 50)  # type: ignore[attr-defined]
        assert torch.equal(output, reference)
        assert cache.save("a", tokens=output) == tokens + 49
    model = FAMILIES[family]()
    longer = torch.cat([reference, prompt(1, 30)], 1)
    reference_longer = expected(family, longer, 20)
    with opened(tmp_path, model) as store:
        cache = TieredCache(store, ids)
        assert cache.restored_tokens == tokens - 1, "a stored prompt leaves one token to compute"
        assert torch.equal(generate(model, ids, cache, 50), reference)
        cache = TieredCache(store, longer)
        assert cache.restored_tokens == tokens + 49
        assert torch.equal(generate(model, longer, cache, 20), reference_longer)


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gemma2"])
def test_a_left_padded_batch_equals_its_rows_alone(family: str, tmp_path: Path) -> None:
    """A102."""
    rows = [prompt(1, 90), prompt(2, 37), prompt(3, 71)]
    ids, mask = padded(rows)
    model = FAMILIES[family]()
    with opened(tmp_path, model) as store:
        output = generate(model, ids, TieredCache(store, ids, mask), 40, {"attention_mask": mask})
        assert torch.equal(output, expected(family, ids, 40, {"attention_mask": mask}))
        for row, each in enumerate(rows):
            alone = generate(model, each, TieredCache(store, each), 40)
            assert torch.equal(output[row, 90:], alone[0, each.shape[1] :])


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("chunk", [None, 200])
def test_a_context_four_times_hot(family: str, chunk: int | None, tmp_path: Path) -> None:
    """Prefilled in one piece and in chunks, then restored, inside the limit throughout."""
    ids = prompt(4, 4 * HOT_SMALL // TOKEN_BYTES + 100)
    options = {"prefill_chunk_size": chunk}
    reference = expected(family, ids, 20)
    for restored in (0, ids.shape[1] - 1):
        model = FAMILIES[family]()
        with opened(tmp_path, model, hot=HOT_SMALL) as store:
            cache = TieredCache(store, ids)
            assert cache.restored_tokens == restored
            output = generate(model, ids, cache, 20, options)
            assert torch.equal(output, reference)
            cache.save("long", tokens=output)
            stats = store.stats()
            assert 4 * stats.hot_limit_bytes < ids.shape[1] * TOKEN_BYTES
            assert 0 < stats.hot_bytes_max <= stats.hot_limit_bytes == HOT_SMALL


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_model_called_in_pieces(family: str, tmp_path: Path) -> None:
    ids = prompt(5, 333)
    reference = expected(family, ids, 12)
    model = FAMILIES[family]()
    with opened(tmp_path, model) as store, torch.no_grad():
        cache = TieredCache(store, ids)
        for piece in torch.split(ids, 70, dim=1):
            logits = model(piece, cache=cache).logits
        tokens = ids
        for _ in range(12):
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
            logits = model(tokens[:, -1:], cache=cache).logits
        assert torch.equal(tokens, reference)
        assert cache.save("pieces") == 333 + 12
        assert store.lookup(reference[0]) == 333 + 12


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_engines(engine: Engine, tmp_path: Path) -> None:
    check_engine(engine, str(tmp_path / "kv"), "8MiB")


@pytest.mark.loop
@pytest.mark.parametrize("block_bytes", [512, 4096])
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_block_devices(
    engine: Engine, block_bytes: int, loop_device: LoopMaker, tmp_path: Path
) -> None:
    check_engine(engine, str(tmp_path / "kv"), loop_device(8 << 20, block_bytes))


def check_engine(engine: Engine, path: str, region: str) -> None:
    """Longer than HOT, so that answers are read from the device."""
    ids = prompt(6, 700)
    reference = expected("qwen2", ids, 10)
    for restored in (0, 699):
        model = qwen2()
        with kvtier.open(path, model=model, region=region, hot=HOT_SMALL, engine=engine) as store:
            assert store.stats().engine == engine
            cache = TieredCache(store, ids)
            assert cache.restored_tokens == restored
            output = generate(model, ids, cache, 10)
            assert torch.equal(output, reference)
            cache.save("a", tokens=output)
            assert store.stats().bytes_read > 0
            if "/" in region:
                assert store.stats().region_path == region


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A107: the first tokens are those of a DynamicCache; restored KV is equal bit by bit."""
    ids = prompt(7, 130)
    other: Any = FAMILIES[family]()
    other.to(dtype)
    reference = generate(other, ids, None, 16)
    require_varied(reference[:, 130:])
    model: Any = FAMILIES[family]()
    model.to(dtype)
    held = []
    for restored in (0, 129):
        with opened(tmp_path, model) as store:
            cache = TieredCache(store, ids)
            assert cache.restored_tokens == restored
            output = generate(model, ids, cache, 16)
            assert torch.equal(output, reference)
            cache.save("a", tokens=output)
            held.append(stored_kv(store, cache, 129))
    for before, after in pairwise(held):
        assert before[0][0].dtype == dtype
        assert before[0][0].abs().max() > 0
        for (keys, values), (keys_again, values_again) in zip(before, after, strict=True):
            assert torch.equal(keys.view(torch.int16), keys_again.view(torch.int16))
            assert torch.equal(values.view(torch.int16), values_again.view(torch.int16))


def stored_kv(
    store: kvtier.Store, cache: TieredCache, tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [kv_heads, tokens, width] of every layer, of what a cache holds."""
    mover = store._mover
    result = []
    for layer in range(len(store.geometry.layers)):
        parts = []
        for view in cache.rows.sequences[0].views:
            assert mover.load([Unit(view.segment, layer)])
            keys, values = mover.tensors(Unit(view.segment, layer))
            count = view.end - view.segment.start
            parts.append((keys[:, :count].clone(), values[:, :count].clone()))
        result.append(
            (
                torch.cat([each[0] for each in parts], 1)[:, :tokens].contiguous(),
                torch.cat([each[1] for each in parts], 1)[:, :tokens].contiguous(),
            )
        )
    return result


def test_a_batch_with_padding_longer_than_a_chunk(tmp_path: Path) -> None:
    """Everything at once: padding, chunks shorter than the padding, a HOT limit, a window."""
    rows = [prompt(1, 700), prompt(2, 37)]
    ids, mask = padded(rows)
    model = gemma3()
    options = {"attention_mask": mask, "prefill_chunk_size": 128}
    reference = expected("gemma3", ids, 12, {"attention_mask": mask})
    for _ in range(2):
        with opened(tmp_path, model, hot=HOT_SMALL) as store:
            cache = TieredCache(store, ids, mask)
            output = generate(model, ids, cache, 12, options)
            assert torch.equal(output, reference)
            cache.save("rows", tokens=output)
