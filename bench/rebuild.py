"""How long does `rebuild` take? A region is filled, its catalog deleted and made anew; s per GiB.

Run: .venv/bin/python bench/rebuild.py [--json PATH] [--plot PATH] [--quick] [--region 1GiB]
[--directory DIR]. KV of 24 layers, 2 kv heads of width 64, bfloat16. Every Segment must come
back, or nothing is printed. There is no bar: the figure says what a lost catalog costs. Quick: a
region of 128 MiB.
"""

import sys
import tempfile
from pathlib import Path

import torch

from kvtier.tiering.config import Config, parse_bytes
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.rebuilder import RebuildReport, rebuild
from kvtier.tiering.store import Store
from kvtier.tools.bench_form import Bench

GEOMETRY = Geometry.uniform(24, 2, 64, dtype="bfloat16")
TOKENS = 2048
"""Of each Sequence: four Segments."""
RESERVE_BYTES = 2 << 20
"""Superblocks, headers and records."""


def fill(path: Path, region_bytes: int) -> int:
    """Save Sequences until the region is nearly full; returns how many Segments it holds."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, TOKENS, 64)
    per_sequence = GEOMETRY.token_bytes * TOKENS * 102 // 100
    config = Config(region_bytes, hot="64MiB")
    with Store.open(path, GEOMETRY, Fingerprint.of({"model": "bench"}), config) as store:
        for number in range((region_bytes - RESERVE_BYTES) // per_sequence):
            sequence = store.sequence()
            rows = torch.randn(shape, generator=generator).to(torch.bfloat16)
            for layer in range(len(GEOMETRY.layers)):
                store.append(sequence, layer, rows, -rows)
            tokens = torch.randint(0, 50_000, (TOKENS,), generator=generator)
            store.save(sequence, f"n{number}", tokens)
            store.release(sequence)
        return len(store._registry.committed)


def measure(directory: Path, region_bytes: int) -> tuple[RebuildReport, int]:
    """The report of a rebuild, and how many Segments there were."""
    path = directory / "store"
    count = fill(path, region_bytes)
    for each in path.glob("catalog.sqlite*"):
        each.unlink()
    return rebuild(path), count


def main() -> int:
    bench = Bench("rebuild", __doc__)
    bench.parser.add_argument("--region", default="1GiB")
    bench.parser.add_argument("--directory", type=Path)
    options = bench.options()
    region_bytes = parse_bytes("128MiB" if options.quick else options.region, "region")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        report, count = measure(Path(directory), region_bytes)
    if (report.segments_restored, report.ok) != (count, True):
        raise SystemExit(f"of {count} segments {report.segments_restored} came back")
    bench.table(
        "a catalog made anew",
        ["segments", "bytes read", "seconds", "s per GiB"],
        [(count, report.bytes_read, f"{report.seconds:.2f}", f"{report.seconds_per_gib:.2f}")],
    )
    bench.samples("rebuild", [report.seconds], unit="s")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
