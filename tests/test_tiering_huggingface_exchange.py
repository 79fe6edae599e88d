"""Prefixes of a model that are held, and that go to another store as a file."""

import time
from pathlib import Path

import pytest
import torch

import kvtier
from kvtier.errors import CapacityError
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.listing import describe
from tests import command_cases
from tests.command_cases import as_json
from tests.model_cases import FAMILIES, expected, generate, padded, prompt

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_saved_answer_goes_to_another_store(family: str, tmp_path: Path) -> None:
    """The model finds it there, and answers as it would have."""
    ids, file = prompt(5, 600), tmp_path / "answer.kv"
    model = FAMILIES[family]()
    with (
        kvtier.open(tmp_path / "one", model=model, region="32MiB") as store,
        TieredCache(store, ids) as cache,
    ):
        output = generate(model, ids, cache, 20)
        saved = cache.save("answer", tokens=output)
    assert as_json("export", tmp_path / "one", "answer", file)["tokens"] == saved == 619
    command_cases.kvtier("format", tmp_path / "two", "--region", "32MiB")
    assert as_json("import", tmp_path / "two", file)["new_tokens"] == saved
    stream = torch.cat([output, prompt(6, 30)], 1)
    model = FAMILIES[family]()
    with (
        kvtier.open(tmp_path / "two", model=model) as store,
        TieredCache(store, stream) as cache,
    ):
        assert cache.restored_tokens == saved
        answer = generate(model, stream, cache, 20)
    assert torch.equal(answer, expected(family, stream, 20))


def test_a_cache_is_saved_with_a_hold(tmp_path: Path) -> None:
    ids, mask = padded([prompt(1, 40), prompt(2, 30)])
    model = FAMILIES["qwen2"]()
    with (
        kvtier.open(tmp_path / "kv", model=model, region="32MiB") as store,
        TieredCache(store, ids, mask) as cache,
    ):
        output = generate(model, ids, cache, 10, {"attention_mask": mask})
        cache.save("rows", tokens=output, hold=3600)
        names = {each.name: each.held_until for each in store.names()}
        assert set(names) == {"rows/0", "rows/1"}
        assert all(abs(end - time.time() - 3600) < 120 for end in names.values())
        cache.save("rows", tokens=output)
        assert {each.name: each.held_until for each in store.names()} == names
        cache.save("rows", tokens=output, hold=False)
        assert {each.held_until for each in store.names()} == {0.0}
        cache.save("rows", hold=True)
    listed = describe(tmp_path / "kv").names
    assert [(each.held, each.held_until) for each in listed] == [(True, None)] * 2


def test_a_hold_past_the_cap_is_refused(tmp_path: Path) -> None:
    ids = prompt(1, 300)
    model = FAMILIES["qwen2"]()
    with (
        kvtier.open(tmp_path / "kv", model=model, region="2MiB") as store,
        TieredCache(store, ids) as cache,
    ):
        output = generate(model, ids, cache, 2)
        store._holds.limit_bytes = 4096
        with pytest.raises(CapacityError, match="hold"):
            cache.save("a", tokens=output, hold=True)
        assert store.names() == []
        assert cache.save("a", tokens=output) == 301
