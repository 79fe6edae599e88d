"""Models that a store is opened for, and those it refuses by the name of what it lacks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.bamba import BambaConfig, BambaForCausalLM
from transformers.models.bloom import BloomConfig, BloomForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.diffllama import DiffLlamaConfig, DiffLlamaForCausalLM
from transformers.models.gemma4 import Gemma4ForCausalLM, Gemma4TextConfig
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.mamba import MambaConfig, MambaForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.t5 import T5Config, T5ForConditionalGeneration

import kvtier
from kvtier.tiering.adapters.huggingface import TieredCache
from tests.model_cases import SHAPE, VOCABULARY, prompt, qwen2

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")
LONG = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, **LONG},
    "longrope": {
        "rope_type": "longrope",
        "factor": 2.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        **LONG,
    },
}


def bamba() -> PreTrainedModel:
    config = BambaConfig(
        **SHAPE, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8
    )
    return BambaForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    config = Qwen3NextConfig(
        **SHAPE,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
    )
    return Qwen3NextForCausalLM(config)


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    )


def deepseek() -> PreTrainedModel:
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    config = DeepseekV3Config(
        **{**shape, "num_key_value_heads": 4},
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
    )
    return DeepseekV3ForCausalLM(config)


def t5() -> PreTrainedModel:
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config)


def bloom() -> PreTrainedModel:
    """Position biases in an attention of its own."""
    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2))


def gemma4() -> PreTrainedModel:
    """Two of four layers attend to the KV of the others."""
    shape = {**SHAPE, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(
        **shape, layer_types=kinds, sliding_window=64, vocab_size_per_layer_input=VOCABULARY
    )
    return Gemma4ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bamba, "layer 0 is of kind 'linear_attention'"),
        (qwen3_next, "layer 0 is of kind 'linear_attention'"),
        (mamba, "layer 0 is of kind 'linear_attention'"),
        (deepseek, "MLA"),
        (t5, "encoder"),
        (bloom, "BloomForCausalLM computes its attention itself"),
        (gemma4, "layer 2 keeps no KV of its own"),
    ],
)
def test_models_that_are_refused(make: Any, message: str, tmp_path: Path) -> None:
    """A103."""
    model = make().eval()
    before = model.config._attn_implementation
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=message):
            kvtier.open(tmp_path / "kv", model=model, region="8MiB", hot="64MiB")
    assert model.config._attn_implementation == before


def test_values_changed_behind_the_cache_are_refused(tmp_path: Path) -> None:
    """Differential attention mixes the halves of its values after they were cached."""
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    model: Any = DiffLlamaForCausalLM(DiffLlamaConfig(**shape))
    model.eval()
    ids = prompt(1, 20)
    with (
        torch.no_grad(),
        kvtier.open(tmp_path / "kv", model=model, region="8MiB") as store,
        pytest.raises(NotImplementedError, match="layer 0 attends to other values"),
    ):
        model(ids, cache=TieredCache(store, ids))


def test_learned_sinks_are_refused(tmp_path: Path) -> None:
    config = GptOssConfig(
        **SHAPE, layer_types=["full_attention"] * 2, num_local_experts=2, num_experts_per_tok=1
    )
    kind: Any = GptOssForCausalLM
    model = kind._from_config(config, attn_implementation="eager").eval()
    ids = prompt(1, 20)
    with (
        torch.no_grad(),
        kvtier.open(tmp_path / "kv", model=model, region="8MiB") as store,
        pytest.raises(NotImplementedError, match="sinks"),
    ):
        model(ids, cache=TieredCache(store, ids))


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_scaling_that_depends_on_length_is_refused(kind: str, tmp_path: Path) -> None:
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_parameters=ROPES[kind]))
    with pytest.raises(NotImplementedError, match=kind):
        kvtier.open(tmp_path / "kv", model=model, region="8MiB")


def test_a_dtype_that_is_not_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(kvtier.KvtierError, match="float64"):
        kvtier.open(tmp_path / "kv", model=qwen2().double(), region="8MiB")
