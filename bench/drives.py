"""Is a context that is spread over four drives restored four times as fast as from one, and how
much of it still loads when one of the four is gone?

Restore: one store on one loop device, one on four, all in memory and throttled to the same rate by
the kernel (blkio), so that the devices and not this machine are what limits. Both hold the same
context. Each round opens a store anew and takes the time of `Store.resume`, until all KV is in HOT;
nothing of a region is in the page cache, which direct I/O goes past. Before, what attention makes
of the restored KV is compared with the KV that was stored.

A drive that is gone: a context of 16 Segments on four region files, one of which is deleted.
Counted are the tokens whose KV came from the store while the holes were computed anew, and all of
the context is compared with what was stored.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

sys.path.insert(0, os.fspath(Path(__file__).resolve().parents[1]))

from kvtier.io.rawfile import create_region_file
from kvtier.kernels.oracle import attention_oracle
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import SEGMENT_TOKENS, Geometry
from kvtier.tiering.sequence import Sequence as Stream
from kvtier.tiering.store import Store
from kvtier.tools.bench_form import Bench
from kvtier.tools.bench_rig import interleave, loop_device, throttled

MIB = 1 << 20
DRIVES = 4
LARGE = Geometry.uniform(24, 2, 64, dtype="float16")
"""A model of half a billion parameters: for what takes time."""
RATE = 25_000_000
"""Bytes per second of a throttled device: four of them are far below what this code can take."""
SMALL = Geometry.uniform(4, 2, 32, dtype="float16")
"""For what is counted."""
RESTORE = "restore from four throttled devices over one"
LOSS = "one of four drives gone: tokens that still load"
TOLERANCE = 4e-3
"""Of attention in float16 against the oracle in float64."""


@dataclass(frozen=True, slots=True)
class Context:
    """Random KV under random tokens. Per layer: keys and values, [kv_heads, tokens, width]."""

    geometry: Geometry
    tokens: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, geometry: Geometry, token_count: int, seed: int) -> "Context":
        generator = torch.Generator().manual_seed(seed)

        def rows(heads: int, width: int) -> torch.Tensor:
            return torch.randn(heads, token_count, width, generator=generator).half()

        layers = [
            (rows(each.kv_heads, each.key_width), rows(each.kv_heads, each.value_width))
            for each in geometry.layers
        ]
        tokens: list[int] = np.random.default_rng(seed).integers(0, 50_000, token_count).tolist()
        return cls(geometry, tokens, layers)

    @property
    def nbytes(self) -> int:
        return self.geometry.token_bytes * len(self.tokens)

    def append(self, store: Store, stream: Stream, end: int) -> None:
        """Compute the KV up to position `end`, so to speak."""
        first = stream.length()
        for layer, (keys, values) in enumerate(self.layers):
            store.append(stream, layer, keys[:, first:end], values[:, first:end])

    def require_exact(self, store: Store, stream: Stream) -> None:
        """Raise AssertionError unless attention over all of it is that of the original KV."""
        assert stream.length() == len(self.tokens)
        generator = torch.Generator().manual_seed(7)
        mask = np.ones((1, 1, len(self.tokens)), np.bool_)
        for layer, (keys, values) in enumerate(self.layers):
            width = keys.shape[2]
            query = torch.randn(keys.shape[0], 1, width, generator=generator).half()
            found = store.attend(stream, layer, query).double().numpy()
            expected, _ = attention_oracle(
                query.double().numpy(),
                keys.double().numpy(),
                values.double().numpy(),
                mask,
                width**-0.5,
                None,
            )
            off = float(np.abs(found - expected).max())
            assert off < TOLERANCE, f"layer {layer} is off by {off}"


def config(regions: Sequence[str] | None, context: Context) -> Config:
    """regions: of a store that is made; None: of one that is there."""
    hot = context.nbytes * 5 // 4 + 16 * MIB
    return Config(regions, hot=hot, force=regions is not None)


def opened(path: Path, context: Context, regions: Sequence[str] | None = None) -> Store:
    """The store for a context. regions: of a new one."""
    identity = Fingerprint.of({"bench": "drives"})
    return Store.open(path, context.geometry, identity, config(regions, context))


def fill(path: Path, regions: Sequence[str], context: Context) -> None:
    with opened(path, context, regions) as store:
        stream = store.sequence()
        context.append(store, stream, len(context.tokens))
        store.save(stream, "context", context.tokens)


def resume_seconds(path: Path, context: Context, *, check: bool = False) -> float:
    """How long the restore of a whole context takes that nothing of is in memory."""
    with opened(path, context) as store:
        began = time.perf_counter()
        stream = store.resume(context.tokens)
        took = time.perf_counter() - began
        assert stream.length() == len(context.tokens)
        if check:
            context.require_exact(store, stream)
        return took


def measure_restore(bench: Bench, *, quick: bool) -> None:
    context = Context.of(LARGE, (16 if quick else 32) * SEGMENT_TOKENS, 1)
    nbytes = context.nbytes
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvtier-bench-")))
        single = [stack.enter_context(loop_device(None, nbytes * 5 // 4 + 16 * MIB))]
        four = [
            stack.enter_context(loop_device(None, nbytes * 5 // 16 + 16 * MIB))
            for _ in range(DRIVES)
        ]
        stores: Mapping[str, Path] = {"one": folder / "one", "four": folder / "four"}
        for name, regions in (("one", single), ("four", four)):
            fill(stores[name], regions, context)
            resume_seconds(stores[name], context, check=True)
        free = {name: resume_seconds(path, context) for name, path in stores.items()}
        with throttled(dict.fromkeys((*single, *four), RATE)):
            times = interleave(
                {
                    name: lambda path=path: resume_seconds(path, context)  # type: ignore[misc]
                    for name, path in stores.items()
                },
                rounds=3 if quick else 5,
                pause_s=0.5,
            )
    rows = []
    for name, found in times.items():
        bench.samples(f"restore from {name}", found, unit="s")
        share = nbytes / median(found) / (RATE * (DRIVES if name == "four" else 1))
        rows.append(
            [name, f"{median(found):.3f} s", f"{nbytes / median(found) / 1e6:.0f} MB/s",
             f"{share:.2f}", f"{nbytes / free[name] / 1e6:.0f} MB/s"]
        )  # fmt: skip
    bench.table(
        f"restore of {len(context.tokens)} tokens, {nbytes / MIB:.0f} MiB, each device "
        f"limited to {RATE / 1e6:.0f} MB/s",
        ["devices", "median", "rate", "of the limit", "not limited, once"],
        rows,
    )
    bench.bar(
        RESTORE,
        median(times["one"]) / median(times["four"]),
        bar=3.5,
        aim=3.9,
        unit="x",
    )


def measure_loss(bench: Bench) -> None:
    context = Context.of(SMALL, 16 * SEGMENT_TOKENS, 2)
    count = len(context.tokens)
    rows = []
    shares = []
    for gone in range(DRIVES):
        with TemporaryDirectory(prefix="kvtier-bench-") as place:
            folder = Path(place)
            paths = [str(folder / f"drive{number}") for number in range(DRIVES)]
            for path in paths:
                create_region_file(path, context.nbytes // DRIVES + 8 * MIB)
            fill(folder / "kv", paths, context)
            os.unlink(paths[gone])
            with opened(folder / "kv", context) as store:
                prefix = store.lookup(context.tokens)
                loaded = load_around_holes(store, context)
        rows.append([gone, prefix, loaded, f"{loaded / count:.0%}"])
        shares.append(100 * loaded / count)
    bench.table(
        f"one of {DRIVES} drives gone, of {count} tokens",
        ["gone", "unbroken from the start", "loaded", ""],
        rows,
    )
    bench.samples(LOSS, shares, unit="%")
    bench.bar(LOSS, min(shares), bar=70, aim=75, unit="%")


def load_around_holes(store: Store, context: Context) -> int:
    """Load what is stored of a context and compute the rest; how many tokens were loaded."""
    stream = store.resume(context.tokens)
    computed = 0
    for start, end in store.holes(context.tokens):
        assert stream.length() == start, "what is stored before a hole was loaded"
        context.append(store, stream, end)
        store.name_tokens(stream, context.tokens[:end])
        computed += end - start
        store.extend(stream, context.tokens)
    computed += len(context.tokens) - stream.length()
    context.append(store, stream, len(context.tokens))
    store.name_tokens(stream, context.tokens)
    context.require_exact(store, stream)
    return len(context.tokens) - computed


def main() -> int:
    bench = Bench("drives", __doc__)
    options = bench.options()
    measure_loss(bench)
    if os.geteuid():
        bench.missing(RESTORE, "loop devices and their throttle need root")
    else:
        measure_restore(bench, quick=options.quick)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
