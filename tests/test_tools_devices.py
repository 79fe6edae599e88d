"""The command kvtier devices: finds the device of a store whatever its name is now."""

from pathlib import Path

import pytest

from kvtier.io.device_view import DeviceView
from kvtier.io.superblock import Superblock
from kvtier.tiering.config import Config
from kvtier.tiering.maintenance import make_store
from kvtier.tools.devices import devices_text, to_dict
from tests.command_cases import as_json, heavy_modules, kvtier
from tests.conftest import LoopMaker
from tests.region_cases import STORE, make_file_system

MIB = 1 << 20


def test_what_is_shown_of_each() -> None:
    root = Superblock(STORE, 1_600_000_000, 1 << 30, 4096)
    views = [
        DeviceView("/dev/nvme0n1", "/dev/disk/by-id/wwn-1", nbytes=1 << 30, superblock=root),
        DeviceView("/dev/sda", nbytes=1 << 20, foreign="ext4 file system", in_use="mounted on /"),
        DeviceView("/dev/sdb", nbytes=1 << 20, problem="cannot read it: Operation not permitted"),
        DeviceView("/dev/sdc", nbytes=1 << 20),
    ]
    rows = to_dict(views)["devices"]
    assert [row["store_uuid"] for row in rows] == [STORE, None, None, None]
    assert rows[0]["store_created"] == "2020-09-13T12:26:40Z"
    assert rows[0]["content"] == (
        f"the region of kvtier store {STORE}, created 2020-09-13 12:26:40 UTC"
    )
    assert [row["content"] for row in rows[1:]] == [
        "ext4 file system",
        "unreadable: cannot read it: Operation not permitted",
        "nothing",
    ]
    text = devices_text(views)
    for words in ("/dev/disk/by-id/wwn-1", "mounted on /", STORE, "1.0 GiB"):
        assert words in text
    assert "no block device" in devices_text([])


@pytest.mark.loop
def test_a_store_is_found_by_its_uuid(loop_device: LoopMaker, tmp_path: Path) -> None:
    """A080: names swapped; which device is the store's?"""
    devices = [loop_device(16 * MIB, 512) for _ in range(3)]
    made = [make_store(tmp_path / f"{i}", Config(devices[i])).store_uuid for i in range(2)]
    make_file_system(devices[2])
    before = [Path(each).read_bytes() for each in devices]
    found = {row["path"]: row for row in as_json("devices")["devices"]}
    assert [found[each]["store_uuid"] for each in devices] == [*made, None]
    assert found[devices[2]]["content"] == "ext4 file system"
    assert found[devices[0]]["bytes"] == 16 * MIB
    assert found[devices[0]]["block_bytes"] == 512
    assert [Path(each).read_bytes() for each in devices] == before
    text = kvtier("devices").stdout
    assert all(each in text for each in (*devices, *made))


def test_it_loads_no_torch() -> None:
    assert heavy_modules("devices") == "[]"
