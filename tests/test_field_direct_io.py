"""Field reports about direct I/O: alignment of every buffer, and a mode that says what it is."""

import errno
import fcntl
import logging
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvtier.io import rawfile, syscalls
from kvtier.io.buffers import BufferPool, aligned_bytes
from kvtier.io.device import Buffers
from kvtier.io.pagecache import cached_bytes
from kvtier.io.probe import Engine, open_device
from kvtier.io.rawfile import DirectMode, create_region_file
from kvtier.io.syscalls import DirectAlignment
from kvtier.tiering.config import Config
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_everywhere,
    open_store,
    put,
    some_tokens,
)

OF_M = KV(PLAIN)
TOKENS = some_tokens(3000, 1)


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_every_buffer_of_a_pool_can_be_written_directly(tmp_path: Path, engine: Engine) -> None:
    """A054: a hundred leases of odd sizes; address, offset and length are multiples of the block,
    and the device takes each."""
    path = str(tmp_path / "region")
    create_region_file(path, 8 * MIB)
    random, pool = np.random.default_rng(1), BufferPool(4 * MIB)
    with closing(open_device(path, engine=engine)) as device:
        block = device.block_bytes
        device.register(pool.memory)
        for turn in range(50):
            size = int(random.integers(1, 100_000))
            with pool.lease(size) as memory, pool.lease(int(random.integers(1, 50_000))) as other:
                for each in (memory, other):
                    assert each.ctypes.data % max(block, 4096) == 0
                whole = len(memory) // block * block
                memory[:] = turn + 1
                offset = np.array([turn * 128 * 1024 // block * block], np.int64)
                if not whole:
                    continue
                piece = Buffers.whole(memory[:whole])
                device.write(offset, piece)
                target = aligned_bytes(whole)
                device.read(offset, Buffers.whole(target))
                assert (target == turn + 1).all()
    assert pool.used_bytes == 0


def flags_of(path: Path) -> list[int]:
    """Open flags of every file descriptor of this process on a file."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.path.samefile(f"/proc/self/fd/{fd}", path):
                found.append(fcntl.fcntl(int(fd), fcntl.F_GETFL))
        except OSError:  # The descriptor of the listing itself is gone by now.
            continue
    return found


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("direct_io", ["required", "preferred", "off"])
def test_the_mode_that_is_reported_is_the_flag_of_the_file(
    tmp_path: Path, direct_io: DirectMode, engine: Engine
) -> None:
    """A059, A091, A118: O_DIRECT is set where direct I/O is said, and nothing of the region stays
    in the page cache then; where it is off, that is said."""
    region = tmp_path / "region.kv"
    config = Config("16MiB", hot=MIB, engine=engine, direct_io=direct_io)
    with open_store(tmp_path, PLAIN, config) as store:
        for seed in range(3):
            put(store, OF_M, f"n{seed}", some_tokens(8000, seed))
        sequence = store.resume(some_tokens(8000, 1))
        check_everywhere(store, OF_M, sequence, some_tokens(8000, 1))
        stats, flags = store.stats(), flags_of(region)
        assert stats.direct_io is (direct_io != "off")
        assert len(flags) == 1
        assert bool(flags[0] & os.O_DIRECT) is stats.direct_io
        assert stats.direct_io_reason == (
            "O_DIRECT" if stats.direct_io else "page cache: switched off by the caller"
        )
        assert (cached_bytes(str(region)) == 0) is stats.direct_io


@pytest.mark.parametrize("way", ["statx", "open"])
def test_a_file_system_without_direct_io_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """A059, A091: the store works, its numbers say "page cache" and why, one warning is logged."""
    genuine = os.open

    def refuse(name: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return genuine(name, flags, *rest)

    if way == "statx":
        monkeypatch.setattr(syscalls, "direct_alignment", lambda path: DirectAlignment(0, 0))
    else:
        monkeypatch.setattr(os, "open", refuse)
    with (
        caplog.at_level(logging.WARNING, "kvtier"),
        open_store(tmp_path, PLAIN, Config("16MiB", hot=MIB)) as store,
    ):
        put(store, OF_M, "n", TOKENS)
        check_bytes(store, OF_M, store.resume(TOKENS), TOKENS)
        assert not store.stats().direct_io
        assert store.stats().direct_io_reason.startswith("page cache: ")
        (flags,) = flags_of(tmp_path / "region.kv")
        assert not flags & os.O_DIRECT
    warnings = [each.getMessage() for each in caplog.records if "page cache" in each.getMessage()]
    assert len(warnings) == 1
    assert str(tmp_path / "region.kv") in warnings[0]


def test_a_store_is_made_where_nothing_can_be_preallocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A060: full size by aligned writes of zeros, in pieces that do not divide it; opened for
    direct I/O."""

    def refuse(fd: int, mode: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(syscalls, "fallocate", refuse)
    monkeypatch.setattr(rawfile, "_ZERO_WRITE_BYTES", 700 * 4096)
    config = Config("16MiB", hot=MIB, direct_io="required")
    with open_store(tmp_path, PLAIN, config) as store:
        status = (tmp_path / "region.kv").stat()
        assert status.st_size == 16 * MIB
        assert status.st_blocks * 512 >= 16 * MIB
        put(store, OF_M, "n", TOKENS)
    with open_store(tmp_path, PLAIN, Config(hot=MIB, direct_io="required")) as store:
        check_bytes(store, OF_M, store.resume(TOKENS), TOKENS)
