"""What the tests of the field reports share: extents of a closed store, faulty devices, threads."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import DeviceError
from kvtier.io.catalog import Catalog, unpack_extents
from kvtier.io.device import Buffers, Int64Array, Priority
from kvtier.io.extent import Extent
from kvtier.tiering.store import Store
from tests.late_writes import at_once

HANG_S = 60.0
"""A thread that takes longer counts as one that hangs; machines of tests may be slow."""


def extents_of(path: Path) -> list[list[Extent]]:
    """The extents of every Segment that a store's catalog names, by layer; in order of storing."""
    with Catalog.open(path / "catalog.sqlite", read_only=True) as catalog:
        return [list(unpack_extents(row.extents)) for row in catalog.segments()]


def zero(path: Path, extent: Extent) -> None:
    """Lose an extent: its first grid block, where its header is, becomes zeros."""
    with (path / "region.kv").open("r+b") as file:
        file.seek(extent.offset)
        file.write(bytes(4096))


def fail_reads(store: Store, extents: Iterable[Extent], patched: pytest.MonkeyPatch) -> None:
    """From now on the device cannot read these extents, as with bad sectors."""
    device, ranges = store._files.region.device, [(each.offset, each.end) for each in extents]
    genuine = device.read

    def read(offsets: Int64Array, buffers: Buffers, *priority: Priority) -> None:
        genuine(offsets, buffers, *priority)
        inside = np.zeros(len(offsets), np.bool_)
        for first, past in ranges:
            inside |= (offsets >= first) & (offsets < past)
        failures = [(int(i), 5) for i in np.flatnonzero(inside)]
        if failures:
            raise DeviceError(f"{len(failures)} of {len(offsets)} reads failed", 5, failures)

    patched.setattr(device, "read", read)
    patched.setattr(device, "start_read", at_once(device, "read"))


def in_threads(work: Callable[[int], None], count: int, hang_s: float = HANG_S) -> None:
    """Run work(0) to work(count - 1) at once; the first failure is raised, and a hang is one."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(hang_s)
        assert not each.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]
