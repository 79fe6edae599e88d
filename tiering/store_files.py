"""A store as files: a directory with settings, catalog and lock, and the region beside them.

Invariants:
- Settings are written last when a store is made: a directory without them is no store, and what
  an interrupted creation left behind is told apart from data of others.
- The region's UUID, the catalog's and the settings' are one.
"""

import os
import uuid
from collections.abc import Iterator
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
from kvtier.io.catalog import Catalog
from kvtier.io.durability import sync_directory
from kvtier.io.lock import StoreLock

SETTINGS = "store.yaml"
CATALOG = "catalog.sqlite"
LOCK = "lock"
REGION = "region.kv"
LAYOUT_VERSION = 1
CATALOG_FILES = {
    name + suffix for name in (CATALOG, f"{CATALOG}.new") for suffix in ("", "-wal", "-shm")
}
OWN_FILES = {*CATALOG_FILES, LOCK, REGION, f"{SETTINGS}.new"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a store must know to find its region. region_path: relative to the directory, or
    absolute for a device."""

    store_uuid: str
    region_path: str
    region_bytes: int

    def region_file(self, directory: Path) -> str:
        return os.fspath(directory / self.region_path)


def is_store(directory: Path) -> bool:
    """Whether there is a store. Raises ConfigError for a path that cannot be, DeviceError."""
    if "\0" in os.fspath(directory):
        raise ConfigError(f"a path cannot hold a zero byte: {os.fspath(directory)!r}")
    with _typed(directory):
        return (directory / SETTINGS).is_file()


def read_settings(directory: Path) -> Settings:
    """Raises ConfigError (no store here), FormatError, VersionMismatch, DeviceError."""
    path = directory / SETTINGS
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{directory} is not a kvtier store: it has no {SETTINGS}") from error
    except OSError as error:
        raise DeviceError(f"{path}: {error.strerror}", error.errno or 0) from error
    try:
        return _parse_settings(yaml.safe_load(data.decode()), path)
    except (
        yaml.YAMLError,
        LookupError,
        AttributeError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise FormatError(f"{path} is damaged: {error!r}") from error


def _parse_settings(data: Any, path: Path) -> Settings:
    """Raises KeyError, TypeError or ValueError for what `write_settings` never writes."""
    version = data["layout_version"]
    if type(version) is not int:
        raise TypeError(f"layout_version is {version!r}, not a whole number")
    if version != LAYOUT_VERSION:
        raise VersionMismatch(f"{path}: the store", version, LAYOUT_VERSION)
    region = data["region"]
    store_uuid, region_path, region_bytes = data["store_uuid"], region["path"], region["bytes"]
    # A digit that became another character may turn text into a number or the reverse.
    if not isinstance(store_uuid, str) or not isinstance(region_path, str) or not region_path:
        raise TypeError(f"store_uuid and region.path are text: got {store_uuid!r}, {region_path!r}")
    if "\0" in region_path:
        raise ValueError("region.path holds a zero byte")
    if type(region_bytes) is not int or region_bytes <= 0:
        raise TypeError(f"region.bytes is {region_bytes!r}, not a size in bytes")
    return Settings(str(uuid.UUID(store_uuid)), region_path, region_bytes)


@contextmanager
def _typed(path: Path) -> Iterator[None]:
    """The operating system's errors as kvtier's."""
    try:
        yield
    except KvtierError:
        raise
    except OSError as error:
        raise DeviceError(f"{path}: {error.strerror}", error.errno or 0) from error


def write_settings(directory: Path, settings: Settings) -> None:
    """Write the settings so that a crash leaves none or all of them."""
    text = yaml.safe_dump(
        {
            "layout_version": LAYOUT_VERSION,
            "store_uuid": settings.store_uuid,
            "region": {"path": settings.region_path, "bytes": settings.region_bytes},
        },
        sort_keys=False,
    )
    new = directory / f"{SETTINGS}.new"
    with _typed(new):
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.rename(directory / SETTINGS)
    sync_directory(os.fspath(directory))


def prepare_directory(directory: Path) -> None:
    """Make the directory of a new store, mode 0700. Raises ConfigError when other files lie there,
    DeviceError."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file: a store is a directory")
    with _typed(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = {each.name for each in directory.iterdir()}
    if found - OWN_FILES:
        raise ConfigError(
            f"{directory} is not a kvtier store and not empty "
            f"(found {sorted(found - OWN_FILES)[0]!r}): name an empty or new directory"
        )


def clear_leftovers(directory: Path) -> None:
    """Remove what a cut creation left in a locked directory that is no store.

    Raises FormatError, and removes nothing, where Segments are stored: then the settings of a
    whole store were lost.
    """
    catalog_path = directory / CATALOG
    if catalog_path.exists() and catalog_path.stat().st_size:
        with Catalog.open(catalog_path) as catalog:
            stored, store_uuid = len(catalog.segments()), catalog.store_uuid
        if stored:
            raise FormatError(
                f"{directory} has lost its {SETTINGS}, but its catalog names {stored} segments of "
                f"store {store_uuid}. Put the file back, or delete the directory to lose them"
            )
    with _typed(directory):
        for name in OWN_FILES - {LOCK}:
            # A directory of such a name is not ours, and unlink refuses it.
            (directory / name).unlink(missing_ok=True)


def lock(directory: Path) -> StoreLock:
    """Hold the store for writing. Raises LockedError, naming the holder."""
    return StoreLock.acquire(directory / LOCK)


@contextmanager
def open_catalog(
    directory: Path, settings: Settings, *, read_only: bool = False
) -> Iterator[Catalog]:
    """The catalog, once it is known to be this store's; closed when the block raises or ends."""
    catalog = Catalog.open(directory / CATALOG, read_only=read_only)
    try:
        if catalog.store_uuid != settings.store_uuid:
            raise WrongStoreError(
                settings.store_uuid, catalog.store_uuid, os.fspath(directory / CATALOG)
            )
        yield catalog
    finally:
        catalog.close()
