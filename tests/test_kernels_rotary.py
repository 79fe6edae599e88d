"""unrotated against the rotations that transformers' own models make."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.phi import modeling_phi
from transformers.models.qwen2 import modeling_qwen2

from kvtier.errors import ConfigError
from kvtier.kernels.rotary import Rotary, unrotated

HEADS, WIDTH = 2, 64
SIZES: dict[str, Any] = {"hidden_size": 4 * WIDTH, "num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 256,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}

Turned = tuple[Tensor, Rotary]
Turn = Callable[[Tensor, Tensor], Turned]


def with_module(
    embedding: torch.nn.Module, modeling: Any, style: Literal["half", "interleaved"] = "half"
) -> Turn:
    """Keys turned by a model's own functions, and the Rotary read off its module."""

    def turn(keys: Tensor, positions: Tensor) -> Turned:
        cos, sin = embedding(keys, positions[None])
        rotated = int(cos.shape[-1])
        # Phi's attention, not its function, leaves the rest of a key out.
        part, rest = keys[None, ..., :rotated], keys[None, ..., rotated:]
        turned = modeling.apply_rotary_pos_emb(part, part, cos, sin)[1]
        inverse: Any = embedding.inv_freq
        scaling: Any = embedding.attention_scaling
        return torch.cat([turned, rest], -1)[0], Rotary(tuple(inverse.tolist()), scaling, style)

    return turn


def qwen2() -> Turn:
    config = Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    return with_module(modeling_qwen2.Qwen2RotaryEmbedding(config), modeling_qwen2)


def llama(scaling: dict[str, Any]) -> Turn:
    config = LlamaConfig(**SIZES, max_position_embeddings=4096, rope_parameters=scaling)
    return with_module(modeling_llama.LlamaRotaryEmbedding(config), modeling_llama)


def gpt_neox() -> Turn:
    config = GPTNeoXConfig(**SIZES, rope_parameters=PARTIAL)
    return with_module(modeling_gpt_neox.GPTNeoXRotaryEmbedding(config), modeling_gpt_neox)


def phi() -> Turn:
    config = PhiConfig(**SIZES, rope_parameters=PARTIAL)
    return with_module(modeling_phi.PhiRotaryEmbedding(config), modeling_phi)


def cohere() -> Turn:
    config = CohereConfig(**SIZES)
    embedding = modeling_cohere.CohereRotaryEmbedding(config)
    return with_module(embedding, modeling_cohere, "interleaved")


def gptj() -> Turn:
    config = GPTJConfig(n_embd=4 * WIDTH, n_head=4, rotary_dim=32)
    sines = modeling_gptj.create_sinusoidal_positions(config.n_positions, 32)
    inverse = 1.0 / (10000 ** (torch.arange(0, 32, 2) / 32))

    def turn(keys: Tensor, positions: Tensor) -> Turned:
        sin, cos = sines[positions].to(keys.dtype).chunk(2, -1)
        part = keys[..., :32].transpose(0, 1)[None]
        turned = modeling_gptj.apply_rotary_pos_emb(part, sin[None], cos[None])[0].transpose(0, 1)
        rotary = Rotary(tuple(inverse.tolist()), style="interleaved")
        return torch.cat([turned, keys[..., 32:]], -1), rotary

    return turn


MODELS: dict[str, Callable[[], Turn]] = {
    "qwen2": qwen2,
    "llama3": lambda: llama(LLAMA3),
    "yarn": lambda: llama(YARN),
    "gpt-neox, partial": gpt_neox,
    "phi, partial": phi,
    "cohere": cohere,
    "gptj, partial": gptj,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("dtype", "error_max"),
    # Angles near 1000 have a float32 error of 1e-4 at most; bfloat16 has 8 bits, its cos as well.
    [(torch.float32, 2e-4), (torch.bfloat16, 0.08)],
)
def test_undoes_what_the_model_did(model: str, dtype: torch.dtype, error_max: float) -> None:
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(HEADS, 100, WIDTH, generator=random).to(dtype)
    positions = torch.randint(0, 1000, (100,), generator=random)
    turned, rotary = MODELS[model]()(keys, positions)
    assert turned.dtype == dtype
    assert not torch.allclose(turned.float(), keys.float(), atol=0.1)
    back = unrotated(turned, positions, rotary)
    assert back.dtype == torch.float32
    assert float((back - keys.float()).abs().max()) < error_max
    assert torch.equal(back[..., rotary.rotated :], keys[..., rotary.rotated :].float())


def test_yarn_is_a_case_with_a_scaling() -> None:
    rotary = MODELS["yarn"]()(torch.zeros(1, 1, WIDTH), torch.zeros(1, dtype=torch.int64))[1]
    assert rotary.scaling > 1.1


def test_given_keys_stay_as_they_are() -> None:
    keys = torch.randn(2, 3, 4)
    before = keys.clone()
    result = unrotated(keys, torch.arange(3), Rotary((1.0, 0.1)))
    assert torch.equal(keys, before)
    assert not torch.equal(result, before)


def test_no_frequencies_change_nothing() -> None:
    keys = torch.randn(2, 3, 4)
    assert torch.equal(unrotated(keys, torch.arange(3), Rotary(())), keys)


def test_a_key_that_is_not_finite_concerns_its_own_row() -> None:
    keys = torch.zeros(1, 3, 4)
    keys[0, 1, 0] = torch.nan
    result = unrotated(keys, torch.arange(3), Rotary((1.0, 0.1)))
    assert torch.isfinite(result).all(-1).tolist() == [[True, False, True]]


def test_another_start_keeps_all_distances() -> None:
    """So a Segment's keys may be turned back by their places in it."""
    random = torch.Generator().manual_seed(2)
    keys = torch.randn(1, 20, 8, generator=random)
    rotary = Rotary((1.0, 0.3, 0.1), 1.5)
    here = unrotated(keys, torch.arange(20), rotary)
    there = unrotated(keys, torch.arange(20) + 512, rotary)
    assert not torch.allclose(here, there, atol=0.1)
    assert torch.allclose(torch.cdist(here, here), torch.cdist(there, there), atol=1e-3)


def test_refuses_what_does_not_fit() -> None:
    rotary, positions = Rotary((1.0, 0.1)), torch.arange(3)
    with pytest.raises(ConfigError, match="at least 4"):
        unrotated(torch.zeros(2, 3, 3), positions, rotary)
    with pytest.raises(ConfigError, match="keys is"):
        unrotated(torch.zeros(2, 3, 4, dtype=torch.int64), positions, rotary)
    with pytest.raises(ConfigError, match="positions is"):
        unrotated(torch.zeros(2, 3, 4), torch.arange(2), rotary)
    with pytest.raises(ConfigError, match="positions is"):
        unrotated(torch.zeros(2, 3, 4), positions.float(), rotary)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="scaling"):
            Rotary((1.0,), wrong)
    with pytest.raises(ConfigError, match="inverse_frequencies"):
        Rotary((float("inf"),))
    style: Any = "other"
    with pytest.raises(ConfigError, match="style"):
        Rotary((1.0,), style=style)
