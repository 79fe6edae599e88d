"""What does the guard detect, and what does it cost? Audits replayed over answers that run free.

A run is one (task, seed, length, policy): a greedy answer to a question that was read exactly,
behind a context that is read by the policy within a budget. The history is the run's own: what it
said, and the KV that it made of it. At each step the exact next-token distribution on that history
is recorded too, which is what an audit would compare with. Then the guard's own Schedule and Audits
(tiering/guard.py) go over the record: which steps are audited, whether and when there is an alarm.
In use an audited step goes on from the exact distribution, and after an alarm the budget is wider;
neither is in the record, so a run counts up to its first alarm.

A run has collapsed if it keeps at most half of the fields that full attention gets right within the
same number of tokens; it has kept its answer from 90 % on, and is damaged between the two. Runs of
contexts where full attention gets fewer than four fields count for nothing but false alarms.

Schedules were chosen on the seeds of --tune, and the bars are from other seeds. Cost: audits in an
answer of 256 tokens times an exact whole step at 32K tokens, over the sparse steps of that answer
(guard_cost.py).

Runs are kept in the folder of --work, so that a long one goes on where it was stopped, for as long
as the code that they depend on is the same.
"""

import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, os.fspath(Path(__file__).resolve().parents[1]))

from bench.fidelity_policies import OURS, POLICIES, QUEST
from bench.fidelity_run import FREE, TOKENS_MIN, Case, Records, code_version, say
from bench.fidelity_tasks import JSON, RETRIEVAL
from bench.guard_cost import costs
from bench.guard_replay import (
    Flagged,
    Replayed,
    audited_share,
    audits_in,
    decode_cost,
    flagged,
    replay,
    verdict,
)
from bench.guard_runs import FULL, NEW_TOKENS, GuardRunner, case_name
from kvtier.errors import ConfigError
from kvtier.tiering.adapters import attention
from kvtier.tiering.guard import SCHEDULES, Level, Schedule
from kvtier.tools import model_source
from kvtier.tools.bench_form import Bench

TASKS = (JSON, RETRIEVAL)
RIVALS = ("window", "h2o", QUEST)
TUNING_SEEDS, REPORTED_SEEDS = (101, 102), (1001, 1002, 1003, 1004, 1005)
TOKENS, BUDGET = 1536, 0.125
LEVELS: tuple[Level, ...] = ("light", "strict")
DETECTION: tuple[tuple[Level, int, int], ...] = (("strict", 90, 100), ("light", 60, 90))
"""Percent of collapsing runs that are flagged: bar and aim."""
COST = "cost"
COST_TOKENS, COST_ANSWER = 32_768, 256
COST_SHARES = (0.25, 1.2)
"""Of the context, what HOT has room for."""
COST_ROUNDS = 5

Line = dict[str, Any]


def options_of(bench: Bench) -> Namespace:
    parser = bench.parser
    parser.add_argument("--work", type=Path, help="keeps contexts and runs (in the temporary)")
    parser.add_argument("--seeds", type=int, nargs="+", help="of the contexts that are reported")
    parser.add_argument("--tune", action="store_true", help="the seeds of tuning as well")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a context")
    parser.add_argument("--new-tokens", type=int, help=f"of an answer ({NEW_TOKENS})")
    parser.add_argument("--policies", nargs="+", choices=tuple(POLICIES))
    parser.add_argument("--minutes", type=float, help="begin no new seed after so many; 0: none")
    parser.add_argument("--no-cost", action="store_true", help="leave the cost at 32K tokens out")
    options = bench.options()
    if options.tokens < TOKENS_MIN:
        parser.error(f"--tokens takes at least {TOKENS_MIN}")
    quick = options.quick
    options.seeds = options.seeds or (REPORTED_SEEDS[:1] if quick else REPORTED_SEEDS)
    options.new_tokens = options.new_tokens or (NEW_TOKENS // 4 if quick else NEW_TOKENS)
    options.policies = options.policies or ((OURS, "window") if quick else (OURS, *RIVALS))
    options.work = options.work or Path(tempfile.gettempdir()) / "kvtier-guard"
    return options


def measure(options: Namespace, records: Records) -> bool:
    """Decode what the records lack; whether there was time for all. Raises ConfigError."""
    if options.minutes == 0:
        return False
    ends = time.monotonic() + 60 * (options.minutes or float("inf"))
    model, tokenizer = model_source.load(model_source.find(None), say)
    attention.register()
    module: Any = model
    module.set_attn_implementation(attention.NAME)
    runner = GuardRunner(model, tokenizer, options.work, records)
    for seed in (*(TUNING_SEEDS if options.tune else ()), *options.seeds):
        if time.monotonic() > ends:
            return False
        cases = [Case(task, options.tokens, seed) for task in TASKS]
        runner.run(cases, options.policies, BUDGET, options.new_tokens)
    if not (options.no_cost or options.quick):
        for share in COST_SHARES:
            named = {"task": COST, "version": code_version(FREE), "hot": share}
            if not records.find(**named):
                found = costs(model, COST_TOKENS, BUDGET, share, COST_ROUNDS, options.work)
                whole = {"exact_step": found.exact_step, "sparse_step": found.sparse_step}
                records.add({**named, **asdict(found), **whole})
    return True


# ---- what the records come to -------------------------------------------------------------------


def runs_of(records: Records, options: Namespace, seeds: Sequence[int]) -> list[Line]:
    """Runs of these seeds that have the one with full attention beside them, each with its verdict
    as "became", and "kept" of "full" fields."""
    found = []
    for seed in seeds:
        for task in TASKS:
            named = case_name(Case(task, options.tokens, seed), options.new_tokens)
            for full in records.find(**named, policy=FULL)[:1]:
                for policy in options.policies:
                    for line in records.find(**named, policy=policy, budget=BUDGET)[:1]:
                        said = verdict(line, full)
                        of_run = {"became": said.name, "kept": said.kept, "full": said.full}
                        found.append({**line, **of_run})
    return found


def seeds_in(lines: Sequence[Line]) -> str:
    return ", ".join(str(each) for each in sorted({line["seed"] for line in lines})) or "none"


def replayed(lines: Sequence[Line], schedule: Schedule) -> list[Replayed]:
    return [replay(line["divergences"], line["margins"], schedule, BUDGET) for line in lines]


def collapsed(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["policy"] != OURS and line["became"] == "collapsed"]


def ours(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["policy"] == OURS]


def show(bench: Bench, title: str, lines: Sequence[Line]) -> None:
    """What became of the runs of each policy, and how many of them each level flags."""
    rows = []
    for policy in dict.fromkeys(line["policy"] for line in lines):
        mine = [line for line in lines if line["policy"] == policy]
        for became in dict.fromkeys(line["became"] for line in mine):
            group = [line for line in mine if line["became"] == became]
            kept, full = (sum(line[name] for line in group) for name in ("kept", "full"))
            row = [policy, became, str(len(group)), f"{kept} of {full}"]
            for level in LEVELS:
                found = replayed(group, SCHEDULES[level])
                steps = [each.alarm for each in found if each.alarm is not None]
                back = sum(each.taken_back for each in found)
                row += [str(flagged(found)), f"{median(steps):g}" if steps else "-"]
                row += [str(back)] if level == "strict" else []
            rows.append(row)
    heads = ["policy", "the answer is", "runs", "fields", "light flags", "at step", "strict flags"]
    bench.table(title, [*heads, "at step", "tokens taken back"], rows)


def show_audits(bench: Bench, lines: Sequence[Line]) -> None:
    """How much each level audits of kvtier's own runs, and the worst that all steps have."""
    rows = []
    for level in LEVELS:
        found = replayed(ours(lines), SCHEDULES[level])
        rows.append([level, f"{audited_share(found):.1%}", str(flagged(found))])
    heads = ["level", "of steps audited", "runs flagged"]
    bench.table(f"audits of {OURS}", heads, rows)
    worst = [max(line["divergences"], default=0.0) for line in ours(lines)]
    bench.samples(f"{OURS}: largest divergence of a run", worst, unit="nats")


def put_detection(bench: Bench, lines: Sequence[Line], *, quick: bool) -> None:
    for level, bar, aim in DETECTION:
        name = f"{level}: collapsing runs flagged"
        found = flagged(replayed(collapsed(lines), SCHEDULES[level]))
        if found.runs:
            bench.bar(name, found.percent, bar=bar, aim=aim, unit="%")
        else:
            bench.missing(name, "no run collapsed", optional=quick)
    found = flagged(replayed(ours(lines), SCHEDULES["strict"]))
    if found.runs:
        _put_false_alarms(bench, found)
    else:
        bench.missing("strict: runs of kvtier's own choice flagged", "not run", optional=quick)


def _put_false_alarms(bench: Bench, found: Flagged) -> None:
    bench.bar(
        "strict: runs of kvtier's own choice flagged",
        found.percent,
        bar=2,
        aim=0,
        unit="%",
        higher_is_better=False,
    )


def put_cost(bench: Bench, lines: Sequence[Line], records: Records, options: Namespace) -> None:
    """The dearer of the two kinds of HOT is the bar's."""
    name = f"light: cost in decode time at {COST_TOKENS // 1024}K tokens"
    measured = records.find(task=COST, version=code_version(FREE))
    margins = [margin for line in ours(lines) for margin in line["margins"]]
    if not measured or not margins:
        bench.missing(name, "not run", optional=options.quick or options.no_cost)
        return
    rows, most = [], 0.0
    for each in measured:
        row = [
            f"{min(1, each['hot']):.0%}",
            *(f"{1000 * each[of]:.0f}" for of in ("model", "sparse", "exact", "after")),
            f"{each['exact_step'] / each['sparse_step']:.2f}",
        ]
        for level in LEVELS:
            audits = audits_in(COST_ANSWER, SCHEDULES[level], margins)
            cost = decode_cost(audits, COST_ANSWER, each["exact_step"], each["sparse_step"])
            row.append(f"{cost:.1f} % ({audits})")
            most = max(most, cost) if level == "light" else most
        rows.append(row)
    heads = ["HOT holds", "model, ms", "sparse", "exact", "sparse after exact", "exact over sparse"]
    heads += [f"{level}, audits in {COST_ANSWER}" for level in LEVELS]
    bench.table(f"whole steps at {COST_TOKENS:,} tokens", heads, rows)
    bench.bar(name, most, bar=15, aim=5, unit="%", higher_is_better=False)


def main() -> int:
    bench = Bench("guard", __doc__)
    options = options_of(bench)
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    records = Records(options.work / "runs.jsonl")
    for task in (*TASKS, FREE):
        # Sources may change while a run is on its way.
        code_version(task)
    try:
        is_complete = measure(options, records)
    except ConfigError as error:
        bench.missing("guard", str(error))
        return bench.finish()
    if options.tune:
        found = runs_of(records, options, TUNING_SEEDS)
        show(bench, f"tuning: seeds {seeds_in(found)}", found)
    lines = runs_of(records, options, options.seeds)
    show(bench, f"{BUDGET:.1%} of {options.tokens:,} tokens, seeds {seeds_in(lines)}", lines)
    show_audits(bench, lines)
    if not is_complete:
        bench.note("Nothing new was begun after the time was over; what is kept is shown.")
    if len({line["seed"] for line in lines}) < len(REPORTED_SEEDS):
        bench.note(f"The bars ask for {len(REPORTED_SEEDS)} seeds.")
    put_detection(bench, lines, quick=options.quick)
    put_cost(bench, lines, records, options)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
