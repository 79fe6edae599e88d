"""What does bookkeeping cost at 1,000,000 tokens? Everything but tensor arithmetic and the drive.

Run: .venv/bin/python bench/metadata.py [--json PATH] [--plot PATH] [--quick]. 24 layers of 2 kv
heads whose keys and values are one number wide, so that a million tokens of KV are small and what
is left is bookkeeping. The attention kernel is replaced by a stub that makes the checks of its
arguments and returns zeros. A step appends one token to every layer and attends in it. Before the
stub is put in, attention is compared with the same attention over plain tensors.

Memory for metadata is what tracemalloc counts, numpy included, between an empty store and one that
holds, and has decoded, the whole context; Frames are mapped and not counted. A Page is up to 16
tokens of one layer and kv head.

Eight threads: eight stores, as eight GPUs of one node have, in one process. The same steps on the
same eight stores are driven by one thread in turn, and by eight at once, in turn; the figure is the
ratio of steps per second.
"""

import gc
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from kvtier.kernels.launch_checks import check_paged
from kvtier.kernels.running import Partial
from kvtier.tiering import reader
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tools.bench_form import Bench

LAYERS, HEADS, Q_HEADS, WIDTH = 24, 2, 2, 1
CHUNK = 1 << 16
THREADS = 8
GEOMETRY = Geometry.uniform(LAYERS, HEADS, WIDTH, dtype="float16")


@dataclass(frozen=True, slots=True)
class Sizes:
    """tokens: of the long context. thread_tokens: of each of the eight. steps: timed."""

    tokens: int
    thread_tokens: int
    steps: int


def kv(tokens: int, seed: int) -> torch.Tensor:
    """Keys, or values, [heads, tokens, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HEADS, tokens, WIDTH, generator=generator).to(torch.float16)


def open_store(path: Path, tokens: int) -> Store:
    """A store that holds a context of so many tokens in HOT, with room for steps."""
    hot = GEOMETRY.token_bytes * (tokens + 8192)
    # An Extent of such narrow units is mostly header.
    region = 4 * hot + (64 << 20)
    return Store.open(
        path, GEOMETRY, Fingerprint.of({"bench": "metadata"}), Config(region, hot=hot)
    )


def fill(store: Store, tokens: int, seed: int) -> Sequence:
    """A Sequence of so many tokens, all named and saved but the last hundred."""
    ids = np.random.default_rng(seed).integers(0, 50_000, tokens + 8192)
    sequence = store.sequence()
    store.name_tokens(sequence, ids)
    for first in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - first)
        rows = kv(count, seed + first)
        for layer in range(LAYERS):
            store.append(sequence, layer, rows, rows)
    return sequence


def step(store: Store, sequence: Sequence, token: torch.Tensor, query: torch.Tensor) -> None:
    """One new token through all layers."""
    for layer in range(LAYERS):
        store.append(sequence, layer, token, token)
        store.attend(sequence, layer, query)


def check(store: Store, sequence: Sequence, tokens: int, seed: int) -> None:
    """Attention of a step over everything is that over plain tensors."""
    rows = [kv(min(CHUNK, tokens - first), seed + first) for first in range(0, tokens, CHUNK)]
    token, query = kv(1, seed - 1), torch.ones(Q_HEADS, 1, WIDTH, dtype=torch.float16)
    held = torch.cat([*rows, token], 1).float()
    for layer in range(LAYERS):
        store.append(sequence, layer, token, token)
        out = store.attend(sequence, layer, query).float()
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[None].float(), held[None], held[None]
        )[0]
        difference = float((out - expected).abs().max())
        if difference > 2e-3:
            raise SystemExit(f"attention is off by {difference} in layer {layer}: not timed")


@contextmanager
def no_arithmetic() -> Iterator[None]:
    """Attention checks its arguments and returns zeros, of the query's dtype."""
    zeros = Partial(torch.zeros(Q_HEADS, 1, WIDTH, dtype=torch.float16), torch.zeros(Q_HEADS, 1))

    def stub(
        query: torch.Tensor,
        pool: torch.Tensor,
        frames: torch.Tensor,
        widths: tuple[int, int],
        valid: torch.Tensor | None = None,
        **rest: object,
    ) -> Partial:
        check_paged(query, pool, frames, widths, valid, None)
        return zeros

    with patch.object(reader, "paged_attention", stub):
        yield


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def one_context(bench: Bench, folder: Path, sizes: Sizes) -> None:
    """A million tokens in one store."""
    with open_store(folder / "one", sizes.tokens) as store:
        rows = decode(bench, store, sizes)
        (sequence,) = store._writer.growing
        forks = [fork_s(store, sequence) for _ in range(9)]
        ids = sequence.tokens[: sequence.length()].copy()
        store.save(sequence, "context", ids)
        lookups = [timed(lambda: store.lookup(ids)) for _ in range(9)]
        if store.lookup(ids) != len(ids):
            raise SystemExit(f"found {store.lookup(ids)} of {len(ids)} tokens: not timed")
        store.release(sequence)
    opened = time.perf_counter()
    with open_store(folder / "one", sizes.tokens) as store:
        opened = time.perf_counter() - opened
        if store.lookup(ids) != len(ids):
            raise SystemExit("the context is not found after opening: not timed")
    rows += [
        ("lookup of all tokens", f"{statistics.median(lookups) * 1e3:.2f} ms"),
        ("fork", f"{statistics.median(forks) * 1e3:.3f} ms"),
        ("open", f"{opened:.2f} s"),
    ]
    bench.table(f"{sizes.tokens} tokens, {LAYERS} layers", ["what", "cost"], rows)


def fork_s(store: Store, sequence: Sequence) -> float:
    start = time.perf_counter()
    twin = store.fork(sequence)
    taken = time.perf_counter() - start
    store.release(twin)
    return taken


def decode(bench: Bench, store: Store, sizes: Sizes) -> list[tuple[str, str]]:
    """Append the context and decode; rows of the table. The Sequence stays open."""
    token, query = kv(1, 7), torch.ones(Q_HEADS, 1, WIDTH, dtype=torch.float16)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    start = time.perf_counter()
    sequence = fill(store, sizes.tokens, 1)
    appended = time.perf_counter() - start
    check(store, sequence, sizes.tokens, 1)
    with no_arithmetic():
        step(store, sequence, token, query)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        for _ in range(20):
            step(store, sequence, token, query)
        steps = [timed(lambda: step(store, sequence, token, query)) for _ in range(sizes.steps)]
    pages = LAYERS * HEADS * -(-sequence.length() // PAGE_TOKENS)
    median = statistics.median(steps)
    bench.samples("step", steps, unit="s")
    name = "per-step bookkeeping at 1,000,000 tokens, all layers"
    bench.bar(name, median * 1e3, bar=2, aim=0.5, unit="ms", higher_is_better=False)
    name = "memory for metadata per page"
    bench.bar(name, held / pages, bar=64, aim=48, unit="B", higher_is_better=False)
    return [
        ("append, memory being traced", f"{appended / sizes.tokens * 1e6:.1f} us per token"),
        ("step, all layers", f"{median * 1e3:.3f} ms (p99 {np.percentile(steps, 99) * 1e3:.3f})"),
        ("metadata", f"{held / 2**20:.1f} MiB for {pages} pages"),
    ]


def eight_threads(bench: Bench, folder: Path, sizes: Sizes) -> None:
    """Eight stores, by one thread in turn and by eight at once."""
    token, query = kv(1, 7), torch.ones(Q_HEADS, 1, WIDTH, dtype=torch.float16)
    steps = sizes.steps // 4
    with ExitStack() as stack:
        pairs: list[tuple[Store, Sequence]] = []
        for number in range(THREADS):
            store = stack.enter_context(open_store(folder / str(number), sizes.thread_tokens))
            pairs.append((store, fill(store, sizes.thread_tokens, number)))

        def work(store: Store, sequence: Sequence) -> None:
            for _ in range(steps):
                step(store, sequence, token, query)

        def in_turn() -> None:
            for pair in pairs:
                work(*pair)

        def at_once() -> None:
            threads = [threading.Thread(target=work, args=pair) for pair in pairs]
            for each in threads:
                each.start()
            for each in threads:
                each.join()

        with no_arithmetic():
            in_turn()
            ones, eights = [], []
            for _ in range(5):
                ones.append(timed(in_turn))
                eights.append(timed(at_once))
    ratios = [one / eight for one, eight in zip(ones, eights, strict=True)]
    total = THREADS * steps
    bench.table(
        f"{THREADS} stores of {sizes.thread_tokens} tokens",
        ["threads", "steps per second"],
        [
            [1, f"{total / statistics.median(ones):.0f}"],
            [THREADS, f"{total / statistics.median(eights):.0f}"],
        ],
    )
    bench.samples("8 threads over one", ratios, unit="x")
    bench.bar(
        "bookkeeping throughput of 8 threads over one",
        statistics.median(ratios),
        bar=1.0,
        aim=1.5,
        unit="x",
    )


def main() -> int:
    bench = Bench("metadata", __doc__)
    options = bench.options()
    torch.set_num_threads(1)
    sizes = Sizes(1_000_000, 65_536, 100) if options.quick else Sizes(1_000_000, 131_072, 400)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        one_context(bench, Path(folder), sizes)
        eight_threads(bench, Path(folder), sizes)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
