"""Answers that run free by a policy, with the exact step beside each sparse one.

The prompt is read exactly, as a TieredCache reads it; what is generated reads the context by a
policy, and goes on from its own tokens and their KV: the history is the sparse run's own. Every
step is also read exactly on that history, as an audit would read it, and nothing of that reading
is kept. So what is recorded is what audits would find if all steps were audited and none of them
changed the answer. All runs of a context go through the model together, a token of each at a time.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from bench.fidelity_attention import (
    PluggedLayer,
    Reading,
    SimulatedLayer,
    budget_bytes,
    masked_attention,
    read,
)
from bench.fidelity_policies import POLICIES, Layouts
from bench.fidelity_run import Case, Contexts, Records, code_version, say
from bench.fidelity_tasks import JSON, Question
from kvtier.kernels.divergence import divergence
from kvtier.kernels.paged_attention import merge
from kvtier.tiering.geometry import PAGE_TOKENS
from kvtier.tools.bench_form import commit

FULL = "full"
"""The policy of runs that read everything."""
NEW_TOKENS = 96
FORM = 1
"""Of the records. Raised by hand where this file decodes otherwise than it did, so that runs are
made anew."""
JSON_KEYS = ("name", "age", "job", "city", "badge", "salary")
PAIR = re.compile(rf'"({"|".join(JSON_KEYS)})"\s*:\s*(?:"([^"\n]*)"|(\d+)(?!\d))')
"""A key and its value, in quotes or as a number."""


@dataclass(slots=True)
class Stream:
    """One layer of one run: keys, values [kv_heads, capacity, width], of which `held` count, and
    how it reads the context; None: in full."""

    keys: Tensor
    values: Tensor
    held: int
    reading: Reading | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, exactly: bool) -> Tensor:
        """query [q_heads, 1, Dk] of the token behind what is held, key and value [kv_heads, 1,
        width] of that token: [q_heads, 1, Dv]. What it was read with is overwritten by the next."""
        self.keys[:, self.held : self.held + 1] = key
        self.values[:, self.held : self.held + 1] = value
        keys, values = self.keys[:, : self.held + 1], self.values[:, : self.held + 1]
        if exactly or self.reading is None:
            out: Tensor = scaled_dot_product_attention(
                query[None], keys[None], values[None], enable_gqa=True
            )
            return out[0]
        return attend_once(self.reading, query, keys, values)


def attend_once(reading: Reading, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one query [q_heads, 1, Dk] by a reading, to keys and values [kv_heads, tokens,
    width]: the Pages that it chooses of the context, and all tokens behind it."""
    terms = reading.terms
    found = reading.selector.select(query[:, 0], budget_bytes(terms, reading.budget))
    reading.pages_chosen += int(found.chosen.sum())
    reading.pages_there += found.chosen.numel()
    context = found.chosen.repeat_interleave(PAGE_TOKENS, 1)
    behind = torch.ones(len(keys), keys.shape[1] - context.shape[1], dtype=torch.bool)
    seen = torch.cat((context, behind), 1)[:, None]
    part = masked_attention(query, keys, values, seen, terms.scale)
    return part.out if found.unread is None else merge([part, found.unread]).out


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch: the run, and whether it is the exact reading beside a sparse one."""

    run: int
    exactly: bool


class BatchLayer(PluggedLayer):  # type: ignore[no-untyped-call]
    """A layer of several runs that go through the model together, a token of each at a time."""

    def __init__(self, streams: list[Stream]) -> None:
        super().__init__()
        self.streams = streams
        self.rows: list[Row] = []

    def attend(
        self,
        query: Tensor,
        chunk: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        """[rows, 1, q_heads, Dv]. Exact rows come before the sparse ones of their runs, so that
        what stays behind is the sparse reading's."""
        assert attention_mask is None
        assert softcap is None
        assert query.shape[2] == 1
        outs = []
        for index, row in enumerate(self.rows):
            key, value = chunk[0][index], chunk[1][index]
            outs.append(self.streams[row.run].attend(query[index], key, value, row.exactly))
        return torch.stack(outs).transpose(1, 2)

    def go_on(self) -> None:
        """Keep what was read last in each run of the batch."""
        for run in {row.run for row in self.rows}:
            self.streams[run].held += 1

    def get_seq_length(self) -> int:
        return 0


@dataclass(slots=True)
class Answer:
    """What a run said, and what audits of all its steps would find.

    said: its tokens. divergences: for each step from 1 on, nats. margins: by how much its best
    token is more probable than the second. differs: whether its best token is another than the
    exact one. Empty for runs that read everything.
    """

    said: list[int]
    divergences: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    differs: list[bool] = field(default_factory=list)

    def note(self, sparse: Tensor, exact: Tensor) -> None:
        """Logits [vocabulary] of a step."""
        self.divergences.append(float(divergence(exact[None], sparse[None])[0]))
        best = sparse.softmax(-1).topk(2).values
        self.margins.append(float(best[0] - best[1]))
        self.differs.append(int(sparse.argmax()) != int(exact.argmax()))


@dataclass(slots=True)
class Run:
    """An answer on its way: its layers, the position of the token that it reads next."""

    policy: str
    budget: float
    streams: list[Stream]
    position: int
    answer: Answer


def begin(
    model: PreTrainedModel,
    layouts: Layouts,
    question: list[int],
    policies: Sequence[tuple[str, float]],
    new_tokens: int,
) -> list[Run]:
    """Runs of policies, each with its budget, behind a context and a question, ids, that is read
    exactly: all have the same first token."""
    exact = layouts.layers(None, 1.0)
    first = int(read(model, exact, question, 1)[0].argmax())
    at = layouts.held.tokens + len(question)
    runs = []
    for name, budget in policies:
        layers = layouts.layers(None if name == FULL else POLICIES[name], budget)
        streams = [
            _stream(one, other, new_tokens) for one, other in zip(layers, exact, strict=True)
        ]
        runs.append(Run(name, budget, streams, at, Answer([first])))
    return runs


def _stream(layer: SimulatedLayer, exact: SimulatedLayer, new_tokens: int) -> Stream:
    """A layer that holds its context, and what the exact one holds behind it."""
    parts = []
    for mine, theirs in zip(layer.held, exact.held, strict=True):
        room = torch.zeros(len(mine), new_tokens, mine.shape[2])
        parts.append(torch.cat((mine, theirs[:, mine.shape[1] :], room), 1))
    return Stream(parts[0], parts[1], exact.held[0].shape[1], layer.reading)


def decode(
    model: PreTrainedModel, runs: Sequence[Run], ends: frozenset[int], new_tokens: int
) -> None:
    """Let all runs answer greedily, at most so many tokens; an answer ends before one of `ends`."""
    layers = [BatchLayer([run.streams[index] for run in runs]) for index in _layers(runs)]
    active = list(range(len(runs)))
    for _ in range(new_tokens - 1):
        rows = [Row(run, True) for run in active if runs[run].policy != FULL]
        rows += [Row(run, False) for run in active]
        by_row = dict(zip(rows, _batch(model, layers, rows, runs), strict=True))
        for index in tuple(active):
            run, sparse = runs[index], by_row[Row(index, False)]
            exact = by_row.get(Row(index, True))
            if exact is not None:
                run.answer.note(sparse, exact)
            run.position += 1
            chosen = int(sparse.argmax())
            if chosen in ends:
                active.remove(index)
            else:
                run.answer.said.append(chosen)
        if not active:
            break


def _layers(runs: Sequence[Run]) -> range:
    return range(len(runs[0].streams))


def _batch(
    model: PreTrainedModel, layers: list[BatchLayer], rows: list[Row], runs: Sequence[Run]
) -> Tensor:
    """Have the model read the last token of a run in each row: logits [rows, vocabulary]."""
    for layer in layers:
        layer.rows = rows
    module: Any = model
    with torch.inference_mode():
        output = module(
            input_ids=torch.tensor([[runs[row.run].answer.said[-1]] for row in rows]),
            position_ids=torch.tensor([[runs[row.run].position] for row in rows]),
            cache=Cache(layers=list(layers)),
            use_cache=True,
            logits_to_keep=1,
        )
    for layer in layers:
        layer.go_on()
    logits: Tensor = output.logits[:, 0].float()
    return logits


# ---- fields ---------------------------------------------------------------------------------


def right_fields(task: str, question: Question, text: str) -> set[int]:
    """Which fields of a question an answer has right, wherever it says them."""
    return _json_fields(question, text) if task == JSON else _listed(question, text)


def _json_fields(question: Question, text: str) -> set[int]:
    """A record begins with its name; then its values count, whether or not it is closed."""
    found: dict[str, dict[str, str]] = {}
    record: dict[str, str] = {}
    for key, quoted, plain in PAIR.findall(text):
        value = quoted or plain
        if key == JSON_KEYS[0]:
            record = found.setdefault(value, {})
        record.setdefault(key, value)
    fields = question.fields
    return {
        index
        for index, wanted in enumerate(fields)
        if _said(found, fields[index - index % len(JSON_KEYS)], index) == wanted
    }


def _said(found: dict[str, dict[str, str]], name: str, index: int) -> str | None:
    return found.get(name, {}).get(JSON_KEYS[index % len(JSON_KEYS)])


def _listed(question: Question, text: str) -> set[int]:
    """A number counts wherever it stands: full attention often lists numbers without words."""
    return {
        index
        for index, number in enumerate(question.fields)
        if re.search(rf"(?<!\d){number}(?!\d)", text)
    }


# ---- a case ---------------------------------------------------------------------------------


def case_name(case: Case, new_tokens: int) -> dict[str, Any]:
    """What all records of a case have in common."""
    version = code_version(case.task)
    return {"version": version, "form": FORM, **asdict(case), "new_tokens": new_tokens}


class GuardRunner:
    """Decodes with one model; keeps contexts and runs in a folder."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, folder: Path, records: Records
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.contexts = Contexts(model, tokenizer, folder)
        self.records = records
        self.commit = commit()

    def run(
        self, cases: Sequence[Case], policies: Sequence[str], budget: float, new_tokens: int
    ) -> None:
        """Decode what the records lack of these cases; all their runs together."""
        began = time.perf_counter()
        wanted = [(FULL, 1.0), *((policy, budget) for policy in policies)]
        started: list[tuple[dict[str, Any], str, Question, Run]] = []
        for case in cases:
            named = case_name(case, new_tokens)
            missing = [
                each
                for each in wanted
                if not self.records.find(**named, policy=each[0], budget=each[1])
            ]
            if missing:
                held = self.contexts.prepare(case)
                question = held.task.questions[-1]
                ids = held.behind + list(self.tokenizer(question.text).input_ids)
                for run in begin(self.model, held.layouts, ids, missing, new_tokens):
                    started.append((named, case.task, question, run))
        if not started:
            return
        say(f"{len(started)} runs begin, {time.perf_counter() - began:.0f} s")
        config: Any = self.model.generation_config
        ends = config.eos_token_id
        stops = frozenset([ends] if isinstance(ends, int) else ends or ())
        decode(self.model, [run for *_, run in started], stops, new_tokens)
        for named, task, question, run in started:
            text = self.tokenizer.decode(run.answer.said)
            right = sorted(right_fields(task, question, text))
            of_run = {"policy": run.policy, "budget": run.budget, "right": right, "text": text}
            self.records.add({"commit": self.commit, **named, **of_run, **asdict(run.answer)})
            say(f"{task} seed {named['seed']} {run.policy}: fields {right}")
        say(f"{time.perf_counter() - began:.0f} s")
