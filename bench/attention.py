"""How much do Pages cost at decode, and from which context on is a budget worth it?

Run: .venv/bin/python bench/attention.py [--json PATH] [--plot PATH] [--quick] [--threads N].
One query attends to all tokens of a layer, layer after layer, as a step of a decode does; the
layers together are larger than the processor's caches. Methods take turns layer by layer, and
their results are compared before they are timed. Frames lie in one run for each kv head, in runs of
32 (units read from the drive), or scattered. The last Page ends early where the number of tokens
says so. With one thread times are the thread's own on the processor, so that others do not count.

- paged: exact attention over Frames, with the result in the query's dtype.
- dense: scaled_dot_product_attention over contiguous tensors. With 16 bits torch rounds the weights
  to 16 bits as well, and takes the fast path that the processor has, if any.

Then the same through a store whose HOT holds everything, by length of the context:

- contiguous: "dense" from above; nobody looks anything up.
- exact: Store.attend, which gathers Pages.
- sketch, means: Store.attend(budget=0.125), with sketches of all keys kept in memory and without.
  What they choose reads an eighth of the Pages; what choosing costs is in the figure.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.paged_attention import paged_attention
from kvtier.kernels.workspace import Workspace
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.store import Store
from kvtier.tools.bench_form import Bench

RUN_PAGES = 32
LAYERS_BYTES = 64 << 20
"""Of all layers of a case together; its layers are two to 24."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LIES = ("run", "runs of 32", "scattered")
BUDGET = 0.125
METHODS = ("contiguous", "exact", "sketch", "means")


@dataclass(frozen=True, slots=True)
class Shape:
    """KV of a layer, and how many query heads share one kv head."""

    kv_heads: int
    group: int
    width: int

    def __str__(self) -> str:
        return f"{self.kv_heads * self.group} over {self.kv_heads} of {self.width}"


SHAPES = (Shape(2, 7, 64), Shape(4, 7, 128), Shape(4, 2, 128), Shape(8, 1, 64))


def frames_of(heads: int, pages: int, lie: str) -> torch.Tensor:
    """int64 [kv_heads, pages], each Frame once."""
    if lie == "run":
        return torch.arange(heads * pages).view(heads, pages)
    if lie == "scattered":
        order = torch.randperm(heads * pages, generator=torch.Generator().manual_seed(1))
        return order.view(heads, pages)
    # Of each unit one head's Pages lie behind the other's.
    units = [
        torch.arange(heads * min(RUN_PAGES, pages - first)).view(heads, -1) + heads * first
        for first in range(0, pages, RUN_PAGES)
    ]
    return torch.cat(units, 1)


class Case:
    """Some layers, as Pages in a pool and as contiguous tensors."""

    def __init__(self, shape: Shape, dtype: torch.dtype, tokens: int, lie: str) -> None:
        self.shape, self.dtype, self.tokens = shape, dtype, tokens
        heads, width = shape.kv_heads, shape.width
        pages = -(-tokens // PAGE_TOKENS)
        self.frames = frames_of(heads, pages, lie)
        self.valid = tokens % PAGE_TOKENS or None
        self.workspace = Workspace()
        generator = torch.Generator().manual_seed(tokens)
        self.query = torch.randn(heads * shape.group, 1, width, generator=generator).to(dtype)
        # The query group becomes the query length: the fastest way for torch on a CPU.
        self.folded = self.query.view(1, heads, shape.group, width)
        layer_bytes = heads * pages * PAGE_TOKENS * 2 * width * dtype.itemsize
        self.pools, self.dense_layers = [], []
        for _ in range(max(2, min(24, LAYERS_BYTES // layer_bytes))):
            rows = torch.randn(heads, pages, 2, PAGE_TOKENS, width, generator=generator).to(dtype)
            pool = torch.empty(heads * pages, 2 * PAGE_TOKENS * width, dtype=dtype)
            pool[self.frames.reshape(-1)] = rows.view(heads * pages, -1)
            keys, values = (
                rows[:, :, half].reshape(heads, -1, width)[None, :, :tokens].contiguous()
                for half in range(2)
            )
            self.pools.append(pool)
            self.dense_layers.append((keys, values))

    def paged(self, layer: int) -> torch.Tensor:
        width = self.shape.width
        return paged_attention(
            self.query,
            self.pools[layer],
            self.frames,
            (width, width),
            self.valid,
            scale=width**-0.5,
            workspace=self.workspace,
            out_dtype=self.dtype,
        ).out

    def dense(self, layer: int) -> torch.Tensor:
        keys, values = self.dense_layers[layer]
        attend = torch.nn.functional.scaled_dot_product_attention
        out: torch.Tensor = attend(self.folded, keys, values).view(self.query.shape)
        return out

    def check(self) -> None:
        for layer in range(len(self.pools)):
            off = float((self.paged(layer).float() - self.dense(layer).float()).abs().max())
            if not off <= TOLERANCES[self.dtype]:
                raise SystemExit(f"{self.shape}, {self.tokens} tokens: off by {off}, not timed")

    def measure(self, steps: int, clock: Callable[[], float]) -> tuple[list[float], list[float]]:
        """Of each step the mean of its layers: paged and dense, in ms."""
        self.check()
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(steps):
            taken = [0.0, 0.0]
            for layer in range(len(self.pools)):
                for number, attend in enumerate((self.paged, self.dense)):
                    begun = clock()
                    attend(layer)
                    taken[number] += clock() - begun
            for each, seconds in zip(found, taken, strict=True):
                each.append(seconds / len(self.pools) * 1e3)
        return found


# ---- through a store ---------------------------------------------------------------------------


@contextmanager
def filled(
    folder: Path, rows: list[torch.Tensor], sketch_bits: int
) -> Iterator[Callable[..., torch.Tensor]]:
    """A store that holds a context in HOT; yields its `attend` of a layer. rows: of each layer keys
    and values, [2, kv_heads, tokens, width]."""
    _, heads, tokens, width = rows[0].shape
    dtype = str(rows[0].dtype).removeprefix("torch.")
    geometry = Geometry.uniform(len(rows), heads, width, dtype=dtype)
    hot = geometry.token_bytes * (tokens + 2048)
    config = Config(2 * hot + (64 << 20), hot=hot, sketch_bits=sketch_bits, calibrate=False)
    fingerprint = Fingerprint.of({"bench": "attention"})
    with Store.open(folder, geometry, fingerprint, config) as store:
        sequence = store.sequence()
        for layer, (keys, values) in enumerate(rows):
            store.append(sequence, layer, keys, values)
        store.save(sequence, "context", np.arange(tokens))
        yield partial(store.attend, sequence)


def through_a_store(
    shape: Shape, dtype: torch.dtype, tokens: int, steps: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Of each step the mean of its layers, in ms, by method."""
    generator = torch.Generator().manual_seed(tokens)
    row_bytes = 2 * shape.kv_heads * shape.width * dtype.itemsize
    rows = [
        torch.randn(2, shape.kv_heads, tokens, shape.width, generator=generator).to(dtype)
        for _ in range(max(2, min(24, LAYERS_BYTES // (row_bytes * tokens))))
    ]
    query = torch.randn(shape.kv_heads * shape.group, 1, shape.width, generator=generator).to(dtype)
    folded = query.view(1, shape.kv_heads, shape.group, shape.width)
    product = torch.nn.functional.scaled_dot_product_attention
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        sketched = stack.enter_context(filled(folder / "sketch", rows, 3))
        meant = stack.enter_context(filled(folder / "means", rows, 0))
        calls: dict[str, Callable[[int], torch.Tensor]] = {
            "contiguous": lambda layer: product(folded, *rows[layer][:, None]).view(query.shape),
            "exact": lambda layer: sketched(layer, query),
            "sketch": lambda layer: sketched(layer, query, budget=BUDGET),
            "means": lambda layer: meant(layer, query, budget=BUDGET),
        }
        for layer in range(len(rows)):
            off = float(
                (calls["exact"](layer).float() - calls["contiguous"](layer).float()).abs().max()
            )
            if not off <= TOLERANCES[dtype]:
                raise SystemExit(f"{dtype}, {tokens} tokens: off by {off}, not timed")
        found: dict[str, list[float]] = {name: [] for name in calls}
        # Digests are made at the first step by a budget, which does not count.
        for step in range(-1, steps):
            for name, call in calls.items():
                begun = clock()
                for layer in range(len(rows)):
                    call(layer)
                if step >= 0:
                    found[name].append((clock() - begun) / len(rows) * 1e3)
    return found


def crossover(bench: Bench, options: argparse.Namespace, clock: Callable[[], float]) -> None:
    """By length of the context: exact attention, and that by a budget."""
    shape = SHAPES[0]
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        faster = {"sketch": 0, "means": 0}
        name = str(dtype).removeprefix("torch.")
        for tokens in (512, 2_048, 8_192) if options.quick else (512, 2_048, 8_192, 32_768):
            steps = max(3, min(20, 80_000 // tokens))
            found = through_a_store(shape, dtype, tokens, steps, clock)
            medians = {method: median(found[method]) for method in METHODS}
            for method in METHODS:
                bench.samples(f"{name}, {tokens} tokens: {method}", found[method], unit="ms")
            rows.append([name, tokens, *(f"{medians[method]:.3f}" for method in METHODS)])
            for method in faster:
                if medians[method] > medians["exact"]:
                    faster[method] = 0
                else:
                    faster[method] = faster[method] or tokens
        for method, first in faster.items():
            when = f"from {first} tokens on" if first else "at none of these lengths"
            bench.note(f"{name}: a step by a budget ({method}) is faster than an exact one {when}")
    heads = ["dtype", "tokens", *(f"{method} ms" for method in METHODS)]
    bench.table(f"One query, one layer, through a store, {shape}, budget {BUDGET}", heads, rows)


def main() -> int:
    bench = Bench("attention", __doc__)
    bench.parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = bench.options()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    shapes = SHAPES[:2] if options.quick else SHAPES
    rows = []
    with torch.no_grad():
        for dtype, tolerance in TOLERANCES.items():
            for shape in shapes:
                for tokens in (500, 2_000) if options.quick else (500, 2_000, 8_000):
                    for lie in LIES[1:2] if options.quick else LIES:
                        steps = max(3, min(20, 40_000 // tokens))
                        paged, dense = Case(shape, dtype, tokens, lie).measure(steps, clock)
                        ratio = median(a / b for a, b in zip(paged, dense, strict=True))
                        name = str(dtype).removeprefix("torch.")
                        case = f"{name}, {shape}, {tokens} tokens, {lie}"
                        bench.samples(f"{case}: paged", paged, unit="ms")
                        bench.samples(f"{case}: dense", dense, unit="ms")
                        shown = f"{median(paged):.3f}", f"{median(dense):.3f}", f"{ratio:.2f}"
                        rows.append([name, shape, tokens, lie, *shown, f"{tolerance:g}"])
    heads = ["dtype", "query heads", "tokens", "Frames", "paged ms", "dense ms", "ratio", "within"]
    bench.table(f"One query, one layer, {options.threads} thread(s)", heads, rows)
    with torch.no_grad():
        crossover(bench, options, clock)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
