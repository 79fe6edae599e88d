"""Second processes for tests of the store: forked ones, and this file run as a program.

`python store_worker.py DIRECTORY` measures one prefill in a process that holds nothing else.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import bounce_bytes
from kvtier.tiering.geometry import Geometry
from tests.store_cases import KV, MIB, PLAIN, extend, open_store, put, some_tokens

LARGE = Geometry.uniform(3, 4, 64)
LARGE_TOKENS = 16 * 1024


def save_until_killed(directory: Path, seed: int, say: Callable[[str], object]) -> None:
    """Save one name after the other and say each one once it is acknowledged.

    Odd names hang below the even ones before them, at a position inside a Segment.
    """
    kv = KV(PLAIN)
    with open_store(directory, PLAIN, Config(hot=MIB)) as store:
        say("ready")
        for number in range(10_000):
            put(store, kv, f"n{number}", tokens_of(seed, number), pieces=400)
            say(f"n{number}")


def tokens_of(seed: int, number: int) -> list[int]:
    """What `save_until_killed` saves as its number-th name."""
    if number % 2:
        return tokens_of(seed, number - 1)[:-20] + some_tokens(60, seed + number)
    return some_tokens(560 + 37 * (number % 5), seed + number)


def prefill_in_one_piece(directory: Path) -> None:
    """A prompt four times HOT in one pass; prints growth of memory and what it may be, in bytes."""
    kv = KV(LARGE)
    tokens = some_tokens(LARGE_TOKENS, 1)
    rows = [kv.rows(tokens, layer) for layer in range(3)]
    hot = LARGE_TOKENS * LARGE.token_bytes // 4
    # Threads, workspaces and code that is loaded at first use are not the store's tiers.
    with open_store(directory / "warm", LARGE, Config("64MiB", hot=2 * MIB)) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens[:600])
        store.attend(sequence, 0, rows[0][0].repeat_interleave(2, 0)[:, :1])
    before = peak_bytes()
    with open_store(directory / "store", LARGE, Config("256MiB", hot=hot)) as store:
        sequence = store.sequence()
        for layer, (keys, values) in enumerate(rows):
            store.append(sequence, layer, keys, values)
        query = rows[0][0].repeat_interleave(2, 0)[:, -1:].contiguous()
        for layer in range(3):
            store.attend(sequence, layer, query)
        stats = store.stats()
        assert stats.hot_bytes_max <= stats.hot_limit_bytes == hot
    print(peak_bytes() - before, hot + bounce_bytes(LARGE) + 64 * MIB, hot)


def peak_bytes() -> int:
    """The most memory that this program ever held. (getrusage counts that of its parent, too.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("the kernel does not tell VmHWM")


def in_a_child(work: Callable[[], None]) -> int:
    """Run in a forked child; its exit status, 0 if `work` returned. Never waits for ever."""
    pid = os.fork()
    if not pid:
        # The thread pool of torch does not survive a fork.
        torch.set_num_threads(1)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    timer = threading.Timer(20.0, os.kill, (pid, 9))
    timer.start()
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        timer.cancel()
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    prefill_in_one_piece(Path(sys.argv[1]))
