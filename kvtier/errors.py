"""Everything that kvtier raises on purpose.

KvtierError
|-- ConfigError (ValueError)              a setting or an argument cannot be used
|-- FormatError                           bytes on the device are not what this version can read
|   |-- BadMagic                          not a kvtier structure at all
|   |-- VersionMismatch                   a format version that this release does not read
|   `-- ChecksumMismatch                  damaged bytes, or another structure's bytes
|-- DeviceError (OSError)                 the device or the kernel refused; holds the errno
|   |-- AlignmentError (ValueError)       offset, length or address not as required
|   |-- ForeignDataError                  the device carries something that is not ours
|   |-- WrongStoreError                   the region belongs to another store
|   `-- LockedError                       another process has the store open for writing
|-- CapacityError                         a limit in bytes is reached; holds the sizes
|-- UnsupportedError (NotImplementedError)  a model or a way of use that kvtier cannot serve
`-- ClosedError                           the object was closed, or belongs to another process
"""

from collections.abc import Sequence


class KvtierError(Exception):
    """Base of every error that kvtier raises on purpose."""


class ConfigError(KvtierError, ValueError):
    """A setting or an argument cannot be used."""


class FormatError(KvtierError):
    """Bytes on the device are not what this version can read."""


class BadMagic(FormatError):
    """The bytes do not begin like any kvtier structure."""


class VersionMismatch(FormatError):
    """The structure has a format version that this release does not read."""

    def __init__(
        self, what: str, found: int, readable: int, remedy: str = "format the region anew"
    ) -> None:
        super().__init__(
            f"{what} has format version {found}; this release of kvtier reads version {readable}. "
            f"Open it with the release that wrote it, or {remedy}."
        )
        self.found = found
        self.readable = readable


class ChecksumMismatch(FormatError):
    """Damaged bytes, or the bytes of another structure."""


class DeviceError(KvtierError, OSError):
    """The device or the kernel refused an operation.

    `failures` lists (index in the batch, errno) of every request of a batch that failed; the
    other requests of that batch were completed.
    """

    def __init__(
        self, message: str, errno: int = 0, failures: Sequence[tuple[int, int]] = ()
    ) -> None:
        super().__init__(errno, message)
        self.failures = list(failures)

    def __str__(self) -> str:
        return str(self.strerror)


class AlignmentError(DeviceError, ValueError):
    """An offset, a length or an address is not a multiple of what the device requires."""

    def __init__(self, offset: int, length: int, address: int, required: int) -> None:
        super().__init__(
            f"direct I/O needs multiples of {required} bytes: got offset {offset}, "
            f"length {length}, address {address:#x}"
        )
        self.offset = offset
        self.length = length
        self.address = address
        self.required = required


class ForeignDataError(DeviceError):
    """The device carries data that is not kvtier's, or is in use."""


class WrongStoreError(DeviceError):
    """The region belongs to another store."""

    def __init__(self, expected: str, found: str, path: str) -> None:
        super().__init__(
            f"{path} belongs to store {found}, but this store is {expected}. "
            "Open the store that owns the region, or point this one at its own region."
        )
        self.expected = expected
        self.found = found


class LockedError(DeviceError):
    """Another process has the store open for writing."""


class CapacityError(KvtierError):
    """A limit in bytes is reached."""

    def __init__(self, what: str, needed: int, free: int, limit: int) -> None:
        super().__init__(
            f"{what} is full: {needed} bytes needed, {free} bytes free of {limit} bytes"
        )
        self.needed = needed
        self.free = free
        self.limit = limit


class UnsupportedError(KvtierError, NotImplementedError):
    """A model or a way of use that kvtier cannot serve, and does not serve wrongly."""


class ClosedError(KvtierError):
    """The object was closed, or was opened by another process."""
