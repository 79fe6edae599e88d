"""Work that waits for the drive, in steps: one code for callers that block and for an event loop.

Such work is a generator. It yields what it needs, and whoever drives it (`run` here, `stepper.py`
on an event loop) brings that about and goes on with it. Between two steps the store may be
unlocked, and others may change anything that is not leased, referenced or taken; a generator that
is closed early gives back what it has.
"""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

from kvtier.errors import DeviceError, KvtierError
from kvtier.io.buffers import BufferPiece, BufferPool
from kvtier.io.device import Buffers, Device, Int64Array, PendingBatch, Priority

T = TypeVar("T")

BUFFER_WAIT_S = 30.0
"""How long work waits for a buffer before that is a CapacityError."""
_BUFFER_LOOK_S = 0.001
PLAN_BYTES = 48 << 20
"""Of the first plan of a load: so much is in the air at once, and what is planned beyond that would
only let the device wait."""
PLAN_BYTES_MAX = 128 << 20
"""Of a later one: a pool has room for the headers of so much, and more would hardly be cheaper."""


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """buffers[i], to be filled from offsets[i]. used_by: told of the batch that does it before
    anything else happens, so that the memory is not used for anything else until it is done."""

    offsets: Int64Array
    buffers: Buffers
    used_by: Callable[[PendingBatch], object]

    def alone(self, index: int) -> "Read":
        """One of its requests."""
        one = slice(index, index + 1)
        buffers = self.buffers
        return Read(
            self.offsets[one],
            Buffers(buffers.memory, buffers.starts[one], buffers.lengths[one]),
            self.used_by,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Needs a read to be under way. Gets its batch sent; or thrown in what `Device.start_read`
    raises."""

    read: Read
    priority: Priority = Priority.DEMAND


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Needs a batch to be done. Gets thrown in what its `result` raises."""

    batch: PendingBatch


@dataclass(frozen=True, slots=True, eq=False)
class NeedsBuffer:
    """Needs a piece of this many bytes to be free. Gets CapacityError thrown in after
    BUFFER_WAIT_S."""

    pool: BufferPool
    nbytes: int


class Pause(Enum):
    """Needs nothing: a moment at which others may have their turn."""

    SHORT = "short"
    HEAVY = "heavy"
    """What comes next takes so much processor time that no event loop should be kept from it."""


Step: TypeAlias = Start | Wait | NeedsBuffer | Pause
Steps: TypeAlias = Generator[Step, PendingBatch | None, T]
"""Who drives it sends the batch of a Start, and None after every other step."""


def _unbounded() -> int:
    return 1 << 62


@dataclass(frozen=True, slots=True)
class Reading:
    """How one kind of caller reads.

    buffers: where its bounce buffers come from. batch_bytes: bound of one batch; a single larger
    unit is a batch of its own. plan_bytes, plan_bytes_max: for how many bytes of units room is
    made, and requests are planned, at once: first, and later. units_max: for how many units.
    flights_max: batches under way at once, so that the device is busy while what landed is
    checked. shared: others act between the steps.
    spare_bytes: how much of HOT may still be taken for units that are on their way. priority: of
    its reads.
    """

    buffers: BufferPool
    batch_bytes: int
    plan_bytes: int = PLAN_BYTES
    plan_bytes_max: int = PLAN_BYTES_MAX
    units_max: int = 1 << 62
    flights_max: int = 3
    shared: bool = False
    spare_bytes: Callable[[], int] = _unbounded
    priority: Priority = Priority.DEMAND

    def piece(self, nbytes: int) -> Steps[BufferPiece]:
        """A bounce buffer, when there is one. Raises CapacityError."""
        while (piece := self.buffers.take(nbytes)) is None:
            yield NeedsBuffer(self.buffers, nbytes)
        return piece


def started(read: Read, priority: Priority = Priority.DEMAND) -> Steps[PendingBatch]:
    """A batch of reads, under way."""
    batch = yield Start(read, priority)
    assert batch is not None, "whoever drives a generator sends the batch that it started"
    return batch


def whole(read: Read) -> Steps[None]:
    """A batch of reads from its begin to its end, and one by one what failed in it.

    Raises DeviceError for what fails alone.
    """
    batch = yield from started(read)
    try:
        yield Wait(batch)
        return
    except DeviceError as error:
        if not error.failures:
            raise
        failed = error
    again = yield from apart((index, read.alone(index)) for index, _ in failed.failures)
    if again:
        raise DeviceError(str(failed), again[0][1], again)


def failures_of(batch: PendingBatch) -> Steps[list[tuple[int, int]]]:
    """Wait for a batch; (index of a request, errno) of what failed in it. Raises DeviceError where
    the device as a whole fails."""
    try:
        yield Wait(batch)
    except DeviceError as error:
        if not error.failures:
            raise
        return error.failures
    return []


def apart(reads: Iterable[tuple[int, Read]]) -> Steps[list[tuple[int, int]]]:
    """Read each alone what failed in a batch; (its number, errno) of what fails alone as well.

    The kernel may send requests that lie side by side as one, which then fail as one though only
    one block is bad. Raises DeviceError where the device as a whole fails.
    """
    failures: list[tuple[int, int]] = []
    for number, read in reads:
        batch = yield from started(read)
        alone = yield from failures_of(batch)
        if alone:
            failures.append((number, alone[0][1]))
    return failures


def at_once(call: Callable[[], T]) -> Steps[T]:
    """A quick call as work of one step."""
    yield Pause.SHORT
    return call()


def run(steps: Steps[T], device: Device) -> T:
    """Drive the work to its end on this thread, waiting for whatever it needs."""
    failure: KvtierError | None = None
    batch: PendingBatch | None = None
    waits_until = 0.0
    with closing(steps):
        while True:
            try:
                step = steps.send(batch) if failure is None else steps.throw(failure)
            except StopIteration as end:
                result: T = end.value
                return result
            failure = batch = None
            if isinstance(step, NeedsBuffer):
                waits_until = waits_until or time.monotonic() + BUFFER_WAIT_S
                if time.monotonic() > waits_until:
                    failure = step.pool.shortage(step.nbytes, BUFFER_WAIT_S)
                else:
                    time.sleep(_BUFFER_LOOK_S)
                continue
            waits_until = 0.0
            try:
                if isinstance(step, Start):
                    batch = start(step, device)
                elif isinstance(step, Wait):
                    device.wait(step.batch)
            except KvtierError as error:
                failure = error


def start(step: Start, device: Device) -> PendingBatch:
    """Bring about what a Start needs. Raises what `Device.start_read` raises."""
    read = step.read
    batch = device.start_read(read.offsets, read.buffers, step.priority)
    read.used_by(batch)
    return batch
