"""What stands around every change of a ring and its flights: nothing is left half done by an error.

Invariants:
- What breaks off a change is followed by `recover`: at once, or before the next change where it is
  not yet possible.
- An OSError of the ring ends here and becomes an error of the batches; everything else goes on.
"""

from collections.abc import Callable
from types import TracebackType


class RingGuard:
    """A context, used under its owner's lock; its `recover` calls `taken`, then `mended`."""

    def __init__(self, recover: Callable[[], None], possible: Callable[[], bool]) -> None:
        """possible: whether `recover` may be called now."""
        self._recover = recover
        self._possible = possible
        self._broken = False
        self._error: OSError | None = None

    def __enter__(self) -> None:
        if self._broken and self._possible():
            self._recover()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None:
            self.broken_off(error)
        if self._broken and self._possible():
            self._recover()
        return isinstance(error, OSError)

    def broken_off(self, error: BaseException) -> None:
        """A change was left half done, or `recover` was."""
        if isinstance(error, OSError):
            self._error = error
        self._broken = True

    def taken(self) -> OSError | None:
        """The ring's error, if it reported one."""
        error, self._error = self._error, None
        return error

    def mended(self) -> None:
        """Nothing is in flight, and nothing half done."""
        self._broken = False
