"""Field reports about the next process: what it finds, counts, reads and refuses."""

import hashlib
import os
import re
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
import yaml

from kvtier.errors import FormatError, VersionMismatch
from kvtier.io.catalog import CATALOG_VERSION
from kvtier.io.device import Buffers, Int64Array, Priority
from kvtier.io.superblock import FORMAT_VERSION, copy_offsets
from kvtier.io.threads import ThreadsDevice
from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tiering.store_files import LAYOUT_VERSION
from kvtier.tiering.verifier import verify
from tests.region_cases import patch, peek
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_settled,
    open_store,
    put,
    some_tokens,
)
from tests.store_worker import in_a_child

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parent.parent
OF_M = KV(PLAIN)
CONFIG = Config("8MiB", hot=MIB)
AGAIN = Config(hot=MIB)


def killed(work: Callable[[], None]) -> None:
    """Run in a child that is killed when the work is done: nothing is closed."""

    def until_killed() -> None:
        work()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(until_killed) == -signal.SIGKILL


def test_another_process_finds_all_and_writes_nothing_again(tmp_path: Path) -> None:
    """A044, A073: saved length is matched length, with the same tokens and one more; saving again
    what is stored costs no byte."""
    lists = [some_tokens(300 + 250 * seed, seed) for seed in range(4)]

    def save() -> None:
        with open_store(tmp_path, PLAIN, CONFIG) as store:
            for seed, tokens in enumerate(lists):
                put(store, OF_M, f"n{seed}", tokens)

    assert in_a_child(save) == 0
    with open_store(tmp_path, PLAIN, AGAIN) as store:
        for seed, tokens in enumerate(lists):
            assert store.lookup([*tokens, 5]) == len(tokens)
            sequence = store.resume([*tokens, 5])
            check_bytes(store, OF_M, sequence, tokens)
            store.save(sequence, f"again{seed}", tokens)
            store.release(sequence)
            put(store, OF_M, f"anew{seed}", tokens)
        stats = store.stats()
        asked = sum(len(tokens) + 1 for tokens in lists)
        assert (stats.tokens_looked_up, stats.tokens_matched) == (asked, asked - 4)
        assert stats.segments == 1 + 2 + 2 + 3
        assert stats.device_bytes == describe(tmp_path).used_bytes
        assert sum(each.tokens for each in describe(tmp_path).segments) == asked - 4


def test_usage_is_known_after_a_kill_and_room_is_not_given_twice(tmp_path: Path) -> None:
    """A048, A067, A115: filled to more than half, killed, opened: the same numbers; then more is
    written, and the old half is exact."""
    lists = [some_tokens(600, seed) for seed in range(12)]
    numbers = tmp_path / "numbers"

    def fill() -> None:
        store = open_store(tmp_path / "store", PLAIN, CONFIG)
        for seed, tokens in enumerate(lists):
            put(store, OF_M, f"n{seed}", tokens)
        stats = store.stats()
        numbers.write_text(f"{stats.region_bytes} {stats.device_bytes} {stats.segments}")

    killed(fill)
    with open_store(tmp_path / "store", PLAIN, AGAIN) as store:
        stats = store.stats()
        found = f"{stats.region_bytes} {stats.device_bytes} {stats.segments}"
        assert found == numbers.read_text()
        assert stats.device_bytes > 12 * 600 * PLAIN.token_bytes
        assert (stats.hot_limit_bytes, stats.host_limit_bytes) == (MIB, 0)
        check_settled(store, tmp_path / "store")
        for seed in range(12, 20):
            put(store, OF_M, f"n{seed}", some_tokens(600, seed))
        for seed in range(20):
            tokens = some_tokens(600, seed)
            sequence = store.resume(tokens)
            check_bytes(store, OF_M, sequence, tokens)
            store.release(sequence)
        assert store.stats().device_bytes <= store.stats().region_bytes
        check_settled(store, tmp_path / "store")


def test_opening_reads_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A071: the copies of the superblock are read, whatever number of Segments there are."""
    with open_store(tmp_path, PLAIN, CONFIG) as store:
        for seed in range(100):
            put(store, OF_M, f"n{seed}", some_tokens(3, seed))
    reads: list[tuple[int, int]] = []
    genuine = ThreadsDevice.read

    def read(
        self: ThreadsDevice, offsets: Int64Array, buffers: Buffers, *priority: Priority
    ) -> None:
        reads.extend(zip(offsets.tolist(), buffers.lengths.tolist(), strict=True))
        genuine(self, offsets, buffers, *priority)

    monkeypatch.setattr(ThreadsDevice, "read", read)
    with open_store(tmp_path, PLAIN, Config(hot=MIB, engine="threads")) as store:
        assert store.stats().segments == 100
        assert store.stats().bytes_read == 0
        assert sorted(set(reads)) == sorted((each, 4096) for each in copy_offsets(8 * MIB))
        assert store.lookup(some_tokens(3, 50)) == 3


ENDINGS = {
    "falls off the end": "pass",
    "sys.exit in the block": "sys.exit(3)",
    "an exception": "raise ValueError('mine')",
    "Ctrl-C": "os.kill(os.getpid(), 2); import time; time.sleep(30)",
}
# One interpreter loads torch; each ending is a fork of it that ends as an interpreter does.
SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from tests.store_cases import *
torch.set_num_threads(1)
jobs = [("io_uring", each) for each in sys.argv[3:]] + [("threads", each) for each in sys.argv[-2:]]
children = []
for number, (engine, ending) in enumerate(jobs):
    pid = os.fork()
    if not pid:
        children = []
        break
    children.append(pid)
else:
    number = None
if number is not None:
    path = Path(sys.argv[2], str(number))
    store = open_store(path, PLAIN, Config("8MiB", hot=MIB, engine=engine))
    put(store, KV(PLAIN), "n", some_tokens(600, 1))
    sequence = store.resume(some_tokens(600, 1))
    extend(store, KV(PLAIN), sequence, some_tokens(600, 1) + some_tokens(100, 2))
    exec(ending)
for pid in children:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_script_that_never_closes_ends_and_loses_nothing(tmp_path: Path) -> None:
    """A070: four ways to end, on both engines, none of which closes the store."""
    command = [sys.executable, "-c", SCRIPT, str(ROOT), str(tmp_path), *ENDINGS.values()]
    # subprocess.run kills it after that time: a child that hangs would be waited for.
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    statuses = [int(each) for each in result.stdout.split()]
    assert statuses == [0, 3, 1, -signal.SIGINT, 1, -signal.SIGINT], result.stderr
    assert "Fatal" not in result.stderr
    for number in range(len(statuses)):
        path = tmp_path / str(number)
        assert verify(path).ok
        with open_store(path, PLAIN, AGAIN) as store:
            assert [each.name for each in store.names()] == ["n"]
            check_bytes(store, OF_M, store.resume(some_tokens(600, 1)), some_tokens(600, 1))
            put(store, OF_M, "next", some_tokens(100, 3))


# ---- other versions -------------------------------------------------------------------------


def set_superblock(path: Path, change: int) -> int:
    for offset in copy_offsets(8 * MIB):
        block = bytearray(peek(str(path / "region.kv"), offset, 4096))
        struct.pack_into("<I", block, 8, FORMAT_VERSION + change)
        struct.pack_into("<Q", block, 4088, xxhash.xxh3_64_intdigest(bytes(block[:4088])))
        patch(str(path / "region.kv"), offset, bytes(block))
    return FORMAT_VERSION + change


def set_catalog(path: Path, change: int) -> int:
    connection = sqlite3.connect(path / "catalog.sqlite")
    connection.execute(f"PRAGMA user_version = {CATALOG_VERSION + change}")
    connection.close()
    return CATALOG_VERSION + change


def set_layout(path: Path, change: int) -> int:
    settings = yaml.safe_load((path / "store.yaml").read_text())
    settings["layout_version"] = LAYOUT_VERSION + change
    (path / "store.yaml").write_text(yaml.safe_dump(settings))
    return LAYOUT_VERSION + change


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("set_version", [set_superblock, set_catalog, set_layout])
def test_another_version_is_one_clear_refusal(
    tmp_path: Path, set_version: Callable[[Path, int], int], change: int
) -> None:
    """A010, A068, A072: found and readable version, what to do, and not a byte changed: no store
    that seems to work and never hits."""
    with open_store(tmp_path, PLAIN, CONFIG) as store:
        put(store, OF_M, "n", some_tokens(600, 1))
    found = set_version(tmp_path, change)
    files = sorted(each for each in tmp_path.iterdir() if each.name != "lock")
    before = [hashlib.sha256(each.read_bytes()).digest() for each in files]
    for _ in range(2):
        with pytest.raises(FormatError) as caught:
            open_store(tmp_path, PLAIN, AGAIN)
        if found > 0:
            assert isinstance(caught.value, VersionMismatch)
            assert re.search(
                rf"version {found}; .*reads version {found - change}", str(caught.value)
            )
            assert "format the region anew" in str(caught.value)
    assert [hashlib.sha256(each.read_bytes()).digest() for each in files] == before
    set_version(tmp_path, 0)
    with open_store(tmp_path, PLAIN, AGAIN) as store:
        check_bytes(store, OF_M, store.resume(some_tokens(600, 1)), some_tokens(600, 1))
