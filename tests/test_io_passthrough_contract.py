"""The contract of every Device, and of started batches, for NVMe passthrough on a drive in this
process. Commands move at most 8 KiB there, so that many requests are several of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.io.device import Device
from kvtier.io.probe import open_device
from tests.conftest import LoopMaker
from tests.device_contract import CAPACITY_BYTES, DeviceContract
from tests.fake_nvme import FakeMachine, drive_on
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

pytestmark = pytest.mark.loop


@pytest.fixture
def machine(tmp_path: Path, loop_device: LoopMaker) -> FakeMachine:
    machine = FakeMachine(tmp_path, loop_device(CAPACITY_BYTES, 512))
    machine.set_queue(max_hw_sectors_kb=8)
    return machine


@pytest.fixture
def path(machine: FakeMachine) -> str:
    return machine.device


@pytest.fixture
def device(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with drive_on(machine.device) as drive:
        machine.put_in(monkeypatch, drive)
        device = open_device(machine.device, engine="nvme")
        yield device
        device.close()


class TestPassthrough(DeviceContract):
    """What every Device must do."""
