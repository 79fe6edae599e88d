"""Batches that were started on a simulated device: carried out one by one on a thread of their own.

Invariants:
- The next batch is one of the most urgent that wait, by Priority.
- A batch that was added is carried out and settled once, whatever happens, or `add` raises.
- There is a thread from the first batch on, and none after `close`.
"""

import threading
from collections.abc import Callable

from kvtier.errors import ClosedError
from kvtier.io.completion_event import CompletionEvent
from kvtier.io.device import PendingBatch, Priority

Work = tuple[PendingBatch, Callable[[], None]]


class StartedBatches:
    """Safe to use from many threads."""

    def __init__(self, choose: Callable[[int, int], int]) -> None:
        """choose(turn, waiting): which of so many equally urgent batches comes next; turns count
        up."""
        self.event = CompletionEvent()
        self._choose = choose
        self._waiting: dict[Priority, list[Work]] = {priority: [] for priority in Priority}
        self._turn = 0
        self._closed_because = ""
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition(threading.Lock())

    def add(self, batch: PendingBatch, carry_out: Callable[[], None], priority: Priority) -> None:
        """Have a batch carried out: carry_out moves its bytes. Raises ClosedError."""
        with self._changed:
            if self._closed_because:
                raise ClosedError(self._closed_because)
            self._waiting[priority].append((batch, carry_out))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvtier-simulated", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def close(self, because: str) -> None:
        """Carry out what was added, and end the thread. because: what `add` says from now on."""
        with self._changed:
            self._closed_because = because
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self.event.close()

    def _run(self) -> None:
        while (work := self._take()) is not None:
            batch, carry_out = work
            crash: BaseException | None = None
            try:
                carry_out()
            except BaseException as error:
                # It belongs to whoever takes the result of the batch.
                crash = error
            batch.settle(crash)
            self.event.signal()
            # Without this an idle thread would keep the last batch's memory alive.
            del work, batch, carry_out

    def _take(self) -> Work | None:
        """The next batch; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._waiting.values()) or self._closed_because)
            most_urgent = next((each for each in self._waiting.values() if each), None)
            if most_urgent is None:
                return None
            self._turn += 1
            return most_urgent.pop(self._choose(self._turn, len(most_urgent)))
