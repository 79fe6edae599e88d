"""Making the existence of a new file durable."""

import os

from kvtier.errors import DeviceError


def sync_directory(path: str) -> None:
    """Return when the names in this directory are durable. "" is the working directory.

    Raises DeviceError.
    """
    try:
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise DeviceError(
            f"cannot make the directory {path or '.'} durable: {error.strerror}", error.errno or 0
        ) from error
