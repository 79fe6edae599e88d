"""Which engine a store's devices are opened with: what was measured of them, or is measured now.

A device is measured once, at the first opening that finds enough stored on it, for about a second;
then the file beside the store says it. Nothing that goes wrong here keeps a store from being
opened: it then uses the defaults.
"""

import logging
import os
from pathlib import Path

import numpy as np

from kvtier.errors import KvtierError
from kvtier.io import calibration_file
from kvtier.io.calibration_file import Calibration
from kvtier.io.device import Int64Array
from kvtier.io.extent import DRIVE_BITS
from kvtier.io.ranges import merge_ranges
from kvtier.io.region_place import RegionPlace
from kvtier.tiering import store_files
from kvtier.tiering.catalog_rows import extents_of
from kvtier.tiering.config import Config
from kvtier.tiering.store_files import Settings

STORED_BYTES_MIN = 64 << 20
"""With less on a drive there is little to read, and a measurement would find it in caches."""
SECONDS = 1.0
_HOLE_BYTES_MAX = 1 << 20
"""A window to be measured has no longer piece in which nothing is stored."""
_BYTE_MASK = (1 << DRIVE_BITS) - 1

_log = logging.getLogger("kvtier")


def calibrations(directory: Path, settings: Settings, config: Config) -> dict[str, Calibration]:
    """By the path of each region what is known of its device; {} if the caller named an engine,
    goes through the page cache, or wants no calibration."""
    if config.engine != "auto" or config.direct_io == "off" or not config.calibrate:
        return {}
    places = settings.places(directory)
    known = {each.path: calibration_file.load(directory, each.path) for each in places}
    unknown = [
        (number, each)
        for number, each in enumerate(places)
        if known[each.path] is None and each.nbytes >= STORED_BYTES_MIN
    ]
    if unknown:
        try:
            stored = stored_extents(directory, settings)
        except KvtierError as error:
            # The opening itself, which comes next, says what is wrong with it.
            _log.debug("nothing is measured: %s", error)
        else:
            for number, place in unknown:
                known[place.path] = _measured(directory, number, place, stored)
    return {path: each for path, each in known.items() if each is not None}


def window_of(number: int, stored: tuple[Int64Array, Int64Array]) -> tuple[int, int] | None:
    """The longest window [start, end) of drive `number` that is full of Extents; None where too
    little is stored. stored: offsets and lengths of Extents, int64 [extents]."""
    offsets, lengths = stored
    own = offsets >> DRIVE_BITS == number
    if int(lengths[own].sum()) < STORED_BYTES_MIN:
        return None
    merged = merge_ranges(offsets[own] & _BYTE_MASK, lengths[own], _HOLE_BYTES_MAX, 1 << DRIVE_BITS)
    longest = int(np.argmax(merged.lengths))
    start, nbytes = int(merged.offsets[longest]), int(merged.lengths[longest])
    return (start, start + nbytes) if nbytes >= STORED_BYTES_MIN // 4 else None


def stored_extents(directory: Path, settings: Settings) -> tuple[Int64Array, Int64Array]:
    """Offsets and lengths of the Extents of all Segments, int64 [extents]. Raises FormatError,
    DeviceError where the catalog cannot be read."""
    with store_files.open_catalog(directory, settings, read_only=True) as catalog:
        extents = [each for row in catalog.segments() for each in extents_of(row)]
    offsets = np.fromiter((each.offset for each in extents), np.int64, len(extents))
    lengths = np.fromiter((each.length for each in extents), np.int64, len(extents))
    return offsets, lengths


def _measured(
    directory: Path, number: int, place: RegionPlace, stored: tuple[Int64Array, Int64Array]
) -> Calibration | None:
    window = window_of(number, stored)
    if window is None or not os.path.exists(place.path):
        return None
    from kvtier.io.calibration import calibrate

    try:
        found = calibrate(place.path, *window, SECONDS, direct="required")
    except KvtierError as error:
        _log.info("%s was not measured: %s", place.path, error)
        return None
    calibration_file.save(directory, place.path, found)
    _log.info("%s: %s", place.path, found.why)
    return found
