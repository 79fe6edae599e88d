"""A contiguous range of bytes on the region, on the grid."""

from dataclasses import dataclass

from kvtier.io.alignment import GRID_BYTES


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
