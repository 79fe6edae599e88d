"""How long a large store takes to open, and how long eviction takes, from the drive and from HOT.

    python bench/opening.py [--tokens 1000000] [--layers 24] [--folder DIR]

Keys and values are narrow, because neither opening nor eviction looks at them: what counts is the
number of Segments, Extents and Pages, and that is the full one. Prints one JSON object.
"""

import argparse
import json
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

DOCUMENT_TOKENS = 32 * SEGMENT_TOKENS
EVICTED_PAGES = 100_000
FINGERPRINT = Fingerprint.of({"bench": "opening"})


def fill(path: Path, geometry: Geometry, tokens: int, region: str) -> None:
    """Store documents of DOCUMENT_TOKENS until there are `tokens`."""
    random = np.random.default_rng(1)
    rows = torch.zeros(1, DOCUMENT_TOKENS, 8, dtype=torch.float16)
    with Store.open(path, geometry, FINGERPRINT, Config(region, hot="256MiB")) as store:
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


def drive_eviction(path: Path, geometry: Geometry) -> dict[str, float]:
    """Evict Segments of EVICTED_PAGES Pages in all from the drive, durably."""
    pages = sum(each.kv_heads for each in geometry.layers) * SEGMENT_PAGES
    with Store.open(path, geometry, FINGERPRINT, Config(hot="256MiB")) as store:
        segment_bytes = next(iter(store._files.inventory.entries.values())).nbytes
        segments = -(-EVICTED_PAGES // pages)
        begun = time.perf_counter()
        evicted = store._space.evict(segments * segment_bytes)
        seconds = time.perf_counter() - begun
    return {"segments": evicted, "pages": evicted * pages, "seconds": seconds}


def hot_eviction(path: Path, geometry: Geometry) -> dict[str, float]:
    """Fill HOT with Pages that the drive has, and evict EVICTED_PAGES of them."""
    random = np.random.default_rng(2)
    with Store.open(path, geometry, FINGERPRINT, Config(hot="256MiB")) as store:
        rows = torch.zeros(1, DOCUMENT_TOKENS, 8, dtype=torch.float16)
        while store._residency.hot.pages.sum() < EVICTED_PAGES:
            sequence = store.sequence()
            for layer in range(len(geometry.layers)):
                store.append(sequence, layer, rows, rows)
            store.save(sequence, "hot", random.integers(0, 50_000, DOCUMENT_TOKENS))
            store.release(sequence)
        tier = store._residency.hot.tier
        before = store.stats().pages_evicted
        wanted = tier.free_bytes + EVICTED_PAGES * geometry.frame_bytes(0)
        begun = time.perf_counter()
        store._room.make(wanted)
        seconds = time.perf_counter() - begun
        return {"pages": store.stats().pages_evicted - before, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--region", default="3GiB")
    parser.add_argument("--folder", default=None, help="where the store is made (deleted after)")
    options = parser.parse_args()
    geometry = Geometry.uniform(options.layers, 1, 8, dtype="float16")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "store"
        fill(path, geometry, options.tokens, options.region)
        seconds = opening_seconds(path, geometry, 5)
        report = {
            "tokens": options.tokens,
            "layers": options.layers,
            "open_s": round(median(seconds), 3),
            "open_s_all": [round(each, 3) for each in seconds],
            "evict_hot": hot_eviction(path, geometry),
            "evict_drive": drive_eviction(path, geometry),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
