"""What a device carries and who uses it, in words."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.io.device_view import DeviceView


def content_text(view: "DeviceView") -> str:
    """Its content: "nothing", a file system, the region of a store with UUID and date."""
    if view.problem is not None:
        return f"unreadable: {view.problem}"
    parts = []
    if view.foreign is not None:
        parts.append(view.foreign)
    if view.superblock is not None:
        created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(view.superblock.created))
        parts.append(f"the region of kvtier store {view.superblock.store_uuid}, created {created}")
    if view.other_version is not None:
        parts.append(f"a kvtier region of another format version ({view.other_version})")
    return ", and ".join(parts) or "nothing"
