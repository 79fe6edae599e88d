"""The command kvtier format: what it shows, whom it asks, and what it never overwrites."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvtier.io.rawfile import create_region_file
from kvtier.io.stable_path import stable_path
from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tiering.maintenance import make_store
from kvtier.tiering.opening import open_files
from kvtier.tiering.store_files import read_settings
from tests.command_cases import (
    ANSWER_S_MAX,
    answered,
    as_json,
    at_a_terminal,
    heavy_modules,
    kvtier,
    processor_s,
    refused,
)
from tests.conftest import LoopMaker
from tests.region_cases import REGION_BYTES, make_file_system, write_gpt

MIB = 1 << 20
NOBODY = 65534


@pytest.fixture
def region(tmp_path: Path) -> str:
    """A file that stands for a device."""
    name = str(tmp_path / "region")
    create_region_file(name, REGION_BYTES)
    return name


def test_a_region_inside_the_store_needs_no_answer(tmp_path: Path) -> None:
    made = as_json("format", tmp_path / "kv", "--region", "16MiB")
    assert made["region_bytes"] == 16 * MIB
    assert made["carried"] == []
    assert describe(tmp_path / "kv").uuid == made["uuid"]
    message = refused("format", tmp_path / "kv", "--region", "16MiB", "--force", "--yes")
    assert f"store already, {made['uuid']}" in message


def test_the_path_must_be_typed(tmp_path: Path, region: str) -> None:
    for wrong in ("y", "yes", region[:-1], ""):
        done = answered(wrong, "format", tmp_path / "kv", "--region", region, code=2)
        assert "nothing was written" in done.stderr
        assert "4.0 MiB in blocks of 512 bytes, carries nothing, in use by nobody" in done.stderr
    assert not (tmp_path / "kv").exists()
    assert not Path(region).read_bytes().strip(b"\0")
    done = at_a_terminal(region, "format", tmp_path / "kv", "--region", region)
    assert f"region {region}: 4.0 MiB" in done.stdout
    assert describe(tmp_path / "kv").regions[0].path == region


def test_scripts_say_yes(tmp_path: Path, region: str) -> None:
    assert "pass --yes" in refused("format", tmp_path / "kv", "--region", region)
    assert not (tmp_path / "kv").exists()
    assert as_json("format", tmp_path / "kv", "--region", region, "--yes")["carried"] == ["nothing"]


@pytest.mark.parametrize("make", [make_file_system, write_gpt])
def test_foreign_data_needs_force_and_an_answer(make: object, tmp_path: Path, region: str) -> None:
    """A081, A082: a copied command overwrote a disk that had data."""
    assert callable(make)
    make(region)
    before = Path(region).read_bytes()
    kv = tmp_path / "kv"
    for options in ([], ["--yes"]):
        message = refused("format", kv, "--region", region, *options)
        assert "carries " in message
        assert "--force" in message
    assert "--yes" in refused("format", kv, "--region", region, "--force")
    answered("y", "format", kv, "--region", region, "--force", code=2)
    assert Path(region).read_bytes() == before
    assert not kv.exists()
    done = answered(region, "format", kv, "--region", region, "--force")
    assert "it carried " in done.stdout
    assert describe(kv).regions[0].path == region


def test_forced_by_a_script(tmp_path: Path, region: str) -> None:
    """A082: a head of random bytes is data."""
    Path(region).write_bytes(os.urandom(MIB) + bytes(REGION_BYTES - MIB))
    assert "unknown data" in refused("format", tmp_path / "kv", "--region", region, "--yes")
    made = as_json("format", tmp_path / "kv", "--region", region, "--yes", "--force")
    assert made["carried"] == ["unknown data in the first 1 MiB"]


def test_the_region_of_another_store_is_named_with_its_date(tmp_path: Path, region: str) -> None:
    """A082: a second format of the same region."""
    first = as_json("format", tmp_path / "one", "--region", region, "--yes")
    message = refused("format", tmp_path / "two", "--region", region, "--yes")
    assert f"the region of kvtier store {first['uuid']}, created 20" in message
    assert not (tmp_path / "two").exists()
    with closing(open_files(tmp_path / "one", Config())) as files:
        message = refused("format", tmp_path / "two", "--region", region, "--yes", "--force")
        assert "open for writing already" in message
        assert files.settings.store_uuid == first["uuid"]
    second = as_json("format", tmp_path / "two", "--region", region, "--yes", "--force")
    assert second["uuid"] != first["uuid"]


def test_what_is_no_region(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", Path("/dev/null")):
        assert str(path) in refused("format", tmp_path / "kv", "--region", path, "--yes")
    assert not (tmp_path / "kv").exists()
    assert "region must be" in refused("format", tmp_path / "kv", "--region", "12")


@pytest.mark.loop
def test_a_device_with_a_mounted_partition(loop_device: LoopMaker, tmp_path: Path) -> None:
    """A081: a mount check missed a mounted partition of the whole disk."""
    device = loop_device(16 * MIB, 512)
    try:
        subprocess.run(["addpart", device, "1", "2048", "16384"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no partitions here: {error}")
    point = tmp_path / "mounted"
    point.mkdir()
    try:
        make_file_system(f"{device}p1")
        subprocess.run(["mount", f"{device}p1", str(point)], check=True)
        try:
            for target in (device, f"{device}p1"):
                words = ("--region", target, "--force")
                message = refused("format", tmp_path / "kv", *words, "--yes")
                assert f"mounted on {point}" in message
                assert "forced or not" in message
                answered(target, "format", tmp_path / "kv", *words, code=2)
            rows = {each["path"]: each for each in as_json("devices")["devices"]}
            assert rows[f"{device}p1"]["in_use"] == f"mounted on {point}"
            assert f"mounted on {point}" in rows[device]["in_use"]
        finally:
            subprocess.run(["umount", str(point)], check=True)
    finally:
        subprocess.run(["delpart", device, "1"], check=True)
    assert not (tmp_path / "kv").exists()


@pytest.mark.loop
def test_a_device_held_by_another_device(loop_device: LoopMaker, tmp_path: Path) -> None:
    """A081: held by device-mapper."""
    device, name = loop_device(16 * MIB, 512), f"kvtier-test-{os.getpid()}"
    table = f"0 16384 linear {device} 0"
    try:
        subprocess.run(
            ["dmsetup", "create", name, "--table", table], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no device-mapper here: {error}")
    try:
        message = refused("format", tmp_path / "kv", "--region", device, "--force", "--yes")
        assert "held by dm-" in message
    finally:
        subprocess.run(["dmsetup", "remove", name], check=True)


@pytest.mark.loop
@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_a_device(block_bytes: int, loop_device: LoopMaker, tmp_path: Path) -> None:
    device = loop_device(16 * MIB, block_bytes)
    make_file_system(device)
    kv = tmp_path / "kv"
    assert "ext4 file system" in refused("format", kv, "--region", device, "--yes")
    done = answered(device, "format", kv, "--region", device, "--force")
    assert f"in blocks of {block_bytes} bytes" in done.stderr
    assert describe(kv).regions[0].path == device
    assert "ext4" not in kvtier("devices").stdout.split(device)[1].splitlines()[0]


@pytest.mark.loop
def test_a_device_that_may_not_be_written_to(loop_device: LoopMaker, tmp_path: Path) -> None:
    """A083: refused with the reason, and nothing is made."""
    device = loop_device(16 * MIB, 512)
    subprocess.run(["blockdev", "--setro", device], check=True)
    try:
        message = refused("format", tmp_path / "kv", "--region", device, "--yes")
    finally:
        subprocess.run(["blockdev", "--setrw", device], check=True)
    assert f"{device} is read-only" in message
    assert not (tmp_path / "kv").exists()


@contextmanager
def as_nobody() -> Iterator[None]:
    """This process without root's rights for the length of the block."""
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups([NOBODY])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


@pytest.mark.loop
@pytest.mark.parametrize("mode", [0o660, 0o664])
def test_a_user_without_permission(mode: int, loop_device: LoopMaker, tmp_path: Path) -> None:
    """A083: which permission is missing, of whom, and nothing is made."""
    device = loop_device(16 * MIB, 512)
    # Everything is imported before: nobody may not read where the interpreter lies.
    kvtier("format", tmp_path / "kv", "--region", "16MiB")
    # Not tmp_path: nobody else may enter a folder above it.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        os.chmod(device, mode)
        try:
            with as_nobody():
                message = refused("format", f"{folder}/kv", "--region", device, "--yes")
        finally:
            os.chmod(device, 0o600)
        assert os.listdir(folder) == []
    missing = "read" if mode == 0o660 else "write"
    assert f"no permission to {missing} {device}: it belongs to uid 0 (root), gid 0" in message
    assert oct(mode) in message
    assert f"uid {NOBODY} and groups [{NOBODY}]" in message


@pytest.mark.loop
def test_a_device_is_named_by_what_stays_with_it(
    loop_device: LoopMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A080: kernel names swap at a boot."""
    device, folder = loop_device(16 * MIB, 512), tmp_path / "by-id"
    folder.mkdir()
    link = folder / "nvme-uuid.1111"
    link.symlink_to(device)
    named = partial(stable_path, folder=folder)
    monkeypatch.setattr("kvtier.tiering.opening.stable_path", named)
    make_store(tmp_path / "kv", Config(device))
    assert read_settings(tmp_path / "kv").regions[0].path == str(link)
    # Either name is the same device.
    open_files(tmp_path / "kv", Config(device)).close()
    other = loop_device(16 * MIB, 512)
    link.unlink()
    link.symlink_to(other)
    assert "no kvtier superblock" in refused("unhold", tmp_path / "kv", "--all")


def test_it_answers_at_once(tmp_path: Path) -> None:
    assert heavy_modules("format", tmp_path / "kv", "--region", "16MiB") == "[]"
    paths = iter(range(3))
    used = min(
        processor_s("format", tmp_path / f"{each}", "--region", "16MiB", runs=1) for each in paths
    )
    assert used <= ANSWER_S_MAX
