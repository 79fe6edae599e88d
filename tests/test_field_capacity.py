"""Field reports about room on the drive: limits, full disks, the number of files, item sizes."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import CapacityError, KvtierError
from kvtier.tiering.chain import chain_digest
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import EXACT
from kvtier.tiering.listing import describe
from kvtier.tiering.prefix_index import PrefixIndex
from kvtier.tiering.segment import Segment
from kvtier.tiering.verifier import verify
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")
OF_M = KV(PLAIN)


def test_a_region_never_outgrows_its_limit(tmp_path: Path) -> None:
    """A046, A048: far more than fits is put, half of it after the store was opened anew: the file
    keeps its size and its blocks, and what was accepted last is exact."""
    region, refused, last = tmp_path / "region.kv", 0, 0
    for first in (0, 20):
        config = Config("4MiB" if not first else None, hot=MIB)
        with open_store(tmp_path, PLAIN, config) as store:
            for seed in range(first, first + 20):
                try:
                    put(store, OF_M, f"n{seed}", [seed, *some_tokens(1000, seed)])
                    last = seed
                except CapacityError:
                    refused += 1
                assert store.stats().device_bytes <= store.stats().region_bytes == 4 * MIB
            tokens = [last, *some_tokens(1000, last)]
            sequence = store.resume(tokens)
            check_bytes(store, OF_M, sequence, tokens)
            store.release(sequence)
            status = region.stat()
            assert (status.st_size, status.st_blocks * 512) == (4 * MIB, 4 * MIB)
    used = describe(tmp_path).used_bytes
    assert 20 * 1000 * PLAIN.token_bytes > 4 * MIB > used > 2 * MIB, "it was never full"
    assert refused or last == 39


def test_room_comes_back_by_every_way_in_which_a_put_can_end(tmp_path: Path) -> None:
    """A047: released unsaved, cropped, forked, refused, stored twice, name given to another: the
    count is that of a recount, and the last put is accepted."""
    with open_store(tmp_path, PLAIN, Config("4MiB", hot=MIB)) as store:
        put(store, OF_M, "kept", some_tokens(700, 1))
        put(store, OF_M, "same", some_tokens(700, 1))
        used = store.stats().device_bytes
        for turn in range(6):
            tokens = [turn, *some_tokens(1200, 50 + turn)]
            sequence = store.sequence()
            extend(store, OF_M, sequence, tokens, pieces=500)
            twin = store.fork(sequence)
            store.crop(twin, 600)
            store.release(sequence)
            with pytest.raises(CapacityError):
                extend(store, OF_M, twin, tokens[:600] + some_tokens(40_000, turn))
            store.release(twin)
            put(store, OF_M, "kept" if turn % 2 else "same", some_tokens(700, 1))
            assert store.stats().device_bytes == describe(tmp_path).used_bytes == used
        put(store, OF_M, "last", some_tokens(1000, 99))
        check_settled(store, tmp_path)


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_one_item_of_most_of_the_limit_is_stored(tmp_path: Path, share: float) -> None:
    """A053: no smaller limit is hidden inside, and nothing is dropped silently."""
    room = 4 * MIB - MIB - 4096
    # A twentieth for headers: eight grid blocks for two layers of 512 tokens.
    tokens = some_tokens(int(share * room * 0.92 / PLAIN.token_bytes), 1)
    with open_store(tmp_path, PLAIN, Config("4MiB", hot=MIB)) as store:
        put(store, OF_M, "n", tokens)
        assert store.stats().device_bytes > 0.85 * share * room
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        check_bytes(store, OF_M, store.resume(tokens), tokens)


def test_one_item_of_more_than_the_limit_is_an_error_with_sizes(tmp_path: Path) -> None:
    """A053."""
    tokens = some_tokens(4 * MIB // PLAIN.token_bytes, 1)
    with open_store(tmp_path, PLAIN, Config("4MiB", hot=MIB)) as store:
        with pytest.raises(CapacityError, match=r"\d+ bytes needed, \d+ bytes free of \d+"):
            put(store, OF_M, "more", tokens)
        assert (store.names(), store.lookup(tokens)) == ([], 0)


def test_the_number_of_files_does_not_grow(tmp_path: Path) -> None:
    """A052: one region, one catalog, whatever number of blocks is stored."""
    counts = []
    with open_store(tmp_path, PLAIN, Config("16MiB", hot=MIB)) as store:
        for seed in range(120):
            put(store, OF_M, f"n{seed}", [seed, 1, 2])
            counts.append(len(os.listdir(tmp_path)))
        assert store.stats().segments == 120
    assert set(counts) == {counts[0]}
    assert len(os.listdir(tmp_path)) <= counts[0]


def lookup_s(index: PrefixIndex, count: int) -> float:
    """The best of several times that a lookup takes among so many Segments."""
    asked = [np.array([seed, 5, 6, 7], np.uint32) for seed in range(0, count, count // 50)]
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for tokens in asked:
            assert index.match(tokens)[-1].end == 3
        best = min(best, (time.perf_counter() - began) / len(asked))
    return best


def test_a_lookup_among_very_many_blocks_is_not_slower(tmp_path: Path) -> None:
    """A052: at 40,000 blocks within three times of that at 1,000, and not forty times."""
    index, times = PrefixIndex(), []
    for seed in range(40_000):
        tokens = np.array([seed, 5, 6], np.uint32)
        index.add(
            Segment(
                start=0,
                layers=1,
                provenance=EXACT,
                parent=None,
                token_count=3,
                filled=[3],
                tokens=tokens,
                start_digest=chain_digest(tokens[:0]),
                end_digest=chain_digest(tokens),
                catalog_id=seed + 1,
            )
        )
        if seed + 1 in (1000, 40_000):
            times.append(lookup_s(index, seed + 1))
    # A little is allowed for caches of the processor and for a busy machine.
    assert times[1] < 3 * times[0] + 2e-4, times


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB, mounted for the test."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"cannot mount a tmpfs: {result.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill_disk(path: Path) -> None:
    with (path / "foreign").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


@pytest.mark.loop
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_a_typed_error_and_the_store_stays_usable(small_disk: Path) -> None:
    """A049: the region's own room is reserved, so only the catalog can hit the full disk; what was
    saved is exact, and when there is room again, saving goes on."""
    path = small_disk / "store"
    refused: list[str] = []
    with open_store(path, PLAIN, Config("12MiB", hot=MIB)) as store:
        put(store, OF_M, "a", some_tokens(600, 1))
        fill_disk(small_disk)
        saved = []
        for seed in range(40):
            tokens = [seed, *some_tokens(600, seed)]
            sequence = store.sequence()
            extend(store, OF_M, sequence, tokens)
            try:
                store.save(sequence, f"n{seed}", tokens)
                saved.append(seed)
            except KvtierError as error:
                refused.append(str(error))
            store.release(sequence)
            assert store.lookup(tokens) == (601 if seed in saved else 0)
        assert refused, "the disk was never full"
        assert all("full" in each for each in refused)
        check_bytes(store, OF_M, store.resume(some_tokens(600, 1)), some_tokens(600, 1))
        (small_disk / "foreign").unlink()
        put(store, OF_M, "after", some_tokens(600, 77))
    assert verify(path).ok
    with open_store(path, PLAIN, Config(hot=MIB)) as store:
        lists = [some_tokens(600, 1), some_tokens(600, 77)]
        for tokens in lists + [[seed, *some_tokens(600, seed)] for seed in saved]:
            sequence = store.resume(tokens)
            check_bytes(store, OF_M, sequence, tokens)
            store.release(sequence)


@pytest.mark.loop
def test_a_sparse_region_on_a_full_disk_is_an_error_and_no_signal(small_disk: Path) -> None:
    """A120: blocks of a sparse file are allocated when they are written; nothing is mapped."""
    sparse = small_disk / "sparse"
    with sparse.open("wb") as file:
        file.truncate(16 * MIB)
    with open_store(small_disk / "store", PLAIN, Config(str(sparse), hot=MIB)) as store:
        put(store, OF_M, "a", some_tokens(600, 1))
        fill_disk(small_disk)
        refused: list[KvtierError] = []
        for seed in range(20):
            sequence = store.sequence()
            try:
                extend(store, OF_M, sequence, [seed, *some_tokens(1200, seed)])
                store.save(sequence, f"n{seed}", [seed, *some_tokens(1200, seed)])
            except KvtierError as error:
                refused.append(error)
            store.release(sequence)
        assert refused
        assert all(isinstance(each, OSError) for each in refused)
        assert all("No space left" in str(each) or "full" in str(each) for each in refused)
        check_bytes(store, OF_M, store.resume(some_tokens(600, 1)), some_tokens(600, 1))
        (small_disk / "foreign").unlink()
        put(store, OF_M, "after", some_tokens(600, 77))
        check_bytes(store, OF_M, store.resume(some_tokens(600, 77)), some_tokens(600, 77))
