"""The command `kvtier format`: shows what a device carries, asks, and makes a store on it.

Invariants:
- Nothing is written, in the store's directory either, before every refusal and question.
- What is mounted or otherwise in use is refused, forced or not.
- Foreign content goes only when it was forced and, besides, typed or said --yes to.
"""

import errno
import os
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
    """A new store. region_path: as the store names it. carried: what was on it, in words."""

    store: str
    uuid: str
    region_path: str
    region_bytes: int
    carried: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def format_store(directory: Path, region: str | None, *, force: bool, yes: bool) -> Formatted:
    """Make a store with its region in a new file, or on the device or file that `region` names.

    region: a size, a path with a / in it, or None for a file of 4 GiB. Raises ConfigError (a store
    is there already, not confirmed), ForeignDataError, DeviceError, CapacityError.
    """
    config = Config(region, force=force)
    require_no_store(directory)
    carried = None
    if config.region_path is not None:
        path = os.path.abspath(config.region_path)
        # Says more than a look at it where the path or its permissions are wrong.
        open_raw(path, writable=False, direct="off").close()
        view = look_at(path)
        carried = content_text(view)
        _refuse(view, force)
        _confirm(view, config.region_path, yes)
    settings = make_store(directory, config)
    path = settings.region_file(directory)
    return Formatted(
        os.fspath(directory), settings.store_uuid, path, settings.region_bytes, carried
    )


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


def formatted_text(made: Formatted, asked_for: str | None) -> str:
    """asked_for: the region as it was named."""
    lines = [
        f"store {made.uuid} in {made.store}",
        f"region {made.region_path}: {human_bytes(made.region_bytes)}",
    ]
    if made.carried is not None and asked_for is not None:
        if os.path.abspath(asked_for) != made.region_path:
            lines.append(
                f"named by a link that stays with the device, because {asked_for} may be another "
                "one after the next boot"
            )
        lines.append(f"it carried {made.carried}")
    return "\n".join(lines)
