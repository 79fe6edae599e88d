"""One process of the demo: `python -m kvtier.tools.demo_worker TASK`, TASK as JSON.

Separate processes show that what is restored really comes from the drive. What is timed: from
before the cache is made until the first new token is there. Not timed: loading the model,
opening the store, one unrelated forward pass that warms the model up (in both phases), and all
reference runs.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

import kvtier
from kvtier.errors import ConfigError, KvtierError
from kvtier.io.pagecache import cached_bytes
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.store import Store
from kvtier.tools import document, model_source
from kvtier.tools.demo_protocol import Answered, Outcome, Task

NEW_TOKENS = 48
SAVED_NAME = "document"
THREADS_MAX = 16

Emit = Callable[[str, Any], None]


class FirstToken(BaseStreamer):
    """Notes when the first new token is there: the second thing that generate puts."""

    def __init__(self) -> None:
        self.puts = 0
        self.at: float | None = None

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Nothing is buffered."""


def main() -> None:
    task = Task.from_json(sys.argv[1])
    # Events own the pipe to the parent: whatever else prints goes to the log (stderr).
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, content: Any) -> None:
        events.write(json.dumps({"event": event, "content": content}) + "\n")
        events.flush()

    try:
        run(task, emit)
    except KvtierError as error:
        emit("error", str(error))
        sys.exit(2)


def run(task: Task, emit: Emit) -> None:
    """Do the task; the last event is "outcome" unless the phase is prepare."""
    source = model_source.find(task.model)

    def say(words: str) -> None:
        emit("stage", words)

    if task.phase == "prepare":
        if source.paths:
            model_source.prepare(source, say)
        return
    torch.set_num_threads(thread_count())
    model, tokenizer = model_source.load(source, say)
    text = document.from_file(Path(task.document)) if task.document else document.shipped()
    rows = document.prompts(text, tokenizer)
    say("warming the model up")
    with torch.inference_mode():
        model(torch.tensor([rows[0][:16]]), use_cache=False, logits_to_keep=1)
    indices = [0] if task.phase == "cold" else list(range(1, len(rows)))
    phase = PhaseRun(task, model, tokenizer, rows, text.questions, say)
    stats, page_cache_bytes, outputs = phase.answer(indices)
    answers, kv_bytes = phase.compare(indices, outputs)
    outcome = Outcome(
        model=source.name,
        document=text.title,
        threads=torch.get_num_threads(),
        answers=answers,
        kv_bytes=kv_bytes,
        device_bytes=stats.device_bytes,
        page_cache_bytes=page_cache_bytes,
        engine=stats.engine,
        direct_io=stats.direct_io,
        direct_io_reason=stats.direct_io_reason,
        hot_bytes_max=stats.hot_bytes_max,
        hot_limit_bytes=stats.hot_limit_bytes,
        region_path=str(stats.region_path),
    )
    emit("outcome", asdict(outcome))


class PhaseRun:
    """The questions of one phase: first all answers through the store, then all references."""

    def __init__(
        self,
        task: Task,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rows: list[list[int]],
        questions: tuple[str, ...],
        say: model_source.Progress,
    ) -> None:
        self.task = task
        self.model = model
        self.tokenizer = tokenizer
        self.rows = rows
        self.questions = questions
        self.say = say
        self.greedy = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=model.generation_config.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    def answer(self, indices: list[int]) -> tuple[Any, int, list[tuple[list[int], float, int]]]:
        """Return the store's figures, page cache bytes, and per question: tokens, s, restored."""
        cold = self.task.phase == "cold"
        outputs = []
        self.say("making the store" if cold else "opening the store again")
        with kvtier.open(
            self.task.store,
            model=self.model,
            region=self.task.region,
            hot=self.task.hot,
            force=self.task.force and cold,
        ) as store:
            for index in indices:
                how = "computing the whole prompt" if cold else "restoring from the drive"
                self.say(f"question {index + 1} of {len(self.rows)}: {how}")
                outputs.append(self._ask(store, self.rows[index], save=cold))
            stats = store.stats()
            page_cache_bytes = cached_bytes(str(stats.region_path))
        return stats, page_cache_bytes, outputs

    def _ask(self, store: Store, row: list[int], *, save: bool) -> tuple[list[int], float, int]:
        ids = torch.tensor([row])
        clock = FirstToken()
        start = time.perf_counter()
        with TieredCache(store, ids) as cache:
            restored = cache.restored_tokens
            if save and restored:
                raise ConfigError(
                    f"the store {self.task.store} already holds {restored} of the {len(row)} "
                    "tokens of the prompt, so the first question would not start from nothing. "
                    "Give --store an empty or new folder"
                )
            output = self._generate(ids, cache, clock)
            assert clock.at is not None
            if save:
                self.say("saving to the drive")
                cache.save(SAVED_NAME, tokens=output)
        return output[0].tolist(), clock.at - start, restored

    def compare(
        self, indices: list[int], outputs: list[tuple[list[int], float, int]]
    ) -> tuple[tuple[Answered, ...], int]:
        """Run DynamicCache with attention "sdpa" on the same prompts and compare token by token.

        The prompts share their beginning, so with several of them it is computed once and the
        DynamicCache that holds it is copied for each question. Also returns the bytes of keys
        and values of question 1's prompt.
        """
        assert self.model.config._attn_implementation == "sdpa", "the store gives attention back"
        shared = document.shared_prefix(self.rows) if len(indices) > 1 else 0
        base = DynamicCache(config=self.model.config)
        if shared:
            self.say("checking against DynamicCache: computing the document")
            with torch.inference_mode():
                self.model(torch.tensor([self.rows[0][:shared]]), cache=base, logits_to_keep=1)
        answers = []
        kv_bytes = 0
        for index, (tokens, seconds, restored) in zip(indices, outputs, strict=True):
            self.say(f"checking against DynamicCache: question {index + 1}")
            row = self.rows[index]
            cache = copy.deepcopy(base)
            expected = self._generate(torch.tensor([row]), cache, None)[0].tolist()
            held = held_bytes(cache)
            kv_bytes = held // cache.get_seq_length() * len(self.rows[0])
            answers.append(
                Answered(
                    question=self.questions[index],
                    answer=str(self.tokenizer.decode(tokens[len(row) :], skip_special_tokens=True)),
                    prompt_tokens=len(row),
                    restored_tokens=restored,
                    first_token_s=seconds,
                    new_tokens=len(tokens) - len(row),
                    identical=tokens == expected,
                )
            )
        return tuple(answers), kv_bytes

    def _generate(self, ids: torch.Tensor, cache: Any, clock: FirstToken | None) -> torch.Tensor:
        output = self.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            generation_config=self.greedy,
            streamer=clock,
        )
        assert isinstance(output, torch.Tensor)
        return output


def held_bytes(cache: DynamicCache) -> int:
    """Bytes of all keys and values in `cache`."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    assert len(layers) == len(cache.layers), "every layer keeps plain keys and values"
    held = 0
    for layer in layers:
        assert layer.keys is not None
        assert layer.values is not None
        held += int(layer.keys.nbytes) + int(layer.values.nbytes)
    return held


def thread_count() -> int:
    """OMP_NUM_THREADS if set, else half of the CPUs that this process may use.

    Logical CPUs come in pairs that share their arithmetic, and one thread of a team that must
    wait for a CPU holds up all others: on a busy machine of two CPUs, two threads prefilled
    between 39 and 148 tokens per second, one thread 87 to 94.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    return min(THREADS_MAX, max(1, len(os.sched_getaffinity(0)) // 2))


if __name__ == "__main__":
    main()
