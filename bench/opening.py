"""How long does a large store take to open, and eviction from HOT and from the drive?

Run: .venv/bin/python bench/opening.py [--json PATH] [--plot PATH] [--quick] [--folder DIR]. A
million tokens in 24 layers. Keys and values are narrow, because neither opening nor eviction looks
at them: what counts is the number of Segments, Extents and Pages, and that is the full one. 100,000
Pages are evicted, from the drive durably. Quick: an eighth of both.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import SEGMENT_PAGES, SEGMENT_TOKENS, Geometry
from kvtier.tiering.store import Store
from kvtier.tools.bench_form import Bench

LAYERS = 24
DOCUMENT_TOKENS = 32 * SEGMENT_TOKENS
TOKENS = 1_000_000
EVICTED_PAGES = 100_000
QUICK = 8
"""A quick run has so many times fewer of both."""
FINGERPRINT = Fingerprint.of({"bench": "opening"})


def fill(path: Path, geometry: Geometry, tokens: int) -> None:
    """Store documents of DOCUMENT_TOKENS until there are `tokens`."""
    random = np.random.default_rng(1)
    rows = torch.zeros(1, DOCUMENT_TOKENS, 8, dtype=torch.float16)
    with Store.open(path, geometry, FINGERPRINT, Config("3GiB", hot="256MiB")) as store:
        for first in range(0, tokens, DOCUMENT_TOKENS):
            count = min(DOCUMENT_TOKENS, tokens - first)
            ids = random.integers(0, 50_000, count)
            sequence = store.sequence()
            for layer in range(len(geometry.layers)):
                store.append(sequence, layer, rows[:, :count], rows[:, :count])
            store.save(sequence, f"document {first}", ids)
            store.release(sequence)


def opening_seconds(path: Path, geometry: Geometry, times: int) -> list[float]:
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        store = Store.open(path, geometry, FINGERPRINT, Config(hot="256MiB"))
        found.append(time.perf_counter() - begun)
        store.close()
    return found


def drive_eviction(path: Path, geometry: Geometry, wanted: int) -> tuple[int, float]:
    """Evict Segments of so many Pages in all from the drive, durably: Pages, seconds."""
    pages = sum(each.kv_heads for each in geometry.layers) * SEGMENT_PAGES
    with Store.open(path, geometry, FINGERPRINT, Config(hot="256MiB")) as store:
        segment_bytes = next(iter(store._files.inventory.entries.values())).nbytes
        segments = -(-wanted // pages)
        begun = time.perf_counter()
        evicted = store._space.evict(segments * segment_bytes)
        seconds = time.perf_counter() - begun
    return evicted * pages, seconds


def hot_eviction(path: Path, geometry: Geometry, wanted: int) -> tuple[int, float]:
    """Fill HOT with Pages that the drive has, and evict so many of them: Pages, seconds."""
    random = np.random.default_rng(2)
    with Store.open(path, geometry, FINGERPRINT, Config(hot="256MiB")) as store:
        rows = torch.zeros(1, DOCUMENT_TOKENS, 8, dtype=torch.float16)
        while store._residency.hot.pages.sum() < wanted:
            sequence = store.sequence()
            for layer in range(len(geometry.layers)):
                store.append(sequence, layer, rows, rows)
            store.save(sequence, "hot", random.integers(0, 50_000, DOCUMENT_TOKENS))
            store.release(sequence)
        tier = store._residency.hot.tier
        before = store.stats().pages_evicted
        needed_bytes = tier.free_bytes + wanted * geometry.frame_bytes(0)
        begun = time.perf_counter()
        store._room.make(needed_bytes)
        seconds = time.perf_counter() - begun
        return store.stats().pages_evicted - before, seconds


def main() -> int:
    bench = Bench("opening", __doc__)
    bench.parser.add_argument("--folder", help="where the store is made (deleted after)")
    options = bench.options()
    share = QUICK if options.quick else 1
    tokens, evicted = TOKENS // share, EVICTED_PAGES // share
    geometry = Geometry.uniform(LAYERS, 1, 8, dtype="float16")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "store"
        fill(path, geometry, tokens)
        seconds = opening_seconds(path, geometry, 5)
        hot_pages, hot_s = hot_eviction(path, geometry, evicted)
        drive_pages, drive_s = drive_eviction(path, geometry, evicted)
    if min(hot_pages, drive_pages) < evicted:
        raise SystemExit(f"{hot_pages} and {drive_pages} pages left, not {evicted}: not timed")
    bench.table(
        f"{tokens} tokens, {LAYERS} layers",
        ["what", "pages", "seconds"],
        [
            ("open", "", f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"),
            ("eviction from HOT", hot_pages, f"{hot_s:.3f}"),
            ("eviction from the drive, durably", drive_pages, f"{drive_s:.3f}"),
        ],
    )
    bench.samples("open", seconds, unit="s")
    for name, value in (
        ("opening a store of 1,000,000 tokens", median(seconds)),
        ("evicting 100,000 pages from HOT", hot_s),
        ("evicting 100,000 pages from the drive", drive_s),
    ):
        bench.bar(name, value, bar=2, aim=1, unit="s", higher_is_better=False)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
