"""kvtier demo: the same questions with and without stored KV, over two processes, checked.

The first process answers question 1 from nothing and saves; it ends. The second one restores
from the drive, answers questions 2 and 3. Both compare every token with DynamicCache.
"""

from dataclasses import asdict, dataclass
from typing import Any

from kvtier.tools import demo_options, model_source
from kvtier.tools.demo_options import DemoOptions
from kvtier.tools.demo_protocol import Answered, Outcome, Phase, Task
from kvtier.tools.demo_workers import run_worker
from kvtier.tools.model_source import ModelSource
from kvtier.tools.stages import Stages, stages
from kvtier.tools.system_errors import typed


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The demo's figures. Sizes are bytes, times are seconds to the first new token.

    prompt_tokens, prefill_s: of question 1, computed from nothing. restore_s: of question 2, the
    first one after the restart (reading the stored prefix from the drive and computing the
    question's own tokens). kv_bytes: keys and values of question 1's prompt.
    """

    model: str
    document: str
    prompt_tokens: int
    prefill_s: float
    restore_s: float
    speedup: float
    identical: bool
    device_bytes: int
    kv_bytes: int
    page_cache_bytes: int
    engine: str
    direct_io: bool
    direct_io_reason: str
    hot_bytes_max: int
    hot_limit_bytes: int
    region_path: str
    threads: int
    questions: tuple[Answered, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def page_cache_used(self) -> bool:
        """Whether the kernel holds bytes of the region though direct I/O was promised."""
        return self.direct_io and self.page_cache_bytes > 0

    def broken_promises(self) -> list[str]:
        """What is not as promised, in words; empty after a good run."""
        broken = []
        for number, question in enumerate(self.questions, start=1):
            if not question.identical:
                broken.append(f"question {number}: tokens differ from those of DynamicCache")
        if self.page_cache_used:
            broken.append(
                f"the page cache holds {self.page_cache_bytes} bytes of the region; another "
                "process that reads the file (grep, a backup, an indexer) looks the same: "
                "run the demo again without it"
            )
        if self.device_bytes < self.kv_bytes:
            broken.append(
                f"the drive holds {self.device_bytes} bytes, fewer than the {self.kv_bytes} bytes "
                "of the prompt's keys and values"
            )
        if self.hot_bytes_max > self.hot_limit_bytes:
            broken.append(f"{self.hot_bytes_max} bytes hot, over {self.hot_limit_bytes} bytes")
        if not all(question.restored_tokens for question in self.questions[1:]):
            broken.append("nothing was restored after the restart")
        return broken


def run(options: DemoOptions) -> DemoResult:
    """Run the demo and write its chart.

    Raises KvtierError if a part of it cannot run; what can be refused is refused before a model
    is loaded and before anything is made or removed.
    """
    demo_options.check(options)
    source = model_source.find(options.model)
    with demo_options.lock(options):
        if options.store is None:
            demo_options.remove_old_store(options.store_path)
        with typed(f"remove the old log {options.log_path}"):
            options.log_path.unlink(missing_ok=True)
        result = _run_phases(options, source)
        from kvtier.tools.chart import draw

        with typed(f"write the chart {options.chart_path}"):
            draw(result, options.chart_path)
    return result


def _run_phases(options: DemoOptions, source: ModelSource) -> DemoResult:
    with stages(f"model: {source.name}, from {source.origin}") as shown:
        if not model_source.is_prepared(source):
            shown.say("starting a process that converts the model")
            _work("prepare", options, shown)
        shown.say("starting the first process")
        cold = _work("cold", options, shown)
        shown.say("that process has ended; a new one starts")
        restored = _work("restored", options, shown)
    assert cold is not None
    assert restored is not None
    return combine(cold, restored)


def combine(cold: Outcome, restored: Outcome) -> DemoResult:
    """Join what both processes found; the store's figures are those after the restart."""
    questions = cold.answers + restored.answers
    prefill_s = questions[0].first_token_s
    restore_s = questions[1].first_token_s
    return DemoResult(
        model=cold.model,
        document=cold.document,
        prompt_tokens=questions[0].prompt_tokens,
        prefill_s=prefill_s,
        restore_s=restore_s,
        speedup=prefill_s / restore_s,
        identical=all(question.identical for question in questions),
        device_bytes=restored.device_bytes,
        kv_bytes=cold.kv_bytes,
        page_cache_bytes=restored.page_cache_bytes,
        engine=restored.engine,
        direct_io=restored.direct_io,
        direct_io_reason=restored.direct_io_reason,
        hot_bytes_max=max(cold.hot_bytes_max, restored.hot_bytes_max),
        hot_limit_bytes=restored.hot_limit_bytes,
        region_path=restored.region_path,
        threads=restored.threads,
        questions=questions,
    )


def _work(phase: Phase, options: DemoOptions, shown: Stages) -> Outcome | None:
    task = Task(
        phase=phase,
        model=options.model,
        document=None if options.document is None else str(options.document),
        store=str(options.store_path),
        region=options.region,
        hot=options.hot,
        force=options.force,
    )
    return run_worker(task, options.log_path, shown)
