"""What runs inside the virtual machine of `nvme_machine.py`: a store on its NVMe drive.

`python nvme_guest.py STEP ...` does one or several steps in turn, and prints one line of JSON for
each; `save` prints one for every name that is acknowledged, and goes on until the power is cut.
"""

import json
import mmap
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from kvtier.io.catalog import Catalog, unpack_extents
from kvtier.io.device import Buffers, Device, Int64Array
from kvtier.io.probe import Engine
from kvtier.io.rawfile import DirectMode
from kvtier.io.uring import UringDevice
from kvtier.tiering import opening
from kvtier.tiering.config import Config
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.nvme_kernel import DISK, DRIVE, SCRATCH, SHARE
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_everywhere,
    check_settled,
    open_store,
    put,
)
from tests.store_worker import save_until_killed, tokens_of

STORE = Path(DISK) / "store"
CATALOG = STORE / "catalog.sqlite"
SEED = 700
NAMES = [f"n{number}" for number in range(6)]
"""Odd ones hang below the even ones before them."""
REMOVED = {"n2": ["n1"], "n3": ["n0", "n2"]}
"""What `log` removes after it saved a name."""
OF_M = KV(PLAIN)


def say(message: object) -> None:
    print(json.dumps(message), flush=True)


def opened(engine: Engine = "auto") -> Store:
    """The store on the drive; made if there is none."""
    config = Config(DRIVE, hot=4 * MIB, direct_io="required", engine=engine)
    return open_store(STORE, PLAIN, config)


def tokens_named(name: str) -> list[int]:
    return tokens_of(SEED, int(name[1:]))


def save_one(store: Store, name: str) -> None:
    put(store, OF_M, name, tokens_named(name), pieces=400)


def resumed(store: Store, name: str) -> int:
    """How many of a name's tokens the store has; an assertion if any bytes are others."""
    tokens = tokens_named(name)
    sequence = store.resume([*tokens, 1])
    found = sequence.length()
    if found:
        check_bytes(store, OF_M, sequence, tokens[:found])
        check_everywhere(store, OF_M, sequence, tokens[:found])
    store.release(sequence)
    return found


def segments() -> list[dict[str, Any]]:
    """Segments as the catalog has them, with the Extent of each layer."""
    with Catalog.open(CATALOG, read_only=True) as catalog:
        return [
            {
                "id": row.id,
                "tokens": row.token_count,
                "start": row.start_position,
                "parent": row.parent_id,
                "extents": [(each.offset, each.length) for each in unpack_extents(row.extents)],
            }
            for row in catalog.segments()
        ]


# ---- steps ------------------------------------------------------------------------------------


def fill(engine: Engine = "auto") -> dict[str, Any]:
    """Make a store on the drive, and save all names."""
    with opened(engine) as store:
        for name in NAMES:
            save_one(store, name)
        check_settled(store, STORE)
        stats = store.stats()
        held = {row.name: row.segment_id for row in store.names()}
    return {
        "engine": stats.engine,
        "direct": stats.direct_io,
        "bytes": stats.device_bytes,
        "names": held,
        "segments": segments(),
    }


def check(engine: Engine = "auto") -> dict[str, Any]:
    """Resume every name that the store lists, and verify it all."""
    with opened(engine) as store:
        listed = [row.name for row in store.names()]
        found = {each: resumed(store, each) for each in listed}
        stats = store.stats()
    return {
        "engine": stats.engine,
        "lengths": {each: len(tokens_named(each)) for each in listed},
        "found": found,
        "bytes": stats.device_bytes,
        "damaged": stats.damaged_extents,
        "failed": stats.failed_reads,
        "verify": [(each.kind, each.where, each.what) for each in verify(STORE).findings],
    }


def again() -> dict[str, int]:
    """Save every name anew, beside what cannot be read, and resume it; the lengths found."""
    with opened() as store:
        found = {}
        for name in NAMES:
            resumed(store, name)
            save_one(store, name)
            found[name] = resumed(store, name)
    return found


def doctor() -> dict[str, Any]:
    """What kvtier says about the drive, and what the kernel does."""
    command = [sys.executable, "-m", "kvtier", "doctor", "--device", DRIVE, "--json"]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    queue = Path("/sys/block") / Path(DRIVE).name / "queue"
    settings = ("write_cache", "logical_block_size")
    return {
        "doctor": json.loads(found.stdout),
        "kernel": {each: (queue / each).read_text().strip() for each in settings},
    }


def save() -> None:
    """Save name after name, and say each one, until the power is cut."""
    opened().close()
    save_until_killed(STORE, SEED, say)


class Watched(UringDevice):
    """Before each write and flush, a mark says what the catalog names at that moment."""

    look: ClassVar[Callable[[], None]]

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        type(self).look()
        super().write(offsets, buffers)

    def flush(self) -> None:
        type(self).look()
        super().flush()


class Marks:
    """Numbered sectors in QEMU's log, each with a copy of the catalog at that moment.

    They are written behind the region, to a sector that the grid leaves over.
    """

    def __init__(self, catalog: Path) -> None:
        self._catalog = catalog
        self._reading: sqlite3.Connection | None = None
        self._version = -1
        self._count = 0
        self._fd = os.open(DRIVE, os.O_RDWR | os.O_DIRECT)
        capacity = os.lseek(self._fd, 0, os.SEEK_END)
        assert capacity % 4096, "the grid leaves no sector over"
        self._offset = capacity - 512
        self._memory = mmap.mmap(-1, 4096)

    def look(self) -> None:
        """Make a mark if the catalog of a store that was made changed since the last one."""
        made = self._catalog.with_name("store.yaml").exists()
        if made and self._current() != self._version:
            self.make([])

    def _current(self) -> int:
        """Counts the commits of other connections, and so the store's."""
        if self._reading is None:
            self._reading = sqlite3.connect(f"file:{self._catalog}?mode=ro", uri=True)
        return int(self._reading.execute("PRAGMA data_version").fetchone()[0])

    def make(self, acknowledged: list[str]) -> None:
        """A mark. acknowledged: the names that must be there now, or [] in the middle of a call."""
        self._version = self._current()
        assert self._reading is not None
        self._count += 1
        copy = Path(SCRATCH) / "copy"
        copy.unlink(missing_ok=True)
        target = sqlite3.connect(copy)
        self._reading.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")
        target.close()
        folder = Path(SHARE) / "marks"
        folder.mkdir(exist_ok=True)
        shutil.copyfile(copy, folder / f"{self._count}.sqlite")
        (folder / f"{self._count}.json").write_text(json.dumps(acknowledged))
        self._memory[:512] = (b"KVTMARK\0" + self._count.to_bytes(8, "little")).ljust(512, b"\0")
        assert os.pwritev(self._fd, [memoryview(self._memory)[:512]], self._offset) == 512


def log() -> dict[str, Any]:
    """Make a store, save to it and remove from it, with marks in the log of the drive's writes."""
    marks = Marks(CATALOG)
    Watched.look = marks.look

    def open_watched(path: str, *, engine: str, direct: DirectMode) -> Device:
        return Watched.open(path, direct=direct)

    with mock.patch.object(opening, "open_device", open_watched), opened() as store:
        for name in NAMES:
            save_one(store, name)
            marks.make([row.name for row in store.names()])
            # What is saved next takes the place of what was removed.
            for removed in REMOVED.get(name, ()):
                store.remove(removed)
                marks.make([row.name for row in store.names()])
        held = {row.name: row.token_count for row in store.names()}
    shutil.copyfile(STORE / "store.yaml", Path(SHARE) / "store.yaml")
    return {"names": held}


STEPS: dict[str, Callable[[], object]] = {
    "fill": fill,
    "check": check,
    "fill-nvme": partial(fill, "nvme"),
    "check-nvme": partial(check, "nvme"),
    "again": again,
    "doctor": doctor,
    "save": save,
    "log": log,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for step in sys.argv[1:]:
        say(STEPS[step]())
