"""Superblock and region: what may be formatted, what may be opened, what is repaired."""

import os
import struct
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvtier.errors import (
    BadMagic,
    ChecksumMismatch,
    ConfigError,
    DeviceError,
    ForeignDataError,
    FormatError,
    VersionMismatch,
    WrongStoreError,
)
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, Int64Array, Priority
from kvtier.io.pagecache import cached_bytes
from kvtier.io.probe import open_device
from kvtier.io.rawfile import create_region_file
from kvtier.io.region import Region, root_of
from kvtier.io.superblock import (
    DATA_START,
    REGION_BYTES_MIN,
    SUPERBLOCK_BYTES,
    Superblock,
)
from kvtier.io.threads import ThreadsDevice
from tests.conftest import LoopMaker
from tests.region_cases import (
    COPIES,
    OTHER,
    REGION_BYTES,
    STORE,
    create,
    patch,
    peek,
    reopen,
)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    name = str(tmp_path / "region")
    create_region_file(name, REGION_BYTES)
    yield name
    os.unlink(name)


def other_version(path: str, version: int) -> bytes:
    """The region's superblock with another format version and a checksum that holds."""
    body = bytearray(peek(path, 0, SUPERBLOCK_BYTES - 8))
    struct.pack_into("<I", body, 8, version)
    return bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body)))


class Recorder(ThreadsDevice):
    """Lists what was written and flushed, in order."""

    log: list[str]

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        super().write(offsets, buffers)
        self.log.append(f"{int(offsets[0])}+{buffers.memory.size}")

    def flush(self) -> None:
        super().flush()
        self.log.append("flush")


def test_order_of_writes_and_flushes(path: str) -> None:
    device = Recorder.open(path)
    device.log = []
    wiped = [f"0+{DATA_START}", f"{REGION_BYTES - DATA_START}+{DATA_START}"]
    Region.create(device, STORE)
    assert device.log == [*wiped, *(f"{offset}+4096" for offset in COPIES), "flush"]
    device.log = []
    Region.open(device, STORE)
    assert device.log == []
    patch(path, COPIES[1] + 50, b"\xff")
    Region.open(device, STORE)
    assert device.log == [f"{COPIES[1]}+4096", "flush"]
    device.close()


def test_superblock_golden_bytes() -> None:
    data = Superblock(STORE, created=1_700_000_000, region_bytes=1 << 40, block_bytes=512).pack()
    assert data[:8] == b"KVTIERSB"
    assert data[8:24].hex() == "01000000" + "00020000" + "0100000000000000"
    assert data[24:40] == uuid.UUID(STORE).bytes
    assert data[40:68].hex() == (
        "00f1536500000000" + "0000000000010000" + "0000100000000000" + "00100000"
    )
    assert data[68:4088] == bytes(4020)
    assert len(data) == 4096
    assert Superblock.parse(data) == Superblock(STORE, 1_700_000_000, 1 << 40, 512)


@pytest.mark.parametrize("seed", range(3))
def test_every_flipped_bit_is_found(seed: int) -> None:
    data = Superblock(STORE, created=1, region_bytes=1 << 30, block_bytes=4096).pack()
    rng = np.random.default_rng(seed)
    for bit in [*range(80 * 8), *rng.integers(0, 4096 * 8, 200)]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        expected = BadMagic if bit < 64 else VersionMismatch if bit < 96 else ChecksumMismatch
        with pytest.raises(FormatError) as caught:
            Superblock.parse(bytes(damaged))
        assert type(caught.value) is expected


def test_create_and_open(path: str) -> None:
    superblock = create(path)
    assert cached_bytes(path) == 0, "the look for foreign data stayed in the page cache"
    assert superblock.store_uuid == STORE
    assert superblock.region_bytes == REGION_BYTES
    with Region.open(open_device(path), STORE) as region:
        assert region.superblock == superblock
        assert region.notes == []
        assert (region.data_start, region.data_end) == (DATA_START, REGION_BYTES - 4096)
        assert (region.store_uuid, region.path) == (STORE, path)
    for offset in COPIES:
        assert Superblock.parse(peek(path, offset, SUPERBLOCK_BYTES)) == superblock


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_one_damaged_copy_is_repaired(path: str, damaged: int) -> None:
    create(path)
    whole = peek(path, 0, SUPERBLOCK_BYTES)
    patch(path, COPIES[damaged] + 50, b"\xff")
    before = Path(path).read_bytes()
    (note,) = reopen(path, writable=False)
    assert "not repaired" in note
    assert Path(path).read_bytes() == before
    (note,) = reopen(path)
    assert f"offset {COPIES[damaged]} " in note
    assert note.endswith(": repaired")
    assert peek(path, COPIES[damaged], SUPERBLOCK_BYTES) == whole
    assert reopen(path) == []


def test_two_damaged_copies_are_repaired(path: str) -> None:
    create(path)
    patch(path, 0, bytes(SUPERBLOCK_BYTES))
    patch(path, COPIES[2], b"\xee" * SUPERBLOCK_BYTES)
    assert len(reopen(path)) == 2
    assert reopen(path) == []


def test_all_copies_damaged(path: str) -> None:
    create(path)
    for offset in COPIES:
        patch(path, offset + 50, b"\xff")
    before = Path(path).read_bytes()
    with pytest.raises(ChecksumMismatch):
        reopen(path)
    assert Path(path).read_bytes() == before


def test_no_region_at_all(path: str) -> None:
    with pytest.raises(BadMagic):
        reopen(path)
    assert not Path(path).read_bytes().strip(b"\0"), "a byte was written"


def test_an_unreadable_copy_is_survived(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(path)
    real_read = ThreadsDevice.read

    def read(
        self: ThreadsDevice, offsets: Int64Array, buffers: Buffers, *priority: Priority
    ) -> None:
        if offsets[0] == 0:
            raise DeviceError("injected", 5, [(0, 5)])
        real_read(self, offsets, buffers, *priority)

    monkeypatch.setattr(ThreadsDevice, "read", read)
    with Region.open(open_device(path, engine="threads"), STORE) as region:
        assert len(region.notes) == 1


@pytest.mark.parametrize("copies", [(0, 1, 2), (1,), (2,)])
def test_newer_version_is_refused_and_left_alone(path: str, copies: tuple[int, ...]) -> None:
    """An intact copy of a newer version is no damage, so it is never "repaired"."""
    create(path)
    newer = other_version(path, 7)
    for i in copies:
        patch(path, COPIES[i], newer)
    before = Path(path).read_bytes()
    with pytest.raises(VersionMismatch) as caught:
        reopen(path)
    assert (caught.value.found, caught.value.readable) == (7, 1)
    assert Path(path).read_bytes() == before
    with pytest.raises(ForeignDataError, match="version 7"):
        create(path)
    assert Path(path).read_bytes() == before


def test_damage_in_the_version_field_is_repaired(path: str) -> None:
    create(path)
    patch(path, 8, b"\x07")
    assert len(reopen(path)) == 1


@pytest.mark.parametrize("place", [(4, 3), (0, 64)])
def test_a_place_that_cannot_be(path: str, place: tuple[int, int]) -> None:
    superblock = replace(create(path), region_index=place[0], more_regions=place[1])
    for offset in COPIES:
        patch(path, offset, superblock.pack())
    with pytest.raises(FormatError, match=f"region {place[0]} of {place[1] + 1}, counted from 0"):
        reopen(path)


def test_wrong_store(path: str) -> None:
    create(path)
    patch(path, 50, b"\xff")
    before = Path(path).read_bytes()
    with pytest.raises(WrongStoreError, match=STORE) as caught:
        reopen(path, OTHER)
    assert (caught.value.expected, caught.value.found) == (OTHER, STORE)
    assert Path(path).read_bytes() == before, "a byte was written before the check"


@pytest.mark.parametrize("nbytes", [REGION_BYTES - 4096, REGION_BYTES // 2, DATA_START, 65536])
def test_truncated_region(path: str, nbytes: int) -> None:
    create(path)
    os.truncate(path, nbytes)
    with pytest.raises(ConfigError, match="truncated") as caught:
        reopen(path)
    assert str(nbytes) in str(caught.value)
    if nbytes >= DATA_START:
        assert str(REGION_BYTES) in str(caught.value)


def test_a_longer_file_still_opens(path: str) -> None:
    create(path)
    os.truncate(path, REGION_BYTES + 8192)
    assert reopen(path) == []


def test_of_two_intact_copies_the_later_counts(path: str) -> None:
    create(path)
    old = peek(path, 0, SUPERBLOCK_BYTES)
    again = create(path)
    assert again.sequence == 2
    patch(path, 0, old)
    with Region.open(open_device(path), STORE) as region:
        assert region.superblock == again
        assert len(region.notes) == 1


def test_create_too_small(tmp_path: Path) -> None:
    name = str(tmp_path / "small")
    create_region_file(name, REGION_BYTES_MIN - 4096)
    with pytest.raises(ConfigError, match=str(REGION_BYTES_MIN)):
        create(name)


@pytest.mark.parametrize("nbytes", [0, 100, REGION_BYTES_MIN - 1])
def test_a_file_is_said_to_be_as_large_as_it_is(tmp_path: Path, nbytes: int) -> None:
    """Also where it does not end with a whole block."""
    name = str(tmp_path / "small")
    Path(name).write_bytes(bytes(nbytes))
    with pytest.raises(ConfigError, match=f"{name} has {nbytes} bytes: "):
        create(name)
    with (
        closing(open_device(name)) as device,
        pytest.raises(ConfigError, match=f"{name} has {nbytes} bytes: "),
    ):
        root_of(device)


def test_what_is_no_superblock_is_named_with_its_path(path: str) -> None:
    with pytest.raises(BadMagic, match=f"^{path}: no kvtier superblock"):
        reopen(path)
    create(path)
    newer = other_version(path, 2)
    for offset in COPIES:
        patch(path, offset + 50, b"\xff")
    with pytest.raises(ChecksumMismatch, match=f"^{path}: the superblock is damaged"):
        reopen(path)
    patch(path, 0, newer)
    with pytest.raises(VersionMismatch, match=f"^{path}: the superblock has format version 2"):
        reopen(path)


def test_create_refuses_another_store_unless_forced(path: str) -> None:
    """A082."""
    first = create(path)
    before = Path(path).read_bytes()
    with pytest.raises(ForeignDataError, match=STORE) as caught:
        create(path, OTHER)
    assert "UTC" in str(caught.value)
    assert Path(path).read_bytes() == before
    second = create(path, OTHER, force=True)
    assert second.sequence == first.sequence + 1
    assert reopen(path, OTHER) == []


def test_create_refuses_unknown_data_unless_forced(path: str) -> None:
    """A082."""
    patch(path, 500_000, b"somebody's data")
    before = Path(path).read_bytes()
    with pytest.raises(ForeignDataError, match="unknown data in the first 1 MiB"):
        create(path)
    assert Path(path).read_bytes() == before
    create(path, force=True)
    assert peek(path, 500_000, 15) == bytes(15)
    assert reopen(path) == []


@pytest.mark.loop
@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_region_on_a_device(loop_device: LoopMaker, block_bytes: int) -> None:
    device = loop_device(REGION_BYTES, block_bytes)
    superblock = create(device)
    assert superblock.block_bytes == block_bytes
    with Region.open(open_device(device), STORE) as region:
        assert region.superblock == superblock
        with pytest.raises(ForeignDataError, match="in use"):
            open_device(device)
        target = aligned_bytes(4096)
        region.device.read(np.array([0], np.int64), Buffers.whole(target))
        assert Superblock.parse(target.tobytes()) == superblock
