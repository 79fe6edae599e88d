"""Several devices as one: a store that owns regions on several drives reads all of them at once.

An offset is the number of a drive and a byte of it (`extent.py`). A batch is cut by drives; all
parts run at once and are one batch for the caller.

Invariants:
- A batch is done when every part of it is, and its errors are those of its parts, in its own order.
- What one drive does concerns no request on another: those of a drive that is missing fail with
  ENODEV, and all others go on.
- A flush is one of every drive that is there. One that fails is tried on the others all the same.
- The members belong to this device: it alone uses and closes them.
"""

import errno
import os
import select
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvtier.errors import ClosedError, ConfigError, DeviceError
from kvtier.io.completion_event import CompletionEvent
from kvtier.io.device import (
    Buffers,
    ByteArray,
    Device,
    Int64Array,
    PendingBatch,
    Priority,
    check_memory,
    raise_failures,
)
from kvtier.io.extent import DRIVE_BITS, drive_of, drive_start
from kvtier.io.traffic import Traffic

_BYTE_MASK = drive_start(1) - 1


class MissingDrive(Device):
    """Stands for a drive that is not there: every request to it fails with ENODEV."""

    engine = "missing"
    direct_io = True
    direct_io_reason = "the drive is missing"
    block_bytes = 1

    def __init__(self, path: str, capacity_bytes: int, why: str) -> None:
        """path: where it should be. capacity_bytes: of the region when it was made. why: in
        words."""
        self.path = path
        self.why = why
        self.capacity_bytes = capacity_bytes

    def _start(
        self, what: str, offsets: Int64Array, buffers: Buffers, priority: Priority
    ) -> PendingBatch:
        batch = PendingBatch(what, self.path, offsets, buffers)
        batch.errors[:] = errno.ENODEV
        batch.settle()
        return batch

    def read(
        self, offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
    ) -> None:
        self._start("read", offsets, buffers, priority).result()

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        self._start("write", offsets, buffers, Priority.WRITE).result()

    def wait(self, batch: PendingBatch) -> None:
        batch.result()

    @property
    def completion_fd(self) -> int:
        raise DeviceError(f"{self.path} is missing and completes nothing", errno.ENODEV)

    def poll(self) -> None:
        """Its batches are done when they are started."""

    def flush(self) -> None:
        """It holds nothing that was written since it was missed."""

    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The requests of a batch that lie on one drive. indices: int64, places in the whole batch."""

    member: Device
    indices: Int64Array
    batch: PendingBatch


class _Whole(PendingBatch):
    """A batch over several drives. Its parts are added one by one, then it is `begun`."""

    def __init__(self, what: str, path: str, offsets: Int64Array, buffers: Buffers) -> None:
        super().__init__(what, path, offsets, buffers)
        self.parts: list[_Part] = []
        self._left = 1
        self._crashed: BaseException | None = None
        self._counting = threading.Lock()

    def add(self, part: _Part) -> None:
        self.parts.append(part)
        with self._counting:
            self._left += 1
        part.batch.when_done(partial(self._landed, part))

    def begun(self, crash: BaseException | None = None) -> None:
        """No part is added any more. crash: what kept others from being started."""
        self._crashed = self._crashed or crash
        self._one_less()

    def _landed(self, part: _Part) -> None:
        self.errors[part.indices] = part.batch.errors
        self.causes.update((int(part.indices[i]), said) for i, said in part.batch.causes.items())
        self._crashed = self._crashed or part.batch._crash
        self._one_less()

    def _one_less(self) -> None:
        with self._counting:
            self._left -= 1
            last = not self._left
        if last:
            self.settle(self._crashed)

    def result(self) -> None:
        assert self.done, "the batch is still on its way"
        if self._crashed is not None:
            raise self._crashed
        # Who reads of an error wants the drive and its byte, which the offset alone would hide.
        failed = [part for part in self.parts if self.errors[part.indices].any()]
        path = ", ".join(part.member.path for part in failed)
        own = self.offsets & _BYTE_MASK
        raise_failures(self.what, path, own, self.lengths, self.errors, causes=self.causes)


class Drives(Device):
    """Made of opened members, by number. Batches of several threads are in flight together."""

    def __init__(self, members: Sequence[Device]) -> None:
        """Raises ConfigError where none is there, or their blocks do not fit into one grid."""
        present = [each for each in members if not isinstance(each, MissingDrive)]
        if not present:
            raise ConfigError("several drives as one need one that is there")
        self.members = tuple(members)
        self._present = tuple(present)
        engines = " and ".join(sorted({each.engine for each in present}))
        self.engine = f"{engines} x{len(present)}"
        self.path = ", ".join(each.path for each in members)
        indirect = [each for each in present if not each.direct_io]
        self.direct_io = not indirect
        self.direct_io_reason = (indirect or present)[0].direct_io_reason
        self.block_bytes = max(each.block_bytes for each in present)
        self.merge_gap_bytes = min(each.merge_gap_bytes for each in present)
        self.capacity_bytes = drive_start(len(members) - 1) + members[-1].capacity_bytes
        """One past the last offset; between two drives there is nothing."""
        self._capacities = np.array([each.capacity_bytes for each in members], np.int64)
        self._pid = os.getpid()
        self._closed = False
        self._event = CompletionEvent()
        self._listener: select.epoll | None = None
        self._opening = threading.Lock()

    # ---- batches ----------------------------------------------------------------------------

    def check(self, offsets: Int64Array, buffers: Buffers) -> None:
        super().check(offsets, buffers)
        if not len(offsets):
            return
        drives = offsets >> DRIVE_BITS
        ends = (offsets & _BYTE_MASK) + buffers.lengths
        outside = ends > self._capacities[drives]
        if outside.any():
            i = int(np.argmax(outside))
            member = self.members[int(drives[i])]
            raise ConfigError(
                f"request at offset {int(offsets[i]) & _BYTE_MASK} of {int(buffers.lengths[i])} "
                f"bytes lies outside {member.path} of {member.capacity_bytes} bytes"
            )

    def locate(self, offset: int) -> tuple[Device, int]:
        drive = drive_of(offset)
        if not 0 <= drive < len(self.members):
            return self, offset
        return self.members[drive], offset & _BYTE_MASK

    def _by_drive(self, offsets: Int64Array) -> Iterator[tuple[Device, Int64Array, Int64Array]]:
        """Each drive that these offsets lie on, which of them do, and their bytes of it."""
        drives = offsets >> DRIVE_BITS
        for drive in sorted(set(drives.tolist())):
            indices = np.flatnonzero(drives == drive)
            yield self.members[drive], indices, offsets[indices] & _BYTE_MASK

    def _start(
        self, what: str, offsets: Int64Array, buffers: Buffers, priority: Priority
    ) -> _Whole:
        self._require_open()
        self.check(offsets, buffers)
        check_memory(buffers, reading=what == "read")
        whole = _Whole(what, self.path, offsets, buffers)
        crash: BaseException | None = None
        try:
            for member, indices, local in self._by_drive(offsets):
                part = Buffers(buffers.memory, buffers.starts[indices], buffers.lengths[indices])
                start = member.start_write if what == "write" else member.start_read
                whole.add(_Part(member, indices, start(local, part, priority)))
        except BaseException as error:
            crash = error
        whole.begun(crash)
        if crash is not None:
            # What was started before still moves bytes.
            self._wait(whole)
            raise crash
        return whole

    def wait(self, batch: PendingBatch) -> None:
        assert isinstance(batch, _Whole)
        self._wait(batch)
        batch.result()

    def _wait(self, whole: _Whole) -> None:
        """Return when the batch is done, also by an exception such as KeyboardInterrupt."""
        try:
            self._drive(whole)
        except BaseException:
            self._drive(whole)
            raise

    def _drive(self, whole: _Whole) -> None:
        for part in whole.parts:
            try:
                part.member.wait(part.batch)
            except BaseException as error:
                # What became of a part stands in the whole batch, beside the others.
                if not isinstance(error, DeviceError) and error is not part.batch._crash:
                    raise
        # The last part may be done a moment before the whole is.
        whole.join()

    def read(
        self, offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
    ) -> None:
        whole = self._start("read", offsets, buffers, priority)
        self._wait(whole)
        if whole._crashed is None and len(offsets) > 1:
            self._read_again(whole, buffers, priority)
        whole.result()

    def _read_again(self, whole: _Whole, buffers: Buffers, priority: Priority) -> None:
        """Read one by one what failed, as every Device's `read` does; see RawDevice."""
        for part in whole.parts:
            if isinstance(part.member, MissingDrive):
                continue
            for index in part.indices[whole.errors[part.indices] != 0].tolist():
                one = slice(index, index + 1)
                alone = Buffers(buffers.memory, buffers.starts[one], buffers.lengths[one])
                whole.errors[index] = 0
                try:
                    part.member.read(whole.offsets[one] & _BYTE_MASK, alone, priority)
                except DeviceError as error:
                    if not error.failures:
                        raise
                    whole.errors[index] = error.failures[0][1]

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        self.wait(self._start("write", offsets, buffers, Priority.WRITE))

    # ---- an event loop ----------------------------------------------------------------------

    @property
    def completion_fd(self) -> int:
        self._require_open()
        with self._opening:
            self._require_open()
            if self._listener is None:
                listener = select.epoll()
                try:
                    listener.register(self._event.fd, select.EPOLLIN)
                    for each in self._present:
                        listener.register(each.completion_fd, select.EPOLLIN)
                except BaseException:
                    listener.close()
                    raise
                # Whoever holds a duplicate of the listener learns from this event that the device
                # is closed; so the event lives as long as the device does.
                weakref.finalize(self, self._event.close)
                self._listener = listener
            return self._listener.fileno()

    def poll(self) -> None:
        self._require_open()
        for each in self._present:
            each.poll()

    @property
    def traffic(self) -> Traffic:
        return sum((each.traffic for each in self.members), Traffic())

    # ---- all of them ------------------------------------------------------------------------

    def flush(self) -> None:
        self._require_open()
        failed: DeviceError | None = None
        for each in self._present:
            try:
                each.flush()
            except DeviceError as error:
                failed = failed or error
        if failed is not None:
            self.failed_flushes += 1
            raise failed

    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        self._require_open()
        if len(offsets) != len(lengths):
            raise ConfigError(f"discard got {len(offsets)} offsets and {len(lengths)} lengths")
        drives = offsets >> DRIVE_BITS
        if len(offsets) and not 0 <= int(drives.min()) <= int(drives.max()) < len(self.members):
            raise ConfigError(f"discard at an offset on none of {len(self.members)} drives")
        done = [
            member.discard(local, lengths[indices])
            for member, indices, local in self._by_drive(offsets)
        ]
        return all(done)

    def register(self, memory: ByteArray) -> bool:
        self._require_open()
        gains = [each.register(memory) for each in self._present]
        return any(gains)

    def close(self) -> None:
        self._closed = True
        if os.getpid() == self._pid:
            self._event.signal()
        for each in self.members:
            each.close()
        if self._listener is not None:
            self._listener.close()

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self.path} were opened by process {self._pid} and cannot be used in its forked "
                f"child {os.getpid()}: open them anew there"
            )
        if self._closed:
            raise ClosedError(f"{self.path} are closed")
