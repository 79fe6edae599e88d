"""A store's parts and its life: opened, asked what it holds, told what to keep or remove, closed.

Invariants:
- Public methods hold one lock; a Store may be used from many threads. A call that is broken off
  by KeyboardInterrupt leaves a Store that can only be closed.
"""

import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self
from weakref import WeakSet

from kvtier.errors import ClosedError, ConfigError, KvtierError
from kvtier.io.buffers import BufferPool
from kvtier.io.catalog import NameRow
from kvtier.tiering.background_scrub import background_scrub
from kvtier.tiering.blobs import BlobShelf, blob_key, blob_view
from kvtier.tiering.clusterer import ByKeys, ByPosition, Placement
from kvtier.tiering.committer import Committer, add_fingerprint
from kvtier.tiering.config import Config
from kvtier.tiering.drive_space import DriveSpace
from kvtier.tiering.extent_io import ExtentIO, Owner, bounce_bytes
from kvtier.tiering.extent_writer import ExtentWriter
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.frames import MemoryTier
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.holds import Holds
from kvtier.tiering.ledger import Change
from kvtier.tiering.opening import OpenFiles, open_files
from kvtier.tiering.page_table import PageTable
from kvtier.tiering.process_lock import ProcessLock
from kvtier.tiering.reader import Reader
from kvtier.tiering.registry import Registry
from kvtier.tiering.removal import plan_clear, plan_removal
from kvtier.tiering.residency import Residency
from kvtier.tiering.restorer import Restorer
from kvtier.tiering.room import Room
from kvtier.tiering.scrubber import RATE_DEFAULT, Scrubber
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.sparse_reader import SparseReader
from kvtier.tiering.stats import SparseCounts, StoreStats, catalog_bytes, collect
from kvtier.tiering.stats_file import StatsFile
from kvtier.tiering.store_files import COSTS
from kvtier.tiering.stored_digests import DigestKind
from kvtier.tiering.transfer import Mover
from kvtier.tiering.writer import Writer, hot_bytes_min

_log = logging.getLogger("kvtier")

# A Mapping's keys are invariant: each kind of key must be named.
KeyedBlobs = Mapping[str, object] | Mapping[bytes, object] | Mapping[str | bytes, object]


class StoreCore:
    """Everything of a Store but its Sequences' tokens and attention (store.py)."""

    def __init__(
        self,
        files: OpenFiles,
        geometry: Geometry,
        fingerprint: Fingerprint,
        config: Config,
        placement: Placement,
    ) -> None:
        region = files.region
        self.geometry = geometry
        self.fingerprint = fingerprint
        self._files = files
        self._lock = ProcessLock("this store")
        self._closed = False
        # Making a region writes its first mebibyte, which is no cost of what is stored.
        self._bytes_written_before = region.device.traffic.bytes_written
        self._scrubber: Scrubber | None = None
        self.before_close: set[Callable[[], None]] = set()
        """Ends what threads of others still do with this store; called without its lock."""
        self._to_release: deque[list[Sequence]] = deque()
        self._own: WeakSet[Sequence] = WeakSet()
        self._make_walk(config, placement)
        self._restorer = Restorer(
            geometry, self._residency, self._mover, self._extents, self._registry, files.ledger
        )
        self.costs = self._restorer.costs
        """What loading and computing take here, as measured."""
        self.costs.calibrated(files.measured.values())
        self.costs.restore(self.directory / COSTS, fingerprint.hex)
        self._holds = Holds(files.ledger, config.hold_limit_bytes(files.allocator.window_bytes))
        self._fingerprint_id = add_fingerprint(files, self._space, fingerprint, geometry)
        self._committer = Committer(
            self._registry, files.ledger, self._space, self._extent_writer, self._fingerprint_id
        )
        own = [row for row in files.rows if row.fingerprint_id == self._fingerprint_id]
        files.rows.clear()
        self._registry.load(own, len(geometry.layers))
        self._blobs = BlobShelf(self._extents, files.ledger, self._fingerprint_id)
        self._blobs.load()
        self._catalog_bytes_at_open = catalog_bytes(files.catalog.path)
        self._stats_file = StatsFile(self.directory, region.store_uuid)
        self._write_stats(is_open=True)  # So is seen who will only read.

    def _make_walk(self, config: Config, placement: Placement) -> None:
        """The parts that bytes pass through, from the device to attention."""
        files, geometry = self._files, self.geometry
        region, ledger = files.region, files.ledger
        buffers = BufferPool(bounce_bytes(geometry))
        region.device.register(buffers.memory)
        owner = Owner(uuid.UUID(region.store_uuid).bytes, self.fingerprint.digest)
        hot = MemoryTier("HOT", config.hot_bytes, geometry)
        host = MemoryTier("HOST", config.host_bytes, geometry)
        self._ledger = ledger
        self._residency = Residency(geometry, hot, host)
        self._registry = Registry(ledger, self._residency)
        self._space = DriveSpace(files.allocator, ledger, self._registry)
        self._extents = ExtentIO(geometry, owner, region.device, self._space, buffers)
        digests = DigestKind(geometry, config.sketch_bits or None)
        self._extent_writer = ExtentWriter(
            *(self._extents, self._residency, placement),
            digests if config.placement == "keys" else None,
        )
        self._extents.finish_writes = self._extent_writer.finish
        self._room = Room(geometry, self._residency)
        self._mover = Mover(geometry, self._residency, self._room, self._extents)
        self._registry.on_unused = self._mover.ahead.forget
        self._writer = Writer(
            geometry, self._residency, self._mover, self._extent_writer, self._registry
        )
        self._reader = Reader(geometry, self._residency, self._mover)
        self._sparse = SparseReader(self._reader, self._writer.sealer.write_out, digests)
        self._registry.on_moved = self._sparse.forget

    @classmethod
    def open(
        cls,
        path: str | Path,
        geometry: Geometry,
        fingerprint: Fingerprint,
        config: Config | None = None,
        placement: Placement | None = None,
    ) -> Self:
        """Open the store in a directory, or make one there.

        placement: in which order tokens lie in their Pages; None: as the Config says, keys being
        compared as they are given. Raises ConfigError, CapacityError, LockedError,
        ForeignDataError, WrongStoreError, FormatError, DeviceError; on an error nothing stays open.
        """
        config = config or Config()
        minimum = hot_bytes_min(geometry)
        if config.hot_bytes < minimum:
            raise ConfigError(
                f"hot is {config.hot_bytes} bytes; this model needs at least {minimum} bytes: "
                "one layer of 512 tokens, and a page of new tokens in every layer"
            )
        if placement is None:
            by_keys = config.placement == "keys"
            placement = ByKeys(geometry) if by_keys else ByPosition()
        files = open_files(Path(path), config)
        try:
            return cls(files, geometry, fingerprint, config, placement)
        except BaseException:
            files.close()
            raise

    # ---- what is stored ---------------------------------------------------------------------

    def names(self) -> list[NameRow]:
        """What was saved for this model."""
        with self._lock:
            self._require_open()
            return self._files.catalog.names(self._fingerprint_id)

    def hold(self, name: str, seconds: float | None = None) -> None:
        """Keep a name's Segments from eviction, for so many seconds or until `unhold`.

        Raises ConfigError (no such name), CapacityError beyond the cap (Config.hold_limit).
        """
        with self._lock:
            self._require_open()
            self._holds.hold((self._fingerprint_id, name), seconds)

    def unhold(self, name: str) -> None:
        """End the hold of a name. Raises ConfigError (no such name)."""
        with self._lock:
            self._require_open()
            self._holds.unhold((self._fingerprint_id, name))

    def unhold_all(self) -> list[str]:
        """End every hold of this model; returns the names."""
        with self._lock:
            self._require_open()
            return self._holds.unhold_all(self._fingerprint_id)

    def remove(self, name: str) -> int:
        """Remove a name, and the Segments that nobody else needs; returns how many those were.

        Once it has returned they are gone for good, a scan of the region included. Segments that
        an open Sequence views stay until that is released and they are evicted. Raises
        ConfigError (no such name), DeviceError.
        """
        with self._lock:
            self._require_open()
            key = (self._fingerprint_id, name)
            if key not in self._files.inventory.names:
                raise ConfigError(f"there is no name {name!r} to remove")
            return self._remove(plan_removal(self._files.inventory, [key], self._registry.in_use))

    def clear(self) -> int:
        """Remove every name, every Blob, and every Segment that no open Sequence needs, other
        models' too; returns how many Segments those were. Raises DeviceError."""
        with self._lock:
            self._require_open()
            self._blobs.forget_unsealed()
            return self._remove(plan_clear(self._files.inventory, self._registry.in_use))

    def _remove(self, change: Change) -> int:
        self._ledger.apply(change)
        self._registry.drop(change.removed_segments)
        self._ledger.require_erased()
        return len(change.removed_segments)

    # ---- Blobs ------------------------------------------------------------------------------

    def put_blob(self, key: str | bytes, data: object) -> None:
        """Keep an opaque block of bytes under a key of this model; it can be found at once.

        key: text stands for its UTF-8. data: bytes-like, or a numpy array in one piece; copied.
        Small Blobs survive a crash once a slab of them is full, or `flush` or `close` returned.
        A Blob of the same key is replaced; equal bytes are not written again. Raises ConfigError,
        CapacityError, DeviceError.
        """
        self.put_blobs({key: data})

    def put_blobs(self, blobs: KeyedBlobs) -> None:
        """As `put_blob`, for many: they share commits. On an error some of them may be kept."""
        taken = {blob_key(key): blob_view(data) for key, data in blobs.items()}
        with self._lock:
            self._require_open()
            self._blobs.put(taken.items())

    def get_blob(self, key: str | bytes) -> bytes | None:
        """The exact bytes of a Blob, or None: there is none, or it is damaged (which is logged,
        and counted). Raises ConfigError, and DeviceError when the device as a whole fails."""
        return self.get_blobs([key])[0]

    def get_blobs(self, keys: Iterable[str | bytes]) -> list[bytes | None]:
        """As `get_blob`, for many, in their order: one batch of reads serves all."""
        wanted = [blob_key(key) for key in keys]
        with self._lock:
            self._require_open()
            return self._blobs.get(wanted)

    def has_blob(self, key: str | bytes) -> bool:
        """Whether there is a Blob, as far as is known without reading it."""
        wanted = blob_key(key)
        with self._lock:
            self._require_open()
            return self._blobs.has(wanted)

    def blob_keys(self) -> list[bytes]:
        """Keys of all Blobs of this model, sorted."""
        with self._lock:
            self._require_open()
            return self._blobs.keys()

    def remove_blob(self, key: str | bytes) -> bool:
        """Remove a Blob for good; whether there was one. Raises DeviceError."""
        wanted = blob_key(key)
        with self._lock:
            self._require_open()
            return self._blobs.remove(wanted)

    def flush(self) -> None:
        """Make every Blob that was put before durable, by one commit for all.

        Raises CapacityError, DeviceError; then they are kept, and can be flushed again.
        """
        with self._lock:
            self._require_open()
            self._blobs.flush()

    def scrub(self, rate: int | str = RATE_DEFAULT) -> Scrubber:
        """Begin to read and check everything in the background, at `rate` bytes per second.

        Damaged Segments are quarantined as they are found. The Scrubber says how far it is, waits
        and stops; `close` stops it too. Raises ConfigError while another one is running.
        """
        with self._lock:
            self._require_open()
            if self._scrubber is not None and self._scrubber.running:
                raise ConfigError("a scrub of this store is running: wait for it, or stop it")
            self._scrubber = background_scrub(
                self._lock, self._files, self._registry, self._extents.counters, rate
            )
            self._scrubber.start()
            return self._scrubber

    # ---- state ------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._lock:
            self._require_open()
            return collect(self)

    def sparse_counts(self) -> SparseCounts:
        """A few of the numbers of `stats`, for who asks before and after each answer."""
        sparse = self._sparse
        with self._lock:
            return SparseCounts(
                sparse.attention.pages_to_choose,
                sparse.attention.pages_chosen,
                sparse.recall.counters.bytes_read,
            )

    @property
    def directory(self) -> Path:
        """Where the store's files lie."""
        return Path(self._files.catalog.path).parent

    def _require_open(self, sequence: Sequence | None = None, *, is_urgent: bool = False) -> None:
        """is_urgent: somebody waits for bytes, and not for the file of numbers as well."""
        if self._closed:
            raise ClosedError("this store was closed")
        if not is_urgent:
            self._stats_file.write_when_due(lambda: collect(self).to_dict())
        while self._to_release:
            for each in self._to_release.popleft():
                if not each.closed:
                    each.closed = True
                    self._release_views(each)
        if sequence is not None:
            if sequence not in self._own:
                raise ConfigError("this Sequence belongs to another store")
            sequence.require_open()

    def _release_views(self, sequence: Sequence) -> None:
        self._writer.sealer.end(sequence, self._committer.commit)
        self._writer.growing.discard(sequence)
        sequence.reserved_bytes = 0
        self._restorer.tables.keep(sequence.views, sequence.table.placed)
        sequence.table = PageTable()
        for segment in [*(view.segment for view in sequence.views), *sequence.tail]:
            self._registry.release(segment)
        sequence.views, sequence.tail = (), []

    def close(self) -> None:
        """Seal Blobs, then release everything. Tokens of a Tail that was not saved are forgotten.

        Blobs that cannot be sealed are lost, and a warning says so: `flush` raises the error.
        """
        if not self._lock.is_ours:
            return  # In a forked child, where nothing of it is open.
        if self._scrubber is not None:
            # Before the lock is taken: its thread may be waiting for it.
            self._scrubber.stop()
        for end in list(self.before_close):
            end()
        with self._lock.to_close():
            if self._closed:
                return
            self._closed = True
            try:
                if not self._lock.is_broken:
                    self._seal_and_settle()
            finally:
                self._sparse.recall.give_up()
                self._files.close()
                for tier in (self._residency.hot.tier, self._residency.host.tier):
                    tier.close()
                self._extents.buffers.close()
                self._sparse.recall.close()

    def _seal_and_settle(self) -> None:
        """What fails here must not keep the store from being closed."""
        path = self._files.region.path
        for sequence in list(self._own):
            self._writer.sealer.end(sequence, self._committer.commit)
        self.costs.keep(self.directory / COSTS, self.fingerprint.hex)
        try:
            self._blobs.flush()
        except KvtierError as error:
            _log.error("closing %s: %d blobs are lost: %s", path, self._blobs.unsealed, error)
        try:
            self._ledger.settle()
        except KvtierError as error:
            # Times of use are all that is lost.
            _log.warning("closing %s: %s", path, error)
        self._write_stats(is_open=False)

    def _write_stats(self, *, is_open: bool) -> None:
        self._stats_file.write(collect(self).to_dict(), is_open=is_open)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
