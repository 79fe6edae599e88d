"""A Segment that a decode filled is sealed in steps: none of them is long, and whatever comes in
between finds its bytes."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.errors import CapacityError, ClosedError
from kvtier.tiering.clusterer import ByKeys, UnitKeys
from kvtier.tiering.config import Config
from kvtier.tiering.extent_writer import ExtentWriter, UnitWrite
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from kvtier.tiering.writer import hot_bytes_min, unit_bytes_max
from tests.store_cases import (
    GROUP,
    KV,
    MIB,
    ShuffledInSteps,
    check_attend,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 6
GEOMETRY = Geometry.uniform(LAYERS, 2, 16)
OF_M = KV(GEOMETRY)
SEGMENT = 512
STEPS = 2 * LAYERS
"""An order and a write for each layer."""
MOMENTS = (0, 1, LAYERS - 1, LAYERS, LAYERS + 2, STEPS - 1)
"""Tokens behind a Segment: before, between and within orders and writes, and at their end."""


def opened(path: Path, hot: int = 4 * MIB) -> Store:
    is_new = not (path / "store.yaml").exists()
    config = Config("32MiB" if is_new else None, hot=hot)
    return open_store(path, GEOMETRY, config, ShuffledInSteps(3))


def decode(store: Store, sequence: Sequence, tokens: list[int]) -> None:
    """One token to a pass."""
    extend(store, OF_M, sequence, tokens, pieces=1)


def begun(store: Store, tokens: list[int], *, named: bool = True) -> Sequence:
    """A Sequence of these tokens, decoded from a while before its last Segment is full."""
    sequence = store.sequence()
    if named:
        store.name_tokens(sequence, tokens)
    at = len(tokens) // SEGMENT * SEGMENT - 40
    extend(store, OF_M, sequence, tokens[:at])
    decode(store, sequence, tokens)
    return sequence


@pytest.fixture
def units_written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many units came to each write."""
    counts: list[int] = []
    write = ExtentWriter.write

    def counted(self: ExtentWriter, writes: list[UnitWrite]) -> None:
        counts.append(len(writes))
        write(self, writes)

    monkeypatch.setattr(ExtentWriter, "write", counted)
    return counts


def test_no_token_waits_for_more_than_a_step(tmp_path: Path, units_written: list[int]) -> None:
    tokens = some_tokens(SEGMENT + STEPS + 2, 1)
    with opened(tmp_path) as store:
        placement = store._extent_writer.placement
        assert isinstance(placement, ShuffledInSteps)
        sequence = store.sequence()
        extend(store, OF_M, sequence, tokens[: SEGMENT - 1])
        for count in range(SEGMENT, len(tokens) + 1):
            before = placement.taken, sum(units_written)
            decode(store, sequence, tokens[:count])
            assert placement.taken - before[0] <= 1
            assert sum(units_written) - before[1] <= 1
            # It is stored as soon as it is written.
            store.name_tokens(sequence, tokens[:count])
            is_stored = count >= SEGMENT + STEPS
            assert store.lookup(tokens) == SEGMENT * is_stored
            assert (sequence.sealing is None) == is_stored
            check_attend(store, OF_M, sequence, tokens[:count], layer=count % LAYERS)
        assert units_written.count(1) == LAYERS
        (segment,) = (view.segment for view in sequence.views)
        assert all(order is not None for order in segment.orders)
        check_bytes(store, OF_M, sequence, tokens)
        store.release(sequence)
        check_settled(store, tmp_path)


def test_orders_by_keys_are_those_made_at_once(tmp_path: Path) -> None:
    tokens = some_tokens(2 * SEGMENT + 200, 1)
    placement = ByKeys(GEOMETRY)
    with open_store(tmp_path, GEOMETRY, Config("32MiB", hot=4 * MIB), placement) as store:
        sequence = begun(store, tokens[: 2 * SEGMENT + 3])
        sealing = sequence.sealing
        assert sealing is not None
        decode(store, sequence, tokens)
        assert sealing.done
        for view in sequence.views:
            start, end = view.segment.start, view.end
            rows = [OF_M.rows(tokens, layer)[0][:, start:end] for layer in range(LAYERS)]
            found = placement.orders([UnitKeys(at, start, keys) for at, keys in enumerate(rows)])
            for order, wanted in zip(view.segment.orders, found, strict=True):
                assert order is not None
                assert wanted is not None
                assert np.array_equal(order, wanted)
        check_bytes(store, OF_M, sequence, tokens)
        store.release(sequence)
        check_settled(store, tmp_path)


def test_longer_passes_take_more_steps(tmp_path: Path) -> None:
    """So a Segment is sealed before many tokens follow, and at once before another one is."""
    tokens = some_tokens(2 * SEGMENT + 100, 1)
    with opened(tmp_path) as store:
        sequence = store.sequence()
        store.name_tokens(sequence, tokens)
        extend(store, OF_M, sequence, tokens[: SEGMENT + 10], pieces=SEGMENT - 5)
        assert sequence.sealing is None
        assert store.lookup(tokens) == SEGMENT
        # The first is completed by a pass that brings the second as a whole.
        other = store.sequence()
        store.name_tokens(other, [1, *tokens])
        extend(store, OF_M, other, [1, *tokens][:100])
        extend(store, OF_M, other, [1, *tokens])
        assert store.lookup([1, *tokens]) == 2 * SEGMENT
        for each, held in ((sequence, tokens[: SEGMENT + 10]), (other, [1, *tokens])):
            check_bytes(store, OF_M, each, held)
            store.release(each)
        check_settled(store, tmp_path)


def save(store: Store, sequence: Sequence, tokens: list[int]) -> None:
    assert store.save(sequence, "name", tokens) == len(tokens)


def save_a_fork(store: Store, sequence: Sequence, tokens: list[int]) -> None:
    twin = store.fork(sequence)
    store.release(sequence)
    decode(store, twin, [*tokens, 5])
    save(store, twin, [*tokens, 5])


def crop_into_it(store: Store, sequence: Sequence, tokens: list[int]) -> None:
    store.crop(sequence, SEGMENT - 3)
    decode(store, sequence, tokens)
    save(store, sequence, tokens)


def crop_to_its_end(store: Store, sequence: Sequence, tokens: list[int]) -> None:
    store.crop(sequence, SEGMENT)
    check_everywhere(store, OF_M, sequence, tokens[:SEGMENT])
    decode(store, sequence, tokens)
    save(store, sequence, tokens)


def release(store: Store, sequence: Sequence, tokens: list[int]) -> None:
    store.release(sequence)


def release_later(store: Store, sequence: Sequence, tokens: list[int]) -> None:
    store.release_later([sequence])


def leave_it(store: Store, sequence: Sequence, tokens: list[int]) -> None:
    """`close` ends it."""


WHAT = (save, save_a_fork, crop_into_it, crop_to_its_end, release, release_later, leave_it)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("then", WHAT)
def test_what_comes_in_between_loses_nothing(
    tmp_path: Path, then: Callable[[Store, Sequence, list[int]], None], moment: int
) -> None:
    tokens = some_tokens(SEGMENT + moment, 1)
    with opened(tmp_path) as store:
        sequence = begun(store, tokens)
        assert sequence.sealing is not None
        check_everywhere(store, OF_M, sequence, tokens)
        then(store, sequence, tokens)
    assert verify(tmp_path).findings == []
    with opened(tmp_path) as store:
        sequence = store.resume(tokens)
        assert sequence.length() >= SEGMENT
        check_bytes(store, OF_M, sequence, tokens[: sequence.length()])
        check_everywhere(store, OF_M, sequence, tokens[: sequence.length()])
        store.release(sequence)
        check_settled(store, tmp_path)


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_has_no_name_goes_with_its_sequence(tmp_path: Path, moment: int) -> None:
    with opened(tmp_path) as store:
        sequence = begun(store, some_tokens(SEGMENT + moment, 1), named=False)
        store.release(sequence)
        check_settled(store, tmp_path)
        assert store.stats().hot_bytes == 0
        begun(store, some_tokens(SEGMENT + moment, 2), named=False)
    assert verify(tmp_path).findings == []
    with opened(tmp_path) as store:
        assert store.stats().segments == 0


@pytest.mark.parametrize("moment", MOMENTS)
def test_twins_that_share_it_seal_it_once(
    tmp_path: Path, moment: int, units_written: list[int]
) -> None:
    tokens = some_tokens(SEGMENT + moment, 1)
    left, right = [*tokens, *some_tokens(40, 2)], [*tokens, *some_tokens(40, 3)]
    with opened(tmp_path) as store:
        one = begun(store, tokens)
        other = store.fork(one)
        for count in range(len(tokens) + 1, len(left) + 1):
            decode(store, one, left[:count])
            decode(store, other, right[:count])
        assert units_written.count(1) == LAYERS
        assert store.lookup(tokens) == SEGMENT
        for sequence, held in ((one, left), (other, right)):
            check_bytes(store, OF_M, sequence, held)
            store.release(sequence)
        check_settled(store, tmp_path)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_that_dies_meanwhile_leaves_nothing_behind(tmp_path: Path, moment: int) -> None:
    tokens = some_tokens(SEGMENT + moment, 1)
    opened(tmp_path).close()
    pid = os.fork()
    if not pid:
        torch.set_num_threads(1)
        status = 1
        try:
            begun(opened(tmp_path), tokens)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert verify(tmp_path).findings == []
    with opened(tmp_path) as store:
        assert store.lookup(tokens) == 0
        store.release(begun(store, tokens))
        assert store.lookup(tokens) == SEGMENT
        check_settled(store, tmp_path)


def test_a_forked_child_is_refused_and_leaves_the_parent_alone(tmp_path: Path) -> None:
    tokens = some_tokens(SEGMENT + 3, 1)
    with opened(tmp_path) as store:
        sequence = begun(store, tokens)
        pid = os.fork()
        if not pid:
            try:
                decode(store, sequence, [*tokens, 1])
            except ClosedError:
                store.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        more = [*tokens, *some_tokens(STEPS, 2)]
        decode(store, sequence, more)
        assert store.lookup(tokens) == SEGMENT
        check_bytes(store, OF_M, sequence, more)


@pytest.mark.parametrize("moment", MOMENTS)
def test_who_needs_room_does_not_wait_for_the_steps(tmp_path: Path, moment: int) -> None:
    """HOT has room for one Segment in all layers, and little more."""
    hot = LAYERS * unit_bytes_max(GEOMETRY) + hot_bytes_min(GEOMETRY)
    tokens, others = some_tokens(SEGMENT + moment, 1), some_tokens(300, 2)
    with opened(tmp_path, hot=hot) as store:
        sequence = begun(store, tokens)
        sealing = sequence.sealing
        assert sealing is not None
        done = [sealing.done]
        other = store.sequence()
        extend(store, OF_M, other, others)
        done.append(sealing.done)
        assert done == [False, True]
        assert other.tail
        more = [*tokens, *some_tokens(30, 3)]
        decode(store, sequence, more)
        for each, held in ((sequence, more), (other, others)):
            check_everywhere(store, OF_M, each, held)
            check_bytes(store, OF_M, each, held)
            store.release(each)
        assert store.lookup(tokens) == SEGMENT
        check_settled(store, tmp_path)


@pytest.mark.parametrize("moment", MOMENTS[:-1])
def test_a_drive_without_room_fails_whoever_needs_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    moment: int,
) -> None:
    def full(needed: int) -> None:
        if needed:
            raise CapacityError("region", needed, 0, 0)

    tokens = some_tokens(SEGMENT + moment, 1)
    more = [*tokens, *some_tokens(STEPS + 3, 2)]
    with opened(tmp_path) as store:
        sequence = begun(store, tokens)
        with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "kvtier"):
            patched.setattr(store._space, "require", full)
            # A decode goes on without it.
            decode(store, sequence, more)
            assert "tokens 0 to 512 are not written yet" in caplog.text
            assert len(caplog.records) == 1
            check_bytes(store, OF_M, sequence, more)
            with pytest.raises(CapacityError):
                store.save(sequence, "name", more)
        save(store, sequence, more)
        check_bytes(store, OF_M, sequence, more)
        store.release(sequence)
        check_settled(store, tmp_path)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_budget_reads_it_like_the_tail_until_it_is_written(tmp_path: Path, moment: int) -> None:
    tokens = some_tokens(2 * SEGMENT + moment, 1)
    with opened(tmp_path) as store:
        sequence = begun(store, tokens)
        sealing = sequence.sealing
        assert sealing is not None
        written = sealing.written
        for layer in range(LAYERS):
            keys, values = OF_M.rows(tokens, layer)
            # Of each head a token of the Segment that its own key picks out among all.
            scores = keys[:, SEGMENT : 2 * SEGMENT] @ keys.transpose(1, 2)
            margin = 2 * scores.diagonal(SEGMENT, 1, 2) - scores.topk(2, dim=2).values.sum(2)
            wanted = SEGMENT + margin.argmax(1)
            heads = torch.arange(len(keys))
            query = keys[heads, wanted, None].repeat_interleave(GROUP, 0) * 40
            out = store.attend(sequence, layer, query, budget=0.25)
            exact = values[heads, wanted, None].repeat_interleave(GROUP, 0)
            assert torch.allclose(out, exact, atol=1e-2)
            known = sequence.table.digested[layer]
            assert known.views is sealing.before
            assert known.tokens == SEGMENT
        assert (sealing.written, sealing.done) == (written, False)
        more = [*tokens, *some_tokens(STEPS, 2)]
        decode(store, sequence, more)
        for layer in range(LAYERS):
            query = OF_M.rows(tokens, layer)[0][:, :1].repeat_interleave(GROUP, 0)
            store.attend(sequence, layer, query, budget=0.25)
            assert sequence.table.digested[layer].tokens == 2 * SEGMENT


@pytest.mark.parametrize("behind", MOMENTS)
def test_others_are_attached_and_grafted_in_meanwhile(tmp_path: Path, behind: int) -> None:
    tokens = some_tokens(3 * SEGMENT, 5)
    held = tokens[: 2 * SEGMENT + behind]
    with opened(tmp_path, hot=16 * MIB) as store:
        whole = begun(store, tokens)
        store.save(whole, "whole", tokens)
        store.release(whole)
        sequence, other = begun(store, held), begun(store, held[: 2 * SEGMENT])
        store.graft(sequence, other)
        check_bytes(store, OF_M, sequence, held)
        decode(store, sequence, [*held, *tokens[len(held) : len(held) + 20]])
        store.release(sequence)
        sequence = begun(store, held[: 2 * SEGMENT])
        assert store.extend(sequence, tokens) == len(tokens)
        check_bytes(store, OF_M, sequence, tokens)
        check_everywhere(store, OF_M, sequence, tokens)
        store.release(sequence)
        check_settled(store, tmp_path)
