"""The parts of bench/guard.py: runs and the exact steps beside them, fields, replay and cost."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bench.fidelity_policies import OURS, QUEST, kept, layouts_of
from bench.fidelity_run import Case, Records
from bench.fidelity_tasks import JSON, NEEDLES, RETRIEVAL, make_task
from bench.guard_cost import Costs, costs
from bench.guard_replay import (
    FIELDS_MIN,
    audited_share,
    audits_in,
    decode_cost,
    flagged,
    replay,
    verdict,
)
from bench.guard_runs import FULL, GuardRunner, Run, begin, case_name, decode, right_fields
from kvtier.tiering.adapters import attention
from kvtier.tiering.guard import ALARM, ALARM_MEAN, MEAN_OF, SCHEDULES, Schedule
from tests.model_cases import prompt, qwen2

STEPS, CONTEXT = 12, 640
SURE = [1.0] * 100
EVERY_8TH = Schedule(first=2, every=8, gap=1, redoes=True)


def quiet(**alarms: float) -> list[float]:
    """Divergences of 100 steps: nothing, but at the steps named so: s24=2.0."""
    found = [0.001] * 100
    for step, value in alarms.items():
        found[int(step[1:]) - 1] = value
    return found


# ---- replay -------------------------------------------------------------------------------------


def test_a_run_that_diverges_at_an_audited_step_is_flagged() -> None:
    found = replay(quiet(s26=ALARM + 1), SURE, EVERY_8TH, 0.125)
    # Audits of the steps 1, 2, 10, 18 and 26; what was said since 18 is taken back.
    assert (found.alarm, found.audits, found.steps, found.taken_back) == (26, 5, 26, 8)


def test_one_that_diverges_between_audits_is_not() -> None:
    found = replay(quiet(s25=ALARM + 1, s27=50.0), SURE, EVERY_8TH, 0.125)
    assert (found.alarm, found.audits, found.steps, found.taken_back) == (None, 14, 100, 0)


def test_uncertain_steps_are_audited_sooner() -> None:
    margins = [*SURE]
    margins[22] = 0.6
    found = replay(quiet(s23=ALARM + 1), margins, EVERY_8TH, 0.125)
    assert (found.alarm, found.taken_back) == (23, 5)
    margins[22] = 0.7
    assert replay(quiet(s23=ALARM + 1), margins, EVERY_8TH, 0.125).alarm is None


def test_the_first_audit_takes_back_everything() -> None:
    found = replay(quiet(s1=ALARM + 1), SURE, EVERY_8TH, 0.125)
    assert (found.alarm, found.audits, found.taken_back) == (1, 1, 1)


def test_a_level_that_does_not_redo_takes_nothing_back() -> None:
    found = replay(quiet(s66=ALARM + 1), SURE, SCHEDULES["light"], 0.125)
    assert (found.alarm, found.taken_back) == (66, 0)


def test_a_mean_that_is_too_high_flags_a_run_without_a_large_divergence() -> None:
    every = Schedule(first=100, every=0, gap=1, redoes=True)
    found = replay([2 * ALARM_MEAN] * 100, SURE, every, 0.125)
    assert found.alarm == MEAN_OF


def test_nothing_is_audited_where_the_guard_is_off() -> None:
    found = replay([math.inf] * 100, SURE, SCHEDULES["off"], 0.125)
    assert (found.alarm, found.audits) == (None, 0)


def test_shares_of_flagged_runs_and_of_audited_steps() -> None:
    found = [
        replay(quiet(s10=ALARM + 1), SURE, EVERY_8TH, 0.125),
        replay(quiet(), SURE, EVERY_8TH, 0.125),
    ]
    assert str(flagged(found)) == "1 of 2"
    assert flagged(found).percent == 50
    assert audited_share(found) == pytest.approx((3 + 14) / (10 + 100))
    assert audited_share([]) == 0


def test_an_audit_costs_an_exact_step_in_addition() -> None:
    assert audits_in(256, EVERY_8TH, SURE) == 2 + 31
    # Steps 1, 2, and every fourth of which the model is not sure: 5, 9, 13, ...
    assert audits_in(100, EVERY_8TH, [0.0, 1.0, 1.0, 1.0]) == 2 + 24
    assert decode_cost(audits=8, steps=256, exact_s=3.0, sparse_s=1.5) == pytest.approx(6.25)
    step = Costs(model=1.0, sparse=0.5, exact=2.0, after=0.75)
    assert (step.sparse_step, step.exact_step) == (1.5, 3.0 + 8 * 0.25)


# ---- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "became"),
    [
        (range(10), "kept"),
        (range(9), "kept"),
        (range(1, 9), "damaged"),
        (range(5), "collapsed"),
        ((0, 10, 11, 12, 13), "collapsed"),
        ((), "collapsed"),
    ],
)
def test_a_run_is_judged_by_the_fields_that_full_attention_gets(right: Any, became: str) -> None:
    said = verdict({"right": list(right)}, {"right": list(range(10))})
    assert (said.name, said.full) == (became, 10)


def test_a_context_that_full_attention_cannot_answer_says_nothing() -> None:
    assert verdict({"right": []}, {"right": list(range(FIELDS_MIN - 1))}).name == "no verdict"


def count(text: str) -> int:
    return len(text.split())


def test_records_are_found_by_their_names_whatever_they_look_like() -> None:
    question = make_task(JSON, 900, 3, count).questions[0]
    name, age, job, city, badge, salary = question.fields[6:12]
    said = f"""```json
[{{"name": "Somebody Else", "age": {question.fields[1]}}},
 {{ "name": "{name}",
    "job" : "{job}", "age": {age}, "city": "Nowhere", "salary": {salary}0"""
    assert right_fields(JSON, question, said) == {6, 7, 8}
    every = f'{{"name": "{name}", "city": "{city}", "badge": "{badge}", "salary": "{salary}"}}'
    assert right_fields(JSON, question, every) == {6, 9, 10, 11}
    assert right_fields(JSON, question, "") == set()


def test_numbers_count_wherever_they_are_said() -> None:
    question = make_task(RETRIEVAL, 900, 3, count).questions[-1]
    first, second, third = question.fields[:3]
    assert right_fields(RETRIEVAL, question, f"{second}: {second}\n1{first}, ({third})") == {1, 2}


# ---- runs ---------------------------------------------------------------------------------------


@pytest.fixture
def model() -> PreTrainedModel:
    attention.register()
    made: Any = qwen2()
    made.set_attn_implementation(attention.NAME)
    return made  # type: ignore[no-any-return]


def decoded(
    model: PreTrainedModel, folder: Path, policies: list[tuple[str, float]], ends: Any = ()
) -> dict[tuple[str, float], Run]:
    ids = prompt(1, 700)[0].tolist()
    held = kept(folder / "context.safetensors", model, ids[:CONTEXT])
    runs = begin(model, layouts_of(model, held), ids[CONTEXT:], policies, STEPS)
    decode(model, runs, frozenset(ends), STEPS)
    return {(run.policy, run.budget): run for run in runs}


@pytest.mark.usefixtures("one_thread")
def test_full_attention_says_what_generate_does(model: PreTrainedModel, tmp_path: Path) -> None:
    found = decoded(model, tmp_path, [(FULL, 1.0), (OURS, 1.0), ("window", 0.15)])
    plain: Any = qwen2()
    ids = prompt(1, 700)
    wanted = plain.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, do_sample=False
    )[0, 700:].tolist()
    full = found[FULL, 1.0].answer
    everything, window = found[OURS, 1.0].answer, found["window", 0.15].answer
    assert full.said == everything.said == wanted
    assert full.divergences == []
    # With a budget of everything each sparse step is the exact one.
    assert len(everything.divergences) == len(everything.margins) == STEPS - 1
    assert max(everything.divergences) < 1e-4
    assert not any(everything.differs)
    assert all(0 <= each <= 1 for each in everything.margins)
    assert max(window.divergences) > 1e-3


@pytest.mark.usefixtures("one_thread")
def test_runs_are_not_changed_by_those_beside_them(model: PreTrainedModel, tmp_path: Path) -> None:
    """Nor by the exact steps: what is audited leaves no KV behind."""
    alone = decoded(model, tmp_path, [("window", 0.15)])["window", 0.15].answer
    beside = decoded(model, tmp_path, [(FULL, 1.0), (QUEST, 0.2), ("window", 0.15)])
    answer = beside["window", 0.15].answer
    assert answer.said == alone.said
    assert answer.divergences == pytest.approx(alone.divergences, abs=1e-5)
    assert beside[QUEST, 0.2].answer.divergences != answer.divergences


@pytest.mark.usefixtures("one_thread")
def test_an_answer_ends_before_a_token_that_ends_it(model: PreTrainedModel, tmp_path: Path) -> None:
    whole = decoded(model, tmp_path, [(OURS, 0.2)])[OURS, 0.2].answer
    last = next(each for each in whole.said if each != whole.said[0])
    at = whole.said.index(last)
    found = decoded(model, tmp_path, [(OURS, 0.2), (FULL, 1.0)], [last])[OURS, 0.2].answer
    assert found.said == whole.said[:at]
    assert len(found.divergences) == at


class Words:
    """A tokenizer that knows as many words as the model."""

    def __call__(self, text: str) -> Any:
        ids = [sum(map(ord, word)) % 200 for word in text.split()]
        return type("Encoded", (), {"input_ids": ids})

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.mark.usefixtures("one_thread")
def test_what_was_decoded_is_not_decoded_again(model: PreTrainedModel, tmp_path: Path) -> None:
    records = Records(tmp_path / "runs.jsonl")
    runner = GuardRunner(model, Words(), tmp_path, records)
    cases = [Case(RETRIEVAL, 700, 1), Case(JSON, 700, 1)]
    runner.run(cases, [QUEST], 0.2, 4)
    assert len(records.find()) == 4
    runner.run(cases, [QUEST], 0.2, 4)
    assert len(records.find()) == 4
    runner.run(cases[:1], [QUEST, "window"], 0.2, 4)
    assert len(records.find()) == 5
    (found,) = Records(records.path).find(**case_name(cases[0], 4), policy="window")
    assert len(found["divergences"]) == len(found["margins"]) <= 3
    assert found["right"] == []
    assert NEEDLES > FIELDS_MIN


@pytest.mark.usefixtures("one_thread")
def test_steps_are_timed(model: PreTrainedModel, tmp_path: Path) -> None:
    found = costs(model, 2048, 0.25, 0.5, 1, tmp_path)
    assert all(each > 0 for each in asdict(found).values())
    assert list(tmp_path.iterdir()) == []
