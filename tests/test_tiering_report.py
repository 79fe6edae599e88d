"""`cache.report()`: before an answer, without `kvtier.generate`, and as its Answer has it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtier
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.adapters.report import Report
from tests.model_cases import generate, prompt, qwen2

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")

TOKENS, NEW = 1500, 12
NOTHING = Report(0.25, 0, 0, 0.0, (), 0, 0, 0, 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    options: dict[str, Any] = {"region": "64MiB", "hot": 8 << 20, "placement": "keys"}
    with kvtier.open(tmp_path / "kv", model=qwen2(), **options) as opened:
        yield opened


def answered(store: Any, ids: torch.Tensor, cache: TieredCache, new: int = NEW) -> Report:
    return kvtier.generate(
        store.model, ids, cache, attention_mask=torch.ones_like(ids), max_new_tokens=new,
        do_sample=False,
    ).report  # fmt: skip


def test_nothing_was_read_before_an_answer(store: Any) -> None:
    with TieredCache(store, prompt(1, TOKENS), budget=0.25) as cache:
        assert cache.report() == NOTHING
    with TieredCache(store, prompt(1, TOKENS)) as cache:
        assert cache.report().budget == 1


def test_after_an_answer_it_is_the_answers(store: Any) -> None:
    ids = prompt(2, TOKENS)
    with TieredCache(store, ids, budget=0.25, guard="strict") as cache:
        report = answered(store, ids, cache)
        assert cache.report() == report
    assert report.steps >= NEW - 1
    assert report.audits >= 8
    assert report.pages_chosen < report.pages_to_choose


def test_without_a_guard_it_counts_what_the_cache_read(store: Any) -> None:
    ids = prompt(3, TOKENS)
    with TieredCache(store, ids, budget=0.25, guard="off") as cache:
        generate(store.model, ids, cache, NEW)
        first = cache.report()
        assert (first.budget, first.steps, first.audits) == (0.25, NEW - 1, 0)
        assert 0 < first.pages_chosen < first.pages_to_choose
        with cache.fork() as twin:
            assert twin.report() == NOTHING, "a fork has read nothing yet"
            with torch.no_grad():
                store.model(input_ids=torch.tensor([[7]]), cache=twin, use_cache=True)
            assert twin.report().steps == 1


def test_a_second_answer_begins_anew(store: Any) -> None:
    ids = prompt(4, TOKENS)
    with TieredCache(store, ids, budget=0.25, guard="light") as cache:
        first = kvtier.generate(
            store.model, ids, cache, attention_mask=torch.ones_like(ids), max_new_tokens=NEW,
            do_sample=False,
        )  # fmt: skip
        more = torch.cat([first.tokens, prompt(5, 3)], 1)
        second = answered(store, more, cache, new=2)
        assert (second.steps, second.audits) == (1, 1)
        assert cache.report() == second


def test_a_widened_budget_is_the_reports(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiering.guard.ALARM", 0.0)
    ids = prompt(6, TOKENS)
    with TieredCache(store, ids, budget=(0.02, 0.06), guard="light") as cache:
        report = answered(store, ids, cache, new=3)
        assert report.escalations == (1, 2)
        assert report.budget == pytest.approx(0.16)
        assert cache.report().budget == report.budget
