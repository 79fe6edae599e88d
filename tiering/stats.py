"""The state of an open store in numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.tiering.store_core import StoreCore


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
    """Bytes of the region that are in use: Extents of Segments, slabs of Blobs, records of names
    and models."""
    hot_bytes: int
    hot_bytes_max: int
    hot_limit_bytes: int
    host_bytes: int
    host_limit_bytes: int
    bytes_read: int
    bytes_written: int
    tokens_looked_up: int
    tokens_matched: int
    tokens_matched_hot: int
    """Of those matched: what HOT had in every layer."""
    tokens_matched_host: int
    """What HOT or HOST had in every layer. The rest was read from the drive."""
    damaged_extents: int
    failed_reads: int
    pages_evicted: int
    """From HOT."""
    segments: int
    segments_evicted: int
    """From the drive."""
    blobs: int
    blobs_unsealed: int
    """Of these, how many a crash would lose."""
    slabs: int
    """Of all models."""
    slabs_evicted: int
    """From the drive."""
    held_bytes: int
    hold_limit_bytes: int


def collect(store: StoreCore) -> StoreStats:
    """The numbers of an open store. Callers hold its lock."""
    device = store._files.region.device
    hot, host = store._residency.hot.tier, store._residency.host.tier
    counters = store._extents.counters
    return StoreStats(
        store_uuid=store._files.region.store_uuid,
        fingerprint=store.fingerprint.hex,
        engine=device.engine,
        direct_io=device.direct_io,
        direct_io_reason=device.direct_io_reason,
        region_path=device.path,
        region_bytes=device.capacity_bytes,
        device_bytes=store._files.allocator.used_bytes,
        hot_bytes=hot.used_bytes,
        hot_bytes_max=hot.used_bytes_max,
        hot_limit_bytes=hot.limit_bytes,
        host_bytes=host.used_bytes,
        host_limit_bytes=host.limit_bytes,
        bytes_read=counters.bytes_read,
        bytes_written=counters.bytes_written,
        tokens_looked_up=store._restorer.tokens_looked_up,
        tokens_matched=store._restorer.tokens_matched,
        tokens_matched_hot=store._restorer.matched_in_hot,
        tokens_matched_host=store._restorer.matched_in_host,
        damaged_extents=counters.damaged_extents,
        failed_reads=counters.failed_reads,
        pages_evicted=store._mover.pages_evicted,
        segments=len(store._registry.committed),
        segments_evicted=store._space.segments_evicted,
        blobs=len(store._blobs),
        blobs_unsealed=store._blobs.unsealed,
        slabs=len(store._files.inventory.slabs),
        slabs_evicted=store._space.slabs_evicted,
        held_bytes=store._files.inventory.held_bytes(time.time()),
        hold_limit_bytes=store._holds.limit_bytes,
    )
