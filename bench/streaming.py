"""How near to the drive's sequential rate is exact attention over a context many times HOT?

A decode step attends to all tokens in all layers; its KV is read from the drive anew in every step,
because HOT holds a small part of it. Counted are the bytes of KV that attention went through per
second, less those that HOT still had from the step before, over the sequential rate of the same
Device in the same run: large reads of the same bytes, several under way at once. The drive is
throttled by the kernel, so that it is the slower part and its rate is steady; the rounds of both
take turns. The KV is synthetic, in the geometries of models of 0.5B and 7B parameters; a model
would compute between the layers, which only gives reading more time.

Before anything is timed, attention in every layer is compared with a float64 reference that is
given the same KV. For comparison the same is shown with nothing read ahead: then the drive waits
while attention is computed, and attention while the drive reads.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

sys.path.insert(0, os.fspath(Path(__file__).resolve().parents[1]))

from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, PendingBatch
from kvtier.kernels.oracle import attention_oracle
from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tools.bench_form import Bench
from kvtier.tools.bench_rig import backing_device, interleave, throttled

MIB = 1 << 20
BAR = "streaming attention over the drive's sequential rate"
READ_BYTES = MIB
READS_AT_ONCE = 16
TOLERANCE = 2e-2
"""Of bfloat16 attention against the reference."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's KV and how many query heads share one kv head."""

    name: str
    geometry: Geometry
    group: int


SHAPES = (
    Shape("0.5B", Geometry.uniform(24, 2, 64, dtype="bfloat16"), 7),
    Shape("7B", Geometry.uniform(28, 4, 128, dtype="bfloat16"), 7),
)


class Context:
    """A store with one long context, of which HOT holds a small part."""

    def __init__(self, path: Path, shape: Shape, tokens: int, hot_bytes: int) -> None:
        self.path = path
        self.shape = shape
        self.tokens = np.random.default_rng(1).integers(0, 50_000, tokens).astype(np.uint32)
        self.hot_bytes = hot_bytes
        self.nbytes = tokens * shape.geometry.token_bytes

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, tokens, width] of a layer, the same in every call."""
        shape = self.shape.geometry.layers[layer]
        generator = torch.Generator().manual_seed(layer)
        size = (shape.kv_heads, len(self.tokens), shape.key_width)
        return tuple(torch.randn(size, generator=generator).bfloat16() for _ in range(2))  # type: ignore[return-value]

    def open(self) -> Store:
        new = not (self.path / "store.yaml").exists()
        size = 2 * self.nbytes + 64 * MIB if new else None
        config = Config(size, hot=self.hot_bytes)
        return Store.open(self.path, self.shape.geometry, Fingerprint.of({"bench": "a"}), config)

    def make(self) -> None:
        with self.open() as store:
            sequence = store.sequence()
            store.name_tokens(sequence, self.tokens)
            for layer in range(len(self.shape.geometry.layers)):
                store.append(sequence, layer, *self.rows(layer))
            store.save(sequence, "context", self.tokens)

    def query(self, layer: int) -> torch.Tensor:
        shape = self.shape.geometry.layers[layer]
        generator = torch.Generator().manual_seed(1000 + layer)
        size = (shape.kv_heads * self.shape.group, 1, shape.key_width)
        return torch.randn(size, generator=generator).bfloat16()

    def check(self, store: Store, sequence: Sequence) -> None:
        """Raise AssertionError unless every layer's attention is right."""
        for layer, shape in enumerate(self.shape.geometry.layers):
            query = self.query(layer)
            keys, values = self.rows(layer)
            mask = np.ones((1, 1, len(self.tokens)), np.bool_)
            wanted, _ = attention_oracle(
                query.double().numpy(),
                keys.double().numpy(),
                values.double().numpy(),
                mask,
                shape.key_width**-0.5,
                None,
            )
            out = store.attend(sequence, layer, query).double().numpy()
            difference = np.abs(out - wanted).max()
            assert difference < TOLERANCE, f"layer {layer} is off by {difference}"


def a_step(context: Context, store: Store, sequence: Sequence) -> float:
    """Attend to everything once in every layer: bytes read from the drive per second."""
    before = store.stats().bytes_read
    begun = time.perf_counter()
    for layer in range(len(context.shape.geometry.layers)):
        store.attend(sequence, layer, context.query(layer))
    return (store.stats().bytes_read - before) / (time.perf_counter() - begun)


def sequential(store: Store, sequence: Sequence, bytes_max: int) -> float:
    """Bytes per second of the Device that the store uses, read from one end to the other."""
    layers = range(len(store.geometry.layers))
    units = [Unit(view.segment, layer) for layer in layers for view in sequence.views]
    extents = [extent for each in units if (extent := each.segment.extents[each.layer])]
    begin = min(extent.offset for extent in extents)
    end = min(max(extent.end for extent in extents), begin + bytes_max)
    device = store._extents.device
    memory = aligned_bytes(READS_AT_ONCE * READ_BYTES)
    flying: list[PendingBatch] = []
    begun = time.perf_counter()
    done = 0
    for turn, offset in enumerate(range(begin, end - READ_BYTES, READ_BYTES)):
        if len(flying) == READS_AT_ONCE:
            device.wait(flying.pop(0))
        start = turn % READS_AT_ONCE * READ_BYTES
        piece = memory[start : start + READ_BYTES]
        flying.append(device.start_read(np.array([offset], np.int64), Buffers.whole(piece)))
        done += READ_BYTES
    for batch in flying:
        device.wait(batch)
    return done / (time.perf_counter() - begun)


def measure(bench: Bench, context: Context, rounds: int) -> tuple[float, list[object]]:
    """The figure of one shape, and its row of the table."""
    name = context.shape.name
    with context.open() as store:
        sequence = store.resume(context.tokens, lazily=True)
        ahead = store._mover.ahead
        go_on = ahead.go_on

        def rest() -> None:
            ahead.give_up()
            store._mover.flights.wait()

        def nothing_ahead() -> float:
            rest()
            ahead.go_on = lambda upcoming: None  # type: ignore[method-assign]
            rate = a_step(context, store, sequence)
            ahead.go_on = go_on  # type: ignore[method-assign]
            return rate

        def streamed() -> float:
            return a_step(context, store, sequence)

        def drive() -> float:
            rest()
            return sequential(store, sequence, context.nbytes)

        methods: dict[str, Callable[[], float]] = {
            "drive, sequential": drive,
            "attention": streamed,
            "attention, nothing read ahead": nothing_ahead,
        }
        found = interleave(methods, rounds=rounds, pause_s=0.3)
        stats = store.stats()
    for method, rates in found.items():
        bench.samples(f"{name}: {method}", [rate / 1e6 for rate in rates], unit="MB/s")
    base = median(found["drive, sequential"])
    share = {method: median(rates) / base for method, rates in found.items()}
    row: list[object] = [
        name,
        f"{context.nbytes / context.hot_bytes:.0f} x HOT",
        f"{base / 1e6:.0f}",
        *(f"{share[each]:.3f}" for each in list(methods)[1:]),
        f"{stats.pages_ahead_in_vain / max(1, stats.pages_ahead):.1%}",
    ]
    return share["attention"], row


def main() -> int:
    bench = Bench("streaming", __doc__)
    bench.parser.add_argument("--mbps", type=int, default=150, help="the drive's limit")
    bench.parser.add_argument("--folder", type=Path, default=None, help="on the drive to be used")
    options = bench.options()
    rounds = 3 if options.quick else 5
    # One thread attends fast enough, and two wait for each other where others compute as well.
    torch.set_num_threads(1)
    tokens = {"0.5B": 16_384, "7B": 4_096} if options.quick else {"0.5B": 65_536, "7B": 16_384}
    shares, rows = [], []
    with TemporaryDirectory(dir=options.folder, prefix="kvtier-bench-") as folder:
        disk = backing_device(folder)
        for shape in SHAPES:
            path = Path(folder) / shape.name
            count = tokens[shape.name]
            context = Context(path, shape, count, count * shape.geometry.token_bytes // 8)
            context.make()
            with context.open() as store:
                context.check(store, store.resume(context.tokens, lazily=True))
            with throttled({disk: options.mbps * 1_000_000}):
                share, row = measure(bench, context, rounds)
            shares.append(share)
            rows.append(row)
    bench.table(
        f"Exact attention over a context beyond HOT, one query, {disk} at {options.mbps} MB/s",
        ["model", "context", "MB/s", "attention", "nothing ahead", "in vain"],
        rows,
    )
    bench.bar(BAR, min(shares), bar=0.85, aim=0.95, unit="of the drive's rate")
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
