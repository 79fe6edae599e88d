"""A Device on io_uring: one ring per device, 32 requests deep, shared by any number of batches.

Invariants:
- The ring is touched under `_changed` alone, which is never held while waiting for the device; only
  `_leader` waits, and while there is a leader nobody else takes completions.
- A flight is in `_flights` from its start until none of its requests is in flight or waiting; so
  its memory, and the file, outlive its requests.
- What breaks off a change of these (KeyboardInterrupt, an error of the ring) is followed by
  `_recover`: nothing in flight, and every request that is not done begins again or has failed.
- A request is done when all of its bytes moved or it has an errno; nothing else ends it.
"""

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np

from kvtier.errors import DeviceError
from kvtier.io import ring as ring_module
from kvtier.io.completion_event import CompletionEvent
from kvtier.io.device import Buffers, ByteArray, Int64Array, PendingBatch, check_memory
from kvtier.io.probe import memlock_words
from kvtier.io.raw_device import RawDevice
from kvtier.io.rawfile import DirectMode, RawFile, open_raw
from kvtier.io.ring import Ring
from kvtier.io.uring_flight import Flight

DEPTH = 32
SUBMIT_MIN = 8
"""Requests are handed over in groups of at least this many while enough of them wait."""
TRANSFER_BYTES_MAX = 1 << 30
"""The kernel moves less than 2 GiB per request; longer ones are continued like short transfers."""
REGISTERED_PIECE_BYTES = 1 << 30
"""The kernel's limit for one registered buffer; an arena is registered in pieces of this size."""
_INDEX_BITS = 32
"""user_data of a request: the flight's number, then in so many bits the index in the batch."""
_NUMBERS = 1 << 30


class UringDevice(RawDevice):
    """Open by `UringDevice.open`. Batches of several threads are in flight together."""

    engine = "io_uring"

    def __init__(self, raw: RawFile, ring: Ring) -> None:
        super().__init__(raw)
        self.registered_reason = "no arena was announced"
        """Why requests do or do not use registered buffers, in words."""
        self._ring = ring
        self._changed = threading.Condition()
        self._flights: dict[int, Flight] = {}
        self._waiting: deque[tuple[Flight, Int64Array]] = deque()
        self._last_number = 0
        self._leader: object | None = None
        self._must_recover = False
        self._ring_error: OSError | None = None
        self._event = CompletionEvent()
        self._event_registered = False
        self._ring_closed = False
        self._arena: ByteArray | None = None
        self._arena_start = 0
        self._arena_end = 0

    @classmethod
    def open(cls, path: str, *, writable: bool = True, direct: DirectMode = "preferred") -> Self:
        """Open a block device or file. Raises DeviceError, also if io_uring is refused."""
        raw = open_raw(path, writable=writable, direct=direct)
        try:
            ring = Ring.open(DEPTH)
        except OSError as error:
            raw.close()
            raise DeviceError(
                f"io_uring was refused by the kernel: {error.strerror}", error.errno or 0
            ) from error
        return cls(raw, ring)

    def register(self, memory: ByteArray) -> bool:
        """Pin an arena for the kernel. False, with `registered_reason`, where it refuses."""
        with self._raw.use(), self._changed:
            if self._arena is not None:
                self._ring.unregister_buffers()
                self._arena, self._arena_start, self._arena_end = None, 0, 0
            start, end = int(memory.ctypes.data), int(memory.ctypes.data) + memory.size
            starts = list(range(start, end, REGISTERED_PIECE_BYTES))
            lengths = [min(REGISTERED_PIECE_BYTES, end - piece) for piece in starts]
            if not starts:
                self.registered_reason = "the arena is empty"
                return False
            try:
                self._ring.register_buffers(starts, lengths)
            except OSError as error:
                name = errno.errorcode.get(error.errno or 0, str(error.errno))
                self.registered_reason = (
                    f"not registered ({name}): pinning {memory.size} bytes goes past the memlock "
                    f"limit of {memlock_words()} (ulimit -l), or the kernel refuses it"
                )
                return False
            self._arena, self._arena_start, self._arena_end = memory, start, end
            self.registered_reason = f"registered: {memory.size} bytes"
            return True

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
        with self._changed:
            if not self._ring_closed:
                self._ring_closed = True
                self._ring.close()
                self._event.close()
                self._arena = None

    # ---- batches ----------------------------------------------------------------------------

    def start_read(self, offsets: Int64Array, buffers: Buffers) -> PendingBatch:
        # From the page cache the kernel would copy at once, on the thread that submits.
        return self._begin("read", offsets, buffers, 0 if self.direct_io else ring_module.ASYNC)

    def _start(self, what: str, offsets: Int64Array, buffers: Buffers) -> PendingBatch:
        return self._begin(what, offsets, buffers, 0)

    def _begin(self, what: str, offsets: Int64Array, buffers: Buffers, flags: int) -> PendingBatch:
        self._raw.ensure_open()
        self.check(offsets, buffers)
        check_memory(buffers, reading=what == "read")
        batch = PendingBatch(what, self.path, offsets, buffers)
        flight = Flight(batch, buffers, flags)
        with self._changed:
            # Under the same lock: a close that saw no flight must not be followed by one.
            flight.fd = self._raw.acquire()
            self._last_number = (self._last_number + 1) % _NUMBERS
            flight.number = self._last_number
            self._flights[flight.number] = flight
            with self._alone():
                self._queue(flight, flight.unfinished())
                self._pump()
        return batch

    def wait(self, batch: PendingBatch) -> None:
        try:
            self._drive(lambda: batch.done)
        except BaseException:
            # Ctrl-C: nothing more of it shall begin, but what is in flight still moves bytes.
            self._abandon(batch)
            self._drive(lambda: batch.done)
            raise
        batch.result()

    @property
    def completion_fd(self) -> int:
        self._raw.ensure_open()
        with self._changed:
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
        with self._changed:
            self._raw.ensure_open()
            # First of all: what completes from now on signals anew.
            self._event.clear()
            if self._leader is None:
                # Else the leader takes what is there, and signals for what it settles.
                with self._alone():
                    self._reap()
                    self._pump()

    # ---- the ring ---------------------------------------------------------------------------

    def _drive(self, until: Callable[[], bool]) -> None:
        """Wait for completions, or for who waits for them, until `until` (called locked) holds."""
        me = object()
        try:
            while True:
                count = 0
                with self._changed:
                    while self._leader is not None and not until():
                        self._changed.wait()
                    if until():
                        return
                    with self._alone():
                        self._pump()
                        count = self._worth_waiting_for()
                        self._leader = me
                if count:
                    self._lead(count)
        except BaseException:
            with self._changed:
                if self._leader is me:
                    self._leader = None
                    self._changed.notify_all()
            raise

    def _lead(self, count: int) -> None:
        """Wait for `count` completions and take what is there then."""
        failure: OSError | None = None
        try:
            self._ring.wait(count)
        except OSError as error:
            failure = error
        with self._changed:
            self._leader = None
            with self._alone():
                if failure is not None:
                    raise failure
                self._reap(signalled=False)
            self._changed.notify_all()

    def _worth_waiting_for(self) -> int:
        """For how many completions the leader waits: few where somebody waits beside it."""
        flying = self._ring.in_flight
        if len(self._flights) > 1:
            return min(1, flying)
        return min(SUBMIT_MIN, flying) if self._waiting else flying

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around every change of ring and flights, locked. An OSError of the ring ends here and
        becomes an error of the batches."""
        if self._must_recover and self._leader is None:
            self._recover()
        try:
            yield
        except OSError as error:
            self._ring_error = error
            self._must_recover = True
        except BaseException:
            self._must_recover = True
            raise
        finally:
            if self._must_recover and self._leader is None:
                self._recover()

    def _recover(self) -> None:
        """Let nothing be in flight, and begin anew what is not done; or let it fail, if the ring
        reported an error. There is no leader, whose completions this would take."""
        error, self._ring_error = self._ring_error, None
        message = f"io_uring failed on {self.path}: {error.strerror}" if error else ""
        try:
            self._ring.drain()
        except OSError as broken:
            error = broken
            message = (
                f"the io_uring of {self.path} is broken: {broken.strerror}. Open the device anew."
            )
        self._must_recover = False
        self._waiting.clear()
        for flight in list(self._flights.values()):
            if error is not None:
                self._settle(flight, DeviceError(message, error.errno or 0))
            else:
                self._queue(flight, flight.unfinished())
        self._event.signal()
        try:
            self._pump()
        except OSError as again:
            self._ring_error = again
            self._must_recover = True

    def _queue(self, flight: Flight, indices: Int64Array) -> None:
        """Let all that is left of a flight begin, now that nothing of it is in flight."""
        flight.left = len(indices)
        if flight.left:
            self._waiting.append((flight, indices))
        else:
            self._settle(flight)

    def _pump(self) -> None:
        """Push what waits, first come first served, as far as the ring has room."""
        while self._waiting and self._ring.in_flight < self._ring.depth:
            flight, indices = self._waiting.popleft()
            room = self._ring.depth - self._ring.in_flight
            if len(indices) > room:
                self._waiting.appendleft((flight, indices[room:]))
            self._push(flight, indices[:room])
        self._ring.submit()

    def _push(self, flight: Flight, now: Int64Array) -> None:
        """Push what is left of the requests `now`."""
        moved = flight.moved[now]
        addresses = flight.addresses[now] + moved
        lengths = np.minimum(flight.lengths[now] - moved, TRANSFER_BYTES_MAX)
        first = (addresses - self._arena_start) // REGISTERED_PIECE_BYTES
        last = (addresses + lengths - 1 - self._arena_start) // REGISTERED_PIECE_BYTES
        inside = (addresses >= self._arena_start) & (addresses + lengths <= self._arena_end)
        fixed = inside & (first == last)
        writing = flight.batch.what == "write"
        plain_code = ring_module.WRITE if writing else ring_module.READ
        fixed_code = ring_module.WRITE_FIXED if writing else ring_module.READ_FIXED
        self._ring.push(
            flight.fd,
            np.where(fixed, fixed_code, plain_code).astype(np.uint8),
            (flight.offsets[now] + moved, addresses, lengths),
            np.where(fixed, first, 0),
            (flight.number << _INDEX_BITS) | now,
            flight.flags,
        )

    def _reap(self, *, signalled: bool = True) -> None:
        """Book what is complete. signalled: whoever polls looks at the batches right now."""
        done, results = self._ring.reap()
        numbers = done >> _INDEX_BITS
        indices = done & ((1 << _INDEX_BITS) - 1)
        settled = False
        for number in set(numbers.tolist()):
            flight, own = self._flights[number], numbers == number
            again = flight.account(
                indices[own], results[own], self.block_bytes if self.direct_io else 1
            )
            if len(again):
                self._waiting.append((flight, again))
            if not flight.left:
                self._settle(flight)
                settled = True
        if settled and not signalled:
            self._event.signal()

    def _settle(self, flight: Flight, crash: DeviceError | None = None) -> None:
        del self._flights[flight.number]
        self._raw.release()
        flight.batch.settle(crash)
        self._changed.notify_all()

    def _abandon(self, batch: PendingBatch) -> None:
        """Begin nothing more of a batch; it is done when what is in flight of it is."""
        with self._changed:
            for flight in [each for each in self._flights.values() if each.batch is batch]:
                with self._alone():
                    flight.abandoned = True
                    for place in [each for each in self._waiting if each[0] is flight]:
                        flight.give_up(place[1])
                    self._waiting = deque(each for each in self._waiting if each[0] is not flight)
                    if not flight.left and not batch.done:
                        self._settle(flight)
                    self._pump()
