"""Field reports about sharing: forks, holders of one prefix, and what each may see."""

import hashlib
from pathlib import Path

import pytest
import torch

import kvtier
from kvtier.errors import ClosedError, DeviceError, FormatError
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.config import Config
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.listing import describe
from kvtier.tiering.writer import hot_bytes_min, unit_bytes_max
from tests.field_cases import extents_of, fail_reads, zero
from tests.model_cases import expected, generate, prompt, qwen2
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    Shuffled,
    a_query,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")
OF_M = KV(PLAIN)
PREFIX = some_tokens(520, 1)


@pytest.mark.parametrize("count", [20, 520])
def test_appending_to_a_shared_page_leaves_it_to_the_others(tmp_path: Path, count: int) -> None:
    """A020: both hold the prefix; one appends inside the shared page, the other goes, and what HOT
    holds is replaced by something else."""
    prefix = PREFIX[:count]
    grown = [*prefix, 7]
    least = Config("32MiB", hot=hot_bytes_min(PLAIN) + unit_bytes_max(PLAIN))
    with open_store(tmp_path, PLAIN, least, Shuffled(1)) as store:
        put(store, OF_M, "prefix", prefix)
        first, second = store.resume(prefix), store.resume(prefix)
        extend(store, OF_M, second, grown)
        shared = [view.segment for view in first.views]
        assert [each.references for each in shared] == [2] * len(shared)
        check_bytes(store, OF_M, first, prefix)
        store.release(first)
        assert [each.references for each in shared] == [1] * len(shared)
        evicted = store.stats().pages_evicted
        other = store.sequence()
        extend(store, OF_M, other, some_tokens(2100, 5), pieces=300)
        assert store.stats().pages_evicted > evicted
        check_bytes(store, OF_M, second, grown)
        check_everywhere(store, OF_M, second, grown)
        store.release(other)
        store.release(second)
        check_settled(store, tmp_path)
        check_bytes(store, OF_M, store.resume(grown), prefix)


def test_a_stored_cache_is_not_the_one_that_is_handed_out(tmp_path: Path) -> None:
    """A021: loaded three times, and each time generated into."""
    model, ids = qwen2(), prompt(1, 40)
    reference = expected("qwen2", ids, 12)
    with kvtier.open(tmp_path / "kv", model=model, region="8MiB", hot="4MiB") as store:
        cache = TieredCache(store, ids)
        generate(model, ids, cache, 1)
        cache.save("k")
        stored = store.names()
        region = tmp_path / "kv" / "region.kv"
        before = hashlib.sha256(region.read_bytes()).digest()
        for _ in range(3):
            cache = TieredCache(store, ids)
            assert cache.restored_tokens == 39
            assert torch.equal(generate(model, ids, cache, 12), reference)
            assert cache.get_seq_length() == 51
        assert store.names() == stored
        assert [each.tokens for each in describe(tmp_path / "kv").segments] == [40]
        assert hashlib.sha256(region.read_bytes()).digest() == before


def test_what_a_reader_leases_is_never_given_to_others(tmp_path: Path) -> None:
    """A025: while a lease is held everything else is evicted, and the leased bytes stay."""
    least = Config("32MiB", hot=hot_bytes_min(PLAIN) + 2 * unit_bytes_max(PLAIN))
    with open_store(tmp_path, PLAIN, least) as store:
        put(store, OF_M, "held", PREFIX[:512])
        sequence = store.resume(PREFIX[:512])
        unit = Unit(sequence.views[0].segment, 1)
        assert store._mover.load([unit]) == 1
        frames = store._residency.hot.held(1, unit.segment.slot).copy()
        place = torch.tensor([1]).numpy(), torch.tensor([unit.segment.slot]).numpy()
        with store._residency.lease(*place):
            other = store.sequence()
            extend(store, OF_M, other, some_tokens(2000, 3), pieces=200)
            assert store.stats().pages_evicted > 0
            assert (store._residency.hot.held(1, unit.segment.slot) == frames).all()
            keys, values = store._mover.tensors(unit)
            wanted = OF_M.rows(PREFIX[:512], 1)
            assert torch.equal(keys, wanted[0])
            assert torch.equal(values, wanted[1])
        store.release(other)
        store.release(sequence)
        check_settled(store, tmp_path)


def test_a_second_release_takes_nothing_from_another_holder(tmp_path: Path) -> None:
    """A026: each holder has its own handle; releasing one twice counts once."""
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)) as store:
        put(store, OF_M, "prefix", PREFIX)
        first, second = store.resume(PREFIX), store.resume(PREFIX)
        shared = [view.segment for view in second.views]
        for _ in range(3):
            store.release(first)
        store.release_later([first])
        assert store.resume([]).length() == 0
        assert [each.references for each in shared] == [1] * len(shared)
        with pytest.raises(ClosedError, match="this Sequence was closed"):
            store.attend(first, 0, a_query(OF_M, 0, 1, 1))
        check_bytes(store, OF_M, second, PREFIX)
        store.release(second)
        assert [each.references for each in shared] == [0] * len(shared)
        check_settled(store, tmp_path)


@pytest.mark.parametrize("layer", [0, 1])
def test_holders_of_a_prefix_lose_the_same_blocks(tmp_path: Path, layer: int) -> None:
    """A042: the third of four Segments is lost; all match two, until it is written again."""
    tokens = some_tokens(4 * 512, 1)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot="8MiB")) as store:
        put(store, OF_M, "prefix", tokens)
    zero(tmp_path, extents_of(tmp_path)[2][layer])
    with open_store(tmp_path, PLAIN, Config(hot="8MiB")) as store:
        both = [store.resume(tokens) for _ in range(2)]
        for each in both:
            check_bytes(store, OF_M, each, tokens[:1024])
        # One computes the rest anew: the other is not given half of it.
        extend(store, OF_M, both[0], tokens, pieces=100)
        assert [each.length() for each in both] == [2048, 1024]
        check_everywhere(store, OF_M, both[1], tokens[:1024])
        store.save(both[0], "again", tokens)
        check_bytes(store, OF_M, store.resume(tokens), tokens)
        check_bytes(store, OF_M, both[1], tokens[:1024])


def test_two_holders_of_a_block_that_fails_later_both_get_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A042: attached before the damage showed; neither goes on with other bytes."""
    tokens = some_tokens(4 * 512, 1)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=MIB)) as store:
        put(store, OF_M, "prefix", tokens)
    lost = extents_of(tmp_path)[2][1]
    with open_store(tmp_path, PLAIN, Config(hot=hot_bytes_min(PLAIN))) as store:
        both = [store.resume(tokens) for _ in range(2)]
        fail_reads(store, [lost], monkeypatch)
        for each in both:
            assert each.length() == len(tokens)
            with pytest.raises((DeviceError, FormatError)):
                store.attend(each, 1, a_query(OF_M, 1, 1, 1))
        assert store.lookup(tokens) == 1024
        check_bytes(store, OF_M, store.resume(tokens), tokens[:1024])
