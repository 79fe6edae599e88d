"""kvtier guard run: its tasks, what makes an answer kept, the profile it writes, exit codes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import kvtier as package
from kvtier.errors import ConfigError
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.adapters.sparse_mode import as_budget
from kvtier.tiering.budget_profile import PROFILE, Profile, load
from kvtier.tiering.guard import ALARM, ALARM_MEAN
from kvtier.tools import guard_run, guard_tasks, model_source
from kvtier.tools.guard_run import GuardRun, judge, run_text
from kvtier.tools.guard_tasks import (
    EXTRACTION,
    MULTI_KEY,
    MULTI_VALUE,
    SINGLE,
    TASKS,
    TEXT,
    Asked,
    Part,
    Question,
    encode,
    make,
    text2json_score,
)
from tests.command_cases import as_json, kvtier, refused
from tests.tiny_model import save_tiny_model

TOKENS = 700
SHORT = ("--tokens", str(TOKENS), "--seeds", "1")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return model_source.load(model_source.find(str(folder)), lambda words: None)[1]


def answer_of(question: Question) -> str:
    return "".join(piece.text for piece in question.answer)


# ---- tasks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_a_task_follows_from_its_seed_and_is_as_long_as_asked(name: str) -> None:
    one = make(name, 4000, 1, len)
    assert one == make(name, 4000, 1, len)
    assert one != make(name, 4000, 2, len)
    assert 2800 < len(one.content) < 4600
    if name != TEXT:
        for piece in one.answer:
            assert piece.role != "value" or piece.text in one.content


def test_needles_share_a_context_and_ask_for_different_things() -> None:
    single, key, values = (make(name, 3000, 5, len) for name in (SINGLE, MULTI_KEY, MULTI_VALUE))
    questions = {each.content.rpartition("\n\n")[2] for each in (single, key, values)}
    assert len(questions) == 3
    assert len({each.content.rpartition("\n\n")[0] for each in (single, key, values)}) == 1
    found = [piece.text for piece in values.answer if piece.role == "value"]
    places = [values.content.index(each) for each in found]
    assert len(found) == guard_tasks.VALUES
    assert places == sorted(places)


def test_an_extraction_is_json_records_of_three_string_keys() -> None:
    question = make(EXTRACTION, 3000, 1, len)
    records = json.loads(answer_of(question))
    assert len(records) == guard_tasks.RECORDS_ASKED
    for each in records:
        assert list(each) == ["name", "job", "city"]
        assert question.content.count(each["name"]) == 2, "in its note, and asked for"


def test_a_part_has_all_tokens_that_its_characters_are_in(tokenizer: Any) -> None:
    question = make(EXTRACTION, 2000, 1, len)
    asked = encode(question, tokenizer)
    texts = [tokenizer.decode(asked.answer[part.first : part.behind]) for part in asked.parts]
    assert texts == [piece.text for piece in question.answer if piece.role]
    assert tokenizer.decode(asked.prompt) == f"User: {question.content}\nA: "


@pytest.mark.parametrize(
    ("right", "score"),
    [
        ([1, 1, 1, 1, 1], 1.0),
        ([1, 0, 1, 1, 1], 0.5),
        ([1, 1, 0, 1, 1], 0.75),
        ([1, 0, 0, 1, 0], 0.25),
        # A wrong name is one more in what is wanted or found.
        ([0, 1, 1, 1, 1], 0.0),
        ([1, 1, 1, 1, 1, 0, 1, 1, 1, 1], 1 / 3),
    ],
)
def test_records_are_scored_as_text2json_does(right: list[int], score: float) -> None:
    assert text2json_score([bool(each) for each in right]) == pytest.approx(score)


# ---- kept or lost ---------------------------------------------------------------------------


def logits_of(best: list[int], sure: float = 20.0) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(best), 8).float() * sure


ASKED = Asked([1, 2], [3, 4, 5, 6], (Part(1, 3, "value"), Part(3, 4, "value")))


def test_a_field_is_kept_where_full_attention_had_it() -> None:
    full, sparse = logits_of([3, 4, 5, 0], 0.1), logits_of([3, 4, 0, 6], 0.1)
    found = judge(SINGLE, (0.25, 0.3), [ASKED, ASKED], [(full, full), (full, sparse)])
    assert (found.kept, found.fields) == (1, 2)
    assert (found.score, found.score_full) == (50, 50)
    assert found.kl < ALARM_MEAN
    assert not found.is_good, "another field that came right makes up for none"
    assert judge(SINGLE, (0.25, 0.3), [ASKED], [(full, full)]).is_good


def test_divergence_counts_where_fields_are_right() -> None:
    exact = logits_of([3, 4, 5, 6])
    off = logits_of([3, 4, 5, 6], 1.0)
    found = judge(TEXT, (0.5, 0.3), [ASKED], [(exact, off)])
    assert found.kl_max > ALARM
    assert (found.score, found.is_good) == (None, False)
    first = exact.clone()
    first[0] = -first[0]
    assert judge(TEXT, (0.5, 0.3), [ASKED], [(exact, first)]).is_good, (
        "the first one is never sparse"
    )
    broken = exact.clone()
    broken[2] = math.nan
    found = judge(TEXT, (0.5, 0.3), [ASKED], [(exact, broken)])
    assert (found.kl_max, found.is_good) == (guard_run.NATS_MAX, False)


@pytest.mark.parametrize(("read", "says"), [(0.3, True), (0.13, False)])
def test_a_context_too_short_for_its_budget_is_named(read: float, says: bool) -> None:
    exact = logits_of([3, 4, 5, 6])
    found = judge(SINGLE, (0.125, read), [ASKED], [(exact, exact)])
    profile = Profile("f", "m", 2, 700, 1, None, {})
    assert ("--tokens as long as yours" in run_text(GuardRun(profile, (found,), None))) == says


# ---- the command ----------------------------------------------------------------------------


def test_a_profile_is_written_beside_a_store_and_obeyed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_run, "ALARM_MEAN", math.inf)
    monkeypatch.setattr(guard_run, "ALARM", math.inf)
    model, _ = model_source.load(model_source.find(str(folder)), lambda words: None)
    options: dict[str, Any] = {"model": model, "region": "64MiB", "namespace": "tenant"}
    with package.open(tmp_path / "kv", **options):
        pass
    store = ("--store", str(tmp_path / "kv"))
    found = as_json("guard", "run", "--model", folder, *store, *SHORT, "--budget", "0.25")
    assert found["path"] == str(tmp_path / "kv" / PROFILE)
    assert (found["budget"], found["collapsed"]) == (0.25, [])
    assert set(found["tasks"]) == set(TASKS)
    assert len(found["measured"]) == len(TASKS), "each was good at once"
    assert all(0.2 < each["read"] < 1 for each in found["measured"])
    on_disk = yaml.safe_load((tmp_path / "kv" / PROFILE).read_text())
    assert {name: found[name] for name in on_disk} == on_disk
    ids = torch.arange(20)[None]
    with (
        package.open(tmp_path / "kv", **options) as opened,
        TieredCache(opened, ids, budget="profile", guard="off") as cache,
    ):
        assert cache.report().budget == 0.25


def test_a_profile_is_of_the_dtype_that_the_store_was_opened_in(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --dtype that is what the model's config says, as for from_pretrained."""
    for name in ("ALARM_MEAN", "ALARM"):
        monkeypatch.setattr(guard_run, name, math.inf)
    monkeypatch.setattr(guard_run, "TASKS", (SINGLE,))
    half = tmp_path / "half"
    loaded = model_source.load(model_source.find(str(folder)), lambda words: None, dtype="bfloat16")
    for each in loaded:
        each.save_pretrained(half)
    run = ("guard", "run", "--model", half, *SHORT, "--budget", "0.5")
    store = ("--store", tmp_path / "kv")
    model = AutoModelForCausalLM.from_pretrained(half)
    assert model.dtype == torch.bfloat16
    with package.open(tmp_path / "kv", model=model, region="64MiB") as opened:
        as_json(*run, *store)
        assert as_budget("profile", opened) is not None
        done = kvtier(*run, *store, "--dtype", "float32", code=2)
        assert "never with this one in this dtype" in done.stderr
        as_json(*run, "--out", tmp_path / "kv" / PROFILE, "--dtype", "float32")
        with pytest.raises(ConfigError, match="or with other weights or another dtype"):
            as_budget("profile", opened)


def test_a_task_that_collapses_is_exit_code_1(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_run, "TASKS", (SINGLE, TEXT))
    monkeypatch.setattr(guard_run, "ALARM", -1.0)
    out = ("--out", str(tmp_path / "a.yaml"))
    budgets = ("--budget", "0.5", "--budget", "0.1")
    done = kvtier("guard", "run", "--model", folder, *out, *SHORT, *budgets, code=1)
    assert done.stdout.count("lost at every budget") == 2
    assert "budget for all tasks: exact" in done.stdout
    profile = load(tmp_path / "a.yaml")
    assert profile.budget is None
    assert [each.budget for each in profile.tasks.values()] == [None, None]


def test_without_a_place_nothing_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guard_run, "TASKS", (SINGLE,))
    monkeypatch.setattr(guard_run, "ALARM", math.inf)
    monkeypatch.setattr(guard_run, "ALARM_MEAN", math.inf)
    done = kvtier("guard", "run", "--model", folder, *SHORT)
    assert "not written" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_work_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    run = ("guard", "run", "--model", "./absent")
    assert "is no store" in refused(*run, "--store", tmp_path)
    assert "not both" in refused(*run, "--store", tmp_path, "--out", tmp_path / "a")
    assert "cannot be written: it is a directory" in refused(*run, "--out", tmp_path)
    assert "there is no directory" in refused(*run, "--out", tmp_path / "b" / "a")
    assert "below 1: got [1.0]" in refused(*run, "--budget", "1")
    assert "got [0.5, 12.5]; 12.5 % is 0.125" in refused(
        *run, "--budget", "0.5", "--budget", "12.5"
    )
    assert "--dtype is one of auto, " in refused(*run, "--dtype", "int8")
    assert "--tokens is at least" in refused(*run, "--tokens", "100")
    assert "--seeds at least 1" in refused(*run, "--seeds", "0")
    assert "Three ways to get a model" in refused(*run)
    with pytest.raises(ConfigError, match="below 1"):
        guard_run.options_of(None, (None, None), [math.nan], 2048, 1)


@pytest.mark.model
def test_the_demos_model_keeps_its_answers(tmp_path: Path) -> None:
    found = as_json("guard", "run", "--quick", "--out", tmp_path / "p.yaml")
    assert found["collapsed"] == []
    assert found["budget"] <= 0.5
    # Some that full attention gets, or keeping them would say nothing.
    assert found["tasks"][EXTRACTION]["fields"] >= 4
