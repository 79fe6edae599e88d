"""What a simulated device notes: the operations that a crash checker replays, and counts."""

from dataclasses import dataclass
from typing import Literal

from kvtier.io.device import Int64Array
from kvtier.io.simulated_medium import ENTRY_BYTES
from kvtier.io.traffic import Traffic


@dataclass(frozen=True, slots=True)
class SimulatedOperation:
    """One entry of the log, as it was asked for. offset, length: bytes, of writes and discards.

    A failed flush is listed because a replay must then drop what the volatile cache held.
    """

    kind: Literal["write", "discard", "flush", "failed flush", "mark"]
    offset: int = 0
    length: int = 0
    data: bytes = b""
    text: str = ""

    @property
    def log_bytes(self) -> int:
        """What it counts towards `log_bytes_max`."""
        return ENTRY_BYTES + len(self.data) + len(self.text.encode())


@dataclass(slots=True)
class SimulatedCounts:
    """What happened since the device was opened: requests, flushes, and faults that struck."""

    reads: int = 0
    writes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    flushes: int = 0
    failed_requests: int = 0
    short_transfers: int = 0
    lost_writes: int = 0
    misdirected_writes: int = 0
    rotted_writes: int = 0

    def begin(self, what: str, lengths: Int64Array) -> int:
        """Count a batch; returns the number of its first request, among reads or writes."""
        if what == "write":
            first = self.writes
            self.writes += len(lengths)
            self.bytes_written += int(lengths.sum())
        else:
            first = self.reads
            self.reads += len(lengths)
            self.bytes_read += int(lengths.sum())
        return first

    @property
    def traffic(self) -> Traffic:
        """What the device was asked to move."""
        return Traffic(self.reads, self.bytes_read, self.writes, self.bytes_written)
