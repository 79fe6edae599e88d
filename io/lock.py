"""One writer per store: an flock on the store's lock file.

Invariants:
- The lock lives in the open file, so the kernel releases it when the owner ends, by kill -9 too.
- The file is never removed: a removed lock file would let two owners lock two different files.
"""

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Self

from kvtier.errors import DeviceError, LockedError


class StoreLock:
    """The right to write to a store. Use it as a `with` block, or call `close`."""

    def __init__(self, path: str, fd: int, pid: int) -> None:
        self.path = path
        self._fd: int | None = fd
        self._pid = pid

    @classmethod
    def acquire(cls, path: str | Path) -> Self:
        """Lock the file, creating it (mode 0600) if it is missing. Does not wait.

        Raises LockedError that names the owner, DeviceError if the file cannot be opened.
        """
        name = os.fspath(path)
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise DeviceError(
                f"cannot open the lock file {name}: {error.strerror}", error.errno or 0
            ) from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LockedError(
                    f"{name}: the store is open for writing in {_owner(fd)}. "
                    "Close it there; kvtier ls, verify and doctor work beside it.",
                    errno.EWOULDBLOCK,
                ) from error
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            os.close(fd)
            if isinstance(error, DeviceError):
                raise
            raise DeviceError(f"cannot lock {name}: {error.strerror}", error.errno or 0) from error
        return cls(name, fd, os.getpid())

    def close(self) -> None:
        """Release the lock. Calling it twice is allowed."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        # A forked child shares the open file: it gives up its copy and must not unlock the parent.
        if os.getpid() == self._pid:
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def _owner(fd: int) -> str:
    """The owner in words: pid, host, command line where it can be seen."""
    words = os.pread(fd, 4096, 0).decode(errors="replace").split()
    if len(words) != 2 or not words[0].isdigit():
        return "another process (it has not written its name yet)"
    pid, host = words
    if host != socket.gethostname():
        return f"process {pid} on host {host}"
    if int(pid) == os.getpid():
        return f"this process (process {pid} on host {host})"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return (
            f"process {pid} on host {host} (it is gone or in another container; "
            "a process that it forked may hold the lock)"
        )
    line = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return f"process {pid} on host {host} ({line})"
