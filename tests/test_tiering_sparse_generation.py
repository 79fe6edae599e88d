"""Sparse decode of a model: the prompt is exact, the answer is not, and the guard tells."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import kvtier
from kvtier.errors import UnsupportedError
from kvtier.tiering.adapters.generation import Answer
from kvtier.tiering.adapters.generation import generate as guarded
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.adapters.model_identity import geometry_of
from kvtier.tiering.adapters.model_rotary import rotaries_of
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.guard import Level
from kvtier.tiering.verifier import verify
from tests.model_cases import FAMILIES, expected, generate, plain, prompt, qwen2

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")

TOKENS, NEW = 1500, 40
NEARLY_ALL = 1 - 1e-9


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def opened(path: Path, model: Any = None, **options: Any) -> Any:
    settings = {"region": "64MiB", "hot": 8 << 20, "placement": "keys", **options}
    return kvtier.open(path / "kv", model=model or qwen2(), **settings)


def asked(store: Any, ids: torch.Tensor, budget: float, guard: Level, **options: Any) -> Answer:
    with TieredCache(store, ids, budget=budget, guard=guard) as cache:
        return guarded(
            store.model, ids, cache, attention_mask=torch.ones_like(ids), max_new_tokens=NEW,
            do_sample=False, **options,
        )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "gemma3", "gemma2"])
def test_tokens_by_their_keys_change_no_exact_answer(family: str, tmp_path: Path) -> None:
    ids = prompt(1, 700)
    reference = expected(family, ids, 30)
    model = FAMILIES[family]()
    for _ in range(2):
        with opened(tmp_path, model) as store, TieredCache(store, ids) as cache:
            output = generate(store.model, ids, cache, 30)
            assert torch.equal(output, reference)
            cache.save("a", tokens=output)
    assert verify(tmp_path / "kv").findings == []


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_budget_that_reads_everything_is_exact_by_every_audit(
    family: str, tmp_path: Path
) -> None:
    ids = prompt(2, TOKENS)
    reference = expected(family, ids, NEW)
    with opened(tmp_path, FAMILIES[family]()) as store:
        answer = asked(store, ids, NEARLY_ALL, "strict")
    assert torch.equal(answer.tokens, reference)
    assert answer.report.audits >= 8 + (NEW - 8) // 8
    assert answer.report.worst_divergence < 1e-3
    assert answer.report.escalations == ()


def test_the_prompt_is_read_exactly_and_the_answer_is_not(tmp_path: Path) -> None:
    """The first token follows from the prompt alone; later ones of this model show the budget."""
    ids = prompt(3, TOKENS)
    reference = expected("qwen2", ids, NEW)
    with opened(tmp_path) as store:
        answer = asked(store, ids, 0.03, "off")
    assert answer.tokens[0, TOKENS] == reference[0, TOKENS]
    assert not torch.equal(answer.tokens, reference)
    assert (answer.report.audits, answer.report.budget) == (0, 0.03)
    assert 0 < answer.report.pages_chosen < answer.report.pages_to_choose / 2


@pytest.mark.parametrize("seed", [4, 5, 6])
def test_strict_takes_back_what_an_alarm_found(seed: int, tmp_path: Path) -> None:
    """This model needs all of its context: with a guard its answer stays longer with the exact
    one."""
    ids = prompt(seed, TOKENS)
    kept = Kept()
    with opened(tmp_path) as store:
        answer = asked(store, ids, 0.03, "strict", streamer=kept)
        loose = asked(store, ids, 0.03, "off")
    report = answer.report
    assert report.escalations
    assert report.taken_back >= 1
    assert report.worst_divergence > 0.03
    assert report.budget > 0.03
    exact = expected("qwen2", ids, NEW)
    assert shared(answer.tokens, exact) > shared(loose.tokens, exact)
    assert kept.tokens == [*answer.tokens[0].tolist(), -1]


def shared(one: torch.Tensor, other: torch.Tensor) -> int:
    """Tokens that both begin with."""
    return int((one != other).int().cumsum(1).eq(0).sum())


def test_light_widens_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiering.guard.ALARM", 0.02)
    ids = prompt(7, TOKENS)
    kept = Kept()
    with opened(tmp_path) as store:
        answer = asked(store, ids, 0.03, "light", streamer=kept)
    assert answer.report.escalations
    assert answer.report.taken_back == 0
    assert kept.tokens == [*answer.tokens[0].tolist(), -1]


def test_a_cache_cannot_guard_by_itself(tmp_path: Path) -> None:
    ids = prompt(8, 600)
    with opened(tmp_path) as store:
        for level in ("light", "strict"):
            with (
                TieredCache(store, ids, budget=0.125, guard=level) as cache,
                pytest.raises(UnsupportedError, match=r"call kvtier\.generate"),
            ):
                generate(store.model, ids, cache, 4)
            assert cache.get_seq_length() == 600, "what was refused was not begun"
        with TieredCache(store, ids, budget=0.125, guard="off") as cache:
            assert generate(store.model, ids, cache, 4).shape == (1, 604)
        with TieredCache(store, ids, guard="strict") as cache:
            assert torch.equal(generate(store.model, ids, cache, 4), expected("qwen2", ids, 4))


def test_what_was_generated_sparsely_is_found_by_the_same_budget_only(tmp_path: Path) -> None:
    ids = prompt(9, TOKENS)
    sparse = Provenance.approximate(0.25, "raw")
    model = qwen2()
    with (
        opened(tmp_path, model) as store,
        TieredCache(store, ids, budget=0.25, guard="off") as cache,
    ):
        output = generate(store.model, ids, cache, NEW)
        cache.save("chat", tokens=output)
    longer = torch.cat([output, prompt(10, 20)], 1)
    with opened(tmp_path, model) as store:
        known = longer[0, : TOKENS + NEW - 1].numpy()
        assert store.lookup(known, provenance=EXACT) == TOKENS
        assert store.lookup(known, provenance=sparse) == TOKENS + NEW - 1
        found: list[int] = []
        for budget in (0.25, "exact", 0.5):
            with TieredCache(store, longer, budget=budget, guard="off") as cache:
                found.append(cache.restored_tokens)
                again = generate(store.model, longer, cache, 10)
                if budget == "exact":
                    assert torch.equal(again, expected("qwen2", longer, 10))
                cache.save(f"again {budget}", tokens=again)
        # What the exact cache computed is exact, and as good for any budget.
        assert found == [TOKENS + NEW - 1, TOKENS, TOKENS + NEW + 19]
    assert verify(tmp_path / "kv").findings == []


def test_batches_beams_and_forks_decode_sparsely(tmp_path: Path) -> None:
    ids = torch.cat([prompt(11, 700), prompt(12, 700)])
    with opened(tmp_path) as store:
        with TieredCache(store, ids, budget=0.2, guard="off") as cache:
            both = generate(store.model, ids, cache, 12)
            twin = cache.fork()
            assert twin.rows.columns == cache.rows.columns
            twin.close()
        for row in range(2):
            with TieredCache(store, ids[row : row + 1], budget=0.2, guard="off") as cache:
                alone = generate(store.model, ids[row : row + 1], cache, 12)
            assert torch.equal(alone[0], both[row])
        with TieredCache(store, ids[:1], budget=0.2, guard="off") as cache:
            output = generate(store.model, ids[:1], cache, 8, {"num_beams": 3})
            assert output.shape == (1, 708)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rotary_settings_are_read_off_the_model(family: str) -> None:
    model = plain(family)
    found = rotaries_of(model, geometry_of(model))
    assert all(each is not None and each.style == "half" for each in found)
    if family == "gemma3":
        assert found[0] != found[1], "layers with a window turn faster"


def test_a_model_that_turns_keys_otherwise_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are compared as they are stored."""

    def other(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return q, k * cos

    model = qwen2()
    monkeypatch.setattr("transformers.models.qwen2.modeling_qwen2.apply_rotary_pos_emb", other)
    assert rotaries_of(model, geometry_of(model)) == [None, None]


def test_a_fork_of_a_guarded_answer_is_not_guarded(tmp_path: Path) -> None:
    """A streamer that forks gets a cache of which no step is read sparsely without an audit."""
    ids = prompt(9, TOKENS)
    twins: list[TieredCache] = []

    class Forks(Kept):
        def put(self, value: torch.Tensor) -> None:
            if not twins and self.tokens:
                twins.append(cache.fork())
            super().put(value)

    with opened(tmp_path) as store, TieredCache(store, ids, budget=0.1, guard="light") as cache:
        seen = torch.ones_like(ids)
        guarded(
            store.model, ids, cache, attention_mask=seen, max_new_tokens=8, do_sample=False,
            streamer=Forks(),
        )  # fmt: skip
        with twins[0] as twin, pytest.raises(UnsupportedError, match=r"kvtier\.generate"):
            store.model(input_ids=torch.tensor([[7]]), cache=twin, use_cache=True)
