"""Which ways to the device this machine offers, why not the others, and the choice of one.

The questions are answered without importing numpy, so that `kvtier doctor` is quick; an engine is
imported when it is opened.
"""

import contextlib
import ctypes
import errno
import importlib.util
import logging
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from kvtier.errors import ConfigError, DeviceError
from kvtier.io import syscalls

if TYPE_CHECKING:
    from kvtier.io.calibration_file import Calibration
    from kvtier.io.device import Device
    from kvtier.io.rawfile import DirectMode

Engine = Literal["auto", "io_uring", "threads", "nvme"]

_REGISTER_PROBE = 8
_OPERATION_SUPPORTED = 1
_OPERATIONS = {4: "READ_FIXED", 5: "WRITE_FIXED", 22: "READ", 23: "WRITE"}
"""What the engine asks of a ring. READ and WRITE came with kernel 5.6, as did the question."""
_COMMAND_OPERATIONS = {46: "URING_CMD"}
_OPERATIONS_ASKED = 64
_SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")
_NVFS = Path("/proc/driver/nvidia-fs")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_log = logging.getLogger("kvtier")


@dataclass(frozen=True, slots=True)
class EngineReport:
    """usable: proven by trying, as far as this can be tried at no cost. reason: in words."""

    engine: str
    usable: bool
    reason: str


def open_device(
    path: str,
    *,
    engine: Engine = "auto",
    direct: "DirectMode" = "preferred",
    writable: bool = True,
    calibration: "Calibration | None" = None,
) -> "Device":
    """Open a block device or file with the engine named, or with the best that works.

    "auto" takes io_uring and falls back to threads with one warning that names the cause; it never
    takes nvme, which has to be asked for. calibration: what was measured of the device, which
    "auto" obeys. Raises ConfigError for an unknown engine, DeviceError if the path cannot be opened
    or the engine named is unusable.
    """
    if engine not in get_args(Engine):
        names = "', '".join(get_args(Engine))
        raise ConfigError(f"unknown engine {engine!r}: use one of '{names}'")
    if engine == "nvme":
        refusal = _command_ring_refusal()
        if refusal:
            raise DeviceError(f"the engine nvme cannot be used: {refusal}", errno.ENOSYS)
        from kvtier.io.passthrough import PassthroughDevice

        return PassthroughDevice.open(path, writable=writable, direct=direct)
    device = _open_usual(path, engine, direct, writable=writable, measured=calibration)
    if calibration is not None:
        device.merge_gap_bytes = calibration.merge_gap_bytes
    return device


def _open_usual(
    path: str,
    engine: Engine,
    direct: "DirectMode",
    *,
    writable: bool,
    measured: "Calibration | None",
) -> "Device":
    """Open with one of the engines that work on every device."""
    if engine == "io_uring" or (
        engine == "auto" and (measured is None or measured.engine == "io_uring")
    ):
        report = io_uring_report()
        if report.usable:
            from kvtier.io.uring import UringDevice

            depth = None if measured is None else measured.depth
            return UringDevice.open(path, writable=writable, direct=direct, depth=depth)
        if engine == "io_uring":
            raise DeviceError(f"the engine io_uring cannot be used: {report.reason}", errno.ENOSYS)
        _log.warning("using the engine threads: %s", report.reason)
    from kvtier.io.threads import ThreadsDevice

    workers = None if measured is None else measured.workers
    return ThreadsDevice.open(path, writable=writable, direct=direct, workers=workers)


def engine_reports() -> list[EngineReport]:
    """One report per way to the device: io_uring, threads, nvme, gds."""
    threads = EngineReport("threads", True, "preadv and pwritev work on every kernel")
    return [io_uring_report(), threads, nvme_report(), gds_report()]


def io_uring_report() -> EngineReport:
    """Sets up a small ring, asks it for the operations that the engine needs, and closes it."""
    parameters = syscalls.RingParameters()
    try:
        ring = syscalls.cooperative_ring(2, parameters)
    except OSError as error:
        return EngineReport("io_uring", False, _io_uring_refusal(error))
    try:
        missing = _missing_operations(ring, _OPERATIONS)
    finally:
        os.close(ring)
    if missing:
        return EngineReport(
            "io_uring",
            False,
            f"the io_uring of this kernel lacks {', '.join(missing)}. Effect: more threads and CPU "
            "time per request; the bytes are the same. Remedy: Linux 5.6 or later",
        )
    usable = "a ring could be set up, with all operations it needs"
    if not parameters.flags & syscalls.SETUP_COOPERATIVE:
        usable += (
            "; every completion interrupts this process. Effect: more CPU time per request. "
            "Remedy: Linux 5.19 or later"
        )
    return EngineReport("io_uring", True, usable)


def nvme_report() -> EngineReport:
    """Asks every NVMe namespace of this machine what it is, by a command on its character device.

    Usable where one of them answers; the others are named with the reason.
    """
    refusal = _command_ring_refusal()
    if refusal:
        return EngineReport("nvme", False, refusal)
    from kvtier.io.nvme_namespace import Namespace, character_devices

    answers: list[str] = []
    refusals: list[str] = []
    for path in character_devices():
        try:
            Namespace.open(path, writable=True).close()
        except DeviceError as error:
            refusals.append(str(error))
        else:
            answers.append(path)
    if answers:
        usable = f"answered: {', '.join(answers)}. Taken only if engine='nvme' asks for it"
        return EngineReport("nvme", True, "; ".join([usable, *refusals]))
    none = "no /dev/ng*: there is no NVMe drive here, or Linux is older than 5.13"
    return EngineReport("nvme", False, "; ".join(refusals) or none)


def _command_ring_refusal() -> str:
    """Why no ring for NVMe commands can be set up, in words; "" if one can."""
    parameters = syscalls.RingParameters()
    parameters.flags = syscalls.SETUP_BIG_ENTRIES
    old = "the io_uring of this kernel cannot carry NVMe commands. Remedy: Linux 5.19 or later"
    try:
        ring = syscalls.io_uring_setup(2, parameters)
    except OSError as error:
        return old if error.errno == errno.EINVAL else _io_uring_refusal(error)
    try:
        return old if _missing_operations(ring, _COMMAND_OPERATIONS) else ""
    finally:
        os.close(ring)


def _missing_operations(ring: int, operations: dict[int, str]) -> list[str]:
    """Names of operations that this ring does not do; all of them where it cannot be asked."""
    # struct io_uring_probe: 16 bytes, then 8 for each operation, whose flags begin at bit 16.
    answer = (ctypes.c_uint64 * (2 + _OPERATIONS_ASKED))()
    # EINVAL before kernel 5.6: the answer stays zeros, which is "unsupported".
    with contextlib.suppress(OSError):
        syscalls.io_uring_register(ring, _REGISTER_PROBE, answer, _OPERATIONS_ASKED)
    return [
        name
        for number, name in operations.items()
        if not answer[2 + number] >> 16 & _OPERATION_SUPPORTED
    ]


def gds_report() -> EngineReport:
    """Reads from NVMe straight into GPU memory: is there anything to try it with?"""
    if importlib.util.find_spec("kvikio") is None:
        reason = "kvikio is not installed (pip install 'kvtier[gpu-cu12]' or 'kvtier[gpu-cu13]')"
        return EngineReport("gds", False, reason)
    gpu = gpu_report()
    if not gpu.usable:
        return EngineReport("gds", False, gpu.reason)
    if not _NVFS.exists():
        return EngineReport(
            "gds",
            False,
            "kvikio is installed, but the driver nvidia-fs is not loaded; kvikio would copy "
            "through host memory",
        )
    return EngineReport("gds", True, "kvikio and the driver nvidia-fs are there (not yet tried)")


def gpu_report() -> EngineReport:
    """Can CUDA's driver library be loaded? It is not initialised: that takes a second."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return EngineReport("gpu", False, f"no CUDA driver: {error}")
    return EngineReport("gpu", True, "libcuda.so.1 can be loaded (not initialised)")


def memlock_bytes() -> int | None:
    """How much memory this process may pin, in bytes; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def memlock_words() -> str:
    """The limit on pinned memory, for messages."""
    limit = memlock_bytes()
    return "unlimited bytes" if limit is None else f"{limit} bytes"


def memlock_report() -> EngineReport:
    """Whether the limit on pinned memory leaves room for registered buffers, in words."""
    limit = memlock_bytes()
    if limit is None:
        return EngineReport("memlock", True, "no limit on pinned memory")
    return EngineReport(
        "memlock",
        limit > 0,
        f"at most {limit} bytes may be pinned; buffers past that are used unregistered "
        "(raise it by ulimit -l or LimitMEMLOCK=)",
    )


def huge_pages_report() -> EngineReport:
    """Whether buffers from 2 MiB on lie on huge pages, which costs less CPU per request."""
    try:
        words = _HUGE_PAGES.read_text()
    except OSError as error:
        return EngineReport("huge pages", False, f"not known to this kernel ({error.strerror})")
    chosen = words.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return EngineReport(
            "huge pages",
            False,
            f"switched off ({_HUGE_PAGES} says never). Effect: more CPU time per request. "
            f"Remedy: echo madvise > {_HUGE_PAGES}",
        )
    return EngineReport("huge pages", True, f"asked for by buffers from 2 MiB on ({chosen})")


def _io_uring_refusal(error: OSError) -> str:
    """What the errno of io_uring_setup means here, its effect and its remedy."""
    try:
        disabled = _SYSCTL.read_text().strip()
    except OSError:
        disabled = "unknown"
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    causes = {
        errno.EPERM: "a seccomp filter of a container, or kernel.io_uring_disabled, which is "
        f"{disabled} here",
        errno.ENOSYS: "a kernel without io_uring, or a seccomp filter of a container that hides it",
        errno.ENOMEM: "the memlock limit (ulimit -l)",
        errno.EMFILE: "too many open files",
    }
    cause = causes.get(error.errno or 0, error.strerror or "unknown cause")
    return (
        f"io_uring refused by the kernel ({name}): {cause}. Effect: more threads and CPU time per "
        "request; the bytes are the same. Remedy: allow the calls io_uring_setup, io_uring_enter "
        "and io_uring_register, and set kernel.io_uring_disabled=0"
    )
