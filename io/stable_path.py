"""The name of a block device that stays with it: kernel names may change at every boot."""

import os
from pathlib import Path

BY_ID = Path("/dev/disk/by-id")
_BEST_FIRST = ("nvme-uuid.", "nvme-eui.", "nvme-nguid.", "wwn-")
"""Links made of what the device itself says it is. Those of a model and serial number come after
them: some makers give the same to every drive."""
_UNSTABLE_FOLDER = "by-path"
"""Links made of the slot that the device is in."""


def stable_path(path: str, folder: Path = BY_ID) -> str | None:
    """A link in `folder` that leads to this device, the best where there are several.

    None where there is none, and for a path that is a link already, which somebody chose (one that
    names a slot counts as a kernel's name).
    """
    chosen = os.path.islink(path) and Path(path).parent.name != _UNSTABLE_FOLDER
    if chosen:
        return None
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # Containers and small systems have no such folder.
        return None
    target = os.path.realpath(path)
    links = [name for name in names if os.path.realpath(folder / name) == target]
    return os.fspath(folder / min(links, key=_rank)) if links else None


def _rank(name: str) -> tuple[int, str]:
    places = [place for place, start in enumerate(_BEST_FIRST) if name.startswith(start)]
    return (places[0] if places else len(_BEST_FIRST), name)
