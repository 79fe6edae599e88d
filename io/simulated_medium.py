"""The bytes of a simulated device: what a read returns, and what a power cut would leave.

Invariants:
- Whoever sees `live` sees every landed write; whoever sees `durable` sees those that a flush, or
  the lack of a cache, made durable. The rest is in `unflushed`, in the order in which it landed.
- durable, with all of `unflushed` laid over it in this order, is `live`, until a flush fails:
  what it drops stays in `live` and reaches `durable` never.
- Every method is one step to other threads, so an image may be taken in the middle of a batch.
"""

import threading
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from kvtier.errors import ConfigError
from kvtier.io.device import ByteArray, Int64Array

Kept = Literal["none", "some", "all"]
"""Which of the unflushed writes a power cut leaves."""

ENTRY_BYTES = 64
"""What a kept operation counts beside its data, so that those without data are bounded too."""


@dataclass(frozen=True, slots=True)
class Unflushed:
    """A write in the volatile cache, or a discard (data None: zeros). Bytes."""

    offset: int
    length: int
    data: bytes | None


class Medium:
    """Made by `Medium.blank` or `Medium.holding`. Callers check offsets and sizes."""

    def __init__(self, live: ByteArray, durable: ByteArray) -> None:
        """live, durable: uint8 [capacity], owned by the medium from now on."""
        self._live = live
        self._durable = durable
        self._unflushed: list[Unflushed] = []
        self._unflushed_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def blank(cls, nbytes: int) -> Self:
        """`nbytes` of durable zeros."""
        return cls(np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8))

    @classmethod
    def holding(cls, image: bytes) -> Self:
        """A copy of these bytes, all durable."""
        held = np.frombuffer(image, np.uint8)
        return cls(held.copy(), held.copy())

    @property
    def unflushed(self) -> tuple[Unflushed, ...]:
        """What the cache holds, in the order in which it landed."""
        with self._lock:
            return tuple(self._unflushed)

    @property
    def unflushed_bytes(self) -> int:
        """What the cache holds: data, and ENTRY_BYTES for each write or discard."""
        return self._unflushed_bytes

    def read(self, offset: int, target: ByteArray) -> None:
        """Copy live bytes into `target`, uint8 [n]."""
        with self._lock:
            target[:] = self._live[offset : offset + target.size]

    def land(self, written: Unflushed, pieces: list[int], *, volatile: bool) -> None:
        """Take a write or a discard into the cache, or make it durable at once.

        pieces: lengths of the transfers that bring it, in this order. Bytes; their sum is the
        length of the write.
        """
        with self._lock:
            at = written.offset
            for piece in pieces:
                _lay(self._live, written, at, at + piece)
                at += piece
            if volatile:
                self._unflushed.append(written)
                self._unflushed_bytes += ENTRY_BYTES + len(written.data or b"")
            else:
                _lay(self._durable, written, written.offset, at)

    def flush(self) -> None:
        """Make everything durable that landed before."""
        with self._lock:
            for each in self._unflushed:
                _lay(self._durable, each, each.offset, each.offset + each.length)
            self._clear()

    def drop(self) -> None:
        """Forget the unflushed writes, as a kernel does with dirty pages after a failed flush.

        Reads go on to return them, and no later flush makes them durable.
        """
        with self._lock:
            self._clear()

    def flip(self, bits: Int64Array) -> None:
        """Flip these bits wherever they stand: int64 [n], distinct, counted from the start."""
        with self._lock:
            for byte, mask in zip((bits // 8).tolist(), (1 << bits % 8).tolist(), strict=True):
                self._live[byte] ^= mask
                self._durable[byte] ^= mask
                for i, each in enumerate(self._unflushed):
                    if each.offset <= byte < each.offset + each.length:
                        data = bytearray(each.length if each.data is None else each.data)
                        data[byte - each.offset] ^= mask
                        self._unflushed_bytes += each.length - len(each.data or b"")
                        self._unflushed[i] = replace(each, data=bytes(data))

    def live(self) -> bytes:
        """A copy of what reads return."""
        with self._lock:
            return self._live.tobytes()

    def image(self, kept: Kept, random: np.random.Generator, torn_bytes: int | None) -> bytes:
        """A copy of what a power cut now could leave. See `SimulatedDevice.image`."""
        with self._lock:
            image = self._durable.copy()
            unflushed = [] if kept == "none" else list(self._unflushed)
        # Outside the lock, on copies: a large image shall not hold up the writers.
        for each in unflushed:
            end = each.offset + each.length
            # Both are drawn for every write, so that one write's fate does not shift the next's.
            is_kept, is_torn = random.integers(0, 2, 2)
            if kept == "all" or (is_kept and not (is_torn and torn_bytes)):
                _lay(image, each, each.offset, end)
            elif is_kept and torn_bytes:
                grid = range(each.offset - each.offset % torn_bytes, end, torn_bytes)
                for sector in np.array(grid)[random.integers(0, 2, len(grid)) == 1].tolist():
                    _lay(image, each, max(sector, each.offset), min(sector + torn_bytes, end))
        return image.tobytes()

    def _clear(self) -> None:
        self._unflushed.clear()
        self._unflushed_bytes = 0


def _lay(target: ByteArray, written: Unflushed, start: int, end: int) -> None:
    """Lay bytes start to end of the device, which `written` covers, over `target`."""
    if written.data is None:
        target[start:end] = 0
    else:
        first = start - written.offset
        target[start:end] = np.frombuffer(written.data, np.uint8)[first : first + end - start]


def check_sizes(capacity_bytes: int, block_bytes: int, seed: int) -> None:
    """Raise ConfigError unless such a simulated device can be."""
    if block_bytes not in (512, 4096):
        raise ConfigError(f"a simulated device has blocks of 512 or 4096 bytes: got {block_bytes}")
    if capacity_bytes <= 0 or capacity_bytes % block_bytes:
        raise ConfigError(
            f"a simulated device needs a multiple of its {block_bytes} block bytes: got "
            f"{capacity_bytes} bytes"
        )
    check_seed(seed)


def check_cut(kept: str, torn_bytes: int | None, seed: int) -> None:
    """Raise ConfigError unless a power cut can be drawn so."""
    if kept not in ("none", "some", "all"):
        raise ConfigError(f"a power cut keeps 'none', 'some' or 'all': got {kept!r}")
    if torn_bytes not in (None, 512, 4096):
        raise ConfigError(f"writes are torn at 512 or 4096 bytes: got {torn_bytes}")
    check_seed(seed)


def check_seed(seed: int) -> None:
    """Raise ConfigError for what is no seed."""
    if seed < 0:
        raise ConfigError(f"a seed is a number from 0: got {seed}")
