"""How long until a stored context can be decoded with? kvtier, computing it again, and its peers.

Asked of the KV of the demo's model over 2,000 tokens of the demo's document, and of synthetic KV of
the same shape (24 layers, 2 kv heads of width 64, float32) over more tokens. Each method is a
process of its own (bench/peers: which class and which calls of it are driven) that keeps the same
bytes, verified as that method verifies. What it loads is compared with the original once, before
anything is timed. Then, in rounds: the page cache is emptied, and one load is timed inside the
process, from the request to the moment when a model could decode: kvtier has a resumed Sequence in
HOT, which was empty; files hold tensors as DynamicCache keeps them; peers have put their chunks
together as such tensors: bars over peers are of this time. Then one token attends to all of it in
every layer, the first step. Layer by layer, kvtier is ready when the first layer is there, and
reads on during that step: what that gains is the time until the step is done, and no bar is taken
of it. Memory that a peer reads into is warm, and it need not look its chunks up where that is a
call of its own. Order turns around each round, pauses are equal; medians, and ratios round by
round.

Places: the disk as it is; the same files with the disk throttled to --limit (peers and kvtier
alike, by the block I/O controller); a loop device over tmpfs for each method: raw for kvtier and
for LMCache raw_block, with ext4 on it for what needs files. The longest context is left to the disk
as it is. Bars are taken of the real model's context (synthetic where it is not installed); the
share of the limit of the longest one there, against the limit and against plain direct reads of as
many bytes, which are in every table to show what the device gives. Peers live in .venv-peers (make
bench-peers). Needs root.

Run: .venv/bin/python bench/restore.py
"""

import math
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from kvtier.errors import ConfigError, KvtierError

ROOT = Path(__file__).resolve().parents[1]
# A script finds its own folder first; the workers are a package beside it.
sys.path.insert(0, str(ROOT))

from bench.peers.places import available_bytes, folders, loop_devices  # noqa: E402
from bench.peers.process import Worker  # noqa: E402
from bench.peers.subjects import REAL_TOKENS, Model, Subject, start_model, synthetic  # noqa: E402
from bench.peers.worker import Load, Place  # noqa: E402
from kvtier.tools.bench_form import Bench  # noqa: E402
from kvtier.tools.bench_rig import (  # noqa: E402
    backing_device,
    drop_caches,
    interleave,
    require_root,
    throttled,
)

KVTIER, LAYERWISE = "kvtier", "kvtier, layer by layer"
TORCH, PLAIN = "torch.save", "plain direct reads"
QUICK = (KVTIER, LAYERWISE, TORCH)
NO_PEERS = (KVTIER, LAYERWISE, PLAIN)
SYNTHETIC_TOKENS = (8192, 32768)
ROUNDS, ROUNDS_QUICK = 5, 3
PAUSE_S = 0.5
DISK, THROTTLED, LOOP = "disk", "throttled", "loop"
COMPUTED_TIMES = 3

OVER_RECOMPUTE = "restore over recompute, real model, 2,000 tokens"
OVER_PEER_DISK = "restore over the best peer, cold, not throttled"
OVER_PEER_LOOP = "restore over the best peer, cold, loop over tmpfs"
SHARE = "share of a throttled device's limit"
CPU = "CPU seconds per restored GB over the best peer"
TARGETS = {
    OVER_RECOMPUTE: (20.0, 100.0, "x"),
    OVER_PEER_DISK: (1.5, 3.0, "x"),
    OVER_PEER_LOOP: (1.5, 3.0, "x"),
    SHARE: (0.95, 0.98, "of the limit"),
    CPU: (0.7, 0.4, "x"),
}


@dataclass(frozen=True, slots=True)
class Method:
    """One way of keeping a context. module: what `python -m` runs. is_foreign: in the peers'
    environment. is_raw: keeps it on a raw block device where there is one."""

    module: tuple[str, ...]
    is_foreign: bool = True
    is_raw: bool = False


METHODS = {
    KVTIER: Method(("bench.peers.kvtier_store",), is_foreign=False, is_raw=True),
    LAYERWISE: Method(("bench.peers.kvtier_store", "lazily"), is_foreign=False, is_raw=True),
    TORCH: Method(("bench.peers.tensor_files", "torch"), is_foreign=False),
    "safetensors": Method(("bench.peers.tensor_files", "safetensors"), is_foreign=False),
    "SGLang HiCacheFile": Method(("bench.peers.sglang_file",)),
    "vLLM FileSystemTierManager": Method(("bench.peers.vllm_fs",)),
    "LMCache raw_block (io_uring)": Method(("bench.peers.lmcache_raw_block",), is_raw=True),
    "LMCache local_disk": Method(("bench.peers.lmcache_local_disk",)),
    "LMCache local_disk, buffered": Method(("bench.peers.lmcache_local_disk", "buffered")),
    PLAIN: Method(("bench.peers.plain_reads",), is_foreign=False, is_raw=True),
}


@dataclass(frozen=True, slots=True)
class Result:
    """The loads of one subject in one place, by method, in the order of rounds."""

    subject: Subject
    loads: Mapping[str, list[Load]]

    def seconds(self, name: str) -> float:
        return median(each.seconds for each in self.loads[name])

    def cpu_per_gb(self, name: str) -> float:
        return median(each.cpu_s for each in self.loads[name]) / (self.subject.context.nbytes / 1e9)

    @property
    def peers(self) -> list[str]:
        return [name for name in self.loads if name not in NO_PEERS]

    def step_s(self, name: str) -> float:
        return median(each.step_s for each in self.loads[name])

    def over(self, other: str) -> float:
        """How many times longer another one takes to be ready than kvtier: median over rounds."""
        pairs = zip(self.loads[other], self.loads[KVTIER], strict=True)
        return median(theirs.seconds / ours.seconds for theirs, ours in pairs)

    def step_over(self, other: str) -> float:
        """The same until the first step is done, of kvtier layer by layer."""
        pairs = zip(self.loads[other], self.loads[LAYERWISE], strict=True)
        return median(theirs.step_s / ours.step_s for theirs, ours in pairs)

    def fastest(self) -> str:
        return min(self.peers, key=self.seconds)

    def cpu_over_best(self) -> float:
        return self.cpu_per_gb(KVTIER) / min(self.cpu_per_gb(each) for each in self.peers)


class Comparison:
    """The workers, and what they were seen to do."""

    def __init__(self, bench: Bench, folder: Path, rounds: int, limit: int) -> None:
        """limit: of the throttled disk, bytes per second."""
        self.bench = bench
        self.folder = folder
        self.rounds = rounds
        self.limit = limit
        self.workers: dict[str, Worker] = {}
        self.results: dict[tuple[str, str], Result] = {}
        """By place and subject."""

    def start(self, stack: ExitStack, names: tuple[str, ...], peers_python: str) -> None:
        """Start a worker for each method; those that cannot are named as missing."""
        for name in names:
            method = METHODS[name]
            python = peers_python if method.is_foreign else sys.executable
            try:
                worker = Worker.start(name, python, method.module, self.folder)
                self.workers[name] = stack.enter_context(worker)
            except KvtierError as error:
                self._give_up(name, error)
        for name, worker in list(self.workers.items()):
            try:
                worker.require_ready()
            except KvtierError as error:
                self._give_up(name, error)

    def _give_up(self, name: str, error: KvtierError) -> None:
        """A peer that does not work here is out; the comparison is not complete without it."""
        if name in NO_PEERS:
            raise error
        self.workers.pop(name, None)
        self.bench.missing(f"the peer {name}", str(error))

    # ---- places -----------------------------------------------------------------------------

    def on_disk(self, subject: Subject, *, free: bool, limited: bool) -> None:
        """Measure on the disk as it is, or throttled, or both with the same files."""
        with folders(self.folder, self._raw_ones()) as places:
            self._store(subject, places)
            if free:
                self._measure(DISK, subject)
            if limited:
                device = backing_device(self.folder)
                pids = [worker.pid for worker in self.workers.values()]
                with throttled({device: self.limit}, processes=pids):
                    self._measure(THROTTLED, subject)
            self._close()

    def on_loop(self, subject: Subject) -> None:
        with loop_devices(self.folder, self._raw_ones(), subject.context.nbytes) as places:
            self._store(subject, places)
            self._measure(LOOP, subject)
            self._close()

    def _raw_ones(self) -> dict[str, bool]:
        return {name: METHODS[name].is_raw for name in self.workers}

    # ---- one subject ------------------------------------------------------------------------

    def _store(self, subject: Subject, places: Mapping[str, Place]) -> None:
        """Have every worker keep it, and compare what each loads with the original."""
        for name, worker in list(self.workers.items()):
            print(f"{subject.name}: {name} keeps it", file=sys.stderr, flush=True)
            try:
                worker.store(subject.context, places[name], subject.data)
                drop_caches()
                if worker.load(check=True).checksum != subject.checksum:
                    worker.stop()
                    raise KvtierError(f"{name} loaded other bytes than it was given")
            except KvtierError as error:
                self._give_up(name, error)

    def _measure(self, place: str, subject: Subject) -> None:
        loads: dict[str, list[Load]] = {name: [] for name in self.workers}

        def timed(name: str) -> float:
            drop_caches()
            if name in self.workers:
                try:
                    loads[name].append(self.workers[name].load())
                    return loads[name][-1].seconds
                except KvtierError as error:
                    self._give_up(name, error)
                    del loads[name]
            return math.nan

        methods = {name: partial(timed, name) for name in self.workers}
        seconds = interleave(methods, rounds=self.rounds, pause_s=PAUSE_S)
        result = Result(subject, loads)
        self.results[place, subject.name] = result
        for name in loads:
            self.bench.samples(f"{place}, {subject.name}, {name}", seconds[name], unit="s")
        self.bench.table(
            f"{place}: {subject.name}, {subject.context.nbytes / 1e6:.1f} MB",
            [
                *("method", "read ms", "ready ms", "MB/s", "CPU s/GB", "over kvtier"),
                *("first step ms", "over"),
            ],
            [self._row(result, name) for name in loads],
        )

    def _row(self, result: Result, name: str) -> list[str]:
        ready, step = f"{result.seconds(name) * 1e3:.1f}", f"{result.step_s(name) * 1e3:.1f}"
        over = f"{result.step_over(name):.2f}x"
        if name == LAYERWISE:
            # Most of it is not there when a model may begin.
            return [name, "", ready, "", "", "", step, over]
        read = f"{median(each.read_s for each in result.loads[name]) * 1e3:.1f}"
        rate = f"{result.subject.context.nbytes / result.seconds(name) / 1e6:.0f}"
        cpu = f"{result.cpu_per_gb(name):.2f}"
        return [name, read, ready, rate, cpu, f"{result.over(name):.2f}x", step, over]

    def _close(self) -> None:
        for worker in self.workers.values():
            worker.close()


# ---- bars -------------------------------------------------------------------------------------


def set_bars(bench: Bench, run: Comparison, first: Subject, model: Model | None) -> None:
    """The bars of what was measured; the others are missing, with the reason."""
    at_disk = run.results.get((DISK, first.name))
    at_loop = run.results.get((LOOP, first.name))
    limited = [each for (place, _), each in run.results.items() if place == THROTTLED]
    if model is not None and at_disk is not None:
        computed = median(model.seconds)
        bench.samples("recompute", model.seconds, unit="s")
        bench.note(
            f"Computing {REAL_TOKENS:,} tokens takes {computed:.1f} s; restoring them takes "
            f"{at_disk.seconds(KVTIER):.3f} s."
        )
        set_bar(bench, OVER_RECOMPUTE, computed / at_disk.seconds(KVTIER))
    quick = run.workers.keys() <= set(QUICK)
    for name, result in ((OVER_PEER_DISK, at_disk), (OVER_PEER_LOOP, at_loop)):
        if quick or result is None:
            bench.missing(name, "not asked for in this run", optional=True)
            continue
        peer = result.fastest()
        bench.note(
            f"{name}: the best peer is {peer}; until the first step is done it takes "
            f"{result.step_over(peer):.2f} times as long as kvtier layer by layer; plain reads of "
            f"as many bytes take {result.seconds(PLAIN) * 1e3:.1f} ms of its "
            f"{result.seconds(peer) * 1e3:.1f} ms."
        )
        set_bar(bench, name, result.over(peer))
    if limited:
        longest = max(limited, key=lambda each: each.subject.context.nbytes)
        nominal = longest.subject.context.nbytes / longest.seconds(KVTIER) / run.limit
        bench.note(
            f"{SHARE}: {nominal:.3f} of {run.limit} bytes per second, {longest.over(PLAIN):.3f} of "
            "what plain reads get; the smaller counts, because the controller lets a burst pass."
        )
        set_bar(bench, SHARE, min(nominal, longest.over(PLAIN)))
    else:
        bench.missing(SHARE, "not asked for in this run", optional=True)
    if quick or at_disk is None:
        bench.missing(CPU, "not asked for in this run", optional=True)
    else:
        set_bar(bench, CPU, at_disk.cpu_over_best())


def set_bar(bench: Bench, name: str, value: float) -> None:
    bar, aim, unit = TARGETS[name]
    bench.bar(name, value, bar=bar, aim=aim, unit=unit, higher_is_better=name != CPU)


def main() -> None:
    bench = Bench("restore", __doc__)
    add = bench.parser.add_argument
    add("--folder", type=Path, help="where contexts are kept on the disk (deleted after)")
    add("--places", default=f"{DISK},{THROTTLED},{LOOP}", help="of these, with commas")
    add("--tokens", default=",".join(map(str, SYNTHETIC_TOKENS)), help="of synthetic contexts")
    add("--rounds", type=int, default=ROUNDS)
    add("--limit", type=int, default=300_000_000, help="of the throttled disk, bytes per second")
    add("--peers-python", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    options = bench.options()
    places = (DISK,) if options.quick else tuple(options.places.split(","))
    lengths = [] if options.quick else [int(each) for each in options.tokens.split(",") if each]
    names = QUICK if options.quick else tuple(METHODS)
    if unknown := set(places) - {DISK, THROTTLED, LOOP}:
        raise ConfigError(f"no such place: {', '.join(sorted(unknown))}")
    require_root("emptying the page cache")
    # Ended from outside, it still unmounts what it mounted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir=options.folder)))
        try:
            model = start_model(stack, folder)
        except KvtierError as error:
            bench.missing(OVER_RECOMPUTE, str(error))
            model = None
        first = model.subject(folder) if model else synthetic(REAL_TOKENS, folder)
        rounds = ROUNDS_QUICK if options.quick else options.rounds
        run = Comparison(bench, folder, rounds, options.limit)
        run.start(stack, names, options.peers_python)
        subjects = [first, *(synthetic(tokens, folder) for tokens in lengths)]
        longest = max(subjects, key=lambda each: each.context.nbytes)
        for subject in subjects:
            # A peer holds what it read and what it put together; all of them are there at once.
            needed = 2 * len(run.workers) * subject.context.nbytes
            if needed > available_bytes():
                bench.note(f"{subject.name}: left out, it needs {needed >> 20} MiB of memory")
                continue
            elsewhere = subject is first or subject is not longest
            limited = THROTTLED in places and elsewhere
            if DISK in places or limited:
                run.on_disk(subject, free=DISK in places, limited=limited)
            if LOOP in places and elsewhere:
                run.on_loop(subject)
            if model and not options.quick and len(model.seconds) < COMPUTED_TIMES:
                model.compute(None)
        set_bars(bench, run, first, model)
    raise SystemExit(bench.finish())


if __name__ == "__main__":
    main()
