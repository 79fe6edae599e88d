"""Payloads on their way to the drive: writes that were started and whose outcome nobody knows yet.

Invariants:
- An Extent with a write in flight is neither given back nor named by the catalog: the Ledger asks
  here before it does either.
- The bytes of a started write stay in memory, unchanged, until it was looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import KvtierError
from kvtier.io.buffers import BufferPiece
from kvtier.io.device import Buffers, Device, Int64Array, PendingBatch
from kvtier.io.extent import Extent

if TYPE_CHECKING:
    from kvtier.tiering.extent_io import Unit


@dataclass(slots=True, eq=False)
class StartedWrite:
    """One batch: request i writes the payload of units[i] into extents[i] (None: given up)."""

    batch: PendingBatch
    piece: BufferPiece
    offsets: Int64Array
    buffers: Buffers
    units: list[Unit]
    extents: list[Extent | None]


class StartedWrites:
    """Those of one store, the oldest first. Callers hold the store's lock."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._by_offset: dict[int, StartedWrite] = {}
        """By offsets of Extents."""

    def add(self, write: StartedWrite) -> None:
        """A batch was started."""
        for extent in write.extents:
            assert extent is not None
            self._by_offset[extent.offset] = write

    def __bool__(self) -> bool:
        """Whether there is any whose outcome is not known yet."""
        return bool(self._by_offset)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that they keep bound."""
        return sum(each.piece.memory.size for each in {*self._by_offset.values()})

    def covers(self, extent: Extent) -> bool:
        """Whether the outcome of a write into this Extent is not known yet."""
        return extent.offset in self._by_offset

    def oldest(self) -> StartedWrite | None:
        """The one that was started first."""
        return next(iter(self._by_offset.values()), None)

    def into(self, extents: Iterable[Extent]) -> list[StartedWrite]:
        """Writes into these Extents, each once."""
        found = [self._by_offset.get(each.offset) for each in extents]
        return list(dict.fromkeys(each for each in found if each is not None))

    def remove(self, write: StartedWrite) -> None:
        """Its batch is done and its outcome was dealt with."""
        for extent in write.extents:
            if extent is not None:
                del self._by_offset[extent.offset]
        write.piece.give_back()

    def give_up(self, extents: Iterable[Extent]) -> None:
        """Return when nothing is in flight into these Extents; how it ended concerns nobody."""
        for extent in extents:
            write = self._by_offset.get(extent.offset)
            if write is None:
                continue
            self.wait(write)
            del self._by_offset[extent.offset]
            write.extents[write.extents.index(extent)] = None
            if not any(write.extents):
                write.piece.give_back()

    def wait(self, write: StartedWrite) -> KvtierError | OSError | None:
        """Return when a batch is done: with whatever broke it off, if anything did."""
        try:
            self.device.wait(write.batch)
        except (KvtierError, OSError) as error:
            return error
        return None
