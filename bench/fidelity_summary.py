"""What the records of bench/fidelity.py come to: rows of tables, and the figures that have bars."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.fidelity_policies import OURS, QUEST
from bench.fidelity_tasks import JSON, RETRIEVAL, TEXT

Lines = Sequence[dict[str, Any]]
"""Records, as their file has them."""

FREE_BAR = "free-running answers identical to full attention's, exact question, 12.5 %"
LOST_BAR = "fields lost by ours, of the fields lost by Quest pages, 12.5 %"
SEEDS_OF_BARS = 5
LONG_TOKENS = 3000
"""From so many on there is a bar for 6.25 %."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A bar on records of kvtier's own policy: which ones, and of what.

    of: "kl", the median over seeds, at the length where it is largest, or "fields", pooled, in
    percent of those that full attention gets right, or "worst", the same of the worst seed.
    """

    name: str
    of: str
    tasks: tuple[str, ...]
    budget: float
    bar: float
    aim: float
    tokens_min: int = 0


BOTH = (JSON, RETRIEVAL)
BARS = (
    Wanted("25 %: KL", "kl", BOTH, 0.25, 0.005, 0.001),
    Wanted("25 %: fields", "fields", BOTH, 0.25, 98, 100),
    Wanted("25 %: fields, worst seed", "worst", BOTH, 0.25, 85, 85),
    Wanted("12.5 %: KL JSON", "kl", (JSON,), 0.125, 0.010, 0.002),
    Wanted("12.5 %: KL retrieval", "kl", (RETRIEVAL,), 0.125, 0.012, 0.006),
    Wanted("12.5 %: fields", "fields", BOTH, 0.125, 95, 100),
    Wanted("12.5 %: fields, worst seed", "worst", BOTH, 0.125, 85, 85),
    Wanted("6.25 % (3K tokens and more): KL", "kl", BOTH, 0.0625, 0.03, 0.008, LONG_TOKENS),
    Wanted("6.25 % (3K tokens and more): fields", "fields", BOTH, 0.0625, 90, 97, LONG_TOKENS),
    Wanted(
        "6.25 % (3K tokens and more): fields, worst seed",
        "worst",
        BOTH,
        0.0625,
        85,
        85,
        LONG_TOKENS,
    ),
    Wanted("held-out text: KL at 25 %", "kl", (TEXT,), 0.25, 0.03, 0.01),
    Wanted("held-out text: KL at 12.5 %", "kl", (TEXT,), 0.125, 0.10, 0.04),
)


def value_of(wanted: Wanted, lines: Lines) -> float | None:
    """The figure of a bar; None where a task of it was not measured."""
    fitting = [
        line
        for line in lines
        if line["policy"] == OURS
        and line["task"] in wanted.tasks
        and line["budget"] == wanted.budget
        and line["tokens"] >= wanted.tokens_min
    ]
    if {line["task"] for line in fitting} != set(wanted.tasks):
        return None
    if wanted.of == "kl":
        groups = _grouped(fitting, "task", "tokens")
        return float(max(median(line["kl"] for line in group) for group in groups.values()))
    return 100 * (kept_share(fitting) if wanted.of == "fields" else worst_seed(fitting))


def kept_share(lines: Iterable[dict[str, Any]]) -> float:
    """Fields that stay right, of those that full attention gets right; 1 where there are none."""
    pairs = [(line["kept"], line["full"]) for line in lines]
    full = sum(each for _, each in pairs)
    return sum(kept for kept, _ in pairs) / full if full else 1.0


def worst_seed(lines: Lines) -> float:
    """The least share that a seed keeps, all its tasks and lengths together."""
    return min(kept_share(group) for group in _grouped(lines, "seed").values())


def lost_share(lines: Lines, budget: float = 0.125) -> float | None:
    """Percent: fields that kvtier loses over those that Quest's pages lose, on contexts that both
    were measured on; None where there is nothing to compare."""
    lost: dict[str, dict[tuple[Any, ...], int]] = {OURS: {}, QUEST: {}}
    for line in lines:
        if line["policy"] in lost and line["budget"] == budget:
            where = line["task"], line["tokens"], line["seed"]
            lost[line["policy"]][where] = line["full"] - line["kept"]
    common = lost[OURS].keys() & lost[QUEST].keys()
    theirs = sum(lost[QUEST][where] for where in common)
    if not theirs:
        return None
    return 100 * sum(lost[OURS][where] for where in common) / theirs


def seeds_of(lines: Lines) -> int:
    """The fewest seeds that a task has at a length, of kvtier's own policy."""
    groups = _grouped([line for line in lines if line["policy"] == OURS], "task", "tokens")
    return min((len({line["seed"] for line in group}) for group in groups.values()), default=0)


HEADS = (
    "policy",
    "budget",
    "bytes read",
    "seeds",
    "KL, median",
    "least",
    "most",
    "one token's most",
    "NLL over full",
    "fields kept",
    "worst seed",
)


def rows(lines: Lines) -> dict[str, list[list[str]]]:
    """Rows by the title of their table, policies in the order in which they were measured."""
    tables: dict[str, list[list[str]]] = {}
    for (task, tokens), group in sorted(_grouped(lines, "task", "tokens").items()):
        title = f"{task}, {tokens:,} tokens"
        by_budget = _grouped(group, "budget", "policy")
        ordered = sorted(by_budget.items(), key=lambda item: -item[0][0])
        tables[title] = [_row(policy, budget, found) for (budget, policy), found in ordered]
    return tables


def free_rows(lines: Lines) -> list[list[str]]:
    """Rows [task, tokens, budget, prompts, identical, tokens until the first difference]."""
    found = []
    for (task, tokens, budget), group in sorted(
        _grouped(lines, "asked", "tokens", "budget").items()
    ):
        identical = sum(line["identical"] for line in group)
        first = [line["same_tokens"] for line in group if not line["identical"]]
        shown = f"{median(first):.0f}" if first else "-"
        found.append([task, f"{tokens:,}", f"{budget:.2%}", str(len(group)), str(identical), shown])
    return found


def _row(policy: str, budget: float, lines: Lines) -> list[str]:
    kl = [line["kl"] for line in lines]
    kept, full = (sum(line[name] for line in lines) for name in ("kept", "full"))
    nll = median(line["nll"] - line["nll_full"] for line in lines)
    return [
        policy,
        f"{budget:.2%}",
        f"{sum(line['read'] for line in lines) / len(lines):.2%}",
        str(len({line["seed"] for line in lines})),
        f"{median(kl):.4f}",
        f"{min(kl):.4f}",
        f"{max(kl):.4f}",
        f"{max(line['kl_max'] for line in lines):.2f}",
        f"{nll:+.3f}",
        f"{kept} of {full}" if full else "-",
        f"{worst_seed(lines):.0%}" if full else "-",
    ]


def _grouped(lines: Iterable[dict[str, Any]], *names: str) -> dict[Any, list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        key = tuple(line[name] for name in names)
        groups[key].append(line)
    return dict(groups)
