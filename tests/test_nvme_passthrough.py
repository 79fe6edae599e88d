"""The engine nvme on an emulated drive: the kernel's character device and the drive's answers are
real there. What runs inside the machines is in `nvme_contract.py` and `nvme_cases.py`."""

from pathlib import Path
from typing import Any

import pytest

from tests.crash_log import Event
from tests.nvme_cases import (
    AFTER_FLUSH,
    AROUND_BYTES,
    BEFORE_FLUSH,
    DISCARDED_AT,
    DISCARDED_BYTES,
    FAILING_AT,
    around_the_failure,
)
from tests.nvme_guest import NAMES, tokens_named
from tests.nvme_log import read_log
from tests.nvme_machine import Drive, Machine, why_not
from tests.store_cases import MIB

pytestmark = [
    pytest.mark.nvme,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

DRIVE_BYTES = 24 * MIB
LENGTHS = {name: len(tokens_named(name)) for name in NAMES}
PROGRAM = "nvme_pytest.py"


def an_image(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(DRIVE_BYTES)
        file.seek(FAILING_AT - AROUND_BYTES // 2)
        file.write(around_the_failure().tobytes())
    return path


def check_outcomes(answer: dict[str, Any], at_least: int) -> None:
    """Every test ran and passed; none was left out."""
    assert answer["others"] == {}, "\n\n".join(map(": ".join, answer["others"].items()))
    assert len(answer["passed"]) >= at_least


def test_the_contract_and_what_is_refused(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path)
    drive = Drive(an_image(tmp_path / "drive"), 4096, metadata=an_image(tmp_path / "second"))
    answer = machine.run(drive, "nvme_contract.py", "nvme_cases.py::TestRefusals", program=PROGRAM)
    check_outcomes(answer[0], 60)


def test_a_store_is_the_same_by_both_ways(tmp_path: Path) -> None:
    """What commands wrote the block layer reads, and the other way round."""
    machine, drive = Machine.create(tmp_path), Drive(an_image(tmp_path / "drive"), 4096)
    fill, check, by_commands = machine.run(drive, "fill-nvme", "check", "check-nvme")
    assert (fill["engine"], fill["direct"]) == ("nvme_passthrough", True)
    assert (check["engine"], by_commands["engine"]) == ("io_uring", "nvme_passthrough")
    for each in (check, by_commands):
        assert each["found"] == each["lengths"] == LENGTHS
        assert (each["damaged"], each["failed"], each["verify"]) == (0, 0, [])


def test_the_contract_with_short_commands_and_what_fails(tmp_path: Path) -> None:
    """A flush of the device is one of the drive, after the writes before it: its log says so."""
    machine, log = Machine.create(tmp_path), tmp_path / "log"
    image = an_image(tmp_path / "drive")
    drive = Drive(image, 512, failing_read=FAILING_AT, log=log, mdts=2)
    answer = machine.run(drive, "nvme_contract.py", "nvme_cases.py::TestFailures", program=PROGRAM)
    check_outcomes(answer[0], 60)
    marked: list[str] = []
    discarded = False
    for event in read_log(log, DRIVE_BYTES):
        assert isinstance(event, Event), "there are no marks of a catalog here"
        for name, mark in (("before", BEFORE_FLUSH), ("after", AFTER_FLUSH)):
            if event.kind == "write" and event.data.startswith(mark):
                assert len(event.data) <= 16 << 10
                marked.append(name)
        if event.kind == "sync" and marked:
            marked.append("flush")
        place = (event.kind, event.offset, event.length)
        discarded |= place == ("zero", DISCARDED_AT, DISCARDED_BYTES)
    assert marked[:5] == ["before", "before", "flush", "after", "after"]
    assert discarded
