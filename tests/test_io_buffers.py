"""Aligned memory and the buffer pool: alignment, the hard limit, giving back."""

import errno
import mmap
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import CapacityError, ConfigError
from kvtier.io.alignment import os_page_bytes
from kvtier.io.buffers import HUGE_PAGE_BYTES, BufferPool, aligned_bytes, give_back
from kvtier.io.device import ByteArray
from kvtier.io.probe import huge_pages_report


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4096, 5000, 1 << 20])
def test_aligned_bytes(nbytes: int) -> None:
    memory = aligned_bytes(nbytes)
    assert (memory.size, memory.dtype.name) == (nbytes, "uint8")
    assert not memory.any()
    if nbytes:
        assert memory.ctypes.data % max(os_page_bytes(), 4096) == 0
        memory[-1] = 7


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError):
        aligned_bytes(-1)
    with pytest.raises(ConfigError):
        BufferPool(0)
    pool = BufferPool(4096)
    with pytest.raises(ConfigError), pool.lease(-1):
        pass


def test_leases_are_pieces_of_the_arena() -> None:
    pool = BufferPool(10_000)
    assert pool.memory_bytes == 12288
    with pool.lease(100) as first, pool.lease(5000) as second:
        assert (first.size, second.size) == (100, 5000)
        assert pool.used_bytes == 12288
        for memory in (first, second):
            assert memory.ctypes.data % 4096 == 0
            assert np.shares_memory(memory, pool.memory)
        assert not np.shares_memory(first, second)
    assert (pool.used_bytes, pool.used_bytes_max) == (0, 12288)


def test_an_exception_gives_back() -> None:
    pool = BufferPool(8192)
    with pytest.raises(ZeroDivisionError), pool.lease(8192):
        raise ZeroDivisionError
    with pool.lease(8192, timeout_s=0):
        pass


def test_too_large_is_refused_at_once() -> None:
    pool = BufferPool(8192)
    begin = time.monotonic()
    with pytest.raises(CapacityError) as caught, pool.lease(8193):
        pass
    assert time.monotonic() - begin < 5
    assert (caught.value.needed, caught.value.limit) == (12288, 8192)


def test_timeout_names_the_sizes() -> None:
    """A023."""
    pool = BufferPool(3 * 4096)
    with pool.lease(8192):
        late = pool.lease(8192, timeout_s=0.05)
        with pytest.raises(CapacityError, match=r"waited 0\.05 s") as caught, late:
            pass
        assert (caught.value.needed, caught.value.free) == (8192, 4096)
    assert pool.used_bytes == 0


def test_a_lease_waits_for_space() -> None:
    pool = BufferPool(8192)
    released = threading.Event()
    order: list[str] = []

    def hold() -> None:
        with pool.lease(8192):
            released.wait(10)
            order.append("given back")

    thread = threading.Thread(target=hold)
    thread.start()
    while not pool.used_bytes:
        time.sleep(0.001)
    threading.Timer(0.05, released.set).start()
    with pool.lease(4096, timeout_s=10):
        order.append("leased")
    thread.join()
    assert order == ["given back", "leased"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_threads_never_share_bytes(seed: int) -> None:
    """A095."""
    pool = BufferPool(64 * 4096)
    wrong: list[int] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(seed * 100 + number)
        for _ in range(100):
            with pool.lease(int(rng.integers(1, 20 * 4096)), timeout_s=30) as memory:
                memory[:] = number
                time.sleep(0)
                if (memory != number).any():
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.used_bytes == 0
    assert 0 < pool.used_bytes_max <= pool.memory_bytes
    with pool.lease(pool.memory_bytes, timeout_s=0):
        pass  # The pieces merged again.


@pytest.mark.parametrize("nbytes", [HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 4096])
def test_large_memory_begins_on_a_huge_page(nbytes: int) -> None:
    memory = aligned_bytes(nbytes)
    assert memory.size == nbytes
    assert memory.ctypes.data % HUGE_PAGE_BYTES == 0
    assert not memory.any()
    memory[:] = 7
    assert (memory == 7).all()


def test_large_memory_lies_on_huge_pages() -> None:
    if not huge_pages_report().usable:
        pytest.skip(huge_pages_report().reason)
    memory = aligned_bytes(8 * HUGE_PAGE_BYTES)
    memory[:] = 1
    assert "hg" in smaps(memory)["VmFlags"].split(), "the advice was not given"


def test_a_kernel_that_refuses_huge_pages_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pages(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            refused.append(advice)
            raise OSError(errno.EINVAL, "Invalid argument")

    refused: list[tuple[int, ...]] = []
    monkeypatch.setattr(mmap, "mmap", Pages)
    memory = aligned_bytes(3 * HUGE_PAGE_BYTES)
    memory[:] = 3
    assert refused == [(mmap.MADV_HUGEPAGE,)]
    assert memory.size == 3 * HUGE_PAGE_BYTES


def test_what_is_given_back_of_huge_pages_leaves_the_process() -> None:
    memory = aligned_bytes(16 * HUGE_PAGE_BYTES)
    memory[:] = 1
    before = resident_bytes(memory)
    assert before >= memory.size
    give_back(memory, 100, 10 * HUGE_PAGE_BYTES)
    assert resident_bytes(memory) <= before - 10 * HUGE_PAGE_BYTES + 2 * 4096
    assert (memory[:100] == 1).all()
    assert not memory[4096 : 10 * HUGE_PAGE_BYTES].any()
    assert (memory[10 * HUGE_PAGE_BYTES + 4096 :] == 1).all()


def smaps(memory: ByteArray) -> dict[str, str]:
    """What the kernel says of the mapping in which this memory begins."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= memory.ctypes.data < int(match[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = value.strip()
    return found


def resident_bytes(memory: ByteArray) -> int:
    return int(smaps(memory)["Rss"].removesuffix(" kB")) * 1024
