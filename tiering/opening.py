"""Opens or makes the files of a store, checks that they belong together, rebuilds what lies in
memory of them: free space, inventory, ledger."""

import json
import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.io.allocator import SpreadAllocator
from kvtier.io.calibration_file import Calibration
from kvtier.io.catalog import Catalog, SegmentRow
from kvtier.io.device import Device
from kvtier.io.probe import open_device
from kvtier.io.rawfile import create_region_file
from kvtier.io.region_place import RegionPlace
from kvtier.io.regions import Regions, open_places, require_different
from kvtier.io.stable_path import stable_path
from kvtier.tiering import store_files
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.inventory import Inventory
from kvtier.tiering.ledger import Ledger, load_allocator
from kvtier.tiering.start_calibration import calibrations
from kvtier.tiering.store_files import REGION, Settings

_log = logging.getLogger("kvtier")

REGION_BYTES_DEFAULT = 4 << 30


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """Everything of an open store that must be closed, and what it says in memory."""

    settings: Settings
    region: Regions
    """All that the store owns, on however many drives."""
    catalog: Catalog
    ledger: Ledger
    rows: list[SegmentRow]
    """What the catalog named when it was opened; whoever has used them clears the list."""
    measured: dict[str, Calibration]
    """What is known of the speed of its drives, by the path of a region."""
    _stack: ExitStack

    @property
    def allocator(self) -> SpreadAllocator:
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
            measured = calibrations(directory, settings, config)
            region = _open_regions(settings, directory, config, stack, measured)
        else:
            store_uuid = store_files.clear_leftovers(directory)
            measured = {}
            settings, region = _create(directory, store_uuid, config, stack)
        catalog = stack.enter_context(store_files.open_catalog(directory, settings))
        rows = catalog.segments()
        inventory = Inventory.load(catalog, rows)
        if region.missing:
            inventory.miss(region.holds)
        allocator = load_allocator(catalog, inventory, region)
        ledger = Ledger(catalog, region.device, allocator, inventory, discard=config.discard)
        ledger.replay()
        return OpenFiles(settings, region, catalog, ledger, rows, measured, stack.pop_all())


def _device(
    path: str, config: Config, stack: ExitStack, measured: Calibration | None = None
) -> Device:
    if measured is None:
        device = open_device(path, engine=config.engine, direct=config.direct_io)
    else:
        device = open_device(
            path, engine=config.engine, direct=config.direct_io, calibration=measured
        )
    stack.callback(device.close)
    return device


def _create(
    directory: Path, store_uuid: str | None, config: Config, stack: ExitStack
) -> tuple[Settings, Regions]:
    """store_uuid: of the catalog that a cut creation left, if there is one."""
    if config.region_paths:
        named = [_named(path) for path in config.region_paths]
        # By the names that were given: two of them may have become one.
        require_different(config.region_paths)
    else:
        named = [REGION]
        size = REGION_BYTES_DEFAULT if config.region_bytes is None else config.region_bytes
        create_region_file(os.fspath(directory / REGION), size)
    devices = [_device(os.fspath(directory / path), config, stack) for path in named]
    # The catalog comes first: should the rest be cut, its UUID says whose superblocks the region
    # carries then.
    if store_uuid is None:
        store_uuid = str(uuid.uuid4())
        Catalog.create(directory / store_files.CATALOG, store_uuid).close()
    region = Regions.create(devices, store_uuid, force=config.force)
    sizes = [each.superblock.region_bytes for each in region.present]
    settings = Settings(store_uuid, tuple(map(RegionPlace, named, sizes)))
    store_files.write_settings(directory, settings)
    return settings, region


def _named(path: str) -> str:
    """An existing device or file, by a name that stays with it. Raises ConfigError."""
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise ConfigError(
            f"region {path} does not exist: name a block device or an existing file, or a "
            "size such as '4GiB' for a file inside the store"
        )
    stable = stable_path(path)
    if stable is not None:
        _log.info("%s is named as %s, which stays with the device", path, stable)
    return stable or path


def _check_region(settings: Settings, directory: Path, config: Config) -> None:
    """Raise ConfigError when the caller asks for other regions than the store has."""
    settings.require_named(
        directory,
        config.region_paths,
        "leave region out, or name another directory to make a store on it",
    )
    if config.region_bytes is not None and config.region_bytes != settings.region_bytes:
        raise ConfigError(
            f"this store's region has {settings.region_bytes} bytes, {config.region_bytes} were "
            "asked for: leave region out, or make another store"
        )


def _open_regions(
    settings: Settings,
    directory: Path,
    config: Config,
    stack: ExitStack,
    measured: Mapping[str, Calibration],
) -> Regions:
    places = settings.places(directory)
    found = open_places(places, lambda path: _device(path, config, stack, measured.get(path)))
    region = Regions.open(places, found, settings.store_uuid)
    for drive in region.missing:
        _log.error(
            "%s: a drive of this store is missing: %s. What is stored there is a miss until the "
            "store is opened with it; everything else goes on",
            directory,
            drive.why,
        )
    return region
