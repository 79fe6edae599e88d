"""Tiny random Hugging Face models for tests, and what a DynamicCache makes of them.

Weights are seeded and large, so that the next token depends on the whole context and greedy output
does not settle on one token: otherwise identical output would prove nothing.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gemma3 import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 256
PAD = 0
FIRST_TOKEN = 5
WINDOW = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOKEN_BYTES = 2 * 2 * (16 + 16) * 4
"""KV bytes of one token in all layers of the two-layer models, float32."""
UNIT_BYTES = 512 * TOKEN_BYTES // 2
HOT_SMALL = UNIT_BYTES + 64 * 1024
"""A HOT limit little above the least; holds fewer than 400 tokens of a two-layer model."""
Make = Callable[[], PreTrainedModel]


def seeded(kind: Any, config: PretrainedConfig, deviation: float = 0.25) -> PreTrainedModel:
    """A model in eval mode with seeded normal weights."""
    model: Any = kind._from_config(config)
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
    model.generation_config.pad_token_id = PAD
    made: PreTrainedModel = model.eval()
    return made


def qwen2() -> PreTrainedModel:
    return seeded(Qwen2ForCausalLM, Qwen2Config(**SHAPE))


def llama() -> PreTrainedModel:
    return seeded(LlamaForCausalLM, LlamaConfig(**SHAPE))


def mistral() -> PreTrainedModel:
    """Sliding window in every layer."""
    return seeded(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=WINDOW))


def gemma3() -> PreTrainedModel:
    """Sliding, full, sliding."""
    shape = {**SHAPE, "num_hidden_layers": 3}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **shape, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=2
    )
    return seeded(Gemma3ForCausalLM, config)


def gemma2() -> PreTrainedModel:
    """Soft-capped logits, which only "eager" attention of the library applies."""
    config = Gemma2Config(
        **SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=5.0
    )
    model = seeded(Gemma2ForCausalLM, config)
    model.set_attn_implementation("eager")
    return model


FAMILIES: dict[str, Make] = {
    "qwen2": qwen2,
    "llama": llama,
    "mistral": mistral,
    "gemma3": gemma3,
    "gemma2": gemma2,
}


@lru_cache
def plain(family: str) -> PreTrainedModel:
    """The model that no store is ever opened for."""
    return FAMILIES[family]()


def prompt(seed: int, tokens: int, rows: int = 1) -> torch.Tensor:
    """int64 [rows, tokens] without padding ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TOKEN, VOCABULARY, (rows, tokens), generator=generator)


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [1, n] of different lengths -> ids and mask [rows, longest], padded on the left."""
    width = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, width - row.shape[1] :] = row[0]
        mask[at, width - row.shape[1] :] = 1
    return ids, mask


def generate(
    model: Any,
    ids: torch.Tensor,
    cache: Any,
    new: int,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """`model.generate`, greedy unless the options say otherwise: [rows, tokens + new]."""
    # Without a mask the library takes an id that looks like padding for padding.
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids), **(options or {})}
    output: torch.Tensor = model.generate(ids, cache=cache, max_new_tokens=new, **settings)
    return output


def expected(
    family: str,
    ids: torch.Tensor,
    new: int,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """What a model of this family puts out with a DynamicCache; checked to vary."""
    model = plain(family)
    output = generate(model, ids, DynamicCache(config=model.config), new, options)
    require_varied(output[:, ids.shape[1] :])
    return output


def require_varied(answers: torch.Tensor) -> None:
    """Each row of an answer, before its padding, has many different tokens."""
    for row in answers:
        tokens = row[row != PAD].tolist()
        assert len(set(tokens)) > min(8, len(tokens) // 3), "output that proves nothing"
