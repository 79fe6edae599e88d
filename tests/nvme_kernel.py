"""Kernel and initial file system of the virtual machine: fetched once, kept in a cache.

`python -m tests.nvme_kernel` fetches the distribution's own kernel package by apt, and keeps its
kernel and the few modules that the guest needs.
"""

import gzip
import lzma
import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

META_PACKAGE = "linux-image-amd64"
MODULES = ("virtio_pci", "virtio_blk", "9p", "9pnet_virtio", "crc32c_generic", "ext4", "nvme")
"""Loaded in this order, each after what it depends on. What a kernel has built in is left out."""
COMMANDS = ("sh", "mount", "umount", "insmod", "poweroff", "sleep", "stty", "chroot", "mkdir")
BUSYBOX = Path("/bin/busybox")

HOST_ROOT = "/host"
SHARE, DISK, SCRATCH = "/mnt/share", "/mnt/disk", "/mnt/scratch"
"""Where the guest's program sees the host's folder, its own disk, and memory for its files."""
DRIVE = "/dev/nvme0n1"

INIT = f"""#!/bin/sh
say() {{ echo "$*" > /dev/ttyS1; }}
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
stty -F /dev/ttyS1 raw -echo
while read module; do insmod /modules/$module || say "no $module"; done < /modules/order
virtio=trans=virtio,version=9p2000.L,msize=524288
mount -t 9p -o $virtio,ro,cache=loose root {HOST_ROOT} || say "no root"
mount -t tmpfs tmpfs {HOST_ROOT}/mnt
cd {HOST_ROOT}{os.path.dirname(SHARE)}
mkdir share disk scratch
mount -t 9p -o $virtio,cache=none share share || say "no share"
mount -t ext4 /dev/vda disk || say "no disk"
tries=0
while [ ! -b {DRIVE} ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
mount -t proc proc {HOST_ROOT}/proc
mount -t sysfs sys {HOST_ROOT}/sys
mount -o bind /dev {HOST_ROOT}/dev
chroot {HOST_ROOT} /bin/sh {SHARE}/run > /dev/ttyS1 2> {HOST_ROOT}{SHARE}/errors < /dev/null
say "exit $?"
cd /
umount {HOST_ROOT}{DISK}
poweroff -f
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An image to boot, and modules in the order in which they are loaded."""

    image: Path
    modules: list[Path]


def cache_folder() -> Path:
    named = os.environ.get("KVTIER_NVME_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "kvtier" / "nvme"


def find_kernel() -> Kernel | None:
    """What the cache holds; None if nothing was fetched yet."""
    folder = cache_folder() / "kernel"
    if not (folder / "order").exists():
        return None
    order = (folder / "order").read_text().split()
    return Kernel(folder / "vmlinuz", [folder / name for name in order])


def fetch_kernel() -> Kernel:
    """Download the package, unpack it, and keep what the guest needs: about 15 MiB."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as place:
        folder = Path(place)
        # apt downloads as a user of its own, who must get in here.
        folder.chmod(0o755)
        _run(["apt-get", "download", _newest_package()], folder)
        (package,) = folder.glob("*.deb")
        _run(["dpkg-deb", "-x", package.name, "all"], folder)
        kept = folder / "kept"
        kept.mkdir()
        (image,) = (folder / "all" / "boot").glob("vmlinuz-*")
        shutil.copy(image, kept / "vmlinuz")
        order = _keep_modules(folder / "all", kept)
        # Written last: a folder without it is not complete.
        (kept / "order").write_text("\n".join(order) + "\n")
        shutil.rmtree(cache / "kernel", ignore_errors=True)
        kept.rename(cache / "kernel")
    found = find_kernel()
    assert found is not None
    return found


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def _newest_package() -> str:
    """The kernel that the distribution's meta package stands for today."""
    answer = _run(["apt-cache", "depends", META_PACKAGE], Path.cwd())
    found = re.findall(r"Depends: (linux-image-[0-9]\S+)", answer)
    assert found, f"apt knows no package behind {META_PACKAGE}:\n{answer}"
    return str(found[0])


def _keep_modules(source: Path, target: Path) -> list[str]:
    """Copy modules and what they depend on; their file names, dependencies first."""
    files = {_module_name(path): path for path in source.rglob("*.ko*")}
    order: list[str] = []

    def keep(name: str) -> None:
        if name not in files or f"{name}.ko" in order:
            return
        data = _module_bytes(files[name])
        depends = re.search(rb"\0depends=([^\0]*)\0", data)
        for each in (depends[1].decode() if depends else "").split(","):
            keep(each.replace("-", "_"))
        (target / f"{name}.ko").write_bytes(data)
        order.append(f"{name}.ko")

    for name in MODULES:
        keep(name)
    return order


def _module_name(path: Path) -> str:
    return path.name.split(".")[0].replace("-", "_")


def _module_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    assert path.suffix == ".ko", f"{path.name}: packed in a way that is not known here"
    return data


def write_initramfs(kernel: Kernel, target: Path) -> None:
    """The guest's first file system: busybox, the modules and INIT, as a packed cpio archive."""
    archive = bytearray()
    for name in ("bin", "proc", "sys", "dev", "modules", HOST_ROOT[1:]):
        archive += _entry(name, stat.S_IFDIR | 0o755)
    # The kernel opens it for INIT before INIT can mount anything.
    archive += _entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    archive += _entry("bin/busybox", stat.S_IFREG | 0o755, BUSYBOX.read_bytes())
    for name in COMMANDS:
        archive += _entry(f"bin/{name}", stat.S_IFLNK | 0o777, b"busybox")
    for module in kernel.modules:
        archive += _entry(f"modules/{module.name}", stat.S_IFREG | 0o644, module.read_bytes())
    order = "".join(f"{module.name}\n" for module in kernel.modules)
    archive += _entry("modules/order", stat.S_IFREG | 0o644, order.encode())
    archive += _entry("init", stat.S_IFREG | 0o755, INIT.encode())
    archive += _entry("TRAILER!!!", 0)
    target.write_bytes(gzip.compress(bytes(archive), 1))


def _entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    """One file of a cpio archive in the format "newc". Numbers of inodes and times are zeros."""
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


if __name__ == "__main__":
    ready = find_kernel() or fetch_kernel()
    print(f"kernel {ready.image}, modules {' '.join(path.stem for path in ready.modules)}")
