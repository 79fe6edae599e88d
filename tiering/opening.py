"""Opens or makes the files of a store, checks that they belong together, rebuilds what lies in
memory of them: free space, inventory, ledger."""

import json
import logging
import os
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError, DeviceError
from kvtier.io.allocator import ExtentAllocator
from kvtier.io.catalog import Catalog, SegmentRow
from kvtier.io.device import Device
from kvtier.io.probe import open_device
from kvtier.io.rawfile import create_region_file
from kvtier.io.region import Region
from kvtier.io.stable_path import stable_path
from kvtier.tiering import store_files
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.inventory import Inventory
from kvtier.tiering.ledger import Ledger, load_allocator
from kvtier.tiering.store_files import REGION, Settings

_log = logging.getLogger("kvtier")

REGION_BYTES_DEFAULT = 4 << 30


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """Everything of an open store that must be closed, and what it says in memory."""

    settings: Settings
    region: Region
    catalog: Catalog
    ledger: Ledger
    rows: list[SegmentRow]
    """What the catalog named when it was opened; whoever has used them clears the list."""
    _stack: ExitStack

    @property
    def allocator(self) -> ExtentAllocator:
        return self.ledger.allocator

    @property
    def inventory(self) -> Inventory:
        return self.ledger.inventory

    def close(self) -> None:
        """Close catalog, region and lock, in this order. Calling it twice is allowed."""
        self._stack.close()

    def require_geometry(self, fingerprint: str, geometry: Geometry) -> None:
        """Note the KV shapes of a new fingerprint. Raises ConfigError when those that are stored
        under it differ: equal sizes in bytes would let other values pass for the model's."""
        key, wanted = f"geometry:{fingerprint}", json.dumps(geometry.to_dict())
        stored = self.catalog.get_meta(key)
        if stored is None:
            self.catalog.set_meta(key, wanted)
        elif stored != wanted:
            raise ConfigError(
                f"the fingerprint {fingerprint[:12]} is stored with the KV shapes {stored}, but "
                f"this model has {wanted}: name another fingerprint"
            )


def open_files(directory: Path, config: Config) -> OpenFiles:
    """Lock and open the store in `directory`; make it first if there is none."""
    with ExitStack() as stack:
        if not store_files.is_store(directory):
            store_files.prepare_directory(directory)
        stack.enter_context(store_files.lock(directory))
        # Asked again: another process may have made the store before this one had the lock.
        if store_files.is_store(directory):
            settings = store_files.read_settings(directory)
            _check_region(settings, directory, config)
            region = _open_region(settings, directory, config, stack)
        else:
            store_uuid = store_files.clear_leftovers(directory)
            settings, region = _create(directory, store_uuid, config, stack)
        catalog = stack.enter_context(store_files.open_catalog(directory, settings))
        rows = catalog.segments()
        inventory = Inventory.load(catalog, rows)
        allocator = load_allocator(catalog, inventory, region.data_start, region.data_end)
        ledger = Ledger(catalog, region.device, allocator, inventory, discard=config.discard)
        ledger.replay()
        return OpenFiles(settings, region, catalog, ledger, rows, stack.pop_all())


def _device(path: str, config: Config, stack: ExitStack) -> Device:
    device = open_device(path, engine=config.engine, direct=config.direct_io)
    stack.callback(device.close)
    return device


def _create(
    directory: Path, store_uuid: str | None, config: Config, stack: ExitStack
) -> tuple[Settings, Region]:
    """store_uuid: of the catalog that a cut creation left, if there is one."""
    if config.region_path is None:
        path = os.fspath(directory / REGION)
        size = REGION_BYTES_DEFAULT if config.region_bytes is None else config.region_bytes
        create_region_file(path, size)
        named = REGION
    else:
        path = named = os.path.abspath(config.region_path)
        if not os.path.exists(path):
            raise ConfigError(
                f"region {path} does not exist: name a block device or an existing file, or a "
                "size such as '4GiB' for a file inside the store"
            )
        stable = stable_path(path)
        if stable is not None:
            _log.info("%s is named as %s, which stays with the device", path, stable)
            path = named = stable
    device = _device(path, config, stack)
    # The catalog comes first: should the rest be cut, its UUID says whose superblocks the region
    # carries then.
    if store_uuid is None:
        store_uuid = str(uuid.uuid4())
        Catalog.create(directory / store_files.CATALOG, store_uuid).close()
    region = Region.create(device, store_uuid, force=config.force)
    settings = Settings(store_uuid, named, region.superblock.region_bytes)
    store_files.write_settings(directory, settings)
    return settings, region


def _check_region(settings: Settings, directory: Path, config: Config) -> None:
    """Raise ConfigError when the caller asks for another region than the store has."""
    path = settings.region_file(directory)
    wanted = config.region_path
    if wanted is not None and os.path.realpath(wanted) != os.path.realpath(path):
        raise ConfigError(
            f"this store's region is {path}, not {wanted}: leave region out, or name another "
            "directory to make a store on it"
        )
    if config.region_bytes is not None and config.region_bytes != settings.region_bytes:
        raise ConfigError(
            f"this store's region has {settings.region_bytes} bytes, {config.region_bytes} were "
            "asked for: leave region out, or make another store"
        )


def _open_region(settings: Settings, directory: Path, config: Config, stack: ExitStack) -> Region:
    path = settings.region_file(directory)
    if not os.path.exists(path):
        raise DeviceError(f"the region {path} of this store does not exist")
    device = _device(path, config, stack)
    if device.capacity_bytes < settings.region_bytes:
        raise ConfigError(
            f"{path} has {device.capacity_bytes} bytes, but the store was made with "
            f"{settings.region_bytes} bytes: it was truncated. Restore it, or make a new store"
        )
    return Region.open(device, settings.store_uuid)
