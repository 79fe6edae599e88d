"""Opening devices and files: every refusal has words; region files are whole or absent."""

import errno
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import CapacityError, ConfigError, DeviceError, LockedError
from kvtier.io import rawfile, syscalls
from kvtier.io.pagecache import cached_bytes
from kvtier.io.rawfile import create_region_file, open_raw
from kvtier.io.syscalls import DirectAlignment

MIB = 1024 * 1024


@pytest.fixture
def path(tmp_path: Path) -> str:
    name = str(tmp_path / "region")
    create_region_file(name, MIB)
    return name


def test_region_file(path: str) -> None:
    status = os.stat(path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == MIB
    assert status.st_blocks * 512 >= MIB
    assert not Path(path).read_bytes().strip(b"\0")


@pytest.mark.parametrize("nbytes", [0, -4096, 4097])
def test_region_file_of_impossible_size(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(ConfigError, match=str(nbytes)):
        create_region_file(str(tmp_path / "x"), nbytes)
    assert not list(tmp_path.iterdir())


def test_region_file_exists(path: str) -> None:
    with pytest.raises(DeviceError) as caught:
        create_region_file(path, MIB)
    assert caught.value.errno == errno.EEXIST
    assert os.stat(path).st_size == MIB


def test_region_file_without_a_directory(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot create"):
        create_region_file(str(tmp_path / "missing" / "x"), MIB)


def test_region_file_larger_than_the_file_system(tmp_path: Path) -> None:
    """A051."""
    nbytes = 1 << 50
    with pytest.raises(CapacityError) as caught:
        create_region_file(str(tmp_path / "x"), nbytes)
    assert caught.value.needed == nbytes
    assert 0 < caught.value.free < nbytes
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, CapacityError), (errno.EIO, DeviceError)]
)
def test_region_file_fails_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    def fail(fd: int, mode: int, offset: int, length: int) -> None:
        os.pwrite(fd, b"half", 0)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(syscalls, "fallocate", fail)
    with pytest.raises(expected):
        create_region_file(str(tmp_path / "x"), MIB)
    assert not list(tmp_path.iterdir())


def test_region_file_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A060."""

    def refuse(fd: int, mode: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(syscalls, "fallocate", refuse)
    monkeypatch.setattr(rawfile, "_ZERO_WRITE_BYTES", 300 * 4096 // 7 * 4)
    name = str(tmp_path / "x")
    create_region_file(name, MIB)
    assert os.stat(name).st_size == MIB
    assert os.stat(name).st_blocks * 512 >= MIB


def test_direct_io_is_used(path: str) -> None:
    raw = open_raw(path, writable=True, direct="required")
    assert raw.direct_io
    assert raw.capacity_bytes == MIB
    assert raw.block_bytes in (512, 1024, 2048, 4096)
    raw.close()


@pytest.mark.parametrize("way", ["statx", "open"])
def test_direct_io_refused(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    real_open = os.open

    def refuse(name: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(name, flags, *rest)

    if way == "statx":
        monkeypatch.setattr(syscalls, "direct_alignment", lambda path: DirectAlignment(0, 0))
    else:
        monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.WARNING, "kvtier"):
        raw = open_raw(path, writable=True, direct="preferred")
    assert not raw.direct_io
    expected = "no direct I/O" if way == "statx" else "EINVAL"
    assert expected in raw.direct_io_reason
    assert len(caplog.records) == 1
    assert path in caplog.text
    raw.close()
    with pytest.raises(DeviceError, match="required"):
        open_raw(path, writable=True, direct="required")


def test_direct_io_off_is_silent(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """A062."""
    raw = open_raw(path, writable=False, direct="off")
    assert (raw.direct_io, raw.direct_io_reason) == (
        False,
        "page cache: switched off by the caller",
    )
    assert not caplog.records
    raw.close()


def test_what_is_no_region(tmp_path: Path) -> None:
    cases = {
        str(tmp_path): "is a directory",
        "/dev/null": "is a character device",
        str(tmp_path / "missing"): "does not exist",
        str(tmp_path / "fifo"): "neither a file nor a block device",
    }
    os.mkfifo(tmp_path / "fifo")
    for path, words in cases.items():
        with pytest.raises(DeviceError, match=words) as caught:
            open_raw(path, writable=True)
        assert path in str(caught.value)


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A directory that everyone may search, with this process as user 65534."""
    if os.geteuid() != 0:
        pytest.skip("changing the user needs root")
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o755)
    create_region_file(str(directory / "region"), MIB)
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
    yield directory
    os.seteuid(0)
    os.setegid(0)
    os.setgroups(groups)
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("mode", "writable", "refused"),
    [(0o600, True, "read and write"), (0o600, False, "read"), (0o644, True, "write")],
)
def test_no_permission(as_nobody: Path, mode: int, writable: bool, refused: str) -> None:
    """A083."""
    path = str(as_nobody / "region")
    os.seteuid(0)
    os.chmod(path, mode)
    os.seteuid(65534)
    with pytest.raises(DeviceError, match=f"no permission to {refused} {path}") as caught:
        open_raw(path, writable=writable)
    message = str(caught.value)
    assert caught.value.errno == errno.EACCES
    for words in ("uid 0 (root)", f"{mode:#o}", "uid 65534", "groups [65534]"):
        assert words in message


def test_root_is_not_told_to_change_the_mode(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DeviceError, match="a container") as caught:
        open_raw(path, writable=True)
    assert "chmod" not in str(caught.value)


def test_no_permission_to_search(as_nobody: Path) -> None:
    os.seteuid(0)
    as_nobody.chmod(0o700)
    os.seteuid(65534)
    with pytest.raises(DeviceError, match="may not be searched"):
        open_raw(str(as_nobody / "region"), writable=False)


def test_discard_unsupported(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, mode: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    raw = open_raw(path, writable=True)
    monkeypatch.setattr(syscalls, "fallocate", refuse)
    assert raw.discard(np.array([0]), np.array([4096])) is False
    monkeypatch.undo()
    assert raw.discard(np.array([0]), np.array([4096])) is True
    raw.close()


def test_flush_failure_is_an_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    raw = open_raw(path, writable=True)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(DeviceError, match="durable") as caught:
        raw.flush()
    assert caught.value.errno == errno.EIO
    raw.close()


@pytest.mark.parametrize("way", ["cachestat", "mincore"])
def test_cached_bytes(path: str, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def missing(fd: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if way == "mincore":
        monkeypatch.setattr(syscalls, "cachestat", missing)
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert cached_bytes(path) == 0
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.seek(8192)
        file.read(4096)
        assert 4096 <= cached_bytes(path) < MIB
        file.seek(0)
        file.read()
        assert cached_bytes(path) == MIB


def test_cached_bytes_is_unknown(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(syscalls, "cachestat", missing)
    monkeypatch.setattr(syscalls, "mincore", missing)
    with pytest.raises(DeviceError, match="does not tell"):
        cached_bytes(path)
    with pytest.raises(DeviceError, match="cannot open"):
        cached_bytes(path + "-missing")


def test_a_file_has_one_writer_and_many_readers(path: str) -> None:
    """Two stores, or two copies of one, must not write to one region file."""
    with closing(open_raw(path, writable=True)):
        with pytest.raises(LockedError, match="open for writing already"):
            open_raw(path, writable=True)
        open_raw(path, writable=False).close()
    open_raw(path, writable=True).close()
