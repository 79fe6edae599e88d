"""Does the planner choose the fastest way? Load, recompute and both at once are each measured over
drives from fast to very slow, and then what the planner chooses.

Run: .venv/bin/python bench/plan.py [--json PATH] [--plot PATH] [--quick]. A small random model with
a stored context; the drive is a loop device over tmpfs whose reads are throttled. Timed: from
before the cache is made until the first new token is there. The store is opened anew for each run,
so HOT is empty; the drive's rate is known to the planner from the runs before, as it is in use. The
greedy tokens of every way are compared with DynamicCache before anything is timed. The bar is the
least, over the drives, of: the fastest way measured / what was chosen (medians).
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

import kvtier
from kvtier.errors import ConfigError
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.plan_runner import PlanName
from kvtier.tools.bench_form import Bench
from kvtier.tools.bench_rig import interleave, loop_device, throttled

BAR = "planner over the measured best choice"
WAYS: tuple[PlanName, ...] = ("load", "recompute", "both")
PLANS: tuple[PlanName, ...] = (*WAYS, "auto")
HOT = "128MiB"
TOKENS, TOKENS_QUICK = 4097, 2049
NEW_TOKENS = 8
PAUSE_S = 0.4
"""Longer than the throttle's slices of 100 ms, so that each run begins with a whole one."""
REGION_BYTES = 512 << 20
SHAPE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHARES: dict[str, float | None] = {
    "unthrottled": None,
    "8x computing": 8.0,
    "as computing": 1.0,
    "1/3 of computing": 1 / 3,
    "1/10 of computing": 1 / 10,
}
"""Rates of the drive: its KV bytes per second over those that computing makes."""


@dataclass(frozen=True, slots=True)
class Rig:
    """The model, a prompt that the store in `folder` has, and the answer to it."""

    model: PreTrainedModel
    folder: Path
    ids: torch.Tensor
    answer: torch.Tensor

    def run(self, plan: PlanName, *, new_tokens: int = 1) -> tuple[float, torch.Tensor]:
        """Seconds until the first new token is there, and the tokens."""
        with kvtier.open(self.folder, model=self.model, hot=HOT) as store:
            # Memory that is touched for the first time costs as much as a fast load, or nothing,
            # as the machine has it: that is not the planner's.
            store._residency.hot.tier.pool(0).arena[:] = 0
            start = time.perf_counter()
            with TieredCache(store, self.ids, plan=plan) as cache:
                output = self.generate(cache, new_tokens)
                return time.perf_counter() - start, output

    def generate(self, cache: Any, new_tokens: int) -> torch.Tensor:
        model: Any = self.model
        output: torch.Tensor = model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            cache=cache,
            do_sample=False,
            max_new_tokens=new_tokens,
        )
        return output

    def seconds(self, plan: PlanName) -> float:
        return self.run(plan)[0]

    def check(self, plan: PlanName) -> None:
        """Raises SystemExit where the tokens are not DynamicCache's."""
        output = self.run(plan, new_tokens=NEW_TOKENS)[1]
        if not torch.equal(output, self.answer):
            raise SystemExit(f"{plan} gives other tokens than DynamicCache: nothing is timed")


def made_model() -> PreTrainedModel:
    """Random weights, large enough that the next token depends on the whole context."""
    kind: Any = Qwen2ForCausalLM
    model = kind._from_config(Qwen2Config(**SHAPE))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12)
    model.generation_config.pad_token_id = 0
    made: PreTrainedModel = model.eval()
    return made


@contextmanager
def rig(tokens: int, device: str) -> Iterator[Rig]:
    """A store on the device that holds the prompt but for its last token."""
    model = made_model()
    ids = torch.randint(1, 2048, (1, tokens), generator=torch.Generator().manual_seed(3))
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        path = Path(folder) / "kv"
        ready = Rig(model, path, ids, ids)
        answer = ready.generate(DynamicCache(config=model.config), NEW_TOKENS)
        with (
            kvtier.open(path, model=model, hot=HOT, region=device, force=True) as store,
            TieredCache(store, ids) as cache,
            torch.inference_mode(),
        ):
            model(input_ids=ids[:, :-1], cache=cache, logits_to_keep=1)
            cache.save("prompt")
        yield Rig(model, path, ids, answer)


def measure(bench: Bench, ready: Rig, device: str, rounds: int) -> dict[str, float]:
    """The figure of each drive: the fastest way over what the planner chose."""
    for plan in PLANS:
        ready.check(plan)
    computing_s = statistics.median(ready.seconds("recompute") for _ in range(3))
    kv_bytes = ready.ids.shape[1] * 8 * 2 * 4 * 32 * 4
    figures: dict[str, float] = {}
    rows = []
    for name, share in SHARES.items():
        rate = None if share is None else int(share * kv_bytes / computing_s)
        calls: dict[str, Callable[[], float]] = {
            plan: partial(ready.seconds, plan) for plan in PLANS
        }
        if share is not None and share < 0.2:
            # Loading all would take long: what is left out cannot be the fastest.
            del calls["load"]
        limits = {} if rate is None else {device: rate}
        with throttled(limits):
            # What the planner knows of the drive is what it saw in the last minute.
            ready.seconds("both" if "load" not in calls else "load")
            # A load of milliseconds varies by as much as it takes, so it is repeated more often.
            is_fast = share is None or share > 4
            found = interleave(calls, rounds=3 * rounds if is_fast else rounds, pause_s=PAUSE_S)
        medians = {plan: statistics.median(values) for plan, values in found.items()}
        chosen = medians.pop("auto")
        best = min(medians, key=lambda each: medians[each])
        figures[name] = medians[best] / chosen
        for way, values in found.items():
            bench.samples(f"{name}: {way}", values, unit="s")
        shown = [f"{medians[plan]:.2f}" if plan in medians else "-" for plan in WAYS]
        mbps = "-" if rate is None else f"{rate / 1e6:.1f}"
        rows.append([name, mbps, *shown, f"{chosen:.2f}", best, f"{figures[name]:.2f}"])
    bench.table(
        f"seconds until the first token, {ready.ids.shape[1]:,} tokens",
        ["drive", "MB/s", *WAYS, "chosen", "fastest way", "fastest/chosen"],
        rows,
    )
    return figures


def main() -> int:
    bench = Bench("plan", __doc__)
    options = bench.options()
    tokens = TOKENS_QUICK if options.quick else TOKENS
    # Two threads of torch that wait for each other would measure what else the machine does.
    torch.set_num_threads(1)
    try:
        with loop_device(None, REGION_BYTES) as device, rig(tokens, device) as ready:
            figures = measure(bench, ready, device, 4 if options.quick else 7)
    except ConfigError as error:
        bench.missing(BAR, str(error))
        return bench.finish()
    bench.note("The bar is that of the drive where the planner does worst.")
    bench.bar(BAR, min(figures.values()), bar=0.90, aim=0.97, unit="x")
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
