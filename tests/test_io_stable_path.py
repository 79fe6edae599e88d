"""Names of devices that stay: the best link is chosen, and what somebody chose is left alone."""

from pathlib import Path

import pytest

from kvtier.io.stable_path import stable_path


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "nvme0n1"
    path.touch()
    (tmp_path / "nvme1n1").touch()
    (tmp_path / "by-id").mkdir()
    return path


def link(device: Path, *names: str) -> Path:
    """Links to the device as udev makes them: relative ones. Returns their folder."""
    folder = device.parent / "by-id"
    for name in names:
        (folder / name).symlink_to(Path("..") / device.name)
    return folder


LINKS = ("ata-MAKER_SERIAL", "nvme-MAKER_SERIAL", "wwn-0x5000", "nvme-eui.0025", "nvme-uuid.1111")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_the_best_link_is_chosen(count: int, device: Path) -> None:
    folder = link(device, *LINKS[:count])
    best = ["ata-MAKER_SERIAL", "ata-MAKER_SERIAL", *LINKS[2:]][count - 1]
    assert stable_path(str(device), folder) == f"{folder}/{best}"


def test_links_of_others_do_not_count(device: Path) -> None:
    folder = link(device.parent / "nvme1n1", "nvme-uuid.1111")
    assert stable_path(str(device), folder) is None
    (folder / "wwn-dangling").symlink_to("../gone")
    assert stable_path(str(device), folder) is None
    assert stable_path(str(device.parent / "nvme1n1"), folder) == f"{folder}/nvme-uuid.1111"


def test_a_folder_that_is_not_there(device: Path) -> None:
    assert stable_path(str(device), device.parent / "absent") is None


def test_a_link_that_somebody_chose_is_left(device: Path) -> None:
    folder = link(device, "nvme-uuid.1111", "nvme-eui.0025")
    assert stable_path(f"{folder}/nvme-eui.0025", folder) is None
    chosen = device.parent / "cache-drive"
    chosen.symlink_to(device)
    assert stable_path(str(chosen), folder) is None


def test_a_link_that_names_a_slot_is_replaced(device: Path) -> None:
    """A080: by-path links change as kernel names do."""
    folder = link(device, "nvme-uuid.1111")
    slots = device.parent / "by-path"
    slots.mkdir()
    (slots / "pci-0000:01").symlink_to("../nvme0n1")
    assert stable_path(f"{slots}/pci-0000:01", folder) == f"{folder}/nvme-uuid.1111"
