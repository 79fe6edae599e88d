"""A Device on io_uring: one ring per device, shared by any number of batches.

Invariants:
- The ring is touched under `_lock` alone, which is never held while waiting for the device; only
  `_leader` waits, handing over what it pushed on its way, and while there is a leader nobody else
  takes completions.
- A flight is in `_flights` from its start until none of its requests is in flight or waiting; so
  its memory, and the file, outlive its requests. It is in `_line` if requests of it wait.
- Writes and scrub reads fill at most half of the ring, so that demand finds room at once.
- What breaks off a change of these (KeyboardInterrupt, an error of the ring) is followed by
  `_recover`: nothing in flight, and every request that is not done begins again or has failed.
- A request is done when all of its bytes moved or it has an errno; nothing else ends it.
"""

import errno
import os
import threading
from collections.abc import Callable
from typing import Self

import numpy as np

from kvtier.errors import ConfigError, DeviceError
from kvtier.io import ring as ring_module
from kvtier.io.completion_event import CompletionEvent
from kvtier.io.device import Buffers, ByteArray, Int64Array, PendingBatch, Priority
from kvtier.io.engine_limits import DEPTH_MAX
from kvtier.io.probe import memlock_words
from kvtier.io.raw_device import RawDevice
from kvtier.io.rawfile import DirectMode, RawFile, open_raw
from kvtier.io.ring import Completions, Ring
from kvtier.io.ring_arena import RingArena
from kvtier.io.ring_guard import RingGuard
from kvtier.io.uring_flight import INDEX_BITS, INDEX_MASK, Flight
from kvtier.io.waiting_line import WaitingLine

DEPTH = 32
REFILL = 4
"""While requests wait, the ring is filled up when so many are complete. Of 1 to 24, on a device as
fast as memory, fewer cost processor time, and more leave it idle."""
_NUMBERS = 1 << 30
"""Flights are numbered up to this, and then anew."""
_NO_ARENA = RingArena()


class UringDevice(RawDevice):
    """Open by `UringDevice.open`. Batches of several threads are in flight together."""

    engine = "io_uring"

    def __init__(self, raw: RawFile, ring: Ring) -> None:
        super().__init__(raw)
        self.registered_reason = "no arena was announced"
        """Why requests do or do not use registered buffers, in words."""
        self._ring = ring
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._flights: dict[int, Flight] = {}
        self._line: WaitingLine[Flight] = WaitingLine()
        self._last_number = 0
        self._leader: object | None = None
        self._followers = 0
        self._alone = RingGuard(self._recover, lambda: self._leader is None)
        self._event = CompletionEvent()
        self._event_registered = False
        self._ring_closed = False
        self._arena = _NO_ARENA

    @classmethod
    def open(
        cls,
        path: str,
        *,
        writable: bool = True,
        direct: DirectMode = "preferred",
        depth: int | None = None,
    ) -> Self:
        """Open a block device or file. depth: requests in flight at most; None: DEPTH.

        Raises DeviceError, also if io_uring is refused, ConfigError.
        """
        depth = checked_depth(depth)
        raw = open_raw(path, writable=writable, direct=direct)
        try:
            ring = Ring.open(depth)
        except OSError as error:
            raw.close()
            raise DeviceError(
                f"io_uring was refused by the kernel: {error.strerror}", error.errno or 0
            ) from error
        return cls(raw, ring)

    def register(self, memory: ByteArray) -> bool:
        """Pin an arena for the kernel. False, with `registered_reason`, where it refuses."""
        with self._raw.use(), self._lock:
            with self._alone:
                # What is pushed names the arena that was; handed over, it keeps that.
                self._ring.submit()
            if self._arena is not _NO_ARENA:
                self._ring.unregister_buffers()
                self._arena = _NO_ARENA
            if memory.size:
                self._register(memory)
            else:
                self.registered_reason = "the arena is empty"
            for flight in self._flights.values():
                flight.renew(self._arena)
            return self._arena is not _NO_ARENA

    def _register(self, memory: ByteArray) -> None:
        arena = RingArena.of(memory)
        try:
            self._ring.register_buffers(*arena.pieces())
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            self.registered_reason = (
                f"not registered ({name}): pinning {memory.size} bytes goes past the memlock "
                f"limit of {memlock_words()} (ulimit -l), or the kernel refuses it"
            )
        else:
            self._arena = arena
            self.registered_reason = f"registered: {memory.size} bytes"

    def close(self) -> None:
        if os.getpid() != self._pid:
            # A lock that another thread held at the fork is never released here, so take none.
            self._raw.close()
            if not self._ring_closed:
                self._ring_closed = True
                self._ring.close()
            return
        self._raw.refuse()
        self._drive(lambda: not self._flights)
        self._raw.close()
        with self._lock:
            if not self._ring_closed:
                self._ring_closed = True
                self._ring.close()
                self._event.close()
                self._arena = _NO_ARENA

    # ---- batches ----------------------------------------------------------------------------

    def _begin(
        self, batch: PendingBatch, buffers: Buffers, priority: Priority, *, waits: bool
    ) -> None:
        # Into and from the page cache the kernel would copy at once, on the thread that submits.
        flags = 0 if waits or self.direct_io else ring_module.ASYNC
        flight = self._new_flight(batch, buffers, priority, flags)
        with self._lock:
            # Under the same lock: a close that saw no flight must not be followed by one.
            flight.fd = self._raw.acquire()
            self._last_number = (self._last_number + 1) % _NUMBERS
            flight.number = self._last_number
            self._flights[flight.number] = flight
            with self._alone:
                self._queue(flight)
                self._pump()
                # Who waits at once hands over and waits by one call, if nobody waits already.
                if not waits or self._leader is not None:
                    self._ring.submit()

    def _new_flight(
        self, batch: PendingBatch, buffers: Buffers, priority: Priority, flags: int
    ) -> Flight:
        """What makes the entries and reads the results; `passthrough.py` has another."""
        return Flight(batch, buffers, priority, flags)

    def wait(self, batch: PendingBatch) -> None:
        own: Flight | None = None
        try:
            own = None if batch.done else self._flight_of(batch)
            self._drive(lambda: batch.done, own)
        except BaseException:
            # Ctrl-C: nothing more of it shall begin, but what is in flight still moves bytes.
            if own is not None:
                self._abandon(own)
            self._drive(lambda: batch.done, own)
            raise
        batch.result()

    def _flight_of(self, batch: PendingBatch) -> Flight | None:
        with self._lock:
            return next((each for each in self._flights.values() if each.batch is batch), None)

    @property
    def completion_fd(self) -> int:
        self._raw.ensure_open()
        with self._lock:
            self._raw.ensure_open()
            try:
                fd = self._event.fd
                if not self._event_registered:
                    self._ring.register_event(fd)
                    self._event_registered = True
            except OSError as error:
                raise DeviceError(
                    f"the io_uring of {self.path} cannot signal completions: {error.strerror}",
                    error.errno or 0,
                ) from error
            return fd

    def poll(self) -> None:
        self._raw.ensure_open()
        with self._lock:
            self._raw.ensure_open()
            # First of all: what completes from now on signals anew.
            self._event.clear()
            if self._leader is None:
                # Else the leader takes what is there, and signals for what it settles.
                with self._alone:
                    self._reap()
                    self._pump()
                    self._ring.submit()

    # ---- the ring ---------------------------------------------------------------------------

    def _drive(self, until: Callable[[], bool], own: Flight | None = None) -> None:
        """Wait for completions, or for who waits for them, until `until` (called locked) holds.
        own: the flight that it is about."""
        me = object()
        failure: OSError | None = None
        try:
            while True:
                with self._lock:
                    if self._leader is me:
                        self._take_completions(failure)
                        failure = None
                    if self._leader is not None:
                        self._follow(until)
                    if until():
                        self._changed.notify_all()
                        return
                    with self._alone:
                        self._pump()
                        submit = self._ring.left_to_wait()
                        count = self._worth_waiting_for(own)
                        self._leader = me
                if count:
                    try:
                        self._ring.wait(count, submit)
                    except OSError as error:
                        failure = error
        except BaseException:
            with self._lock:
                if self._leader is me:
                    self._leader = None
                    self._changed.notify_all()
            raise

    def _take_completions(self, failure: OSError | None) -> None:
        """What the leader does after it waited, or after that failed."""
        self._leader = None
        with self._alone:
            if failure is not None:
                raise failure
            self._reap(signalled=False)

    def _follow(self, until: Callable[[], bool]) -> None:
        """Sleep while another one leads."""
        self._followers += 1
        try:
            while self._leader is not None and not until():
                self._changed.wait()
        finally:
            self._followers -= 1

    def _worth_waiting_for(self, own: Flight | None) -> int:
        """For how many completions the leader waits: few where somebody waits beside it, or may
        come with something more urgent."""
        flying = self._ring.in_flight
        alone = len(self._flights) == 1 or not (self._followers or self._event_registered)
        if own is None or not alone or own.priority > Priority.PREFETCH:
            return min(1, flying)
        if self._line:
            return min(REFILL, flying)
        return min(flying, own.left)

    def _recover(self) -> None:
        """Let nothing be in flight, and begin anew what is not done; or let it fail, if the ring
        reported an error. There is no leader, whose completions this would take."""
        error = self._alone.taken()
        message = f"io_uring failed on {self.path}: {error.strerror}" if error else ""
        try:
            self._ring.drain()
        except OSError as broken:
            error = broken
            message = (
                f"the io_uring of {self.path} is broken: {broken.strerror}. Open the device anew."
            )
        self._alone.mended()
        self._line.clear()
        for flight in list(self._flights.values()):
            if error is not None:
                self._settle(flight, DeviceError(message, error.errno or 0))
            else:
                self._queue(flight)
        self._event.signal()
        try:
            self._pump()
            self._ring.submit()
        except OSError as again:
            self._alone.broken_off(again)

    def _queue(self, flight: Flight) -> None:
        """Let all that is left of a flight begin, now that nothing of it is in flight."""
        flight.begin(self._arena)
        if flight.left:
            self._line.add(flight, flight.priority)
        else:
            self._settle(flight)

    def _pump(self) -> None:
        """Push what waits, in its turn, as far as the ring has room for it."""
        while (flight := self._line.first()) is not None:
            room = self._room(flight.priority)
            if room > 0:
                self._ring.push(flight.take(room))
            if flight.waiting:
                # What waits behind it has no more room than it has.
                return
            self._line.take()

    def _room(self, priority: Priority) -> int:
        """How many requests of this priority may be pushed now."""
        room = self._ring.depth - self._ring.in_flight
        if priority < Priority.WRITE:
            return room
        others = self._flights.values()
        background = sum(each.flying for each in others if each.priority >= Priority.WRITE)
        return min(room, max(1, self._ring.depth // 2) - background)

    def _reap(self, *, signalled: bool = True) -> None:
        """Book what is complete. signalled: whoever polls looks at the batches right now."""
        done = self._ring.reap()
        if not len(done):
            return
        # Also among several flights most completions are those of one.
        flight = self._flights[int(done[0, 0]) >> INDEX_BITS]
        indices = done[:, 0] - (flight.number << INDEX_BITS)
        if not int(np.bitwise_or.reduce(indices)) >> INDEX_BITS:
            settled = self._account(flight, indices, done[:, 1])
        else:
            settled = self._account_apart(done)
        if settled and not signalled:
            self._event.signal()

    def _account_apart(self, done: Completions) -> bool:
        """Book completions of several flights; True if one of them is done."""
        settled = False
        numbers = done[:, 0] >> INDEX_BITS
        for number in set(numbers.tolist()):
            own = done[numbers == number]
            settled |= self._account(self._flights[number], own[:, 0] & INDEX_MASK, own[:, 1])
        return settled

    def _account(self, flight: Flight, done: Int64Array, words: Int64Array) -> bool:
        """Book completions of one flight; True if it is done."""
        block_bytes = self.block_bytes if self.direct_io else 1
        if flight.account(done, words, block_bytes, self._arena):
            self._line.add(flight, flight.priority)
        if flight.left:
            return False
        self._settle(flight)
        return True

    def _settle(self, flight: Flight, crash: DeviceError | None = None) -> None:
        del self._flights[flight.number]
        self._raw.release()
        flight.settle(crash)
        self._changed.notify_all()

    def _abandon(self, flight: Flight) -> None:
        """Begin nothing more of a batch; it is done when what is in flight of it is."""
        with self._lock:
            if flight.batch.done:
                return
            with self._alone:
                self._line.remove(lambda each: each is flight)
                flight.abandon()
                if not flight.left:
                    self._settle(flight)
                self._pump()
                self._ring.submit()


def checked_depth(depth: int | None) -> int:
    """The depth of a ring; None: DEPTH. Raises ConfigError where no ring is so deep."""
    depth = DEPTH if depth is None else depth
    if not 1 <= depth <= DEPTH_MAX:
        raise ConfigError(f"a ring has a depth of 1 to {DEPTH_MAX} requests: got {depth}")
    return depth
