"""Settings of a store, checked once, and sizes as people write them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from kvtier.errors import ConfigError
from kvtier.io.alignment import GRID_BYTES, align_down
from kvtier.io.probe import Engine
from kvtier.io.rawfile import DirectMode
from kvtier.io.superblock import REGION_BYTES_MIN, REGIONS_MAX

UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}

SKETCH_BITS = (2, 3, 4)
PlacementName = Literal["position", "keys"]

BYTES_MAX = 2**63 - 1
"""Largest size or offset that the kernel takes."""


def parse_bytes(size: int | str, what: str) -> int:
    """Bytes of "512MiB", "4 GiB", "1.5GB" or of a number. Raises ConfigError, naming `what`."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(f"{what} must be a size such as 4294967296 or '4GiB': got {size!r}")
    if isinstance(size, int):
        value = size
    else:
        match = re.fullmatch(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].lower() not in UNITS:
            raise ConfigError(
                f"{what} must be a size such as '512MiB' or '4GiB' (units B, KiB, MiB, GiB, TiB, "
                f"KB, MB, GB, TB): got {size!r}"
            )
        # Not float: its 53 bits would round large sizes.
        value = int(Fraction(match[1]) * UNITS[match[2].lower()])
    if not 0 <= value <= BYTES_MAX:
        raise ConfigError(f"{what} must be 0 to {BYTES_MAX} bytes: got {size!r}")
    return value


@dataclass(frozen=True, slots=True)
class Config:
    """How a store is opened.

    region: a size ("4GiB": a preallocated file in the store's directory), the path of a block
        device or of a file, several such paths (what is stored is spread over them), or None: what
        the store has, 4 GiB for a new store.
    hot, host: limits in bytes of the memory tiers; host may be 0.
    engine: which Device implementation ("auto": the first that works here; "nvme": commands past
        the block layer, for a whole NVMe namespace, never chosen by itself).
    direct_io: "required" refuses a file system without O_DIRECT, "preferred" reports it,
        "off" goes through the page cache.
    force: format a region even though it carries something else. Never one that is mounted.
    hold_limit: bytes of the region that holds may keep from eviction; None: half of it.
    discard: tell the device which space is free (TRIM) after Segments were removed.
    placement: in which order a segment's tokens are written: that of their "position", or by their
        "keys", similar ones together, so that sparse attention reads less. What is stored already
        stays as it is, and either can be read.
    sketch_bits: of each key that is kept in memory for sparse attention: 2, 3 or 4 bits of every
        element, or 0: of each page the mean key and value alone, for a third of the memory.
    calibrate: with engine "auto", use what was measured of the device, and measure it, for about a
        second, at the first opening that finds 64 MiB stored on it.
    """

    region: int | str | Sequence[str] | None = None
    hot: int | str = "512MiB"
    host: int | str = 0
    engine: Engine = "auto"
    direct_io: DirectMode = "preferred"
    force: bool = False
    hold_limit: int | str | None = None
    discard: bool = False
    placement: PlacementName = "position"
    sketch_bits: int = 3
    calibrate: bool = True

    def __post_init__(self) -> None:
        parse_bytes(self.hot, "hot")
        parse_bytes(self.host, "host")
        if self.hold_limit is not None:
            parse_bytes(self.hold_limit, "hold_limit")
        self._check_paths()
        if self.placement not in get_args(PlacementName):
            raise ConfigError(f"placement must be position or keys: got {self.placement!r}")
        if self.sketch_bits not in (0, *SKETCH_BITS):
            raise ConfigError(f"sketch_bits must be 0, 2, 3 or 4: got {self.sketch_bits!r}")
        if self.region_bytes is not None and self.region_bytes < REGION_BYTES_MIN:
            raise ConfigError(
                f"region must be at least {REGION_BYTES_MIN} bytes, or a path with a '/' in it: "
                f"got {self.region!r}"
            )
        if self.engine not in get_args(Engine):
            raise ConfigError(
                f"engine must be auto, io_uring, threads or nvme: got {self.engine!r}"
            )
        if self.direct_io not in get_args(DirectMode):
            raise ConfigError(
                f"direct_io must be required, preferred or off: got {self.direct_io!r}"
            )

    def _check_paths(self) -> None:
        if self.region is None or isinstance(self.region, int | str):
            return
        paths = list(self.region) if isinstance(self.region, list | tuple) else [self.region]
        if not 1 <= len(paths) <= REGIONS_MAX:
            raise ConfigError(f"a store has 1 to {REGIONS_MAX} regions: got {len(paths)}")
        for path in paths:
            if not isinstance(path, str) or "/" not in path:
                raise ConfigError(
                    "region must be a size such as '4GiB', a path, or a list of paths, each with "
                    f"a '/' in it: got {path!r}"
                )
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise ConfigError(f"region names {twice} twice: every drive once")

    @property
    def hot_bytes(self) -> int:
        return parse_bytes(self.hot, "hot")

    @property
    def host_bytes(self) -> int:
        return parse_bytes(self.host, "host")

    def hold_limit_bytes(self, region_bytes: int) -> int:
        """Bytes that holds may keep of a region of this size."""
        if self.hold_limit is None:
            return region_bytes // 2
        return parse_bytes(self.hold_limit, "hold_limit")

    @property
    def region_paths(self) -> tuple[str, ...]:
        """The paths that `region` names; none when it is a size or not given."""
        if isinstance(self.region, str) and "/" in self.region:
            return (self.region,)
        if self.region is None or isinstance(self.region, int | str):
            return ()
        return tuple(self.region)

    @property
    def region_bytes(self) -> int | None:
        """The size that `region` names, rounded down to the grid; None when it is paths or not
        given."""
        if not isinstance(self.region, int | str) or self.region_paths:
            return None
        return align_down(parse_bytes(self.region, "region"), GRID_BYTES)
