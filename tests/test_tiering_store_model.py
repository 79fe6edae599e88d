"""A store against a plain reference: random walks over everything that a caller may do."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.io.probe import Engine
from kvtier.tiering.clusterer import Placement
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.writer import hot_bytes_min
from tests.store_cases import (
    GEOMETRIES,
    KV,
    MIB,
    PLAIN,
    VOCABULARY,
    Shuffled,
    ShuffledInSteps,
    check_attend,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    put,
    shared,
    some_tokens,
)

PIECES = (1, 7, 16, 33, 44, 512, 700)
TOKENS_MAX = 2200
SEQUENCES_MAX = 4
STEPS = 32


@dataclass
class Pair:
    """A Sequence of the store, and the tokens that it must hold."""

    sequence: Sequence
    tokens: list[int]


@dataclass
class Walk:
    """One random walk. Every step is followed by an attention that must be right."""

    path: Path
    kv: KV
    config: Config
    placement: Placement | None
    random: np.random.Generator
    store: Store = field(init=False)
    pairs: list[Pair] = field(default_factory=list)
    saved: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = open_store(self.path, self.kv.geometry, self.config, self.placement)
        self.config = replace(self.config, region=None)

    def run(self) -> None:
        steps = [self.append, self.append, self.append, self.fork, self.crop, self.save]
        steps += [self.release, self.resume, self.resume, self.reopen]
        for _ in range(STEPS):
            if not self.pairs:
                self.begin()
            step = steps[int(self.random.integers(len(steps)))]
            step(self.pairs[int(self.random.integers(len(self.pairs)))])
            for pair in self.pairs:
                assert pair.sequence.lengths.tolist() == [len(pair.tokens)] * pair.sequence.layers
            if self.pairs:
                self.attend(self.pairs[int(self.random.integers(len(self.pairs)))])
        for pair in self.pairs:
            check_bytes(self.store, self.kv, pair.sequence, pair.tokens)
            self.store.release(pair.sequence)
        check_settled(self.store, self.path)
        self.store.close()

    def begin(self) -> None:
        self.pairs.append(Pair(self.store.sequence(), []))

    def append(self, pair: Pair) -> None:
        size = int(self.random.choice(PIECES))
        if len(pair.tokens) + size > TOKENS_MAX:
            return
        pair.tokens += self.random.integers(0, VOCABULARY, size).tolist()
        if self.random.random() < 0.5:
            self.store.name_tokens(pair.sequence, pair.tokens)
        extend(self.store, self.kv, pair.sequence, pair.tokens, pieces=size)

    def fork(self, pair: Pair) -> None:
        if len(self.pairs) < SEQUENCES_MAX:
            self.pairs.append(Pair(self.store.fork(pair.sequence), list(pair.tokens)))

    def crop(self, pair: Pair) -> None:
        length = int(self.random.integers(0, len(pair.tokens) + 1))
        self.store.crop(pair.sequence, length)
        del pair.tokens[length:]

    def save(self, pair: Pair) -> None:
        if pair.tokens:
            name = f"name {self.random.integers(5)}"
            assert self.store.save(pair.sequence, name, pair.tokens) == len(pair.tokens)
            self.saved.append(list(pair.tokens))

    def release(self, pair: Pair) -> None:
        self.store.release(pair.sequence)
        self.pairs.remove(pair)

    def resume(self, pair: Pair) -> None:
        if not self.saved or len(self.pairs) >= SEQUENCES_MAX:
            return
        known = self.saved[int(self.random.integers(len(self.saved)))]
        wanted = known[: int(self.random.integers(1, len(known) + 1))]
        wanted = wanted + self.random.integers(0, VOCABULARY, 3).tolist()
        sequence = self.store.resume(wanted)
        assert sequence.length() >= max(shared(wanted, each) for each in self.saved)
        self.pairs.append(Pair(sequence, wanted[: sequence.length()]))

    def reopen(self, pair: Pair) -> None:
        self.store.close()
        self.pairs.clear()
        self.store = open_store(self.path, self.kv.geometry, self.config, self.placement)

    def attend(self, pair: Pair) -> None:
        if pair.tokens:
            check_attend(
                self.store,
                self.kv,
                pair.sequence,
                pair.tokens,
                layer=int(self.random.integers(len(self.kv.geometry.layers))),
                count=min(int(self.random.choice([1, 1, 5, 19])), len(pair.tokens)),
                given=bool(self.random.integers(2)),
            )


@pytest.mark.parametrize("placed", ["position order", "shuffled", "in steps"])
@pytest.mark.parametrize("shape", GEOMETRIES)
@pytest.mark.parametrize("turn", [0, 1])
def test_a_random_walk_is_exact(tmp_path: Path, shape: str, placed: str, turn: int) -> None:
    geometry = GEOMETRIES[shape]
    seed = 4 * list(GEOMETRIES).index(shape) + 2 * (placed != "position order") + turn
    minimum = hot_bytes_min(geometry)
    hot = (minimum, 2 * minimum + 4096, 64 * MIB)[seed % 3]
    host = (0, minimum, 3 * minimum)[(seed // 3) % 3]
    engine: Engine = "threads" if seed % 4 == 1 else "auto"
    kinds = {"shuffled": Shuffled, "in steps": ShuffledInSteps}
    placement = kinds[placed](seed) if placed in kinds else None
    config = Config("64MiB", hot=hot, host=host, engine=engine)
    random = np.random.default_rng(seed)
    Walk(tmp_path / "store", KV(geometry), config, placement, random).run()


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("seed", [11, 12])
def test_both_engines_store_the_same(tmp_path: Path, engine: Engine, seed: int) -> None:
    kv, tokens = KV(PLAIN), some_tokens(1500, seed)
    with open_store(tmp_path, PLAIN, Config("16MiB", hot=MIB, engine=engine)) as store:
        assert store.stats().engine == engine
        put(store, kv, "a", tokens, pieces=333)
    other: Engine = "threads" if engine == "io_uring" else "io_uring"
    with open_store(tmp_path, PLAIN, Config(hot=MIB, engine=other)) as store:
        sequence = store.resume(tokens)
        check_bytes(store, kv, sequence, tokens)


@pytest.mark.parametrize("placement", [None, Shuffled(5)], ids=["position order", "shuffled"])
@pytest.mark.parametrize("limit", [1, 15, 16, 17, 511, 512, 513, 600])
def test_a_view_with_a_limit_hides_what_is_past_it(
    tmp_path: Path, placement: Placement | None, limit: int
) -> None:
    geometry = GEOMETRIES["windows"]
    kv, tokens = KV(geometry), some_tokens(700, 3)
    with open_store(tmp_path, geometry, placement=placement) as store:
        put(store, kv, "a", tokens)
    with open_store(tmp_path, geometry, placement=placement) as store:
        sequence = store.resume([*tokens[:limit], VOCABULARY, VOCABULARY])
        check_everywhere(store, kv, sequence, tokens[:limit])
        grown = [*tokens[:limit], *some_tokens(30, 4)]
        extend(store, kv, sequence, grown, pieces=7)
        for layer in range(3):
            check_attend(store, kv, sequence, grown, layer=layer, count=min(9, len(grown)))


@pytest.mark.parametrize("count", [1, 20, 63, 64, 500, 600, SEGMENT_TOKENS * 2])
def test_a_fork_and_its_original_grow_apart(tmp_path: Path, count: int) -> None:
    kv, tokens = KV(PLAIN), some_tokens(count, count)
    with open_store(tmp_path, placement=Shuffled(1)) as store:
        original = store.sequence()
        extend(store, kv, original, tokens)
        twin = store.fork(original)
        left, right = tokens + some_tokens(50, 1), tokens + some_tokens(90, 2)
        extend(store, kv, original, left, pieces=11)
        extend(store, kv, twin, right, pieces=30)
        store.save(original, "left", left)
        check_everywhere(store, kv, twin, right)
        store.save(twin, "right", right)
        store.release(original)
        check_bytes(store, kv, twin, right)
        store.release(twin)
        check_settled(store, tmp_path)
        for each in (left, right):
            sequence = store.resume(each)
            check_bytes(store, kv, sequence, each)


def test_results_stay_what_they_were_when_more_is_asked(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(100, 1)
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens)
        queries = [kv.rows(some_tokens(3, seed), 0)[0].repeat(2, 1, 1) for seed in range(4)]
        first = [store.attend(sequence, 0, each) for each in queries]
        again = [store.attend(sequence, 0, each) for each in queries]
        assert all((a == b).all() for a, b in zip(first, again, strict=True))
        assert not (first[0] == first[1]).all()


def test_many_forks_at_the_least_memory_do_not_splinter_the_store(tmp_path: Path) -> None:
    """Tails that a fork froze must be written when room is needed, or every later token becomes a
    Segment of its own."""
    kv = KV(PLAIN)
    config = Config("32MiB", hot=hot_bytes_min(PLAIN) + 16 * 1024)
    with open_store(tmp_path, PLAIN, config) as store:
        tokens = some_tokens(70, 0)
        sequence = store.sequence()
        extend(store, kv, sequence, tokens)
        kept = []
        for turn in range(6):
            kept.append((store.fork(sequence), list(tokens)))
            tokens = tokens + some_tokens(70, turn + 1)
            extend(store, kv, sequence, tokens, pieces=10)
        assert len(sequence.views) <= 30
        for each, held in [*kept, (sequence, tokens)]:
            check_everywhere(store, kv, each, held)
            store.release(each)
        check_settled(store, tmp_path)
