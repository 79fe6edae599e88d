"""A store as files: a directory with settings, catalog and lock, and the region beside them.

Invariants:
- Settings are written last when a store is made: a directory without them is no store, and what
  an interrupted creation left behind is told apart from data of others.
- The region's UUID, the catalog's and the settings' are one.
"""

import errno
import os
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvtier.errors import (
    ConfigError,
    DeviceError,
    FormatError,
    KvtierError,
    VersionMismatch,
    WrongStoreError,
)
from kvtier.io.calibration_file import CALIBRATION
from kvtier.io.catalog import Catalog
from kvtier.io.catalog_blobs import BlobTables
from kvtier.io.durability import sync_directory
from kvtier.io.lock import StoreLock
from kvtier.io.region_place import RegionPlace
from kvtier.io.small_file import read_small, replace_file
from kvtier.io.superblock import DATA_START, REGIONS_MAX, copy_offsets
from kvtier.tiering.budget_profile import PROFILE
from kvtier.tiering.stats_file import STATS
from kvtier.tiering.yaml_text import parse_yaml

SETTINGS = "store.yaml"
CATALOG = "catalog.sqlite"
LOCK = "lock"
REGION = "region.kv"
COSTS = "costs.json"
LAYOUT_VERSION = 1
SETTINGS_BYTES_MAX = 64 << 10
"""Far more than `write_settings` writes for the longest path."""
CATALOG_FILES = {
    name + suffix
    for name in (CATALOG, f"{CATALOG}.new")
    for suffix in ("", "-journal", "-wal", "-shm")
}
OWN_FILES = {
    *(*CATALOG_FILES, LOCK, REGION, f"{SETTINGS}.new"),
    *(name + suffix for name in (STATS, CALIBRATION, COSTS, PROFILE) for suffix in ("", ".new")),
}
LOST = f"{CATALOG}.lost-"
REBUILT = f"{CATALOG}.rebuilt"
RECOVERED = (LOST, REBUILT)
"""Beginnings of what `rebuild` leaves behind. They are none of OWN_FILES on purpose: a directory
that holds them held a store, and nobody may begin a new one in it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a store must know to find its regions. regions: in the order of their numbers, with
    paths relative to the directory, or absolute for devices."""

    store_uuid: str
    regions: tuple[RegionPlace, ...]

    @property
    def region_bytes(self) -> int:
        """Of all regions."""
        return sum(each.nbytes for each in self.regions)

    def places(self, directory: Path) -> list[RegionPlace]:
        """The regions, with paths that need no directory."""
        return [RegionPlace(os.fspath(directory / each.path), each.nbytes) for each in self.regions]

    def require_named(self, directory: Path, named: Sequence[str], remedy: str) -> None:
        """Raise ConfigError where somebody names other paths than the regions'; none will do.

        remedy: what to do then.
        """
        own = [each.path for each in self.places(directory)]
        if named and set(map(os.path.realpath, named)) != set(map(os.path.realpath, own)):
            raise ConfigError(
                f"this store's region is {', '.join(own)}, not {', '.join(named)}: {remedy}"
            )


def is_store(directory: Path) -> bool:
    """Whether there is a store. Raises ConfigError for a path that cannot be, DeviceError."""
    if "\0" in os.fspath(directory):
        raise ConfigError(f"a path cannot hold a zero byte: {os.fspath(directory)!r}")
    with typed(directory):
        return (directory / SETTINGS).is_file()


def read_settings(directory: Path) -> Settings:
    """Raises ConfigError (no store here), FormatError, VersionMismatch, DeviceError."""
    path = directory / SETTINGS
    try:
        data = read_small(path, SETTINGS_BYTES_MAX)
    except FileNotFoundError as error:
        raise ConfigError(f"{directory} is not a kvtier store: it has no {SETTINGS}") from error
    except OSError as error:
        raise DeviceError(f"{path}: {error.strerror}", error.errno or 0) from error
    except ValueError as error:
        raise FormatError(f"{path} is damaged: {error}, unlike any store's") from error
    try:
        content = parse_yaml(data)
    except ValueError as error:
        raise FormatError(f"{path} is damaged: {error}") from error
    try:
        return _parse_settings(content, path)
    except (LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _parse_settings(data: Any, path: Path) -> Settings:
    """Raises LookupError, TypeError or ValueError, without the file's content, for what
    `write_settings` never writes."""
    version = data["layout_version"]
    if type(version) is not int:
        raise TypeError(f"layout_version is no whole number but of type {type(version).__name__}")
    if version != LAYOUT_VERSION:
        raise VersionMismatch(f"{path}: the store", version, LAYOUT_VERSION)
    store_uuid = data["store_uuid"]
    regions = data["regions"] if "regions" in data else [data["region"]]
    # A digit that became another character may turn text into a number or the reverse.
    if not isinstance(store_uuid, str):
        raise TypeError("store_uuid is text")
    if not isinstance(regions, list) or not 1 <= len(regions) <= REGIONS_MAX:
        raise TypeError(f"regions is no list of 1 to {REGIONS_MAX}")
    places = tuple(map(_parse_region, regions))
    try:
        own = uuid.UUID(store_uuid)
    except ValueError as error:
        raise ValueError("store_uuid is no UUID") from error
    return Settings(str(own), places)


def _parse_region(region: Any) -> RegionPlace:
    path, nbytes = region["path"], region["bytes"]
    if not isinstance(path, str) or not path:
        raise TypeError("the path of a region is text, and not empty")
    if "\0" in path:
        raise ValueError("the path of a region holds a zero byte")
    if type(nbytes) is not int or nbytes <= 0:
        raise TypeError("the bytes of a region are no size in bytes")
    return RegionPlace(path, nbytes)


@contextmanager
def typed(path: str | Path) -> Iterator[None]:
    """The operating system's errors as kvtier's."""
    try:
        yield
    except KvtierError:
        raise
    except OSError as error:
        raise DeviceError(f"{path}: {error.strerror}", error.errno or 0) from error


def write_settings(directory: Path, settings: Settings) -> None:
    """Write the settings so that a crash leaves none or all of them."""
    regions = [{"path": each.path, "bytes": each.nbytes} for each in settings.regions]
    own: dict[str, Any] = {"regions": regions} if len(regions) > 1 else {"region": regions[0]}
    text = yaml.safe_dump(
        {"layout_version": LAYOUT_VERSION, "store_uuid": settings.store_uuid, **own},
        sort_keys=False,
    )
    path = directory / SETTINGS
    with typed(path):
        replace_file(path, text, durable=True)
    sync_directory(os.fspath(directory))


def prepare_directory(directory: Path, spared: tuple[str, ...] = ()) -> None:
    """Make the directory of a new store, mode 0700. Raises ConfigError when other files lie there,
    DeviceError.

    spared: files whose names begin so may lie there too.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file: a store is a directory")
    with typed(directory):
        missing = [each for each in (directory, *directory.parents) if not each.exists()]
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = {each.name for each in directory.iterdir() if not each.name.startswith(spared)}
    # A power cut could otherwise take the directory away, with all that is durable in it.
    for each in missing:
        sync_directory(os.fspath(each.parent))
    if found - OWN_FILES:
        raise ConfigError(
            f"{directory} is not a kvtier store and not empty "
            f"(found {sorted(found - OWN_FILES)[0]!r}): name an empty or new directory"
        )


def clear_leftovers(directory: Path) -> str | None:
    """Remove what a cut creation left in a locked directory that is no store, except its catalog,
    if it has one; returns the UUID that stands there.

    Raises FormatError, and removes nothing, where something is stored: then the settings of a
    whole store were lost.
    """
    catalog_path = directory / CATALOG
    store_uuid, kept = None, {LOCK}
    if catalog_path.exists() and catalog_path.stat().st_size:
        # A catalog that names nothing says that the region holds nothing of value.
        with Catalog.open(catalog_path) as catalog:
            segments, slabs = len(catalog.segments()), len(BlobTables(catalog).slabs())
            models, store_uuid = len(catalog.fingerprints()), catalog.store_uuid
        if models or segments or slabs:
            raise FormatError(
                f"{directory} has lost its {SETTINGS}, but its catalog names {segments} segments "
                f"and {slabs} slabs of {models} models in store {store_uuid}. Put the file back, "
                "or delete the directory to lose them"
            )
        # The region may carry this UUID already, and is refused to a store of another.
        kept = {LOCK, CATALOG}
    elif _holds_data(directory / REGION):
        raise FormatError(
            f"{directory} has lost its {SETTINGS} and its catalog, but its region holds data. Run "
            f"kvtier rebuild {directory} --region {directory / REGION}, or delete the directory "
            "to lose it"
        )
    with typed(directory):
        for name in OWN_FILES - kept:
            # A directory of such a name is not ours, and unlink refuses it.
            (directory / name).unlink(missing_ok=True)
    return store_uuid


def _holds_data(region: Path) -> bool:
    """Whether anything was stored in a region file. A creation that was cut short left zeros there,
    and the first thing that is stored lies at the beginning."""
    if not region.is_file():
        return False
    with typed(region), region.open("rb") as file:
        file.seek(DATA_START)
        # In a small region the last copy of the superblock lies within that piece.
        end = min(2 * DATA_START, copy_offsets(region.stat().st_size)[2])
        return bool(file.read(max(0, end - DATA_START)).strip(b"\0"))


def lock(directory: Path) -> StoreLock:
    """Hold the store for writing. Raises LockedError, naming the holder."""
    return StoreLock.acquire(directory / LOCK)


@contextmanager
def open_catalog(
    directory: Path, settings: Settings, *, read_only: bool = False
) -> Iterator[Catalog]:
    """The catalog, once it is known to be this store's; closed when the block raises or ends.

    Raises FormatError or DeviceError where it is damaged or missing, which says how it is made
    anew.
    """
    remedy = f"; kvtier rebuild {directory} makes it anew from the region"
    try:
        catalog = Catalog.open(directory / CATALOG, read_only=read_only)
    except VersionMismatch:
        raise
    except FormatError as error:
        raise FormatError(f"{error}{remedy}") from error
    except DeviceError as error:
        if error.errno != errno.ENOENT:
            raise
        raise DeviceError(f"{error}{remedy}", errno.ENOENT) from error
    try:
        if catalog.store_uuid != settings.store_uuid:
            raise WrongStoreError(
                settings.store_uuid, catalog.store_uuid, os.fspath(directory / CATALOG)
            )
        yield catalog
    except FormatError as error:
        # Damage may lie behind what opening reads. The block's other errors are of other files.
        if not isinstance(error.__cause__, sqlite3.Error):
            raise
        raise FormatError(f"{error}{remedy}") from error
    finally:
        catalog.close()
