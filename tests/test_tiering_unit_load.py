"""A load plans many units at once and reads them in batches: the same bytes however they are cut,
as many units as there is room for, and nothing left behind."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ChecksumMismatch
from kvtier.io.device import Buffers, Int64Array, PendingBatch, Priority
from kvtier.tiering.config import Config
from kvtier.tiering.flight import Flight, Flights
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.store import Store
from kvtier.tiering.units import Units
from tests.aio_cases import hot_is_accounted_for
from tests.store_cases import Remembered, check_bytes, open_store, put, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

IN_PLACE = Geometry.uniform(4, 2, 32)
"""Frames of 4096 bytes: Pages are read straight into them."""
BOUNCED = Geometry.uniform(4, 2, 24)
"""Frames of 3072 bytes: on a drive of 4096 bytes to a block they are not."""
WIDTHS = Geometry(
    (LayerGeometry(2, 32, 32), LayerGeometry(1, 64, 64), LayerGeometry(2, 32, 32)), "float32"
)
"""Two pools, whose layers take turns."""
TOKENS = some_tokens(5 * 512 + 200, 3)
UNIT_BYTES = IN_PLACE.frames_bytes(0, 512)

CUTS = {
    "all at once": (1 << 30, 1 << 30, 3),
    "a unit at a time": (1, 1, 1),
    "small plans that grow": (2 * UNIT_BYTES, 1, 2),
    "one plan of many batches": (1, 1 << 30, 4),
}
"""batch_bytes, plan_bytes and flights_max."""


def stored(path: Path, geometry: Geometry, tokens: list[int] = TOKENS) -> Remembered:
    kv = Remembered(geometry)
    with open_store(path, geometry, Config("48MiB", hot="16MiB")) as store:
        put(store, kv, "a", tokens)
    return kv


def cut(store: Store, name: str) -> None:
    batch_bytes, plan_bytes, flights_max = CUTS[name]
    extents = store._extents
    extents.blocking = replace(
        extents.blocking, batch_bytes=batch_bytes, plan_bytes=plan_bytes, flights_max=flights_max
    )


def all_units(store: Store) -> Units:
    """Of what is stored, with slots, which they keep."""
    sequence = store.sequence()
    restorer = store._restorer
    restorer.attach(sequence, store._registry.match(sequence.provenance, np.array(TOKENS)))
    return restorer.units(sequence)


def check_nothing_left(store: Store) -> None:
    assert store._mover.flights.frames_bytes == 0
    assert store._extents.buffers.used_bytes == 0
    assert hot_is_accounted_for(store)
    assert not store._residency.leases.any()
    # Each room for a header was given back once.
    for pool in store._residency.hot.tier._pools.values():
        assert len({*pool._free_headers}) == len(pool._free_headers)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize(
    "geometry", [IN_PLACE, BOUNCED, WIDTHS], ids=["in place", "bounced", "widths"]
)
def test_however_it_is_cut_a_load_brings_the_same_bytes(
    tmp_path: Path, geometry: Geometry, name: str
) -> None:
    kv = stored(tmp_path, geometry)
    with open_store(tmp_path, geometry, Config(hot="16MiB")) as store:
        cut(store, name)
        for _ in range(2):
            # The second time headers are known.
            sequence = store.resume(TOKENS)
            assert sequence.length() == len(TOKENS)
            before = store.stats().bytes_read
            check_bytes(store, kv, sequence, TOKENS)
            assert store.stats().bytes_read == before, "a part was not in HOT"
            check_nothing_left(store)
            store.release(sequence)
            assert store._room.make(store._residency.hot.tier.limit_bytes)


@pytest.mark.parametrize("name", CUTS)
def test_as_many_units_as_there_is_room_for(tmp_path: Path, name: str) -> None:
    stored(tmp_path, IN_PLACE)
    with open_store(tmp_path, IN_PLACE, Config(hot=9 * UNIT_BYTES + UNIT_BYTES // 2)) as store:
        cut(store, name)
        units = all_units(store)
        assert len(units) == 24
        # Layer by layer, and the sixth Segment is shorter: eight whole ones and that are 9 units.
        sizes = store._extents.sizes(units).frames_bytes.cumsum()
        fitting = int((sizes <= 9 * UNIT_BYTES + UNIT_BYTES // 2).sum())
        assert store._mover.load(units) == fitting
        assert (store._residency.hot.pages[units.layers, units.slots] > 0).tolist() == [
            index < fitting for index in range(24)
        ]
        check_nothing_left(store)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
def test_what_is_sound_stays_where_another_one_is_damaged(
    tmp_path: Path, name: str, is_known: bool
) -> None:
    stored(tmp_path, IN_PLACE)
    with open_store(tmp_path, IN_PLACE, Config(hot="16MiB")) as store:
        units = all_units(store)
        if is_known:
            assert store._mover.load(units) == len(units)
            assert store._room.make(store._residency.hot.tier.limit_bytes)
        cut(store, name)
        extent = units.extents()[13]
        assert extent is not None
        region = tmp_path / "region.kv"
        with region.open("r+b") as file:
            file.seek(extent.offset + extent.length // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 4]))
        with pytest.raises(ChecksumMismatch):
            store._mover.load(units)
        there = store._residency.hot.pages[units.layers, units.slots] > 0
        assert there[:13].all()
        assert not there[13]
        assert units[13].segment.damaged
        assert [each.damaged for each in units.segments].count(True) == 4
        check_nothing_left(store)


def test_the_first_plan_is_small_and_the_next_ones_are_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, IN_PLACE)
    planned: list[int] = []
    add = Flights.add

    def counted(self: Flights, units: Units, batch_bytes: int = 1 << 62) -> list[Flight]:
        planned.append(len(units))
        return add(self, units, batch_bytes)

    monkeypatch.setattr(Flights, "add", counted)
    with open_store(tmp_path, IN_PLACE, Config(hot="16MiB")) as store:
        blocking = store._extents.blocking
        store._extents.blocking = replace(blocking, batch_bytes=1, plan_bytes=2 * UNIT_BYTES)
        assert store._mover.load(all_units(store)) == 24
        assert planned[0] == 1
        assert len(planned) < 12
        assert sum(planned) == 24


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize(
    "geometry", [IN_PLACE, BOUNCED, WIDTHS], ids=["in place", "bounced", "widths"]
)
def test_a_unit_that_is_named_twice_has_frames_once(
    tmp_path: Path, geometry: Geometry, name: str
) -> None:
    kv = stored(tmp_path, geometry)
    with open_store(tmp_path, geometry, Config(hot="16MiB")) as store:
        cut(store, name)
        units = list(all_units(store))
        some = Units.of([units[0], *units, units[3], units[0], *units[:5]])
        assert store._mover.load(some) == len(some)
        check_nothing_left(store)
        sequence = store.resume(TOKENS)
        check_bytes(store, kv, sequence, TOKENS)
        store.release(sequence)


def test_parts_ask_for_their_own_units_in_the_order_of_the_device(tmp_path: Path) -> None:
    # Whole Pages only: nothing is bounced.
    stored(tmp_path, IN_PLACE, TOKENS[: 5 * 512 + 192])
    with open_store(tmp_path, IN_PLACE, Config(hot="16MiB")) as store:
        units = all_units(store)
        extents = store._extents
        asked: list[tuple[list[int], int]] = []
        start_read = extents.device.start_read

        def noted(
            offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
        ) -> PendingBatch:
            asked.append((offsets.tolist(), int(buffers.lengths.sum())))
            return start_read(offsets, buffers, priority)

        extents.device.start_read = noted  # type: ignore[method-assign]
        extents.blocking = replace(extents.blocking, batch_bytes=5 * UNIT_BYTES)
        assert store._mover.load(units) == 24
        assert len(asked) > 4
        places = np.array([each.offset for each in units.extents() if each is not None])
        order = places.argsort()
        begun = 0
        for offsets, nbytes in asked:
            assert offsets == sorted(offsets)
            # Whose Extents these lie in: units in the order of the load.
            own = {*order[places[order].searchsorted(offsets, "right") - 1].tolist()}
            assert own == {*range(begun, begun + len(own))}
            # Headers, which are new, and payloads.
            sizes = extents.sizes(units[begun : begun + len(own)])
            assert nbytes == int((sizes.header_bytes + sizes.payload_bytes).sum())
            assert int(sizes.extent_bytes.sum()) <= 5 * UNIT_BYTES
            begun += len(own)
        assert begun == 24
