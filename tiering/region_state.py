"""Whether the region that a store was made with is still there, by looking only."""

import os
import stat
from typing import Final

PRESENT: Final = "present"
MISSING: Final = "missing"
REMEDY: Final = "restore the file or device"


def region_state(path: str, region_bytes: int) -> str:
    """One of "present", "missing", "truncated to N bytes" and "unreachable: WHY".

    region_bytes: of the region when it was made. More bytes than that are no fault.
    """
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            found = status.st_size
        else:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                found = os.lseek(descriptor, 0, os.SEEK_END)
            finally:
                os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except OSError as error:
        return f"unreachable: {error.strerror}"
    return PRESENT if found >= region_bytes else f"truncated to {found} bytes"


def region_advice(state: str, region_bytes: int, regions: int) -> str:
    """What a state other than "present" means for the store, and what to do about it.

    regions: how many the store has.
    """
    if state == MISSING:
        lost = "every segment" if regions == 1 else "every segment on it"
        return f"the region is missing: {REMEDY}; without it {lost} is a miss"
    if state.startswith("truncated"):
        return (
            f"the region is {state}, it was made with {region_bytes} bytes: {REMEDY}; the store "
            "does not open while bytes are missing"
        )
    return f"the region is {state}"
