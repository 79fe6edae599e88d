"""A second process for tests of the store: `python store_worker.py JOB DIRECTORY [SEED]`."""

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvtier.errors import KvtierError
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


def prefill_in_one_piece(directory: Path, _: int) -> None:
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
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def open_and_say(directory: Path, uid: int) -> None:
    """Open the store as this user and print the error that it raises."""
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    try:
        open_store(directory, PLAIN, Config(None, hot=MIB)).close()
    except KvtierError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("opened")


JOBS = {each.__name__: each for each in (prefill_in_one_piece, open_and_say)}

if __name__ == "__main__":
    JOBS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
