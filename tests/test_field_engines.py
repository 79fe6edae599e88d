"""Field reports about io_uring: absent, old, limited or full; what is used then, and said."""

import ctypes
import errno
import logging
import os
import resource
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import DeviceError
from kvtier.io import probe, syscalls, uring
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, Int64Array
from kvtier.io.probe import gds_report, io_uring_report, open_device
from kvtier.io.rawfile import create_region_file
from kvtier.tiering.config import Config
from tests.store_cases import KV, MIB, PLAIN, check_bytes, open_store, put, some_tokens

OF_M = KV(PLAIN)
TOKENS = some_tokens(1300, 1)
Register = Callable[[int, int, "ctypes.Array[ctypes.c_uint64] | None", int], None]

needs_io_uring = pytest.mark.skipif(
    not io_uring_report().usable, reason=f"no io_uring here: {io_uring_report().reason}"
)


def store_and_resume(path: Path, engine: str) -> None:
    for number in range(2):
        with open_store(path, PLAIN, Config(None if number else "16MiB", hot=MIB)) as store:
            assert store.stats().engine == engine
            if not number:
                put(store, OF_M, "n", TOKENS)
            check_bytes(store, OF_M, store.resume(TOKENS), TOKENS)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOMEM])
def test_a_store_without_io_uring_uses_threads_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """A084, A086, A088: cause, effect and remedy in one warning an opening, all data exact."""

    def refuse(entries: int, parameters: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(syscalls, "io_uring_setup", refuse)
    with caplog.at_level(logging.WARNING, "kvtier"):
        store_and_resume(tmp_path, "threads")
    texts = [each.getMessage() for each in caplog.records if "engine" in each.getMessage()]
    assert len(texts) == 2
    for text in texts:
        for words in ("using the engine threads", errno.errorcode[number], "Effect: ", "Remedy: "):
            assert words in text


def old_kernel(missing: list[int]) -> Register:
    """io_uring_register of a kernel that cannot be asked, or lacks some operations."""
    genuine = syscalls.io_uring_register

    def register(
        ring: int, code: int, argument: "ctypes.Array[ctypes.c_uint64] | None", count: int
    ) -> None:
        if code == 8 and not missing:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        genuine(ring, code, argument, count)
        if code == 8:
            assert argument is not None
            for number in missing:
                argument[2 + number] = number

    return register


@needs_io_uring
@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ([], "READ_FIXED, WRITE_FIXED, READ, WRITE"),
        ([22, 23], "READ, WRITE"),
        ([5], "WRITE_FIXED"),
    ],
)
def test_an_old_io_uring_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: list[int], named: str
) -> None:
    """A086: a ring can be set up, but the kernel does not answer, or lacks an operation."""
    monkeypatch.setattr(syscalls, "io_uring_register", old_kernel(missing))
    report = io_uring_report()
    assert not report.usable
    assert f"lacks {named}. Effect" in report.reason
    assert "Linux 5.6 or later" in report.reason
    store_and_resume(tmp_path, "threads")
    with pytest.raises(DeviceError, match=f"io_uring cannot be used: .*lacks {named}"):
        open_store(tmp_path, PLAIN, Config(hot=MIB, engine="io_uring"))


@needs_io_uring
def test_this_kernel_has_all_operations() -> None:
    """A086: otherwise the test above would show nothing here."""
    assert io_uring_report().reason == "a ring could be set up, with all operations it needs"


@needs_io_uring
def test_more_requests_than_the_queue_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A087: a queue of four, a thousand reads at once; each gets its own bytes."""
    monkeypatch.setattr(uring, "DEPTH", 4)
    path = str(tmp_path / "region")
    create_region_file(path, 8 * MIB)
    with closing(open_device(path, engine="io_uring")) as device:
        block = device.block_bytes
        size = 1000 * block
        source = aligned_bytes(size)
        source.reshape(1000, block)[:] = (np.arange(1000) % 251 + 1).astype(np.uint8)[:, None]
        device.write(np.zeros(1, np.int64), Buffers.whole(source))
        places: Int64Array = np.random.default_rng(1).permutation(1000).astype(np.int64) * block
        target = aligned_bytes(size)
        starts = np.arange(1000, dtype=np.int64) * block
        device.read(places, Buffers(target, starts, np.full(1000, block, np.int64)))
        expected = source.reshape(1000, block)[places // block]
        assert np.array_equal(target.reshape(1000, block), expected)


@needs_io_uring
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EPERM])
def test_a_small_limit_on_pinned_memory_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A085, A092, A094: the arena is used unregistered; the reason has the error's name, the bytes
    that were needed and the limit that is in force."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65_536, 65_536))
    genuine = syscalls.io_uring_register

    def register(
        ring: int, code: int, argument: "ctypes.Array[ctypes.c_uint64] | None", count: int
    ) -> None:
        if code == 0 and argument is not None and sum(argument[1::2]) > 65_536:
            raise OSError(number, os.strerror(number))
        genuine(ring, code, argument, count)

    monkeypatch.setattr(syscalls, "io_uring_register", register)
    store_and_resume(tmp_path, "io_uring")
    with open_store(tmp_path, PLAIN, Config(hot=MIB, engine="io_uring")) as store:
        device = store._files.region.device
        assert isinstance(device, uring.UringDevice)
        needed = store._extents.buffers.memory_bytes
        assert needed > 65_536
        for words in (errno.errorcode[number], f"{needed} bytes", "65536 bytes", "ulimit -l"):
            assert words in device.registered_reason


def test_what_gpu_direct_storage_lacks_is_said_and_the_host_path_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A089, A090: a machine without the packages or the driver: the report names what is missing,
    and a store works through host memory."""
    report = gds_report()
    assert report.engine == "gds"
    if not report.usable:
        assert any(word in report.reason for word in ("kvikio", "nvidia-fs", "libcuda"))
    monkeypatch.setattr(probe, "_NVFS", tmp_path / "no driver")
    store_and_resume(tmp_path / "store", "io_uring" if io_uring_report().usable else "threads")
