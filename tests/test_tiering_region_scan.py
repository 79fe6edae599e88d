"""The walk over a region: what it reads, what it steps over, what a failing device makes of it."""

from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import DeviceError
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers
from kvtier.io.region import Region
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.tiering import extent_format, record_format, region_scan
from kvtier.tiering.extent_format import ExtentIdentity
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.record_format import Record
from kvtier.tiering.region_scan import FoundExtent, FoundRecord, RegionScan, Unusable
from tests.rebuild_cases import GRID, forged

STORE = "11111111-2222-3333-4444-555555555555"
START = 1 << 20
MIB = 1 << 20
WIDE = Geometry.uniform(1, 4, 256)
"""512 tokens of one layer are 4 MiB."""


@pytest.fixture
def device(tmp_path: Path) -> SimulatedDevice:
    (tmp_path / "device").touch()
    found = SimulatedDevice.open(24 * MIB, block_bytes=512, path=str(tmp_path / "device"))
    Region.create(found, STORE)
    return found


def write(device: SimulatedDevice, offset: int, data: bytes) -> None:
    memory = aligned_bytes(len(data))
    memory[:] = np.frombuffer(data, np.uint8)
    device.write(np.array([offset], np.int64), Buffers.whole(memory))


def extent(offset: int, *, generation: int = 7, tokens: int = 512, seed: int = 0) -> bytes:
    payload = np.random.default_rng(seed).integers(
        0, 256, WIDE.payload_bytes(0, tokens), dtype=np.uint8
    )
    identity = ExtentIdentity(
        bytes.fromhex(STORE.replace("-", "")), b"f" * 32, "exact", b"s" * 16, b"e" * 16,
        generation, 0, tokens, 0, offset, 0,
    )  # fmt: skip
    return forged(identity, WIDE, list(range(tokens)), payload)


def record(offset: int, name: str) -> bytes:
    store = bytes.fromhex(STORE.replace("-", ""))
    block = Record(store, b"f" * 32, record_format.NAME, {"name": name}).pack()
    record_format.seal(block, offset)
    return block.tobytes()


def scan(device: SimulatedDevice) -> tuple[RegionScan, list[region_scan.Find]]:
    walk = RegionScan(Region.open(device, STORE))
    return walk, list(walk.finds())


def test_all_kinds_at_every_place(device: SimulatedDevice) -> None:
    """Extents longer than what is in memory at once do not exist here, but they cross its ends."""
    expected = []
    at = START
    for number, gap in enumerate((0, 1, 0, 3, 100, 0)):
        at += gap * GRID
        data = extent(at, generation=2 * number + 1, tokens=512 - number, seed=number)
        write(device, at, data)
        expected.append(at)
        at += len(data)
        if at > 20 * MIB:
            break
        write(device, at, record(at, "n" * 5000))
        expected.append(at)
        at += 8192
    walk, finds = scan(device)
    assert all(isinstance(each, FoundExtent | FoundRecord) for each in finds)
    offsets = [each.extent.offset for each in finds if not isinstance(each, Unusable)]
    assert offsets == expected
    assert all(each.sound for each in finds if isinstance(each, FoundExtent))
    assert walk.bytes_done == 24 * MIB - GRID
    # Headers that begin near the end of what is in memory are read twice, and nothing else.
    assert walk.bytes_read < 24 * MIB + MIB


def test_the_last_block(device: SimulatedDevice) -> None:
    at = 24 * MIB - 2 * GRID
    write(device, at, record(at, "last"))
    _, (found,) = scan(device)
    assert isinstance(found, FoundRecord)
    assert found.record.body == {"name": "last"}
    # A record that ends behind the region is none.
    write(device, at, record(at, "n" * 5000)[:GRID])
    _, (cut,) = scan(device)
    assert isinstance(cut, Unusable)
    assert "ends behind the region" in cut.why


@pytest.mark.parametrize("seed", range(24))
def test_headers_that_claim_anything(device: SimulatedDevice, seed: int) -> None:
    """Fields are overwritten and the checksum made right again: no crash, no other Extent."""
    random = np.random.default_rng(seed)
    data = bytearray(extent(START, tokens=40))
    at = int(random.integers(8, 248))
    size = int(random.choice([1, 2, 4, 8]))
    data[at : at + size] = random.bytes(size) if seed % 2 else b"\xff" * size
    length = int.from_bytes(data[12:16], "little")
    if 256 <= length <= len(data):
        data[248:256] = bytes(8)
        covered = np.frombuffer(bytes(data[:length]), np.uint8)
        data[248:256] = extent_format.checksum(covered, 0).to_bytes(8, "little")
    write(device, START, bytes(data))
    _, finds = scan(device)
    for each in finds:
        if isinstance(each, FoundExtent) and each.sound:
            assert each.extent.offset == START
            assert each.extent.length == len(data)
            # Only what names the Segment may differ, which nothing but the checksum protects.
            assert at < 104 or at + size > 136 or data[104:136] == extent(START, tokens=40)[104:136]


def test_unreadable_blocks_are_stepped_over(device: SimulatedDevice) -> None:
    first = extent(START)
    second_at = START + len(first)
    write(device, START, first)
    write(device, second_at, extent(second_at, generation=9))
    device.set_faults(Faults(bad_ranges=(BadRange(second_at - 2 * GRID, GRID),)))
    walk, finds = scan(device)
    assert [(type(each), getattr(each, "sound", None)) for each in finds] == [
        (FoundExtent, False),
        (FoundExtent, True),
    ]
    assert walk.bytes_unreadable == GRID


def test_a_device_that_is_gone_is_no_empty_region(device: SimulatedDevice) -> None:
    write(device, START, extent(START))
    region = Region.open(device, STORE)
    device.set_faults(Faults(bad_ranges=(BadRange(0, 24 * MIB),)))
    with pytest.raises(DeviceError, match="Nothing was changed"):
        list(RegionScan(region).finds())
