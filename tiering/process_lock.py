"""A lock for many threads of one process, which a forked child is refused rather than left to wait.

Invariants:
- Only the process that made the lock can take it. A child may have been forked while some thread
  held it; that thread does not exist there, so waiting would never end.
"""

import os
import threading

from kvtier.errors import ClosedError


class ProcessLock:
    """Re-entrant. Use it as a `with` block."""

    def __init__(self, what: str) -> None:
        """what: the thing it guards, in words, for the message."""
        self._what = what
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process made the lock."""
        return os.getpid() == self._pid

    def __enter__(self) -> None:
        """Raises ClosedError in another process."""
        if not self.is_ours:
            raise ClosedError(
                f"{self._what} was opened by process {self._pid}; open it again in process "
                f"{os.getpid()}"
            )
        self._lock.acquire()

    def __exit__(self, *args: object) -> None:
        self._lock.release()
