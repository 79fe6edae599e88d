"""A store on an emulated NVMe drive: restart, a block that cannot be read, power cuts, lost caches.

The engine, the kernel's NVMe driver and the drive's own error codes are real; only the drive is
emulated. A machine takes a minute or two to start Python and torch, so every boot does much.
"""

import itertools
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.crash_images import Image, Media, keep_all, lose_all
from tests.crash_log import REGION, Event
from tests.nvme_guest import NAMES, tokens_named
from tests.nvme_kernel import DRIVE
from tests.nvme_log import Replay, drawn, read_log
from tests.nvme_machine import Drive, Guest, Machine, why_not
from tests.store_cases import MIB

pytestmark = [
    pytest.mark.nvme,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.usefixtures("one_thread"),
]

DRIVE_BYTES, LOGGED_BYTES = 32 * MIB, 4 * MIB
FLUSH = Event("sync", REGION)
LENGTHS = {name: len(tokens_named(name)) for name in NAMES}


def a_drive(folder: Path, block_bytes: int, nbytes: int = DRIVE_BYTES) -> Drive:
    image = folder / "drive"
    with image.open("wb") as file:
        file.truncate(nbytes)
    return Drive(image, block_bytes)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, Drive, list[Any]]:
    """A machine whose drive of 4096-byte blocks holds a closed store, and what it said."""
    folder = tmp_path_factory.mktemp("filled")
    machine, drive = Machine.create(folder), a_drive(folder, 4096)
    return machine, drive, machine.run(drive, "fill", "doctor")


def test_the_guest_uses_the_drive_as_told(filled: tuple[Machine, Drive, list[Any]]) -> None:
    """Past the page cache, by io_uring, with the drive's volatile cache on."""
    _, drive, (fill, found) = filled
    assert (fill["engine"], fill["direct"]) == ("io_uring", True)
    assert sorted(fill["names"]) == sorted(NAMES)
    assert drive.image.read_bytes()[:8] == b"KVTIERSB"
    assert found["kernel"] == {"write_cache": "write back", "logical_block_size": "4096"}
    doctor = found["doctor"]
    assert (doctor["direct_io"]["path"], doctor["direct_io"]["block_bytes"]) == (DRIVE, 4096)
    used = {each["purpose"]: each["used"] for each in doctor["choices"]}
    assert (used["reads and writes"], used["page cache"]) == ("io_uring", "bypassed")
    passthrough = next(each for each in doctor["checks"] if each["what"] == "nvme")
    assert passthrough["usable"], "it may be asked for, though it is not taken"
    assert "/dev/ng0n1" in passthrough["reason"]


def test_everything_is_there_after_a_restart(
    tmp_path: Path, filled: tuple[Machine, Drive, list[Any]]
) -> None:
    machine, drive, (fill, _) = filled
    machine = machine.copy(tmp_path / "machine")
    (check,) = machine.run(drive, "check")
    assert check["found"] == check["lengths"] == LENGTHS
    assert check["bytes"] == fill["bytes"]
    assert (check["damaged"], check["failed"], check["verify"]) == (0, 0, [])


def test_a_block_that_cannot_be_read_is_a_miss(
    tmp_path: Path, filled: tuple[Machine, Drive, list[Any]]
) -> None:
    """The kernel reports ENODATA for the sector and for every larger read that spans it.

    It may also send requests of one batch that lie side by side as one, and lets all of them fail.
    """
    machine, drive, (fill, _) = filled
    struck = next(row for row in fill["segments"] if row["id"] == fill["names"]["n2"])
    assert struck["start"] == 512
    offset, length = struck["extents"][1]
    machine = machine.copy(tmp_path / "machine")
    image = tmp_path / "drive"
    shutil.copy(drive.image, image)
    bad = offset + length // 2 // 4096 * 4096
    drive = Drive(image, 4096, failing_read=bad)
    check, again = machine.run(drive, "check", "again")
    # All but 20 tokens of n2 are also those of n3, which has a Segment of its own for them.
    assert check["found"] == {**LENGTHS, "n2": LENGTHS["n2"] - 20}
    assert check["failed"] == 1
    assert check["damaged"] == 0
    ((kind, where, what),) = check["verify"]
    assert kind == "media"
    assert where.startswith(f"segment {struck['id']}, layer 1, byte {offset} ")
    assert what.startswith("1 pieces of 4096 bytes cannot be read (No data available)")
    assert what.endswith(f"byte {bad} (block {bad // 4096})")
    # Saved anew, elsewhere on the drive, everything is there again.
    assert again == LENGTHS


def check_after_cut(check: Any, acknowledged: set[str]) -> None:
    """What was said to be saved is there; the name that was being saved is whole, or not there."""
    assert acknowledged <= set(check["found"])
    assert len(check["found"]) <= len(acknowledged) + 1
    assert check["found"] == check["lengths"]
    assert (check["damaged"], check["failed"], check["verify"]) == (0, 0, [])


def names_until_cut(guest: Guest, names: int, choose: random.Random) -> list[str]:
    """Cut the power some time after so many names were acknowledged; all that were."""
    said = [next(messages := guest.messages())]
    assert said == ["ready"]
    said += itertools.islice(messages, names)
    time.sleep(choose.uniform(0.0, 1.0))
    return [*said[1:], *guest.cut_power()]


def test_what_was_acknowledged_survives_a_power_cut(tmp_path: Path) -> None:
    """Two cuts during saves, the second one in a store that had one before; blocks of 512 bytes."""
    choose = random.Random(5)
    machine, drive = Machine.create(tmp_path), a_drive(tmp_path, 512)
    acknowledged: set[str] = set()
    for steps in (["save"], ["check", "save"], ["check"]):
        with machine.boot(drive, *steps) as guest:
            if "check" in steps:
                check_after_cut(next(guest.messages()), acknowledged)
            if "save" in steps:
                acknowledged |= set(names_until_cut(guest, len(acknowledged) + 5, choose))
            else:
                guest.finish()
    assert len(acknowledged) >= 10


def test_nothing_is_lost_with_the_cache_of_the_drive(tmp_path: Path) -> None:
    """QEMU's log shows which writes a flush of the drive covered; the rest may be lost or torn.

    Without the flush before it, the check finds that what a commit names is lost.
    """
    machine = Machine.create(tmp_path)
    # The grid leaves a sector over, for the marks.
    plain = a_drive(tmp_path, 512, LOGGED_BYTES + 512)
    drive = Drive(plain.image, 512, log=tmp_path / "log")
    machine.run(drive, "log")
    events = list(read_log(tmp_path / "log", LOGGED_BYTES))
    start = Image({REGION: bytes(LOGGED_BYTES)}, frozenset())

    media = Media(start)
    replay = Replay(tmp_path / "replay", machine.share, tokens_named)
    replay.explore(events, media, seed=1)
    assert replay.violations == []
    assert replay.flushes > len(NAMES)
    assert replay.images > 200
    # The log is complete: played to its end, it is the drive.
    last = drawn(media, random.Random(1), keep_all)
    assert last == plain.image.read_bytes()[:LOGGED_BYTES]

    caught = 0
    for at in [at for at, event in enumerate(events) if event == FLUSH]:
        without = Replay(tmp_path / "replay", machine.share, tokens_named, [lose_all])
        without.explore(events[:at] + events[at + 1 :], Media(start), seed=1)
        caught += bool(without.violations)
    # The first flush is for other programs' signatures, the last one protects nothing new.
    assert caught > len(NAMES)
