"""One saved prefix as a file, and back: to carry KV to another store, machine or program.

    EXPORT  name -> its tokens -> resume -> layer by layer, read and checked -> file
    IMPORT  file, checked as a whole -> what the store lacks of it is appended -> saved

Invariants:
- A file takes its name when all of it is written; a damaged prefix leaves none.
- Nothing of a file is committed before all of it was checked, as it was read for the store.
- KV is stored under the fingerprint and provenance that the file names, and no other.
"""

import importlib.metadata
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.errors import ChecksumMismatch, ConfigError, FormatError
from kvtier.io.device import ByteArray
from kvtier.tiering.chain import TOKEN_MAX, Tokens
from kvtier.tiering.exchange_format import ExportFile, Head, TensorPlace, writing
from kvtier.tiering.listing import utc_text
from kvtier.tiering.packing import TORCH_DTYPES
from kvtier.tiering.record_format import require_name
from kvtier.tiering.store import Store
from kvtier.tiering.store_files import SETTINGS


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What went between a store and a file. new_tokens: how many the store did not have before an
    import. nbytes: of keys, values and tokens in the file. fingerprint: in hex."""

    name: str
    file: str
    tokens: int
    new_tokens: int
    nbytes: int
    fingerprint: str
    provenance: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def export_name(store: Store, name: str, path: str | Path) -> Exchanged:
    """Write what was saved under a name to a file. Holds one layer in memory at a time.

    Raises ConfigError (no such name, or `path` is no file, is another one than an export, or lies
    in a store), DeviceError, and FormatError where the stored KV is damaged; nothing is written
    then.
    """
    _require_outside(store, str(path))
    tokens, provenance = store.saved(name)
    sequence = store.resume(tokens, provenance=provenance)
    try:
        if sequence.length() < len(tokens):
            raise ChecksumMismatch(
                f"{name!r} cannot be exported: it is damaged or unreadable from token "
                f"{sequence.length()} of {len(tokens)} on; kvtier verify says where"
            )
        created = utc_text(time.time())
        head = Head(
            name, store.fingerprint, store.geometry, provenance, len(tokens), created, _version()
        )
        with writing(str(path), head) as file:
            file.add(tokens.astype("<u4").view(np.uint8))
            for layer in range(len(store.geometry.layers)):
                for rows in store.read(sequence, layer):
                    file.add(_bytes_of(rows))
    finally:
        store.release(sequence)
    return _exchanged(head, name, path, 0)


def import_file(store: Store, path: str | Path, name: str | None = None) -> Exchanged:
    """Save the prefix that a file holds, under its own name or another. Holds one layer in memory
    at a time. What the store has of it already is not stored again.

    Raises FormatError for a file that is not whole, ConfigError where it belongs to another model
    than this store was opened for or the name stands for other tokens, CapacityError, DeviceError;
    the store holds no more than before then.
    """
    with ExportFile.open(str(path)) as file:
        _require_model(store, file)
        wanted = file.head.name if name is None else name
        require_name(wanted)
        # The whole file before the store is changed: writing may evict what others want.
        file.check()
        new_tokens = _store(store, file, wanted)
        return _exchanged(file.head, wanted, path, new_tokens)


def _require_outside(store: Store, path: str) -> None:
    """Raise ConfigError where `path` is a store's own file."""
    folder = os.path.dirname(path) or "."
    if os.path.lexists(os.path.join(folder, SETTINGS)):
        raise ConfigError(f"{folder} is a kvtier store: name a file in another directory")
    region = store._files.region.path
    if os.path.exists(path) and os.path.exists(region) and os.path.samefile(path, region):
        raise ConfigError(f"{path} is this store's region: name another file")


def _require_model(store: Store, file: ExportFile) -> None:
    own, found = store.fingerprint.hex, file.head.fingerprint.hex
    if own != found:
        raise ConfigError(
            f"{file.path} holds KV of the fingerprint {found[:12]}, this store is open for "
            f"{own[:12]}: open it for the model that the file was exported for"
        )
    if store.geometry != file.head.geometry:
        raise ConfigError(f"{file.path} has other KV shapes than this store's model")


def _store(store: Store, file: ExportFile, name: str) -> int:
    """Append what is missing and save it; returns how many tokens were missing."""
    head, hasher = file.head, file.head.hasher()
    places = iter(head.places())
    data = file.read(next(places))
    hasher.update(data.data)
    tokens: Tokens = data.view("<u4")
    if int(tokens.max()) > TOKEN_MAX:
        raise FormatError(f"{file.path} holds the token {int(tokens.max())}: {TOKEN_MAX} at most")
    _require_free(store, name, tokens)
    sequence = store.resume(tokens, provenance=head.provenance)
    known = sequence.length()
    try:
        # Room is made batch by batch: a prefix that can never fit would evict all others first.
        with store._lock:
            store._space.require((len(tokens) - known) * head.geometry.token_bytes)
        for layer in range(len(head.geometry.layers)):
            rows = [_rows(file, next(places), hasher, head) for _ in ("keys", "values")]
            if known < len(tokens):
                store.append(sequence, layer, *(each[:, known:] for each in rows))
        # It was checked before, but it may have changed while it was read once more. Nothing of it
        # is committed yet, because its tokens have no names.
        file.compare(hasher)
        store.save(sequence, name, tokens)
    finally:
        store.release(sequence)
    return len(tokens) - known


def _require_free(store: Store, name: str, tokens: Tokens) -> None:
    """Raise ConfigError where the name stands for other tokens, which would lose theirs."""
    if any(row.name == name for row in store.names()):
        held, _ = store.saved(name)
        if not np.array_equal(held, tokens):
            raise ConfigError(
                f"the name {name!r} is taken in this store, for other tokens: import under "
                "another name, or remove that one first"
            )


def _rows(file: ExportFile, place: TensorPlace, hasher: Any, head: Head) -> torch.Tensor:
    """One tensor [kv_heads, tokens, width] of the file."""
    data = file.read(place)
    hasher.update(data.data)
    dtype = TORCH_DTYPES[head.geometry.dtype]
    if not data.size:  # Latents have no values, and torch no view of nothing.
        return torch.empty(place.shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).view(place.shape)


def _bytes_of(rows: torch.Tensor) -> ByteArray:
    found: ByteArray = rows.contiguous().view(-1).view(torch.uint8).numpy()
    return found


def _version() -> str:
    try:
        return importlib.metadata.version("kvtier")
    except importlib.metadata.PackageNotFoundError:  # A checkout that was not installed.
        return "unknown"


def _exchanged(head: Head, name: str, path: str | Path, new_tokens: int) -> Exchanged:
    return Exchanged(
        name,
        str(path),
        head.token_count,
        new_tokens,
        head.tensor_bytes,
        head.fingerprint.hex,
        head.provenance.text,
    )
