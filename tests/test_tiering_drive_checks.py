"""verify, scrub and rebuild of stores that are spread over several drives."""

import re
from pathlib import Path

import pytest

from kvtier.errors import (
    ConfigError,
    DeviceError,
)
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.rebuilder import rebuild
from kvtier.tiering.verifier import verify
from tests.drive_cases import (
    DRIVES,
    LONG,
    OF_M,
    bring_back,
    drives_of,
    make_long,
    rows,
    take_away,
    tokens_there,
)
from tests.store_cases import (
    check_bytes,
    check_settled,
    open_store,
)


def test_verify_says_what_is_missing_and_checks_the_rest(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    assert verify(path).findings == []
    take_away(tmp_path, 2)
    report = verify(path)
    (finding,) = report.findings
    assert (finding.kind, finding.where) == ("region", str(tmp_path / "drive2"))
    assert "every segment on it is a miss" in finding.what
    assert (report.segments_checked, report.segments_missing) == (12, 4)


@pytest.mark.parametrize("drive", range(DRIVES))
def test_damage_is_found_with_its_drive_and_byte(tmp_path: Path, drive: int) -> None:
    path = make_long(tmp_path)
    row = next(row for row in rows(path) if drives_of(row) == {drive})
    with open_store(path) as store:
        extent = store._files.inventory.entries[row.id].extents[1]
    for at in (extent.byte + 5000, 200_000):
        with open(tmp_path / f"drive{drive}", "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    found = {each.kind: each for each in verify(path).findings}
    assert set(found) == {"page", "padding"}
    place = f"byte {extent.byte} of {tmp_path / f'drive{drive}'} "
    assert found["page"].where.startswith(f"segment {row.id}, layer 1, {place}")
    assert re.fullmatch(r"damaged pages: \d+ \(1 of \d+\)", found["page"].what)
    assert found["padding"].where == str(tmp_path / f"drive{drive}")
    assert found["padding"].what.endswith("the first at byte 200000")
    with open_store(path) as store:
        report = store.scrub("1GiB").result()
        assert report.quarantined == [row.id]
        assert len(report.findings) == 2
        assert tokens_there(store, LONG) == len(LONG) - SEGMENT_TOKENS


def test_scrub_of_a_store_without_a_drive(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    take_away(tmp_path, 0)
    with open_store(path) as store:
        report = store.scrub("1GiB").result()
    assert report.finished
    assert [each.kind for each in report.findings] == ["region"]
    assert report.quarantined == []
    assert (report.segments_checked, report.segments_missing) == (12, 4)


@pytest.mark.parametrize("settings_too", [False, True])
def test_rebuild(tmp_path: Path, settings_too: bool) -> None:
    path = make_long(tmp_path)
    before = rows(path)
    (path / "catalog.sqlite").unlink()
    named: list[str] = []
    if settings_too:
        (path / "store.yaml").unlink()
        named = [str(tmp_path / f"drive{number}") for number in (2, 0, 3, 1)]
        with pytest.raises(ConfigError, match="name every one of them"):
            rebuild(path, regions=named[:3])
        with pytest.raises(ConfigError, match="not the regions of one store"):
            rebuild(path, regions=[*named[:3], named[0]])
    report = rebuild(path, regions=named)
    assert report.ok
    assert report.segments_restored == 16
    assert [row.extents for row in rows(path)] == [row.extents for row in before]
    with open_store(path) as store:
        sequence = store.resume(LONG)
        check_bytes(store, OF_M, sequence, LONG)
        store.release(sequence)
        check_settled(store, path)


def test_rebuild_without_a_drive_is_refused(tmp_path: Path) -> None:
    path = make_long(tmp_path)
    (path / "catalog.sqlite").unlink()
    take_away(tmp_path, 1)
    with pytest.raises(DeviceError, match="needs all drives"):
        rebuild(path)
    bring_back(tmp_path, 1)
    assert rebuild(path).ok
