"""What does a budget make of decode: its context on NVME, in memory, and full attention?

Decode steps read 12.5 % of the context by what digests promise. HOT has room for a quarter of it;
single Pages are recalled. Compared, in turns: the same selection with everything in HOT, Pages in
the order of positions, nothing read ahead, and full attention over contiguous keys and values in
memory (for replayed queries the fastest form and dtype of several, which one is said; for whole
steps the model's DynamicCache). Replayed are the queries of a real answer, without the model's own
compute, over 16-bit keys and values; whole steps are those of the real model in float32, each cache
reading the same tokens.

A real prompt of up to 4,096 tokens and its answer are computed once and kept in --work. Longer
contexts are made of its keys: turned back to where no position is in them, drawn anew in runs of 64
tokens, with noise, and turned to their new positions (bench/decode_context.py). So what is counted
(reads, Pages missed) is taken from contexts that are real, times from all.

Before anything is timed, a budget of 1 is compared with full attention, and what two stores answer
by the same selection, from NVME and from memory, has to be the same bit by bit. Stores read by
O_DIRECT. Cold steps begin with nothing sealed in HOT. Missed is what had to be read, ahead or on
demand, where HOT kept the Pages of the last 16 steps.

Run: .venv/bin/python bench/decode.py
"""

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, os.fspath(Path(__file__).resolve().parents[1]))

from bench.decode_context import TAIL_TOKENS, Context, measured
from bench.decode_model import DRAM, FULL, NOT_AHEAD, NVME, ModelSteps
from bench.decode_replay import (
    BUDGET,
    Contexts,
    Counts,
    Plain,
    Resident,
    are_identical,
    fastest_plain,
    largest_difference,
    nothing_ahead,
)
from bench.fidelity_run import say
from kvtier.errors import ConfigError
from kvtier.tools import model_source
from kvtier.tools.bench_form import Bench
from kvtier.tools.bench_rig import interleave

SHARE = 0.25
"""Of the context, that HOT has room for."""
ALL = 1.2
REAL = (3072, 4096)
"""Tokens of contexts that the model has read."""
LENGTHS, LENGTHS_QUICK = (4096, 8192, 32_768, 131_072), (8192,)
REAL_QUICK = (1536,)
LAYERS_LONG = 4
"""So many layers, from the first to the last, where a context is longer than the model read."""
SPEED_TOKENS, SELECTION_TOKENS, MISSED_TOKENS = 32_768, 131_072, 3072
MEANS, POSITION = "nvme, mean keys", "nvme, by position"
WARM_UP, ROUNDS, ROUNDS_LONG = 20, 24, 9
PAUSE_S = 0.0
TOLERANCE = 5e-3
COLD_STEPS = 4

AMPLIFICATION = "bytes read over bytes of the pages wanted, cold, 4 KiB blocks"
READS = "reads per page wanted, cold"
MISSED = "pages missed per kv head and step, 3K tokens"
REPLAYED = "NVME over DRAM, same selection, replayed queries"
WHOLE = "NVME over DRAM, same selection, whole steps"
SPEED_MEANS = "step over full attention in DRAM, 32K tokens, mean keys"
SPEED_SKETCH = "step over full attention in DRAM, 32K tokens, sketch"
SELECTION = "selection's share of a step, 128K tokens"
DIGESTS_MEANS = "digests over 16-bit KV, mean keys"
DIGESTS_SKETCH = "digests over 16-bit KV, 3-bit sketch"
TARGETS = {
    AMPLIFICATION: (1.3, 1.1, "x", False),
    READS: (0.45, 0.33, "reads", False),
    MISSED: (1.5, 0.8, "pages", False),
    REPLAYED: (0.70, 0.90, "of the speed", True),
    WHOLE: (0.95, 0.98, "of the speed", True),
    SPEED_MEANS: (2.0, 4.0, "x", True),
    SPEED_SKETCH: (1.0, 2.0, "x", True),
    SELECTION: (30.0, 15.0, "%", False),
    DIGESTS_MEANS: (6.5, 3.5, "%", False),
    DIGESTS_SKETCH: (14.0, 12.0, "%", False),
}


@dataclass(slots=True)
class Found:
    """Figures of bars, by their names, each from one or more contexts, and rows of tables."""

    values: dict[str, list[float]] = field(default_factory=dict)
    counted: list[list[object]] = field(default_factory=list)
    timed: list[list[object]] = field(default_factory=list)

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def worst(self, name: str) -> float | None:
        """Of all contexts."""
        values = self.values.get(name)
        if not values:
            return None
        return min(values) if TARGETS[name][3] else max(values)


def ratio(over: list[float], under: list[float]) -> float:
    """The median of ratios round by round."""
    return median(one / other for one, other in zip(over, under, strict=True))


def per_page(counts: list[Counts]) -> tuple[float, float]:
    """Reads for each Page that was missed, and bytes read over bytes wanted."""
    reads = sum(each.reads for each in counts) / max(1, sum(each.missed for each in counts))
    wanted = sum(each.bytes_wanted for each in counts)
    return reads, sum(each.bytes_read for each in counts) / max(1, wanted)


# ---- counted ----------------------------------------------------------------------------------


def count_cold(one: Resident) -> tuple[float, float]:
    """Reads per page wanted and amplification of steps that find nothing in HOT."""
    counts = []
    # A guess for a layer would be counted with what it wants.
    with nothing_ahead(one.store):
        for number in range(COLD_STEPS):
            one.go_cold()
            counts.append(one.counted(partial(one.step, 8 * number, BUDGET)))
    return per_page(counts)


def count_steps(one: Resident) -> Counts:
    """Of all steps of the answer, but those that fill a cache of 16 steps; for all of them."""
    cache = one.store._sparse.recall.cache
    found = []
    one.go_cold()
    for number in range(one.context.steps):
        found.append(one.counted(partial(one.step, number, BUDGET)))
        # What was not wanted in the last 16 steps leaves.
        cache.give_up(1 << 60)
    kept = found[WARM_UP:]
    return Counts(*(sum(getattr(each, name) for each in kept) for name in Counts.__slots__))


def count(context: Context, folder: Path, found: Found) -> None:
    """What is read of a context, with Pages by keys and by position."""
    steps = context.steps - WARM_UP
    with ExitStack() as stack:
        contexts = Contexts(folder, context, stack)
        for placement in ("keys", "position"):
            one = contexts.resident(f"{placement}-counted", SHARE * 2, placement=placement)
            one.step(0, BUDGET)
            reads, amplification = count_cold(one)
            counts = count_steps(one)
            heads = context.layers[0].keys.shape[0] * len(context.layers) * steps
            missed = counts.missed / heads
            if placement == "keys":
                found.add(READS, reads)
                found.add(AMPLIFICATION, amplification)
                if context.tokens == MISSED_TOKENS + TAIL_TOKENS:
                    found.add(MISSED, missed)
            found.counted.append(
                [
                    f"{contexts.sealed:,}",
                    placement,
                    f"{reads:.3f}",
                    f"{amplification:.2f}",
                    f"{counts.wanted / heads:.1f}",
                    f"{missed:.2f}",
                    f"{counts.reads / heads:.2f}",
                    f"{counts.bytes_read / heads / 1024:.1f}",
                ]
            )


# ---- timed ------------------------------------------------------------------------------------


def check(contexts: Contexts, dram: Resident, nvme: Resident) -> None:
    """Raise AssertionError where answers are not what they should be."""
    plain = Plain(contexts.context, torch.float32, "sdpa")
    difference = largest_difference(dram, plain.attend, 1.0)
    assert difference < TOLERANCE, f"a budget of 1 is off by {difference} from full attention"
    # The first query may bring whole units, to digest them. Attended to apart, because they leave
    # first, they make for sums in another order.
    nvme.step(0, BUDGET)
    for state in ("cold", "warm"):
        if state == "cold":
            nvme.go_cold()
        same = are_identical(dram, nvme, BUDGET, range(2))
        assert same, f"the same selection answers otherwise from NVME, {state}"


def methods_of(contexts: Contexts, plain: Plain) -> tuple[dict[str, Resident], "Steps"]:
    """Stores by name, and what takes a step of each, and of full attention."""
    stores = {
        DRAM: contexts.resident("dram", ALL),
        NVME: contexts.resident("nvme", SHARE),
        NOT_AHEAD: contexts.resident("not-ahead", SHARE),
        POSITION: contexts.resident("by-position", SHARE, placement="position"),
        MEANS: contexts.resident("means", SHARE, bits=0),
    }
    steps: Steps = {FULL: plain.step}
    for name, one in stores.items():
        steps[name] = partial(_stepped, one)
    return stores, steps


Steps = dict[str, Callable[[int], float]]


def _stepped(one: Resident, number: int) -> float:
    return one.step(number, BUDGET)


def in_turns(steps: Steps, rounds: int) -> dict[str, list[float]]:
    """Seconds of each, round by round; all take the same steps, after some to warm up."""
    for number in range(WARM_UP):
        for step in steps.values():
            step(number)
    numbers = {name: iter(range(WARM_UP, WARM_UP + rounds)) for name in steps}

    def next_of(name: str) -> float:
        return steps[name](next(numbers[name]))

    return interleave(
        {name: partial(next_of, name) for name in steps}, rounds=rounds, pause_s=PAUSE_S
    )


def replay(context: Context, folder: Path, rounds: int, bench: Bench, found: Found) -> None:
    """Time one context's replayed queries."""
    with ExitStack() as stack:
        contexts = Contexts(folder, context, stack)
        form, plain = fastest_plain(context, 3)
        stores, steps = methods_of(contexts, plain)
        stack.enter_context(nothing_ahead(stores[NOT_AHEAD].store))
        check(contexts, stores[DRAM], stores[NVME])
        took = in_turns(steps, rounds)
        selecting = [stores[NVME].select(number) for number in range(rounds)]
        found.add(DIGESTS_SKETCH, 100 * stores[NVME].digest_bytes() / contexts.nbytes)
        found.add(DIGESTS_MEANS, 100 * stores[MEANS].digest_bytes() / contexts.nbytes)
        hot = stores[NVME].store.stats().hot_bytes / contexts.nbytes
    for name, seconds in took.items():
        bench.samples(f"replayed, {contexts.sealed}: {name}", seconds, unit="s")
    share = 100 * median(selecting) / median(took[NVME])
    found.add(REPLAYED, ratio(took[DRAM], took[NVME]))
    if contexts.sealed == SPEED_TOKENS:
        found.add(SPEED_SKETCH, ratio(took[FULL], took[NVME]))
        found.add(SPEED_MEANS, ratio(took[FULL], took[MEANS]))
    if contexts.sealed == SELECTION_TOKENS:
        found.add(SELECTION, share)
    by_layer = [1e3 * median(took[name]) / len(context.layers) for name in took]
    found.timed.append(
        [
            f"{contexts.sealed:,}",
            *(f"{each:.2f}" for each in by_layer),
            f"{ratio(took[DRAM], took[NVME]):.2f}",
            f"{share:.0f} %",
            f"{100 * hot:.0f} %",
            form,
        ]
    )


def whole_steps(
    model: torch.nn.Module, context: Context, folder: Path, rounds: int, bench: Bench, found: Found
) -> None:
    """Time steps of the real model."""
    with ExitStack() as stack:
        asked = ModelSteps(model, context, folder)  # type: ignore[arg-type]
        steps = asked.open(stack, BUDGET, {DRAM: ALL, NVME: SHARE, NOT_AHEAD: SHARE})
        took = in_turns(steps, rounds)
    for name, seconds in took.items():
        bench.samples(f"whole steps: {name}", seconds, unit="s")
    found.add(WHOLE, ratio(took[DRAM], took[NVME]))
    bench.table(
        f"Whole steps of the real model, {asked.sealed:,} tokens, ms",
        list(took),
        [[f"{1e3 * median(seconds):.1f}" for seconds in took.values()]],
    )


# ---- all of it --------------------------------------------------------------------------------


def options_of(bench: Bench) -> Namespace:
    parser = bench.parser
    parser.add_argument("--work", type=Path, help="keeps contexts (in the temporary folder)")
    parser.add_argument("--folder", type=Path, help="on the drive to be used")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths that are replayed")
    parser.add_argument("--no-model", action="store_true", help="replayed queries alone")
    options = bench.options()
    options.tokens = options.tokens or (LENGTHS_QUICK if options.quick else LENGTHS)
    options.work = options.work or Path(tempfile.gettempdir()) / "kvtier-decode"
    options.work.mkdir(parents=True, exist_ok=True)
    return options


def spread(layers: int, count: int) -> list[int]:
    """Numbers of `count` layers, from the first to the last."""
    return [int(each) for each in np.linspace(0, layers - 1, count).round()]


def measure(options: Namespace, bench: Bench, found: Found) -> None:
    """Raises ConfigError where the model is not installed."""
    model, tokenizer = model_source.load(model_source.find(None), say)
    lengths = REAL_QUICK if options.quick else REAL
    real = {each: measured(model, tokenizer, each + TAIL_TOKENS, options.work) for each in lengths}
    base = real[max(lengths)]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="kvtier-bench-") as folder:
        for tokens, context in real.items():
            count(context, Path(folder) / f"counted-{tokens}", found)
        for tokens in options.tokens:
            context = base
            if tokens not in real:
                few = base.of_layers(spread(len(base.layers), LAYERS_LONG))
                context = few.lengthened(tokens + TAIL_TOKENS)
            rounds = ROUNDS if tokens < SPEED_TOKENS and not options.quick else ROUNDS_LONG
            replay(context, Path(folder) / f"replayed-{tokens}", rounds, bench, found)
        show(bench, found)
        if not options.no_model:
            rounds = ROUNDS_LONG if options.quick else ROUNDS
            whole_steps(model, base, Path(folder) / "model", rounds, bench, found)


def show(bench: Bench, found: Found) -> None:
    heads = ["tokens", "pages", "reads per page, cold", "amplification, cold"]
    by_head = ["wanted", "missed", "reads", "KiB read"]
    bench.table(
        "A budget of 12.5 %, real queries; the last four per kv head, layer and step, with HOT "
        "keeping the Pages of 16 steps",
        [*heads, *by_head],
        found.counted,
    )
    names = [FULL, DRAM, NVME, NOT_AHEAD, POSITION, MEANS]
    bench.table(
        "Replayed queries, ms per layer",
        ["tokens", *names, "NVME over DRAM", "selection", "HOT", "full attention by"],
        found.timed,
    )


def put_bars(bench: Bench, found: Found, *, quick: bool) -> None:
    """The bars of what was measured, the worst of all contexts; the others are missing."""
    for name, (bar, aim, unit, higher) in TARGETS.items():
        value = found.worst(name)
        if value is None:
            bench.missing(name, "not run", optional=quick)
        else:
            bench.bar(name, value, bar=bar, aim=aim, unit=unit, higher_is_better=higher)


def main() -> int:
    bench = Bench("decode", __doc__)
    options = options_of(bench)
    # One thread, because two wait for each other where others compute as well.
    torch.set_num_threads(1)
    found = Found()
    try:
        measure(options, bench, found)
    except ConfigError as error:
        bench.missing("decode", str(error))
        return bench.finish()
    put_bars(bench, found, quick=options.quick)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
