"""A store whose process is killed with SIGKILL: what it acknowledged is there, bit for bit.

The kernel keeps what was written, so this shows the order of writes and commits, not the drive's
cache; `test_io_*` covers what a flush promises.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from kvtier.errors import FormatError
from kvtier.io.lock import StoreLock
from kvtier.tiering import store_files
from kvtier.tiering.config import Config
from kvtier.tiering.verifier import verify
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_everywhere,
    check_settled,
    open_store,
    put,
    some_tokens,
)
from tests.store_worker import save_until_killed, tokens_of


def run_and_kill(directory: Path, seed: int, after_s: float) -> list[str]:
    """Fork a process that saves, kill it `after_s` after it is ready; the names it acknowledged."""
    source, target = os.pipe()
    pid = os.fork()
    if not pid:
        # The thread pool of torch does not survive a fork.
        torch.set_num_threads(1)
        try:
            save_until_killed(directory, seed, lambda word: os.write(target, f"{word}\n".encode()))
        finally:
            os._exit(1)
    os.close(target)
    with os.fdopen(source) as said:
        try:
            assert said.readline() == "ready\n"
            time.sleep(after_s)
        finally:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, "it ended by itself"
        return said.read().split()


@pytest.mark.parametrize("seed", range(8))
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, seed: int) -> None:
    """A063."""
    kv = KV(PLAIN)
    after_s = random.Random(seed).uniform(0.02, 0.35)
    open_store(tmp_path, PLAIN, Config("64MiB", hot=MIB)).close()
    acknowledged = run_and_kill(tmp_path, 100 * seed, after_s)
    assert verify(tmp_path).findings == []
    with open_store(tmp_path, PLAIN, Config(hot=MIB)) as store:
        # The name that was being saved may be there as well, whole.
        names = [each.name for each in store.names()]
        assert set(acknowledged) <= set(names)
        assert len(names) <= len(acknowledged) + 1
        for name in names[-12:]:
            tokens = tokens_of(100 * seed, int(name[1:]))
            sequence = store.resume([*tokens, 1])
            check_bytes(store, kv, sequence, tokens)
            check_everywhere(store, kv, sequence, tokens)
            store.release(sequence)
        check_settled(store, tmp_path)
        put(store, kv, "after", some_tokens(700, 1))
        check_settled(store, tmp_path)


def test_the_crash_test_acknowledges_something(tmp_path: Path) -> None:
    """Otherwise the test above would pass on a store that saves nothing."""
    open_store(tmp_path, PLAIN, Config("64MiB", hot=MIB)).close()
    assert len(run_and_kill(tmp_path, 1, 0.6)) >= 3


def test_a_store_killed_while_it_was_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings are written last: without them the rest is a leftover, and not foreign data."""

    def cut(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store_files, "write_settings", cut)
        with pytest.raises(KeyboardInterrupt):
            open_store(tmp_path, PLAIN)
    assert not (tmp_path / "store.yaml").exists()
    with open_store(tmp_path, PLAIN) as store:
        assert store.names() == []
        check_settled(store, tmp_path)


def test_a_store_that_lost_its_settings_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    with open_store(tmp_path, PLAIN) as store:
        put(store, KV(PLAIN), "a", some_tokens(20, 1))
    settings = (tmp_path / "store.yaml").read_bytes()
    (tmp_path / "store.yaml").unlink()
    with pytest.raises(FormatError, match="catalog names 1 segments"):
        open_store(tmp_path, PLAIN)
    (tmp_path / "store.yaml").write_bytes(settings)
    with open_store(tmp_path, PLAIN) as store:
        assert store.resume(some_tokens(20, 1)).length() == 20


def test_a_store_that_another_process_is_making_is_left_alone(tmp_path: Path) -> None:
    """Its files lie there and its settings do not yet; they must not be taken for leftovers."""
    region = tmp_path / "region.kv"
    region.write_bytes(b"being made")
    with StoreLock.acquire(tmp_path / "lock"):
        with pytest.raises(OSError, match="open for writing"):
            open_store(tmp_path, PLAIN)
        assert region.read_bytes() == b"being made"
