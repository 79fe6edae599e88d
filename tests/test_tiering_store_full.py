"""Random walks over a region that is too small: every refusal leaves what was there as it was."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import CapacityError, DeviceError
from kvtier.tiering.config import Config
from kvtier.tiering.writer import hot_bytes_min
from tests.late_writes import at_once
from tests.store_cases import (
    GEOMETRIES,
    KV,
    MIB,
    Shuffled,
    check_bytes,
    check_everywhere,
    extend,
    open_store,
    some_tokens,
)
from tests.test_tiering_store_model import Pair, Walk


class FullWalk(Walk):
    """A walk whose steps may find the region full; then the step counts as not taken."""

    refusals = evictions = 0

    def _try(self, step: Callable[[Pair], None], pair: Pair) -> None:
        before = list(pair.tokens)
        try:
            step(pair)
        except CapacityError:
            self.refusals += 1
            pair.tokens[:] = before
            # A pass may have come through in its first layers.
            self.store.crop(pair.sequence, len(before))
        self.evictions += bool(self.store.stats().segments_evicted)

    def append(self, pair: Pair) -> None:
        self._try(super().append, pair)

    def fork(self, pair: Pair) -> None:
        self._try(super().fork, pair)

    def save(self, pair: Pair) -> None:
        self._try(super().save, pair)

    def crop(self, pair: Pair) -> None:
        self._try(super().crop, pair)


@pytest.mark.parametrize("shape", GEOMETRIES)
def test_a_walk_over_a_full_region_is_exact(tmp_path: Path, shape: str) -> None:
    geometry, refusals, evictions = GEOMETRIES[shape], 0, 0
    for seed in (5, 6):
        placement = Shuffled(seed) if seed % 2 else None
        config = Config("2MiB", hot=(1 + seed % 2) * hot_bytes_min(geometry))
        random = np.random.default_rng([7, seed])
        walk = FullWalk(tmp_path / f"s{seed}", KV(geometry), config, placement, random)
        walk.begin()
        # So that the region is full soon.
        walk.pairs[0].tokens += some_tokens(1700, seed)
        extend(walk.store, walk.kv, walk.pairs[0].sequence, walk.pairs[0].tokens)
        walk.run()
        refusals += walk.refusals
        evictions += walk.evictions
    assert refusals + evictions, "a region that was never full shows nothing"


def test_a_layer_that_was_refused_is_as_long_as_before(tmp_path: Path) -> None:
    """So the same append can simply be tried again when there is room."""
    geometry = GEOMETRIES["uniform"]
    kv, tokens = KV(geometry), some_tokens(4500, 1)
    with open_store(tmp_path, geometry, Config("2MiB", hot=MIB), Shuffled(1)) as store:
        filler = store.sequence()
        extend(store, kv, filler, some_tokens(1536, 2))
        sequence = store.sequence()
        extend(store, kv, sequence, tokens[:100])
        used = store.stats().device_bytes
        keys, values = kv.rows(tokens, 0)
        with pytest.raises(CapacityError):
            store.append(sequence, 0, keys[:, 100:], values[:, 100:])
        assert sequence.lengths.tolist() == [100, 100, 100]
        assert store.stats().device_bytes == used
        store.release(filler)
        extend(store, kv, sequence, tokens[:1500])
        assert store.save(sequence, "n", tokens[:1500]) == 1500


def test_a_write_that_failed_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a failed write must not be taken for that of the Frames."""
    geometry = GEOMETRIES["uniform"]
    kv, tokens = KV(geometry), some_tokens(300, 1)
    with open_store(tmp_path, geometry, None, Shuffled(1)) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens)
        used = store.stats().device_bytes

        def refuse(offsets: object, buffers: object) -> None:
            raise DeviceError("the drive refuses", 5)

        with monkeypatch.context() as patched:
            device = store._files.region.device
            patched.setattr(device, "write", refuse)
            patched.setattr(device, "start_write", at_once(device))
            with pytest.raises(DeviceError, match="refuses"):
                store.save(sequence, "n", tokens)
        assert (store.names(), store.stats().device_bytes) == ([], used)
        check_bytes(store, kv, sequence, tokens)
        check_everywhere(store, kv, sequence, tokens)
        assert store.save(sequence, "n", tokens) == 300
        check_bytes(store, kv, sequence, tokens)
