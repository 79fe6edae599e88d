"""Two ranks of one tensor-parallel engine on one machine: a store each, by the documented rule."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import LockedError
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.store import Store
from tests.store_cases import KV, MIB, PLAIN, check_bytes, extend, put, some_tokens

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
TOKENS = some_tokens(700, 1)

RANK = """
import sys
from pathlib import Path
from tests.store_cases import *
from tests.test_tiering_ranks import TOKENS, open_rank
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
with open_rank(folder / f"rank{rank}", rank) as store:
    kv = KV(PLAIN, salt=rank)
    if sys.argv[3] == "write":
        put(store, kv, "n", TOKENS)
    else:
        sequence = store.resume(TOKENS)
        check_bytes(store, kv, sequence, TOKENS)
"""


def open_rank(path: Path, rank: int, region: str | None = None) -> Store:
    """What docs/guarantees.md says: a directory, a region and a fingerprint of its own."""
    fingerprint = Fingerprint.of({"model": "m", "tensor_parallel": [rank, RANKS]})
    if region is None and not (path / "store.yaml").exists():
        region = "8MiB"
    return Store.open(path, PLAIN, fingerprint, Config(region, hot=MIB))


def run_both(folder: Path, what: str) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(rank), what],
            cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    assert [each.wait(100) for each in running] == [0] * RANKS


def test_two_ranks_at_once_keep_their_own_and_never_meet(tmp_path: Path) -> None:
    """A075, A076: ranks side by side, and then handed each other's store by mistake."""
    run_both(tmp_path, "write")
    run_both(tmp_path, "read")
    for rank in range(RANKS):
        with open_rank(tmp_path / f"rank{1 - rank}", rank) as store:
            assert (store.lookup(TOKENS), store.names()) == (0, [])
        with open_rank(tmp_path / f"rank{rank}", rank) as store:
            check_bytes(store, KV(PLAIN, salt=rank), store.resume(TOKENS), TOKENS)


def test_two_ranks_on_one_region_are_refused(tmp_path: Path) -> None:
    """A076: also by another name of the same file."""
    region = tmp_path / "region.img"
    region.write_bytes(bytes(8 * MIB))
    other_name = tmp_path / "by-another-name.img"
    other_name.symlink_to(region)
    with open_rank(tmp_path / "rank0", 0, str(region)) as store:
        with pytest.raises(LockedError):
            open_rank(tmp_path / "rank1", 1, str(other_name))
        kv = KV(PLAIN)
        put(store, kv, "n", TOKENS)
        sequence = store.resume(TOKENS)
        extend(store, kv, sequence, [*TOKENS, 1, 2])
        check_bytes(store, kv, sequence, [*TOKENS, 1, 2])
