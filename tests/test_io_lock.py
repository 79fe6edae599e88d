"""The lock of a store: one owner, named to the others, gone with its process."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import DeviceError, LockedError
from kvtier.io.lock import StoreLock

ROOT = Path(__file__).resolve().parent.parent
HOLD = (
    "import sys, time\n"
    "from kvtier.io.lock import StoreLock\n"
    "lock = StoreLock.acquire(sys.argv[1])\n"
    "print('held', flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lock")


def test_lock_and_release(path: str) -> None:
    with StoreLock.acquire(path) as lock:
        assert Path(path).read_text() == f"{os.getpid()} {socket.gethostname()}\n"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(LockedError, match=f"process {os.getpid()} on host"):
            StoreLock.acquire(path)
    lock.close()
    StoreLock.acquire(path).close()
    assert os.path.exists(path)


def test_another_process_is_named_and_its_death_releases(path: str) -> None:
    """A075."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockedError) as caught:
            StoreLock.acquire(path)
        message = str(caught.value)
        for words in (f"process {holder.pid}", socket.gethostname(), "python", "acquire"):
            assert words in message
        assert isinstance(caught.value, OSError)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    StoreLock.acquire(path).close()


def test_a_child_gives_up_its_copy_only(path: str) -> None:
    lock = StoreLock.acquire(path)
    pid = os.fork()
    if pid == 0:
        lock.close()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(LockedError):
        StoreLock.acquire(path)
    lock.close()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has not written its name"),
        ("garbage", "has not written its name"),
        ("123 elsewhere\n", "process 123 on host elsewhere"),
        (f"999999999 {socket.gethostname()}\n", "it is gone"),
    ],
)
def test_what_the_lock_file_may_say(path: str, content: str, words: str) -> None:
    with StoreLock.acquire(path):
        Path(path).write_text(content)
        with pytest.raises(LockedError, match=words):
            StoreLock.acquire(path)


def test_a_lock_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot open the lock file"):
        StoreLock.acquire(tmp_path / "missing" / "lock")
    with pytest.raises(DeviceError, match="cannot open the lock file"):
        StoreLock.acquire(tmp_path)
