"""The choice of an engine: what is reported and done when io_uring is refused."""

import errno
import importlib.util
import logging
import os
import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError, DeviceError
from kvtier.io import probe, syscalls
from kvtier.io.buffers import aligned_bytes
from kvtier.io.device import Buffers
from kvtier.io.probe import engine_reports, gds_report, gpu_report, memlock_report, open_device
from kvtier.io.rawfile import create_region_file

ROOT = Path(__file__).resolve().parent.parent

# A seccomp filter that answers io_uring_setup (425) with EPERM, as container runtimes do: load the
# number of the call, compare, return SECCOMP_RET_ERRNO|1 or SECCOMP_RET_ALLOW.
SECCOMP = """
import ctypes, logging, struct, sys
program = b"".join(struct.pack("<HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)))
memory = ctypes.create_string_buffer(program)
head = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(memory)))
libc = ctypes.CDLL(None, use_errno=True)
u = ctypes.c_ulong
if libc.prctl(38, u(1), u(0), u(0), u(0)) or libc.prctl(22, u(2), head, u(0), u(0)):
    sys.exit(77)
logging.basicConfig()
from kvtier.errors import DeviceError
from kvtier.io.probe import open_device
device = open_device(sys.argv[1])
print(device.engine)
device.close()
try:
    open_device(sys.argv[1], engine="io_uring")
except DeviceError as error:
    print(error)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    name = str(tmp_path / "region")
    create_region_file(name, 1 << 20)
    return name


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def setup(entries: int, parameters: syscalls.RingParameters) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(syscalls, "io_uring_setup", setup)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EPERM, ("EPERM", "seccomp filter of a container", "io_uring_disabled")),
        (errno.ENOSYS, ("ENOSYS", "a kernel without io_uring")),
        (errno.ENOMEM, ("ENOMEM", "memlock")),
        (errno.EINVAL, ("EINVAL", "Invalid argument")),
    ],
)
def test_io_uring_refused(
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    words: tuple[str, ...],
) -> None:
    """A088."""
    refuse(monkeypatch, number)
    with caplog.at_level(logging.WARNING, "kvtier"):
        device = open_device(path)
    assert device.engine == "threads"
    device.close()
    assert len(caplog.records) == 1
    report = engine_reports()[0]
    assert (report.engine, report.usable) == ("io_uring", False)
    with pytest.raises(DeviceError, match="cannot be used") as caught:
        open_device(path, engine="io_uring")
    for word in (*words, "Effect", "Remedy"):
        for text in (caplog.text, report.reason, str(caught.value)):
            assert word in text


@pytest.mark.parametrize("value", ["0", "1", "2"])
def test_the_sysctl_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    refuse(monkeypatch, errno.EPERM)
    sysctl = tmp_path / "io_uring_disabled"
    sysctl.write_text(value + "\n")
    monkeypatch.setattr(probe, "_SYSCTL", sysctl)
    assert f"kernel.io_uring_disabled, which is {value} here" in engine_reports()[0].reason


def test_a_real_seccomp_filter(path: str) -> None:
    """A084."""
    result = subprocess.run(
        [sys.executable, "-c", SECCOMP, path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode == 77:
        pytest.skip("this system does not allow seccomp filters")
    assert result.returncode == 0, result.stderr
    engine, error = result.stdout.splitlines()
    assert engine == "threads"
    assert "EPERM" in error
    assert "seccomp" in error
    assert result.stderr.count("WARNING:kvtier") == 1


def test_engines_by_name(path: str) -> None:
    device = open_device(path, engine="threads")
    assert device.engine == "threads"
    device.close()
    with pytest.raises(ConfigError, match="unknown engine 'spdk'"):
        open_device(path, engine="spdk")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="does not exist"):
        open_device(path + "-missing")


def test_reports_have_words() -> None:
    reports = [*engine_reports(), gpu_report(), memlock_report()]
    names = ["io_uring", "threads", "nvme", "gds", "gpu", "memlock"]
    assert [report.engine for report in reports] == names
    assert all(report.reason for report in reports)
    assert reports[1].usable


def test_gds_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A090."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in gds_report().reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(probe, "gpu_report", lambda: probe.EngineReport("gpu", False, "no card"))
    assert gds_report() == probe.EngineReport("gds", False, "no card")
    monkeypatch.setattr(probe, "gpu_report", lambda: probe.EngineReport("gpu", True, "there"))
    monkeypatch.setattr(probe, "_NVFS", tmp_path / "missing")
    assert "nvidia-fs is not loaded" in gds_report().reason
    monkeypatch.setattr(probe, "_NVFS", tmp_path)
    assert gds_report().usable


def test_memlock_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert probe.memlock_bytes() == 65536
    assert "65536 bytes" in memlock_report().reason
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (infinity, infinity))
    assert probe.memlock_bytes() is None
    assert "no limit" in memlock_report().reason


def test_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = tmp_path / "enabled"
    monkeypatch.setattr(probe, "_HUGE_PAGES", enabled)
    assert not probe.huge_pages_report().usable
    for words, usable, said in (
        ("always [madvise] never\n", True, "madvise"),
        ("[always] madvise never\n", True, "always"),
        ("always madvise [never]\n", False, "Remedy"),
    ):
        enabled.write_text(words)
        report = probe.huge_pages_report()
        assert report.usable is usable
        assert said in report.reason


def test_a_kernel_that_interrupts_for_every_completion(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.19: everything works, and the report says what it costs."""
    real = syscalls.io_uring_setup

    def setup(entries: int, parameters: syscalls.RingParameters) -> int:
        if parameters.flags & syscalls.SETUP_COOPERATIVE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(entries, parameters)

    monkeypatch.setattr(syscalls, "io_uring_setup", setup)
    with closing(open_device(path, engine="io_uring")) as device:
        memory = aligned_bytes(4096)
        device.read(np.zeros(1, np.int64), Buffers.whole(memory))
    report = engine_reports()[0]
    assert report.usable
    assert "every completion interrupts this process" in report.reason
