"""Digests that lie in Extents: what was made is read back, and nothing of them is ever needed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import DeviceError, UnsupportedError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.extent import Extent
from kvtier.io.simulated import SimulatedDevice
from kvtier.tiering import opening, stored_digests, verifier
from kvtier.tiering.catalog_rows import extents_of
from kvtier.tiering.config import Config
from kvtier.tiering.exchange import export_name, import_file
from kvtier.tiering.findings import DIGESTS, PADDING
from kvtier.tiering.rebuilder import rebuild
from kvtier.tiering.steps import Read, Steps, whole
from kvtier.tiering.stored_digests import DigestKind
from kvtier.tiering.verifier import verify
from tests.rebuild_cases import lose, peek, poke, rows
from tests.store_cases import (
    GEOMETRIES,
    KV,
    Shuffled,
    a_query,
    check_bytes,
    check_settled,
    expected,
    open_store,
    put,
    some_tokens,
)
from tests.stored_digest_cases import (
    KEYS,
    REOPENED,
    TOKENS,
    WIDE,
    ask,
    made,
    same,
    sections,
    written,
)

# ---- a store ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [512, 4096])
@pytest.mark.parametrize("bits", [0, 2, 3, 4])
def test_a_store_that_is_opened_again_has_the_same_digests(
    bits: int, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device").touch()
    device = Kept.open(32 << 20, block_bytes=block_bytes, path=str(tmp_path / "device"))
    for module in (opening, verifier):
        monkeypatch.setattr(module, "open_device", lambda path, **wishes: device)
    monkeypatch.setattr(opening, "create_region_file", lambda path, nbytes: Path(path).touch())
    kv, config = KV(WIDE), replace(KEYS, sketch_bits=bits)
    lists = [TOKENS, some_tokens(1, 1), some_tokens(17, 2)]
    with open_store(tmp_path / "s", WIDE, config) as store:
        for number, tokens in enumerate(lists):
            put(store, kv, f"n{number}", tokens)
        before = [made(store, store.resume(tokens), 1) for tokens in lists]
    with open_store(tmp_path / "s", WIDE, replace(config, region=None)) as store:
        for tokens, digests in zip(lists, before, strict=True):
            sequence = store.resume(tokens, lazily=True)
            ask(store, kv, sequence)
            found = [view.segment.digests[1] for view in sequence.views]
            assert len(found) == len(digests)
            assert all(map(same, found, digests))
        stats = store.stats()
        assert (stats.digests_read, stats.digests_made, stats.damaged_digests) == (10, 0, 0)
        assert stats.digest_bytes > 0
        del sequence
    assert verify(tmp_path / "s").findings == []


class Kept(SimulatedDevice):
    """Stays open when a store closes it."""

    def close(self) -> None:
        self.clear_log()


@pytest.fixture
def stored(tmp_path: Path) -> KV:
    return written(tmp_path)


def answers(path: Path, kv: KV, config: Config = REOPENED) -> tuple[list[torch.Tensor], Any]:
    """What queries by a budget get from a store that was just opened, and its numbers."""
    with open_store(path, WIDE, config) as store:
        sequence = store.resume(TOKENS, lazily=True)
        found = ask(store, kv, sequence)
        return found, store.stats()


def test_the_first_step_reads_digests_and_no_whole_unit(stored: KV, tmp_path: Path) -> None:
    with open_store(tmp_path, WIDE, REOPENED) as store:
        sequence = store.resume(TOKENS, lazily=True)
        store._mover.ahead.give_up()
        store._mover.flights.wait()
        store._room.make(store._residency.hot.tier.limit_bytes)
        before = store.stats()
        store._sparse._known(sequence, 0)
        after = store.stats()
        assert after.hot_bytes == before.hot_bytes == 0
        assert after.digests_read == 6, "of both layers"
        assert after.digest_bytes > 0
        read = after.bytes_read - before.bytes_read
        assert 0 < read < 0.2 * len(TOKENS) * WIDE.token_bytes
        store._sparse._known(sequence, 1)
        assert store.stats().bytes_read == after.bytes_read
        store.release(sequence)
        store._registry.forget_unused()
        assert store.stats().digest_bytes == 0


def test_what_this_process_wrote_is_read_too(tmp_path: Path) -> None:
    """Without a commit, and while it may still be on its way."""
    kv = KV(WIDE)
    with open_store(tmp_path, WIDE, KEYS) as store:
        sequence = store.sequence()
        for layer in range(2):
            store.append(sequence, layer, *kv.rows(TOKENS[:1024], layer))
        ask(store, kv, sequence)
        stats = store.stats()
        assert (stats.digests_read, stats.digests_made) == (4, 0)
        for layer in range(2):
            found = [view.segment.digests[layer] for view in sequence.views]
            assert all(map(same, found, made(store, sequence, layer)))


def test_digests_of_one_segment_do_not_depend_on_another(stored: KV, tmp_path: Path) -> None:
    with open_store(tmp_path, WIDE, REOPENED) as store:
        put(store, stored, "b", TOKENS[:512] + some_tokens(600, 9))
        one = store.resume(TOKENS)
        other = store.resume(TOKENS[:512] + some_tokens(600, 9))
        ask(store, stored, one)
        ask(store, stored, other)
        assert one.views[0].segment is other.views[0].segment
        digests = [view.segment.digests[0] for view in (*one.views, *other.views)]
        assert all(map(same, digests, made(store, one, 0) + made(store, other, 0)))


@pytest.mark.parametrize("part", ["head", "means", "end"])
def test_damaged_digests_are_found_and_harmless(stored: KV, part: str, tmp_path: Path) -> None:
    sound, stats = answers(tmp_path, stored)
    assert stats.damaged_digests == 0
    places = sections(tmp_path, WIDE)
    assert len(places) == 6
    extent, layer, tokens, start = places[2]
    nbytes = DigestKind(WIDE, 3).section(layer, tokens).nbytes
    at = extent.offset + start + {"head": 9, "means": nbytes // 2, "end": nbytes - 1}[part]
    byte = peek(tmp_path, Extent(at // GRID_BYTES * GRID_BYTES, GRID_BYTES))[at % GRID_BYTES]
    poke(tmp_path, at, bytes([byte ^ 4]))
    found, stats = answers(tmp_path, stored)
    assert all(map(torch.equal, sound, found))
    assert (stats.damaged_digests, stats.digests_made, stats.digests_read) == (1, 1, 5)
    assert stats.damaged_extents == 0
    assert [each.kind for each in verify(tmp_path).findings] == [DIGESTS]
    with open_store(tmp_path, WIDE, REOPENED) as store:
        report = store.scrub("10GiB").result()
        assert [each.kind for each in report.findings] == [DIGESTS]
        assert report.quarantined == [], "the KV is exact"
        check_bytes(store, stored, store.resume(TOKENS), TOKENS)


def test_a_section_of_another_unit_is_none(stored: KV, tmp_path: Path) -> None:
    """A misdirected write within one Segment has the right generation."""
    sound, _ = answers(tmp_path, stored)
    (first, _, _, start), (second, _, _, other) = sections(tmp_path, WIDE)[:2]
    moved = peek(tmp_path, Extent(first.offset + start, first.length - start))
    assert first.length - start == second.length - other
    poke(tmp_path, second.offset + other, moved)
    found, stats = answers(tmp_path, stored)
    assert all(map(torch.equal, sound, found))
    assert (stats.damaged_digests, stats.digests_made) == (1, 1)
    (finding,) = verify(tmp_path).findings
    assert (finding.kind, finding.what) == (DIGESTS, "its digests are not what its header says")


def test_padding_behind_digests_is_checked(stored: KV, tmp_path: Path) -> None:
    extent = sections(tmp_path, WIDE)[0][0]
    poke(tmp_path, extent.end - 1, b"\x01")
    (finding,) = verify(tmp_path).findings
    assert finding.kind == PADDING
    assert f"the first at byte {extent.end - 1}" in finding.what


def test_digests_that_cannot_be_read_are_made(
    stored: KV, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, _ = answers(tmp_path, stored)

    def fails(read: Read) -> Steps[None]:
        yield from whole(read)
        raise DeviceError("two of them", 5, [(0, 5), (3, 5)])

    monkeypatch.setattr(stored_digests, "whole", fails)
    found, stats = answers(tmp_path, stored)
    assert all(map(torch.equal, sound, found))
    assert (stats.digests_made, stats.damaged_digests, stats.damaged_extents) == (2, 0, 0)
    assert stats.failed_reads > 0


@pytest.mark.parametrize(
    "other", [replace(REOPENED, sketch_bits=2), replace(REOPENED, sketch_bits=0)]
)
def test_another_kind_is_made_from_the_pages(stored: KV, other: Config, tmp_path: Path) -> None:
    found, stats = answers(tmp_path, stored, other)
    assert (stats.digests_read, stats.digests_made, stats.damaged_digests) == (0, 6, 0)
    # What is written now has its own kind; what lies there stays as it is.
    again, _ = answers(tmp_path, stored, other)
    assert all(map(torch.equal, found, again))
    assert verify(tmp_path).findings == []


def test_a_store_by_position_reads_digests_and_writes_none(stored: KV, tmp_path: Path) -> None:
    config = replace(REOPENED, placement="position")
    _, stats = answers(tmp_path, stored, config)
    assert (stats.digests_read, stats.digests_made) == (6, 0)
    with open_store(tmp_path, WIDE, config) as store:
        put(store, stored, "b", some_tokens(600, 3))
    assert len(sections(tmp_path, WIDE)) == 6


def test_extents_without_digests_are_read_as_ever(tmp_path: Path) -> None:
    kv = KV(WIDE)
    with open_store(tmp_path, WIDE, replace(KEYS, placement="position"), Shuffled(1)) as store:
        put(store, kv, "a", TOKENS)
    assert sections(tmp_path, WIDE) == []
    for row in rows(tmp_path):
        for extent in extents_of(row):
            assert peek(tmp_path, extent)[8:12] == b"\x01\0\0\0", "as an older release wrote it"
    _, stats = answers(tmp_path, kv)
    assert (stats.digests_read, stats.digests_made) == (0, 6)
    with open_store(tmp_path, WIDE, REOPENED) as store:
        tokens = TOKENS + some_tokens(500, 5)
        put(store, kv, "b", tokens)
        sequence = store.resume(tokens)
        for layer in range(2):
            query = a_query(kv, layer, 1, 1)
            out = store.attend(sequence, layer, query, budget=1 - 1e-9)
            wanted = expected(kv, tokens, layer, query)
            assert np.abs(out.double().numpy() - wanted).max() < 2e-2
    assert len(sections(tmp_path, WIDE)) == 4, "of two Segments"


def test_digests_survive_a_lost_catalog(stored: KV, tmp_path: Path) -> None:
    sound, _ = answers(tmp_path, stored)
    before = [(row.start_position, row.extents) for row in rows(tmp_path)]
    extent, *_, start = sections(tmp_path, WIDE)[0]
    lose(tmp_path)
    assert rebuild(tmp_path).segments_restored == 3
    assert [(row.start_position, row.extents) for row in rows(tmp_path)] == before
    assert verify(tmp_path).findings == []
    found, stats = answers(tmp_path, stored)
    assert all(map(torch.equal, sound, found))
    assert stats.digests_read == 6
    # A Segment comes back whose digests are damaged: its KV is exact.
    poke(tmp_path, extent.offset + start + 40, bytes(64))
    lose(tmp_path)
    assert rebuild(tmp_path).segments_restored == 3
    found, stats = answers(tmp_path, stored)
    assert all(map(torch.equal, sound, found))
    assert stats.damaged_digests == 1


def test_a_prefix_that_is_imported_is_digested_as_it_is_written(stored: KV, tmp_path: Path) -> None:
    with open_store(tmp_path, WIDE, REOPENED) as store:
        export_name(store, "a", tmp_path / ".." / "a.safetensors")
    other = tmp_path / ".." / "other"
    with open_store(other, WIDE, KEYS) as store:
        import_file(store, tmp_path / ".." / "a.safetensors")
    assert len(sections(other, WIDE)) == 6
    sound, _ = answers(tmp_path, stored)
    found, stats = answers(other, stored)
    assert all(map(torch.equal, sound, found))
    assert (stats.digests_read, stats.digests_made) == (6, 0)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("bits", [0, 3])
def test_every_shape_is_stored_and_settles(name: str, bits: int, tmp_path: Path) -> None:
    geometry = GEOMETRIES[name]
    kv, config = KV(geometry), replace(KEYS, sketch_bits=bits)
    with open_store(tmp_path, geometry, config, Shuffled(2)) as store:
        for number, count in enumerate((1100, 1, 17, 300)):
            put(store, kv, f"n{number}", some_tokens(count, number))
        check_settled(store, tmp_path)
    with open_store(tmp_path, geometry, replace(config, region=None)) as store:
        tokens = some_tokens(1100, 0)
        sequence = store.resume(tokens)
        check_bytes(store, kv, sequence, tokens)
        ask(store, kv, sequence, 0.5)
        stats = store.stats()
        layers = sum(each.window is None for each in geometry.layers)
        assert (stats.digests_read, stats.digests_made) == (3 * layers, 0)
        store.release(sequence)
        check_settled(store, tmp_path)


def test_kv_that_is_not_finite_is_stored_without_digests(tmp_path: Path) -> None:
    keys = torch.randn(2, 512, 64).bfloat16()
    values = keys.clone()
    values[1, 3, 5] = float("inf")
    with open_store(tmp_path, WIDE, KEYS) as store:
        sequence = store.sequence()
        store.append(sequence, 0, keys, values)
        store.append(sequence, 1, keys, keys)
        store.save(sequence, "a", some_tokens(512, 1))
        store.release(sequence)
        check_settled(store, tmp_path)
    assert [layer for _, layer, *_ in sections(tmp_path, WIDE)] == [1]
    with open_store(tmp_path, WIDE, REOPENED) as store:
        sequence = store.resume(some_tokens(512, 1))
        found = store.read(sequence, 0)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)
        with pytest.raises(UnsupportedError, match="not finite"):
            store.attend(sequence, 0, torch.zeros(4, 1, 64).bfloat16(), budget=0.5)
