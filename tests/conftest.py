"""Fixtures that several test files share: loop devices that are detached and deleted afterwards."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LoopMaker = Callable[[int, int], str]


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[LoopMaker]:
    """make(nbytes, block_bytes) attaches a new file of zeros and returns /dev/loopN."""
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    attached: list[str] = []
    files: list[Path] = []

    def make(nbytes: int, block_bytes: int) -> str:
        backing = tmp_path / f"loop{len(files)}.img"
        files.append(backing)
        with backing.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        command = ["losetup", "-f", "--show", "--direct-io=on", "-b", str(block_bytes)]
        try:
            result = subprocess.run(
                [*command, str(backing)], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device: {error}")
        attached.append(result.stdout.strip())
        return attached[-1]

    yield make
    for device in attached:
        subprocess.run(["losetup", "-d", device], check=True)
    for file in files:
        file.unlink()


@pytest.fixture(scope="session")
def one_thread() -> None:
    """Tiny models run faster, and beside other work more evenly, on one thread of torch."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def always_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody measures how fast a tiny model computes: a cache would restore nothing where that
    takes no longer than the drive does, which on a busy machine is a matter of luck."""
    from kvtier.tiering.costs import CostMeter

    monkeypatch.setattr(CostMeter, "note_pass", lambda *measured: None)
