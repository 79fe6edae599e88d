"""Answers that run free, through a store: generated at a budget, compared with full attention's.

The question is read exactly, as it is in use; what is generated reads what the budget allows.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import DynamicCache

import kvtier
from bench.fidelity_run import FREE, Case, Runner, code_version, say
from bench.fidelity_tasks import JSON, RETRIEVAL, make_task
from kvtier.tiering.adapters.huggingface import TieredCache

TASKS = (JSON, RETRIEVAL)
NEW_TOKENS = 96
STORE_SPACE = 3
"""Bytes of the store's region and of HOT, in bytes of the prompt's KV."""


def prompts(count: int, tokens: int) -> Iterator[Case]:
    """So many cases, of other seeds than those of what is teacher-forced."""
    for index in range(count):
        yield Case(TASKS[index % len(TASKS)], tokens, 1001 + index // len(TASKS))


def free_case(case: Case) -> dict[str, Any]:
    """As records name it: `asked` is the task of the prompt."""
    return {**asdict(case), "task": FREE, "asked": case.task}


class FreeRunner:
    """Measures with the model of a Runner, and keeps its lines among that one's records."""

    def __init__(self, runner: Runner, new_tokens: int = NEW_TOKENS) -> None:
        self.runner = runner
        self.new_tokens = new_tokens

    def run(self, case: Case, budgets: Sequence[float]) -> None:
        """Measure what the records lack of this prompt."""
        records = self.runner.records
        named = {
            **free_case(case),
            "version": code_version(FREE),
            "new_tokens": self.new_tokens,
        }
        missing = [each for each in budgets if not records.find(**named, budget=each)]
        if not missing:
            return
        began = time.perf_counter()
        ids = self._ids(case)
        full = self._generate(ids, DynamicCache(config=self.runner.model.config))
        with TemporaryDirectory(prefix="kvtier-fidelity-") as folder:
            found = self._through_store(ids, Path(folder) / "kv", missing)
        for budget, answer in found.items():
            same = same_tokens(answer, full)
            line = {
                "commit": self.runner.commit,
                **named,
                "policy": "store",
                "budget": budget,
                "context_tokens": ids.shape[1],
                "identical": answer == full,
                "same_tokens": same,
                "full_tokens": len(full),
                "seconds": time.perf_counter() - began,
            }
            records.add(line)
            say(f"free {case.task} seed {case.seed} {budget:.2%}: same for {same}/{len(full)}")

    def _ids(self, case: Case) -> torch.Tensor:
        """The prompt, int64 [1, tokens]: context and the last question of the task."""
        tokenizer = self.runner.tokenizer
        task = make_task(
            case.task, case.tokens, case.seed, lambda text: len(tokenizer(text).input_ids)
        )
        return torch.tensor([tokenizer(task.context + task.questions[-1].text).input_ids])

    def _through_store(
        self, ids: torch.Tensor, folder: Path, budgets: Sequence[float]
    ) -> dict[float, list[int]]:
        """What is answered at each budget, from a store that has the prompt."""
        model: Any = self.runner.model
        config = model.config
        width = config.hidden_size // config.num_attention_heads
        row_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * width * 4
        space = STORE_SPACE * row_bytes * (ids.shape[1] + self.new_tokens) + (64 << 20)
        answers = {}
        with kvtier.open(folder, model=model, region=space, hot=space, placement="keys") as store:
            with TieredCache(store, ids) as cache, torch.inference_mode():
                model(input_ids=ids[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)
                cache.save("prompt")
            for budget in budgets:
                with TieredCache(store, ids, budget=budget, guard="off") as cache:
                    answers[budget] = self._generate(ids, cache)
        return answers

    def _generate(self, ids: torch.Tensor, cache: Any) -> list[int]:
        """The greedy answer, without the prompt."""
        model: Any = self.runner.model
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            do_sample=False,
            max_new_tokens=self.new_tokens,
        )
        answer: list[int] = output[0, ids.shape[1] :].tolist()
        return answer


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers have in common, from the first one on."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
