"""Kept tables of Frames against tables made anew, after everything that may move a Page.

A table that is out of date is the worst there is: attention over other bytes, and no error.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.errors import FormatError
from kvtier.tiering.config import Config
from kvtier.tiering.frame_table import Placed, placed
from kvtier.tiering.geometry import PAGE_TOKENS
from kvtier.tiering.residency import NO_FRAME
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.writer import hot_bytes_min, unit_bytes_max
from tests.store_cases import (
    GEOMETRIES,
    KV,
    PLAIN,
    Shuffled,
    check_attend,
    check_everywhere,
    extend,
    open_store,
    put,
    some_tokens,
)


def table_of(store: Store, sequence: Sequence, layer: int, *, kept: bool) -> Placed | None:
    """Of all tokens of a layer; kept: what the Sequence keeps may be used."""
    tail = [(each, each.filled[layer]) for each in sequence.tail if each.filled[layer]]
    tables = sequence.table.placed if kept else {}
    return placed(tables, store._residency.hot, layer, sequence.views, tail)


def rows_of(store: Store, table: Placed, layer: int) -> list[list[bytes]]:
    """For each kv head the bytes of every token that the table shows, sorted."""
    shape = store.geometry.layers[layer]
    keys, values = (part.bits for part in store._residency.hot.tier.token_rows(layer).parts)
    heads, pages = table.frames.shape
    shown = np.ones((heads, pages, PAGE_TOKENS), np.bool_)
    if isinstance(table.valid, int):
        shown[:, -1, table.valid :] = False
    elif table.valid is not None:
        shown[:, pages - table.valid.shape[1] :] = table.valid.numpy()
    assert heads == shape.kv_heads
    return [
        sorted(
            keys[frame, place].tobytes() + values[frame, place].tobytes()
            for frame, places in zip(table.frames[head].tolist(), shown[head], strict=True)
            for place in np.flatnonzero(places)
        )
        for head in range(heads)
    ]


def expected_rows(kv: KV, tokens: list[int], layer: int) -> list[list[bytes]]:
    keys, values = (
        (each.view(torch.int16) if each.dtype == torch.bfloat16 else each).numpy()
        for each in kv.rows(tokens, layer)
    )
    return [
        sorted(
            keys[head, place].tobytes() + values[head, place].tobytes()
            for place in range(len(tokens))
        )
        for head in range(len(keys))
    ]


def check_tables(store: Store, kv: KV, sequence: Sequence, tokens: list[int]) -> int:
    """Every kept table shows exactly the tokens there are; returns how many layers HOT holds."""
    found = 0
    for layer in range(len(kv.geometry.layers)):
        kept = table_of(store, sequence, layer, kept=True)
        anew = table_of(store, sequence, layer, kept=False)
        assert (kept is None) == (anew is None)
        if kept is None or anew is None:
            continue
        found += 1
        assert torch.equal(kept.frames, anew.frames)
        if isinstance(kept.valid, torch.Tensor) and isinstance(anew.valid, torch.Tensor):
            assert torch.equal(kept.valid, anew.valid)
        else:
            assert kept.valid == anew.valid
        assert rows_of(store, kept, layer) == expected_rows(kv, tokens, layer)
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", GEOMETRIES)
def test_kept_tables_are_those_made_anew(tmp_path: Path, shape: str, seed: int) -> None:
    """A walk of everything that moves Pages: passes, forks, crops, saves, resumes, evictions."""
    geometry, random = GEOMETRIES[shape], np.random.default_rng(seed)
    kv = KV(geometry)
    hot = hot_bytes_min(geometry) + int(random.integers(1, 9)) * unit_bytes_max(geometry)
    config = Config("64MiB", hot=hot, host=unit_bytes_max(geometry) * int(random.integers(4)))
    base, found = some_tokens(2600, seed), 0
    placement = Shuffled(seed) if seed % 2 else None
    with open_store(tmp_path, geometry, config, placement) as store:
        put(store, kv, "base", base[:1500])
        open_now: list[tuple[Sequence, list[int]]] = []
        for _ in range(18):
            choice = random.integers(7)
            if choice == 0 or not open_now:
                length = int(random.integers(1, 1600))
                sequence = store.resume(base[:length])
                open_now.append((sequence, base[: sequence.length()]))
                continue
            place = int(random.integers(len(open_now)))
            sequence, tokens = open_now[place]
            if choice == 1:
                twin = store.fork(sequence)
                open_now.append((twin, tokens))
            elif choice == 2:
                tokens = tokens[: int(random.integers(len(tokens) + 1))]
                store.crop(sequence, len(tokens))
            elif choice == 3 and tokens:
                store.save(sequence, f"n{random.integers(3)}", tokens)
            elif choice == 4:
                store.release(sequence)
                open_now.pop(place)
                continue
            elif choice == 5:
                store._room.make(int(random.integers(hot)))
            else:
                more = some_tokens(int(random.integers(1, 40)), int(random.integers(1000)))
                tokens = tokens + more
                extend(store, kv, sequence, tokens, pieces=int(random.integers(1, 40)))
            open_now[place] = sequence, tokens
            if tokens:
                layer = int(random.integers(len(geometry.layers)))
                check_attend(store, kv, sequence, tokens, layer=layer)
            for each, its_tokens in open_now:
                found += check_tables(store, kv, each, its_tokens)
    assert found > 10, "HOT held next to nothing: nothing was compared"


def test_a_dropped_unit_that_comes_back_elsewhere(tmp_path: Path) -> None:
    """The Frames of a unit belong to another one when it comes back."""
    kv, tokens, others = KV(PLAIN), some_tokens(1024, 1), some_tokens(1024, 2)
    hot = hot_bytes_min(PLAIN) + 3 * unit_bytes_max(PLAIN)
    with open_store(tmp_path, PLAIN, Config("32MiB", hot=hot)) as store:
        put(store, kv, "one", tokens)
        put(store, kv, "other", others)
        first = store.resume(tokens)
        check_everywhere(store, kv, first, tokens)
        before = table_of(store, first, 0, kept=True)
        assert before is not None
        frames = before.frames.clone()
        second = store.resume(others)
        check_everywhere(store, kv, second, others)
        assert table_of(store, first, 0, kept=True) is None
        for _ in range(3):
            check_everywhere(store, kv, first, tokens)
            check_everywhere(store, kv, second, others)
        after = table_of(store, first, 0, kept=True)
        assert after is None or not torch.equal(after.frames, frames)


def test_steps_in_between_keep_the_views_part(tmp_path: Path) -> None:
    """What is kept is kept: a step looks up its Tail and nothing else."""
    kv, tokens = KV(PLAIN), some_tokens(1200, 3)
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens)
        check_everywhere(store, kv, sequence, tokens)
        kept = dict(sequence.table.placed)
        assert sorted(kept) == [0, 1]
        for _ in range(40):
            tokens = tokens + some_tokens(1, len(tokens))
            extend(store, kv, sequence, tokens)
            check_everywhere(store, kv, sequence, tokens)
        assert all(sequence.table.placed[layer] is kept[layer] for layer in kept)
        assert kept[0].slots is kept[1].slots


def test_views_that_end_within_a_segment_show_no_token_beyond(tmp_path: Path) -> None:
    """In the order of positions and in another one, each head in its own."""
    for name, placement in (("plain", None), ("shuffled", Shuffled(5))):
        kv, tokens = KV(PLAIN), some_tokens(1500, 5)
        with open_store(tmp_path / name, PLAIN, placement=placement) as store:
            put(store, kv, "n", tokens)
            for length in (1, 15, 16, 17, 511, 512, 513, 700, 1025, 1499):
                sequence = store.resume(tokens[:length])
                check_everywhere(store, kv, sequence, tokens[:length])
                assert check_tables(store, kv, sequence, tokens[:length]) == 2
                store.release(sequence)


def test_a_damaged_segment_is_an_error_and_not_a_kept_table(tmp_path: Path) -> None:
    """While HOT has its Pages they are exact; once they have left it, the damage shows."""
    kv, tokens = KV(PLAIN), some_tokens(1024, 6)
    with open_store(tmp_path) as store:
        put(store, kv, "n", tokens)
        sequence = store.resume(tokens)
        check_everywhere(store, kv, sequence, tokens)
        extent = sequence.views[1].segment.extents[0]
        assert extent is not None
        with open(store.stats().region_path, "r+b") as file:
            file.seek(extent.end - 4096 - 100)
            file.write(b"\xa5" * 64)
        check_everywhere(store, kv, sequence, tokens)
        store._room.make(store._residency.hot.tier.limit_bytes)
        assert not store._residency.hot.pages.any()
        query = torch.zeros(4, 1, 8)
        with pytest.raises(FormatError):
            store.attend(sequence, 0, query)
        check_attend(store, kv, sequence, tokens, layer=1)
        assert table_of(store, sequence, 0, kept=True) is None


def test_every_frame_of_a_table_is_one_that_is_held(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(1100, 7)
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens)
        for layer in range(2):
            table = table_of(store, sequence, layer, kept=True)
            assert table is not None
            held = store._residency.hot.frames[layer]
            taken = held[held != NO_FRAME]
            assert set(table.frames.reshape(-1).tolist()) == set(taken.tolist())


def test_who_comes_back_finds_the_tables_of_before(tmp_path: Path) -> None:
    """Of the same views: a Sequence that ends elsewhere has its own, and so has a second one."""
    kv, tokens = KV(PLAIN), some_tokens(1200, 3)
    with open_store(tmp_path) as store:
        put(store, kv, "n", tokens)
        first = store.resume(tokens)
        check_everywhere(store, kv, first, tokens)
        before = dict(first.table.placed)
        assert sorted(before) == [0, 1]
        store.release(first)
        assert not first.table.placed
        shorter = store.resume(tokens[:700])
        assert not shorter.table.placed
        again, beside = store.resume(tokens), store.resume(tokens, lazily=True)
        assert again.table.placed == before
        assert not beside.table.placed
        for each, its_tokens in ((again, tokens), (beside, tokens), (shorter, tokens[:700])):
            check_everywhere(store, kv, each, its_tokens)
            assert check_tables(store, kv, each, its_tokens) == 2
        assert all(again.table.placed[layer] is before[layer] for layer in before)


def test_what_others_drop_costs_no_table(tmp_path: Path) -> None:
    """A table holds until a unit of its own leaves HOT."""
    kv, one, other = KV(PLAIN), some_tokens(600, 1), some_tokens(600, 2)
    with open_store(tmp_path) as store:
        put(store, kv, "one", one)
        put(store, kv, "other", other)
        first, second = store.resume(one), store.resume(other)
        check_everywhere(store, kv, first, one)
        check_everywhere(store, kv, second, other)
        before = dict(first.table.placed)
        hot = store._residency.hot
        for layer in range(2):
            hot.drop(layer, second.views[0].segment.slot)
        check_everywhere(store, kv, first, one)
        assert all(first.table.placed[layer] is before[layer] for layer in before)
        hot.drop(0, first.views[1].segment.slot)
        check_everywhere(store, kv, first, one)
        assert 0 not in first.table.placed, "it was read again, group by group"
        check_everywhere(store, kv, first, one)
        assert first.table.placed[0] is not before[0]
        assert first.table.placed[1] is before[1]


def test_kept_tables_of_a_segment_that_got_another_slot(tmp_path: Path) -> None:
    """What lies under its old slot by now is somebody else's."""
    kv, one, other = KV(PLAIN), some_tokens(600, 1), some_tokens(600, 2)
    with open_store(tmp_path) as store:
        put(store, kv, "one", one)
        sequence = store.resume(one)
        check_everywhere(store, kv, sequence, one)
        segments = [view.segment for view in sequence.views]
        before = [each.slot for each in segments]
        store.release(sequence)
        for each in segments:
            for layer in range(2):
                store._residency.hot.drop(layer, each.slot)
        store._registry.forget_unused()
        put(store, kv, "other", other)
        second = store.resume(other)
        check_everywhere(store, kv, second, other)
        assert set(before) & {view.segment.slot for view in second.views}
        again = store.resume(one)
        assert [each.slot for each in segments] != before
        check_everywhere(store, kv, again, one)
        assert check_tables(store, kv, again, one) == 2


def test_kept_tables_take_bounded_memory(tmp_path: Path) -> None:
    """The one that was used longest ago goes first."""
    kv, contexts = KV(PLAIN), [some_tokens(600, seed) for seed in range(6)]
    with open_store(tmp_path) as store:
        tables = store._restorer.tables
        for number, tokens in enumerate(contexts):
            put(store, kv, f"n{number}", tokens)
            sequence = store.resume(tokens)
            check_everywhere(store, kv, sequence, tokens)
            if not number:
                size = sum(each.array.nbytes for each in sequence.table.placed.values())
                tables._bytes_max = 3 * size
            store.release(sequence)
            assert 0 < tables.nbytes <= 3 * size
        found = [bool(store.resume(tokens).table.placed) for tokens in contexts]
        assert found == [False] * 3 + [True] * 3
        assert tables.nbytes == 0
