"""What an operator does to a store that nobody else has open: made, names removed, held, let go.

No model is needed, and no torch is loaded. Each function works under the store's lock.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from kvtier.errors import ConfigError, FormatError
from kvtier.io.catalog import FingerprintRow
from kvtier.tiering import store_files
from kvtier.tiering.catalog_rows import RowChecker, is_well_typed
from kvtier.tiering.config import Config, parse_bytes
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.holds import Holds
from kvtier.tiering.inventory import NameKey
from kvtier.tiering.ledger import Change
from kvtier.tiering.opening import OpenFiles, open_files
from kvtier.tiering.removal import plan_clear, plan_release, plan_removal
from kvtier.tiering.store_files import Settings

NAMES_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Removed:
    """What a removal took away. held: those of the names that were held. slabs: of Blobs.
    freed_bytes: of the region. segments_left: all that the store still has."""

    names: list[str]
    held: list[str]
    segments: int
    slabs: int
    freed_bytes: int
    segments_left: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_store(directory: Path, config: Config) -> Settings:
    """Make a new store. Raises ConfigError where there is one, and every error of open_files."""
    require_no_store(directory)
    files = open_files(directory, config)
    files.close()
    return files.settings


def require_no_store(directory: Path) -> None:
    """Raise ConfigError where a new store cannot be made, because there is one."""
    if store_files.is_store(directory):
        settings = store_files.read_settings(directory)
        raise ConfigError(
            f"{directory} is a kvtier store already, {settings.store_uuid}. Name another "
            "directory, or delete this one first"
        )


@contextmanager
def maintained(directory: Path) -> Iterator[OpenFiles]:
    """The files of a store that is there, locked, with its unsound Segments marked as such.

    Raises ConfigError where there is no store, LockedError that names the holder, FormatError,
    DeviceError.
    """
    # Before anything is opened: opening makes a store where there is none.
    store_files.read_settings(directory)
    files = open_files(directory, Config())
    try:
        checker = RowChecker()
        for row in files.rows:
            if checker.problem(row) is not None:
                files.inventory.entries[row.id].sound = False
        yield files
    finally:
        files.close()


# ---- names --------------------------------------------------------------------------------------


def find_name(files: OpenFiles, name: str, fingerprint: str | None) -> NameKey:
    """The one name that is meant. fingerprint: the first digits of its model's, in hex.

    Raises ConfigError where there is none, or where several models have it.
    """
    hexes = {row.id: row.digest.hex() for row in _fingerprints(files)}
    prefix = (fingerprint or "").lower()
    models = [
        (hexes.get(fingerprint_id, ""), fingerprint_id)
        for fingerprint_id, text in files.inventory.names
        if text == name and hexes.get(fingerprint_id, "").startswith(prefix)
    ]
    if len(models) == 1:
        return models[0][1], name
    if not models:
        of_model = f" of a fingerprint {fingerprint}..." if fingerprint else ""
        raise ConfigError(f"there is no name {name!r}{of_model}: kvtier ls shows what is stored")
    shown = ", ".join(digest[:12] for digest, _ in sorted(models)[:NAMES_SHOWN_MAX])
    raise ConfigError(
        f"{len(models)} models have the name {name!r}: say which by --fingerprint, one of {shown}"
    )


def remove_names(files: OpenFiles, names: Iterable[str], fingerprint: str | None) -> Removed:
    """Remove names, and the Segments that nobody else needs. Raises ConfigError before anything
    is removed, DeviceError."""
    keys = [find_name(files, name, fingerprint) for name in dict.fromkeys(names)]
    return _apply(files, plan_removal(files.inventory, keys))


def remove_all(files: OpenFiles) -> Removed:
    """Remove every name, Segment and Blob, whichever model it belongs to. Raises DeviceError."""
    return _apply(files, plan_clear(files.inventory))


def remove_damaged(files: OpenFiles) -> Removed:
    """Give the ranges of damaged Segments and slabs free again, with what can not be reached
    without them. Raises DeviceError."""
    return _apply(files, plan_release(files.inventory))


def _apply(files: OpenFiles, change: Change) -> Removed:
    free_bytes, slabs = files.allocator.free_bytes, len(files.inventory.slabs)
    names = sorted({name for _, name in change.removed_names})
    held = {(row.fingerprint_id, row.name) for row in files.inventory.held(time.time())}
    were_held = sorted({key[1] for key in change.removed_names if key in held})
    files.ledger.apply(change)
    files.ledger.require_erased()
    return Removed(
        names,
        were_held,
        len(change.removed_segments),
        slabs - len(files.inventory.slabs),
        files.allocator.free_bytes - free_bytes,
        len(files.inventory.entries),
    )


def holds_of(files: OpenFiles, limit: str | None) -> Holds:
    """The holds of a store, under the cap that applications have unless they name another.

    limit: a size, or None for half of the region.
    """
    allocator = files.allocator
    if limit is not None:
        return Holds(files.ledger, parse_bytes(limit, "limit"))
    return Holds(files.ledger, Config().hold_limit_bytes(allocator.window_bytes))


# ---- models -------------------------------------------------------------------------------------


def stored_model(directory: Path, name: str, prefix: str | None) -> tuple[Fingerprint, Geometry]:
    """The model that a name was saved for, as `Store.open` takes it.

    Raises ConfigError as `find_name` does, FormatError where the catalog's account of it cannot
    be true, and what `maintained` raises.
    """
    with maintained(directory) as files:
        fingerprint_id, _ = find_name(files, name, prefix)
        rows = {each.id: each for each in _fingerprints(files)}
        row = rows.get(fingerprint_id)
        if row is None:
            raise FormatError(
                f"the catalog of {directory} names {name!r}, and not the model it belongs to: "
                f"kvtier rebuild --force {directory} makes it anew"
            )
        shapes = files.catalog.get_meta(f"geometry:{row.digest.hex()}")
    return checked_model(row.digest, row.description, shapes or "")


def checked_model(digest: bytes, description: str, shapes: str) -> tuple[Fingerprint, Geometry]:
    """A fingerprint and a geometry that were read, once they fit together.

    shapes: `Geometry.to_dict` as JSON. Raises FormatError.
    """
    fingerprint = Fingerprint.stored(digest, description)
    try:
        geometry = _geometry(json.loads(shapes))
        described = json.loads(description)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise FormatError(
            f"the KV shapes of the fingerprint {fingerprint.hex[:12]} cannot be read: {error}"
        ) from error
    # Where a description holds shapes, an impostor could otherwise claim the fingerprint for
    # others, and the model itself would be refused from then on.
    named = described.get("geometry") if isinstance(described, Mapping) else None
    shaped = isinstance(named, Mapping) and set(named) == set(geometry.to_dict())
    if shaped and named != geometry.to_dict():
        raise FormatError(
            f"the fingerprint {fingerprint.hex[:12]} was made of other KV shapes than those "
            "stored with it"
        )
    return fingerprint, geometry


def _geometry(data: Mapping[str, Any]) -> Geometry:
    if any(type(each) not in (int, NoneType) for layer in data["layers"] for each in layer):
        raise ValueError("a shape is no whole number")
    return Geometry.from_dict(data)


def _fingerprints(files: OpenFiles) -> list[FingerprintRow]:
    return [row for row in files.catalog.fingerprints() if is_well_typed(row)]
