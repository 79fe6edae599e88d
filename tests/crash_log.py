"""One order of everything that a store does to its files, its region and its catalog.

Files are recorded where Python calls the operating system, the region by a simulated device, and
the catalog's database by `crash_vfs.py`. `crash_images.py` makes of it what a crash could leave.

Invariants:
- An event is noted after it happened, so what a position holds is what had been asked for by then.
- A sync whose call site is `removed` is not noted: for the images it never happened.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from kvtier.io.simulated_log import SimulatedOperation
from kvtier.io.simulated_medium import Medium
from tests.late_writes import LateWrites

Kind = Literal[
    "write", "zero", "resize", "rot", "sync",
    "make directory", "create", "rename", "delete", "sync directory",
    "begin", "end",
]  # fmt: skip
ROOMS = ("io", "tiering", "tools", "kvtier")
ON_BEHALF = {"durability", "simulated", "raw_device", "drives"}
"""Modules whose functions sync on behalf of the caller that counts as the call site."""
REGION = "region.kv"


@dataclass(frozen=True, slots=True)
class Event:
    """path, target: relative to the root. offset, length: bytes. `begin` and `end` of a step have
    its number as their offset. rot: bytes that changed by themselves. A directory is synced for the
    entry `target` alone, if one is given."""

    kind: Kind
    path: str = ""
    offset: int = 0
    length: int = 0
    data: bytes = b""
    target: str = ""


@dataclass(slots=True)
class CrashLog:
    """Events below `root`, and how often each call site asked for a sync."""

    root: Path
    removed: str | None = None
    events: list[Event] = field(default_factory=list)
    sites: Counter[str] = field(default_factory=Counter)

    def relative(self, path: object) -> str | None:
        """The path below the root, or None if it lies elsewhere."""
        if not isinstance(path, str | os.PathLike):
            return None
        text, root = os.path.abspath(os.fspath(path)), os.fspath(self.root)
        return text.removeprefix(f"{root}/") if str(text).startswith(f"{root}/") else None

    def note(self, event: Event) -> None:
        self.events.append(event)

    def sync(self, event: Event, site: str) -> bool:
        """Note a sync, unless its call site is the removed one. Returns whether it happened."""
        self.sites[site] += 1
        if site == self.removed:
            return False
        self.events.append(event)
        return True


def call_site(what: str) -> str:
    """`what` and the function of kvtier that asks for it, by file, name and place in the file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent.name in ROOMS and path.stem not in ON_BEHALF:
            # Lines are counted from the function's first, so that edits above it rename nothing.
            line = frame.f_lineno - frame.f_code.co_firstlineno
            return f"{what} in {path.stem}.{frame.f_code.co_name}+{line}"
        frame = frame.f_back
    return f"{what} outside kvtier"


class RecordingDevice(LateWrites):
    """A region whose writes, discards and flushes go into the log. Made by `recording_device`.

    Every second write that is started lands at once, the others when they are waited for: between
    these two moments a real one may land, and the images of a crash show it on either side.
    """

    log_of_all: CrashLog
    log_path: str
    held = staticmethod(lambda number: number % 2 == 1)

    def flush(self) -> None:
        super().flush()
        self.log_of_all.sync(Event("sync", self.log_path), call_site("flush"))

    def _note(self, operation: SimulatedOperation) -> None:
        super()._note(operation)
        if operation.kind == "write":
            self._event(Event("write", self.log_path, operation.offset, data=operation.data))
        elif operation.kind == "discard":
            self._event(Event("zero", self.log_path, operation.offset, operation.length))

    def _event(self, event: Event) -> None:
        self.log_of_all.note(event)


def recording_device(log: CrashLog, path: str, medium: Medium, nbytes: int) -> RecordingDevice:
    """A device on `medium` that stands for the file at `path`."""
    device = RecordingDevice.open(nbytes, path=path)
    device._medium = medium
    relative = log.relative(path)
    assert relative is not None
    device.log_of_all, device.log_path = log, relative
    return device


class _Files:
    """What stands in for functions of `os`. The files' bytes are read back when it matters."""

    def __init__(self, log: CrashLog) -> None:
        self.log = log
        self._contents: dict[str, bytes] = {}

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        relative = self.log.relative(path)
        is_new = relative is not None and not os.path.lexists(path)
        descriptor = _real["open"](path, flags, mode, dir_fd=dir_fd)
        if relative is not None and is_new:
            self._contents[relative] = b""
            self.log.note(Event("create", relative))
        elif relative is not None and flags & os.O_TRUNC:
            self._contents[relative] = b""
            self.log.note(Event("resize", relative))
        return int(descriptor)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        _real["mkdir"](path, mode, dir_fd=dir_fd)
        relative = self.log.relative(path)
        if relative is not None:
            self.log.note(Event("make directory", relative))

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        _real["fsync"](descriptor)
        relative = "" if path == os.fspath(self.log.root) else self.log.relative(path)
        if relative is None:
            return
        if os.path.isdir(path):
            self.log.sync(Event("sync directory", relative), call_site("sync directory"))
        else:
            self._note_contents(relative)
            self.log.sync(Event("sync", relative), call_site("fsync"))

    def rename(self, source: Any, target: Any) -> None:
        names = self.log.relative(source), self.log.relative(target)
        if names[0] is not None:
            self._note_contents(names[0])
        _real["rename"](source, target)
        if names[0] is not None and names[1] is not None:
            self.log.note(Event("rename", names[0], target=names[1]))
            self._contents[names[1]] = self._contents.pop(names[0], b"")

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        _real["unlink"](path, dir_fd=dir_fd)
        relative = self.log.relative(path)
        if relative is not None:
            self.log.note(Event("delete", relative))

    def _note_contents(self, relative: str) -> None:
        """What was written since, as one write. The database and the region note their own."""
        path = self.log.root / relative
        if ".sqlite" in relative:
            return
        if path.name == REGION:
            self.log.note(Event("resize", relative, length=path.stat().st_size))
            return
        data = path.read_bytes()
        if data != self._contents.get(relative):
            self._contents[relative] = data
            self.log.note(Event("write", relative, data=data))


_real: dict[str, Any] = {
    name: getattr(os, name) for name in ("open", "mkdir", "fsync", "rename", "unlink")
}


@contextmanager
def recorded_files(log: CrashLog) -> Iterator[None]:
    """Within the block, what Python does to files below the root is noted."""
    files = _Files(log)
    with ExitStack() as stack:
        for name in _real:
            stack.enter_context(mock.patch.object(os, name, getattr(files, name)))
        stack.enter_context(mock.patch.object(os, "fdatasync", files.fsync))
        stack.enter_context(mock.patch.object(os, "replace", files.rename))
        stack.enter_context(mock.patch.object(os, "remove", files.unlink))
        yield
