"""What stands on a device that is not ours, and who uses it: asked before anything is written."""

import ctypes
import os
import stat
from pathlib import Path

from kvtier.errors import DeviceError
from kvtier.io.superblock import (
    CHECKSUM_BYTES,
    DATA_START,
    MAGIC,
    SECOND_COPY_OFFSET,
    SUPERBLOCK_BYTES,
)

_BLKID_SUBLKS_TYPE = 1 << 5
_BLKID_FOUND = 0
_BLKID_AMBIVALENT = -2


def foreign_content(path: str) -> str | None:
    """What a device or file carries that is not kvtier's, in words; None if it carries nothing.

    Asks libblkid where it is installed; looks at the first 1 MiB in any case. A kvtier region is
    not foreign. Raises DeviceError if the path cannot be read.
    """
    known = _signature(path)
    if known is not None:
        return known
    head = _head(path)
    ours = (head[:8], head[SECOND_COPY_OFFSET : SECOND_COPY_OFFSET + 8])
    if MAGIC in ours or not _without_torn_superblocks(head).strip(b"\0"):
        return None
    return "unknown data in the first 1 MiB"


def _without_torn_superblocks(head: bytes) -> bytes:
    """The first bytes of a device without what a power cut may leave of a superblock that had just
    been begun: its last sector, which is zeros but for the checksum at its end."""
    for copy in (0, SECOND_COPY_OFFSET):
        end = copy + SUPERBLOCK_BYTES
        head = head[: end - CHECKSUM_BYTES] + bytes(CHECKSUM_BYTES) + head[end:]
    return head


def in_use_by(path: str) -> str | None:
    """Who uses the device now, in words: a mount, a swap area, a device above it; else None.

    Looks at the device and at its partitions. For a file: is it the back of a loop device, or swap?
    Raises DeviceError if the path does not exist.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise DeviceError(f"cannot look at {path}: {error.strerror}", error.errno or 0) from error
    if not stat.S_ISBLK(status.st_mode):
        return _swap(path, None) or _loop_device(path, None)
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    directory = Path("/sys/dev/block", number)
    used = _use_of(path, number, directory)
    if used is not None:
        return used
    for partition in sorted(directory.glob("*/partition")):
        name = partition.parent.name
        part_number = _text(partition.parent / "dev")
        used = _use_of(f"/dev/{name}", part_number, partition.parent)
        if used is not None:
            return f"its partition {name} is in use: {used}"
    return None


def _use_of(path: str, number: str, directory: Path) -> str | None:
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        fields = line.split()
        source = fields[fields.index("-") + 2]
        # Some file systems (btrfs) show an anonymous device number, so the source counts as well.
        if fields[2] == number or (source.startswith("/") and _same_device(source, number)):
            return f"mounted on {_unescape(fields[4])}"
    try:
        holders = sorted(os.listdir(directory / "holders"))
    except OSError:
        holders = []
    if holders:
        return f"held by {', '.join(holders)}"
    return _swap(path, number) or _loop_device(path, number)


def _swap(path: str, number: str | None) -> str | None:
    for line in _text(Path("/proc/swaps")).splitlines()[1:]:
        area = _unescape(line.split()[0])
        same = _same_device(area, number) if number else os.path.realpath(area) == _real(path)
        if same:
            return "in use as swap"
    return None


def _loop_device(path: str, number: str | None) -> str | None:
    """The loop device over a file or, with its number, over a device: no holder, but a user."""
    for backing in sorted(Path("/sys/block").glob("loop*/loop/backing_file")):
        name = _text(backing)
        if _same_device(name, number) if number else name == _real(path):
            return f"held by /dev/{backing.parent.parent.name}, whose backing file it is"
    return None


def _real(path: str) -> str:
    return os.path.realpath(path)


def _same_device(path: str, number: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    device = status.st_rdev
    return stat.S_ISBLK(status.st_mode) and f"{os.major(device)}:{os.minor(device)}" == number


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # Not every kernel has every file, and a device may go away while we look.
        return ""


def _unescape(field: str) -> str:
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _head(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            head = b""
            while len(head) < DATA_START:
                piece = os.pread(fd, DATA_START - len(head), len(head))
                if not piece:
                    break
                head += piece
            # This look went through the page cache; kvtier leaves nothing there.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError as error:
        raise DeviceError(f"cannot read {path}: {error.strerror}", error.errno or 0) from error
    return head


def _load_blkid() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libblkid.so.1")
    except OSError:  # Not installed; the look at the first 1 MiB still finds any data.
        return None
    library.blkid_new_probe_from_filename.restype = ctypes.c_void_p
    return library


def _signature(path: str) -> str | None:
    """The file system or partition table that libblkid recognises, in words."""
    library = _load_blkid()
    if library is None:
        return None
    pointer = library.blkid_new_probe_from_filename(os.fsencode(path))
    if not pointer:
        return None
    probe = ctypes.c_void_p(pointer)
    try:
        library.blkid_probe_enable_superblocks(probe, 1)
        library.blkid_probe_set_superblocks_flags(probe, _BLKID_SUBLKS_TYPE)
        library.blkid_probe_enable_partitions(probe, 1)
        result = library.blkid_do_safeprobe(probe)
        if result == _BLKID_AMBIVALENT:
            return "more than one file system or partition table"
        if result != _BLKID_FOUND:
            return None
        kind = _blkid_value(library, probe, b"TYPE")
        if kind is not None:
            return f"{kind} file system" if not kind.endswith("_member") else kind
        table = _blkid_value(library, probe, b"PTTYPE")
        return f"{table.upper()} partition table" if table is not None else None
    finally:
        library.blkid_free_probe(probe)


def _blkid_value(library: ctypes.CDLL, probe: ctypes.c_void_p, name: bytes) -> str | None:
    data, length = ctypes.c_char_p(), ctypes.c_size_t()
    if library.blkid_probe_lookup_value(probe, name, ctypes.byref(data), ctypes.byref(length)):
        return None
    return (data.value or b"").decode(errors="replace")
