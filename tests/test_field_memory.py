"""Field reports about memory: limits that hold, pools that run out, leaks, page sizes."""

import mmap
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import CapacityError
from kvtier.io import buffers
from kvtier.io.buffers import BufferPool, aligned_bytes, give_back
from kvtier.io.pagecache import cached_bytes
from kvtier.tiering.config import Config
from kvtier.tiering.drive_eviction import NO_PARENT, DriveUsage, least_recently_used
from kvtier.tiering.eviction import ReadCost, Usage, plan_eviction
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.writer import hot_bytes_min
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    Shuffled,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OF_M = KV(PLAIN)
ENOUGH_S = 20.0
"""Far above what it takes, far below for ever."""


def test_memory_that_cannot_be_had_is_an_error_at_once(tmp_path: Path) -> None:
    """A023: HOT is full of Tails, the region that would take them is full too: nothing can ever be
    freed, so nothing is waited for; and when somebody lets go, it goes on."""
    config = Config("2MiB", hot=hot_bytes_min(PLAIN))
    with open_store(tmp_path, PLAIN, config) as store:
        filler = store.sequence()
        extend(store, OF_M, filler, some_tokens(3 * SEGMENT_TOKENS + 300, 1))
        began = time.monotonic()
        pairs: list[tuple[Sequence, list[int]]] = []

        def extend_a_hundred() -> None:
            for seed in range(100):
                pairs.append((store.sequence(), some_tokens(200, 10 + seed)))
                extend(store, OF_M, *pairs[-1], pieces=50)

        with pytest.raises(CapacityError, match=r"full: \d+ bytes needed, \d+ bytes free"):
            extend_a_hundred()
        assert time.monotonic() - began < ENOUGH_S
        refused, tokens = pairs.pop()
        store.crop(refused, int(refused.lengths.min()))
        for sequence, held in pairs:
            check_everywhere(store, OF_M, sequence, held)
        store.release(filler)
        extend(store, OF_M, refused, tokens)
        check_bytes(store, OF_M, refused, tokens)
        assert store.stats().hot_bytes_max <= store.stats().hot_limit_bytes


@pytest.mark.parametrize(("hot", "host"), [(hot_bytes_min(PLAIN), 0), (MIB, 100_000), (MIB, MIB)])
def test_one_item_larger_than_every_tier_stays_inside_all_limits(
    tmp_path: Path, hot: int, host: int
) -> None:
    """A030: there is no "keep at least one": it goes to the next tier while it arrives."""
    tokens = some_tokens(9000, 1)
    assert len(tokens) * PLAIN.token_bytes > hot + host
    with open_store(tmp_path, PLAIN, Config("16MiB", hot=hot, host=host)) as store:
        sequence = store.sequence()
        extend(store, OF_M, sequence, tokens)
        store.save(sequence, "n", tokens)
        store.release(sequence)
        for _ in range(2):
            sequence = store.resume(tokens)
            check_everywhere(store, OF_M, sequence, tokens)
            store.release(sequence)
            stats = store.stats()
            assert stats.hot_bytes_max <= stats.hot_limit_bytes == hot
            assert stats.host_bytes <= stats.host_limit_bytes == host
            assert (stats.host_bytes > 0) is (host > 0)
        check_settled(store, tmp_path)


class Rounds:
    """Random use of a store by holders that come and go; what is saved is always the same."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = np.random.default_rng(seed)
        self.saved = [some_tokens(150 + 190 * each, each) for each in range(4)]
        self.held: list[tuple[Sequence, list[int]]] = []

    def pick(self) -> int:
        return int(self.random.integers(len(self.held)))

    def once(self) -> None:
        action = int(self.random.integers(6))
        if action == 0 or not self.held:
            tokens = self.saved[int(self.random.integers(4))]
            wanted = tokens[: int(self.random.integers(1, len(tokens) + 1))]
            sequence = self.store.resume(wanted)
            self.held.append((sequence, wanted[: sequence.length()]))
        elif action == 1:
            sequence, tokens = self.held[self.pick()]
            tokens += some_tokens(int(self.random.integers(1, 60)), int(self.random.integers(99)))
            extend(self.store, OF_M, sequence, tokens)
        elif action == 2:
            sequence, tokens = self.held[self.pick()]
            self.held.append((self.store.fork(sequence), list(tokens)))
        elif action == 3:
            sequence, tokens = self.held[self.pick()]
            del tokens[int(self.random.integers(len(tokens) + 1)) :]
            self.store.crop(sequence, len(tokens))
        elif action == 4:
            number = int(self.random.integers(4))
            put(self.store, OF_M, f"n{number}", self.saved[number])
        while len(self.held) > (6 if action < 5 else 2):
            self.store.release(self.held.pop(self.pick())[0])

    def replay(self) -> tuple[int, int]:
        """Tokens asked for and found, of a fixed replay."""
        before = self.store.stats()
        for number, tokens in enumerate(self.saved):
            self.store.release(self.store.resume(tokens + some_tokens(50, 70 + number)))
        after = self.store.stats()
        return (
            after.tokens_looked_up - before.tokens_looked_up,
            after.tokens_matched - before.tokens_matched,
        )


def soak(path: Path, seed: int, rounds: int) -> None:
    config = Config("2MiB", hot=2 * hot_bytes_min(PLAIN))
    with open_store(path, PLAIN, config, Shuffled(seed)) as store:
        walk = Rounds(store, seed)
        for number, tokens in enumerate(walk.saved):
            put(store, OF_M, f"n{number}", tokens)
        device_bytes, first = store.stats().device_bytes, walk.replay()
        assert first == (sum(map(len, walk.saved)) + 200, sum(map(len, walk.saved)))
        for number in range(rounds):
            walk.once()
            if number % 50 == 0 and walk.held:
                sequence, tokens = walk.held[walk.pick()]
                if tokens:
                    check_everywhere(store, OF_M, sequence, tokens)
        for sequence, _ in walk.held:
            store.release(sequence)
        assert walk.replay() == first
        assert store.stats().device_bytes == device_bytes
        check_settled(store, path)
        put(store, OF_M, "fresh", some_tokens(700, 77))
        check_settled(store, path)


@pytest.mark.parametrize("seed", [1, 2])
def test_rounds_of_use_leak_nothing(tmp_path: Path, seed: int) -> None:
    """A024: room, leases and the hit rate of a fixed replay are at the end what they were."""
    soak(tmp_path, seed, 150)


@pytest.mark.slow
def test_ten_thousand_rounds_of_use_leak_nothing(tmp_path: Path) -> None:
    """A024, as long as the report."""
    soak(tmp_path, 3, 10_000)


def test_evicting_very_many_units_is_one_quick_plan() -> None:
    """A033: a million units over the limit are planned in one sorting, not one by one."""
    count = 1_000_000
    random = np.random.default_rng(1)
    usage = Usage(
        np.zeros(count, np.int64),
        np.arange(count),
        np.full(count, 4096),
        random.permutation(count),
        random.permutation(count),
        random.permutation(count),
        now=count,
        idle_before=count // 2,
    )
    began = time.monotonic()
    victims = plan_eviction(usage, ReadCost(), 4096 * (count - 1000))
    assert time.monotonic() - began < ENOUGH_S
    assert len(victims.slots) == count - 1000
    assert len(set(victims.slots.tolist())) == count - 1000


def test_evicting_very_many_segments_from_the_drive_is_one_quick_plan() -> None:
    """A033: a region of 100,000 Segments gives up all but a thousand, chains from their ends."""
    count = 100_000
    chains = np.arange(count) - 1
    chains[::4] = NO_PARENT
    usage = DriveUsage(
        chains,
        np.full(count, 4096, np.int64),
        np.random.default_rng(1).random(count),
        np.zeros(count, np.bool_),
        np.zeros(count, np.bool_),
    )
    began = time.monotonic()
    victims = least_recently_used(usage, 4096 * (count - 1000))
    assert time.monotonic() - began < ENOUGH_S
    assert len(victims) == len(set(victims)) == count - 1000


@pytest.mark.parametrize("page_bytes", [4096, 16_384, 65_536])
def test_larger_pages_of_the_system_are_respected(
    monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    """A061: only whole pages of the system are given back, whatever their size is."""
    returned: list[tuple[int, int]] = []
    monkeypatch.setattr(buffers, "os_page_bytes", lambda: page_bytes)
    monkeypatch.setattr(buffers, "return_pages", lambda start, size: returned.append((start, size)))
    memory = aligned_bytes(MIB)
    base = memory.ctypes.data
    assert base % mmap.PAGESIZE == 0
    give_back(memory, 5000, 300_000)
    give_back(memory, 1, page_bytes)
    give_back(memory, page_bytes, page_bytes)
    assert returned[-1] == (base + page_bytes, page_bytes)
    assert len(returned) == 2
    for start, size in returned:
        assert (start - base) % page_bytes == 0
        assert size % page_bytes == 0
    first, size = returned[0]
    assert base + 5000 <= first < base + 5000 + page_bytes
    assert first + size <= base + 305_000


def test_pools_begin_on_pages_of_the_system() -> None:
    """A061: on this machine, for sizes that are no multiple of anything."""
    for nbytes in (1, 4095, 4097, 1_000_003):
        pool = BufferPool(nbytes)
        assert pool.memory.ctypes.data % mmap.PAGESIZE == 0
        assert nbytes <= pool.memory_bytes < nbytes + 4096


def test_a_region_is_never_mapped_and_fills_no_page_cache(tmp_path: Path) -> None:
    """A118: ten times HOT is written and read; the kernel caches nothing of it."""
    tokens = some_tokens(20_000, 1)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=hot_bytes_min(PLAIN))) as store:
        if not store.stats().direct_io:
            pytest.skip(f"no direct I/O here: {store.stats().direct_io_reason}")
        assert len(tokens) * PLAIN.token_bytes > 10 * store.stats().hot_limit_bytes
        put(store, OF_M, "n", tokens)
        sequence = store.resume(tokens)
        check_everywhere(store, OF_M, sequence, tokens)
        assert store.stats().bytes_read > len(tokens) * PLAIN.token_bytes / 2
        assert "region.kv" not in Path("/proc/self/maps").read_text()
        assert cached_bytes(str(tmp_path / "region.kv")) == 0
        assert store.stats().hot_bytes_max <= store.stats().hot_limit_bytes
