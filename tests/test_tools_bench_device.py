"""kvtier bench device and what doctor says of a measured store."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from kvtier.io import calibration_file
from kvtier.io.calibration import setting_words
from kvtier.io.calibration_file import Calibration, Trial
from kvtier.tiering import start_calibration
from kvtier.tiering.config import Config
from kvtier.tools import bench_device
from tests.command_cases import as_json, kvtier, refused
from tests.pending_cases import needs_io_uring
from tests.store_cases import KV, MIB, PLAIN, open_store, put, some_tokens

FOUND = Calibration("threads", 32, 5, 8192, 1.5e9, None, 9e-5, "measured: with care")


@pytest.fixture(autouse=True)
def in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_device, "QUICK_CALIBRATION_S", 0.1)
    monkeypatch.setattr(bench_device, "QUICK_ROW_S", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "full"
    path.write_bytes(np.random.default_rng(1).bytes(8 << 20))
    return str(path)


@needs_io_uring
def test_a_file_is_measured_and_stays_as_it_is(file: str) -> None:
    before, changed = Path(file).read_bytes(), os.stat(file).st_mtime_ns
    found = as_json("bench", "device", file, "--quick")
    (drive,) = found["drives"]
    assert (drive["path"], drive["start"], drive["end"]) == (file, 0, 8 << 20)
    assert drive["calibration"]["engine"] in ("io_uring", "threads")
    rates = drive["rates"]
    # On a busy machine there may have been no time for the second.
    assert {each["engine"] for each in rates} == {
        each["engine"] for each in drive["calibration"]["trials"]
    }
    assert {each["request_bytes"] for each in rates} == set(bench_device.SIZES)
    assert {each["order"] for each in rates} == {"random", "sequential"}
    assert all(each["bytes_per_s"] > 0 for each in rates)
    assert (Path(file).read_bytes(), os.stat(file).st_mtime_ns) == (before, changed)


def test_its_table_names_engine_setting_and_gap(file: str) -> None:
    out = kvtier("bench", "device", file, "--quick").stdout
    for words in ("a store here uses", "alone takes", "is read along", "sequential", "256.0 KiB"):
        assert words in out


def test_a_store_is_measured_where_something_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "store", config=Config("16MiB", hot=4 * MIB)) as store:
        put(store, KV(PLAIN), "n", some_tokens(6000, 1))
    assert "holds less than 64 MiB" in refused("bench", "device", tmp_path / "store", "--quick")
    monkeypatch.setattr(start_calibration, "STORED_BYTES_MIN", MIB)
    (drive,) = as_json("bench", "device", tmp_path / "store", "--quick")["drives"]
    assert drive["path"].endswith("region.kv")
    assert MIB <= drive["end"] - drive["start"] < 4 * MIB


def test_what_is_nothing_to_measure_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused("bench", "device", tmp_path / "none", "--quick")
    told = refused("bench", "device", tmp_path, "--quick")
    assert "not a kvtier store" in told
    assert "or a device or file" in told
    (tmp_path / "small").write_bytes(b"x" * 4096)
    assert "at least" in refused("bench", "device", tmp_path / "small", "--quick")


def test_a_file_of_holes_is_refused(tmp_path: Path, file: str) -> None:
    for name, written in (("sparse", 0), ("half", 4 << 20)):
        with (tmp_path / name).open("wb") as sparse:
            sparse.write(b"x" * written)
            sparse.truncate(8 << 20)
        told = refused("bench", "device", tmp_path / name, "--quick")
        assert f"{8 - (written >> 20)}.0 MiB of its 8.0 MiB were never written" in told
    assert bench_device._hole_bytes(file, 8 << 20) == 0


def test_where_nobody_can_tell_holes_a_file_is_measured(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, at: int, how: int) -> int:
        raise OSError(errno.EINVAL, "no such way to seek")

    monkeypatch.setattr(os, "lseek", refuse)
    assert bench_device._hole_bytes(file, 8 << 20) == 0


def test_words_and_columns_name_the_same_settings() -> None:
    trials = tuple(
        Trial("threads", n, small, large) for n, small, large in ((8, 5, 9), (16, 1, 10))
    )
    ring = Trial("io_uring", 128, 9.0, 9.0)
    found = Calibration("io_uring", 128, 8, 0, 9.0, None, 1e-4, "", (ring, *trials))
    settings = [(each.engine, each.setting) for each in bench_device._best_of_each_engine(found)]
    assert settings == [("io_uring", 128), ("threads", 8)]
    assert setting_words(*settings[1]) == "threads, 8 workers"


def test_doctor_says_what_was_measured_of_a_store(tmp_path: Path) -> None:
    with open_store(tmp_path, config=Config("8MiB", hot=MIB)) as store:
        put(store, KV(PLAIN), "n", some_tokens(10, 1))
    (choice,) = (
        each
        for each in as_json("doctor", tmp_path)["choices"]
        if each["purpose"].startswith("reads")
    )
    assert "measured" not in choice["reason"]
    region = str(tmp_path / "region.kv")
    calibration_file.save(tmp_path, region, FOUND)
    found = as_json("doctor", tmp_path)
    (choice,) = (each for each in found["choices"] if each["purpose"].startswith("reads"))
    assert choice["used"] == "threads, 5 workers"
    assert "with care" in choice["reason"]
    assert "8192 bytes" in choice["reason"]
    (measured,) = found["calibrations"].values()
    assert measured["read_bytes_per_s"] == 1.5e9
    assert "with care" in kvtier("doctor", tmp_path).stdout
