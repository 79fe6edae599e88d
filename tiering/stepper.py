"""Drives work in steps (steps.py) on an event loop: many pieces of work, none of them a thread.

Invariants:
- Steps are taken in turns of at most TURN_S and a step, under the store's lock, which the loop
  never waits for: where another thread has it, the turn is tried again a moment later.
- Work is in one place: ready, waiting for a buffer, waiting for its batch, or in the worker's
  hands for a heavy step. Whatever ends it, its generator was run to its end or closed.
- Given up, work gives back what it has in the next turn, without anything else being asked for;
  only the memory of a batch in flight follows when the batch is done.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from kvtier.errors import ClosedError
from kvtier.io.device import Device, PendingBatch
from kvtier.tiering.process_lock import ProcessLock
from kvtier.tiering.steps import (
    BUFFER_WAIT_S,
    NeedsBuffer,
    Pause,
    Start,
    Step,
    Steps,
    Wait,
    at_once,
    start,
)

T = TypeVar("T")

TURN_S = 0.001
"""How long one turn goes on to begin steps before the loop has its own."""
LOOK_S = 0.001
"""How soon a turn is tried again when another thread has the store's lock."""
BUFFER_LOOK_S = 0.01
"""How often waiters for a buffer look whether one came back by another way than a turn."""


class _Work:
    """One generator on its way."""

    def __init__(
        self,
        steps: Steps[Any],
        future: "asyncio.Future[Any]",
        discard: Callable[[Any], None] | None,
    ) -> None:
        self.steps = steps
        self.future = future
        self.discard = discard
        self.failure: BaseException | None = None
        """What its next step gets thrown in."""
        self.batch: PendingBatch | None = None
        """What its next step gets sent."""
        self.need: NeedsBuffer | None = None
        self.deadline = 0.0
        self.in_worker = False
        self.ended = False


class Stepper:
    """For one loop, on which everything but `_step` is called."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        worker: Executor,
        device: Device,
        lock: ProcessLock,
        require_open: Callable[[], None],
    ) -> None:
        """worker: takes heavy steps. require_open: raises ClosedError when no step may be taken."""
        self._loop = loop
        self._worker = worker
        self._device = device
        self._lock = lock
        self._require_open = require_open
        self._ready: deque[_Work] = deque()
        self._starved: deque[_Work] = deque()
        self._waiting: set[_Work] = set()
        """Waits for its batch, or is in the worker's hands."""
        self._batches = 0
        """Batches that were started and have not landed."""
        self._turn_due = False
        self._look: asyncio.TimerHandle | None = None
        self._settled = asyncio.Event()
        self._closing = False
        self._fd = -1

    def open(self) -> None:
        """Begin to listen for completions. Raises DeviceError, ClosedError."""
        # The device's fd may be closed, and its number used anew, while the loop still watches it.
        self._fd = os.dup(self._device.completion_fd)
        self._loop.add_reader(self._fd, self._on_completion)

    async def close(self) -> None:
        """Give up all work that has a `discard`, and return when nothing is left or in flight."""
        self._closing = True
        for work in [*self._ready, *self._starved, *self._waiting]:
            if work.discard is not None:
                work.future.cancel()
        while self._ready or self._starved or self._waiting or self._batches:
            self._settled.clear()
            self._schedule()
            await self._settled.wait()
        if self._look is not None:
            self._look.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def start(
        self, steps: Steps[T], discard: Callable[[T], None] | None = None
    ) -> "asyncio.Future[T]":
        """Drive work; its future gets the result. Cancelling the future gives the work up.

        discard: called, under the store's lock, with a result that nobody will take. Raises
        ClosedError.
        """
        if self._closing:
            steps.close()
            raise ClosedError("this AsyncStore was closed")
        return self._begin(steps, discard)

    async def run(self, steps: Steps[T], discard: Callable[[T], None] | None = None) -> T:
        """Drive work and wait for its result. Cancelled, it gives the work up; see `start`."""
        future = self.start(steps, discard)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                # The result was there, and its waiter was cancelled before it could take it.
                self.discard(discard, future.result())
            raise

    def discard(self, discard: Callable[[T], None] | None, result: T) -> None:
        """Call this under the store's lock, soon, also while the stepper is being closed."""
        if discard is not None:
            self._begin(at_once(partial(discard, result)), None).add_done_callback(_taken)

    def _begin(self, steps: Steps[T], discard: Callable[[T], None] | None) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self._loop.create_future()
        work = _Work(steps, future, discard)
        future.add_done_callback(partial(self._on_done, work))
        self._ready.append(work)
        self._schedule()
        return future

    # ---- turns ------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Take steps for a little while."""
        self._turn_due = False
        if self._look is not None:
            self._look.cancel()
            self._look = None
        try:
            taken = self._lock.take_at_once()
        except ClosedError as error:
            # A forked child, in which none of it goes on.
            for each in [*self._ready, *self._starved, *self._waiting]:
                _set_exception(each.future, error)
            return
        if not taken:
            self._look_again(LOOK_S)
            return
        try:
            until = time.perf_counter() + TURN_S
            while time.perf_counter() < until and (work := self._next()) is not None:
                self._placed(work, self._step(work))
        finally:
            self._lock.give()
        if self._next_is_there():
            self._schedule()
        elif self._starved:
            self._look_again(BUFFER_LOOK_S)
        if not (self._ready or self._starved or self._waiting or self._batches):
            self._settled.set()

    def _look_again(self, seconds: float) -> None:
        if self._look is None:
            self._look = self._loop.call_later(seconds, self._schedule)

    def _next_is_there(self) -> bool:
        return bool(self._ready or (self._starved and self._is_over(self._starved[0])))

    def _is_over(self, work: _Work) -> bool:
        """Whether the wait for a buffer is over, one way or the other."""
        need = work.need
        assert need is not None
        return need.pool.fits(need.nbytes) or time.monotonic() > work.deadline

    def _next(self) -> _Work | None:
        """What takes its step now. Who waited for a buffer comes first, in the order of waiting."""
        if self._starved and self._is_over(self._starved[0]):
            work = self._starved.popleft()
            need = work.need
            assert need is not None
            if not need.pool.fits(need.nbytes):
                work.failure = need.pool.shortage(need.nbytes, BUFFER_WAIT_S)
            return work
        return self._ready.popleft() if self._ready else None

    def _step(self, work: _Work) -> Step | None:
        """Take one step; None when there are no more. Called with the store's lock held."""
        failure, work.failure = work.failure, None
        batch, work.batch = work.batch, None
        try:
            with self._lock:
                if work.future.cancelled():
                    work.steps.close()
                    return None
                try:
                    self._require_open()
                except ClosedError as error:
                    failure = error
                return work.steps.send(batch) if failure is None else work.steps.throw(failure)
        except StopIteration as end:
            self._in_loop(work, partial(self._set_result, work, end.value))
        except BaseException as error:
            self._in_loop(work, partial(_set_exception, work.future, error))
            if not isinstance(error, Exception):
                raise
        return None

    def _in_loop(self, work: _Work, call: Callable[[], None]) -> None:
        """Call now, or on the loop if this is the worker's thread."""
        if work.in_worker:
            self._loop.call_soon_threadsafe(call)
        else:
            call()

    def _placed(self, work: _Work, step: Step | None) -> None:
        """Put work where it waits for what it needs next."""
        if step is None:
            work.ended = True
        elif work.future.cancelled():
            self._ready.appendleft(work)
        elif isinstance(step, Start):
            self._start_batch(work, step)
        elif isinstance(step, Wait):
            self._wait_for(work, step.batch)
        elif isinstance(step, NeedsBuffer):
            if work.need is None:
                work.deadline = time.monotonic() + BUFFER_WAIT_S
            work.need = step
            self._starved.append(work)
        elif step is Pause.HEAVY and not self._closing:
            self._waiting.add(work)
            work.in_worker = True
            running = self._loop.run_in_executor(self._worker, self._heavy_step, work)
            running.add_done_callback(partial(self._on_heavy_done, work))
        else:
            self._ready.append(work)

    # ---- batches ----------------------------------------------------------------------------

    def _start_batch(self, work: _Work, step: Start) -> None:
        work.need = None
        self._ready.append(work)
        try:
            batch = start(step, self._device)
        except BaseException as error:
            # Whatever it is, the work ends by it, and its waiter hears of it.
            work.failure = error
            return
        work.batch = batch
        self._batches += 1
        batch.when_done(partial(self._from_any_thread, self._on_landed))

    def _on_landed(self) -> None:
        self._batches -= 1
        self._schedule()

    def _wait_for(self, work: _Work, batch: PendingBatch) -> None:
        work.need = None
        self._waiting.add(work)

        def done() -> None:
            try:
                batch.result()
            except BaseException as error:
                # The work hears of it; it alone knows what that means.
                work.failure = error
            self._back(work)

        batch.when_done(partial(self._from_any_thread, done))

    def _from_any_thread(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop was closed before its work ended: nobody waits any more.
            return

    def _on_completion(self) -> None:
        try:
            self._device.poll()
        except ClosedError as error:
            # Somebody closed the store under us. The batches are done: the device saw to that.
            self._loop.remove_reader(self._fd)
            self._fail_all(error)

    def _fail_all(self, error: ClosedError) -> None:
        """Let all work hear that there will be no more steps; what is in flight lands first."""
        for work in self._starved:
            work.failure = error
        self._ready.extend(self._starved)
        self._starved.clear()
        self._schedule()

    # ---- heavy steps ------------------------------------------------------------------------

    def _heavy_step(self, work: _Work) -> Step | None:
        """On the worker's thread."""
        with self._lock:
            return self._step(work)

    def _on_heavy_done(self, work: _Work, running: "asyncio.Future[Step | None]") -> None:
        work.in_worker = False
        self._waiting.discard(work)
        if running.cancelled():
            self._ready.append(work)
        elif (error := running.exception()) is not None:
            work.ended = True
            _set_exception(work.future, error)
        else:
            self._placed(work, running.result())
        self._schedule()

    # ---- ends -------------------------------------------------------------------------------

    def _back(self, work: _Work) -> None:
        """Its batch landed; it may have been given up before."""
        if work in self._waiting:
            self._waiting.discard(work)
            self._ready.append(work)
        self._schedule()

    def _on_done(self, work: _Work, future: "asyncio.Future[Any]") -> None:
        """Given up by who waited: its next step, now due, closes it."""
        if not future.cancelled() or work.ended or work.in_worker:
            return
        if work in self._starved:
            self._starved.remove(work)
            self._ready.appendleft(work)
        elif work in self._waiting:
            self._waiting.discard(work)
            self._ready.appendleft(work)
        self._schedule()

    def _set_result(self, work: _Work, result: object) -> None:
        if work.future.done():
            # Given up while the worker took its last step.
            self.discard(work.discard, result)
        else:
            work.future.set_result(result)


def _taken(future: "asyncio.Future[None]") -> None:
    """Takes the error of work that nobody waits for: the store was closed, and with it all is
    given back."""
    if not future.cancelled():
        future.exception()


def _set_exception(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
