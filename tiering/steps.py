"""Work that waits for the drive, in steps: one code for callers that block and for an event loop.

Such work is a generator. It yields what it needs, and whoever drives it (`run` here, `stepper.py`
on an event loop) brings that about and goes on with it. Between two steps the store may be
unlocked, and others may change anything that is not leased, referenced or taken; a generator that
is closed early gives back what it has.
"""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

from kvtier.errors import DeviceError, KvtierError
from kvtier.io.buffers import BufferPiece, BufferPool
from kvtier.io.device import Buffers, Device, Int64Array

T = TypeVar("T")

BUFFER_WAIT_S = 30.0
"""How long work waits for a buffer before that is a CapacityError."""
_BUFFER_LOOK_S = 0.001


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Needs buffers[i], pieces of `piece`, filled from offsets[i]. Gets thrown in what
    `Device.read` raises."""

    offsets: Int64Array
    buffers: Buffers
    piece: BufferPiece

    def alone(self, index: int) -> "Read":
        """One of its requests."""
        one = slice(index, index + 1)
        buffers = self.buffers
        return Read(
            self.offsets[one],
            Buffers(buffers.memory, buffers.starts[one], buffers.lengths[one]),
            self.piece,
        )


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


Step: TypeAlias = Read | NeedsBuffer | Pause
Steps: TypeAlias = Generator[Step, None, T]


def _unbounded() -> int:
    return 1 << 62


@dataclass(frozen=True, slots=True)
class Reading:
    """How one kind of caller reads.

    buffers: where its bounce buffers come from. batch_bytes, units_max: bounds of one batch; a
    single larger unit is a batch of its own. shared: others act between the steps.
    spare_bytes: how much of HOT may still be taken for units that are on their way.
    """

    buffers: BufferPool
    batch_bytes: int
    units_max: int = 1 << 62
    shared: bool = False
    spare_bytes: Callable[[], int] = _unbounded

    def piece(self, nbytes: int) -> Steps[BufferPiece]:
        """A bounce buffer, when there is one. Raises CapacityError."""
        while (piece := self.buffers.take(nbytes)) is None:
            yield NeedsBuffer(self.buffers, nbytes)
        return piece


def whole(read: Read) -> Steps[None]:
    """A batch of reads, and one by one what failed in it.

    The kernel may send requests that lie side by side as one, which then fail as one though only
    one block is bad. `Device.read` sees to that itself; a batch on an event loop does not. Raises
    DeviceError for what fails alone.
    """
    try:
        yield read
        return
    except DeviceError as error:
        if len(read.offsets) < 2 or not error.failures:
            raise
        failed = error
    again: list[tuple[int, int]] = []
    for index, _ in failed.failures:
        try:
            yield read.alone(index)
        except DeviceError as error:
            if not error.failures:
                raise
            again.append((index, error.failures[0][1]))
    if again:
        raise DeviceError(str(failed), again[0][1], again)


def at_once(call: Callable[[], T]) -> Steps[T]:
    """A quick call as work of one step."""
    yield Pause.SHORT
    return call()


def run(steps: Steps[T], device: Device) -> T:
    """Drive the work to its end on this thread, waiting for whatever it needs."""
    failure: KvtierError | None = None
    waits_until = 0.0
    with closing(steps):
        while True:
            try:
                step = next(steps) if failure is None else steps.throw(failure)
            except StopIteration as end:
                result: T = end.value
                return result
            failure = None
            if isinstance(step, Read):
                try:
                    device.read(step.offsets, step.buffers)
                except KvtierError as error:
                    failure = error
            elif isinstance(step, NeedsBuffer):
                waits_until = waits_until or time.monotonic() + BUFFER_WAIT_S
                if time.monotonic() > waits_until:
                    failure = step.pool.shortage(step.nbytes, BUFFER_WAIT_S)
                else:
                    time.sleep(_BUFFER_LOOK_S)
                continue
            waits_until = 0.0
