"""What does a model lose that reads a part of its context? Sparse decode against full attention.

Teacher-forced: a context is prefilled densely; the question after it and the known answer then read
sparsely, which is harder than the question's exact reading in use. One pass over both simulates
each token's own choice of Pages, for each layer and kv head, by masking what it left out and
merging what stands for it. Budgets are shares of the context's bytes, padding included, with 16
sink tokens and 64 recent ones inside. Reported are the divergence (KL) of full attention's
next-token distribution from the sparse one, as the mean over the answer's tokens and the median
over seeds, and the fields of the answer that stay right of those that full attention gets right: a
field is right where all its tokens are the most probable ones, given what is right before them.

Policies: kvtier's own, by sketched keys or by means, with or without an estimate of what was not
read; and what others do on the same bytes: Quest's bounds of pages, H2O's accumulated mass, a
window with sinks; the oracle chooses kvtier's Pages by their true mass. Tasks: retrieval,
extraction to JSON, and text that goes on. Free-running (--free): greedy answers through a store
with an exact question, against those of DynamicCache.

What was measured is kept in the folder of --work, so that a long run goes on where it was stopped,
for as long as the code that figures depend on is the same.
"""

import os
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, os.fspath(Path(__file__).resolve().parents[1]))

from bench.fidelity_free import FreeRunner, free_case, prompts
from bench.fidelity_policies import OURS, POLICIES, QUEST
from bench.fidelity_run import FREE, TOKENS_MIN, Records, Runner, cases, code_version, say
from bench.fidelity_summary import (
    BARS,
    FREE_BAR,
    HEADS,
    LOST_BAR,
    SEEDS_OF_BARS,
    Lines,
    free_rows,
    lost_share,
    rows,
    seeds_of,
    value_of,
)
from bench.fidelity_tasks import JSON, RETRIEVAL, TEXT
from kvtier.errors import ConfigError
from kvtier.tiering.adapters import attention
from kvtier.tools import model_source
from kvtier.tools.bench_form import Bench

TASKS = (JSON, RETRIEVAL, TEXT)
LENGTHS, LENGTHS_LONG, LENGTHS_QUICK = (2048, 4096), (8192, 16384), (1536,)
BUDGETS = (0.25, 0.125, 0.0625)
QUICK_POLICIES = (OURS, "ours-means", QUEST)
FREE_PROMPTS, FREE_QUICK, FREE_TOKENS = 40, 2, 1536
FREE_BUDGET = 0.125


def options_of(bench: Bench) -> Namespace:
    """The options, with what --quick and --long make of those that were not given."""
    parser = bench.parser
    parser.add_argument("--work", type=Path, help="keeps contexts and figures (in the temporary)")
    parser.add_argument("--seeds", type=int, help=f"contexts a task and length ({SEEDS_OF_BARS})")
    parser.add_argument("--long", action="store_true", help="8K and 16K tokens as well")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of contexts")
    parser.add_argument("--tasks", nargs="+", choices=TASKS)
    parser.add_argument("--policies", nargs="+", choices=tuple(POLICIES))
    parser.add_argument("--budgets", type=float, nargs="+", help="shares, such as 0.125")
    parser.add_argument("--free", action="store_true", help="answers that run free as well")
    parser.add_argument("--prompts", type=int, help=f"that run free ({FREE_PROMPTS})")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so many")
    options = bench.options()
    quick = options.quick
    lengths = LENGTHS_QUICK if quick else LENGTHS + (LENGTHS_LONG if options.long else ())
    options.tokens = options.tokens or lengths
    if min(options.tokens) < TOKENS_MIN:
        parser.error(f"--tokens takes at least {TOKENS_MIN}")
    options.seeds = options.seeds or (1 if quick else SEEDS_OF_BARS)
    options.tasks = options.tasks or (TASKS[:2] if quick else TASKS)
    options.policies = options.policies or (QUICK_POLICIES if quick else tuple(POLICIES))
    options.budgets = options.budgets or ((FREE_BUDGET,) if quick else BUDGETS)
    options.prompts = options.prompts or (FREE_QUICK if quick else FREE_PROMPTS)
    options.work = options.work or Path(tempfile.gettempdir()) / "kvtier-fidelity"
    return options


def measure(options: Namespace, records: Records) -> bool:
    """Measure what the records lack; whether there was time for all. Raises ConfigError."""
    ends = time.monotonic() + 60 * (options.minutes or float("inf"))
    model, tokenizer = model_source.load(model_source.find(None), say)
    attention.register()
    module: torch.nn.Module = model
    module.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    runner = Runner(model, tokenizer, options.work, records)
    for case in cases(options.tasks, options.tokens, options.seeds):
        if not runner.run(case, options.policies, options.budgets, ends):
            return False
    if options.free:
        free = FreeRunner(runner)
        for case in prompts(options.prompts, FREE_TOKENS):
            if time.monotonic() > ends:
                return False
            free.run(case, [FREE_BUDGET])
    return True


def show(bench: Bench, lines: Lines) -> None:
    """Tables, and the seeds behind the medians."""
    for title, found in rows(lines).items():
        bench.table(title, HEADS, found)
    for line in lines:
        name = f"{line['task']}, {line['tokens']}, {line['policy']}, {line['budget']}"
        bench.samples(f"{name}, seed {line['seed']}", [line["kl"]], unit="nats")


def put_bars(bench: Bench, lines: Lines, free: Lines, *, quick: bool) -> None:
    """The bars of what was measured; the others are named as missing."""
    for each in BARS:
        value = value_of(each, lines)
        if value is None:
            bench.missing(each.name, "not run", optional=quick)
        else:
            unit, is_kl = ("nats", True) if each.of == "kl" else ("%", False)
            bench.bar(
                each.name,
                value,
                bar=each.bar,
                aim=each.aim,
                unit=unit,
                higher_is_better=not is_kl,
            )
    identical = sum(line["identical"] for line in free)
    if len(free) >= FREE_PROMPTS:
        bench.bar(FREE_BAR, 100 * identical / len(free), bar=80, aim=95, unit="%")
    else:
        why = f"{identical} of {len(free)}; at least {FREE_PROMPTS} are asked for"
        bench.missing(FREE_BAR, why if free else "not run (--free)", optional=quick)
    lost = lost_share(lines)
    if lost is None:
        bench.missing(LOST_BAR, "not run, or Quest's pages lost none", optional=quick)
    else:
        bench.bar(LOST_BAR, lost, bar=20, aim=5, unit="%", higher_is_better=False)


def selected(options: Namespace, records: Records) -> tuple[Lines, Lines]:
    """The records that the options ask for: teacher-forced, and free-running."""
    lines: list[dict[str, object]] = []
    free: list[dict[str, object]] = []
    for case in cases(options.tasks, options.tokens, options.seeds):
        for policy in options.policies:
            for budget in options.budgets:
                found = records.find(
                    version=code_version(case.task), **asdict(case), policy=policy, budget=budget
                )
                lines += found[:1]
    if options.free:
        for case in prompts(options.prompts, FREE_TOKENS):
            found = records.find(version=code_version(FREE), **free_case(case), budget=FREE_BUDGET)
            free += found[:1]
    return lines, free


def main() -> int:
    bench = Bench("fidelity", __doc__)
    options = options_of(bench)
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    records = Records(options.work / "records.jsonl")
    for task in (*TASKS, FREE):
        # Sources may change while a run is on its way.
        code_version(task)
    try:
        is_complete = measure(options, records)
    except ConfigError as error:
        bench.missing("fidelity", str(error))
        return bench.finish()
    lines, free = selected(options, records)
    show(bench, lines)
    if free:
        heads = ("task", "tokens", "budget", "prompts", "identical", "tokens until they differ")
        bench.table("answers that run free", heads, free_rows(free))
    if not is_complete:
        bench.note("The time was over before everything was measured.")
    for task in options.tasks:
        for tokens in options.tokens:
            found = [line for line in lines if (line["task"], line["tokens"]) == (task, tokens)]
            if found and seeds_of(found) < SEEDS_OF_BARS:
                bench.note(
                    f"{task}, {tokens:,} tokens: seeds {seeds_of(found)}; bars ask for "
                    f"{SEEDS_OF_BARS}."
                )
    put_bars(bench, lines, free, quick=options.quick)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
