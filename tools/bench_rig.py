"""What benchmarks need of the machine: steady devices, cold caches, bounded memory, fio.

A disk whose rate changes from minute to minute is made one of a known rate by the block I/O
controller of cgroup v1, and memory is made scarce by its memory controller. Everything made here is
taken away again, also when the measurement fails. Needs root, and says so.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvtier.errors import ConfigError
from kvtier.io.buffers import aligned_bytes

BLKIO = Path("/sys/fs/cgroup/blkio")
MEMORY = Path("/sys/fs/cgroup/memory")
FILL_BYTES = 8 << 20


def require_root(what: str) -> None:
    """Raise ConfigError unless this process may do what only root may."""
    if os.geteuid() != 0:
        raise ConfigError(f"{what} needs root: run the benchmark as root")


# ---- measuring --------------------------------------------------------------------------------


def interleave(
    methods: Mapping[str, Callable[[], float]], *, rounds: int, pause_s: float
) -> dict[str, list[float]]:
    """One figure of every method in each round, with equal pauses, so that what the machine does
    meanwhile hits all of them alike. Every other round goes through them backwards."""
    found: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds):
        order = list(methods) if number % 2 == 0 else list(methods)[::-1]
        for name in order:
            time.sleep(pause_s)
            found[name].append(methods[name]())
    return found


def drop_caches() -> None:
    """Write dirty pages back and empty the page cache. Raises ConfigError unless root."""
    require_root("emptying the page cache")
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


# ---- devices ----------------------------------------------------------------------------------


def random_file(path: str | Path, nbytes: int, *, seed: int = 1) -> None:
    """A file of bytes that do not compress, written to the disk: reads of space that was only
    reserved would not reach it."""
    random = np.random.default_rng(seed)
    with open(path, "wb") as file:
        for start in range(0, nbytes, FILL_BYTES):
            file.write(random.bytes(min(FILL_BYTES, nbytes - start)))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def loop_device(
    path: str | Path | None, nbytes: int, block_bytes: int = 4096, folder: str | Path = "/dev/shm"
) -> Iterator[str]:
    """A loop device with direct I/O over a file: `path`, or a new one of random bytes in
    `folder`, which is deleted. Raises ConfigError where there is none to be had."""
    require_root("a loop device")
    with ExitStack() as stack:
        if path is None:
            where = stack.enter_context(TemporaryDirectory(dir=folder, prefix="kvtier-bench-"))
            path = Path(where) / "loop.img"
            random_file(path, nbytes)
        command = ["losetup", "-f", "--show", "--direct-io=on", "-b", str(block_bytes), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"no loop device over {path}: {done.stderr.strip()}")
        device = done.stdout.strip()
        stack.callback(subprocess.run, ["losetup", "-d", device], check=True)
        yield device


def backing_device(path: str | Path) -> str:
    """The whole disk that a file or folder lies on, such as /dev/vda."""
    number = os.stat(path).st_dev
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not entry.exists():
        raise ConfigError(f"{path} does not lie on a disk (tmpfs or the like)")
    if (entry / "partition").exists():
        entry = entry.parent
    return f"/dev/{entry.name}"


@contextmanager
def throttled(
    read: Mapping[str, int],
    write: Mapping[str, int] | None = None,
    processes: Sequence[int] = (),
) -> Iterator[None]:
    """What this process reads and writes directly on these devices is limited, in bytes per
    second. Its threads are included, children that begin meanwhile, and `processes` by their id:
    children that began before."""
    require_root("throttling a device")
    if not (BLKIO / "blkio.throttle.read_bps_device").exists() and not (BLKIO / "tasks").exists():
        raise ConfigError(f"no block I/O controller of cgroup v1 at {BLKIO}")
    group = BLKIO / f"kvtier-bench-{os.getpid()}-{time.monotonic_ns()}"
    before = _own_group("blkio", BLKIO)
    group.mkdir()
    try:
        for kind, limits in (("read", read), ("write", write or {})):
            for device, rate in limits.items():
                number = os.stat(device).st_rdev
                line = f"{os.major(number)}:{os.minor(number)} {rate}"
                (group / f"blkio.throttle.{kind}_bps_device").write_text(line)
        for process in (os.getpid(), *processes):
            (group / "cgroup.procs").write_text(str(process))
        yield
    finally:
        for process in (os.getpid(), *processes):
            with suppress(ProcessLookupError):  # It may have ended.
                (before / "cgroup.procs").write_text(str(process))
        _remove_group(group)


def _own_group(controller: str, root: Path) -> Path:
    """The group of a controller of cgroup v1 that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            inside = root / path.lstrip("/")
            return inside if inside.exists() else root
    raise ConfigError(f"this system has no controller {controller} of cgroup v1")


def _remove_group(group: Path) -> None:
    """A group goes when the last of its processes has; children may take a moment to end."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    group.rmdir()


# ---- memory -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group of processes that share a limit on memory, their page cache included."""

    path: Path
    limit_bytes: int

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in it to its end. The caller looks at returncode and stderr."""
        inside = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs")]
        return subprocess.run([*inside, *command], capture_output=True, text=True, check=False)

    @property
    def used_bytes_max(self) -> int:
        return int((self.path / "memory.max_usage_in_bytes").read_text())


@contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryGroup]:
    """A memory group of cgroup v1 with this limit. Raises ConfigError where there is none."""
    require_root("a limit on memory")
    if not (MEMORY / "memory.limit_in_bytes").exists():
        raise ConfigError(f"no memory controller of cgroup v1 at {MEMORY}")
    group = MEMORY / f"kvtier-bench-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        yield MemoryGroup(group, nbytes)
    finally:
        _remove_group(group)


# ---- fio --------------------------------------------------------------------------------------


def fio(
    filename: str | Path,
    *,
    rw: str = "randread",
    bs: int = 65536,
    depth: int = 32,
    engine: str = "io_uring",
    size: int,
    runtime_s: float = 1.5,
    jobs: int = 1,
    extra: Sequence[str] = (),
) -> float:
    """Bytes per second that fio moves by direct I/O, all jobs together.

    rw, bs, depth, engine: fio's options of these names. size: bytes of the file that it uses.
    Raises ConfigError when fio is missing or fails.
    """
    command = [
        *("fio", "--name=kvtier", f"--filename={filename}", f"--rw={rw}", f"--bs={bs}"),
        *(f"--iodepth={depth}", f"--ioengine={engine}", "--direct=1", f"--size={size}"),
        # A fraction of a second is no number to fio, but zero.
        *("--time_based", f"--runtime={round(1000 * runtime_s)}ms"),
        *(f"--numjobs={jobs}", "--thread"),
        *("--group_reporting", "--output-format=json", "--randrepeat=0", *extra),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError("fio is not installed: apt-get install fio") from error
    if done.returncode:
        raise ConfigError(f"fio failed on {filename}: {done.stderr.strip() or done.stdout[:300]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def scratch(nbytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Aligned memory whose pages are there: a first touch would count as time of the device."""
    memory = aligned_bytes(nbytes)
    memory[:] = 1
    return memory
