"""What a Device was asked to move since it was opened: counted where no request can pass by."""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.io.device import Int64Array


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests, and their bytes; also those that failed, and each time that they were tried."""

    reads: int = 0
    bytes_read: int = 0
    writes: int = 0
    bytes_written: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.reads + other.reads,
            self.bytes_read + other.bytes_read,
            self.writes + other.writes,
            self.bytes_written + other.bytes_written,
        )


class TrafficMeter:
    """Counts. Safe to use from many threads."""

    def __init__(self) -> None:
        self._reads = self._bytes_read = self._writes = self._bytes_written = 0
        self._lock = threading.Lock()

    def count(self, what: str, lengths: "Int64Array") -> None:
        """A batch begins. what: "read" or "write". lengths: int64 [requests], bytes."""
        requests, nbytes = len(lengths), int(lengths.sum())
        with self._lock:
            if what == "write":
                self._writes += requests
                self._bytes_written += nbytes
            else:
                self._reads += requests
                self._bytes_read += nbytes

    @property
    def traffic(self) -> Traffic:
        """Everything so far."""
        with self._lock:
            return Traffic(self._reads, self._bytes_read, self._writes, self._bytes_written)
