"""The command `kvtier format`: shows what devices carry, asks, and makes a store on them.

Invariants:
- Nothing is written, in the store's directory either, before every refusal and question.
- What is mounted or otherwise in use is refused, forced or not.
- Foreign content goes only when it was forced and, besides, typed or said --yes to.
"""

import errno
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError, DeviceError, ForeignDataError
from kvtier.io.device_view import DeviceView, look_at
from kvtier.io.rawfile import open_raw
from kvtier.tiering.config import Config
from kvtier.tiering.maintenance import make_store, require_no_store
from kvtier.tools import asking
from kvtier.tools.device_text import content_text
from kvtier.tools.text_table import human_bytes


@dataclass(frozen=True, slots=True)
class Formatted:
    """A new store. regions: their paths as the store names them. region_bytes: of all of them.
    carried: what was on each, in words; none where the region is a new file."""

    store: str
    uuid: str
    regions: list[str]
    region_bytes: int
    carried: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def format_store(
    directory: Path, region: str | Sequence[str] | None, *, force: bool, yes: bool
) -> Formatted:
    """Make a store with its region in a new file, or on the devices or files that `region` names.

    region: a size, a path with a / in it, several such paths, or None for a file of 4 GiB. Raises
    ConfigError (a store is there already, not confirmed), ForeignDataError, DeviceError,
    CapacityError.
    """
    config = Config(region, force=force)
    require_no_store(directory)
    views: list[DeviceView] = []
    for path in map(os.path.abspath, config.region_paths):
        # Says more than a look at it where the path or its permissions are wrong.
        open_raw(path, writable=False, direct="off").close()
        views.append(look_at(path))
        _refuse(views[-1], force)
    for view, typed in zip(views, config.region_paths, strict=True):
        _confirm(view, typed, yes)
    settings = make_store(directory, config)
    return Formatted(
        os.fspath(directory),
        settings.store_uuid,
        [each.path for each in settings.places(directory)],
        settings.region_bytes,
        list(map(content_text, views)),
    )


def chosen(devices: Sequence[str], region: str | None) -> str | Sequence[str] | None:
    """The region as `Config` takes it, from arguments and option. Raises ConfigError."""
    if not devices:
        return region
    if region is not None:
        raise ConfigError(f"name drives ({', '.join(devices)}) or --region {region}, not both")
    return devices


def _refuse(view: DeviceView, force: bool) -> None:
    if view.in_use is not None:
        raise ForeignDataError(
            f"{view.path} is in use ({view.in_use}) and is never formatted, forced or not. "
            "Release it first.",
            errno.EBUSY,
        )
    if view.read_only:
        # Opening it for writing would succeed.
        raise DeviceError(
            f"{view.path} is read-only: the kernel refuses to write to it. Make it writable "
            "(blockdev --setrw), or choose another device",
            errno.EROFS,
        )
    # Whether it may be written to is asked before anything is made.
    open_raw(view.path, writable=True, direct="off").close()
    if view.carries_anything and not force:
        raise ForeignDataError(
            f"{view.path} ({human_bytes(view.nbytes)}) carries {content_text(view)}. Choose "
            "another device, or pass --force to lose it.",
            errno.EEXIST,
        )


def _confirm(view: DeviceView, typed: str, yes: bool) -> None:
    """Have the path typed once more. Raises ConfigError unless it was, or --yes was given."""
    if yes:
        return
    if not asking.is_terminal():
        raise ConfigError(
            f"formatting {typed} must be confirmed, and nobody can answer: pass --yes"
            + (" (beside --force)" if view.carries_anything else "")
        )
    answer = asking.ask(
        f"{view.path}: {human_bytes(view.nbytes)} in blocks of {view.block_bytes} bytes, carries "
        f"{content_text(view)}, in use by nobody.\n"
        f"All of it will be lost. Type the path {typed} to format it:"
    )
    if answer != typed:
        raise ConfigError(
            f"{answer[:200]!r} was typed, {typed!r} was expected: nothing was written"
        )


def formatted_text(made: Formatted, asked_for: Sequence[str]) -> str:
    """asked_for: the paths as they were named; none where the region is a new file."""
    size = human_bytes(made.region_bytes)
    if len(made.regions) == 1:
        lines = [f"store {made.uuid} in {made.store}", f"region {made.regions[0]}: {size}"]
    else:
        lines = [f"store {made.uuid} in {made.store}: {len(made.regions)} regions, {size}"]
    for path, named, carried in zip(made.regions, asked_for, made.carried, strict=False):
        if len(made.regions) > 1:
            lines.append(f"region {path}")
        if os.path.abspath(named) != path:
            lines.append(
                f"named by a link that stays with the device, because {named} may be another "
                "one after the next boot"
            )
        lines.append(f"it carried {carried}")
    return "\n".join(lines)
