"""What does offload to files do under memory pressure? Contexts take turns under a memory limit.

Run as root: .venv/bin/python bench/pressure.py [--json PATH] [--plot PATH] [--quick] [--rate MBps].
Contexts of KV lie on the drive, together larger than the memory there is. They are switched to in
turn, and a few decode steps attend over all layers of each. Everything runs in a memory group of
cgroup v1, the page cache and kvtier's own tiers included, whose limit is lowered step by step: to
what the process takes before any KV, and a share of the working set. Reads are throttled to a rate
that the disk always reaches, so that figures repeat.

- mmap: each context is a file that is mapped; attention reads the mapping.
- buffered: the file is read into a buffer at each switch; attention reads the buffer.
- kvtier: direct I/O past the page cache into its own memory; a context is restored layer by layer
  while it is attended to. HOT has the whole share: where HOT is host memory, as on every machine
  without a GPU (and by default), a HOST tier is the same memory with a copy in between. "HOT and
  HOST" shows what those copies cost: a quarter of the share for HOT, the rest for HOST.

All do the same attention with the same kernel over the same Pages, so that only how bytes get
there differs. Each runs in a process of its own, and their results are compared before times are. A
layer's latency is the time from the switch, or from the layer before, to the end of its first
attention.
"""

import json
import mmap
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.kernels.paged_attention import paged_attention
from kvtier.kernels.workspace import Workspace
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry
from kvtier.tiering.store import Store
from kvtier.tools.bench_form import Bench
from kvtier.tools.bench_rig import backing_device, memory_limit, require_root, throttled
from kvtier.tools.tier_traces import Turn, rates

MIB = 1 << 20
LAYERS, HEADS, Q_HEADS, WIDTH, TOKENS = 8, 2, 4, 64, 2048
GEOMETRY = Geometry.uniform(LAYERS, HEADS, WIDTH, dtype="float32")
PAGES = TOKENS // PAGE_TOKENS
LAYER_BYTES = GEOMETRY.token_bytes // LAYERS * TOKENS
CONTEXT_BYTES = LAYERS * LAYER_BYTES
STEPS = 2
"""Decode steps of each turn."""
MARGIN_BYTES = 8 * MIB
"""Of kvtier's share: headers, completions, bookkeeping, and what the kernel keeps for the group."""
UNLIMITED = 1 << 40
PLENTY = 1.5
RIVALS = ("mmap", "buffered")
KVTIER, HOT_AND_HOST = "kvtier", "kvtier, HOT and HOST"
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does. share_bytes: of the limit, for KV."""

    method: str
    folder: str
    contexts: int
    warm_cycles: int
    cycles: int
    share_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """cycles_s: each measured cycle of turns. layers_s: each first attention. sums: of the outputs,
    by context."""

    cycles_s: list[float]
    layers_s: list[float]
    sums: list[float]
    major_faults: int
    used_bytes: int


TakeTurn = Callable[[int], tuple[list[float], float]]
"""Makes a turn of a context: when its layers were done for the first time, and the outputs' sum."""


# ---- in the process that is measured ----------------------------------------------------------


def tokens_of(context: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(context).integers(0, 50_000, TOKENS).astype(np.uint32)


def queries() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(Q_HEADS, 1, WIDTH, generator=generator) for _ in range(LAYERS)]


def over_pools(pools_of: Callable[[int], list[torch.Tensor]]) -> TakeTurn:
    """Attention over Pages that lie in order. pools_of: a context's layers, [frames, row] each."""
    asked, workspace = queries(), Workspace()
    frames = torch.arange(HEADS * PAGES).view(HEADS, PAGES)

    def turn(context: int) -> tuple[list[float], float]:
        pools = pools_of(context)
        done, total = [], 0.0
        for step in range(STEPS):
            for query, pool in zip(asked, pools, strict=True):
                part = paged_attention(
                    query, pool, frames, (WIDTH, WIDTH), scale=WIDTH**-0.5, workspace=workspace
                )
                total += float(part.out.sum())
                if not step:
                    done.append(time.perf_counter())
        return done, total

    return turn


def as_pools(memory: Any) -> list[torch.Tensor]:
    """The layers of a context that lie in a buffer one after the other."""
    floats = torch.frombuffer(memory, dtype=torch.float32)
    return list(floats.view(LAYERS, HEADS * PAGES, -1))


def mapped(job: Job) -> TakeTurn:
    maps = []
    for context in range(job.contexts):
        with open(file_of(job.folder, context), "rb") as file:
            # Private, because torch takes no memory that cannot be written to. Nobody writes.
            maps.append(as_pools(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))
    return over_pools(lambda context: maps[context])


def buffered(job: Job) -> TakeTurn:
    memory = bytearray(CONTEXT_BYTES)
    pools = as_pools(memory)

    def read(context: int) -> list[torch.Tensor]:
        with open(file_of(job.folder, context), "rb", buffering=0) as file:
            view, at = memoryview(memory), 0
            while at < CONTEXT_BYTES:
                at += file.readinto(view[at:]) or 0
        return pools

    return over_pools(read)


def kvtier_turn(job: Job) -> TakeTurn:
    tiers = job.share_bytes - MARGIN_BYTES
    hot = tiers if job.method == KVTIER else max(tiers // 4, 2 * CONTEXT_BYTES)
    store = open_store(job.folder, hot, tiers - hot)
    asked = queries()
    ids = [tokens_of(context) for context in range(job.contexts)]

    def turn(context: int) -> tuple[list[float], float]:
        sequence = store.resume(ids[context], lazily=True)
        if sequence.length() != TOKENS:
            raise SystemExit(f"context {context} has {sequence.length()} of {TOKENS} tokens")
        done, total = [], 0.0
        for step in range(STEPS):
            for layer, query in enumerate(asked):
                total += float(store.attend(sequence, layer, query).sum())
                if not step:
                    done.append(time.perf_counter())
        store.release(sequence)
        return done, total

    return turn


def work(job: Job) -> Found:
    """Turns of all contexts, cycle after cycle."""
    torch.set_num_threads(1)
    make = {"mmap": mapped, "buffered": buffered}.get(job.method, kvtier_turn)
    turn = make(job)
    layers: list[float] = []
    cycles, sums = [0.0] * job.cycles, [0.0] * job.contexts
    faults = 0
    for cycle in range(job.warm_cycles + job.cycles):
        if cycle == job.warm_cycles:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        for context in range(job.contexts):
            start = time.perf_counter()
            done, sums[context] = turn(context)
            if cycle >= job.warm_cycles:
                cycles[cycle - job.warm_cycles] += time.perf_counter() - start
                layers += np.diff([start, *done]).tolist()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    return Found(cycles, layers, sums, faults, group_bytes())


def group_bytes() -> int:
    """What the memory group of this process uses."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == "memory":
            used = Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.usage_in_bytes"
            return int(used.read_text())
    return 0


# ---- around it --------------------------------------------------------------------------------


def file_of(folder: str, context: int) -> Path:
    return Path(folder) / f"context-{context}.kv"


def open_store(folder: str, hot: int, host: int, region: int | None = None) -> Store:
    config = Config(region, hot=hot, host=host, direct_io="required")
    fingerprint = Fingerprint.of({"bench": "pressure"})
    return Store.open(Path(folder) / "store", GEOMETRY, fingerprint, config)


def prepare(folder: str, contexts: int) -> None:
    """The same KV as files and as a store."""
    region = contexts * CONTEXT_BYTES * 5 // 4 + 64 * MIB
    with open_store(folder, 2 * CONTEXT_BYTES, 0, region) as store:
        for context in range(contexts):
            random = np.random.default_rng(context + 1000)
            rows = random.standard_normal((LAYERS, HEADS, 2, TOKENS, WIDTH), np.float32)
            sequence = store.sequence()
            for layer in range(LAYERS):
                keys, values = torch.from_numpy(rows[layer]).unbind(1)
                store.append(sequence, layer, keys, values)
            store.save(sequence, f"c{context}", tokens_of(context))
            store.release(sequence)
            # A Page holds its 16 K rows, then its 16 V rows.
            paged = rows.reshape(LAYERS, HEADS, 2, PAGES, PAGE_TOKENS, WIDTH).swapaxes(2, 3)
            with open(file_of(folder, context), "wb") as file:
                file.write(np.ascontiguousarray(paged).data)
                os.fsync(file.fileno())


def forget_pages(folder: str) -> None:
    """Take the files of a run out of the page cache, and nothing else: libraries stay."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(job: Job, limit_bytes: int) -> Found:
    forget_pages(job.folder)
    with memory_limit(limit_bytes) as group:
        done = group.run([sys.executable, __file__, "--job", json.dumps(asdict(job))])
    if done.returncode:
        raise SystemExit(f"{job.method} failed ({done.returncode}): {done.stderr[-2000:]}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def compare(found: dict[str, Found]) -> None:
    """All attended to the same."""
    expected = next(iter(found.values())).sums
    for method, each in found.items():
        off = max(abs(a - b) for a, b in zip(each.sums, expected, strict=True))
        if off > TOLERANCE:
            raise SystemExit(f"{method} attended to something else, off by {off}: not timed")


def rate(found: Found) -> float:
    """Turns per second, of the median cycle."""
    return len(found.sums) / statistics.median(found.cycles_s)


def row(share: str, method: str, found: Found) -> list[object]:
    layers = np.array(found.layers_s) * 1e3
    return [
        share,
        method,
        f"{rate(found):.2f}",
        f"{rate(found) * STEPS * CONTEXT_BYTES / 1e6:.0f}",
        f"{np.percentile(layers, 50):.2f}",
        f"{np.percentile(layers, 99):.2f}",
        found.major_faults,
        f"{found.used_bytes / MIB:.0f}",
    ]


def measure(bench: Bench, folder: str, options: Any) -> dict[float, dict[str, Found]]:
    """By share of the working set, and method."""
    contexts = 16 if options.quick else 32
    shares = [PLENTY, 0.5] if options.quick else [PLENTY, 0.75, 0.5, 0.25]
    prepare(folder, contexts)
    working_set = contexts * CONTEXT_BYTES
    methods = [*RIVALS, KVTIER, HOT_AND_HOST]
    with throttled({backing_device(folder): int(options.rate * 1e6)}):
        # What the process takes before it holds any KV, libraries and an open store included.
        base = max(
            run(Job(each, folder, 0, 0, 0, working_set), UNLIMITED).used_bytes for each in methods
        )
        found: dict[float, dict[str, Found]] = {}
        for share in shares:
            nbytes = int(share * working_set)
            cycles = 2 if options.quick else 3
            found[share] = {
                each: run(Job(each, folder, contexts, 2, cycles, nbytes), base + nbytes)
                for each in methods
            }
            compare(found[share])
    bench.note(
        f"{contexts} contexts of {CONTEXT_BYTES // MIB} MiB take turns of {STEPS} steps; reads at "
        f"{options.rate} MB/s; before any KV a process takes {base // MIB} MiB, which every limit "
        "has on top"
    )
    return found


def report(bench: Bench, found: dict[float, dict[str, Found]]) -> None:
    rows = []
    for share, by_method in found.items():
        shown = "plenty" if share == PLENTY else f"{share:.0%}"
        for method, each in by_method.items():
            rows.append(row(shown, method, each))
            bench.samples(f"{method}, {shown}: cycles", each.cycles_s, unit="s")
    heads = ["limit", "method", "turns/s", "MB/s attended", "layer p50 ms", "p99 ms"]
    bench.table("turns", [*heads, "major faults", "MiB used"], rows)

    def ratio(share: float) -> float:
        by_method = found[share]
        return rate(by_method[KVTIER]) / max(rate(by_method[each]) for each in RIVALS)

    name = "memory limit 50 % of the working set, kvtier over the page-cache path"
    bench.bar(name, ratio(0.5), bar=1.7, aim=1.95, unit="x")
    name = "plenty of memory, kvtier over the page-cache path"
    bench.bar(name, ratio(PLENTY), bar=0.95, aim=1.0, unit="x")


def simulated(bench: Bench) -> None:
    """How well the policy chooses, with no drive: shares of uses that need no read."""
    random = np.random.default_rng(1)
    popular = np.minimum(random.zipf(1.3, 200), 40) - 1
    scans = [turn for n in range(30) for turn in (Turn(0, 4, 2), Turn(1000 + 40 * n, 12, 1))]
    cases: list[tuple[str, list[Turn], int, int, int]] = [
        ("16 take turns, half fit", [Turn(4 * n, 4) for n in range(16)] * 6, 96, 0, 48),
        ("the same, HOT and HOST", [Turn(4 * n, 4) for n in range(16)] * 6, 24, 72, 48),
        ("one, twice as large as HOT", [Turn(0, 8, 20)], 12, 0, 0),
        ("one small, and long scans", scans, 36, 0, 6),
        ("popular ones by chance", [Turn(4 * int(n), 4) for n in popular], 96, 0, 50),
    ]
    rows = []
    for name, turns, hot, host, skip in cases:
        found = rates(turns, layers=3, hot=hot, host=host, skip=skip)
        rows.append([name, f"{found.kvtier:.2f}", f"{found.lru:.2f}", f"{found.optimum:.2f}"])
    bench.table("simulated: uses without a read", ["contexts", "kvtier", "LRU", "optimum"], rows)


def main() -> int:
    bench = Bench("pressure", __doc__)
    bench.parser.add_argument("--rate", type=float, default=150, help="MB/s that reads may take")
    bench.parser.add_argument("--job", help="used by the benchmark itself")
    options = bench.options()
    if options.job:
        print(json.dumps(asdict(work(Job(**json.loads(options.job))))))
        return 0
    require_root("a limit on memory")
    simulated(bench)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        report(bench, measure(bench, folder, options))
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
