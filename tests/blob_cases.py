"""Stores for tests of Blobs: on a simulated device that can be cut off, and what a scan finds."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from unittest import mock

import numpy as np

from kvtier.errors import DeviceError, FormatError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.device import Buffers, Int64Array, Priority
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import Faults
from kvtier.tiering import opening, slab_format, verifier
from kvtier.tiering.config import Config
from kvtier.tiering.findings import Report
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.store_cases import MIB, PLAIN, open_store

CACHE = Faults(volatile_cache=True)
REGION_BYTES = 4 * MIB
HOT = Config(hot="256KiB")


def some_bytes(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(count)


class CutDevice(SimulatedDevice):
    """Answers `calls_left` reads, writes and flushes, and from then on nothing."""

    calls_left = 1 << 62
    calls = 0

    def _take(self) -> None:
        self.calls += 1
        if self.calls_left <= 0:
            raise DeviceError("the power was cut")
        self.calls_left -= 1

    def read(
        self, offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
    ) -> None:
        self._take()
        super().read(offsets, buffers, priority)

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        self._take()
        super().write(offsets, buffers)

    def flush(self) -> None:
        self._take()
        super().flush()


@dataclass
class Bench:
    """Stores in `root` whose region is simulated."""

    root: Path
    image: bytes = bytes(REGION_BYTES)
    devices: list[CutDevice] = field(default_factory=list)

    @classmethod
    @contextmanager
    def at(cls, root: Path) -> Iterator[Self]:
        bench = cls(root)
        with (
            mock.patch.object(opening, "open_device", bench.open_device),
            mock.patch.object(verifier, "open_device", bench.open_device),
            mock.patch.object(opening, "create_region_file", lambda path, _: Path(path).touch()),
            mock.patch.object(verifier, "region_state", return_value="present"),
        ):
            yield bench
        for device in bench.devices:
            device.close()

    def open_device(self, path: str, **wishes: object) -> CutDevice:
        self.devices.append(CutDevice.from_image(self.image, path=path, faults=CACHE))
        return self.devices[-1]

    @property
    def device(self) -> CutDevice:
        return self.devices[-1]

    def open(self, directory: str = "s", model: str = "m") -> Store:
        return open_store(self.root / directory, PLAIN, HOT, model=model)

    def crashed(self, image: bytes) -> Store:
        """The store as a crash left it now: the catalog as it stands, the region as `image`."""
        shutil.rmtree(self.root / "copy", ignore_errors=True)
        shutil.copytree(self.root / "s", self.root / "copy")
        self.image = image
        return self.open("copy")

    def verified(self, image: bytes, directory: str = "copy") -> Report:
        self.image = image
        return verify(self.root / directory)


def live_keys(image: bytes) -> set[bytes]:
    """What a scan of a region for slabs finds: keys of live Blobs that are intact."""
    region = np.frombuffer(image, np.uint8)
    found: set[bytes] = set()
    for offset in range(0, region.size, GRID_BYTES):
        try:
            header, _ = slab_format.newest_header(region[offset:], "scan")
            slab = slab_format.parse(region[offset:], header.identity.device_offset)
        except FormatError:
            continue
        if header.identity.device_offset != offset:
            continue
        for entry in np.flatnonzero(header.live).tolist():
            start, length, *_ = slab.directory[entry].tolist()
            data = region[offset + start : offset + start + length]
            who = header.identity
            key = slab.keys[entry]
            checksum = slab_format.blob_checksum(who.fingerprint, key, data.data, who.generation)
            if checksum == slab.directory["checksum"][entry]:
                found.add(key)
    return found


@contextmanager
def counted(store: Store) -> Iterator[list[str]]:
    """The statements of the catalog that end a transaction, as they happen."""
    ends: list[str] = []

    def note(statement: str) -> None:
        if statement.startswith(("COMMIT", "ROLLBACK")):
            ends.append(statement)

    connection = store._files.catalog._connection
    assert connection is not None
    connection.set_trace_callback(note)
    try:
        yield ends
    finally:
        connection.set_trace_callback(None)
