"""The attention "kvtier" with any other cache, or none, is what "sdpa" computes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvtier
from tests.model_cases import (
    FAMILIES,
    expected,
    generate,
    padded,
    plain,
    prompt,
    require_varied,
)

SDPA_FAMILIES = ["qwen2", "llama", "mistral", "gemma3"]
pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = FAMILIES[request.param]()
    with kvtier.open(tmp_path / "kv", model=made, region="8MiB", hot="4MiB"):
        assert made.config._attn_implementation == "kvtier"
        yield made


@pytest.mark.parametrize(
    ("model", "family"), [(each, each) for each in SDPA_FAMILIES], indirect=["model"]
)
@pytest.mark.parametrize("cached", [True, False])
def test_greedy_output_with_other_caches(family: str, model: Any, cached: bool) -> None:
    ids, mask = padded([prompt(1, 100), prompt(2, 20), prompt(3, 63)])
    runs: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (ids, {"attention_mask": mask}),
        (prompt(4, 90), {}),
    ]
    if cached:
        runs.append((prompt(5, 40, 2), {"num_beams": 2}))
    for rows, options in runs:
        settings = {**options, "use_cache": cached}
        cache = DynamicCache(config=model.config) if cached else None
        assert torch.equal(
            generate(model, rows, cache, 30, settings), expected(family, rows, 30, options)
        )


@pytest.mark.parametrize(
    ("model", "family"), [(each, each) for each in SDPA_FAMILIES], indirect=["model"]
)
def test_chunks_on_a_dynamic_cache(family: str, model: Any) -> None:
    """A window is crossed inside a chunk; the mask given is that of all tokens at once."""
    ids, mask = padded([prompt(6, 150), prompt(7, 120)])
    options = {"attention_mask": mask, "prefill_chunk_size": 47}
    assert torch.equal(
        generate(model, ids, DynamicCache(config=model.config), 20, options),
        expected(family, ids, 20, {"attention_mask": mask}),
    )
    with torch.no_grad():
        at = (mask.cumsum(-1) - 1).clamp(min=0)
        both = []
        for each in (model, plain(family)):
            cache = DynamicCache(config=each.config)
            each(ids[:, :100], attention_mask=mask, position_ids=at[:, :100], cache=cache)
            step = {"attention_mask": mask, "position_ids": at[:, 100:], "cache": cache}
            both.append(each(ids[:, 100:], **step).logits)
        torch.testing.assert_close(both[0], both[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_caches_of_fixed_length_are_refused(model: Any) -> None:
    """Their keys do not end where the queries do; nothing says where they do."""
    with pytest.raises(NotImplementedError, match="fixed length"):
        generate(model, prompt(8, 30), None, 5, {"cache_implementation": "static"})


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_packed_sequences_are_refused(model: Any) -> None:
    positions = torch.cat([torch.arange(10), torch.arange(20)])[None]
    with torch.no_grad(), pytest.raises(NotImplementedError, match="packed"):
        model(prompt(9, 30), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("model", ["qwen2", "gemma3"], indirect=True)
def test_masks_of_the_caller_are_applied(model: Any) -> None:
    """A mask [rows, 1, n, n] that hides the first ten tokens."""
    ids = prompt(10, 50)
    shown = torch.ones(50, 50).tril().bool()
    shown[10:, :10] = False
    mask = shown[None, None]
    if model.config.model_type == "gemma3_text":
        mask_given: Any = {"full_attention": mask, "sliding_attention": mask}
    else:
        mask_given = mask
    with torch.no_grad():
        logits = model(ids, attention_mask=mask_given, use_cache=False).logits
        other = plain("gemma3" if isinstance(mask_given, dict) else "qwen2")
        reference = other(ids, attention_mask=mask_given, use_cache=False).logits
        open_to_all = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits, reference, rtol=1e-3, atol=1e-3)
    assert (logits - open_to_all).abs().max() > 0.1


@pytest.mark.parametrize("model", ["gemma2"], indirect=True)
def test_soft_capping_needs_a_tiered_cache(model: Any) -> None:
    with pytest.raises(NotImplementedError, match="soft-capping"):
        generate(model, prompt(11, 20), None, 3)
    require_varied(expected("gemma2", prompt(11, 20), 20)[:, 20:])


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_gradients_without_a_tiered_cache(model: Any) -> None:
    """An open store does not stand in the way of training."""
    ids = prompt(12, 30)
    losses = []
    for each in (model, plain("qwen2")):
        each.zero_grad()
        each(ids, labels=ids, use_cache=False).loss.backward()
        losses.append(each.model.layers[0].self_attn.k_proj.weight.grad.clone())
        each.zero_grad()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)
    assert losses[0].abs().max() > 0
