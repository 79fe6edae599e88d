"""What a block device is to kvtier: batches of aligned reads and writes, flush, discard.

Every implementation (`uring.py`, `threads.py`, `simulated.py`) passes `tests/device_contract.py`.

Invariants:
- Offsets are bytes from the start of the Device; offset, length and memory address of every
  request are multiples of `block_bytes` (checked before any request is issued).
- A batch returns when all of its requests are complete. A short transfer is continued until it
  is whole; it is never taken for done.
- A failed request never hides: DeviceError lists every failed request of the batch, and all
  others of that batch were completed.
- `write` does not imply durability; `flush` does.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier.errors import AlignmentError, ConfigError

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Pieces of one memory area, as arrays: what a batch reads into or writes from.

    memory: uint8 [n], C-contiguous. starts, lengths: int64 [requests], bytes within memory.
    """

    memory: ByteArray
    starts: Int64Array
    lengths: Int64Array

    @classmethod
    def whole(cls, memory: ByteArray) -> Self:
        """One request that covers all of `memory`."""
        return cls(memory, np.zeros(1, np.int64), np.array([memory.size], np.int64))

    @property
    def addresses(self) -> Int64Array:
        return self.starts + self.memory.ctypes.data


class Device(ABC):
    """A raw block device, or a preallocated file. Safe to use from many threads."""

    engine: str
    """Name of the implementation: "io_uring", "threads" or "simulated"."""
    path: str
    direct_io: bool
    """True if requests go past the page cache (O_DIRECT)."""
    direct_io_reason: str
    """Why `direct_io` is what it is, in words."""
    capacity_bytes: int
    block_bytes: int
    """Logical block size: every offset, length and address is a multiple of it."""

    @abstractmethod
    def read(self, offsets: Int64Array, buffers: Buffers) -> None:
        """Fill buffers[i] from offsets[i]. Raises what `check` does, DeviceError, ClosedError."""

    @abstractmethod
    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        """Write buffers[i] at offsets[i]. Raises what `check` does, DeviceError, ClosedError."""

    @abstractmethod
    def flush(self) -> None:
        """Return when everything written before is durable. Raises DeviceError, ClosedError."""

    @abstractmethod
    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        """Tell the device that these ranges hold nothing of value.

        Returns False where the device does not support it, which is not an error. Raises
        AlignmentError, ConfigError, DeviceError, ClosedError.
        """

    def register(self, memory: ByteArray) -> bool:
        """Announce an arena that many requests will use, so that it may be pinned once.

        memory: uint8 [n], kept alive by the device until it is closed. Replaces an arena announced
        before. Returns True if requests inside it are cheaper from now on, False where there is
        nothing to gain; requests outside it stay allowed either way.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Wait for requests in flight and release the device. Calling it twice is allowed."""

    def check(self, offsets: Int64Array, buffers: Buffers) -> None:
        """Raise AlignmentError or ConfigError unless every request may be issued."""
        if not len(offsets) == len(buffers.starts) == len(buffers.lengths):
            raise ConfigError(
                f"a batch needs as many offsets as buffers: got {len(offsets)} offsets, "
                f"{len(buffers.starts)} starts, {len(buffers.lengths)} lengths"
            )
        if not len(offsets):
            return
        addresses = buffers.addresses
        unaligned = (offsets | buffers.lengths | addresses) % self.block_bytes != 0
        if unaligned.any():
            i = int(np.flatnonzero(unaligned)[0])
            raise AlignmentError(
                int(offsets[i]), int(buffers.lengths[i]), int(addresses[i]), self.block_bytes
            )
        ends = buffers.starts + buffers.lengths
        if (buffers.starts < 0).any() or (ends > buffers.memory.size).any():
            raise ConfigError(f"a buffer lies outside its memory of {buffers.memory.size} bytes")
        if (offsets < 0).any() or (offsets + buffers.lengths > self.capacity_bytes).any():
            i = int(np.argmax((offsets < 0) | (offsets + buffers.lengths > self.capacity_bytes)))
            raise ConfigError(
                f"request at offset {int(offsets[i])} of {int(buffers.lengths[i])} bytes lies "
                f"outside {self.path} of {self.capacity_bytes} bytes"
            )
