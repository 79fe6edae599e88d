"""Models that look alike and whose KV is not: rotary scaling, adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

import kvtier
from kvtier.errors import ConfigError
from kvtier.tiering.adapters.huggingface import TieredCache
from tests.model_cases import SHAPE, generate, llama, prompt, seeded

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")
Make = Callable[[], PreTrainedModel]
PROMPT = prompt(3, 200)


def rope(factor: float) -> Make:
    def make() -> PreTrainedModel:
        scaling = {"rope_type": "linear", "factor": factor, "rope_theta": 10000.0}
        return seeded(LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=scaling))

    return make


def adapter(seed: int, alpha: int = 8) -> Make:
    """The same base model with an adapter of the same name and other weights."""

    def make() -> PreTrainedModel:
        model: Any = llama()
        settings = peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "k_proj"])
        peft.inject_adapter_in_model(settings, model, "ad")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        made: PreTrainedModel = model.eval()
        return made

    return make


PAIRS: dict[str, tuple[Make, Make]] = {
    "two rotary scalings": (rope(2.0), rope(4.0)),
    "scaled and not": (rope(2.0), llama),
    "two adapters": (adapter(1), adapter(2)),
    "one adapter at two strengths": (adapter(1), adapter(1, alpha=16)),
    "adapter and none": (adapter(1), llama),
}


def save(path: Path, model: PreTrainedModel, name: str) -> torch.Tensor:
    """Answer a prompt and save the session; returns the answer."""
    region = None if (path / "store.yaml").exists() else "64MiB"
    with (
        kvtier.open(path, model=model, region=region, hot="16MiB") as store,
        TieredCache(store, PROMPT) as cache,
    ):
        answer = generate(model, PROMPT, cache, 12)
        cache.save(name, answer)
    return answer


@pytest.mark.parametrize("pair", PAIRS)
def test_equal_tokens_of_models_that_differ_are_misses(tmp_path: Path, pair: str) -> None:
    """A006: what was computed by a model that differs is never found, whatever it is called."""
    first, second = PAIRS[pair]
    answers = [save(tmp_path, make(), "chat") for make in (first, second)]
    assert not torch.equal(*answers), "the models must differ in what they say"
    for make, answer in zip((first, second), answers, strict=True):
        with kvtier.open(tmp_path, model=make(), hot="16MiB") as store:
            assert store.lookup(answer[0]) == answer.shape[1] - 1
            assert [each.name for each in store.names()] == ["chat"]
        other = answers[1] if answer is answers[0] else answers[0]
        with kvtier.open(tmp_path, model=make(), hot="16MiB") as store:
            same = int((answer[0] == other[0]).long().cumprod(0).sum())
            assert store.lookup(other[0]) == same >= PROMPT.shape[1]


def test_an_adapter_that_is_switched_under_an_open_store_is_refused(tmp_path: Path) -> None:
    """Its weights do not change; what the model computes does."""
    model: Any = adapter(1)()
    with (
        kvtier.open(tmp_path, model=model, region="64MiB", hot="16MiB") as store,
        TieredCache(store, PROMPT) as cache,
    ):
        generate(model, PROMPT, cache, 2)
        for module in model.modules():
            if hasattr(module, "adapter_layer_names"):
                module.enable_adapters(False)
        with pytest.raises(ConfigError, match="another model now"):
            generate(model, PROMPT, TieredCache(store, PROMPT), 2)
