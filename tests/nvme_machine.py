"""A virtual machine with an emulated NVMe drive, in which this checkout runs.

The guest sees the host's root read-only, so it has the same Python; a folder that both may write;
and a disk of its own with a file system, for the store's directory. The drive is a file on the
host, so that its bytes can be looked at and changed between two boots.

QEMU may make the drive fail at one place (blkdebug), and log every write and flush as the drive
saw it (blklogwrites). Killing QEMU is the power cut: what the drive had taken stays in the file.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.nvme_kernel import BUSYBOX, SHARE, Kernel, find_kernel, write_initramfs

ROOT = Path(__file__).parent.parent
QEMU = "qemu-system-x86_64"
ACCELERATOR = os.environ.get("KVTIER_NVME_ACCEL", "tcg,thread=multi")
"""Emulation works everywhere; KVTIER_NVME_ACCEL=kvm is faster where the machine allows it."""
CPU = "max,avx2=off"
"""Where QEMU 7.2 emulates these instructions, numpy's argsort gives a wrong order."""
GUEST_MEMORY_MIB = 2048
DISK_BYTES = 64 << 20
BOOT_S_MAX = 1200.0
"""A guest that says nothing more is killed after this many seconds, and its test fails."""
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
"""mkfs is no command of every user."""
SECTOR_BYTES = 512
"""The unit in which QEMU counts, whatever the drive's logical block is."""


@dataclass(frozen=True, slots=True)
class Drive:
    """An NVMe drive for one boot. failing_read: a byte offset in the sector that cannot be read.

    log: where every write, flush and discard is logged. mdts: the power of two of the pages that
    one command may move. metadata: an image for a second namespace, whose blocks carry metadata.
    """

    image: Path
    block_bytes: int
    failing_read: int | None = None
    log: Path | None = None
    mdts: int = 7
    metadata: Path | None = None


class Guest:
    """A running machine, whose program prints lines of JSON. Leaving the `with` block kills it."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._timer = threading.Timer(BOOT_S_MAX, process.kill)
        self._exit = ""

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def messages(self) -> Iterator[Any]:
        """What the program says, as it says it. Ends with the machine, or its exit line."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("exit "):
                self._exit = line.strip()
                return
            # A machine that loses power may have said half a line.
            if line.endswith("\n"):
                assert line.startswith(("{", "[", '"')), f"{line}{self._errors()}"
                yield json.loads(line)

    def finish(self) -> list[Any]:
        """Wait for the program's end and the machine's; all that it said and nobody has read."""
        said = list(self.messages())
        self._process.wait(timeout=120)
        assert self._exit == "exit 0", f"{self._exit!r}, {said}\n{self._errors()}"
        return said

    def cut_power(self) -> list[Any]:
        """Kill the machine, whatever it does; what it had said and nobody has read."""
        self._process.kill()
        said = list(self.messages())
        assert not self._exit, f"it ended by itself: {self._exit}, {said}\n{self._errors()}"
        return said

    def _errors(self) -> str:
        errors = self._folder / "errors"
        return errors.read_text() if errors.exists() else "the guest never ran its program"


class Machine:
    """What all boots of one guest share: kernel, folder and disk. Made by `Machine.create`."""

    def __init__(self, kernel: Kernel, folder: Path) -> None:
        self._kernel = kernel
        self.folder = folder

    @classmethod
    def create(cls, folder: Path) -> Self:
        """A machine whose files lie in `folder`, with an empty disk."""
        kernel = find_kernel()
        assert kernel is not None
        write_initramfs(kernel, folder / "initramfs")
        (folder / "share").mkdir()
        with (folder / "disk").open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(
            ["mkfs.ext4", "-q", "-F", str(folder / "disk")], check=True, env={"PATH": PATH}
        )
        return cls(kernel, folder)

    @property
    def share(self) -> Path:
        """What the guest sees as SHARE."""
        return self.folder / "share"

    def copy(self, folder: Path) -> "Machine":
        """A second machine in the state of this one. Images of drives are not part of it."""
        folder.mkdir()
        shutil.copytree(self.share, folder / "share")
        for name in ("initramfs", "disk"):
            shutil.copy(self.folder / name, folder / name)
        return Machine(self._kernel, folder)

    def boot(self, drive: Drive, *arguments: str, program: str = "nvme_guest.py") -> Guest:
        """Start the machine; in it a program in `tests/` runs with these arguments."""
        (self.share / "run").write_text(
            f"cd '{ROOT}' && PYTHONDONTWRITEBYTECODE=1 HOME={SHARE} TMPDIR=/mnt/scratch "
            f"exec '{sys.executable}' tests/{program} {' '.join(arguments)}\n"
        )
        command = [QEMU, *_machine_options(), *self._boot_options(), *_drive_options(drive)]
        with (self.folder / "qemu").open("wb") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        return Guest(process, self.share)

    def run(self, drive: Drive, *arguments: str, program: str = "nvme_guest.py") -> list[Any]:
        """Boot, wait for the end, and return what the program said."""
        with self.boot(drive, *arguments, program=program) as guest:
            return guest.finish()

    def _boot_options(self) -> list[str]:
        quiet = "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off"
        disk = f"driver=file,filename={self.folder / 'disk'},node-name=disk"
        return [
            *("-kernel", str(self._kernel.image), "-initrd", str(self.folder / "initramfs")),
            *("-append", quiet),
            *("-serial", f"file:{self.folder / 'console'}", "-serial", "stdio"),
            *("-blockdev", disk, "-device", "virtio-blk-pci,drive=disk"),
            *_shared("root", Path("/"), ",readonly=on,multidevs=remap"),
            *_shared("share", self.share, ""),
        ]


def _machine_options() -> list[str]:
    return [
        *("-accel", ACCELERATOR, "-cpu", CPU, "-smp", "1", "-m", str(GUEST_MEMORY_MIB)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
    ]


def _shared(tag: str, folder: Path, more: str) -> list[str]:
    return [
        *("-fsdev", f"local,id={tag},path={folder},security_model=none{more}"),
        *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
    ]


def _drive_options(drive: Drive) -> list[str]:
    """The drive as a stack of QEMU's block nodes, the file at the bottom."""
    # A node without this lets a discard end there, and says that it was done.
    unmap = {"discard": "unmap"}
    nodes: list[dict[str, object]] = [
        {"driver": "file", "filename": str(drive.image), "node-name": "image", **unmap}
    ]
    if drive.log is not None:
        with drive.log.open("wb") as file:
            file.truncate(1 << 30)
        nodes.append({"driver": "file", "filename": str(drive.log), "node-name": "log"})
        nodes.append(
            {
                **unmap,
                "driver": "blklogwrites",
                "node-name": "logged",
                "file": "image",
                "log": "log",
                "log-sector-size": SECTOR_BYTES,
            }
        )
    if drive.failing_read is not None:
        error = {"event": "read_aio", "errno": 5, "sector": drive.failing_read // SECTOR_BYTES}
        nodes.append(
            {
                **unmap,
                "driver": "blkdebug",
                "node-name": "failing",
                "image": nodes[-1]["node-name"],
                "inject-error": [error],
            }
        )
    top = {"driver": "raw", "node-name": "drive", **unmap}
    nodes.append({**top, "file": nodes[-1]["node-name"]})
    block = f"logical_block_size={drive.block_bytes},physical_block_size={drive.block_bytes}"
    spaces = [f"nvme-ns,drive=drive,bus=nvme,nsid=1,{block}"]
    if drive.metadata is not None:
        nodes.append({"driver": "file", "filename": str(drive.metadata), "node-name": "second"})
        spaces.append("nvme-ns,drive=second,bus=nvme,nsid=2,ms=8")
    options = [part for node in nodes for part in ("-blockdev", json.dumps(node))]
    return [
        *options,
        *("-device", f"nvme,serial=kvtier,id=nvme,mdts={drive.mdts}"),
        *(part for space in spaces for part in ("-device", space)),
    ]


def why_not() -> str | None:
    """Why no machine can be started here; None if one can."""
    if os.uname().machine != "x86_64":
        return "the guest runs the host's Python, and only x86-64 is emulated"
    tools = [QEMU, "mkfs.ext4"]
    missing = [name for name in tools if shutil.which(name, path=PATH) is None]
    if missing or not BUSYBOX.exists() or find_kernel() is None:
        return f"QEMU, busybox or the guest's kernel is missing ({missing}): run make test-nvme"
    return None
