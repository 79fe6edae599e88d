"""Reads that fail in part: a miss, a counter, a line in the log; and neighbours stay exact."""

import errno
import logging
from pathlib import Path

import pytest

from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.tiering import opening
from kvtier.tiering.config import Config
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.corruption_cases import Kept
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

OF_M = KV(PLAIN)
DEVICE_BYTES = 8 * MIB
SEGMENT = 512


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimulatedDevice:
    """What every store of the test lies on."""
    (tmp_path / "device").touch()
    device = Kept.open(DEVICE_BYTES, block_bytes=512, path=str(tmp_path / "device"))
    monkeypatch.setattr(opening, "open_device", lambda path, **wishes: device)
    monkeypatch.setattr(opening, "create_region_file", lambda path, nbytes: Path(path).touch())
    return device


def resumed(store: Store, tokens: list[int]) -> int:
    """How much of it is returned; an assertion if its bytes are not exact."""
    sequence = store.resume(tokens)
    found = sequence.length()
    if found:
        check_bytes(store, OF_M, sequence, tokens[:found])
    store.release(sequence)
    return found


def test_damaged_bytes_are_a_miss_a_counter_and_a_line_that_names_the_block(
    tmp_path: Path, device: SimulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """And a neighbour that the same batch reads is exact."""
    lists = [some_tokens(3 * SEGMENT, number) for number in range(2)]
    with open_store(tmp_path / "s", PLAIN, Config("8MiB", hot="4MiB")) as store:
        for number, tokens in enumerate(lists):
            put(store, OF_M, f"n{number}", tokens)
        bad = store._registry.committed[3].extents[0]
        assert bad is not None
    device.rot(bad.offset + bad.length // 2, 512, 1)
    with open_store(tmp_path / "s", PLAIN, Config(hot="4MiB")) as store:
        with caplog.at_level(logging.ERROR, "kvtier"):
            assert [resumed(store, tokens) for tokens in lists] == [2 * SEGMENT, 3 * SEGMENT]
        (line,) = caplog.messages
        assert line.startswith("quarantined: layer 0 at ")
        assert f"byte {bad.offset} of {device.path} (block {bad.offset // 512} of 512" in line
        assert "payload is damaged" in line
        assert store.stats().damaged_extents == 1


@pytest.mark.parametrize("hot", [MIB, 4 * MIB])
def test_two_sequences_on_one_prefix_see_the_same_of_it(
    tmp_path: Path, device: SimulatedDevice, hot: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A042: block 3 of 4 cannot be read; both match 2 blocks, until it is written anew."""
    prefix = some_tokens(4 * SEGMENT, 1)
    streams = [prefix + some_tokens(100, seed) for seed in (2, 3)]
    with open_store(tmp_path / "s", PLAIN, Config("8MiB", hot=hot)) as store:
        put(store, OF_M, "prefix", prefix)
        for number, tokens in enumerate(streams):
            put(store, OF_M, f"n{number}", tokens)
        bad = store._registry.committed[3].extents[1]
        assert bad is not None
        # Nothing is in HOT any more: everything must be read.
        put(store, OF_M, "other", some_tokens(hot // 256, 9))
        store.release(store.resume(some_tokens(hot // 256, 9)))
        device.set_faults(Faults(bad_ranges=(BadRange(bad.offset, 4096, errno.ENODATA),)))
        with caplog.at_level(logging.ERROR, "kvtier"):
            both = [store.resume(tokens) for tokens in streams]
        for words in (f"byte {bad.offset} ", f"block {bad.offset // 512} of 512", device.path):
            assert words in caplog.text
        for sequence, tokens in zip(both, streams, strict=True):
            assert sequence.length() == 2 * SEGMENT
            check_everywhere(store, OF_M, sequence, tokens[: 2 * SEGMENT])
        assert store.stats().failed_reads == 1
        # One computes it anew, and saves it: then both find all of it.
        extend(store, OF_M, both[0], streams[0])
        assert store.save(both[0], "n0", streams[0]) == len(streams[0])
        check_everywhere(store, OF_M, both[0], streams[0])
        for sequence in both:
            store.release(sequence)
        assert resumed(store, streams[0]) == len(streams[0])
        assert resumed(store, streams[1]) == len(streams[1]), "what lies behind it is whole"


def test_a_sound_extent_at_the_wrong_place_is_a_miss(tmp_path: Path) -> None:
    """A064: slot 5 is copied over slot 9; both are valid, and of the same size."""
    lists = [some_tokens(SEGMENT, number) for number in range(12)]
    with open_store(tmp_path) as store:
        for number, tokens in enumerate(lists):
            put(store, OF_M, f"n{number}", tokens)
        extents = {
            number: store._registry.committed[number + 1].extents for number in range(len(lists))
        }
    with (tmp_path / "region.kv").open("r+b") as file:
        for source, target in zip(extents[5], extents[9], strict=True):
            assert source is not None
            assert target is not None
            assert source.length == target.length
            file.seek(source.offset)
            data = file.read(source.length)
            file.seek(target.offset)
            file.write(data)
    findings = verify(tmp_path).findings
    assert [each.kind for each in findings] == ["header", "header"]
    assert all("another extent lies here" in each.what for each in findings)
    with open_store(tmp_path) as store:
        found = [resumed(store, tokens) for tokens in lists]
        assert found == [0 if number == 9 else SEGMENT for number in range(len(lists))]
        assert store.stats().damaged_extents == 1
