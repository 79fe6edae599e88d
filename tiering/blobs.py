"""Blobs: opaque blocks under a key, for engines that keep their own layout of KV.

Small Blobs are gathered in memory and share slabs; a slab is sealed when it is full, at `flush` and
at `close`, and many are sealed by one flush of the device and one transaction.

Invariants:
- A Blob that is not sealed yet is found like any other. A crash loses it: then its key stands for
  what was sealed before, if anything was. What is sealed survives.
- Of a key's values, the one that was put last is the only one that is found.
- Keys belong to one fingerprint: another model, namespace or salt never sees them.
- What is not sealed is never more than GROUP_BYTES and GROUP_ENTRIES, and the Blob that is being
  put.
"""

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from kvtier.errors import ChecksumMismatch, ConfigError, DeviceError, KvtierError
from kvtier.io.alignment import align_up
from kvtier.tiering import slab_format
from kvtier.tiering.blob_index import BlobPlace, SlabEntry
from kvtier.tiering.extent_io import BATCH_BYTES, ExtentIO
from kvtier.tiering.ledger import Change, Ledger
from kvtier.tiering.slab_format import to_signed
from kvtier.tiering.slab_io import Blob, Pack, SlabIO
from kvtier.tiering.slab_limits import BLOB_ALIGNMENT, ENTRIES_MAX, KEY_BYTES_MAX, SLAB_BYTES
from kvtier.tiering.slab_rows import BlobChecker, slab_problem

_log = logging.getLogger("kvtier")

GROUP_BYTES = BATCH_BYTES
"""Bytes of Blobs that one commit seals, if they come in one call."""
GROUP_ENTRIES = 4 * ENTRIES_MAX
"""How many Blobs, however small they are."""


def blob_key(key: object) -> bytes:
    """A key's bytes; text stands for its UTF-8. Raises ConfigError."""
    if isinstance(key, str):
        try:
            key = key.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the key of a blob is no text: {error}") from error
    if not isinstance(key, bytes):
        raise ConfigError(f"the key of a blob is str or bytes: got {type(key).__name__}")
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise ConfigError(f"the key of a blob has 1 to {KEY_BYTES_MAX} bytes: got {len(key)}")
    return key


def blob_view(data: object) -> memoryview:
    """The bytes of a Blob, not copied. Raises ConfigError unless they lie in one piece."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous or data.dtype.hasobject:
            raise ConfigError(
                f"an array of {data.dtype} with strides {data.strides} is no blob: hand in plain "
                "numbers in C order (numpy.ascontiguousarray)"
            )
        return data.reshape(-1).view(np.uint8).data if data.size else memoryview(b"")
    try:
        view = memoryview(data)  # type: ignore[arg-type]
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a blob is bytes or an array in one piece: {error}") from error


def _room(data: memoryview) -> int:
    return align_up(data.nbytes, BLOB_ALIGNMENT)


class BlobShelf:
    """The Blobs of one fingerprint. Callers hold the store's lock."""

    def __init__(self, extents: ExtentIO, ledger: Ledger, fingerprint_id: int) -> None:
        self.ledger = ledger
        self.fingerprint_id = fingerprint_id
        self.io = SlabIO(extents, fingerprint_id)
        self._counters = extents.counters
        self._unsealed: dict[bytes, memoryview] = {}
        self._unsealed_bytes = 0
        self.sealed_bytes = 0
        """Of Blobs that were made durable since the store was opened."""

    def __len__(self) -> int:
        known = self.ledger.inventory.blobs
        return len(known) + sum(known.slab_of(key) is None for key in self._unsealed)

    @property
    def unsealed(self) -> int:
        """How many Blobs a crash would lose."""
        return len(self._unsealed)

    def load(self) -> None:
        """Make the Blobs that the catalog names findable. What cannot be true is left out, and a
        warning says so."""
        tables = self.ledger.slabs.tables
        inventory = self.ledger.inventory
        lost = tables.without_slab()
        if lost:
            _log.warning("%d blobs are not used: their slabs are missing", lost)
        for row in tables.slabs():
            problem = slab_problem(row)
            if problem is not None:
                _log.warning("slab %s is not used: %s", row.id, problem)
                continue
            self.io.created_last = max(self.io.created_last, int(row.created * 1e6) + 1)
            if row.fingerprint_id != self.fingerprint_id:
                continue
            slab = inventory.slabs[row.id]
            checker = BlobChecker(row.fingerprint_id, slab.extent)
            sound = []
            for blob in tables.blobs_of(row.id):
                problem = checker.problem(blob)
                if problem is None:
                    sound.append(blob)
                else:
                    _log.warning("a blob of slab %s is not used: %s", row.id, problem)
            inventory.blobs.add(slab, sound)

    # ---- asking -----------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Whether `get` would look for it on the device, or has it in memory."""
        return key in self._unsealed or self.ledger.inventory.blobs.find(key) is not None

    def keys(self) -> list[bytes]:
        """Keys of all Blobs, sorted."""
        return sorted({*self._unsealed, *self.ledger.inventory.blobs.keys()})

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The bytes of each, None where there are none, or none that are exact. One batch of reads
        serves all. Raises DeviceError when the device as a whole fails."""
        found: dict[bytes, bytes] = {}
        wanted: dict[bytes, BlobPlace] = {}
        for key in keys:
            if key in self._unsealed:
                found[key] = bytes(self._unsealed[key])
                continue
            place = self.ledger.inventory.blobs.find(key)
            if place is not None:
                wanted[key] = place
        damaged: dict[int, SlabEntry] = {}
        used: dict[int, SlabEntry] = {}
        for (key, place), result in zip(
            wanted.items(), self.io.read([*wanted.items()]), strict=True
        ):
            slab = place.slab
            if isinstance(result, bytes):
                found[key] = result
                used[slab.id] = slab
            elif isinstance(result, ChecksumMismatch):
                damaged[slab.id] = slab
                _log.error("quarantined: %s", result)
            else:
                self._set_aside(place, result)
        self.ledger.touch_slabs(used.values())
        self._quarantine(damaged)
        return [found.get(key) for key in keys]

    def _set_aside(self, place: BlobPlace, error: DeviceError) -> None:
        self._counters.failed_reads += 1
        place.slab.unreadable.add(place.entry)
        where = self.io.where(place)
        _log.error("not used until the store is opened again: %s: %s", where, error)

    def _quarantine(self, slabs: dict[int, SlabEntry]) -> None:
        if slabs:
            self._counters.damaged_extents += len(slabs)
            self.ledger.slabs.quarantine(list(slabs.values()))

    # ---- putting ----------------------------------------------------------------------------

    def put(self, blobs: Iterable[Blob]) -> None:
        """Keep Blobs; the bytes are copied, or on the device when it returns.

        Raises CapacityError, DeviceError: then those before may be found, and the rest is not
        taken.
        """
        large: list[Blob] = []
        waiting = 0
        for key, data in blobs:
            if self._is_known(key, data):
                continue
            is_much = waiting + self._unsealed_bytes + _room(data) > GROUP_BYTES
            if is_much or len(self._unsealed) >= GROUP_ENTRIES:
                self._seal(large, everything=False)
                large, waiting = [], 0
            if data.nbytes > SLAB_BYTES:
                large.append((key, data))
                waiting += data.nbytes
                continue
            self._forget_unsealed(key)
            self._unsealed[key] = memoryview(bytes(data))
            self._unsealed_bytes += _room(data)
        if large or self._unsealed_bytes > SLAB_BYTES or len(self._unsealed) > ENTRIES_MAX:
            self._seal(large, everything=False)

    def _is_known(self, key: bytes, data: memoryview) -> bool:
        """Whether the Blob that is found under this key has these bytes."""
        if key in self._unsealed:
            return self._unsealed[key] == data
        place = self.ledger.inventory.blobs.find(key)
        if place is None or place.length != data.nbytes:
            return False
        fingerprint = self.io.extents.owner.fingerprint
        found = slab_format.blob_checksum(fingerprint, key, data, place.slab.generation)
        if to_signed(found) != place.checksum:
            return False
        self.ledger.touch_slabs([place.slab])
        return True

    def flush(self) -> None:
        """Seal what is not sealed. Raises CapacityError, DeviceError; then it is kept."""
        if self._unsealed:
            self._seal([], everything=True)

    def _seal(self, large: Sequence[Blob], *, everything: bool) -> None:
        """Make Blobs durable: full slabs, or everything, and large ones in slabs of their own."""
        newer = {key for key, _ in large}
        packs: list[Pack] = [*self._packs(everything, newer), *([each] for each in large)]
        if not packs:
            return
        added, extents = self.io.write(packs)
        change = Change()
        change.slabs.added += added
        try:
            self.ledger.apply(change)
        except KvtierError:
            # Not after an interrupt: what was committed must not be erased.
            self.io.extents.space.free(extents)
            raise
        for pack in packs:
            for key, data in pack:
                self.sealed_bytes += data.nbytes
                self._forget_unsealed(key)

    def _packs(self, everything: bool, newer: set[bytes]) -> list[list[Blob]]:
        """What is not sealed, cut into slabs; without the last one unless `everything`, and
        without keys that are about to be replaced."""
        packs: list[list[Blob]] = [[]]
        size = 0
        for key, data in self._unsealed.items():
            if key in newer:
                continue
            if size + _room(data) > SLAB_BYTES or len(packs[-1]) == ENTRIES_MAX:
                packs.append([])
                size = 0
            packs[-1].append((key, data))
            size += _room(data)
        return [each for each in (packs if everything else packs[:-1]) if each]

    def _forget_unsealed(self, key: bytes) -> None:
        data = self._unsealed.pop(key, None)
        if data is not None:
            self._unsealed_bytes -= _room(data)

    # ---- removing ---------------------------------------------------------------------------

    def remove(self, key: bytes) -> bool:
        """Remove a Blob durably; whether there was one. Raises DeviceError."""
        known = self.ledger.inventory.blobs.slab_of(key) is not None
        if known:
            change = Change()
            change.slabs.removed_blobs.append((self.fingerprint_id, key))
            self.ledger.apply(change)
        had = known or key in self._unsealed
        self._forget_unsealed(key)
        if known:
            self.ledger.require_erased()
        return had

    def forget_unsealed(self) -> None:
        """Drop what is not sealed."""
        self._unsealed.clear()
        self._unsealed_bytes = 0
