"""What can go wrong with a simulated device, and the chance that decides when.

Chance follows from the seed, the kind of fault and the running number of the request alone. So a
run repeats, requests may be cut into other batches, and one fault more does not move the others.
"""

import errno
import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvtier.errors import ConfigError

DELAY_S_MAX = 1.0


@dataclass(frozen=True, slots=True)
class BadRange:
    """Bytes [offset, offset + length): every read or write that overlaps them fails."""

    offset: int
    length: int
    error: int = errno.EIO
    """EIO, or ENODATA: what Linux makes of an unrecoverable medium error."""
    reads: bool = True
    writes: bool = True

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length <= 0:
            raise ConfigError(
                f"a bad range needs an offset from 0 and a length from 1 byte: got {self.offset} "
                f"and {self.length}"
            )
        if self.error not in (errno.EIO, errno.ENODATA):
            raise ConfigError(
                f"a bad range fails with EIO ({errno.EIO}) or ENODATA ({errno.ENODATA}): got "
                f"{self.error}"
            )


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong; nothing unless named. Rates are chances per request, 0 to 1.

    volatile_cache: writes and discards are lost by a power cut unless a flush came after them.
    shuffled: the requests of a batch complete in any order, and so do batches that were started.
    bad_ranges: requests that overlap one of them fail.
    short_rate: a transfer moves only a part of what is left of its request, and is continued.
    lost_rate: a write is acknowledged and never lands.
    misdirected_rate: a write lands at another aligned offset instead.
    rotted_rate, rotted_bits: a write lands with so many of its bits flipped.
    failing_flushes: which flushes fail, counted from 1 over the life of the device
        (`counts.flushes`). What was unflushed then is never durable, though reads return it.
    delay_s: how long each read and write takes, in seconds; they follow one another.
    """

    volatile_cache: bool = False
    shuffled: bool = False
    bad_ranges: tuple[BadRange, ...] = ()
    short_rate: float = 0.0
    lost_rate: float = 0.0
    misdirected_rate: float = 0.0
    rotted_rate: float = 0.0
    rotted_bits: int = 1
    failing_flushes: tuple[int, ...] = ()
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("short_rate", "lost_rate", "misdirected_rate", "rotted_rate"):
            rate = getattr(self, name)
            if not 0 <= rate <= 1:
                raise ConfigError(f"{name} is a chance from 0 to 1: got {rate}")
        if self.rotted_bits < 1:
            raise ConfigError(f"rotted_bits must be at least 1: got {self.rotted_bits}")
        if any(number < 1 for number in self.failing_flushes):
            raise ConfigError(f"flushes are counted from 1: got {self.failing_flushes}")
        if not (math.isfinite(self.delay_s) and 0 <= self.delay_s <= DELAY_S_MAX):
            raise ConfigError(f"delay_s must be 0 to {DELAY_S_MAX} seconds: got {self.delay_s}")

    def error(self, offset: int, length: int, *, writing: bool) -> int:
        """The errno that a request of these bytes fails with, 0 if it does not."""
        for each in self.bad_ranges:
            overlaps = offset < each.offset + each.length and each.offset < offset + length
            if length and overlaps and (each.writes if writing else each.reads):
                return each.error
        return 0


NO_FAULTS = Faults()


class Chance(IntEnum):
    """What is drawn. The numbers are part of a seed's meaning: never change one."""

    READ_ORDER = 0
    WRITE_ORDER = 1
    SHORT_READ = 2
    SHORT_WRITE = 3
    LOST = 4
    MISDIRECTED = 5
    ROTTED = 6
    ROT = 7
    STARTED = 8


def draw(seed: int, chance: Chance, number: int) -> np.random.Generator:
    """The random numbers that belong to one kind of chance and one request."""
    return np.random.default_rng([seed, int(chance), number])


def strikes(rate: float, random: np.random.Generator) -> bool:
    """Whether a fault of this rate happens. Always draws one number."""
    return bool(random.random() < rate)


def shortened(blocks: int, rate: float, random: np.random.Generator) -> list[int]:
    """Lengths of the transfers that move one request of so many blocks, in blocks."""
    pieces, left = [], blocks
    while left > 1 and strikes(rate, random):
        pieces.append(int(random.integers(1, left)))
        left -= pieces[-1]
    return [*pieces, left]


def rotted(data: bytes, bits: int, random: np.random.Generator) -> bytes:
    """A copy with so many different bits flipped."""
    held = np.frombuffer(data, np.uint8).copy()
    for bit in random.choice(8 * held.size, min(bits, 8 * held.size), replace=False).tolist():
        held[bit // 8] ^= 1 << bit % 8
    return held.tobytes()


def elsewhere(offset: int, last: int, block_bytes: int, random: np.random.Generator) -> int:
    """Another aligned offset up to `last`; the same if there is none. Bytes."""
    places = last // block_bytes
    if not places:
        return offset
    # One place fewer than there are, counted on from the right one, which is never drawn.
    step = int(random.integers(1, places + 1))
    return (offset // block_bytes + step) % (places + 1) * block_bytes
