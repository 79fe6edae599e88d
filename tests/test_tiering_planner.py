"""The planner against brute force and simple facts; costs against the measurements they fit."""

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.io.calibration_file import RATE_RANGE
from kvtier.tiering import costs as measured
from kvtier.tiering.costs import BYTES_PER_S_START, CostMeter
from kvtier.tiering.planner import (
    BESIDE,
    DOUBT,
    MARGIN,
    Context,
    Costs,
    LoadCost,
    Plan,
    PrefillCost,
    Step,
    plan,
)
from kvtier.tiering.stored_ranges import Range

TOKEN_BYTES = 1000
SECONDS = st.floats(1e-7, 1e-2)
PREFILLS = st.builds(PrefillCost, SECONDS, st.floats(1e-7, 1e-3), st.floats(0, 1e-7))
LOADS = st.builds(LoadCost, SECONDS, st.floats(1e5, 1e11))
COSTS = st.builds(Costs, LOADS, PREFILLS)


@st.composite
def contexts(draw: st.DrawFn, ranges_max: int = 5) -> Context:
    edges = draw(st.lists(st.integers(0, 6000), max_size=2 * ranges_max, unique=True))
    edges = sorted(edges)[: len(edges) // 2 * 2]
    stored = tuple(zip(edges[::2], edges[1::2], strict=True))
    end = stored[-1][1] if stored else 0
    return Context(end + draw(st.integers(1, 500)), stored, TOKEN_BYTES)


def sequential(costs: Costs, context: Context, loads: Iterable[Range]) -> float:
    """Seconds of loading these and computing the rest, one after another."""
    assert costs.prefill is not None
    at, total = 0, 0.0
    for start, end in loads:
        total += costs.prefill.seconds(at, start) + costs.load.seconds((end - start) * TOKEN_BYTES)
        at = end
    return total + costs.prefill.seconds(at, context.length)


def require_whole(made: Plan, context: Context) -> None:
    """Every token is loaded or computed once, in order, and what is loaded is stored."""
    at = 0
    for step in made.steps:
        assert step.start == at < step.end
        at = step.end
        if step.kind == "load":
            assert any(a <= step.start and step.end <= b for a, b in context.stored)
    assert at == context.length
    assert made.steps[-1].kind == "compute", "the model always computes the last tokens"


@given(COSTS, contexts())
@settings(max_examples=300, deadline=None)
def test_no_way_of_loading_whole_ranges_is_faster(costs: Costs, context: Context) -> None:
    made = plan(costs, context)
    require_whole(made, context)
    if not context.stored:
        assert made.way == "recompute"
        return
    best = min(
        sequential(costs, context, chosen)
        for count in range(1, len(context.stored) + 1)
        for chosen in itertools.combinations(context.stored, count)
    )
    assert made.considered["load"] == pytest.approx(best)
    assert made.considered["recompute"] == pytest.approx(sequential(costs, context, ()))
    assert made.seconds is not None
    assert made.seconds <= min(made.considered.values()) / (1 - MARGIN) * 1.000001
    assert made.seconds <= made.considered["load"]


@given(COSTS, contexts())
@settings(max_examples=200, deadline=None)
def test_both_at_once_is_no_worse_than_what_it_is_made_of(costs: Costs, context: Context) -> None:
    """Loading everything is one of its meetings; it pays only for holes computed in chunks."""
    if not context.stored:
        return
    made = plan(costs, context, way="both")
    require_whole(made, context)
    assert made.way == "both"
    assert costs.prefill is not None
    chunks = context.length // 512 + len(context.stored) + 2
    allowed = chunks * costs.prefill.fixed_s
    assert made.considered["both"] <= made.considered["load"] * (1 + BESIDE) + allowed + 1e-9


@given(COSTS, contexts(1), st.sampled_from([2.0, 10.0, 1000.0]))
@settings(max_examples=200, deadline=None)
def test_a_faster_drive_never_leads_to_loading_less(
    costs: Costs, context: Context, times: float
) -> None:
    faster = Costs(LoadCost(costs.load.latency_s, costs.load.bytes_per_s * times), costs.prefill)

    def seconds(costs: Costs) -> float:
        found = plan(costs, context).seconds
        assert found is not None
        return found

    # The margin may keep the slower drive at loading, so that much may be lost.
    assert seconds(faster) <= seconds(costs) / (1 - MARGIN) * 1.000001


def test_the_meeting_is_where_loading_and_computing_end_together() -> None:
    """Cake: 1 ms a token to compute, 1 ms to load: they meet in the middle."""
    costs = Costs(LoadCost(0, 1e6), PrefillCost(0, 1e-3, 0))
    made = plan(costs, Context(51_201, ((0, 51_200),), TOKEN_BYTES))
    assert made.way == "both"
    assert made.steps[0].kind == "compute"
    assert made.steps[0].end == pytest.approx(25_600, abs=1000)
    assert made.seconds == pytest.approx(25.6 * (1 + BESIDE), rel=0.05)
    steep = Costs(costs.load, PrefillCost(0, 1e-3, 2e-8))
    earlier = plan(steep, Context(51_201, ((0, 51_200),), TOKEN_BYTES))
    assert earlier.steps[0].end < made.steps[0].end, "late tokens are dear to compute"


@pytest.mark.parametrize(("rate", "way"), [(1e11, "load"), (1e6, "both"), (1e3, "recompute")])
def test_the_way_follows_the_drive(rate: float, way: str) -> None:
    costs = Costs(LoadCost(1e-3, rate), PrefillCost(1e-3, 1e-3, 0))
    made = plan(costs, Context(20_001, ((0, 20_000),), TOKEN_BYTES))
    assert made.way == way
    assert set(made.considered) == {"load", "both", "recompute"}


def test_a_rate_that_was_measured_long_ago_is_measured_anew() -> None:
    prefill = PrefillCost(1e-3, 1e-3, 0)
    context = Context(20_001, ((0, 20_000),), TOKEN_BYTES)
    assert plan(Costs(LoadCost(1e-3, 1e3), prefill, is_stale=True), context).way == "both"
    assert plan(Costs(LoadCost(1e-3, 1e11), prefill, is_stale=True), context).way == "load"


def test_a_small_range_between_holes_is_computed_with_them() -> None:
    """One pass over all costs less than three and a load of 16 tokens."""
    costs = Costs(LoadCost(0.01, 1e9), PrefillCost(0.1, 1e-3, 0))
    context = Context(5001, ((0, 2000), (2500, 2516), (3000, 5000)), TOKEN_BYTES)
    assert len(plan(costs, context, way="load").steps) == 6, "what was asked for"
    made = plan(costs, context)
    assert [(each.kind, each.start, each.end) for each in made.steps] == [
        ("load", 0, 2000),
        ("compute", 2000, 3000),
        ("load", 3000, 5000),
        ("compute", 5000, 5001),
    ]


def test_what_cannot_be_there_by_the_deadline_is_computed() -> None:
    costs = Costs(LoadCost(0, 1e6), PrefillCost(0, 1e-6, 0))
    context = Context(9001, ((0, 4096), (5000, 9000)), TOKEN_BYTES)
    made = plan(costs, context, way="load", deadline_s=5.0)
    assert made.steps[0] == Step("load", 0, 4096)
    assert made.steps[-2].end == 5000 + 512, "whole Segments, as far as 0.9 s go"
    short = plan(costs, context, way="load", deadline_s=1.1)
    assert short.steps[0] == Step("load", 0, 1024)
    none = plan(costs, context, deadline_s=0.0)
    assert none.way == "recompute"
    assert "deadline" in none.why


def test_where_nothing_is_known_it_is_loaded() -> None:
    costs = Costs(LoadCost(1e-3, 1e3), None)
    made = plan(costs, Context(2001, ((0, 1000), (1500, 2000)), TOKEN_BYTES))
    assert made.way == "load"
    assert made.seconds is None
    assert [each.kind for each in made.steps] == ["load", "compute", "load", "compute"]
    assert plan(costs, Context(10, (), TOKEN_BYTES)).way == "recompute"
    assert (
        plan(costs, Context(10, ((0, 9),), TOKEN_BYTES), way="recompute").why == "it was asked for"
    )


def test_a_plan_of_a_million_tokens_with_many_holes_is_made_soon() -> None:
    stored = tuple((at, at + 1536) for at in range(0, 1_000_000, 2048))
    costs = Costs(LoadCost(1e-4, 1e9), PrefillCost(1e-3, 1e-5, 1e-10))
    context = Context(1_001_000, stored, TOKEN_BYTES)
    require_whole(plan(costs, context), context)


# ---- costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "true", [PrefillCost(0.02, 1e-4, 1e-8), PrefillCost(0, 3e-3, 2e-7), PrefillCost(0.1, 1e-5, 0)]
)
def test_a_fit_predicts_passes_that_it_never_saw(true: PrefillCost, seed: int) -> None:
    random = np.random.default_rng(seed)
    meter = CostMeter.start()
    for _ in range(40):
        start, count = int(random.integers(0, 8000)), int(random.integers(16, 2000))
        noise = random.normal(1, 0.03)
        meter.note_pass(count, start, true.seconds(start, start + count) * noise)
    meter.note_pass(700, 100, 30 * true.seconds(100, 800))
    found = meter.costs().prefill
    assert found is not None
    for start, end in ((0, 4000), (6000, 7000), (100, 200)):
        assert found.seconds(start, end) == pytest.approx(true.seconds(start, end), rel=0.25)


def test_passes_of_one_size_say_what_a_token_takes() -> None:
    meter = CostMeter.start()
    for _ in range(3):
        meter.note_pass(512, 0, 0.512)
    meter.note_pass(1, 9000, 7.0)
    found = meter.costs().prefill
    assert found is not None
    assert (found.fixed_s, found.pair_s) == (0, 0)
    assert found.token_s == pytest.approx(1e-3)


def test_the_newest_load_counts_most() -> None:
    now = [0.0]
    meter = CostMeter(LoadCost(0.0, BYTES_PER_S_START), lambda: now[0])
    assert meter.costs().is_stale
    meter.note_load(10 << 20, (10 << 20) / 1e9)
    assert meter.costs().load.bytes_per_s == pytest.approx(1e9)
    assert not meter.costs().is_stale
    for _ in range(6):
        meter.note_load(10 << 20, (10 << 20) / 1e7)
    assert meter.costs().load.bytes_per_s == pytest.approx(1e7, rel=0.05)
    meter.note_load(1000, 9.0)
    assert meter.costs().load.bytes_per_s == pytest.approx(1e7, rel=0.05), "too small to tell"
    now[0] = 100.0
    assert meter.costs().is_stale


def test_what_was_measured_is_known_to_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    meter = CostMeter.start()
    meter.keep(path, "a")
    assert not path.exists(), "nothing was measured"
    meter.note_load(1 << 30, 2.0)
    for count in (100, 200, 400):
        meter.note_pass(count, 0, count * 1e-3)
    meter.keep(path, "a")
    other = CostMeter.start()
    other.restore(path, "b")
    assert other.costs().prefill is None
    other.note_pass(64, 0, 1.0)
    other.keep(path, "b")
    again = CostMeter.start()
    again.restore(path, "a")
    costs = again.costs()
    assert not costs.is_stale
    content = json.loads(path.read_text())
    content["models"]["a"]["loaded"] -= 3600
    path.write_text(json.dumps(content))
    later = CostMeter.start()
    later.restore(path, "a")
    assert later.costs().is_stale
    assert costs.load.bytes_per_s == pytest.approx(meter.costs().load.bytes_per_s)
    assert costs.prefill == meter.costs().prefill


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"version": 1}',
        '{"version": 2, "models": {"a": {}}}',
        '{"version": 1, "models": {"a": {}}}',
        '{"version": 1, "models": {"a": 3}}',
    ],
)
def test_a_file_that_cannot_be_used_is_measured_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    meter = CostMeter.start()
    meter.restore(path, "a")
    assert meter.costs().prefill is None
    meter.note_pass(64, 0, 1.0)
    meter.keep(path, "a")
    assert list(json.loads(path.read_text())["models"]) == ["a"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("machine", "another"),
        ("bytes_per_s", 0),
        ("bytes_per_s", float("inf")),
        ("bytes_per_s", 10**400),
        ("bytes_per_s", 5e-324),
        ("latency_s", 1e308),
        ("latency_s", -1),
        ("passes", [[0, 1, 1]]),
        ("passes", [[float("inf"), 1, 1]]),
        ("passes", [[10**400, 1.0, 1.0]]),
        ("passes", [["8", 1.0, 1.0]]),
        ("passes", [[100, 1e308, 1.0]]),
        ("passes", [[100, 100.0, 5e-324], [10, 10.0, 1.0], [200, 1e9, 2.0]]),
        ("passes", [[100, 1.0, 1e300]]),
        ("passes", [[9, float("nan"), 1], [9, 1, 1]]),
        ("loaded", "now"),
    ],
)
def test_numbers_of_another_machine_or_of_none_are_not_used(
    tmp_path: Path, field: str, value: object
) -> None:
    path = tmp_path / "costs.json"
    meter = CostMeter.start()
    meter.note_load(1 << 30, 1000.0)
    meter.keep(path, "a")
    content = json.loads(path.read_text())
    content["models"]["a"][field] = value
    path.write_text(json.dumps(content))
    again = CostMeter.start()
    again.restore(path, "a")
    assert again.costs().load.bytes_per_s == BYTES_PER_S_START
    assert again.costs().prefill is None


def test_all_numbers_that_are_taken_can_be_computed_with(tmp_path: Path) -> None:
    """The ends of their ranges, together: the fit overflows nowhere."""
    path = tmp_path / "costs.json"
    meter = CostMeter.start()
    meter.note_load(1 << 30, 1000.0)
    meter.keep(path, "a")
    content = json.loads(path.read_text())
    ends = itertools.product(measured.TOKENS_RANGE, measured.PAIRS_RANGE, measured.SECONDS_RANGE)
    content["models"]["a"]["passes"] = list(ends)
    path.write_text(json.dumps(content))
    again = CostMeter.start()
    again.restore(path, "a")
    found = again.costs().prefill
    assert found is not None
    assert np.isfinite([found.fixed_s, found.token_s, found.pair_s]).all()


def test_what_is_measured_stays_in_the_ranges_that_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    meter = CostMeter.start()
    meter.note_pass(100, 0, 1e-12)
    meter.note_pass(100, 0, 1e9)
    meter.note_load(1 << 60, 1e-9)
    meter.keep(path, "a")
    again = CostMeter.start()
    again.restore(path, "a")
    assert again.costs().load.bytes_per_s == RATE_RANGE[1]
    assert again.costs().prefill is None


def test_a_pipe_or_a_file_without_end_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measured, "FILE_BYTES_MAX", 1000)
    path = tmp_path / "costs.json"
    os.mkfifo(path)
    meter = CostMeter.start()
    meter.restore(path, "a")
    assert "is not a regular file" in caplog.text
    meter.note_load(1 << 30, 1000.0)
    meter.keep(path, "a")
    assert list(json.loads(path.read_text())["models"]) == ["a"]
    path.write_text(f"{path.read_text()}{' ' * 1000}")
    CostMeter.start().restore(path, "a")
    assert "more than 1000 bytes" in caplog.text


@pytest.mark.parametrize(("rate", "wanted"), [(1e11, False), (2e6 * DOUBT, True)])
def test_a_rate_is_wanted_where_the_choice_hangs_on_it(rate: float, wanted: bool) -> None:
    """Far from any other choice, what is loaded need not be loaded as a whole to be timed."""
    prefill, context = PrefillCost(1e-3, 1e-3, 0), Context(20_001, ((0, 20_000),), TOKEN_BYTES)
    costs = Costs(LoadCost(1e-3, rate), prefill, is_stale=True)
    for way in (None, "load"):
        made = plan(costs, context, way=way)
        assert (made.way, made.wants_rate) == ("load", wanted)
    assert not plan(Costs(costs.load, prefill), context).wants_rate, "it is known"
    assert plan(Costs(costs.load, None, is_stale=True), context).wants_rate, "nothing is known"
    assert not plan(costs, context, way="recompute").wants_rate
