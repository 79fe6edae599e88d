"""Units are read ahead of attention: exact bytes all the same, no error in the wrong place, and
nothing left behind."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import DeviceError, FormatError
from kvtier.io.device import Buffers, Int64Array, PendingBatch, Priority
from kvtier.io.simulated_faults import Faults
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from tests.aio_cases import ENGINES, hot_is_accounted_for, simulated_drives
from tests.store_cases import (
    KV,
    Remembered,
    a_query,
    check_attend,
    check_bytes,
    check_everywhere,
    check_settled,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

IN_PLACE = Geometry.uniform(4, 2, 32)
"""Frames of 4096 bytes: Pages are read straight into them."""
BOUNCED = Geometry.uniform(4, 2, 24)
"""Frames of 3072 bytes: on a drive of 4096 bytes to a block they are not."""
WINDOWS = Geometry(
    (LayerGeometry(2, 32, 32), LayerGeometry(2, 32, 32, 700), LayerGeometry(2, 32, 32)), "float32"
)
TOKENS = some_tokens(4 * 512 + 200, 3)


def hot_of(geometry: Geometry, units: int) -> int:
    return units * geometry.frames_bytes(0, 512) + 2 * geometry.token_bytes * 16


def stored(path: Path, geometry: Geometry, tokens: list[int] = TOKENS) -> Remembered:
    kv = Remembered(geometry)
    with open_store(path, geometry, Config("48MiB", hot="16MiB")) as store:
        put(store, kv, "a", tokens)
    return kv


def check_nothing_left(store: Store, path: Path) -> None:
    assert store._mover.ahead.held_bytes == 0
    store._mover.flights.wait()
    assert store._mover.flights.frames_bytes == 0
    assert store._mover.ahead.buffers.used_bytes == 0
    assert store._extents.buffers.used_bytes == 0
    assert hot_is_accounted_for(store)
    check_settled(store, path)


def decode(store: Store, kv: KV, sequence: Sequence, tokens: list[int], steps: int) -> list[int]:
    """Append one token after the other, and compare every layer with the oracle."""
    for step in range(steps):
        tokens = [*tokens, step]
        for layer in range(len(kv.geometry.layers)):
            keys, values = kv.rows(tokens, layer)
            store.append(sequence, layer, keys[:, -1:], values[:, -1:])
            check_attend(store, kv, sequence, tokens, layer=layer)
    return tokens


@pytest.mark.parametrize("units", [3, 7, 9])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("geometry", [IN_PLACE, BOUNCED, WINDOWS])
def test_decoding_beyond_hot_is_exact(
    tmp_path: Path, geometry: Geometry, engine: Any, units: int
) -> None:
    kv = stored(tmp_path, geometry)
    config = Config(None, hot_of(geometry, units), engine=engine)
    with open_store(tmp_path, geometry, config) as store:
        sequence = store.resume(TOKENS)
        decode(store, kv, sequence, TOKENS, 3)
        stats = store.stats()
        assert stats.pages_ahead > 0
        assert stats.pages_ahead_in_vain <= stats.pages_ahead // 4
        store.release(sequence)
        check_nothing_left(store, tmp_path)


@pytest.mark.parametrize("geometry", [IN_PLACE, BOUNCED])
@pytest.mark.parametrize("lazily", [False, True])
def test_a_slow_drive_that_answers_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, geometry: Geometry, lazily: bool
) -> None:
    kv = stored(tmp_path, geometry)
    faults = Faults(delay_s=0.002, shuffled=True, short_rate=0.2)
    config = Config(None, hot_of(geometry, 7))
    with (
        simulated_drives(monkeypatch, faults),
        open_store(tmp_path, geometry, config) as store,
    ):
        sequence = store.resume(TOKENS, lazily=lazily)
        decode(store, kv, sequence, TOKENS, 2)
        store.release(sequence)
        check_nothing_left(store, tmp_path)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_else_happens_gives_up_what_is_ahead(tmp_path: Path, seed: int) -> None:
    """Several Sequences in turn that grow, are cropped, forked, released, read and saved."""
    kv, chance = stored(tmp_path, IN_PLACE), random.Random(seed)
    held: list[tuple[Sequence, list[int]]] = []
    with open_store(tmp_path, IN_PLACE, Config(None, hot_of(IN_PLACE, 6))) as store:
        for turn in range(40):
            what = chance.choice(["attend", "attend", "decode", "crop", "fork", "end", "save"])
            if len(held) < 2 or (what == "fork" and len(held) > 4):
                cut = chance.randrange(600, len(TOKENS))
                tokens = TOKENS[:cut]
                held.append((store.resume(tokens, lazily=chance.random() < 0.5), tokens))
                continue
            at = chance.randrange(len(held))
            sequence, tokens = held[at]
            if what == "attend":
                for layer in range(chance.randrange(1, 5)):
                    check_attend(store, kv, sequence, tokens, layer=layer)
            elif what == "decode":
                held[at] = sequence, decode(store, kv, sequence, tokens, 1)
            elif what == "crop":
                held[at] = sequence, tokens[: chance.randrange(500, len(tokens))]
                store.crop(sequence, len(held[at][1]))
            elif what == "fork":
                held.append((store.fork(sequence), tokens))
            elif what == "save":
                store.save(sequence, f"n{turn}", tokens)
            else:
                store.release(held.pop(at)[0])
        for sequence, tokens in held:
            check_everywhere(store, kv, sequence, tokens)
            store.release(sequence)
        check_nothing_left(store, tmp_path)


def test_closing_with_reads_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, IN_PLACE)
    config = Config(None, hot_of(IN_PLACE, 9))
    with simulated_drives(monkeypatch, Faults(delay_s=0.05)):
        with open_store(tmp_path, IN_PLACE, config) as store:
            store.resume(TOKENS, lazily=True)
            assert store._mover.ahead.air_bytes > 0
        with open_store(tmp_path, IN_PLACE, config) as store:
            assert store.resume(TOKENS).length() == len(TOKENS)


# ---- failures ---------------------------------------------------------------------------------


def extent_of(store: Store, layer: int, index: int) -> tuple[int, int]:
    """Offset and end of the Extent of one of the prompt's Segments."""
    segment = sorted(store._registry.committed.values(), key=lambda each: each.start)[index]
    extent = segment.extents[layer]
    assert extent is not None
    return extent.offset, extent.end


def damage(path: Path, layer: int, index: int) -> None:
    with open_store(path, IN_PLACE, Config(None)) as store:
        _, end = extent_of(store, layer, index)
    with next(path.glob("region*")).open("r+b") as file:
        file.seek(end - 5000)
        file.write(b"damaged")


def fail_reads(store: Store, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read that touches these bytes fails from now on."""
    device, genuine = store._extents.device, store._extents.device.start_read

    def start_read(
        offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
    ) -> PendingBatch:
        batch = genuine(offsets, buffers, priority)
        device.wait(batch)
        batch.errors[(offsets < place[1]) & (offsets + buffers.lengths > place[0])] = 5
        return batch

    monkeypatch.setattr(device, "start_read", start_read)


@pytest.mark.parametrize("hot_units", [6, 40])
def test_damage_ahead_is_an_error_where_it_is_needed(tmp_path: Path, hot_units: int) -> None:
    """Layer 2 is damaged: layers 0 and 1 do not notice, though it was read while they were."""
    kv = stored(tmp_path, IN_PLACE)
    damage(tmp_path, 2, 1)
    with open_store(tmp_path, IN_PLACE, Config(None, hot_of(IN_PLACE, hot_units))) as store:
        sequence = store.resume(TOKENS, lazily=True)
        assert sequence.length() == len(TOKENS)
        for layer in (0, 1):
            check_attend(store, kv, sequence, TOKENS, layer=layer)
        assert store.stats().damaged_extents == 0
        with pytest.raises(FormatError, match="payload is damaged"):
            store.attend(sequence, 2, a_query(kv, 2, 1, 0))
        assert store.stats().damaged_extents == 1
        check_attend(store, kv, sequence, TOKENS, layer=3)
        store.release(sequence)
        assert store.lookup(TOKENS) == 512
        again = store.resume(TOKENS, lazily=True)
        assert again.length() == 512
        check_everywhere(store, kv, again, TOKENS[:512])
        store.release(again)
        assert store._mover.ahead.held_bytes == 0
        assert hot_is_accounted_for(store)


@pytest.mark.parametrize("in_layer", [1, 3])
def test_what_cannot_be_read_ahead_is_an_error_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_layer: int
) -> None:
    kv = stored(tmp_path, IN_PLACE)
    with open_store(tmp_path, IN_PLACE, Config(None, hot_of(IN_PLACE, 40))) as store:
        sequence = store.resume(TOKENS, lazily=True)
        store._mover.ahead.give_up()
        store._mover.flights.wait()
        fail_reads(store, extent_of(store, in_layer, 2), monkeypatch)
        for layer in range(4):
            if layer == in_layer:
                with pytest.raises(DeviceError, match="cannot be read"):
                    store.attend(sequence, layer, a_query(kv, layer, 1, 0))
            else:
                check_attend(store, kv, sequence, TOKENS, layer=layer)
        assert store.stats().failed_reads == 1
        store.release(sequence)
        monkeypatch.undo()
        check_nothing_left(store, tmp_path)


def test_a_drive_that_refuses_to_read_ahead_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = stored(tmp_path, IN_PLACE)
    with open_store(tmp_path, IN_PLACE, Config(None, hot_of(IN_PLACE, 7))) as store:
        genuine = store._extents.device.start_read

        def start_read(offsets: Any, buffers: Any, priority: Priority) -> PendingBatch:
            if priority is Priority.PREFETCH:
                raise DeviceError("not now", 5)
            return genuine(offsets, buffers, priority)

        monkeypatch.setattr(store._extents.device, "start_read", start_read)
        sequence = store.resume(TOKENS, lazily=True)
        decode(store, kv, sequence, TOKENS, 1)
        store.release(sequence)
        stats = store.stats()
        assert stats.pages_ahead == stats.pages_ahead_in_vain > 0
        check_nothing_left(store, tmp_path)


# ---- restores ---------------------------------------------------------------------------------


def test_lazily_reads_headers_alone_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = stored(tmp_path, IN_PLACE)
    with open_store(tmp_path, IN_PLACE, Config(None, "16MiB")) as store:
        asked: list[tuple[Priority, int]] = []
        genuine = store._extents.device.start_read

        def start_read(offsets: Any, buffers: Buffers, priority: Priority) -> PendingBatch:
            asked.append((priority, int(buffers.lengths.sum())))
            return genuine(offsets, buffers, priority)

        monkeypatch.setattr(store._extents.device, "start_read", start_read)
        sequence = store.resume(TOKENS, lazily=True)
        demanded = sum(nbytes for priority, nbytes in asked if priority is Priority.DEMAND)
        assert demanded <= 5 * 4 * 8192
        assert any(priority is Priority.PREFETCH for priority, _ in asked)
        check_everywhere(store, kv, sequence, TOKENS)
        check_bytes(store, kv, sequence, TOKENS)
        store.release(sequence)
        check_nothing_left(store, tmp_path)


def test_a_restore_is_one_walk_over_the_drive_straight_into_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that was written at once: requests in ascending order, and no bounce buffer but for
    its end, which is no whole Page."""
    kv = stored(tmp_path, IN_PLACE)
    with open_store(tmp_path, IN_PLACE, Config(None, "16MiB")) as store:
        offsets: list[int] = []
        genuine = store._extents.device.start_read

        def start_read(places: Int64Array, buffers: Buffers, priority: Priority) -> PendingBatch:
            if buffers.memory is not store._extents.buffers.memory:
                offsets.extend(places.tolist())
            return genuine(places, buffers, priority)

        monkeypatch.setattr(store._extents.device, "start_read", start_read)
        sequence = store.resume(TOKENS)
        payloads = np.array(offsets)
        assert (np.diff(payloads) > 0).mean() > 0.9
        assert store._extents.buffers.used_bytes_max <= 4 * 128 * 1024
        check_bytes(store, kv, sequence, TOKENS)
