"""A block device or file as an operator sees it: its size, what it carries, who uses it.

Only looks: nothing is written, and nothing is left in the page cache.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import DeviceError
from kvtier.io.alignment import align_down
from kvtier.io.foreign import foreign_content, in_use_by
from kvtier.io.stable_path import stable_path
from kvtier.io.superblock import (
    SUPERBLOCK_BYTES,
    Superblock,
    SuperblockCopy,
    read_copies,
)

SYSFS = Path("/sys/class/block")
_FILE_BLOCK_BYTES = 512
_SECTOR_BYTES = 512
"""The unit of sizes in sysfs, whatever the device's own block."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """What one path leads to.

    stable_path: a link that stays with the device; None where there is none. block_bytes: 0 where
    unknown. foreign: what it carries that is not kvtier's, in words. superblock: of the kvtier
    region on it. other_version: words about a region of another format version. in_use: by whom,
    in words. read_only: the kernel refuses writes. problem: why nothing is known of its content.
    """

    path: str
    stable_path: str | None = None
    is_block_device: bool = True
    nbytes: int = 0
    block_bytes: int = 0
    foreign: str | None = None
    superblock: Superblock | None = None
    other_version: str | None = None
    in_use: str | None = None
    read_only: bool = False
    problem: str | None = None

    @property
    def carries_anything(self) -> bool:
        """Whether formatting it would lose something."""
        return bool(self.foreign or self.superblock or self.other_version)


def look_at(path: str) -> DeviceView:
    """Look at a block device or a regular file. Raises DeviceError where it cannot be read."""
    try:
        # Without O_NONBLOCK a pipe, or a drive without its medium, could wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DeviceError(f"cannot read {path}: {error.strerror}", error.errno or 0) from error
    try:
        status = os.fstat(fd)
        is_block = stat.S_ISBLK(status.st_mode)
        if not is_block and not stat.S_ISREG(status.st_mode):
            raise DeviceError(f"{path} is neither a block device nor a regular file")
        nbytes = os.lseek(fd, 0, os.SEEK_END)
        copies = read_copies(_Reader(fd, path), align_down(nbytes, SUPERBLOCK_BYTES))
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        if isinstance(error, DeviceError):
            raise
        raise DeviceError(f"cannot read {path}: {error.strerror}", error.errno or 0) from error
    finally:
        os.close(fd)
    intact = [copy.found for copy in copies if isinstance(copy.found, Superblock)]
    return DeviceView(
        path,
        stable_path(path) if is_block else None,
        is_block,
        nbytes,
        _block_bytes(_directory(status.st_rdev)) if is_block else _FILE_BLOCK_BYTES,
        foreign_content(path),
        max(intact, key=lambda each: each.sequence, default=None),
        _other_version(copies),
        in_use_by(path),
        is_block and _text(_directory(status.st_rdev) / "ro") == "1",
    )


class _Reader:
    """Reads small pieces for `read_copies`."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path

    def __call__(self, offset: int, length: int) -> bytes:
        try:
            data = os.pread(self._fd, length, max(offset, 0))
        except OSError as error:
            raise DeviceError(
                f"cannot read {self._path} at byte {offset}: {error.strerror}", error.errno or 0
            ) from error
        return data.ljust(length, b"\0")


def _other_version(copies: tuple[SuperblockCopy, ...]) -> str | None:
    found = [str(copy.found) for copy in copies if copy.other_version]
    return found[0] if found else None


def _directory(device: int) -> Path:
    return Path("/sys/dev/block", f"{os.major(device)}:{os.minor(device)}")


def _block_bytes(directory: Path) -> int:
    # A partition has its queue in the folder of its disk.
    for folder in (directory / "queue", directory / ".." / "queue"):
        text = _text(folder / "logical_block_size")
        if text.isdigit():
            return int(text)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # Devices come and go while we look.
        return ""


def block_devices(sysfs: Path = SYSFS) -> list[DeviceView]:
    """Every block device of this machine that has a size, by name; one that cannot be read is
    shown with its problem."""
    views = []
    for name in sorted(os.listdir(sysfs), key=_numbers_as_numbers):
        sectors = _text(sysfs / name / "size")
        # Loop devices without a file, and readers without a card, have none.
        if not sectors.isdigit() or sectors == "0":
            continue
        # The kernel writes the / of a name such as cciss/c0d0 as !.
        path = "/dev/" + name.replace("!", "/")
        try:
            views.append(look_at(path))
        except DeviceError as error:
            views.append(
                DeviceView(
                    path,
                    stable_path(path),
                    nbytes=int(sectors) * _SECTOR_BYTES,
                    block_bytes=_block_bytes((sysfs / name).resolve()),
                    problem=str(error),
                )
            )
    return views


def _numbers_as_numbers(name: str) -> list[tuple[int, str]]:
    """So that sd2 comes before sd10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
