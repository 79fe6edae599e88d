"""All regions of a store as one: which drives are there, in their order, and where Extents may lie.

A store of one region has its device as it is; one of several has them behind one device
(`drives.py`), whose offsets say which of them is meant.

Invariants:
- A region's place is the one that its superblock tells, whatever path it was found at.
- All of them belong to one store, and no two have the same place.
- One that is missing stays missing until the store is opened anew.
"""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError, DeviceError, FormatError
from kvtier.io.device import Device
from kvtier.io.drives import Drives, MissingDrive
from kvtier.io.extent import Extent, drive_of, drive_start
from kvtier.io.region import Region, bytes_of
from kvtier.io.region_place import RegionPlace

_GONE = (errno.ENOENT, errno.ENXIO, errno.ENODEV, errno.ENOMEDIUM, errno.EIO)
"""With one of these a drive fails that is not there, or that answers nothing any more."""


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes [start, end) of a store's device in which Extents may lie: those of one region."""

    start: int
    end: int

    @property
    def drive(self) -> int:
        """The number of the region."""
        return drive_of(self.start)


class Regions:
    """Made by `create`, `open` or of opened Regions. Whoever opened the devices closes them."""

    def __init__(self, members: Sequence[Region | MissingDrive], notes: Sequence[str] = ()) -> None:
        """members: by their number; one at least is there."""
        self.members = tuple(members)
        self.present = [each for each in members if isinstance(each, Region)]
        self.missing = [each for each in members if isinstance(each, MissingDrive)]
        self.store_uuid = self.present[0].store_uuid
        self.notes = [*notes, *(note for each in self.present for note in each.notes)]
        """What `open` found and put right, in words."""
        devices = [each.device if isinstance(each, Region) else each for each in members]
        self.device: Device = devices[0] if len(devices) == 1 else Drives(devices)
        self.windows = [
            Window(drive_start(number) + each.data_start, drive_start(number) + each.data_end)
            for number, each in enumerate(members)
            if isinstance(each, Region)
        ]

    @property
    def path(self) -> str:
        """Where they are, in words."""
        return self.device.path

    @property
    def nbytes(self) -> int:
        """Bytes of those that are there."""
        return sum(each.superblock.region_bytes for each in self.present)

    def holds(self, extent: Extent) -> bool:
        """Whether an Extent lies on a drive that is there, as far as its number tells."""
        drive = extent.drive
        return drive >= len(self.members) or isinstance(self.members[drive], Region)

    @classmethod
    def create(cls, devices: Sequence[Device], store_uuid: str, *, force: bool) -> "Regions":
        """Format whole devices for a store, in this order. Raises as `Region.create`; nothing is
        written before every device has passed every check."""
        count = len(devices)
        planned = [
            Region.planned(device, store_uuid, force=force, place=(number, count))
            for number, device in enumerate(devices)
        ]
        return cls([Region.format(*each) for each in zip(devices, planned, strict=True)])

    @classmethod
    def open(
        cls,
        places: Sequence[RegionPlace],
        found: Sequence[Device | MissingDrive],
        store_uuid: str,
        *,
        writable: bool = True,
    ) -> "Regions":
        """Open what `open_places` found, and put it into the order that the superblocks tell.

        Raises as `Region.open` for every device that is there and is not this store's; of several,
        one that answers nothing counts as missing. FormatError where superblocks contradict each
        other or the settings.
        """
        if len(found) == 1 and isinstance(found[0], Device):
            require_size(found[0], places[0].nbytes)
        members: dict[int, Region] = {}
        absent: list[MissingDrive] = []
        notes: list[str] = []
        for number, device in enumerate(found):
            region = _opened(device, places[number], store_uuid, writable, alone=len(found) == 1)
            if isinstance(region, MissingDrive):
                absent.append(region)
                continue
            index, count = region.superblock.region_index, region.superblock.region_count
            if count != len(places):
                raise FormatError(
                    f"{region.path} is one of {count} regions of store {store_uuid}, whose "
                    f"settings name {len(places)}. Put the right store.yaml back"
                )
            if index in members:
                raise FormatError(
                    f"{members[index].path} and {region.path} are both region {index} of store "
                    f"{store_uuid}: one of them is a copy. Take it away"
                )
            if index != number:
                notes.append(
                    f"{region.path} is region {index} of the store, not {number} as its settings "
                    "say: used as what it is"
                )
            members[index] = region
        if not members:
            raise DeviceError(
                f"no region of this store is there: {'; '.join(each.why for each in absent)}",
                errno.ENODEV,
            )
        if len(places) > 1:
            for index, region in members.items():
                require_size(region.device, places[index].nbytes)
        left = iter(absent)
        return cls([members.get(number) or next(left) for number in range(len(places))], notes)


def _opened(
    device: Device | MissingDrive,
    place: RegionPlace,
    store_uuid: str,
    writable: bool,
    *,
    alone: bool,
) -> Region | MissingDrive:
    if isinstance(device, MissingDrive):
        return device
    try:
        return Region.open(device, store_uuid, writable=writable)
    except DeviceError as error:
        if alone or not _is_gone(error):
            raise
        return MissingDrive(place.path, place.nbytes, f"{place.path} answers nothing: {error}")


def _is_gone(error: DeviceError) -> bool:
    """Whether a drive is not there. Subclasses say that it answers, and is another one."""
    return type(error) is DeviceError and error.errno in _GONE


def open_places(
    places: Sequence[RegionPlace], open_one: Callable[[str], Device]
) -> list[Device | MissingDrive]:
    """Open what is there of the regions of a store.

    Raises DeviceError where none is, ConfigError where two are one drive, and whatever `open_one`
    raises for one that is there and may not be used.
    """
    require_different([place.path for place in places])
    found: list[Device | MissingDrive] = []
    for place in places:
        try:
            if not os.path.exists(place.path):
                raise DeviceError(
                    f"the region {place.path} of this store does not exist", errno.ENOENT
                )
            found.append(open_one(place.path))
        except DeviceError as error:
            if len(places) == 1 or not _is_gone(error):
                raise
            found.append(MissingDrive(place.path, place.nbytes, str(error)))
    return found


def require_different(paths: Sequence[str]) -> None:
    """Raise ConfigError where two paths lead to one device or file. What is not there is none."""
    known: dict[tuple[int, int, int], str] = {}
    for path in paths:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            # Whoever opens it says what is wrong with it.
            continue
        key = (status.st_rdev, 0, 0) if status.st_rdev else (0, status.st_dev, status.st_ino)
        if key in known:
            same = (
                f"{path} is named twice"
                if known[key] == path
                else f"{known[key]} and {path} are the same drive"
            )
            raise ConfigError(f"{same}: name every drive once")
        known[key] = path


def require_size(device: Device, nbytes: int) -> None:
    """Raise ConfigError where a region was truncated. nbytes: as it was made."""
    if device.capacity_bytes < nbytes:
        raise ConfigError(
            f"{device.path} has {bytes_of(device)} bytes, but the store was made with "
            f"{nbytes} bytes: it was truncated. Restore it, or make a new store"
        )
