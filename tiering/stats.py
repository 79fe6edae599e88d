"""The state of an open store in numbers."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    missing_regions: tuple[str, ...]
    """Of several drives those that are not there: what lies on them is a miss until they are."""
    device_bytes: int
    """Bytes of the region that are in use: Extents of Segments, slabs of Blobs, records of names
    and models."""
    hot_bytes: int
    hot_bytes_max: int
    hot_limit_bytes: int
    host_bytes: int
    host_limit_bytes: int
    bytes_read: int
    """By Segments and Blobs that were asked for."""
    bytes_written: int
    """All that the device was asked to write: payloads, headers, records, what is erased."""
    bytes_on_their_way: int
    """Of payloads whose write was started and whose outcome nobody has looked at."""
    catalog_bytes: int
    catalog_growth_bytes: int
    """Of the catalog's files. Negative where they shrank."""
    kv_bytes_stored: int
    """Of Segments that were committed and Blobs that were sealed: each byte of KV once."""
    write_amplification: float | None
    """Bytes written, and by which the catalog grew, over kv_bytes_stored. None: nothing stored."""
    tokens_looked_up: int
    tokens_matched: int
    tokens_matched_hot: int
    """Of those matched: what HOT had in every layer."""
    tokens_matched_host: int
    """What HOT or HOST had in every layer. The rest was read from the drive."""
    damaged_extents: int
    failed_reads: int
    failed_writes: int
    """Layers of Segments that the device did not take."""
    pages_ahead: int
    """Pages that were read ahead of attention."""
    pages_ahead_in_vain: int
    """Of these, given up before they were used, or not as they should be."""
    pages_evicted: int
    """From HOT."""
    pages_to_choose: int
    """Pages that queries with a budget could choose from, those of every kv head and layer."""
    pages_chosen: int
    """Of these, read by them."""
    pages_recalled: int
    """Of those chosen, what was not in HOT, one by one or ahead of its use."""
    bytes_recalled: int
    """What reading these took, with holes and rounding."""
    bytes_recall_wanted: int
    """What they are."""
    digest_bytes: int
    """Of digests in memory, beside HOT and its limit: with Segments, and together for each
    Sequence that was attended to by a budget."""
    digests_made: int
    """Layers of Segments that were read as a whole to digest them."""
    digests_read: int
    """Layers of Segments whose digests were read from their Extents."""
    damaged_digests: int
    """Of these, what was damaged, and made anew."""
    segments: int
    segments_unavailable: int
    """Of these, how many lie on a drive that is missing."""
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SparseCounts:
    """What queries with a budget did since the store was opened: see StoreStats."""

    pages_to_choose: int
    pages_chosen: int
    bytes_recalled: int

    def since(self, before: SparseCounts) -> SparseCounts:
        return SparseCounts(
            self.pages_to_choose - before.pages_to_choose,
            self.pages_chosen - before.pages_chosen,
            self.bytes_recalled - before.bytes_recalled,
        )


def catalog_bytes(path: str) -> int:
    """Bytes of a catalog's files: the database and its write-ahead log."""
    files = [Path(f"{path}{suffix}") for suffix in ("", "-wal")]
    return sum(each.stat().st_size for each in files if each.exists())


def collect(store: StoreCore) -> StoreStats:
    """The numbers of an open store. Callers hold its lock."""
    device = store._files.region.device
    hot, host = store._residency.hot.tier, store._residency.host.tier
    counters, catalog = store._extents.counters, catalog_bytes(store._files.catalog.path)
    written = device.traffic.bytes_written - store._bytes_written_before
    growth = catalog - store._catalog_bytes_at_open
    recalled = store._sparse.recall.counters
    stored = store._committer.kv_bytes + store._blobs.sealed_bytes
    return StoreStats(
        store_uuid=store._files.region.store_uuid,
        fingerprint=store.fingerprint.hex,
        engine=device.engine,
        direct_io=device.direct_io,
        direct_io_reason=device.direct_io_reason,
        region_path=device.path,
        region_bytes=store._files.region.nbytes,
        missing_regions=tuple(each.path for each in store._files.region.missing),
        device_bytes=store._files.allocator.used_bytes - store._extent_writer.refused_bytes,
        hot_bytes=hot.used_bytes,
        hot_bytes_max=hot.used_bytes_max,
        hot_limit_bytes=hot.limit_bytes,
        host_bytes=host.used_bytes,
        host_limit_bytes=host.limit_bytes,
        bytes_read=counters.bytes_read,
        bytes_written=written,
        bytes_on_their_way=store._ledger.started.nbytes,
        catalog_bytes=catalog,
        catalog_growth_bytes=growth,
        kv_bytes_stored=stored,
        write_amplification=(written + max(growth, 0)) / stored if stored else None,
        tokens_looked_up=store._restorer.tokens_looked_up,
        tokens_matched=store._restorer.tokens_matched,
        tokens_matched_hot=store._restorer.matched_in_hot,
        tokens_matched_host=store._restorer.matched_in_host,
        damaged_extents=counters.damaged_extents,
        failed_reads=counters.failed_reads,
        failed_writes=store._extent_writer.failed_writes,
        pages_ahead=store._mover.ahead.pages,
        pages_ahead_in_vain=store._mover.ahead.pages_in_vain,
        pages_evicted=store._room.pages_evicted,
        pages_to_choose=store._sparse.attention.pages_to_choose,
        pages_chosen=store._sparse.attention.pages_chosen,
        pages_recalled=recalled.pages_missed + recalled.pages_ahead,
        bytes_recalled=recalled.bytes_read,
        bytes_recall_wanted=recalled.bytes_wanted,
        digest_bytes=store._sparse.held_bytes(store._own),
        digests_made=store._sparse.digests_made,
        digests_read=store._sparse.digests_read,
        damaged_digests=counters.damaged_digests,
        segments=len(store._registry.committed),
        segments_unavailable=sum(e.unavailable for e in store._registry.committed.values()),
        segments_evicted=store._space.segments_evicted,
        blobs=len(store._blobs),
        blobs_unsealed=store._blobs.unsealed,
        slabs=len(store._files.inventory.slabs),
        slabs_evicted=store._space.slabs_evicted,
        held_bytes=store._files.inventory.held_bytes(time.time()),
        hold_limit_bytes=store._holds.limit_bytes,
    )
