"""The state of an open store in numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store at one moment. Sizes in bytes, counts since it was opened."""

    store_uuid: str
    fingerprint: str
    engine: str
    direct_io: bool
    direct_io_reason: str
    region_path: str
    region_bytes: int
    device_bytes: int
    """Bytes of the Extents that hold Segments."""
    hot_bytes: int
    hot_bytes_max: int
    hot_limit_bytes: int
    host_bytes: int
    host_limit_bytes: int
    bytes_read: int
    bytes_written: int
    tokens_looked_up: int
    tokens_matched: int
    damaged_extents: int
    failed_reads: int
    pages_evicted: int
    segments: int
