"""`kvtier.generate`: at budget "exact" it is `generate`, token by token; what it refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BatchEncoding
from transformers.generation.streamers import BaseStreamer

import kvtier
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.tiering.adapters.generation import generate
from kvtier.tiering.adapters.huggingface import TieredCache
from tests.model_cases import expected, prompt, qwen2

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    with kvtier.open(tmp_path / "kv", model=qwen2(), region="16MiB", hot=8 << 20) as opened:
        yield opened


class Kept(BaseStreamer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.ended = True


def mask(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ids)


@pytest.mark.parametrize("tokens", [1, 20, 150])
def test_greedy_is_what_generate_says(tokens: int, store: Any) -> None:
    ids = prompt(tokens, tokens)
    with TieredCache(store, ids) as cache:
        answer = generate(
            store.model, ids, cache, attention_mask=mask(ids), max_new_tokens=30, do_sample=False
        )
        assert torch.equal(answer.tokens, expected("qwen2", ids, 30))
        assert cache.save("a", tokens=answer.tokens) == tokens + 29
    assert answer.report.budget == 1
    assert (answer.report.steps, answer.report.audits) == (29, 0)


def test_a_stored_prompt_goes_on_from_what_is_stored(store: Any) -> None:
    ids = prompt(3, 150)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    options["attention_mask"] = mask(ids)
    with TieredCache(store, ids) as cache:
        first = generate(store.model, ids, cache, **options)
        cache.save("a", tokens=first.tokens)
    with TieredCache(store, ids) as cache:
        assert cache.restored_tokens == 149
        assert torch.equal(generate(store.model, ids, cache, **options).tokens, first.tokens)


def test_options_of_generate_reach_it(store: Any) -> None:
    """Penalties, the end of a text, and the least number of tokens, as the library does them."""
    ids = prompt(4, 60)
    reference = expected("qwen2", ids, 24, {"repetition_penalty": 1.3})
    end = int(reference[0, 60 + 9])
    stop_at = int((reference[0, 60:] == end).nonzero()[0]) + 1
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.3}
    with TieredCache(store, ids) as cache:
        answer = generate(
            store.model, ids, cache, attention_mask=mask(ids), eos_token_id=end, **options
        )
    assert torch.equal(answer.tokens, reference[:, : 60 + stop_at])


def test_a_prompt_is_read_in_pieces_where_asked(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(4, 60)
    options: dict[str, Any] = {"attention_mask": mask(ids), "max_new_tokens": 5, "do_sample": False}
    read: list[int] = []
    observe = TieredCache.observe

    def noted(cache: TieredCache, input_ids: torch.Tensor, *rest: Any, **named: Any) -> None:
        read.append(input_ids.shape[1])
        observe(cache, input_ids, *rest, **named)

    monkeypatch.setattr(TieredCache, "observe", noted)
    with TieredCache(store, ids) as cache:
        answer = generate(store.model, ids, cache, prefill_chunk_size=25, **options)
    assert read == [25, 25, 10, 1, 1, 1, 1]
    assert torch.equal(answer.tokens, expected("qwen2", ids, 5))


def test_a_seed_repeats_a_sampled_answer(store: Any) -> None:
    ids = prompt(5, 60)

    def sampled(seed: int | None) -> torch.Tensor:
        with TieredCache(store, ids) as cache:
            return generate(
                store.model, ids, cache, seed=seed, attention_mask=mask(ids), max_new_tokens=30,
                do_sample=True, temperature=2.0,
            ).tokens  # fmt: skip

    assert torch.equal(sampled(1), sampled(1))
    assert not torch.equal(sampled(1), sampled(2))
    torch.manual_seed(7)
    first = sampled(None)
    torch.manual_seed(7)
    assert torch.equal(sampled(None), first), "without a seed it is torch's own state"


def test_a_streamer_gets_every_token_once(store: Any) -> None:
    ids = prompt(6, 60)
    kept = Kept()
    with TieredCache(store, ids) as cache:
        answer = generate(
            store.model, ids, cache, attention_mask=mask(ids), max_new_tokens=20, do_sample=False,
            streamer=kept,
        )  # fmt: skip
    assert kept.ended
    # The library hands the prompt over before the loop begins.
    assert kept.tokens == answer.tokens[0].tolist()


@pytest.mark.parametrize(
    "option",
    [{"num_beams": 2}, {"num_return_sequences": 3}, {"return_dict_in_generate": True},
     {"prompt_lookup_num_tokens": 2}],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(option: dict[str, Any], store: Any) -> None:
    ids = prompt(7, 20)
    with TieredCache(store, ids) as cache, pytest.raises(UnsupportedError, match="does not take"):
        generate(store.model, ids, cache, max_new_tokens=4, **option)


def test_wrong_arguments_are_named(store: Any) -> None:
    ids = prompt(8, 20)
    with pytest.raises(ConfigError, match="must be a TieredCache: got dict"):
        generate(store.model, ids, {}, max_new_tokens=4)  # type: ignore[arg-type]
    with TieredCache(store, ids) as cache:
        with pytest.raises(ConfigError, match=r"must be a tensor .*: got list"):
            generate(store.model, ids[0].tolist(), cache)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"got BatchEncoding, whose \['input_ids'\]"):
            generate(store.model, BatchEncoding({"input_ids": ids}), cache)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got BatchEncoding"):
        TieredCache(store, BatchEncoding({"input_ids": ids}))  # type: ignore[arg-type]
    both = torch.cat([ids, ids])
    with TieredCache(store, both) as cache, pytest.raises(UnsupportedError, match="one prompt"):
        generate(store.model, both, cache, max_new_tokens=4)
    with TieredCache(store, ids) as cache:
        generate(store.model, ids, cache, max_new_tokens=3, do_sample=False)
        with pytest.raises(ConfigError, match="holds 22 tokens, the prompt has 20"):
            generate(store.model, ids, cache, max_new_tokens=3)
    for budget in (0, 1.5, -1, "all", None, True, float("nan")):
        with pytest.raises(ConfigError, match="budget must be"):
            TieredCache(store, ids, budget=budget)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"got 12\.5; 12\.5 % is 0\.125"):
        TieredCache(store, ids, budget=12.5)
    with pytest.raises(ConfigError, match="guard must be off, light or strict"):
        TieredCache(store, ids, guard="loose")  # type: ignore[arg-type]
