"""The contract of every Device, and of started batches, for NVMe passthrough on the drive of the
virtual machine. `test_nvme_passthrough.py` has pytest run it there."""

from collections.abc import Iterator

import pytest

from kvtier.io.device import Device
from kvtier.io.probe import open_device
from tests.device_contract import DeviceContract
from tests.nvme_kernel import DRIVE
from tests.test_io_pending import (  # noqa: F401
    test_a_forked_child_is_refused,
    test_a_thread_that_started_a_batch_may_end,
    test_beside_readers_and_writers,
    test_callbacks_come_once_and_then_at_once,
    test_close_completes_what_was_started,
    test_empty_batches_are_done,
    test_many_batches_at_once,
    test_memory_lives_until_the_batch_is_done,
    test_the_eventfd_wakes_for_every_batch,
    test_waiting_for_a_started_batch,
    test_what_is_wrong_is_refused_at_once,
)


@pytest.fixture
def path() -> str:
    return DRIVE


@pytest.fixture
def device(path: str) -> Iterator[Device]:
    device = open_device(path, engine="nvme")
    yield device
    device.close()


class TestPassthrough(DeviceContract):
    """What every Device must do."""
