"""What a check of a store found: findings, the report that collects them, places in words."""

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvtier.io.device import Device

PADDING: Final = "padding"
"""Bytes that must be zeros and are not: a stray write, but no KV is concerned."""
DIGESTS: Final = "digests"
"""The digests of an Extent are damaged: they are made anew from its payload, and no KV is
concerned."""
MEDIA: Final = "media"
"""Blocks that the device cannot read."""
RECORD: Final = "record"
"""A name's or fingerprint's record is not what the catalog says: only `rebuild` would read it."""
BLOB: Final = "blob"
"""The bytes of a Blob are damaged."""


def place(device: Device, offset: int) -> str:
    """A byte of a device with its block address (LBA), in words."""
    drive, byte = device.locate(offset)
    return (
        f"byte {byte} of {drive.path} "
        f"(block {byte // drive.block_bytes} of {drive.block_bytes} bytes)"
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """kind: superblock, region, header, page, extent, tokens, reference, padding, digests,
    media, record, blob.

    where, what: in words.
    """

    kind: str
    where: str
    what: str


@dataclass(slots=True)
class Report:
    findings: list[Finding] = field(default_factory=list)
    segments_checked: int = 0
    segments_missing: int = 0
    """Those of which something lies on a drive that is not there."""
    extents_checked: int = 0
    pages_checked: int = 0
    slabs_checked: int = 0
    blobs_checked: int = 0
    bytes_read: int = 0

    @property
    def ok(self) -> bool:
        return not self.findings

    def add(self, kind: str, where: str, what: str) -> None:
        self.findings.append(Finding(kind, where, what))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}
