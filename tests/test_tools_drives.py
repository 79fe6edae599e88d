"""The commands on stores that are spread over several drives, and on those that miss one."""

import os
import shutil
from pathlib import Path

import pytest

from kvtier.tiering.config import Config
from kvtier.tiering.store_files import read_settings
from tests.command_cases import answered, as_json, kvtier, refused
from tests.drive_cases import DRIVES, bring_back, make_drives, make_long, make_store, take_away
from tests.store_cases import MIB, open_store

SIZES = (4 * MIB, 4 * MIB, 8 * MIB)


def test_format_of_several_drives(tmp_path: Path) -> None:
    paths = make_drives(tmp_path, SIZES)
    kv = tmp_path / "kv"
    assert "pass --yes" in refused("format", kv, *paths)
    assert "not both" in refused("format", kv, *paths, "--region", "4GiB", "--yes")
    assert "twice" in refused("format", kv, paths[0], paths[0], "--yes")
    assert "a path, or a list of paths" in refused("format", kv, "sda", "sdb", "--yes")
    assert not kv.exists()
    made = as_json("format", kv, *paths, "--yes")
    assert made["regions"] == paths
    assert made["carried"] == ["nothing"] * 3
    assert made["region_bytes"] == sum(SIZES)
    assert [each.path for each in read_settings(kv).regions] == paths
    text = (kv / "store.yaml").read_text()
    assert "regions:\n- path: " in text
    open_store(kv, config=Config(hot="4MiB")).close()
    message = refused("format", tmp_path / "other", *paths, "--yes")
    assert f"the region of kvtier store {made['uuid']}" in message


def test_every_path_must_be_typed(tmp_path: Path) -> None:
    paths = make_drives(tmp_path, SIZES[:2])
    done = answered(f"{paths[0]}\nno", "format", tmp_path / "kv", *paths, code=2)
    assert "nothing was written" in done.stderr
    assert not any(Path(path).read_bytes().strip(b"\0") for path in paths)
    done = answered("\n".join(paths), "format", tmp_path / "kv", *paths)
    assert f"2 regions, {8:.1f} MiB" in done.stdout
    assert all(f"region {path}" in done.stdout for path in paths)


def test_ls_and_doctor_tell_the_drives(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    found = as_json("ls", path)
    assert [each["path"] for each in found["regions"]] == [
        str(tmp_path / f"drive{number}") for number in range(DRIVES)
    ]
    assert {each["state"] for each in found["regions"]} == {"present"}
    assert sum(each["used_bytes"] for each in found["regions"]) == found["used_bytes"]
    assert not found["names"][0]["missing"]
    text = kvtier("ls", path).stdout
    assert f"{DRIVES} regions: " in text
    assert f"region 3 {tmp_path / 'drive3'}: " in text
    checks = [each for each in as_json("doctor", path)["checks"] if each["what"] == "O_DIRECT"]
    assert len(checks) == DRIVES


def test_a_store_that_misses_a_drive(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    whole = as_json("ls", path)
    take_away(tmp_path, 2)
    found = as_json("ls", path)
    assert [each["state"] for each in found["regions"]].index("missing") == 2
    assert (found["names"][0]["missing"], found["names"][0]["damaged"]) == (True, False)
    lost = [each for each in found["segments"] if not each["tiers"]]
    assert [each["drives"] for each in lost] == [[2]] * 4
    text = kvtier("ls", path).stdout
    assert f"{tmp_path / 'drive2'}: the region is missing: restore the file or device" in text
    lost_bytes = found["regions"][2]["used_bytes"]
    window_bytes = (whole["free_bytes"] + whole["used_bytes"]) // DRIVES
    assert found["free_bytes"] == whole["free_bytes"] - (window_bytes - lost_bytes)
    stated = as_json("stat", path)
    assert stated["catalog"]["missing_regions"] == [str(tmp_path / "drive2")]
    assert stated["catalog"]["free_bytes"] == found["free_bytes"]
    assert str(tmp_path / "drive2") in kvtier("stat", path).stdout
    assert "a drive of it is missing" in text
    assert text.count(" missing\n") >= 4

    checks = {each["reason"]: each["usable"] for each in as_json("doctor", path)["checks"]}
    (reason,) = [each for each in checks if each.startswith(str(tmp_path / "drive2"))]
    assert "the region is missing" in reason
    assert not checks[reason]
    assert as_json("doctor", path)["direct_io"]["path"] == str(tmp_path / "drive0")

    done = kvtier("verify", path, code=1)
    assert f"region: {tmp_path / 'drive2'}: the region is missing" in done.stdout
    assert "4 segments could not be checked: the drive is missing" in done.stdout
    assert "1 finding" in done.stdout
    assert "rm --damaged" not in done.stdout, "nothing is damaged"
    kvtier("scrub", path, code=1)

    assert "the next open tries again" in refused("rm", path, "long")
    assert as_json("ls", path)["names"] == []
    bring_back(tmp_path, 2)
    kvtier("verify", path)


@pytest.mark.parametrize("fault", ["another store's", "cut", "nearly empty", "zeros"])
def test_verify_of_a_store_with_a_wrong_drive(tmp_path: Path, fault: str) -> None:
    path = make_long(tmp_path)
    drive = tmp_path / "drive1"
    if fault == "another store's":
        (tmp_path / "other").mkdir()
        make_long(tmp_path / "other")
        shutil.copy(tmp_path / "other" / "drive1", drive)
    elif fault == "zeros":
        drive.write_bytes(bytes(4 * MIB))
    else:
        os.truncate(drive, 2 * MIB if fault == "cut" else 100)
    lines = kvtier("verify", path, code=1).stdout.splitlines()
    assert lines[-1].startswith(f"attach the right drive in place of {drive}, or restore it")
    assert not any("scrub" in each or "rm --damaged" in each for each in lines)
    assert str(drive) in refused("scrub", path)


def test_verify_of_a_store_with_one_copy_of_a_superblock_damaged(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    with open(tmp_path / "drive1", "r+b") as file:
        file.write(bytes(4096))
    last = kvtier("verify", path, code=1).stdout.splitlines()[-1]
    assert "kvtier scrub" in last, "it opens the store, which repairs the copy"


def test_doctor_without_any_drive(tmp_path: Path) -> None:
    path = make_store(tmp_path, (4 * MIB, 4 * MIB))
    for number in (0, 1):
        take_away(tmp_path, number)
    found = as_json("doctor", path)
    (choice,) = (each for each in found["choices"] if each["purpose"] == "page cache")
    assert choice["used"] == "no drive"
    assert f"({tmp_path / 'drive0'}, missing)" in kvtier("doctor", path).stdout
    assert as_json("ls", path)["free_bytes"] == 0


@pytest.mark.parametrize("named", [False, True])
def test_rebuild_of_several_drives(tmp_path: Path, named: bool) -> None:
    path = make_long(tmp_path)
    (path / "catalog.sqlite").unlink()
    options: list[str] = []
    if named:
        (path / "store.yaml").unlink()
        done = kvtier("rebuild", path, "--region", str(tmp_path / "drive0"), code=2)
        assert "region 0 of 4 of store" in done.stderr
        for number in range(DRIVES):
            options += ["--region", str(tmp_path / f"drive{number}")]
    assert as_json("rebuild", path, *options)["segments_restored"] == 16


def test_a_store_on_drives_of_other_stores(tmp_path: Path) -> None:
    """A082."""
    make_store(tmp_path, (4 * MIB, 4 * MIB))
    paths = [str(tmp_path / "drive1"), str(tmp_path / "x")]
    assert "carries the region" in refused("format", tmp_path / "new", *paths, "--yes")
    forced = refused("format", tmp_path / "new", *paths, "--yes", "--force")
    assert "does not exist" in forced
    open_store(tmp_path / "kv", config=Config(hot="4MiB")).close()
