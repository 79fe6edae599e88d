"""Where a region of a store should be, as its settings say."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """path: of a device or file. nbytes: of the region when it was made."""

    path: str
    nbytes: int
