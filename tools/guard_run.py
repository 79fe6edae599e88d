"""The command `kvtier guard run`: at which budget a model keeps its answers, as a profile.

Each task is put to the model once with full attention; then, budget by budget from the smallest on,
the known answer is given to it token by token as a store's sparse decode reads it, the prompt being
read exactly. The first budget at which the fields stay right, and the next-token distributions as
close as the guard asks for, is the task's.

All layers get the same share. Giving those with the largest errors of attention twice as much, at
the same bytes in all, was not seen to help where it was measured (docs/ARCHITECTURE.md).
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import kvtier
from kvtier.errors import ConfigError
from kvtier.kernels.divergence import divergence
from kvtier.tiering import store_files
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.adapters.model_identity import geometry_of
from kvtier.tiering.budget import Budget, percent_hint, safest
from kvtier.tiering.budget_profile import PROFILE, Profile, TaskBudget
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.guard import ALARM, ALARM_MEAN
from kvtier.tiering.listing import describe
from kvtier.tiering.packing import TORCH_DTYPES
from kvtier.tiering.store import Store
from kvtier.tools import guard_tasks, model_source
from kvtier.tools.guard_tasks import EXTRACTION, TASKS, TEXT, Asked
from kvtier.tools.stages import Stages, stages
from kvtier.tools.text_table import table

BUDGETS = (0.0625, 0.125, 0.25, 0.5)
DTYPES = ("auto", *TORCH_DTYPES)
KEPT_SHARE_MIN = 0.97
"""Of the fields that full attention gets right, and of its score."""
READ_FACTOR_MAX = 2.0
"""Of a budget: what was measured says little of a longer context, from there on."""
NATS_MAX = 1e9
"""Stands for a divergence of logits that are no numbers."""
PREFILL_TOKENS = 512
"""Read at a time."""
SPACE_BYTES = 64 << 20
"""Of a region, beside the contexts' own."""


@dataclass(frozen=True, slots=True)
class Options:
    """model: as `model_source.find` takes it. budgets: to try. out: the file to write, or None.
    dtype: as `model_source.load` takes it. store: whose profile it is."""

    model: str | None
    budgets: tuple[float, ...]
    tokens: int
    seeds: int
    out: Path | None
    dtype: str = "auto"
    store: Path | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What a task came to at a budget. read: the share of the Pages that was read in fact: recent
    tokens that were sealed with the prompt come on top until 64 are generated. Scores are of all
    fields, in percent: with Text2JSON's points for extraction, None for text, which has none."""

    task: str
    budget: float
    read: float
    kl: float
    kl_max: float
    kept: int
    fields: int
    score: float | None
    score_full: float | None

    @property
    def is_good(self) -> bool:
        """Whether the task keeps its answers."""
        if self.kl > ALARM_MEAN or self.kl_max > ALARM:
            return False
        if self.kept < KEPT_SHARE_MIN * self.fields:
            return False
        if self.score is None or self.score_full is None:
            return True
        return self.score >= KEPT_SHARE_MIN * self.score_full


@dataclass(frozen=True, slots=True)
class GuardRun:
    """measured: every budget that was tried of every task. path: of the file written."""

    profile: Profile
    measured: tuple[Measured, ...]
    path: Path | None

    @property
    def collapsed(self) -> tuple[str, ...]:
        """Tasks that no budget was enough for."""
        return tuple(name for name, each in self.profile.tasks.items() if each.budget is None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        tried = [
            {name: getattr(each, name) for name in Measured.__slots__} | {"good": each.is_good}
            for each in self.measured
        ]
        return {
            **self.profile.to_dict(),
            "collapsed": list(self.collapsed),
            "measured": tried,
            "path": self.path,
        }


def options_of(
    model: str | None,
    target: tuple[str | None, str | None],
    budgets: Sequence[float],
    tokens: int,
    seeds: int,
    dtype: str = "auto",
) -> Options:
    """What was asked for, checked before a model is loaded. target: a store, or a file. Raises
    ConfigError."""
    store, out = target
    if store is not None and out is not None:
        raise ConfigError("give --store, whose directory gets the profile, or --out, not both")
    path = None
    if store is not None:
        if not store_files.is_store(Path(store)):
            raise ConfigError(f"--store {store} is no store: open it once, or use --out FILE")
        path = Path(store) / PROFILE
    elif out is not None:
        path = Path(out)
    if path is not None and (why := _why_not_written(path)):
        raise ConfigError(f"the profile {path} cannot be written: {why}")
    if not all(0 < each < 1 for each in budgets):
        hint = percent_hint(max(budgets))
        raise ConfigError(f"--budget is a share above 0 and below 1: got {list(budgets)}{hint}")
    if tokens < guard_tasks.TOKENS_MIN or seeds < 1:
        raise ConfigError(
            f"--tokens is at least {guard_tasks.TOKENS_MIN}, --seeds at least 1: got {tokens}, "
            f"{seeds}"
        )
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is one of {', '.join(DTYPES)}: got {dtype!r}")
    tried = tuple(sorted(set(budgets))) or BUDGETS
    of = None if store is None else Path(store)
    return Options(model, tried, tokens, seeds, path, dtype, of)


def _why_not_written(path: Path) -> str:
    """Nothing where it can be."""
    if path.is_dir():
        return "it is a directory"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    return "" if os.access(path.parent, os.W_OK) else f"you may not write into {path.parent}"


def _require_known(fingerprint: Fingerprint, options: Options) -> None:
    """Before minutes are spent on a profile that no cache of the store would obey. Raises
    ConfigError for one that was opened with others alone."""
    if options.store is None:
        return
    found = describe(options.store).fingerprints
    known = {Fingerprint.of(each.description).model_hex() for each in found}
    if known and fingerprint.model_hex() not in known:
        raise ConfigError(
            f"{options.store} was opened with other models, and never with this one in this "
            "dtype: name the store's by --model and --dtype, or write there all the same by "
            f"--out {options.out}"
        )


def run(options: Options) -> GuardRun:
    """Measure, and write the profile. Raises ConfigError without a model, or for one that the
    store does not know, and a store's errors."""
    source = model_source.find(options.model)
    with stages(f"model: {source.name}, from {source.origin}") as shown:
        model, tokenizer = model_source.load(source, shown.say, dtype=options.dtype)
        geometry = geometry_of(model)
        # Retrieval shares one context, and what a store keeps of answers is small.
        contexts = 3 * options.seeds * (options.tokens + 512) * geometry.token_bytes
        with (
            TemporaryDirectory(prefix="kvtier-guard-") as folder,
            kvtier.open(
                Path(folder) / "kv",
                model=model,
                placement="keys",
                region=2 * contexts + SPACE_BYTES,
            ) as store,
        ):
            _require_known(store.fingerprint, options)
            runner = Runner(store, model, tokenizer, shown)
            found = [each for name in TASKS for each in runner.measure(name, options)]
            fingerprint = store.fingerprint.model_hex()
    layers = len(geometry.layers)
    last = {each.task: each for each in found}
    tasks = {name: _task_budget(each, layers) for name, each in last.items()}
    profile = Profile(
        fingerprint=fingerprint,
        name=source.name,
        layers=layers,
        tokens=options.tokens,
        seeds=options.seeds,
        budget=safest([each.budget for each in tasks.values()]),
        tasks=tasks,
    )
    if options.out is not None:
        profile.save(options.out)
    return GuardRun(profile, tuple(found), options.out)


def _task_budget(found: Measured, layers: int) -> TaskBudget:
    budget = Budget((found.budget,) * layers) if found.is_good else None
    return TaskBudget(budget, found.kl, found.kl_max, found.kept, found.fields)


@dataclass(slots=True)
class Runner:
    """Puts tasks to a model, through a store opened for it."""

    store: Store
    model: Any
    tokenizer: Any
    shown: Stages

    def measure(self, name: str, options: Options) -> list[Measured]:
        """The budgets in turn, up to the first good one."""
        self.shown.say(f"{name}: full attention")
        asked = [
            guard_tasks.encode(
                guard_tasks.make(name, options.tokens, seed, self._count), self.tokenizer
            )
            for seed in range(1, options.seeds + 1)
        ]
        full = [self._full(each) for each in asked]
        found: list[Measured] = []
        for budget in options.budgets:
            self.shown.say(f"{name}: {budget:.4g} of the context")
            before = self.store.sparse_counts()
            sparse = [self._sparse(each, budget) for each in asked]
            counts = self.store.sparse_counts().since(before)
            spent = budget, counts.pages_chosen / max(counts.pages_to_choose, 1)
            found.append(judge(name, spent, asked, list(zip(full, sparse, strict=True))))
            if found[-1].is_good:
                break
        return found

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _full(self, asked: Asked) -> torch.Tensor:
        """Logits [answer, vocabulary] of the answer's tokens, each given those before it; the
        prompt is in the store then."""
        prompt = torch.tensor([asked.prompt])
        with TieredCache(self.store, prompt) as cache:
            # Up to what is found again: a Segment that a view cuts would be read nearly whole.
            behind = prompt.shape[1] - 1
            for at in range(cache.get_seq_length(), behind, PREFILL_TOKENS):
                self._read(cache, asked.prompt[at : min(at + PREFILL_TOKENS, behind)])
            cache.save("prompt")
            first = self._read(cache, asked.prompt[-1:])
            return torch.cat([first, self._read(cache, asked.answer)])[:-1]

    def _sparse(self, asked: Asked, budget: float) -> torch.Tensor:
        """The same, as it is decoded at a budget."""
        prompt = torch.tensor([asked.prompt])
        with TieredCache(self.store, prompt, plan="load", budget=budget, guard="off") as cache:
            logits = [self._read(cache, asked.prompt[cache.get_seq_length() :])[-1:]]
            logits += [self._read(cache, [each]) for each in asked.answer[:-1]]
        return torch.cat(logits)

    def _read(self, cache: TieredCache, ids: list[int]) -> torch.Tensor:
        """Logits [n, vocabulary] of what follows each of these ids."""
        at = cache.get_seq_length()
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.arange(at, at + len(ids))[None],
                cache=cache,
                use_cache=True,
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits


def judge(
    name: str,
    spent: tuple[float, float],
    asked: Sequence[Asked],
    logits: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Measured:
    """What the answers [answer, vocabulary] of full attention and of a budget come to. spent: the
    budget, and what was read."""
    # The first token follows from the prompt, which both read exactly.
    nats = torch.cat([divergence(full[1:], sparse[1:]) for full, sparse in logits])
    kept = fields = 0
    scores: list[tuple[float, float]] = []
    for each, (full, sparse) in zip(asked, logits, strict=True):
        both = right_parts(each, full), right_parts(each, sparse)
        values = [
            pair for part, *pair in zip(each.parts, *both, strict=True) if part.role == "value"
        ]
        fields += sum(wanted for wanted, _ in values)
        kept += sum(wanted and found for wanted, found in values)
        score: Callable[[Sequence[bool]], float] = (
            guard_tasks.text2json_score if name == EXTRACTION else _right_share
        )
        scores.append((score(both[0]), score(both[1])) if name != TEXT else (0.0, 0.0))
    points = [100 * sum(each) / len(scores) for each in zip(*scores, strict=True)]
    score_full, found_score = (None, None) if name == TEXT else points
    return Measured(
        task=name,
        budget=spent[0],
        read=spent[1],
        kl=_finite(nats.mean()),
        kl_max=_finite(nats.max()),
        kept=kept,
        fields=fields,
        score=found_score,
        score_full=score_full,
    )


def right_parts(asked: Asked, logits: torch.Tensor) -> list[bool]:
    """For each part whether all its tokens are the most probable ones, given what is right before
    them."""
    hits = logits.argmax(-1) == torch.tensor(asked.answer)
    return [bool(hits[part.first : part.behind].all()) for part in asked.parts]


def _right_share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)


def _finite(nats: torch.Tensor) -> float:
    value = float(nats)
    return min(max(value, 0.0), NATS_MAX) if math.isfinite(value) else NATS_MAX


def run_text(found: GuardRun) -> str:
    """Every budget that was tried, what follows, and where it was written."""
    heads = ("task", "budget", "read", "KL, mean", "KL, most", "fields kept", "score", "full", "")
    rows = [
        (
            each.task,
            f"{each.budget:.4g}",
            f"{each.read:.3f}",
            f"{each.kl:.4f}",
            f"{each.kl_max:.3f}",
            f"{each.kept} of {each.fields}" if each.fields else "-",
            "-" if each.score is None else f"{each.score:.0f}",
            "-" if each.score_full is None else f"{each.score_full:.0f}",
            "kept" if each.is_good else "lost",
        )
        for each in found.measured
    ]
    lines = [table(heads, rows), ""]
    for name in found.collapsed:
        lines.append(f"{name}: lost at every budget that was tried; it needs exact attention")
    if any(each.read > READ_FACTOR_MAX * each.budget for each in found.measured):
        lines.append(
            "read is far more than the budget: the last tokens lie on many Pages of so short a "
            "context, and are always read; measure with --tokens as long as yours"
        )
    budget = found.profile.budget
    lines.append(f"budget for all tasks: {'exact' if budget is None else f'{budget.share:.4g}'}")
    lines.append(
        "not written: --store DIR or --out FILE keeps it"
        if found.path is None
        else f"written to {found.path}"
    )
    return "\n".join(lines)
