"""Settings of a store that is to be rebuilt: read, or made anew from the regions that are named."""

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from kvtier.errors import ConfigError, DeviceError, FormatError, VersionMismatch
from kvtier.io.probe import open_device
from kvtier.io.region import root_of
from kvtier.io.region_place import RegionPlace
from kvtier.io.superblock import Superblock
from kvtier.tiering import store_files
from kvtier.tiering.store_files import Settings


def known_settings(directory: Path, regions: Sequence[str]) -> Settings | None:
    """What store.yaml says; None: it is lost, and the regions are named instead. Makes the store's
    directory if that is lost too."""
    try:
        settings = store_files.read_settings(directory)
    except VersionMismatch:
        raise
    except (ConfigError, FormatError) as error:
        if not regions:
            raise ConfigError(
                f"{error}. If its settings are lost, name its region: --region PATH"
            ) from error
        for region in regions:
            owner = Path(region).parent
            if store_files.is_store(owner) and owner.resolve() != directory.resolve():
                raise ConfigError(
                    f"{region} lies in the store {owner}: rebuild that one, or move the file away"
                ) from error
        if not (directory / store_files.SETTINGS).exists():
            store_files.prepare_directory(directory, store_files.RECOVERED)
        return None
    settings.require_named(
        directory,
        regions,
        "leave --region out, or name another directory for that region's store",
    )
    return settings


def settings_of(directory: Path, paths: Sequence[str]) -> Settings:
    """Settings made anew from the superblocks of named regions. Raises ConfigError where they are
    not all regions of one store."""
    roots: dict[int, tuple[str, Superblock]] = {}
    for path in paths:
        if not os.path.exists(path):
            raise DeviceError(f"the region {path} does not exist: restore the file or device")
        with closing(open_device(path, writable=False)) as device:
            root = root_of(device)
        roots[root.region_index] = (path, root)
        if root.region_count != len(paths):
            raise ConfigError(
                f"{path} is region {root.region_index} of {root.region_count} of store "
                f"{root.store_uuid}, counted from 0, and {len(paths)} are named: name every one "
                "of them by a --region of its own"
            )
    if len(roots) < len(paths):
        raise ConfigError(f"{', '.join(paths)} are not the regions of one store, each once")
    ordered = [roots[number] for number in sorted(roots)]
    own = os.path.realpath(directory / store_files.REGION)
    places = [
        RegionPlace(
            store_files.REGION if os.path.realpath(path) == own else os.path.abspath(path),
            root.region_bytes,
        )
        for path, root in ordered
    ]
    return Settings(ordered[0][1].store_uuid, tuple(places))
