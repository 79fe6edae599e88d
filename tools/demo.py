"""kvtier demo: the same questions with and without stored KV, over two processes, checked.

The first process answers question 1 from nothing and saves; it ends. The second one restores
from the drive, answers questions 2 and 3. Both compare every token with DynamicCache.
"""

import importlib.util
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.tiering.store_files import OWN_FILES, SETTINGS
from kvtier.tools import model_source
from kvtier.tools.demo_protocol import Answered, Outcome, Phase, Task
from kvtier.tools.demo_workers import run_worker
from kvtier.tools.stages import Stages, stages

DEFAULT_FOLDER = Path("demo-out")
DEFAULT_REGION = "1GiB"
DEFAULT_HOT = "256MiB"
PACKAGES = ("transformers", "gguf", "matplotlib", "accelerate")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user asked for; None where the demo chooses."""

    model: str | None = None
    document: Path | None = None
    store: Path | None = None
    region: str = DEFAULT_REGION
    hot: str = DEFAULT_HOT
    force: bool = False
    chart: Path | None = None

    @property
    def chart_path(self) -> Path:
        return self.chart or DEFAULT_FOLDER / "demo.png"


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

    def broken_promises(self) -> list[str]:
        """What is not as promised, in words; empty after a good run."""
        broken = []
        for number, question in enumerate(self.questions, start=1):
            if not question.identical:
                broken.append(f"question {number}: tokens differ from those of DynamicCache")
        if self.direct_io and self.page_cache_bytes:
            broken.append(f"the page cache holds {self.page_cache_bytes} bytes of the region")
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
    """Run the demo and write its chart. Raises KvtierError if a part of it cannot run."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {', '.join(missing)}: install them with pip install 'kvtier[hf]'"
        )
    source = model_source.find(options.model)
    folder = options.store or DEFAULT_FOLDER / "store"
    if options.store is None:
        remove_old_store(folder)
    options.chart_path.parent.mkdir(parents=True, exist_ok=True)
    DEFAULT_FOLDER.mkdir(exist_ok=True)
    log = DEFAULT_FOLDER / "worker.log"
    log.unlink(missing_ok=True)
    with stages(f"model: {source.name}, from {source.origin}") as shown:
        if not model_source.is_prepared(source):
            shown.say("starting a process that converts the model")
            _work("prepare", options, folder, log, shown)
        shown.say("starting the first process")
        cold = _work("cold", options, folder, log, shown)
        shown.say("that process has ended; a new one starts")
        restored = _work("restored", options, folder, log, shown)
    assert cold is not None
    assert restored is not None
    result = combine(cold, restored)
    from kvtier.tools.chart import draw

    draw(result, options.chart_path)
    return result


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


def remove_old_store(folder: Path) -> None:
    """Delete the store that an earlier demo left; refuse to delete anything else."""
    if not folder.exists():
        return
    foreign = {path.name for path in folder.iterdir()} - OWN_FILES - {SETTINGS}
    if foreign:
        raise ConfigError(
            f"{folder} is not a store of an earlier demo (found {sorted(foreign)[0]!r} in it): "
            "move it away, or name another folder with --store"
        )
    shutil.rmtree(folder)


def _work(
    phase: Phase, options: DemoOptions, folder: Path, log: Path, shown: Stages
) -> Outcome | None:
    task = Task(
        phase=phase,
        model=options.model,
        document=None if options.document is None else str(options.document),
        store=str(folder),
        region=options.region,
        hot=options.hot,
        force=options.force,
    )
    return run_worker(task, log, shown)
