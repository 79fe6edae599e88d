"""Small files of text beside a store: read within a bound, and replaced as a whole.

Anything may lie under their names: a pipe that blocks who opens it, a link to a device that never
ends, a file that fills the memory. None of it is waited for, followed for writing, or read whole.
"""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

_NOT_SHOWN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def can_be_shown(text: str) -> bool:
    """Whether text from a file can go to a terminal: control characters may steer it, and half of
    a character cannot be written at all."""
    return _NOT_SHOWN.search(text) is None


def number_within(value: object, bounds: tuple[float, float]) -> float:
    """A number from such a file. Raises ValueError, also for what is no number."""
    # Compared before it becomes a float, which a number of hundreds of digits cannot.
    if not isinstance(value, int | float) or not bounds[0] <= value <= bounds[1]:
        raise ValueError("a number that no measurement gives")
    return float(value)


def read_small(path: Path, bytes_max: int) -> bytes:
    """The whole content of a regular file.

    Raises the system's OSError, also for a directory, and ValueError for what kvtier never writes:
    a pipe, a socket or a device, or more than bytes_max bytes.
    """
    # A pipe without a writer would otherwise block the opening itself.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ValueError(f"it has more than {bytes_max} bytes")
    return data


def replace_file(path: Path, text: str, *, durable: bool = False) -> None:
    """Write `text` to a new file, readable by its owner alone, and rename it to `path`: who reads
    finds all of the old content or all of the new one. Raises the system's OSError.

    durable: what was written reaches the drive before the rename; the directory is the caller's.
    """
    new = path.with_name(f"{path.name}.new")
    # What lies there was left by a writer that was cut, or put there by somebody: it is not opened.
    with suppress(FileNotFoundError):
        os.unlink(new)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(new, path)
