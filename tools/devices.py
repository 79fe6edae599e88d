"""The command `kvtier devices`: every block device and the kvtier store on it; never writes."""

import time
from typing import Any

from kvtier.io.device_view import DeviceView, block_devices
from kvtier.tools.device_text import content_text
from kvtier.tools.text_table import human_bytes, table


def to_dict(views: list[DeviceView]) -> dict[str, Any]:
    """For programs: sizes in bytes, `content` in words."""
    return {"devices": [_row(view) for view in views]}


def _row(view: DeviceView) -> dict[str, Any]:
    root = view.superblock
    return {
        "path": view.path,
        "stable_path": view.stable_path,
        "bytes": view.nbytes,
        "block_bytes": view.block_bytes,
        "content": content_text(view),
        "store_uuid": None if root is None else root.store_uuid,
        "store_created": None
        if root is None
        else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(root.created)),
        "in_use": view.in_use,
        "read_only": view.read_only,
        "problem": view.problem,
    }


def devices_text(views: list[DeviceView], line_width: int | None = None) -> str:
    """line_width: of the terminal."""
    if not views:
        return "no block device of any size is visible here"
    rows = [
        (
            view.path,
            human_bytes(view.nbytes),
            view.block_bytes,
            view.in_use or "",
            view.stable_path or "",
            content_text(view),
        )
        for view in views
    ]
    return table(("device", "size", "block", "in use", "stable name", "content"), rows, line_width)


def find() -> list[DeviceView]:
    """Every block device of this machine that has a size."""
    return block_devices()
