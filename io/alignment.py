"""Rounding of byte counts, and the grid on which extents lie."""

import os

GRID_BYTES = 4096
"""Extents begin and end on this grid whatever the device's logical block is, so that a region may
be copied from a device of 512-byte blocks to one of 4096-byte blocks."""


def align_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `n`. Bytes."""
    return -(-n // multiple) * multiple


def align_down(n: int, multiple: int) -> int:
    """Largest multiple of `multiple` that is not above `n`. Bytes."""
    return n // multiple * multiple


def os_page_bytes() -> int:
    """Size of the operating system's memory page: 4096, 16384 or 65536 bytes."""
    return os.sysconf("SC_PAGE_SIZE")
