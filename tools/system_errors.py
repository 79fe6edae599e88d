"""The operating system's refusals as kvtier's errors, so that each becomes one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.errors import DeviceError, KvtierError


@contextmanager
def typed(doing: str) -> Iterator[None]:
    """Turn an OSError of the block into DeviceError "cannot <doing>: <why>"; kvtier's own pass."""
    try:
        yield
    except KvtierError:
        raise
    except OSError as error:
        # Libraries raise OSError without an errno; then only its text says why.
        why = error.strerror or str(error)
        raise DeviceError(f"cannot {doing}: {why}", error.errno or 0) from error
