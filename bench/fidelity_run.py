"""One measurement of bench/fidelity.py after the other, and the file in which they are kept.

A Record is a line of JSON. What was measured by the same code is not measured again, so a run that
was cut short goes on where it was.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.fidelity_attention import RECENT_TOKENS, SimulatedLayer, read
from bench.fidelity_policies import POLICIES, Layouts, kept, layouts_of
from bench.fidelity_tasks import DOCS, TEXT, Suffix, Task, encode, make_task
from kvtier.kernels.divergence import divergence
from kvtier.tiering.geometry import PAGE_TOKENS
from kvtier.tools.bench_form import commit

ROOT = Path(__file__).resolve().parents[1]
FREE = "free"
"""The task of answers that run free."""
SOURCES = (
    "bench/fidelity_*.py",
    "kernels/clustering.py",
    "kernels/digests.py",
    "kernels/divergence.py",
    "kernels/packed_codes.py",
    "kernels/page_*.py",
    "kernels/paged_attention.py",
    "kernels/rival_selection.py",
    "kernels/rotary.py",
    "kernels/rotation.py",
    "kernels/selection.py",
    "kernels/sketch.py",
    "tools/task_texts.py",
)
"""What a figure of the simulation depends on."""
SOURCES_OF = {
    TEXT: tuple(f"docs/{name}" for name in DOCS),
    FREE: ("kernels/*.py", "tiering/**/*.py"),
}
"""What those of single tasks depend on besides."""
TOKENS_MIN = 8 * RECENT_TOKENS


@dataclass(frozen=True, slots=True)
class Case:
    """One context."""

    task: str
    tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Record:
    """What a policy did at a budget, over all questions of a case.

    version: of the code. context: digest of the context's ids. kl: nats, mean over the answers'
    tokens, of full attention's next-token distribution from this one's; kl_max: the largest.
    fields: how many there are; full: of these, right with full attention; kept: of those, right
    here too; correct: right here. read: share of the context's bytes, padding included.
    """

    version: str
    commit: str
    task: str
    tokens: int
    seed: int
    policy: str
    budget: float
    context: str
    context_tokens: int
    answer_tokens: int
    kl: float
    kl_max: float
    nll: float
    nll_full: float
    fields: int
    full: int
    kept: int
    correct: int
    read: float
    seconds: float


class Records:
    """The lines of a file, those of other versions of the code too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._lines = [each for line in text.splitlines() for each in _parsed(line)]
        self._is_cut = bool(text) and not text.endswith("\n")

    def find(self, **wanted: Any) -> list[dict[str, Any]]:
        """Those that have all of these values."""
        return [
            each
            for each in self._lines
            if all(each.get(name) == value for name, value in wanted.items())
        ]

    def add(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * self._is_cut + json.dumps(line) + "\n")
        self._is_cut = False
        self._lines.append(line)


@cache
def code_version(task: str) -> str:
    """Digest of the sources that figures of a task depend on, as they were when it was first asked
    for."""
    digest = hashlib.sha256()
    for pattern in (*SOURCES, *SOURCES_OF.get(task, ())):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def right_fields(logits: Tensor, suffix: Suffix) -> list[bool]:
    """For each field whether all its tokens are the most probable ones, given what is right before
    them; logits [answer, vocabulary] of the answer's tokens."""
    wanted = torch.tensor(suffix.ids[len(suffix.ids) - suffix.answer :])
    hits = logits.argmax(-1) == wanted
    return [bool(hits[first:behind].all()) for first, behind in suffix.fields]


def answer_logits(model: PreTrainedModel, layers: list[SimulatedLayer], suffix: Suffix) -> Tensor:
    """Logits [answer, vocabulary] of the answer's tokens, each given those before it."""
    return read(model, layers, suffix.ids, suffix.answer + 1)[:-1]


@dataclass(frozen=True, slots=True)
class HeldContext:
    """The context of a task, cut to whole Pages and prefilled. digest: of its ids. behind: ids that
    were cut off."""

    task: Task
    digest: str
    layouts: Layouts
    behind: list[int]


@dataclass(frozen=True, slots=True)
class Contexts:
    """Prefills contexts with one model, and keeps them in a folder."""

    model: PreTrainedModel
    tokenizer: Any
    folder: Path

    def prepare(self, case: Case) -> HeldContext:
        task = make_task(case.task, case.tokens, case.seed, self._count)
        ids = list(self.tokenizer(task.context).input_ids)
        cut = len(ids) // PAGE_TOKENS * PAGE_TOKENS
        assert cut > 2 * RECENT_TOKENS
        digest = hashlib.sha256(repr(ids[:cut]).encode()).hexdigest()[:12]
        path = self.folder / f"{case.task}-{case.tokens}-{case.seed}-{digest}.safetensors"
        layouts = layouts_of(self.model, kept(path, self.model, ids[:cut]))
        return HeldContext(task, digest, layouts, ids[cut:])

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text).input_ids)


@dataclass(slots=True)
class Prepared:
    """A case that was prefilled, and what full attention says to its suffixes."""

    case: Case
    context: str
    suffixes: list[Suffix]
    layouts: Layouts
    full: list[Tensor]


class Runner:
    """Measures with one model; keeps the contexts in a folder."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, folder: Path, records: Records
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.contexts = Contexts(model, tokenizer, folder)
        self.records = records
        self.commit = commit()

    def run(
        self, case: Case, policies: Sequence[str], budgets: Sequence[float], ends: float
    ) -> bool:
        """Measure what the records lack of this case; False: time.monotonic() passed `ends`."""
        named = {"version": code_version(case.task), **asdict(case)}
        missing = [
            (policy, budget)
            for policy in policies
            for budget in budgets
            if not self.records.find(**named, policy=policy, budget=budget)
        ]
        if not missing:
            return True
        if time.monotonic() > ends:
            return False
        prepared = self.prepare(case)
        for policy, budget in missing:
            if time.monotonic() > ends:
                return False
            record = self.measure(prepared, policy, budget)
            self.records.add(asdict(record))
            say(
                f"{case.task} {case.tokens} seed {case.seed}: {policy} {budget:.2%}: KL "
                f"{record.kl:.4f}, fields {record.kept}/{record.full}, {record.seconds:.0f} s"
            )
        return True

    def prepare(self, case: Case) -> Prepared:
        """Prefill the context; what is cut off of it goes before each question."""
        began = time.perf_counter()
        held = self.contexts.prepare(case)
        suffixes = []
        for question in held.task.questions:
            asked = encode(question, self.tokenizer)
            suffixes.append(Suffix(held.behind + asked.ids, asked.answer, asked.fields))
        full = [self._answers(held.layouts.layers(None, 1.0), each) for each in suffixes]
        say(
            f"{case.task} {case.tokens} seed {case.seed}: {held.layouts.held.tokens} tokens ready, "
            f"{time.perf_counter() - began:.0f} s"
        )
        return Prepared(case, held.digest, suffixes, held.layouts, full)

    def measure(self, prepared: Prepared, policy: str, budget: float) -> Record:
        began = time.perf_counter()
        divergences, nll, nll_full = [], [], []
        right: list[tuple[bool, bool]] = []
        chosen = there = 0
        for suffix, full in zip(prepared.suffixes, prepared.full, strict=True):
            layers = prepared.layouts.layers(POLICIES[policy], budget)
            logits = self._answers(layers, suffix)
            divergences.append(divergence(full, logits))
            nll.append(_nll(logits, suffix))
            nll_full.append(_nll(full, suffix))
            right += zip(right_fields(full, suffix), right_fields(logits, suffix), strict=True)
            for layer in layers:
                assert layer.reading is not None
                chosen += layer.reading.pages_chosen
                there += layer.reading.pages_there
        kl = torch.cat(divergences)
        return Record(
            version=code_version(prepared.case.task),
            commit=self.commit,
            **asdict(prepared.case),
            policy=policy,
            budget=budget,
            context=prepared.context,
            context_tokens=prepared.layouts.held.tokens,
            answer_tokens=len(kl),
            kl=float(kl.mean()),
            kl_max=float(kl.max()),
            nll=float(torch.cat(nll).mean()),
            nll_full=float(torch.cat(nll_full).mean()),
            fields=len(right),
            full=sum(full for full, _ in right),
            kept=sum(full and sparse for full, sparse in right),
            correct=sum(sparse for _, sparse in right),
            read=chosen / there,
            seconds=time.perf_counter() - began,
        )

    def _answers(self, layers: list[SimulatedLayer], suffix: Suffix) -> Tensor:
        return answer_logits(self.model, layers, suffix)


def cases(tasks: Sequence[str], lengths: Sequence[int], seeds: int) -> Iterator[Case]:
    """All of one seed before those of the next, so that a run that is cut short has whole seeds."""
    for seed in range(1, seeds + 1):
        for tokens in lengths:
            for task in tasks:
                yield Case(task, tokens, seed)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parsed(line: str) -> list[dict[str, Any]]:
    """Nothing of a line that a killed process left unfinished: it is measured again."""
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def _nll(logits: Tensor, suffix: Suffix) -> Tensor:
    wanted = torch.tensor(suffix.ids[len(suffix.ids) - suffix.answer :])
    return -logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
