"""Calibration: what is chosen on devices of known speed, that it ends in time, and its cache."""

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.errors import ConfigError, DeviceError
from kvtier.io import calibration
from kvtier.io.calibration import LARGE_BYTES, SETTINGS, WINDOW_BYTES_MIN, calibrate
from kvtier.io.calibration_file import CALIBRATION, Calibration, Trial, device_key, load, save
from kvtier.io.device import Buffers, ByteArray, Int64Array
from tests.pending_cases import needs_io_uring

START, END = 1 << 20, 65 << 20


class Clock:
    """Time that passes only while a device works."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic


class Known:
    """A device that takes a known time for each request, and notes which bytes were read."""

    def __init__(self, clock: Clock, request_s: float, bytes_per_s: float) -> None:
        self.clock = clock
        self.request_s = request_s
        self.bytes_per_s = bytes_per_s
        self.closed = False
        self.read_from: list[tuple[int, int]] = []

    def register(self, memory: ByteArray) -> bool:
        return True

    def read(self, offsets: Int64Array, buffers: Buffers) -> None:
        assert int((buffers.starts + buffers.lengths).max()) <= buffers.memory.size
        self.read_from += zip(offsets.tolist(), buffers.lengths.tolist(), strict=True)
        self.clock.now_s += len(offsets) * self.request_s
        self.clock.now_s += int(buffers.lengths.sum()) / self.bytes_per_s

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calibration, "time", clock)
    report = SimpleNamespace(usable=True, reason="")
    monkeypatch.setattr(calibration, "io_uring_report", lambda: report)
    return clock


def speeds(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, factors: dict[tuple[str, int], float]
) -> list[Known]:
    """Devices of 20 microseconds for a request and 1 GB/s; factors: by (engine, setting), how many
    times as fast as that it is."""
    made: list[Known] = []

    def opened(path: str, engine: str, setting: int, direct: str) -> Known:
        factor = factors.get((engine, setting), 1.0)
        made.append(Known(clock, 20e-6 / factor, 1e9 * factor))
        return made[-1]

    monkeypatch.setattr(calibration, "open_setting", opened)
    return made


@pytest.mark.parametrize(
    ("factors", "engine", "setting"),
    [
        ({}, "io_uring", 32),
        ({("io_uring", 64): 1.5}, "io_uring", 64),
        ({("io_uring", 64): 1.05}, "io_uring", 32),
        ({("io_uring", 16): 1.5}, "io_uring", 16),
        ({("threads", 8): 1.1}, "io_uring", 32),
        ({("threads", 8): 2.0}, "threads", 8),
        ({("threads", 16): 2.0}, "threads", 16),
    ],
)
def test_the_best_setting_is_chosen_and_the_usual_one_if_it_is_near(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    factors: dict[tuple[str, int], float],
    engine: str,
    setting: int,
) -> None:
    made = speeds(monkeypatch, clock, factors)
    found = calibrate("device", START, END)
    assert found.engine == engine
    assert (found.depth if engine == "io_uring" else found.workers) == setting
    assert engine in found.why
    assert str(setting) in found.why
    factor = factors.get((engine, setting), 1.0)
    assert found.read_bytes_per_s == pytest.approx(
        factor * LARGE_BYTES / (20e-6 + LARGE_BYTES / 1e9), rel=0.01
    )
    assert found.write_bytes_per_s is None
    assert len(found.trials) == len(SETTINGS)
    assert all(each.closed for each in made)


@pytest.mark.parametrize("request_s", [0.0, 5e-6, 20e-6, 300e-6])
def test_a_gap_is_merged_while_it_costs_less_than_a_request(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, request_s: float
) -> None:
    def opened(path: str, engine: str, setting: int, direct: str) -> Known:
        return Known(clock, request_s, 1e9)

    monkeypatch.setattr(calibration, "open_setting", opened)
    found = calibrate("device", START, END)
    # So many bytes take as long as a request does.
    expected = request_s * 1e9
    assert expected - 4096 - 1 <= found.merge_gap_bytes <= expected + 1
    assert found.merge_gap_bytes % 4096 == 0


@pytest.mark.parametrize("request_s", [1e-6, 20e-6, 0.01, 0.2])
def test_it_reads_the_window_alone_and_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, request_s: float
) -> None:
    made: list[Known] = []

    def opened(path: str, engine: str, setting: int, direct: str) -> Known:
        made.append(Known(clock, request_s, 200e6))
        return made[-1]

    monkeypatch.setattr(calibration, "open_setting", opened)
    before = clock.now_s
    calibrate("device", START, END, 1.0)
    # The slowest of these takes 0.2 s for one request, and ten are the least there can be.
    assert clock.now_s - before < 1.2 + 12 * request_s
    read = [each for device in made for each in device.read_from]
    assert read
    for offset, nbytes in read:
        assert offset >= START
        assert offset + nbytes <= END
        assert offset % 4096 == 0


def test_without_io_uring_threads_are_measured_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    report = SimpleNamespace(usable=False, reason="refused by a filter")
    monkeypatch.setattr(calibration, "io_uring_report", lambda: report)
    speeds(monkeypatch, clock, {})
    found = calibrate("device", START, END)
    assert found.engine == "threads"
    assert "refused by a filter" in found.why
    with pytest.raises(DeviceError, match="refused by a filter"):
        calibrate("device", START, END, settings=[("io_uring", 8)])


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "region"
    path.write_bytes(np.random.default_rng(1).bytes(8 << 20))
    return str(path)


@needs_io_uring
def test_a_real_file_is_measured_in_time_and_stays_as_it_is(file: str) -> None:
    before = Path(file).read_bytes()
    begin = time.monotonic()
    found = calibrate(file, 0, 8 << 20, 0.3)
    assert time.monotonic() - begin < 5
    assert 0 < found.latency_s < 1
    assert found.read_bytes_per_s > 0
    assert {each.engine for each in found.trials} == {"io_uring", "threads"}
    assert Path(file).read_bytes() == before


def test_what_cannot_be_measured_is_refused(file: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(WINDOW_BYTES_MIN)):
        calibrate(file, 0, 4096)
    with pytest.raises(ConfigError, match="seconds"):
        calibrate(file, 0, 8 << 20, 0)
    with pytest.raises(ConfigError, match="outside"):
        calibrate(file, 1 << 30, 2 << 30)
    with pytest.raises(DeviceError):
        calibrate(str(tmp_path / "none"), 0, 8 << 20)


# ---- the cache ----------------------------------------------------------------------------------

FOUND = Calibration(
    "io_uring", 64, 8, 16384, 1.5e9, None, 9e-5, "measured", (Trial("io_uring", 64, 4e8, 1.5e9),)
)


def test_what_was_saved_is_loaded(file: str, tmp_path: Path) -> None:
    assert load(tmp_path, file) is None
    save(tmp_path, file, FOUND)
    assert load(tmp_path, file) == FOUND
    other = tmp_path / "other"
    other.write_bytes(b"x" * 4096)
    assert load(tmp_path, str(other)) is None
    save(tmp_path, str(other), FOUND)
    assert load(tmp_path, file) == FOUND, "each region has its own"
    assert sorted(path.name for path in tmp_path.iterdir()) == [CALIBRATION, "other", "region"]


def test_another_size_kernel_or_file_is_measured_anew(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, file, FOUND)
    os.truncate(file, 4 << 20)
    assert load(tmp_path, file) is None
    save(tmp_path, file, FOUND)
    assert len(json.loads((tmp_path / CALIBRATION).read_text())["devices"]) == 1, "it is replaced"
    with monkeypatch.context() as patched:
        patched.setattr(os, "uname", lambda: SimpleNamespace(release="7.0-other"))
        assert load(tmp_path, file) is None
    assert load(tmp_path, file) == FOUND
    os.rename(file, tmp_path / "elsewhere")
    assert load(tmp_path, file) is None, "there is no such file"
    (tmp_path / "region").write_bytes(bytes(4 << 20))
    assert load(tmp_path, file) is None, "another file of the same size"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: '{"version": 1, "devices": 3}',
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"depth": 64', '"depth": 0'),
        lambda text: text.replace('"depth": 64', '"depth": "64"'),
        lambda text: text.replace('"depth": 64', '"depth": 5000'),
        lambda text: text.replace('"engine": "io_uring"', '"engine": "spdk"'),
        lambda text: text.replace('"latency_s": 9e-05', '"latency_s": NaN'),
        lambda text: text.replace('"workers": 8', '"workers": true'),
        lambda text: text.replace('"trials"', '"trails"'),
        lambda text: "[" * 100_000,
        lambda text: text.replace('"latency_s": 9e-05', f'"latency_s": 1{"0" * 400}'),
        lambda text: text.replace('"latency_s": 9e-05', '"latency_s": 5e-324'),
        lambda text: re.sub('("read_bytes_per_s"): [^,]*', f"\\1: 1{'0' * 400}", text),
        lambda text: re.sub('("why"): "', r'\1: "\\ud800', text),
        lambda text: re.sub('("why"): "', r'\1: "\\u001b[2J', text),
        lambda text: text + " " * (1 << 20),
    ],
)
def test_a_broken_cache_says_nothing_and_is_written_anew(
    file: str, tmp_path: Path, damage: Any
) -> None:
    save(tmp_path, file, FOUND)
    path = tmp_path / CALIBRATION
    text = path.read_text()
    damaged = damage(text)
    assert damaged != text
    path.write_text(damaged)
    assert load(tmp_path, file) is None
    save(tmp_path, file, FOUND)
    assert load(tmp_path, file) == FOUND


def test_bytes_that_are_no_text_are_a_broken_cache(file: str, tmp_path: Path) -> None:
    (tmp_path / CALIBRATION).write_bytes(b"\xff\xfe\x00")
    assert load(tmp_path, file) is None


@pytest.mark.parametrize("name", [CALIBRATION, f"{CALIBRATION}.new"])
def test_a_pipe_in_its_place_is_replaced(file: str, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert load(tmp_path, file) is None
    save(tmp_path, file, FOUND)
    assert load(tmp_path, file) == FOUND


def test_a_folder_that_cannot_be_written_is_no_error(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    save(tmp_path, file, FOUND)
    assert load(tmp_path, file) is None


def test_the_key_names_device_size_and_kernel(file: str) -> None:
    key = device_key(file)
    assert f"{8 << 20} bytes" in key
    assert os.uname().release in key
