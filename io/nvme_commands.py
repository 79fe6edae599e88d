"""NVMe commands as bytes, what a drive says about itself, and what its status codes mean.

Numbers are those of linux/nvme_ioctl.h and of the NVMe base and NVM command set specifications.
Standard library alone, because `kvtier doctor` asks as well.
"""

import errno
import struct
from dataclasses import dataclass
from typing import Self

COMMAND = struct.Struct("<BBHIIIQQIIIIIIIIII")
"""struct nvme_passthru_cmd, and struct nvme_uring_cmd: opcode, flags, reserved, nsid, cdw2, cdw3,
metadata, address, metadata bytes, data bytes, cdw10 to cdw15, timeout in ms, result."""
assert COMMAND.size == 72

IOCTL_ID = 0x4E40
IOCTL_ADMIN = 0xC0484E41
IOCTL_IO = 0xC0484E43
URING_IO = 0xC0484E80

FLUSH, WRITE, READ, DATASET_MANAGEMENT = 0x00, 0x01, 0x02, 0x09
_IDENTIFY = 0x06
_CNS_NAMESPACE, _CNS_CONTROLLER = 0, 1
IDENTIFY_BYTES = 4096

_DEALLOCATE = 1 << 2
_RANGE = struct.Struct("<IIQ")
RANGES_MAX = 256
"""Of one Dataset Management command; the drive takes a list of 16 bytes for each."""
BLOCKS_MAX = 1 << 16
"""Of one read or write: the count is a field of 16 bits."""
RANGE_BLOCKS_MAX = (1 << 32) - 1

_PAGE_BYTES_MIN = 4096
"""The smallest page that a controller may have: the unit of its limit is at least this."""
_DO_NOT_RETRY = 1 << 14
_CODE = 0x7FF
"""Of a status: type in 3 bits, code in 8. The bits above are not part of its meaning."""


def identify_controller(address: int) -> bytes:
    """Ask for IDENTIFY_BYTES about the controller, to be put at `address`."""
    return _pack(_IDENTIFY, address=address, nbytes=IDENTIFY_BYTES, cdw10=_CNS_CONTROLLER)


def identify_namespace(nsid: int, address: int) -> bytes:
    """Ask for IDENTIFY_BYTES about a namespace, to be put at `address`."""
    return _pack(_IDENTIFY, nsid=nsid, address=address, nbytes=IDENTIFY_BYTES, cdw10=_CNS_NAMESPACE)


def flush(nsid: int) -> bytes:
    """Make durable what was written before."""
    return _pack(FLUSH, nsid=nsid)


def deallocate(nsid: int, address: int, count: int) -> bytes:
    """Forget the blocks of `count` ranges, a list of which lies at `address`."""
    assert 0 < count <= RANGES_MAX
    return _pack(
        DATASET_MANAGEMENT,
        nsid=nsid,
        address=address,
        nbytes=count * _RANGE.size,
        cdw10=count - 1,
        cdw11=_DEALLOCATE,
    )


def ranges(pieces: list[tuple[int, int]]) -> bytes:
    """The list for `deallocate`. pieces: (first block, blocks)."""
    return b"".join(_RANGE.pack(0, blocks, first) for first, blocks in pieces)


def _pack(
    opcode: int,
    *,
    nsid: int = 0,
    address: int = 0,
    nbytes: int = 0,
    cdw10: int = 0,
    cdw11: int = 0,
) -> bytes:
    commands = (cdw10, cdw11, 0, 0, 0, 0)
    return COMMAND.pack(opcode, 0, 0, nsid, 0, 0, 0, address, 0, nbytes, *commands, 0, 0)


@dataclass(frozen=True, slots=True)
class ControllerIdentity:
    """What a controller says of itself.

    transfer_bytes_max: of one command (MDTS); None if it names no limit. volatile_cache: whether
    what it has written may be lost with power before a flush. deallocates: whether it knows
    Dataset Management.
    """

    model: str
    transfer_bytes_max: int | None
    volatile_cache: bool
    deallocates: bool

    @classmethod
    def parse(cls, answer: bytes) -> Self:
        """answer: IDENTIFY_BYTES."""
        assert len(answer) == IDENTIFY_BYTES
        optional = int.from_bytes(answer[520:522], "little")
        return cls(
            model=answer[24:64].decode("ascii", "replace").strip(" \0"),
            transfer_bytes_max=_PAGE_BYTES_MIN << answer[77] if answer[77] else None,
            volatile_cache=bool(answer[525] & 1),
            deallocates=bool(optional & 1 << 2),
        )


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """What a controller says of a namespace. metadata_bytes: beside each block. protection: its
    type of end-to-end protection, 0 for none."""

    blocks: int
    block_bytes: int
    metadata_bytes: int
    protection: int

    @property
    def capacity_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @classmethod
    def parse(cls, answer: bytes) -> Self:
        """answer: IDENTIFY_BYTES."""
        assert len(answer) == IDENTIFY_BYTES
        used = answer[26] & 0xF
        if answer[25] >= 16:
            # With more formats than four bits can name, two more bits are in use.
            used |= (answer[26] >> 5 & 3) << 4
        metadata_bytes, block_power = struct.unpack_from("<HB", answer, 128 + 4 * used)
        return cls(
            blocks=int.from_bytes(answer[0:8], "little"),
            block_bytes=1 << block_power,
            metadata_bytes=metadata_bytes,
            protection=answer[29] & 7,
        )


_WORDS = {
    0x001: "invalid command opcode",
    0x002: "invalid field in the command",
    0x004: "data transfer error",
    0x005: "aborted, because power is about to be lost",
    0x006: "internal error",
    0x007: "abort requested",
    0x008: "aborted, because its queue was deleted",
    0x00B: "invalid namespace or format",
    0x020: "the namespace is write-protected",
    0x021: "interrupted",
    0x022: "transient transport error",
    0x080: "LBA out of range",
    0x081: "capacity exceeded",
    0x082: "namespace not ready",
    0x083: "reservation conflict",
    0x084: "format in progress",
    0x180: "conflicting attributes",
    0x181: "invalid protection information",
    0x182: "write to a read-only range",
    0x183: "command size limit exceeded",
    0x280: "write fault",
    0x281: "unrecovered read error",
    0x282: "guard check error",
    0x283: "application tag check error",
    0x284: "reference tag check error",
    0x285: "compare failure",
    0x286: "access denied",
    0x287: "deallocated or unwritten block",
    0x300: "internal path error",
    0x302: "path inaccessible",
    0x303: "path in transition",
    0x360: "controller path error",
    0x370: "host path error",
    0x371: "aborted by the host",
}
_MEDIA = (0x182, 0x280, 0x281, 0x285, 0x286, 0x287)
_ERRNO = {
    **dict.fromkeys((0x021, 0x080, 0x082), errno.EREMOTEIO),
    **dict.fromkeys((0x001, 0x002, 0x00B, 0x180), errno.EOPNOTSUPP),
    **dict.fromkeys(_MEDIA, errno.ENODATA),
    **dict.fromkeys((0x181, 0x282, 0x283, 0x284), errno.EILSEQ),
    0x081: errno.ENOSPC,
    0x083: errno.EBADE,
    0x370: errno.ENOLINK,
}
"""What the kernel's block layer makes of them. All others are EIO."""


def status_errno(status: int) -> int:
    """The errno with which a request through the block layer would have failed, so that what is
    above the device need not know by which way it went. status: not 0."""
    assert status & _CODE
    return _ERRNO.get(status & _CODE, errno.EIO)


def status_words(status: int) -> str:
    """A status for messages: its number, and what the specification calls it."""
    code = status & _CODE
    known = _WORDS.get(code, f"code {code & 0xFF:#x} of type {code >> 8}")
    return f"NVMe status {status:#x}: {known}"


def may_retry(status: int) -> bool:
    """Whether the drive says that the same command might succeed."""
    return not status & _DO_NOT_RETRY
