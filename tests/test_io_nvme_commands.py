"""NVMe commands byte by byte, what drives say of themselves, and what their status codes become."""

import errno
import struct

import pytest

from kvtier.io import nvme_commands as commands
from kvtier.io.nvme_commands import ControllerIdentity, NamespaceIdentity

# struct nvme_passthru_cmd of linux/nvme_ioctl.h: name, offset, bytes.
FIELDS = {
    "opcode": (0, 1),
    "flags": (1, 1),
    "rsvd1": (2, 2),
    "nsid": (4, 4),
    "cdw2": (8, 4),
    "cdw3": (12, 4),
    "metadata": (16, 8),
    "addr": (24, 8),
    "metadata_len": (32, 4),
    "data_len": (36, 4),
    "cdw10": (40, 4),
    "cdw11": (44, 4),
    "cdw12": (48, 4),
    "cdw13": (52, 4),
    "cdw14": (56, 4),
    "cdw15": (60, 4),
    "timeout_ms": (64, 4),
    "result": (68, 4),
}
ADDRESS = 0x7F12_3456_7890


def fields(command: bytes) -> dict[str, int]:
    """The fields of a command that are not zero."""
    assert len(command) == 72
    values = {
        name: int.from_bytes(command[at : at + size], "little")
        for name, (at, size) in FIELDS.items()
    }
    return {name: value for name, value in values.items() if value}


def ioctl_number(letter: str, number: int, size: int, direction: int) -> int:
    """_IOC of asm-generic/ioctl.h."""
    return direction << 30 | size << 16 | ord(letter) << 8 | number


def test_the_fields_cover_the_structure() -> None:
    places = sorted(FIELDS.values())
    assert [at + size for at, size in places] == [*(at for at, _ in places[1:]), 72]


def test_ioctl_numbers() -> None:
    assert ioctl_number("N", 0x40, 0, 0) == commands.IOCTL_ID
    assert ioctl_number("N", 0x41, 72, 3) == commands.IOCTL_ADMIN
    assert ioctl_number("N", 0x43, 72, 3) == commands.IOCTL_IO
    assert ioctl_number("N", 0x80, 72, 3) == commands.URING_IO


def test_identify() -> None:
    same = {"opcode": 0x06, "addr": ADDRESS, "data_len": 4096}
    assert fields(commands.identify_controller(ADDRESS)) == {**same, "cdw10": 1}
    assert fields(commands.identify_namespace(3, ADDRESS)) == {**same, "nsid": 3}


def test_flush() -> None:
    """Its opcode is zero, and the namespace is all that it names."""
    assert fields(commands.flush(0xDEADBEEF)) == {"nsid": 0xDEADBEEF}


@pytest.mark.parametrize("count", [1, 2, 256])
def test_deallocate(count: int) -> None:
    expected = {
        "opcode": 0x09,
        "nsid": 7,
        "addr": ADDRESS,
        "data_len": 16 * count,
        "cdw10": count - 1,
        "cdw11": 4,
    }
    assert fields(commands.deallocate(7, ADDRESS, count)) == {
        name: value for name, value in expected.items() if value
    }


def test_ranges_of_a_deallocation() -> None:
    """Attributes, blocks, first block: 4, 4 and 8 bytes."""
    packed = commands.ranges([(0x1122334455667788, 0x99AABBCC), (1, 2)])
    assert packed.hex() == (
        "00000000" + "ccbbaa99" + "8877665544332211" + "00000000" + "02000000" + "0100000000000000"
    )


def controller(mdts: int = 7, vwc: int = 7, oncs: int = 0b1100) -> bytes:
    answer = bytearray(4096)
    answer[4:24] = b"serial".ljust(20)
    answer[24:64] = b"A drive".ljust(40)
    answer[77] = mdts
    answer[520:522] = oncs.to_bytes(2, "little")
    answer[525] = vwc
    return bytes(answer)


def test_what_a_controller_says() -> None:
    found = ControllerIdentity.parse(controller())
    assert found == ControllerIdentity("A drive", 512 * 1024, True, True)
    assert ControllerIdentity.parse(controller(mdts=0)).transfer_bytes_max is None
    assert ControllerIdentity.parse(controller(mdts=5)).transfer_bytes_max == 128 * 1024
    # Bits 1 and 2 of the cache's byte say how a flush of all namespaces behaves.
    assert not ControllerIdentity.parse(controller(vwc=6)).volatile_cache
    assert not ControllerIdentity.parse(controller(oncs=0b1000)).deallocates


def namespace(
    formats: list[tuple[int, int]], flbas: int, blocks: int = 1 << 33, dps: int = 0
) -> bytes:
    """formats: (metadata bytes, power of the block size)."""
    answer = bytearray(4096)
    answer[0:8] = blocks.to_bytes(8, "little")
    # What a drive calls capacity and utilization is not its size.
    answer[8:24] = struct.pack("<QQ", 5, 5)
    answer[25] = len(formats) - 1
    answer[26] = flbas
    answer[29] = dps
    for number, (metadata, power) in enumerate(formats):
        answer[128 + 4 * number : 132 + 4 * number] = struct.pack("<HBB", metadata, power, 2)
    return bytes(answer)


def test_what_a_namespace_says() -> None:
    formats = [(0, 9), (8, 9), (0, 12), (64, 12)]
    found = [NamespaceIdentity.parse(namespace(formats, number)) for number in range(4)]
    assert [(each.metadata_bytes, each.block_bytes) for each in found] == [
        (0, 512),
        (8, 512),
        (0, 4096),
        (64, 4096),
    ]
    assert found[2].capacity_bytes == (1 << 33) * 4096
    # Bit 4 says where metadata lies, and is no part of the format's number.
    assert NamespaceIdentity.parse(namespace(formats, 0x10 | 3)).metadata_bytes == 64
    assert NamespaceIdentity.parse(namespace(formats, 0x60)).block_bytes == 512
    many = [(0, 9)] * 32 + [(16, 12)]
    assert NamespaceIdentity.parse(namespace(many, 0x40)).block_bytes == 4096
    # Three bits for the type of protection, one for its place.
    assert NamespaceIdentity.parse(namespace(formats, 0, dps=0b1010)).protection == 2
    assert NamespaceIdentity.parse(namespace(formats, 0, dps=0b1000)).protection == 0


@pytest.mark.parametrize(
    ("status", "number", "words"),
    [
        (0x4080, errno.EREMOTEIO, "NVMe status 0x4080: LBA out of range"),
        (0x281, errno.ENODATA, "NVMe status 0x281: unrecovered read error"),
        (0x4281, errno.ENODATA, "unrecovered read error"),
        (0x280, errno.ENODATA, "write fault"),
        (0x286, errno.ENODATA, "access denied"),
        (0x4002, errno.EOPNOTSUPP, "invalid field"),
        (0x81, errno.ENOSPC, "capacity exceeded"),
        (0x282, errno.EILSEQ, "guard check"),
        (0x006, errno.EIO, "internal error"),
        (0x7C5, errno.EIO, "NVMe status 0x7c5: code 0xc5 of type 7"),
        # Retry delay and "more information" are no part of the code.
        (0x3880 | 0x281, errno.ENODATA, "unrecovered read error"),
    ],
)
def test_a_status_becomes_what_the_block_layer_makes_of_it(
    status: int, number: int, words: str
) -> None:
    assert commands.status_errno(status) == number
    assert words in commands.status_words(status)


def test_only_the_drive_rules_out_another_try() -> None:
    assert commands.may_retry(0x281)
    assert not commands.may_retry(0x4281)


def test_every_errno_has_words() -> None:
    """A status that is told apart is also named."""
    for code in commands._ERRNO:
        assert "of type" not in commands.status_words(code)
