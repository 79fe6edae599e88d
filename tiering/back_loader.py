"""Loads stored Segments into HOT on a thread of its own, while a model computes others.

Who computes from the front lets the back be loaded meanwhile, until they meet. The Segments are
viewed by a Sequence that only the loader knows, so they stay on the drive until they are attached
to the one that needs them (`Store.extend`), which finds them in HOT.

Invariants:
- The store's lock is held for single steps, never while the drive works.
- A Segment is in one state: WAITING, then LOADED, FAILED (it is lost now) or LEFT (it was not
  brought into HOT; attaching it reads it). It does not leave the last three.
- Whichever comes last, the end of the thread or `close`, lets the Segments go. Nobody but the
  store's own `close` waits for the thread, which a slow drive may keep for long.
"""

import logging
import threading
import time
from collections.abc import Sequence as Listing
from enum import Enum
from typing import TypeVar

from kvtier.errors import ClosedError, DeviceError, FormatError, KvtierError
from kvtier.io.buffers import BufferPool
from kvtier.io.device import PendingBatch, Priority
from kvtier.tiering.extent_io import bounce_bytes
from kvtier.tiering.planner import LoadCost
from kvtier.tiering.segment import SegmentView
from kvtier.tiering.steps import BUFFER_WAIT_S, NeedsBuffer, Reading, Start, Steps, Wait, start
from kvtier.tiering.store import Store

_log = logging.getLogger("kvtier")

T = TypeVar("T")

BATCH_BYTES = 1 << 20
"""Bytes of one batch: a slow drive cannot be stopped within one."""
UNITS_MAX = 32
"""Units that are planned at once: what is done for them with the lock held keeps the model
waiting."""
LOOK_S = 0.001


class State(Enum):
    """Of one Segment."""

    WAITING = "waiting"
    LOADED = "loaded"
    FAILED = "failed"
    LEFT = "left"


class BackLoader:
    """Made by `BackLoader.start`. All methods are for the thread that computes."""

    def __init__(self, store: Store, views: Listing[SegmentView], end: int) -> None:
        self._store = store
        self._views = list(views)
        self._end = end
        self._states = {view.segment.start: State.WAITING for view in views}
        self._sequence = store.sequence()
        self._changed = threading.Condition()
        self._stopping = False
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None
        self._begun_at = time.monotonic()
        """When the Segment that is being loaded was begun."""
        self._thread = threading.Thread(target=self._run, name="kvtier-back", daemon=True)
        self._reading = Reading(
            BufferPool(bounce_bytes(store.geometry)),
            BATCH_BYTES,
            units_max=UNITS_MAX,
            shared=True,
            spare_bytes=store._writer.spare_bytes,
            priority=Priority.PREFETCH,
        )

    @classmethod
    def start(cls, store: Store, views: Listing[SegmentView], end: int) -> "BackLoader":
        """Begin to load these, in this order. end: tokens of the context they are for."""
        with store._lock:
            store._require_open()
            loader = cls(store, views, end)
            for view in views:
                store._registry.acquire(view.segment)
            loader._sequence.views = tuple(views)
            store.before_close.add(loader.stop_and_wait)
        loader._thread.start()
        return loader

    def stop_and_wait(self) -> None:
        """For the store's `close`."""
        self.stop()
        self._thread.join()

    # ---- for who computes -------------------------------------------------------------------

    def knows(self, position: int) -> bool:
        """Whether one of its Segments begins there."""
        return position in self._states

    def state(self, position: int) -> State:
        """Of the Segment that begins there."""
        with self._changed:
            return self._states[position]

    def seconds_until(self, position: int, cost: LoadCost) -> float:
        """How long it takes, at this cost, until this Segment is there."""
        with self._changed:
            total = 0.0
            for view in self._views:
                if self._states[view.segment.start] is State.WAITING:
                    total += cost.seconds(view.segment.nbytes)
                if view.segment.start == position:
                    break
            # Of the one that is being loaded, a part is there.
            return max(0.0, total - (time.monotonic() - self._begun_at))

    def wait(self, position: int, until: float | None) -> State:
        """Wait for a Segment to leave WAITING, at most until this time of time.monotonic()."""
        with self._changed:
            while self._states[position] is State.WAITING:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    break
                # Longer than that the system cannot wait at once.
                self._changed.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
            return self._states[position]

    def skip(self, position: int) -> None:
        """This Segment need not be loaded any more; if it is being loaded just now, it is."""
        self._set(position, State.LEFT)

    def stop(self) -> None:
        """Begin nothing more; what waits is LEFT."""
        with self._changed:
            self._stopping = True
            self._leave_the_rest()

    def keep_warm(self) -> None:
        """What was loaded is used soon: a pass of the model must not make it look idle."""
        with self._store._lock:
            self._touch()

    def close(self) -> None:
        """Stop and let the Segments go, when the drive lets the thread end. Raises what went wrong
        in it so far that nothing of the drive explains."""
        self.stop()
        with self._changed:
            self._closed = True
            self._let_go()
            error = self._error
        if error is not None:
            raise error

    # ---- on the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for view in self._views:
                with self._changed:
                    if self._stopping:
                        break
                    if self._states[view.segment.start] is not State.WAITING:
                        continue
                    self._begun_at = time.monotonic()
                self._set(view.segment.start, self._load(view))
        except ClosedError:
            # The store was closed meanwhile: nobody waits for it.
            pass
        except BaseException as error:
            _log.exception("loading beside computing ended")
            self._error = error
        finally:
            with self._changed:
                self._stopping = self._ended = True
                self._leave_the_rest()
                self._let_go()
            self._store.before_close.discard(self.stop_and_wait)

    def _load(self, view: SegmentView) -> State:
        """Bring one Segment into HOT."""
        store = self._store
        began = time.perf_counter()
        with store._lock:
            self._touch()
            units = store._restorer.seen([view], self._end)
            read = store._restorer.bytes_to_read(units)
        try:
            loaded = self._drive(store._mover.loading(units, self._reading, idle_only=True))
        except (FormatError, DeviceError):
            with store._lock:
                blamed = store._restorer.quarantine(self._sequence)
            if not blamed:
                # The device as a whole fails: nothing more can be had of it.
                self.stop()
            return State.FAILED
        except KvtierError:
            # No buffer for a long time: others need them more.
            self.stop()
            return State.LEFT
        if loaded is None or loaded < len(units):
            # HOT has no room for it; what is attached without being there is read when needed.
            self.stop()
            return State.LEFT
        store.costs.note_load(read, time.perf_counter() - began)
        return State.LOADED

    def _drive(self, steps: Steps[T]) -> T | None:
        """Take steps with the lock, and wait without it. None: stopped."""
        device = self._store._extents.device
        failure: KvtierError | None = None
        batch: PendingBatch | None = None
        starved_since: float | None = None
        began: dict[PendingBatch, float] = {}
        landed_at = 0.0
        while True:
            with self._store._lock:
                if self._store._closed:
                    steps.close()
                    raise ClosedError("this store was closed")
                if self._stopping:
                    steps.close()
                    return None
                try:
                    step = steps.send(batch) if failure is None else steps.throw(failure)
                except StopIteration as end:
                    result: T = end.value
                    return result
                failure = batch = None
                try:
                    if isinstance(step, Start):
                        batch = start(step, device)
                        began[batch] = time.monotonic()
                except KvtierError as error:
                    failure = error
            if isinstance(step, NeedsBuffer):
                starved_since = starved_since or time.monotonic()
                if time.monotonic() - starved_since > BUFFER_WAIT_S:
                    failure = step.pool.shortage(step.nbytes, BUFFER_WAIT_S)
                else:
                    time.sleep(LOOK_S)
                continue
            starved_since = None
            if isinstance(step, Wait):
                try:
                    device.wait(step.batch)
                except KvtierError as error:
                    failure = error
                now = time.monotonic()
                if self._is_stopped() and failure is None:
                    # Nobody takes it any more, but it tells how slow the drive is.
                    nbytes = int(step.batch.lengths.sum())
                    seconds = now - max(began.get(step.batch, now), landed_at)
                    self._store.costs.note_load(nbytes, seconds)
                landed_at = now

    # ---- under a lock -----------------------------------------------------------------------

    def _touch(self) -> None:
        states = self._states
        loaded = [view for view in self._views if states[view.segment.start] is State.LOADED]
        if loaded:
            self._store._mover.touch(self._store._restorer.seen(loaded, self._end))

    def _is_stopped(self) -> bool:
        """Now; it may have been otherwise a moment ago."""
        return self._stopping

    def _set(self, position: int, state: State) -> None:
        with self._changed:
            if self._states[position] is State.WAITING:
                self._states[position] = state
                self._changed.notify_all()

    def _leave_the_rest(self) -> None:
        for position, state in self._states.items():
            if state is State.WAITING:
                self._states[position] = State.LEFT
        self._changed.notify_all()

    def _let_go(self) -> None:
        if self._ended and self._closed:
            # At the next call of the store, whoever has its lock now.
            self._store.release_later([self._sequence])
