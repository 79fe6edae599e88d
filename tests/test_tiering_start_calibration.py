"""When a store measures its device at opening, what it then uses, and that nothing stops it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import DeviceError
from kvtier.io import calibration
from kvtier.io.calibration_file import CALIBRATION, Calibration
from kvtier.io.threads import ThreadsDevice
from kvtier.io.uring import UringDevice
from kvtier.tiering import start_calibration
from kvtier.tiering.config import Config
from kvtier.tiering.planner import LoadCost
from kvtier.tiering.start_calibration import window_of
from tests.pending_cases import needs_io_uring
from tests.store_cases import KV, MIB, PLAIN, check_bytes, open_store, put, some_tokens

pytestmark = needs_io_uring
TOKENS = some_tokens(6000, 1)
OF_M = KV(PLAIN)
AUTO = Config(hot=4 * MIB)
DEEP = Calibration("io_uring", 7, 8, 12288, 1e9, None, 1e-4, "measured: deep")
THREADS = Calibration("threads", 32, 3, 0, 1e9, None, 1e-4, "measured: threads")


class Measured:
    """Stands for `calibrate`: gives an answer, and notes what was asked."""

    def __init__(self, answer: Calibration) -> None:
        self.answer: Calibration | None = answer
        self.windows: list[tuple[int, int]] = []

    def __call__(self, path: str, start: int, end: int, *rest: Any, **more: Any) -> Calibration:
        self.windows.append((start, end))
        if self.answer is None:
            raise DeviceError("it broke")
        return self.answer


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    measured = Measured(DEEP)
    monkeypatch.setattr(calibration, "calibrate", measured)
    monkeypatch.setattr(start_calibration, "STORED_BYTES_MIN", MIB)
    return measured


def fill(path: Path) -> None:
    with open_store(path, config=Config("32MiB", hot=4 * MIB)) as store:
        put(store, OF_M, "n", TOKENS)


def device_of(path: Path, config: Config = AUTO) -> Any:
    """The device that the store in `path` used; what it holds is checked."""
    with open_store(path, config=config) as store:
        check_bytes(store, OF_M, store.resume(TOKENS), TOKENS)
        return store._files.region.device


def test_a_store_is_measured_once_and_obeys(tmp_path: Path, measured: Measured) -> None:
    fill(tmp_path)
    assert measured.windows == [], "an empty store measures nothing"
    device = device_of(tmp_path)
    assert len(measured.windows) == 1
    start, end = measured.windows[0]
    assert end - start >= MIB
    assert isinstance(device, UringDevice)
    assert (device._ring.depth, device.merge_gap_bytes) == (8, 12288), "rings are powers of two"
    device_of(tmp_path)
    assert len(measured.windows) == 1, "it is known now"
    (tmp_path / CALIBRATION).write_text("{")
    measured.answer = THREADS
    device = device_of(tmp_path)
    assert isinstance(device, ThreadsDevice)
    assert (device.workers, device.merge_gap_bytes) == (3, 0)
    assert len(measured.windows) == 2


def test_the_planner_begins_with_what_was_measured(tmp_path: Path, measured: Measured) -> None:
    fill(tmp_path)
    with open_store(tmp_path, config=AUTO) as store:
        assert store.costs.costs().load == LoadCost(1e-4, 1e9)
        store.costs.note_load(1 << 20, 0.01)
        loaded = store.costs.costs().load
        assert loaded.bytes_per_s < 2e8
    with open_store(tmp_path, config=AUTO) as store:
        assert store.costs.costs().load == loaded, "a load says more than a calibration"


def test_little_stored_is_not_measured(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    monkeypatch.setattr(start_calibration, "STORED_BYTES_MIN", 30 * MIB)
    assert device_of(tmp_path).merge_gap_bytes == 0
    assert measured.windows == []
    assert not (tmp_path / CALIBRATION).exists()


@pytest.mark.parametrize(
    "config",
    [
        Config(hot=4 * MIB, calibrate=False),
        Config(hot=4 * MIB, engine="io_uring"),
        Config(hot=4 * MIB, engine="threads"),
        Config(hot=4 * MIB, direct_io="off"),
    ],
)
def test_who_says_what_to_use_is_obeyed(tmp_path: Path, measured: Measured, config: Config) -> None:
    fill(tmp_path)
    device_of(tmp_path)
    device = device_of(tmp_path, config)
    assert device.merge_gap_bytes == 0
    assert len(measured.windows) == 1


def test_a_measurement_that_fails_keeps_nobody_out(tmp_path: Path, measured: Measured) -> None:
    fill(tmp_path)
    measured.answer = None
    assert isinstance(device_of(tmp_path), UringDevice)
    assert len(measured.windows) == 1


def test_a_real_measurement_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_calibration, "STORED_BYTES_MIN", MIB)
    monkeypatch.setattr(start_calibration, "SECONDS", 0.2)
    fill(tmp_path)
    device = device_of(tmp_path)
    if not device.direct_io:
        pytest.skip(device.direct_io_reason)
    assert (tmp_path / CALIBRATION).exists()


def test_the_window_is_the_longest_full_part_of_the_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_calibration, "STORED_BYTES_MIN", 8 * MIB)
    drive = 1 << 48
    offsets = np.array([MIB, 2 * MIB, 100 * MIB, 103 * MIB, 50 * MIB + drive], np.int64)
    lengths = np.array([MIB, MIB, 3 * MIB, 4 * MIB, 90 * MIB], np.int64)
    assert window_of(0, (offsets, lengths)) == (100 * MIB, 107 * MIB)
    assert window_of(1, (offsets, lengths)) == (50 * MIB, 140 * MIB)
    assert window_of(2, (offsets, lengths)) is None
    scattered = np.arange(20, dtype=np.int64) * 10 * MIB
    assert window_of(0, (scattered, np.full(20, MIB, np.int64))) is None
