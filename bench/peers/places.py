"""Where contexts are kept while they are compared: on a disk, or on loop devices over tmpfs."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.peers.worker import Place
from kvtier.errors import ConfigError
from kvtier.tools.bench_rig import loop_device

SPARE_BYTES = 192 << 20
"""What a file system or a store needs beside the context itself."""
TMPFS = Path("/dev/shm")


@contextmanager
def folders(root: Path, names: Mapping[str, bool]) -> Iterator[dict[str, Place]]:
    """A folder for each name, on the file system of `root`."""
    with TemporaryDirectory(dir=root) as folder:
        yield {name: Place(str(_made(Path(folder) / each))) for name, each in _short(names)}


@contextmanager
def loop_devices(root: Path, names: Mapping[str, bool], nbytes: int) -> Iterator[dict[str, Place]]:
    """A loop device over tmpfs for each name: raw where the name says so, with a folder on the
    disk beside it for what is not KV, else with ext4 on it. Raises ConfigError."""
    size = nbytes + nbytes // 8 + SPARE_BYTES
    _require_memory(size * len(names))
    with ExitStack() as stack:
        images = stack.enter_context(TemporaryDirectory(dir=TMPFS, prefix="kvtier-bench-"))
        beside = stack.enter_context(TemporaryDirectory(dir=root))
        found = {}
        for name, each in _short(names):
            image = Path(images) / each
            with image.open("wb") as file:
                file.truncate(size)
            device = stack.enter_context(loop_device(image, size))
            folder = _made(Path(beside) / each)
            if names[name]:
                found[name] = Place(str(folder), device)
            else:
                _mount(device, folder)
                # Lazily: when the run is broken off, workers still have their files open.
                stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
                found[name] = Place(str(folder))
        yield found


def _short(names: Mapping[str, bool]) -> Iterator[tuple[str, str]]:
    """Each name with one that suits a file."""
    return ((name, f"place-{index}") for index, name in enumerate(names))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def available_bytes() -> int:
    """Memory that processes can still have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ConfigError("/proc/meminfo has no MemAvailable: which kernel is this?")


def _require_memory(nbytes: int) -> None:
    free = min(shutil.disk_usage(TMPFS).free, available_bytes())
    if nbytes > free:
        raise ConfigError(f"{nbytes} bytes of tmpfs are needed, {free} are free: fewer --tokens")


def _mount(device: str, folder: Path) -> None:
    """ext4 as it is made everywhere, but complete: nothing is initialised while it is measured."""
    complete = "lazy_itable_init=0,lazy_journal_init=0"
    for command in (
        ["mkfs.ext4", "-q", "-F", "-E", complete, device],
        ["mount", device, str(folder)],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise ConfigError(f"{command[0]} is missing: apt-get install e2fsprogs") from error
        if done.returncode:
            raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()}")
