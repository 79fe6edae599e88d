"""A contiguous range of bytes on a store's device, on the grid.

A store may own regions on several drives. Its device is then one range of offsets for all of them:
the number of the drive, then in so many bits the byte of that drive. A store of one region has its
Extents on drive 0, where both are the same.
"""

from dataclasses import dataclass

from kvtier.io.alignment import GRID_BYTES

DRIVE_BITS = 48
"""Bits of an offset that count bytes of one drive: 256 TiB."""


def drive_of(offset: int) -> int:
    """The number of the drive that an offset lies on."""
    return offset >> DRIVE_BITS


def drive_start(drive: int) -> int:
    """The offset of a drive's first byte."""
    return drive << DRIVE_BITS


@dataclass(frozen=True, slots=True)
class Extent:
    """offset, length: bytes from the start of the device, both multiples of GRID_BYTES."""

    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length <= 0 or (self.offset | self.length) % GRID_BYTES:
            raise AssertionError(
                f"an extent needs offset >= 0 and length > 0 in multiples of {GRID_BYTES} bytes: "
                f"got offset {self.offset}, length {self.length}"
            )

    @property
    def end(self) -> int:
        """First byte after the extent."""
        return self.offset + self.length

    @property
    def drive(self) -> int:
        """The number of the drive that it lies on."""
        return drive_of(self.offset)

    @property
    def byte(self) -> int:
        """Where it begins, in bytes from the start of its drive."""
        return self.offset - drive_start(self.drive)
