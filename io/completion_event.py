"""The eventfd by which an event loop hears that started batches are done.

Invariants:
- The fd is made at its first use, so that a device which nobody polls has none.
- After `close` nobody writes to the fd, whose number may belong to another file then.
"""

import os
import threading


class CompletionEvent:
    """Safe to use from many threads."""

    def __init__(self) -> None:
        self._fd = -1
        self._closed = False
        self._lock = threading.Lock()

    @property
    def fd(self) -> int:
        """The eventfd, made now if there is none. Raises the kernel's OSError."""
        with self._lock:
            assert not self._closed
            if self._fd < 0:
                self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return self._fd

    def signal(self) -> None:
        """Make the fd readable, if there is one."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the fd unreadable until the next signal."""
        with self._lock:
            if self._fd >= 0:
                try:
                    os.eventfd_read(self._fd)
                except BlockingIOError:
                    # It was not readable.
                    return

    def close(self) -> None:
        """Wake who waits for the fd, and close it. Calling it twice is allowed."""
        with self._lock:
            self._closed = True
            if self._fd >= 0:
                # Whoever holds a duplicate of the fd shall find out that the device is closed.
                os.eventfd_write(self._fd, 1)
                os.close(self._fd)
                self._fd = -1
