"""The guard's policy: which steps are audited, what is an alarm, and how far the budget widens."""

import math

import pytest

from kvtier.errors import ConfigError
from kvtier.tiering.guard import (
    ALARM,
    ALARM_MEAN,
    MEAN_OF,
    SCHEDULES,
    WHOLE,
    Audits,
    schedule_of,
    wider,
)


def due(level: str, steps: int, margin: float = 1.0) -> list[int]:
    schedule = schedule_of(level)
    found = [0]
    for step in range(1, steps + 1):
        if schedule.is_due(step, margin, found[-1]):
            found.append(step)
    return found[1:]


def test_the_first_tokens_are_audited_and_then_every_nth() -> None:
    assert due("off", 100) == []
    assert due("light", 200) == [1, 2, 66, 130, 194]
    assert due("strict", 32) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32]


def test_the_less_sure_a_step_is_the_sooner_it_is_audited() -> None:
    light, strict = SCHEDULES["light"], SCHEDULES["strict"]
    assert light.is_due(34, margin=0.5, last=2)
    assert not light.is_due(33, margin=0.5, last=2)
    assert strict.is_due(9, margin=0.1, last=8)
    assert not strict.is_due(9, margin=0.2, last=8)
    assert not SCHEDULES["off"].is_due(1, margin=0.0, last=0)


def test_an_answer_that_is_uncertain_throughout_costs_no_more_than_its_gaps_allow() -> None:
    assert due("light", 50, margin=0.0) == [1, 2, 18, 34, 50]
    assert due("strict", 50, margin=0.0) == list(range(1, 51))


def test_a_margin_that_is_no_number_is_uncertain() -> None:
    assert due("light", 34, margin=math.nan) == [1, 2, 18, 34]
    assert due("off", 34, margin=math.nan) == []


def test_audits_know_which_was_the_last() -> None:
    audits = Audits(0.125)
    assert audits.last == 0
    audits.note(7, 0.0)
    assert audits.last == 7


@pytest.mark.parametrize("level", ["paranoid", None, 1, ["light"]])
def test_what_is_no_level_is_refused(level: object) -> None:
    with pytest.raises(ConfigError, match="off, light or strict"):
        schedule_of(level)


def test_one_large_divergence_is_an_alarm() -> None:
    audits = Audits(0.125)
    assert not audits.note(1, ALARM)
    assert audits.budget == 0.125
    assert audits.note(2, ALARM + 0.01)
    assert (audits.budget, audits.escalations, audits.worst) == (0.25, [2], ALARM + 0.01)


def test_many_small_ones_are_an_alarm_by_their_mean_but_few_are_not() -> None:
    audits = Audits(0.125)
    alarms = [audits.note(step, 2 * ALARM_MEAN) for step in range(1, MEAN_OF + 1)]
    assert alarms == [False] * (MEAN_OF - 1) + [True]
    # The mean of the wider budget is its own.
    assert not audits.note(MEAN_OF + 1, 2 * ALARM_MEAN)


def test_small_divergences_never_are() -> None:
    audits = Audits(0.125)
    assert not any(audits.note(step, 0.9 * ALARM_MEAN) for step in range(1, 200))
    assert audits.budget == 0.125


@pytest.mark.parametrize("divergence", [math.nan, math.inf])
def test_what_is_no_number_is_an_alarm(divergence: float) -> None:
    audits = Audits(0.25)
    assert audits.note(1, divergence)
    assert audits.worst == math.inf


@pytest.mark.parametrize("budget", [0.01, 0.0625, 0.125, 0.25, 0.3, 0.5, 0.9])
def test_a_budget_widens_to_everything_in_a_few_steps(budget: float) -> None:
    steps = 0
    while budget < WHOLE:
        before, budget, steps = budget, wider(budget), steps + 1
        assert before < budget <= WHOLE
    assert budget == WHOLE
    assert steps <= 7
