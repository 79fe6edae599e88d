"""Do writes in the background slow a decode, and how many bytes are written for each byte of KV?

Run: .venv/bin/python bench/writes.py [--json PATH] [--plot PATH] [--quick] [--rate MB] [--at DIR]

Decode beside writes. A thread decodes: for each token it does, in each of 24 layers, a matrix
product that stands for the model's own work, `store.append` of one token and `store.attend` over a
context in HOT; 12 KiB of KV for each token (2 kv heads of width 64, 16 bit, as Qwen2.5-0.5B has).
Compared are tokens per second of that loop
- alone, with nothing else going on in the process;
- beside a second thread that appends whole Segments of 512 tokens to other Sequences of the same
  store, layer by layer, with their tokens named: each Segment is committed (headers, flush, two
  transactions) as soon as it is whole. It is held to `--rate` megabytes of KV per second, as a
  prefill would be (5 MB are 430 tokens per second, more than two cores prefill of such a
  model); its tensors lie ready, so that all it costs is what the store does.
Rounds are interleaved; the figure is the median of the ratios of neighbouring rounds. A context
that is decoded and saved must come back bit for bit before anything is timed.

Decode that seals its own Segments: the same loop on a Sequence whose tokens are named, over ends
of Segments; the time of all its tokens, against as many times the median token. The tokens between
which a Segment is packed, written and committed are in the former.

Write amplification. An append-only run: long contexts (8,192 tokens) are appended in chunks, as a
prefill does, and saved; then short ones. Bytes that the device was asked to write (payloads,
headers, records, superblocks: counted in `io/raw_device.py`, which no request can pass by) and by
which the catalog's files grew, over the bytes of KV that were stored. Beside it stands what the
kernel says that this process sent to the disk (write_bytes of /proc/self/io), the write-ahead log
and its checkpoints included. The same with the digests that a store by keys keeps behind every
payload: means alone, and with a sketch of 3 bits. Their tokens lie in the order of positions all
the same, because to find another one takes time and changes no size.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvtier.tiering.clusterer import ByPosition
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import SEGMENT_TOKENS, Geometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.stats import StoreStats
from kvtier.tiering.store import Store
from kvtier.tools.bench_form import Bench
from kvtier.tools.bench_rig import interleave

GEOMETRY = Geometry.uniform(24, 2, 64, dtype="bfloat16")
Q_HEADS = 14
HIDDEN, INNER = 896, 2432
CONTEXT = 2048
MIB = 1 << 20
LONG, SHORT = 8192, 100

Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. tokens: decoded in each round. rate: bytes of KV per second."""

    rounds: int
    tokens: int
    rate: float
    own_tokens: int
    long_contexts: int
    short_contexts: int


class Model:
    """Matrices that stand for a layer's own work, and KV of random numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.up = torch.randn(HIDDEN, INNER, generator=generator)
        self.state = torch.randn(1, HIDDEN, generator=generator)
        self.query = torch.randn(Q_HEADS, 1, 64, generator=generator).bfloat16()
        self.rows = [torch.randn(2, LONG, 64, generator=generator).bfloat16() for _ in range(2)]

    def kv(self, first: int, count: int) -> Rows:
        """keys, values [2, count, 64] of positions from `first` on; others than the neighbours'."""
        first %= LONG - count + 1
        return self.rows[0][:, first : first + count], self.rows[1][:, first : first + count]

    def step(self, store: Store, sequence: Sequence) -> None:
        """One token through all layers."""
        place = sequence.length()
        for layer in range(len(GEOMETRY.layers)):
            torch.mm(self.state, self.up)
            keys, values = self.kv(place + layer, 1)
            store.append(sequence, layer, keys, values)
            store.attend(sequence, layer, self.query, keys=keys, values=values)


def tokens_of(number: int, count: int) -> list[int]:
    """Ids that no other number's list begins with."""
    return [number, *((7 * at + number) % 50_000 for at in range(1, count))]


def prefill(
    store: Store, model: Model, sequence: Sequence, count: int, *, pause: Callable[[], None]
) -> None:
    """Append `count` tokens in chunks of a Segment. pause: called after each layer of each."""
    done = sequence.length()
    while done < count:
        take = min(SEGMENT_TOKENS, count - done)
        for layer in range(len(GEOMETRY.layers)):
            store.append(sequence, layer, *model.kv(done + 31 * layer, take))
            pause()
        done += take


def no_pause() -> None:
    """Who is not held to a rate."""


# ---- decode beside writes ---------------------------------------------------------------------


class Producer:
    """Appends Segments to other Sequences, in a thread, at a steady rate."""

    def __init__(self, store: Store, model: Model, rate: float) -> None:
        self.store = store
        self.model = model
        self.rate = rate
        self.layer_bytes = SEGMENT_TOKENS * GEOMETRY.token_bytes / len(GEOMETRY.layers)
        self.number = 0
        self.produced = 0
        self._due = 0.0
        self._stop = threading.Event()

    def _hold_back(self) -> None:
        self.produced += 1
        self._due += self.layer_bytes / self.rate
        self._stop.wait(max(0.0, self._due - time.perf_counter()))

    def _run(self) -> None:
        self._due = time.perf_counter()
        while not self._stop.is_set():
            self.number += 1
            sequence = self.store.sequence()
            self.store.name_tokens(sequence, tokens_of(self.number, SEGMENT_TOKENS))
            prefill(self.store, self.model, sequence, SEGMENT_TOKENS, pause=self._hold_back)
            self.store.release(sequence)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._stop.clear()
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def opened(directory: Path, region: str = "3GiB", sketch_bits: int | None = None) -> Store:
    """sketch_bits: of digests that are stored, 0: means alone; None: none are."""
    config = Config(region, hot="256MiB")
    if sketch_bits is not None:
        config = replace(config, placement="keys", sketch_bits=sketch_bits)
    fingerprint = Fingerprint.of({"model": "bench"})
    return Store.open(directory, GEOMETRY, fingerprint, config, ByPosition())


def require_exact(directory: Path, model: Model) -> None:
    """What was decoded beside writes and saved comes back bit for bit."""
    tokens = tokens_of(0, SEGMENT_TOKENS + 40)
    with opened(directory, "512MiB") as store:
        sequence = store.sequence()
        with Producer(store, model, 50e6).running():
            prefill(store, model, sequence, SEGMENT_TOKENS, pause=no_pause)
            for _ in range(40):
                model.step(store, sequence)
            expected = [store.read(sequence, layer) for layer in range(len(GEOMETRY.layers))]
            store.save(sequence, "n", tokens)
    with opened(directory, "512MiB") as store:
        found = store.resume(tokens)
        assert found.length() == len(tokens)
        for layer, (keys, values) in enumerate(expected):
            again = store.read(found, layer)
            assert torch.equal(again[0], keys)
            assert torch.equal(again[1], values)


def decode_rate(store: Store, model: Model, tokens: int) -> float:
    """Tokens per second behind a context of CONTEXT tokens, in HOT; its Segments are written."""
    sequence = store.sequence()
    prefill(store, model, sequence, CONTEXT, pause=no_pause)
    for _ in range(8):
        model.step(store, sequence)
    began = time.perf_counter()
    for _ in range(tokens):
        model.step(store, sequence)
    seconds = time.perf_counter() - began
    store.release(sequence)
    return tokens / seconds


def beside_writes(bench: Bench, store: Store, model: Model, plan: Plan) -> None:
    producer = Producer(store, model, plan.rate)
    written: list[float] = []

    def beside() -> float:
        before, began = producer.produced, time.perf_counter()
        with producer.running():
            rate = decode_rate(store, model, plan.tokens)
        layers = producer.produced - before
        written.append(layers * producer.layer_bytes / (time.perf_counter() - began) / 1e6)
        return rate

    found = interleave(
        {"alone": lambda: decode_rate(store, model, plan.tokens), "beside writes": beside},
        rounds=plan.rounds,
        pause_s=0.3,
    )
    ratios = [b / a for a, b in zip(found["alone"], found["beside writes"], strict=True)]
    rows = [
        (name, f"{statistics.median(rates):.1f}", f"{min(rates):.1f}", f"{max(rates):.1f}")
        for name, rates in found.items()
    ]
    bench.table("decode, tokens per second", ("", "median", "least", "most"), rows)
    for name, rates in found.items():
        bench.samples(f"decode {name}", rates, unit="tokens/s")
    bench.note(
        f"written meanwhile: {statistics.median(written):.1f} MB of KV per second, asked for "
        f"{plan.rate / 1e6:.0f}; {store.stats().segments} Segments committed, each by itself"
    )
    bench.bar(
        "decode while sealed segments are written",
        statistics.median(ratios),
        bar=0.95,
        aim=0.99,
        unit="of decode without",
    )


def own_segments(bench: Bench, store: Store, model: Model, plan: Plan) -> None:
    sequence = store.sequence()
    first = CONTEXT - 64
    store.name_tokens(sequence, tokens_of(40_000, first + plan.own_tokens))
    prefill(store, model, sequence, first, pause=no_pause)
    seconds = []
    for _ in range(plan.own_tokens):
        began = time.perf_counter()
        model.step(store, sequence)
        seconds.append(time.perf_counter() - began)
    ends = (first + plan.own_tokens) // SEGMENT_TOKENS - first // SEGMENT_TOKENS
    median, slowest = statistics.median(seconds), sorted(seconds)[-max(ends, 1) :]
    bench.table(
        "decode that seals its own Segments",
        ("tokens", "Segments sealed", "median ms", "slowest ms", "median over all"),
        [
            (
                plan.own_tokens,
                ends,
                f"{1e3 * median:.2f}",
                " ".join(f"{1e3 * each:.0f}" for each in slowest),
                f"{median * len(seconds) / sum(seconds):.3f}",
            )
        ],
    )
    bench.samples("decode that seals its own Segments", seconds, unit="s")
    store.release(sequence)


# ---- write amplification ----------------------------------------------------------------------


def kernel_bytes() -> int:
    """What this process had the kernel send to disks."""
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("write_bytes:") + 1])


def append_only(
    directory: Path, model: Model, lengths: list[int], sketch_bits: int | None = None
) -> tuple[StoreStats, int]:
    """Contexts of these lengths, each appended and saved; what the store and the kernel counted."""
    before = kernel_bytes()
    with opened(directory, "2GiB", sketch_bits) as store:
        # The region was made: its file's blocks are no part of what is asked.
        before = kernel_bytes()
        for number, length in enumerate(lengths):
            sequence = store.sequence()
            prefill(store, model, sequence, length, pause=no_pause)
            store.save(sequence, f"n{number}", tokens_of(number, length))
            store.release(sequence)
        stats = store.stats()
    return stats, kernel_bytes() - before


def amplification(bench: Bench, at: Path, model: Model, plan: Plan) -> None:
    long, short = [LONG] * plan.long_contexts, [SHORT] * plan.short_contexts
    runs: dict[str, tuple[list[int], int | None]] = {
        f"{plan.long_contexts} of {LONG} tokens": (long, None),
        f"{plan.short_contexts} of 1000 tokens": ([1000] * plan.short_contexts, None),
        f"{plan.short_contexts} of {SHORT} tokens": (short, None),
        f"{plan.long_contexts} of {LONG} tokens, with means": (long, 0),
        f"{plan.long_contexts} of {LONG} tokens, with sketches of 3 bits": (long, 3),
    }
    rows, figures = [], []
    for number, (name, (lengths, sketch_bits)) in enumerate(runs.items()):
        stats, kernel = append_only(at / f"w{number}", model, lengths, sketch_bits)
        assert stats.kv_bytes_stored == sum(lengths) * GEOMETRY.token_bytes
        assert stats.write_amplification is not None
        figures.append(stats.write_amplification)
        rows.append(
            (
                name,
                f"{stats.kv_bytes_stored / MIB:.1f}",
                f"{stats.bytes_written / MIB:.1f}",
                f"{stats.catalog_growth_bytes / MIB:.2f}",
                f"{stats.write_amplification:.4f}",
                f"{kernel / stats.kv_bytes_stored:.4f}",
            )
        )
    bench.table(
        "write amplification, append-only (MiB)",
        ("contexts", "KV", "to the device", "catalog grew", "amplification", "by the kernel"),
        rows,
    )
    bench.bar(
        "write amplification, append-only",
        figures[0],
        bar=1.05,
        aim=1.02,
        unit="x",
        higher_is_better=False,
    )
    bench.bar(
        "write amplification, append-only, with mean-key digests",
        figures[3],
        bar=1.10,
        aim=1.06,
        unit="x",
        higher_is_better=False,
    )
    bench.note(f"with sketches of 3 bits it is {figures[4]:.4f}")


def main() -> int:
    bench = Bench("writes", __doc__)
    bench.parser.add_argument("--rate", type=float, default=5.0, help="MB of KV per second")
    bench.parser.add_argument("--at", type=Path, help="where the stores lie; else a temporary one")
    options = bench.options()
    torch.set_num_threads(1)
    if options.quick:
        plan = Plan(3, 24, options.rate * 1e6, 100, 2, 12)
    else:
        plan = Plan(9, 200, options.rate * 1e6, 1100, 8, 60)
    model = Model()
    with TemporaryDirectory(dir=options.at) as place:
        require_exact(Path(place) / "exact", model)
        with opened(Path(place) / "decode") as store:
            beside_writes(bench, store, model, plan)
            own_segments(bench, store, model, plan)
        amplification(bench, Path(place), model, plan)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
