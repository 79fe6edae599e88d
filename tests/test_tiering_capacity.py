"""A region that is full: what leaves, what stays, and that the limit is never passed."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import CapacityError, ConfigError, DeviceError
from kvtier.io.device import Buffers, Int64Array
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.listing import describe
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.late_writes import at_once
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
ROOT = Path(__file__).resolve().parent.parent
ONE = SEGMENT_TOKENS
"""Tokens of one Segment: 139,264 bytes of Extents with PLAIN, seven of them in 2 MiB."""


def texts(count: int, tokens: int = ONE) -> dict[str, list[int]]:
    return {f"n{index}": some_tokens(tokens, 100 + index) for index in range(count)}


def small(path: Path, **settings: object) -> Store:
    config = Config("2MiB", hot=MIB, **settings)  # type: ignore[arg-type]
    return open_store(path, PLAIN, config)


def exact(store: Store, tokens: list[int]) -> int:
    """Tokens that are found, all of them exact. Other texts may begin with the same few."""
    sequence = store.resume(tokens)
    found = sequence.length()
    if found:
        check_bytes(store, OF_M, sequence, tokens[:found])
    store.release(sequence)
    return found


def test_a_full_region_lets_the_oldest_go(tmp_path: Path) -> None:
    """A046, A050: every put succeeds, the newest can be read, and the limit holds."""
    everything = texts(25)
    with small(tmp_path) as store:
        for name, tokens in everything.items():
            put(store, OF_M, name, tokens)
            assert store.stats().device_bytes <= 2 * MIB
        kept = [each.name for each in store.names()]
        assert sorted(kept) == sorted(list(everything)[-len(kept) :]), "not the newest"
        assert 5 <= len(kept) < 25
        for name, tokens in everything.items():
            assert exact(store, tokens) == (ONE if name in kept else 0)
        assert store.stats().segments_evicted == 25 - len(kept)
        check_settled(store, tmp_path)
    assert (tmp_path / "region.kv").stat().st_size == 2 * MIB
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        for name, tokens in everything.items():
            assert exact(store, tokens) == (ONE if name in kept else 0)


def test_use_decides_and_not_age_and_it_is_remembered(tmp_path: Path) -> None:
    everything = texts(5)
    with small(tmp_path) as store:
        for name, tokens in everything.items():
            put(store, OF_M, name, tokens)
        assert exact(store, everything["n0"]) == ONE
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        for seed in range(3):
            put(store, OF_M, f"new{seed}", some_tokens(ONE, seed))
        assert "n0" in [each.name for each in store.names()]
        assert store.stats().segments_evicted > 0


def test_a_chain_loses_its_end_and_keeps_its_beginning(tmp_path: Path) -> None:
    """A029: what is left of a chain still matches, and nothing unreachable stays."""
    for seed in range(10):
        path = tmp_path / str(seed)
        tokens = some_tokens(3 * ONE, seed)
        with small(path) as store:
            put(store, OF_M, "chain", tokens)
            for number in range(10):
                put(store, OF_M, f"n{number}", some_tokens(ONE, 1000 + 20 * seed + number))
                # Asking is no use: what is only looked up is as old as before.
                found = store.lookup(tokens)
                assert found % ONE == 0
                if found < 3 * ONE:
                    break
            assert found == exact(store, tokens) == 2 * ONE, "not from its end"
            assert "chain" not in [each.name for each in store.names()], "its end is gone"
            check_settled(store, path)


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    tokens = some_tokens(3 * ONE, 1)
    with small(tmp_path) as store:
        put(store, OF_M, "used", tokens)
        sequence = store.resume(tokens)
        twin = store.fork(sequence)
        store.release(sequence)
        for name, others in texts(12).items():
            put(store, OF_M, name, others)
        check_bytes(store, OF_M, twin, tokens)
        store.release(twin)


def test_when_everything_is_in_use_it_is_an_error_with_sizes(tmp_path: Path) -> None:
    with small(tmp_path) as store:
        put(store, OF_M, "a", some_tokens(3 * ONE, 1))
        sequence = store.resume(some_tokens(3 * ONE, 1))
        grown = some_tokens(12 * ONE, 2)
        other = store.sequence()
        with pytest.raises(CapacityError, match=r"region .* is full: \d+ bytes needed"):
            extend(store, OF_M, other, grown)
        store.release(other)
        check_bytes(store, OF_M, sequence, some_tokens(3 * ONE, 1))
        store.release(sequence)
        put(store, OF_M, "b", some_tokens(5 * ONE, 3))
        check_settled(store, tmp_path)


def test_what_cannot_fit_evicts_nothing(tmp_path: Path) -> None:
    """Neither a Blob larger than the region, nor one layer of a prompt that is, beside what is
    held and in use."""
    with small(tmp_path, hold_limit="2MiB") as store:
        for name, tokens in texts(5).items():
            put(store, OF_M, name, tokens)
        store.put_blob("small", b"abc")
        store.flush()
        names = [each.name for each in store.names()]
        assert len(names) == 5
        with pytest.raises(CapacityError, match="may be evicted"):
            store.put_blob("large", bytes(3 * MIB))
        store.hold("n0")
        store.hold("n1")
        sequence = store.sequence()
        # One layer of it alone is as large as what is not held.
        with pytest.raises(CapacityError, match="may be evicted"):
            extend(store, OF_M, sequence, some_tokens(24 * ONE, 1))
        store.release(sequence)
        assert [each.name for each in store.names()] == names
        assert store.get_blob("small") == b"abc"
        assert store.stats().segments_evicted == 0
        check_settled(store, tmp_path)


def test_other_models_segments_make_room_too(tmp_path: Path) -> None:
    with small(tmp_path) as store:
        for name, tokens in texts(5).items():
            put(store, OF_M, name, tokens)
    other = KV(PLAIN, salt=7)
    with open_store(tmp_path, PLAIN, Config(hot=MIB), model="other") as store:
        assert exact(store, texts(1)["n0"]) == 0
        for seed in range(4):
            put(store, other, f"o{seed}", some_tokens(ONE, seed))
        assert store.stats().segments_evicted > 0
        for seed in range(4):
            check_bytes(store, other, store.resume(some_tokens(ONE, seed)), some_tokens(ONE, seed))
    assert verify(tmp_path).ok


def test_usage_is_right_after_kill_and_the_limit_holds(tmp_path: Path) -> None:
    """A048, A067: filled, killed, opened again, and filled further."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.store_cases import *\n"
        "from tests.test_tiering_capacity import OF_M, small, texts\n"
        "store = small(Path(sys.argv[1]))\n"
        "for name, tokens in texts(5).items():\n"
        "    put(store, OF_M, name, tokens)\n"
        "print(store.stats().device_bytes, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False, timeout=100,
    )  # fmt: skip
    assert result.returncode == -signal.SIGKILL, result.stderr
    with open_store(tmp_path / "s", PLAIN, Config(hot=MIB)) as store:
        assert store.stats().device_bytes == int(result.stdout)
        for seed in range(3):
            put(store, OF_M, f"new{seed}", some_tokens(ONE, seed))
            assert store.stats().device_bytes <= 2 * MIB
            check_settled(store, tmp_path / "s")
        for tokens in texts(5).values():
            assert exact(store, tokens) in (0, ONE)


def test_space_is_the_same_after_every_way_of_leaving(tmp_path: Path) -> None:
    """A047: removed, replaced, evicted, cleared, refused: the count is right each time."""
    random = np.random.default_rng(1)
    with small(tmp_path) as store:
        empty = store.stats().device_bytes
        for turn in range(60):
            name = f"n{int(random.integers(3))}"
            put(store, OF_M, name, some_tokens(int(random.integers(20, 900)), 50 + turn))
            if random.random() < 0.3:
                store.remove(name)
            if random.random() < 0.1:
                sequence = store.sequence()
                with pytest.raises(CapacityError):
                    extend(store, OF_M, sequence, some_tokens(9 * ONE, turn))
                store.release(sequence)
            assert store.stats().device_bytes == describe(tmp_path).used_bytes
        check_settled(store, tmp_path)
        store.clear()
        assert (store.stats().device_bytes, store.stats().segments) == (empty, 0)
        put(store, OF_M, "last", some_tokens(3 * ONE, 9))
        check_settled(store, tmp_path)


class Thin:
    """A thinly provisioned device: out of space at `room` bytes until something is discarded."""

    def __init__(self, store: Store, room: int) -> None:
        self.device = store._files.region.device
        self.room, self.refused, self.discarded = room, 0, 0
        self._write, self._discard = self.device.write, self.device.discard
        self.device.write = self.write  # type: ignore[method-assign]
        self.device.start_write = at_once(self.device)  # type: ignore[method-assign]
        self.device.discard = self.discard  # type: ignore[method-assign]

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        wanted = int(buffers.lengths[buffers.lengths > 8192].sum())
        if wanted > self.room:
            self.refused += 1
            raise DeviceError("no space left on device", errno.ENOSPC, [(0, errno.ENOSPC)])
        self.room -= wanted
        self._write(offsets, buffers)

    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        self.discarded += int(lengths.sum())
        self.room += int(lengths.sum())
        return self._discard(offsets, lengths)


def test_no_space_below_the_limit_means_eviction_and_one_more_try(tmp_path: Path) -> None:
    """A049: the device is full before the region is."""
    with open_store(tmp_path, PLAIN, Config("8MiB", hot=MIB)) as store:
        thin = Thin(store, 6 * 140_000)
        for name, tokens in texts(12).items():
            put(store, OF_M, name, tokens)
        assert thin.refused > 0
        assert thin.discarded > 0
        assert store.stats().segments_evicted > 0
        names = [each.name for each in store.names()]
        assert "n11" in names
        for name, tokens in texts(12).items():
            found = exact(store, tokens)
            assert found == ONE if name in names else found < 5
        thin.room = 0
        store.hold(names[0])
        sequence = store.resume(texts(12)[names[0]])
        for name in names[1:]:
            store.remove(name)
        thin.room = 0
        with pytest.raises(DeviceError, match="no space left") as refused:
            put(store, OF_M, "more", some_tokens(ONE, 1))
        assert refused.value.errno == errno.ENOSPC
        check_bytes(store, OF_M, sequence, texts(12)[names[0]])


def test_a_region_larger_than_its_device_is_refused(tmp_path: Path) -> None:
    """A051: both sizes are named, and nothing is made."""
    region = tmp_path / "region.img"
    region.write_bytes(bytes(4 * MIB))
    with open_store(tmp_path / "s", PLAIN, Config(str(region), hot=MIB)):
        pass
    before = region.read_bytes()
    os.truncate(region, 3 * MIB)
    with pytest.raises(ConfigError, match=rf"{3 * MIB} bytes.*{4 * MIB} bytes"):
        open_store(tmp_path / "s", PLAIN, Config(hot=MIB))
    assert region.read_bytes() == before[: 3 * MIB]


def test_discard_is_asked_for_only_where_it_is_wanted(tmp_path: Path) -> None:
    for wanted in (False, True):
        with small(tmp_path / str(wanted), discard=wanted) as store:
            thin = Thin(store, 10**9)
            put(store, OF_M, "n", some_tokens(ONE, 1))
            nbytes = sum(each.nbytes for each in store._files.inventory.entries.values())
            store.remove("n")
            assert thin.discarded == (nbytes + 4096 if wanted else 0)
