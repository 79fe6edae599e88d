"""The part of a device that belongs to one store: superblock copies, and data between them.

Invariants:
- Nothing is written before every check has passed.
- `open` writes only to repair a damaged or old copy of an intact superblock, and notes it.
- A device that is mounted or in use is never formatted, forced or not.
- Extents lie in [data_start, data_end): no superblock copy lies there.
"""

import errno
import os
import stat
import time
import uuid
from typing import Self

import numpy as np

from kvtier.errors import (
    ConfigError,
    DeviceError,
    ForeignDataError,
    FormatError,
    WrongStoreError,
)
from kvtier.io.alignment import GRID_BYTES, align_down
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers, Device
from kvtier.io.foreign import foreign_content, in_use_by
from kvtier.io.superblock import (
    DATA_START,
    ONE_COPY,
    REGION_BYTES_MIN,
    REGIONS_MAX,
    SUPERBLOCK_BYTES,
    Superblock,
    SuperblockCopy,
    copy_offsets,
    read_copies,
)


class Region:
    """Open by `Region.create` or `Region.open`. Owns the device: `close` closes it."""

    def __init__(self, device: Device, superblock: Superblock, notes: list[str]) -> None:
        self.device = device
        self.superblock = superblock
        self.notes = notes
        """What `open` found and repaired, in words."""

    @property
    def path(self) -> str:
        return self.device.path

    @property
    def store_uuid(self) -> str:
        return self.superblock.store_uuid

    @property
    def data_start(self) -> int:
        """First byte of the device that an extent may use."""
        return self.superblock.data_start

    @property
    def data_end(self) -> int:
        """First byte after the last that an extent may use."""
        return copy_offsets(self.superblock.region_bytes)[2]

    @classmethod
    def create(cls, device: Device, store_uuid: str, *, force: bool = False) -> Self:
        """Format the whole device for a store of one region. The caller closes the device if this
        raises what `planned` does, or DeviceError."""
        return cls.format(device, cls.planned(device, store_uuid, force=force))

    @classmethod
    def planned(
        cls,
        device: Device,
        store_uuid: str,
        *,
        force: bool = False,
        place: tuple[int, int] = (0, 1),
    ) -> Superblock:
        """What `format` will write. Writes nothing.

        place: which of how many regions of the store it becomes. Refuses foreign data and the
        region of another store unless forced (ForeignDataError names what was found), and a device
        in use in any case. Raises ConfigError if it is too small.
        """
        region_bytes = align_down(device.capacity_bytes, GRID_BYTES)
        if region_bytes < REGION_BYTES_MIN:
            raise ConfigError(
                f"{device.path} has {bytes_of(device)} bytes: a region needs at least "
                f"{REGION_BYTES_MIN} bytes"
            )
        if GRID_BYTES % device.block_bytes:
            raise ConfigError(
                f"{device.path} has logical blocks of {device.block_bytes} bytes: a region needs "
                f"blocks that divide {GRID_BYTES} bytes"
            )
        used = in_use_by(device.path)
        if used is not None:
            raise ForeignDataError(
                f"{device.path} is in use ({used}) and is never formatted, forced or not. "
                "Release it first.",
                errno.EBUSY,
            )
        foreign = foreign_content(device.path)
        copies = read_copies(_Reader(device), device.capacity_bytes)
        _refuse_to_overwrite(device.path, foreign, copies, store_uuid, force)
        return Superblock(
            store_uuid=str(uuid.UUID(store_uuid)),
            created=int(time.time()),
            region_bytes=region_bytes,
            block_bytes=device.block_bytes,
            sequence=1 + max((s.sequence for s in _intact(copies)), default=0),
            region_index=place[0],
            more_regions=place[1] - 1,
        )

    @classmethod
    def format(cls, device: Device, superblock: Superblock) -> Self:
        """Write what was planned for this device. Raises DeviceError."""
        region_bytes = superblock.region_bytes
        # Zeros first: nothing may stay that another program would take for its own.
        _write(device, 0, bytes(DATA_START))
        _write(device, region_bytes - DATA_START, bytes(DATA_START))
        for offset in copy_offsets(region_bytes):
            _write(device, offset, superblock.pack())
        device.flush()
        return cls(device, superblock, [])

    @classmethod
    def open(cls, device: Device, store_uuid: str, *, writable: bool = True) -> Self:
        """Open the region of this store. The caller closes the device if this raises.

        Raises FormatError (BadMagic, VersionMismatch, ChecksumMismatch), WrongStoreError,
        DeviceError, and ConfigError if the device is smaller than the region. Repairs damaged and
        old copies if writable.
        """
        if device.capacity_bytes < DATA_START:
            raise ConfigError(
                f"{device.path} has {bytes_of(device)} bytes: a region needs at least "
                f"{REGION_BYTES_MIN} bytes; was the file truncated?"
            )
        copies = read_copies(_Reader(device), device.capacity_bytes, device.path)
        for copy in copies:
            if copy.other_version and not isinstance(copy.found, Superblock):
                raise copy.found
        intact = _intact(copies)
        if not intact:
            first = copies[0].found
            assert not isinstance(first, Superblock)
            raise first
        superblock = max(intact, key=lambda s: s.sequence)
        if uuid.UUID(superblock.store_uuid) != uuid.UUID(store_uuid):
            raise WrongStoreError(store_uuid, superblock.store_uuid, device.path)
        if device.capacity_bytes < superblock.region_bytes:
            raise ConfigError(
                f"{device.path} has {bytes_of(device)} bytes, but its superblock says "
                f"{superblock.region_bytes} bytes: it was truncated. Restore the file, or format "
                "the region anew."
            )
        _check_plausible(superblock, device)
        region = cls(device, superblock, [])
        damaged = [copy.offset for copy in copies if copy.found != superblock]
        for offset in damaged:
            region._note_damage(offset, writable)
        if writable and damaged:
            device.flush()
        return region

    def close(self) -> None:
        """Close the device. Calling it twice is allowed."""
        self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _note_damage(self, offset: int, writable: bool) -> None:
        """Repair one copy of the superblock if allowed, and say so in `notes`."""
        outcome = "not repaired, because the region is open read-only"
        if writable:
            outcome = "repaired"
            try:
                _write(self.device, offset, self.superblock.pack())
            except DeviceError as error:
                # The other copies are intact, so the store opens; the operator hears of it.
                outcome = f"not repaired: {error}"
        self.notes.append(f"{ONE_COPY} {offset} of {self.path} was damaged or old: {outcome}")


def _intact(copies: tuple[SuperblockCopy, ...]) -> list[Superblock]:
    return [copy.found for copy in copies if isinstance(copy.found, Superblock)]


def bytes_of(device: Device) -> int:
    """How many bytes there are, for messages: a device's capacity counts whole blocks only."""
    try:
        status = os.stat(device.path)
    except OSError:
        return device.capacity_bytes
    return status.st_size if stat.S_ISREG(status.st_mode) else device.capacity_bytes


def root_of(device: Device) -> Superblock:
    """The superblock of whatever store a device's region belongs to.

    Raises FormatError where no copy of the superblock is intact, ConfigError, DeviceError.
    """
    if device.capacity_bytes < REGION_BYTES_MIN:
        raise ConfigError(
            f"{device.path} has {bytes_of(device)} bytes: a region has at least "
            f"{REGION_BYTES_MIN} bytes"
        )
    copies = read_copies(_Reader(device), device.capacity_bytes, device.path)
    intact = _intact(copies)
    if not intact:
        first = copies[0].found
        assert not isinstance(first, Superblock)
        raise first
    return max(intact, key=lambda s: s.sequence)


def _refuse_to_overwrite(
    path: str,
    foreign: str | None,
    copies: tuple[SuperblockCopy, ...],
    store_uuid: str,
    force: bool,
) -> None:
    if force:
        return
    if foreign is not None:
        raise ForeignDataError(
            f"{path} carries {foreign}. Choose another device, or force the format to lose it.",
            errno.EEXIST,
        )
    for copy in copies:
        if copy.other_version:
            raise ForeignDataError(
                f"{path} carries a kvtier region of another format version ({copy.found}). "
                "Force the format to lose it.",
                errno.EEXIST,
            )
    for superblock in _intact(copies):
        if uuid.UUID(superblock.store_uuid) != uuid.UUID(store_uuid):
            created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(superblock.created))
            raise ForeignDataError(
                f"{path} carries the region of kvtier store {superblock.store_uuid}, created "
                f"{created}. Force the format to lose it.",
                errno.EEXIST,
            )


def _check_plausible(superblock: Superblock, device: Device) -> None:
    """Refuse fields that no writer sets: the checksum holds, so this is not damage."""
    if superblock.grid_bytes != GRID_BYTES or superblock.data_start != DATA_START:
        raise FormatError(
            f"{device.path} has a grid of {superblock.grid_bytes} bytes and data from "
            f"{superblock.data_start} bytes; this release reads {GRID_BYTES} and {DATA_START}"
        )
    if superblock.region_index >= superblock.region_count or superblock.region_count > REGIONS_MAX:
        raise FormatError(
            f"{device.path} is region {superblock.region_index} of {superblock.region_count}, "
            "counted from 0, which cannot be"
        )
    if superblock.region_bytes < REGION_BYTES_MIN or GRID_BYTES % device.block_bytes:
        raise FormatError(
            f"{device.path}: a region of {superblock.region_bytes} bytes on blocks of "
            f"{device.block_bytes} bytes cannot be used"
        )


class _Reader:
    """Reads small pieces of a device as bytes, through one aligned buffer."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = aligned_bytes(SUPERBLOCK_BYTES)

    def __call__(self, offset: int, length: int) -> bytes:
        memory = self._memory[:length]
        self._device.read(np.array([offset], np.int64), Buffers.whole(memory))
        return memory.tobytes()


def _write(device: Device, offset: int, data: bytes) -> None:
    memory = aligned_bytes(len(data))
    memory[:] = np.frombuffer(data, np.uint8)
    device.write(np.array([offset], np.int64), Buffers.whole(memory))
