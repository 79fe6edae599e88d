"""A lock for many threads of one process, which a forked child is refused rather than left to wait.

Invariants:
- Only the process that made the lock can take it. A child may have been forked while some thread
  held it; that thread does not exist there, so waiting would never end.
- Once a block was broken off by something that is no Exception (KeyboardInterrupt, SystemExit),
  what it guards may be half changed, and nobody takes the lock again but to close.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.errors import ClosedError


class ProcessLock:
    """Re-entrant. Use it as a `with` block."""

    def __init__(self, what: str) -> None:
        """what: the thing it guards, in words, for the message."""
        self._what = what
        self._lock = threading.RLock()
        self._broken_by: str | None = None
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process made the lock."""
        return os.getpid() == self._pid

    @property
    def is_broken(self) -> bool:
        """Whether a block was broken off by something that is no Exception."""
        return self._broken_by is not None

    def __enter__(self) -> None:
        """Raises ClosedError in another process, and after an interrupt."""
        # Every call of a store comes here: no call more than it takes.
        if os.getpid() != self._pid:
            self._require_ours()
        self._lock.acquire()
        if self._broken_by is not None:
            self._lock.release()
            raise ClosedError(
                f"a call was broken off by {self._broken_by}: close {self._what} and open it "
                "again. What was saved is there"
            )

    def take_at_once(self) -> bool:
        """Take it, for a `with` block inside and `give` at the end, unless another thread has it.

        For who must not wait, such as an event loop. Raises ClosedError in another process.
        """
        self._require_ours()
        return self._lock.acquire(blocking=False)

    def give(self) -> None:
        """Undo `take_at_once`."""
        self._lock.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._broken_by = kind.__name__
        self._lock.release()

    @contextmanager
    def to_close(self) -> Iterator[None]:
        """The lock, also after an interrupt. Raises ClosedError in another process."""
        self._take()
        try:
            yield
        finally:
            self._lock.release()

    def _take(self) -> None:
        self._require_ours()
        self._lock.acquire()

    def _require_ours(self) -> None:
        if not self.is_ours:
            raise ClosedError(
                f"{self._what} was opened by process {self._pid}; open it again in process "
                f"{os.getpid()}"
            )
