"""What a TieredCache refuses, and says: nothing is answered from KV that is not exactly it."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtier
from kvtier.errors import ConfigError, LockedError
from kvtier.tiering.adapters.huggingface import TieredCache
from tests.model_cases import PAD, expected, gemma3, generate, llama, padded, prompt, qwen2

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")
IDS = prompt(1, 40)
ROWS, MASK = padded([prompt(2, 40), prompt(3, 30)])


@pytest.fixture
def model() -> Any:
    return qwen2()


@pytest.fixture
def store(model: Any, tmp_path: Path) -> Iterator[kvtier.Store]:
    with kvtier.open(tmp_path / "kv", model=model, region="8MiB", hot="4MiB") as store:
        yield store


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def other_mask() -> torch.Tensor:
    mask = MASK.clone()
    mask[0, :3] = 0
    return mask


FORWARD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("other mask", {"attention_mask": other_mask()}, kvtier.KvtierError, "attention_mask .* not"),
    ("no mask", {"attention_mask": None}, kvtier.KvtierError, "padded rows, but .* attention_mask"),
    ("no positions", {"position_ids": None}, kvtier.KvtierError, "no position_ids"),
    (
        "positions of columns",
        {"position_ids": torch.arange(40)[None]},
        kvtier.KvtierError,
        r"position_ids \[1, 40\] are not those",
    ),
    ("other ids", {"input_ids": ROWS.flip(1)}, kvtier.KvtierError, "tokens differ .* position 0"),
    ("more rows", {"input_ids": IDS.repeat(3, 1)}, kvtier.KvtierError, "3 rows, .* made for 2"),
    (
        "embeddings",
        {"input_ids": None, "inputs_embeds": torch.zeros(2, 40, 64)},
        NotImplementedError,
        "inputs_embeds given",
    ),
    (
        "custom mask",
        {"attention_mask": torch.ones(2, 1, 40, 40).tril().bool()},
        NotImplementedError,
        r"padding mask .* \[2, 1, 40, 40\]",
    ),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), FORWARD)
def test_forward_passes_that_do_not_fit(
    name: str, change: dict[str, Any], error: type[Exception], message: str, model: Any, store: Any
) -> None:
    """A108: each is refused; taken back where it had begun, the cache is as before."""
    fits = {"input_ids": ROWS, "attention_mask": MASK, "position_ids": positions(MASK)}
    cache = TieredCache(store, ROWS, MASK)
    with torch.no_grad():
        with pytest.raises(error, match=message):
            model(**(fits | change), cache=cache)
        if cache.get_seq_length():
            with pytest.raises(kvtier.KvtierError, match=r"crop\(-40\)"):
                model(**fits, cache=cache)
            with pytest.raises(kvtier.KvtierError, match=r"between passes|tokens"):
                cache.save("half")
            cache.crop(-40)
        options = {"attention_mask": MASK}
        output = generate(model, ROWS, cache, 10, options)
        assert torch.equal(output, expected("qwen2", ROWS, 10, options)), name


def test_an_inferred_mask_with_a_hole_is_refused(model: Any, store: Any) -> None:
    """Without attention_mask the library takes an id like its padding for padding."""
    ids = IDS.clone()
    ids[0, 20] = PAD
    with pytest.raises(kvtier.KvtierError, match="attention_mask"):
        model.generate(ids, cache=TieredCache(store, ids), max_new_tokens=3, pad_token_id=PAD)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (MASK.flip(1), NotImplementedError, "row 1 is padded elsewhere than on its left"),
        (torch.zeros_like(MASK), kvtier.KvtierError, "row 0 is padding alone"),
        (MASK[:, 1:], kvtier.KvtierError, r"\[2, 39\] must have the shape .* \[2, 40\]"),
        (MASK[None, None], kvtier.KvtierError, "attention_mask must be"),
    ],
)
def test_masks_that_cannot_be_used(
    mask: torch.Tensor, error: type[Exception], message: str, store: Any
) -> None:
    with pytest.raises(error, match=message):
        TieredCache(store, ROWS, mask)


@pytest.mark.parametrize("ids", [[], torch.zeros(1, 2, 3), torch.zeros(2, 2), torch.zeros(1, 0)])
def test_ids_that_cannot_be_used(ids: Any, store: Any) -> None:
    with pytest.raises(kvtier.KvtierError, match="input_ids must be integer ids"):
        TieredCache(store, ids)


def test_gradients_are_refused(model: Any, store: Any) -> None:
    with pytest.raises(NotImplementedError, match="inference"):
        model(IDS, cache=TieredCache(store, IDS))
    model.train()
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    with torch.no_grad(), pytest.raises(NotImplementedError, match="eval mode"):
        model(IDS, cache=TieredCache(store, IDS))


def test_other_caches_beside_this_one_are_refused(model: Any, store: Any) -> None:
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model, IDS, TieredCache(store, IDS), 3, {"cache_implementation": "static"})


def test_crop_takes_a_negative_number(model: Any, store: Any) -> None:
    cache = TieredCache(store, IDS)
    generate(model, IDS, cache, 2)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(5)
    with pytest.raises(kvtier.KvtierError, match="cannot remove 60 of 41"):
        cache.crop(-60)


def test_two_stores_for_one_model(model: Any, store: Any, tmp_path: Path) -> None:
    """Namespaces apart, one after the other or mixed; the attention ends with the last."""
    reference = expected("qwen2", IDS, 8)
    with pytest.raises(LockedError):
        kvtier.open(tmp_path / "kv", model=model)
    second = kvtier.open(tmp_path / "two", model=model, region="8MiB", namespace="b")
    for each in (store, second, store, second):
        cache = TieredCache(each, IDS)
        assert torch.equal(generate(model, IDS, cache, 8), reference)
        cache.save("a")
    store.close()
    assert model.config._attn_implementation == "kvtier"
    assert torch.equal(generate(model, IDS, TieredCache(second, IDS), 8), reference)
    second.close()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(generate(model, IDS, None, 8), reference)


@pytest.mark.parametrize("other_open", [False, True])
def test_the_cache_of_another_model(other_open: bool, store: Any, tmp_path: Path) -> None:
    """Same shapes, other weights: its KV must not get into this store."""
    other: Any = qwen2()
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
        if other_open:
            with (
                kvtier.open(tmp_path / "two", model=other, region="8MiB"),
                pytest.raises(kvtier.KvtierError, match="another model"),
            ):
                other(IDS, cache=TieredCache(store, IDS))
        with pytest.raises(kvtier.KvtierError, match="not shown"):
            other(IDS, cache=TieredCache(store, IDS))
        with pytest.raises(kvtier.KvtierError, match="another model"):
            copy.deepcopy(store.model)(IDS, cache=TieredCache(store, IDS))
        with pytest.raises(kvtier.KvtierError, match="not shown"):
            store.model.model(IDS, cache=TieredCache(store, IDS))


def test_attention_that_was_set_to_another(model: Any, store: Any) -> None:
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(NotImplementedError, match="did not attend"):
        model(IDS, cache=TieredCache(store, IDS))


def changed_weight(model: Any) -> Any:
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] += 1e-3
    return model


def changed_data(model: Any) -> Any:
    """As adapters are merged: without a trace in the version of the tensor."""
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-3
    return model


def scaled_rope(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    other: Any = type(model)._from_config(config)
    other.load_state_dict(model.state_dict())
    return other.eval()


@pytest.mark.parametrize(
    "change",
    [changed_weight, changed_data, scaled_rope, lambda model: model.to(torch.bfloat16)],
    ids=["weight", "data", "rope", "dtype"],
)
def test_a_changed_model_restores_nothing(change: Callable[[Any], Any], tmp_path: Path) -> None:
    """A005, A006."""
    model = qwen2()
    restored = []

    def save(opened_for: Any) -> None:
        with kvtier.open(tmp_path / "kv", model=opened_for, region="8MiB") as store:
            cache = TieredCache(store, IDS)
            restored.append(cache.restored_tokens)
            cache.save("a", tokens=generate(opened_for, IDS, cache, 2))

    save(model)
    save(qwen2())
    changed = change(model)
    save(changed)
    save(changed)
    save(qwen2())
    assert restored == [0, 39, 0, 39, 39]


@pytest.mark.parametrize("make", [qwen2, gemma3, llama])
def test_the_attention_is_put_back(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    for before in ("sdpa", "eager"):
        model.set_attn_implementation(before)
        with kvtier.open(tmp_path / "kv", model=model, region="8MiB"):
            assert model.config._attn_implementation == "kvtier"
        assert model.config._attn_implementation == before
        assert not model._forward_pre_hooks
    with pytest.raises(kvtier.KvtierError):
        kvtier.open(tmp_path / "two", model=model, region="8MiB", hot=1)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("change", ["weight", "rotary", "replaced"])
def test_weights_changed_while_the_store_is_open_are_refused(tmp_path: Path, change: str) -> None:
    """KV of the changed model must not be stored under the fingerprint of the one before."""
    model = qwen2()
    ids = prompt(5, 60)
    with kvtier.open(tmp_path / "kv", model=model, region="16MiB", hot="4MiB") as store:
        cache = TieredCache(store, ids)
        generate(model, ids, cache, 2)
        with torch.no_grad():
            if change == "weight":
                model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
            elif change == "rotary":
                model.model.rotary_emb.inv_freq.mul_(0.9)
            else:
                old = model.model.layers[0].self_attn.v_proj
                old.weight = torch.nn.Parameter(old.weight * 2)
        with pytest.raises(ConfigError, match="weights were changed since the store was opened"):
            generate(model, ids, TieredCache(store, ids), 2)
    with kvtier.open(tmp_path / "kv", model=model) as store:
        assert TieredCache(store, ids).restored_tokens == 0
