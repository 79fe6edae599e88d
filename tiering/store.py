"""The store: opens its parts, and calls them from left to right.

    WRITE  append: Tail's Frames -> (512 tokens) -> Extents -> (last layer) -> flush -> catalog
    READ   attend: PageTable -> what HOT lacks is read and checked -> attention, group by group
    RESUME tokens -> prefix index -> longest stored match -> its Pages, layer by layer

Invariants:
- Public methods hold one lock; a Store may be used from many threads. A call that is broken off
  by KeyboardInterrupt leaves a Store that can only be closed.
- Data is flushed before the catalog names it; the catalog is committed before it can be found.
- Bytes that fail their check are a miss for `resume` and a typed error for `attend`, never data.
"""

import math
import uuid
from collections import deque
from pathlib import Path
from typing import Self
from weakref import WeakSet

import torch

from kvtier.errors import ClosedError, ConfigError, DeviceError, FormatError
from kvtier.io.buffers import BufferPool
from kvtier.io.catalog import NameRow
from kvtier.tiering.chain import as_tokens
from kvtier.tiering.committer import Committer
from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import ExtentIO, Owner, Unit, bounce_bytes
from kvtier.tiering.fingerprint import EXACT, Fingerprint, Provenance
from kvtier.tiering.frames import MemoryTier
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.opening import OpenFiles, open_files
from kvtier.tiering.packing import Placement, PositionOrder, as_tensor
from kvtier.tiering.process_lock import ProcessLock
from kvtier.tiering.reader import Query, Reader
from kvtier.tiering.residency import Residency
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.stats import StoreStats
from kvtier.tiering.transfer import Mover
from kvtier.tiering.writer import Writer, hot_bytes_min

NAME_CHARACTERS_MAX = 256


class Store:
    """One store, open for writing. Made by `Store.open` or `kvtier.open`."""

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
        self._looked_up = self._matched = 0
        self._to_release: deque[list[Sequence]] = deque()
        self._own: WeakSet[Sequence] = WeakSet()
        buffers = BufferPool(bounce_bytes(geometry))
        region.device.register(buffers.memory)
        owner = Owner(uuid.UUID(region.store_uuid).bytes, fingerprint.digest)
        self._extents = ExtentIO(
            geometry, owner, region.device, files.allocator, buffers, placement
        )
        hot = MemoryTier("HOT", config.hot_bytes, geometry)
        host = MemoryTier("HOST", config.host_bytes, geometry)
        self._residency = Residency(geometry, hot, host)
        self._mover = Mover(geometry, self._residency, self._extents)
        self._writer = Writer(geometry, self._residency, self._mover, self._extents)
        self._reader = Reader(geometry, self._residency, self._mover)
        files.require_geometry(fingerprint.hex, geometry)
        fingerprint_id = files.catalog.add_fingerprint(fingerprint.digest, fingerprint.description)
        self._committer = Committer(files.catalog, fingerprint_id, self._residency, self._extents)
        self._committer.load()

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

        Raises ConfigError, CapacityError, LockedError, ForeignDataError, WrongStoreError,
        FormatError, DeviceError; on an error nothing stays open.
        """
        config = config or Config()
        minimum = hot_bytes_min(geometry)
        if config.hot_bytes < minimum:
            raise ConfigError(
                f"hot is {config.hot_bytes} bytes; this model needs at least {minimum} bytes: "
                "one layer of 512 tokens, and a page of new tokens in every layer"
            )
        files = open_files(Path(path), config)
        try:
            return cls(files, geometry, fingerprint, config, placement or PositionOrder())
        except BaseException:
            files.close()
            raise

    # ---- sequences --------------------------------------------------------------------------

    def sequence(self, provenance: Provenance = EXACT) -> Sequence:
        """A new, empty Sequence."""
        with self._lock:
            self._require_open()
            sequence = Sequence(len(self.geometry.layers), provenance)
            self._own.add(sequence)
            return sequence

    def resume(self, tokens: object, *, provenance: Provenance = EXACT) -> Sequence:
        """A Sequence that begins with the longest stored prefix of `tokens`, maybe none of it.

        Its `length()` says how much was found. What fails its check is not part of a match. As
        much of it as fits is brought into HOT.
        """
        wanted = as_tokens(tokens)
        with self._lock:
            self._require_open()
            self._looked_up += len(wanted)
            sequence = self.sequence(provenance)
            while True:
                views = self._committer.index(provenance).match(wanted)
                for view in views:
                    self._committer.acquire(view.segment)
                sequence.views = list(views)
                try:
                    self._restore(sequence)
                except (FormatError, DeviceError) as error:
                    damaged = self._quarantine(sequence, error)
                    self._release_views(sequence)
                    if not damaged:
                        # No Segment is to blame: the device as a whole fails.
                        raise
                    continue
                break
            sequence.tokens = wanted[: sequence.length()].copy()
            self._matched += sequence.length()
            return sequence

    def lookup(self, tokens: object, *, provenance: Provenance = EXACT) -> int:
        """How many tokens of `tokens` are stored, from the first one on. Reads no KV."""
        wanted = as_tokens(tokens)
        with self._lock:
            self._require_open()
            views = self._committer.index(provenance).match(wanted)
            return views[-1].end if views else 0

    def _restore(self, sequence: Sequence) -> None:
        """Bring a match into HOT layer by layer, and check the headers of the rest."""
        # Two passes begun: all that HOT holds so far is idle against what is wanted now.
        self._residency.begin_pass()
        self._residency.begin_pass()
        end = sequence.length()
        units = []
        for layer, shape in enumerate(self.geometry.layers):
            first = 0 if shape.window is None else max(0, end - shape.window + 1)
            units += [Unit(view.segment, layer) for view in sequence.views if view.end > first]
        loaded = self._mover.load(units, idle_only=True)
        self._extents.check_headers(units[loaded:])

    def _quarantine(self, sequence: Sequence, error: Exception) -> bool:
        """After a failed read: whom it marked is not found again. False: nobody was marked."""
        damaged = [view.segment for view in sequence.views if view.segment.quarantined]
        self._committer.quarantine(damaged, for_good=isinstance(error, FormatError))
        return bool(damaged)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second Sequence with the same tokens, that shares what is sealed.

        Long Tails are frozen and shared, short ones copied. Raises ConfigError during a pass.
        """
        with self._lock:
            self._require_open(sequence)
            twin = self.sequence(sequence.provenance)
            try:
                self._writer.fork(sequence, twin)
            except BaseException:
                self.release(twin)
                raise
            return twin

    def crop(self, sequence: Sequence, length: int) -> None:
        """Forget all tokens from position `length` on; also ends a pass that was broken off.

        Raises ConfigError unless every layer holds that many tokens.
        """
        with self._lock:
            self._require_open(sequence)
            for segment in self._writer.crop(sequence, length):
                self._committer.release(segment)

    def release(self, sequence: Sequence) -> None:
        """End the use of a Sequence. What was committed stays stored; the rest is forgotten."""
        with self._lock.to_close():
            if sequence.closed or self._closed or self._lock.is_broken:
                return
            self._require_open(sequence)
            sequence.closed = True
            self._release_views(sequence)

    def release_later(self, sequences: list[Sequence]) -> None:
        """Release at the next call. Safe at any moment, a finaliser's included."""
        self._to_release.append(sequences)

    def _release_views(self, sequence: Sequence) -> None:
        self._writer.growing.discard(sequence)
        sequence.reserved_bytes = 0
        for segment in [*(view.segment for view in sequence.views), *sequence.tail]:
            self._committer.release(segment)
        sequence.views, sequence.tail = [], []

    # ---- tokens in, attention out -----------------------------------------------------------

    def append(self, sequence: Sequence, layer: int, keys: object, values: object) -> None:
        """Add the keys and values of new tokens to one layer. Every layer gets the same tokens.

        keys [kv_heads, n, key_width], values [kv_heads, n, value_width]: torch tensors or numpy
        arrays of the store's dtype. Whole Segments go to the region at once; they are committed
        when their last layer arrives, if their tokens are named. Raises ConfigError,
        CapacityError, DeviceError.
        """
        with self._lock, torch.no_grad():
            self._require_open(sequence)
            completed = self._writer.append(sequence, layer, as_tensor(keys), as_tensor(values))
            if completed:
                self._committer.commit(sequence)

    def attend(
        self,
        sequence: Sequence,
        layer: int,
        query: object,
        *,
        keys: object = None,
        values: object = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Exact causal attention of the last n tokens over everything before and among them.

        query [q_heads, n, key_width] -> [q_heads, n, value_width]. keys, values: what was
        appended for those n tokens, if at hand (saves reading a long chunk back). scale:
        1 / sqrt(key_width) unless given. Raises ConfigError, DeviceError, and FormatError for
        damaged bytes.
        """
        with self._lock, torch.no_grad():
            self._require_open(sequence)
            if not 0 <= layer < len(self.geometry.layers):
                raise ConfigError(f"layer {layer} of a model of {len(self.geometry.layers)} layers")
            width = self.geometry.layers[layer].key_width
            asked = Query(
                layer,
                as_tensor(query),
                1.0 / math.sqrt(width) if scale is None else scale,
                softcap,
                None if keys is None else as_tensor(keys),
                None if values is None else as_tensor(values),
            )
            try:
                return self._reader.attend(sequence, asked)
            except (FormatError, DeviceError) as error:
                self._quarantine(sequence, error)
                raise

    def name_tokens(self, sequence: Sequence, tokens: object) -> None:
        """Say which ids the tokens of a Sequence have, from position 0 on; complete Segments
        are then committed as they arrive. Raises ConfigError on a contradiction."""
        with self._lock:
            self._require_open(sequence)
            sequence.declare(tokens)

    def save(self, sequence: Sequence, name: str, tokens: object = None) -> int:
        """Seal, flush and hold a Sequence under a name; returns the tokens saved.

        tokens: all ids of the Sequence. One more than there is KV for is allowed, because a
        model's output ends with a token that it has not read yet. Raises ConfigError (a length
        that does not fit, a bad name), CapacityError, DeviceError.
        """
        if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
            raise ConfigError(
                f"a name has 1 to {NAME_CHARACTERS_MAX} printable characters: got {name[:300]!r}"
            )
        with self._lock:
            self._require_open(sequence)
            sequence.require_between_passes()
            held = sequence.length()
            named = sequence.tokens if tokens is None else as_tokens(tokens)
            if len(named) not in (held, held + 1) or held == 0:
                raise ConfigError(
                    f"{len(named)} tokens are named, but this sequence holds KV of {held}: "
                    f"name {held} tokens, or {held + 1} if the last was not read by the model"
                )
            sequence.declare(named[:held])
            if not self._adopt_stored(sequence, held):
                self._writer.seal(sequence)
                self._committer.commit(sequence)
            self._committer.set_name(name, sequence, held)
            return held

    def _adopt_stored(self, sequence: Sequence, held: int) -> bool:
        """Where the store has all tokens of a Sequence already, continue it on those Segments:
        what is known is not written again."""
        views = self._committer.index(sequence.provenance).match(sequence.tokens[:held])
        if not views or views[-1].end < held or not sequence.between_passes:
            return False
        for view in views:
            self._committer.acquire(view.segment)
        self._release_views(sequence)
        sequence.views = views
        return True

    def names(self) -> list[NameRow]:
        """What was saved for this model."""
        with self._lock:
            self._require_open()
            return self._files.catalog.names(self._committer.fingerprint_id)

    # ---- state ------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._lock:
            self._require_open()
            device, hot, host = (
                self._files.region.device,
                self._residency.hot.tier,
                self._residency.host.tier,
            )
            counters = self._extents.counters
            return StoreStats(
                store_uuid=self._files.region.store_uuid,
                fingerprint=self.fingerprint.hex,
                engine=device.engine,
                direct_io=device.direct_io,
                direct_io_reason=device.direct_io_reason,
                region_path=device.path,
                region_bytes=device.capacity_bytes,
                device_bytes=self._files.allocator.used_bytes,
                hot_bytes=hot.used_bytes,
                hot_bytes_max=hot.used_bytes_max,
                hot_limit_bytes=hot.limit_bytes,
                host_bytes=host.used_bytes,
                host_limit_bytes=host.limit_bytes,
                bytes_read=counters.bytes_read,
                bytes_written=counters.bytes_written,
                tokens_looked_up=self._looked_up,
                tokens_matched=self._matched,
                damaged_extents=counters.damaged_extents,
                failed_reads=counters.failed_reads,
                pages_evicted=self._mover.pages_evicted,
                segments=len(self._committer.committed),
            )

    def _require_open(self, sequence: Sequence | None = None) -> None:
        if self._closed:
            raise ClosedError("this store was closed")
        while self._to_release:
            for each in self._to_release.popleft():
                if not each.closed:
                    each.closed = True
                    self._release_views(each)
        if sequence is not None:
            if sequence not in self._own:
                raise ConfigError("this Sequence belongs to another store")
            sequence.require_open()

    def close(self) -> None:
        """Release everything. Tokens of a Tail that was not saved are forgotten."""
        if not self._lock.is_ours:
            return  # In a forked child, where nothing of it is open.
        with self._lock.to_close():
            if self._closed:
                return
            self._closed = True
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
