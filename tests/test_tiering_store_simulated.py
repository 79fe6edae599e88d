"""A Store on a simulated device: what a power cut, a lying or a faulty drive leaves of it.

The catalog is a real file; only the region's device is replaced, where the store opens it.
"""

import errno
import shutil
from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvtier.errors import DeviceError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.io.simulated_log import SimulatedCounts
from kvtier.io.superblock import DATA_START
from kvtier.tiering import opening
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.store import Store
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    check_bytes,
    check_everywhere,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Remembered(KV):
    """Computes the rows of a token list once, because hundreds of stores are compared to them."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self._known: dict[tuple[tuple[int, ...], int], tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(self, tokens: Listing[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = (tuple(tokens), layer)
        if key not in self._known:
            self._known[key] = super().rows(tokens, layer)
        return self._known[key]


OF_M = Remembered(PLAIN)
A, B, C = some_tokens(700, 1), some_tokens(1100, 2), some_tokens(300, 3)
CACHE = Faults(volatile_cache=True)
SEEDS = 200


class Unkind(SimulatedDevice):
    """Also does to a flush what a power cut or a cheap drive does; the cache stays as it is."""

    flushes_lie = False
    power_is_cut = False

    def flush(self) -> None:
        if self.power_is_cut:
            raise DeviceError("the power was cut")
        if not self.flushes_lie:
            super().flush()


@dataclass
class Bench:
    """Stores whose regions are simulated: `image` and `faults` of the next device, devices made."""

    image: bytes = bytes(3 * MIB)
    faults: Faults = CACHE
    seed: int = 0
    devices: list[Unkind] = field(default_factory=list)

    def open_device(self, path: str, **wishes: object) -> Unkind:
        assert set(wishes) == {"engine", "direct"}
        device = Unkind.from_image(self.image, path=path, faults=self.faults, seed=self.seed)
        self.devices.append(device)
        return device

    def reopened(self, directory: Path, copy: Path, image: bytes) -> Store:
        """The store in a copy of `directory`, after a power cut that left `image`."""
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(directory, copy)
        self.image = image
        return open_store(copy)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench()
    monkeypatch.setattr(opening, "open_device", bench.open_device)
    # The store asks whether the file exists, and whether it holds anything foreign.
    monkeypatch.setattr(opening, "create_region_file", lambda path, nbytes: Path(path).touch())
    yield bench
    for device in bench.devices:
        device.close()


def resumed(store: Store, tokens: list[int]) -> int:
    """How much of it the store returns; an assertion if that is other bytes than were saved."""
    sequence = store.resume(tokens)
    found = sequence.length()
    if found:
        check_bytes(store, OF_M, sequence, tokens[:found])
    store.release(sequence)
    return found


def test_what_was_flushed_is_resumed_exactly(tmp_path: Path, bench: Bench) -> None:
    with open_store(tmp_path / "s") as store:
        assert store.stats().engine == "simulated"
        put(store, OF_M, "a", A)
        put(store, OF_M, "b", B)
    (device,) = bench.devices
    assert device.image("none") == device.live()
    assert device.counts.flushes >= 4
    assert (tmp_path / "s" / "region.kv").stat().st_size == 0, "nothing went to the file"
    with bench.reopened(tmp_path / "s", tmp_path / "copy", device.image("none")) as store:
        assert [each.name for each in store.names()] == ["a", "b"]
        for tokens in (A, B):
            sequence = store.resume(tokens)
            check_bytes(store, OF_M, sequence, tokens)
            check_everywhere(store, OF_M, sequence, tokens)
            store.release(sequence)
        assert store.stats().damaged_extents == 0


def test_faults_that_no_caller_may_notice(tmp_path: Path, bench: Bench) -> None:
    for seed in range(5):
        bench.faults = Faults(volatile_cache=True, shuffled=True, short_rate=0.7)
        bench.seed, bench.image = seed, bytes(3 * MIB)
        with open_store(tmp_path / str(seed)) as store:
            put(store, OF_M, "a", A)
            assert resumed(store, A) == len(A)
        assert bench.devices[-1].counts.short_transfers > 0


@pytest.mark.parametrize("torn_bytes", [512, 4096])
def test_power_cut_before_the_flush(tmp_path: Path, bench: Bench, torn_bytes: int) -> None:
    """What was acknowledged before is exact, and what was being saved is not there."""
    store = open_store(tmp_path / "s")
    put(store, OF_M, "a", A)
    (device,) = bench.devices
    device.power_is_cut = True
    with pytest.raises(DeviceError, match="cut"):
        put(store, OF_M, "b", B)
    assert len(device.log) > 4
    assert device.image("all") != device.image("none"), "something was on its way"
    store.close()
    for seed in range(SEEDS // 2):
        image = device.image(seed=seed, torn_bytes=torn_bytes)
        with bench.reopened(tmp_path / "s", tmp_path / "copy", image) as reopened:
            assert resumed(reopened, A) == len(A)
            assert resumed(reopened, B) == 0
            if seed % 20 == 0:
                put(reopened, OF_M, "b", B)
                assert resumed(reopened, B) == len(B)


@pytest.mark.parametrize("hot", [200_000, 4_000_000])
def test_a_flush_that_failed_loses_nothing_that_is_saved_later(
    tmp_path: Path, bench: Bench, hot: int
) -> None:
    """A065: the drive dropped what it held; a later flush that succeeds says nothing of that."""
    store = open_store(tmp_path / "s", PLAIN, Config("3MiB", hot=hot))
    (device,) = bench.devices
    sequence = store.sequence()
    extend(store, OF_M, sequence, B[:1060])
    twin = store.fork(sequence)
    device.set_faults(Faults(volatile_cache=True, failing_flushes=(device.counts.flushes + 1,)))
    with pytest.raises(DeviceError, match="durable"):
        put(store, OF_M, "a", A)
    assert store.names() == []
    store.name_tokens(sequence, B)
    extend(store, OF_M, sequence, B)
    store.save(sequence, "b", B)
    store.save(twin, "twin", B[:1060])
    put(store, OF_M, "a", A)
    check_bytes(store, OF_M, sequence, B)
    image = device.image("none")
    store.close()
    with bench.reopened(tmp_path / "s", tmp_path / "copy", image) as reopened:
        assert resumed(reopened, B) == len(B)
        assert resumed(reopened, A) == len(A)
        assert len(reopened.names()) == 3
        assert reopened.stats().damaged_extents == 0


def test_a_drive_that_lies_about_flushes(tmp_path: Path, bench: Bench) -> None:
    """The catalog names what a power cut took away or tore: a miss or exact, never other bytes."""
    store = open_store(tmp_path / "s")
    put(store, OF_M, "a", A)
    (device,) = bench.devices
    device.flushes_lie = True
    put(store, OF_M, "b", B)
    put(store, OF_M, "c", C)
    store.close()
    found: dict[str, set[int]] = {"b": set(), "c": set()}
    for seed in range(SEEDS):
        image = device.image(seed=seed, torn_bytes=(512, 4096, None)[seed % 3])
        with bench.reopened(tmp_path / "s", tmp_path / "copy", image) as reopened:
            assert resumed(reopened, A) == len(A)
            found["b"].add(resumed(reopened, B))
            found["c"].add(resumed(reopened, C))
    # Otherwise the test would show nothing: of both, misses and hits occurred.
    assert found["b"] >= {0, 512}
    assert found["c"] == {0, len(C)}


def test_a_flush_that_fails_is_an_error_and_the_next_save_is_durable(
    tmp_path: Path, bench: Bench
) -> None:
    store = open_store(tmp_path / "s")
    put(store, OF_M, "a", A)
    (device,) = bench.devices
    device.set_faults(Faults(volatile_cache=True, failing_flushes=(device.counts.flushes + 1,)))
    with pytest.raises(DeviceError, match="durable"):
        put(store, OF_M, "b", B)
    put(store, OF_M, "again", A + B)
    store.close()
    with bench.reopened(tmp_path / "s", tmp_path / "copy", device.image("none")) as reopened:
        assert resumed(reopened, A + B) == len(A + B)
        assert resumed(reopened, B) == 0


def test_a_faulty_drive_never_gives_other_bytes(tmp_path: Path, bench: Bench) -> None:
    """Lost, misdirected and rotted writes: a miss or exact."""
    struck = SimulatedCounts()
    found = saved = 0
    for seed in range(12):
        directory = tmp_path / str(seed)
        bench.seed, bench.image, bench.faults = seed, bytes(3 * MIB), CACHE
        store = open_store(directory)
        device = bench.devices[-1]
        device.set_faults(
            Faults(
                volatile_cache=True,
                lost_rate=0.05,
                misdirected_rate=0.05,
                rotted_rate=0.05,
                rotted_bits=1 + seed,
            )
        )
        lists = [some_tokens(300 + 90 * i, 100 * seed + i) for i in range(6)]
        for i, tokens in enumerate(lists):
            put(store, OF_M, f"n{i}", tokens)
        store.close()
        struck.lost_writes += device.counts.lost_writes
        struck.misdirected_writes += device.counts.misdirected_writes
        struck.rotted_writes += device.counts.rotted_writes
        saved += sum(map(len, lists))
        with bench.reopened(directory, tmp_path / "copy", device.live()) as reopened:
            found += sum(resumed(reopened, tokens) for tokens in lists)
    assert min(struck.lost_writes, struck.misdirected_writes, struck.rotted_writes) > 3
    assert 0 < found < saved


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA])
def test_what_cannot_be_read_is_a_miss(tmp_path: Path, bench: Bench, number: int) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, OF_M, "a", A)
        put(store, OF_M, "b", B)
    image = bench.devices[0].live()
    bench.faults = Faults(bad_ranges=(BadRange(DATA_START + GRID_BYTES, 1, number),))
    with bench.reopened(tmp_path / "s", tmp_path / "copy", image) as reopened:
        assert resumed(reopened, A) == 0
        assert resumed(reopened, B) == len(B)
        assert reopened.stats().failed_reads == 1
