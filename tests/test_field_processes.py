"""Field reports about processes beside each other: what an import starts, and what stores share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtier.tiering.config import Config
from tests.store_cases import KV, MIB, PLAIN, check_bytes, open_store, put, some_tokens
from tests.store_worker import in_a_child

ROOT = Path(__file__).parent.parent
OF_M = KV(PLAIN)
IMPORTS = """
import os, sys, threading
import kvtier
assert not {{"torch", "numpy", "cupy"}} & set(sys.modules), "loaded by the import alone"
kvtier.Config, kvtier.Store, kvtier.open
import {module}
import torch
torch.set_num_threads(1)
assert not torch.cuda.is_initialized()
maps = open("/proc/self/maps").read()
assert "libcuda.so" not in maps, "the driver was loaded"
assert "io_uring" not in maps, "a ring was made"
assert threading.active_count() == 1, threading.enumerate()
pid = os.fork()
if not pid:
    assert not torch.cuda.is_initialized()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(
    "module",
    [
        "kvtier.tiering.store",
        pytest.param("kvtier.tiering.adapters.huggingface", marks=pytest.mark.slow),
    ],
)
def test_an_import_starts_nothing(module: str) -> None:
    """A078: no CUDA, no thread and no ring before a store is opened; a fork afterwards works."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(module=module)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "7\n"


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.mkdir", "os.rename", "os.link", "os.symlink", "sqlite3.connect")


def used_outside(allowed: Path, store_path: Path) -> list[str]:
    """What a store opens for writing, makes or binds outside of `allowed`. Only for a process
    that ends soon: an audit hook stays."""
    outside: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith("socket.") and event != "socket.gethostname":
            outside.append(f"{event} {arguments}")
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
        if writes or event in CHANGES:
            for each in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                # A number is a file that was opened, and seen, before.
                text = os.fsdecode(each) if isinstance(each, str | bytes) else str(allowed)
                if not text.removeprefix("file://").startswith(str(allowed)):
                    outside.append(f"{event} {text}")

    sys.addaudithook(watch)
    with open_store(store_path, PLAIN, Config("8MiB", hot=MIB)) as store:
        put(store, OF_M, "n", some_tokens(600, 1))
        store.stats()
    with open_store(store_path, PLAIN, Config(hot=MIB)) as store:
        check_bytes(store, OF_M, store.resume(some_tokens(600, 1)), some_tokens(600, 1))
    return outside


@pytest.mark.parametrize("inside", [True, False])
def test_a_store_uses_no_name_outside_its_directory(tmp_path: Path, inside: bool) -> None:
    """A079: no socket, no shared memory, no file in a common place, so two cannot meet there.
    With another directory allowed than the store's, the watch must see something."""
    result = tmp_path / "result"
    store_path = tmp_path / "store"

    def use() -> None:
        found = used_outside(store_path if inside else tmp_path / "else", store_path)
        os.write(target, "\n".join(found).encode())

    target = os.open(result, os.O_CREAT | os.O_WRONLY)
    assert in_a_child(use) == 0
    os.close(target)
    found = result.read_text().split("\n")
    if inside:
        assert found == [""]
    else:
        assert any("region.kv" in each for each in found)


@pytest.mark.parametrize("turn", range(4))
def test_two_stores_that_begin_at_once_do_not_meet(tmp_path: Path, turn: int) -> None:
    """A079: two processes, started together, each with its own store and its own bytes."""
    source, target = os.pipe()
    tokens = some_tokens(600, turn)
    paths = [tmp_path / "0", tmp_path / "1"]

    def kv_of(number: int) -> KV:
        return KV(PLAIN, salt=10 * turn + number)

    children: list[int] = []
    for number, path in enumerate(paths):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                torch.set_num_threads(1)
                os.close(target)
                os.read(source, 1)  # Ends for both when the parent closes its end.
                with open_store(path, PLAIN, Config("4MiB", hot=MIB)) as store:
                    put(store, kv_of(number), "n", tokens)
                    check_bytes(store, kv_of(number), store.resume(tokens), tokens)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    os.close(source)
    os.close(target)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert statuses == [0, 0]
    for number, path in enumerate(paths):
        with open_store(path, PLAIN, Config(hot=MIB)) as store:
            check_bytes(store, kv_of(number), store.resume(tokens), tokens)
