"""How much do Pages cost at decode? Paged attention against torch on contiguous KV, same numbers.

Run: .venv/bin/python bench/attention.py [--json PATH] [--quick]. One query token, Frames in random
order. Results are checked before they are timed; repetitions are interleaved; medians of ratios.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.paged_attention import Workspace, paged_attention

Q_HEADS, KV_HEADS, WIDTH = 14, 2, 64
TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class Row:
    """paged_ms, contiguous_ms: medians. ratio: median of paged over contiguous, pair by pair."""

    tokens: int
    threads: int
    paged_ms: float
    contiguous_ms: float
    ratio: float


def measure(tokens: int, repetitions: int) -> Row:
    generator = torch.Generator().manual_seed(tokens)
    pages = tokens // PAGE_TOKENS
    keys = torch.randn(KV_HEADS, tokens, WIDTH, generator=generator)
    values = torch.randn(KV_HEADS, tokens, WIDTH, generator=generator)
    query = torch.randn(Q_HEADS, 1, WIDTH, generator=generator)
    frames = torch.randperm(KV_HEADS * pages, generator=generator).view(KV_HEADS, pages)
    split = PAGE_TOKENS * WIDTH
    pool = torch.empty(KV_HEADS * pages, 2 * split)
    pool[frames.reshape(-1), :split] = keys.reshape(-1, split)
    pool[frames.reshape(-1), split:] = values.reshape(-1, split)
    workspace = Workspace()
    # The query group becomes the query length: the fastest way for torch on a CPU.
    folded = query.view(1, KV_HEADS, Q_HEADS // KV_HEADS, WIDTH)

    def paged() -> torch.Tensor:
        return paged_attention(
            query, pool, frames, (WIDTH, WIDTH), scale=WIDTH**-0.5, workspace=workspace
        ).out

    def contiguous() -> torch.Tensor:
        out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            folded, keys[None], values[None]
        )
        return out.view(Q_HEADS, 1, WIDTH)

    difference = float((paged() - contiguous()).abs().max())
    if difference > TOLERANCE:
        raise SystemExit(f"results differ by {difference} at {tokens} tokens: not timed")
    pairs = [(timed(paged), timed(contiguous)) for _ in range(repetitions)]
    return Row(
        tokens,
        torch.get_num_threads(),
        statistics.median(each[0] for each in pairs) * 1e3,
        statistics.median(each[1] for each in pairs) * 1e3,
        statistics.median(each[0] / each[1] for each in pairs),
    )


def timed(call: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, shorter contexts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (2048, 8192) if options.quick else (2048, 8192, 32768)
    rows = [measure(tokens, 20 if options.quick else 60) for tokens in sizes]
    print(f"{'tokens':>8} {'paged ms':>9} {'contiguous ms':>14} {'ratio':>6}")
    for row in rows:
        print(f"{row.tokens:>8} {row.paged_ms:>9.2f} {row.contiguous_ms:>14.2f} {row.ratio:>6.2f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
