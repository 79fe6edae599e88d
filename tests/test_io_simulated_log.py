"""The simulated device's log and bounds, images as new devices, and what it refuses."""

from collections.abc import Callable

import numpy as np
import pytest

from kvtier.errors import AlignmentError, ClosedError, ConfigError, DeviceError
from kvtier.io.device import Buffers
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.io.simulated_log import SimulatedOperation
from tests.device_contract import filled, in_child, integers

BLOCK = 4096
NBYTES = 32 * BLOCK
CACHE = Faults(volatile_cache=True)


def put(device: SimulatedDevice, block: int, seed: int) -> bytes:
    source = filled(BLOCK, seed)
    device.write(integers(block * BLOCK), Buffers.whole(source))
    return source.tobytes()


def replay(log: tuple[SimulatedOperation, ...]) -> tuple[bytes, bytes]:
    """live and durable bytes after a log, by the shortest program that could be right."""
    live, durable = bytearray(NBYTES), bytearray(NBYTES)
    window: list[tuple[int, bytes]] = []
    for each in log:
        if each.kind in ("write", "discard"):
            assert len(each.data) == (each.length if each.kind == "write" else 0)
            data = each.data or bytes(each.length)
            live[each.offset : each.offset + each.length] = data
            window.append((each.offset, data))
        elif each.kind == "flush":
            for offset, data in window:
                durable[offset : offset + len(data)] = data
            window = []
        elif each.kind == "failed flush":
            window = []
    return bytes(live), bytes(durable)


def test_the_log_says_what_happened_in_order() -> None:
    device = SimulatedDevice.open(NBYTES, faults=CACHE)
    data = put(device, 1, 1)
    device.mark("saved a")
    device.discard(integers(0), integers(2 * BLOCK))
    device.flush()
    device.read(integers(0), Buffers.whole(filled(BLOCK, 1)))
    assert device.log == (
        SimulatedOperation("write", BLOCK, BLOCK, data),
        SimulatedOperation("mark", text="saved a"),
        SimulatedOperation("discard", 0, 2 * BLOCK),
        SimulatedOperation("flush"),
    )
    device.clear_log()
    assert len(device.log) == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_replayed_log_gives_the_same_bytes(seed: int) -> None:
    random = np.random.default_rng(seed)
    faults = Faults(
        volatile_cache=True,
        shuffled=True,
        short_rate=0.3,
        bad_ranges=(BadRange(7 * BLOCK, BLOCK, reads=False),),
        failing_flushes=(2, 5),
    )
    device = SimulatedDevice.open(NBYTES, seed=seed, faults=faults)
    refused = 0
    for turn in range(60):
        offset = int(random.integers(0, 30)) * BLOCK
        try:
            match random.integers(0, 4):
                case 0:
                    device.flush()
                case 1:
                    device.discard(integers(offset), integers(BLOCK))
                case _:
                    pieces = Buffers(
                        filled(3 * BLOCK, turn), integers(0, BLOCK), integers(BLOCK, 2 * BLOCK)
                    )
                    device.write(integers(offset, offset), pieces)
        except DeviceError:
            refused += 1
    assert refused > 2
    assert replay(device.log) == (device.live(), device.image("none"))


def test_the_log_is_bounded_and_says_so_before_anything_is_written() -> None:
    device = SimulatedDevice.open(NBYTES, log_bytes_max=3 * BLOCK)
    put(device, 0, 1)
    put(device, 1, 2)
    before = device.live()
    with pytest.raises(ConfigError, match="call clear_log"):
        put(device, 2, 3)
    assert device.live() == before
    assert len(device.log) == 2
    device.clear_log()
    put(device, 2, 3)
    with pytest.raises(ConfigError, match=f"more than log_bytes_max, {3 * BLOCK} bytes"):
        device.mark("x" * 3 * BLOCK)


@pytest.mark.parametrize(
    "use",
    [
        lambda device: device.flush(),
        lambda device: device.mark("x"),
        lambda device: device.discard(integers(0), integers(BLOCK)),
        lambda device: device.write(integers(0), Buffers(filled(1, 1), integers(0), integers(0))),
    ],
    ids=["flush", "mark", "discard", "write of no bytes"],
)
def test_operations_without_data_are_bounded_too(use: Callable[[SimulatedDevice], None]) -> None:
    device = SimulatedDevice.open(NBYTES, log_bytes_max=650)
    while len(device.log) < 10:
        before = len(device.log)
        use(device)
        assert len(device.log) == before + 1
    with pytest.raises(ConfigError, match="log_bytes_max"):
        use(device)


def test_what_is_unflushed_is_bounded_too() -> None:
    device = SimulatedDevice.open(NBYTES, faults=CACHE, log_bytes_max=3 * BLOCK)
    put(device, 0, 1)
    put(device, 1, 2)
    device.clear_log()
    with pytest.raises(ConfigError, match="unflushed"):
        put(device, 2, 3)
    device.flush()
    put(device, 2, 3)


def test_a_device_from_an_image_holds_a_durable_copy() -> None:
    first = SimulatedDevice.open(NBYTES, faults=CACHE)
    put(first, 3, 1)
    image = first.image("all")
    second = SimulatedDevice.from_image(image, faults=CACHE, path="second")
    assert second.path == "second"
    assert second.capacity_bytes == NBYTES
    assert second.live() == second.image("none") == image
    put(second, 3, 2)
    assert first.live() == image, "the two share nothing"
    assert second.image("none") == image
    assert second.live() != image


def test_images_after_close_and_nothing_in_a_forked_child() -> None:
    device = SimulatedDevice.open(NBYTES, faults=CACHE)
    put(device, 0, 1)
    for use in (device.image, device.live, device.clear_log, lambda: device.mark("x")):
        assert in_child(use) == 0  # type: ignore[arg-type]
    device.close()
    assert device.image("all") == device.live() != device.image("none")
    for refused in (
        lambda: device.mark("x"),
        lambda: device.rot(0, 1, 1),
        device.clear_log,
        lambda: device.set_faults(CACHE),
    ):
        with pytest.raises(ClosedError):
            refused()


def test_the_cache_stays_while_it_holds_something() -> None:
    device = SimulatedDevice.open(NBYTES, faults=CACHE)
    put(device, 0, 1)
    with pytest.raises(ConfigError, match="1 unflushed"):
        device.set_faults(Faults())
    assert device.faults == CACHE
    device.flush()
    device.set_faults(Faults())
    put(device, 1, 2)
    assert device.image("none") == device.live()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Faults(lost_rate=1.5), "lost_rate"),
        (lambda: Faults(short_rate=-0.1), "short_rate"),
        (lambda: Faults(misdirected_rate=float("nan")), "misdirected_rate"),
        (lambda: Faults(rotted_bits=0), "rotted_bits"),
        (lambda: Faults(failing_flushes=(0,)), "from 1"),
        (lambda: Faults(delay_s=1.01), "delay_s"),
        (lambda: Faults(delay_s=float("nan")), "delay_s"),
        (lambda: BadRange(-1, 5), "offset"),
        (lambda: BadRange(0, 0), "length"),
        (lambda: BadRange(0, 1, 1), "ENODATA"),
        (lambda: SimulatedDevice.open(BLOCK, block_bytes=1024), "1024"),
        (lambda: SimulatedDevice.open(0), "multiple"),
        (lambda: SimulatedDevice.open(BLOCK + 512), "4608"),
        (lambda: SimulatedDevice.from_image(bytes(512)), "512"),
        (lambda: SimulatedDevice.open(BLOCK, seed=-1), "seed"),
        (lambda: SimulatedDevice.open(BLOCK).image("most"), "most"),  # type: ignore[arg-type]
        (lambda: SimulatedDevice.open(BLOCK).image(torn_bytes=1000), "1000"),
        (lambda: SimulatedDevice.open(BLOCK).image(seed=-1), "seed"),
        (lambda: SimulatedDevice.open(BLOCK).rot(0, 1, 9), "9 bits"),
        (lambda: SimulatedDevice.open(BLOCK).rot(0, BLOCK + 1, 1), "outside"),
        (lambda: SimulatedDevice.open(BLOCK).discard(integers(0), integers()), "1 offsets"),
        (lambda: SimulatedDevice.open(BLOCK).discard(integers(0), integers(-BLOCK)), "outside"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make()


def test_a_discard_off_the_blocks_is_refused_and_changes_nothing() -> None:
    device = SimulatedDevice.open(NBYTES)
    put(device, 0, 1)
    before = device.live()
    with pytest.raises(AlignmentError):
        device.discard(integers(0, 512), integers(BLOCK, BLOCK))
    assert device.live() == before
    assert len(device.log) == 1
