"""Damaged bytes on the device: found by verify, a miss for resume, a typed error for attend."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, DeviceError, FormatError
from kvtier.io.catalog import Catalog, SegmentRow, unpack_extents
from kvtier.io.device import Buffers, PendingBatch, Priority
from kvtier.io.extent import Extent
from kvtier.tiering import extent_format
from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from kvtier.tiering.writer import hot_bytes_min
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    a_query,
    check_bytes,
    check_everywhere,
    extend,
    open_store,
    put,
    some_tokens,
)

OF_M = KV(PLAIN)
A, B = some_tokens(1200, 1), some_tokens(1200, 2)
TOLD_APART = 512


@dataclass(frozen=True)
class Stored:
    """A closed store with names "a" and "b", three Segments of two layers each."""

    path: Path

    @property
    def region(self) -> Path:
        return self.path / "region.kv"

    def rows(self) -> list[SegmentRow]:
        with Catalog.open(self.path / "catalog.sqlite", read_only=True) as catalog:
            return catalog.segments()

    def extent(self, segment: int, layer: int) -> Extent:
        """segment: 0 to 2 of "a", 3 to 5 of "b"."""
        return unpack_extents(self.rows()[segment].extents)[layer]

    def read(self, extent: Extent) -> bytes:
        with self.region.open("rb") as file:
            file.seek(extent.offset)
            return file.read(extent.length)

    def write(self, offset: int, data: bytes) -> None:
        with self.region.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def flip(self, offset: int, bit: int = 3) -> None:
        with self.region.open("rb") as file:
            file.seek(offset)
            byte = file.read(1)[0]
        self.write(offset, bytes([byte ^ 1 << bit]))


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    with open_store(tmp_path) as store:
        put(store, OF_M, "a", A)
        put(store, OF_M, "b", B)
    return Stored(tmp_path)


HEADER_BYTES = extent_format.HEADER_BYTES


def flip_payload(stored: Stored) -> None:
    extent = stored.extent(1, 1)
    stored.flip(extent.offset + extent_format.header_bytes(PLAIN, 1, 512) + 12_345)


def flip_last_payload_byte(stored: Stored) -> None:
    extent = stored.extent(1, 0)
    head = extent_format.header_bytes(PLAIN, 0, 512)
    stored.flip(extent.offset + head + PLAIN.payload_bytes(0, 512) - 1, 7)


def flip_header(stored: Stored) -> None:
    stored.flip(stored.extent(1, 0).offset + 100)


def flip_magic(stored: Stored) -> None:
    stored.flip(stored.extent(1, 0).offset)


def flip_version(stored: Stored) -> None:
    stored.flip(stored.extent(1, 1).offset + 8)


def flip_directory(stored: Stored) -> None:
    stored.flip(stored.extent(1, 1).offset + HEADER_BYTES + 5 * 56 + 30)


def flip_stored_tokens(stored: Stored) -> None:
    stored.flip(stored.extent(1, 0).offset + HEADER_BYTES + 2 * 32 * 56 + 40)


def swap_extents(stored: Stored) -> None:
    """Of the same layer and size: whole, and each with good checksums."""
    left, right = stored.extent(1, 1), stored.extent(4, 1)
    assert left.length == right.length
    first, second = stored.read(left), stored.read(right)
    stored.write(left.offset, second)
    stored.write(right.offset, first)


def copy_over(stored: Stored) -> None:
    """A misdirected write: the neighbour's extent where this one was."""
    stored.write(stored.extent(1, 1).offset, stored.read(stored.extent(0, 1)))


def copy_payload_over(stored: Stored) -> None:
    """As above, but the header survived."""
    head = extent_format.header_bytes(PLAIN, 1, 512)
    other = stored.read(stored.extent(0, 1))[head:]
    stored.write(stored.extent(1, 1).offset + head, other)


def zero_extent(stored: Stored) -> None:
    extent = stored.extent(1, 0)
    stored.write(extent.offset, bytes(extent.length))


Damage = Callable[[Stored], None]
DAMAGES: dict[Damage, set[str]] = {
    flip_payload: {"page"},
    flip_last_payload_byte: {"page"},
    flip_header: {"header"},
    flip_magic: {"header"},
    flip_version: {"header"},
    flip_directory: {"header"},
    flip_stored_tokens: {"header"},
    swap_extents: {"header"},
    copy_over: {"header"},
    copy_payload_over: {"page"},
    zero_extent: {"header"},
}
IDS = [each.__name__ for each in DAMAGES]


@pytest.mark.parametrize(("damage", "kinds"), DAMAGES.items(), ids=IDS)
def test_verify_finds_it(stored: Stored, damage: Damage, kinds: set[str]) -> None:
    assert verify(stored.path).ok
    damage(stored)
    findings = verify(stored.path).findings
    assert {each.kind for each in findings} == kinds
    assert "segment 2" in findings[0].where


@pytest.mark.parametrize("damage", DAMAGES, ids=IDS)
def test_resume_is_shorter_and_neighbours_are_whole(stored: Stored, damage: Damage) -> None:
    """A064."""
    damage(stored)
    for _ in range(2):  # The second time it must be known from the catalog.
        with open_store(stored.path) as store:
            sequence = store.resume(A)
            check_bytes(store, OF_M, sequence, A[:TOLD_APART])
            check_everywhere(store, OF_M, sequence, A[:TOLD_APART])
            other = store.resume(B)
            whole = TOLD_APART if damage is swap_extents else len(B)
            check_bytes(store, OF_M, other, B[:whole])
    kinds = [each.kind for each in verify(stored.path).findings]
    assert "extent" in kinds, "a quarantined Segment is a finding"


@pytest.mark.parametrize("damage", [flip_payload, flip_header, swap_extents])
def test_what_was_lost_can_be_stored_again(stored: Stored, damage: Damage) -> None:
    damage(stored)
    for _ in range(2):
        with open_store(stored.path) as store:
            sequence = store.resume(A)
            extend(store, OF_M, sequence, A)
            assert store.save(sequence, "a", A) == len(A)
            store.release(sequence)
    with open_store(stored.path) as store:
        sequence = store.resume(A)
        check_bytes(store, OF_M, sequence, A)


def resume_more_than_hot(store: Store) -> None:
    sequence = store.resume(A)
    assert sequence.length() == len(A), "only headers of what HOT cannot hold are read"
    for _ in range(3):
        for layer in range(2):
            store.attend(sequence, layer, a_query(OF_M, layer, 1, 0))


@pytest.mark.parametrize("damage", [flip_payload, copy_payload_over, flip_last_payload_byte])
def test_attend_over_damage_is_a_typed_error_and_then_a_miss(
    stored: Stored, damage: Damage
) -> None:
    """A context larger than HOT: its payloads are read when they are attended to."""
    least = Config(hot=hot_bytes_min(PLAIN))
    damage(stored)
    with open_store(stored.path, PLAIN, least) as store:
        with pytest.raises(FormatError, match="damaged"):
            resume_more_than_hot(store)
        assert store.stats().damaged_extents == 1
        assert store.resume(A).length() == TOLD_APART
        other = store.resume(B)
        check_everywhere(store, OF_M, other, B)
    with open_store(stored.path, PLAIN, least) as store:
        assert store.lookup(A) == TOLD_APART


def fail_reads_at(store: Store, extent: Extent, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the device cannot read this extent, as with a bad sector."""
    device = store._files.region.device
    genuine = device.start_read

    def start_read(
        offsets: np.ndarray[tuple[int], np.dtype[np.int64]],
        buffers: Buffers,
        priority: Priority = Priority.DEMAND,
    ) -> PendingBatch:
        batch = genuine(offsets, buffers, priority)
        device.wait(batch)
        inside = (offsets < extent.end) & (offsets + buffers.lengths > extent.offset)
        batch.errors[inside] = 5
        return batch

    monkeypatch.setattr(device, "start_read", start_read)


@pytest.mark.parametrize("hot", [hot_bytes_min(PLAIN), 4 * MIB])
def test_a_bad_sector_is_a_miss(stored: Stored, hot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the header would have been read."""
    with open_store(stored.path, PLAIN, Config(hot=hot)) as store:
        fail_reads_at(store, stored.extent(1, 1), monkeypatch)
        assert store.resume(A).length() == TOLD_APART
        check_everywhere(store, OF_M, store.resume(B), B)
        assert store.stats().failed_reads == 1
        assert store.lookup(A) == TOLD_APART
    with open_store(stored.path, PLAIN, Config(hot=hot)) as store:
        # A drive that failed may work again; bytes that were damaged stay damaged.
        check_everywhere(store, OF_M, store.resume(A), A)


def test_new_kv_never_ends_on_a_segment_that_cannot_be_read(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read fails during attend; the same tokens computed anew are stored anew, not taken for
    known."""
    with open_store(stored.path, PLAIN, Config(hot=hot_bytes_min(PLAIN))) as store:
        sequence = store.resume(A)
        assert sequence.length() == len(A)
        fail_reads_at(store, stored.extent(1, 1), monkeypatch)
        with pytest.raises(DeviceError, match="cannot be read"):
            store.attend(sequence, 1, a_query(OF_M, 1, 1, 0))
        store.release(sequence)
        put(store, OF_M, "again", A)
        sequence = store.resume(A)
        check_bytes(store, OF_M, sequence, A)
    # The replacement is found from now on, in the place of what could not be read.
    with open_store(stored.path, PLAIN) as store:
        check_bytes(store, OF_M, store.resume(A), A)
    assert verify(stored.path).findings == []


@pytest.mark.parametrize("kept", [0, 4096, 512 * 1024, 3 * MIB + 4096])
def test_a_truncated_region_file_is_never_opened(stored: Stored, kept: int) -> None:
    os.truncate(stored.region, kept)
    with pytest.raises((ConfigError, DeviceError), match=str(kept)):
        open_store(stored.path)
    assert os.path.getsize(stored.region) == kept
    kinds = {each.kind for each in verify(stored.path).findings}
    assert "region" in kinds or "superblock" in kinds


def test_a_region_file_truncated_while_it_is_open_is_a_miss(stored: Stored) -> None:
    with open_store(stored.path) as store:
        os.truncate(stored.region, stored.extent(1, 1).offset)
        sequence = store.resume(A)
        check_bytes(store, OF_M, sequence, A[:TOLD_APART])


def test_a_missing_region_file_is_named(stored: Stored) -> None:
    stored.region.unlink()
    with pytest.raises(DeviceError, match=r"region\.kv"):
        open_store(stored.path)
    assert [each.kind for each in verify(stored.path).findings] == ["region"]


def test_damage_in_the_middle_of_a_store_leaves_it_settled(stored: Stored) -> None:
    """After the damaged Segment is known, nothing is leaked and no lease is left."""
    flip_payload(stored)
    with open_store(stored.path) as store:
        store.release(store.resume(A))
        store.release(store.resume(B))
        assert store.stats().device_bytes == describe(stored.path).used_bytes
        assert not store._residency.leases.any()
        assert all(each.references == 0 for each in store._registry.committed.values())


@pytest.mark.parametrize("offset", [0, 64 * 1024], ids=["first copy", "second copy"])
def test_a_damaged_superblock_copy_is_found_then_repaired(stored: Stored, offset: int) -> None:
    stored.flip(offset + 50)
    assert {each.kind for each in verify(stored.path).findings} == {"superblock"}
    open_store(stored.path).close()
    assert verify(stored.path).ok
