"""Field reports about kernels: unequal widths, poison, empty rows, and one result for one input."""

import math
from pathlib import Path

import pytest
import torch

from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.writer import hot_bytes_min
from tests.kernel_cases import ALL, DTYPES, POISONS, Shape, assert_close, make_case, oracle
from tests.store_cases import (
    GEOMETRIES,
    KV,
    MIB,
    Shuffled,
    a_query,
    check_everywhere,
    extend,
    open_store,
    put,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_keys_wider_than_values_with_many_query_heads(tokens: int, dtype: torch.dtype) -> None:
    """A015: 64 query heads, 4 kv heads, keys of 192, values of 128; the output is a value wide."""
    case = make_case(Shape(4, 16, 192, 128, tokens, dtype=dtype), seed=tokens)
    got = case.run()
    assert list(got.out.shape) == [64, 1, 128]
    assert_close(got, oracle(case.query, case.keys, case.values, ALL, case.scale))


def test_keys_wider_than_values_through_a_store(tmp_path: Path) -> None:
    """A015, as a model uses it: stored, restored, attended to."""
    geometry = Geometry((LayerGeometry(4, 192, 128),), "float32")
    kv, tokens = KV(geometry), some_tokens(37, 1)
    config = Config("32MiB", hot=hot_bytes_min(geometry))
    with open_store(tmp_path, geometry, config, Shuffled(1)) as store:
        put(store, kv, "n", tokens)
        check_everywhere(store, kv, store.resume(tokens), tokens)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_that_were_never_written_do_not_leak(dtype: torch.dtype, poison: float) -> None:
    """A104: five tokens in a page of sixteen; the other slots hold NaN, Inf or 1e38 in K and V."""
    shape = Shape(2, 4, 64, 64, tokens=5, dtype=dtype)
    clean, dirty = make_case(shape, 5, poison=0.0), make_case(shape, 5, poison=poison)
    rest = dirty.pool[dirty.frames[0, 0]].view(2, 16, 64)[:, 5:]
    assert bool((~rest.isfinite() | (rest.abs() > 1e4)).all()), "nothing was poisoned"
    got, want = dirty.run(), clean.run()
    assert bool(got.out.isfinite().all())
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_a_row_that_sees_nothing_is_zero_and_the_others_are_right(hidden: int) -> None:
    """A105: one of three queries sees no token at all."""
    case = make_case(Shape(2, 4, 64, 64, tokens=40, queries=3), seed=8)
    slots = case.valid.shape[1] * 16
    visible = torch.ones(3, 1, slots, dtype=torch.bool)
    visible[hidden] = False
    got = case.run(visible=visible.view(3, 1, -1, 16))
    assert torch.count_nonzero(got.out[:, hidden]) == 0
    assert bool((got.lse[:, hidden] == -math.inf).all())
    want = case.run()
    others = [each for each in range(3) if each != hidden]
    torch.testing.assert_close(got.out[:, others], want.out[:, others], atol=2e-5, rtol=0)
    assert bool(got.out.isfinite().all())


@pytest.mark.parametrize("shape", ["uniform", "windows", "bfloat16"])
def test_cold_and_restored_context_give_the_same_result(tmp_path: Path, shape: str) -> None:
    """A107: the restored bytes are equal, and so are the pages, so one kernel path gives one
    result, bit for bit, however the context came into memory."""
    geometry = GEOMETRIES[shape]
    kv, tokens = KV(geometry), some_tokens(1300, 1)
    results: list[list[torch.Tensor]] = []
    with open_store(tmp_path, geometry, Config("32MiB", hot="8MiB")) as store:
        put(store, kv, "n", tokens)
        warm = store.resume(tokens)
        results.append(answers(store, kv, warm))
    for hot in ("8MiB", hot_bytes_min(geometry) + MIB):
        with open_store(tmp_path, geometry, Config(hot=hot)) as store:
            results.append(answers(store, kv, store.resume(tokens)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def answers(store: Store, kv: KV, sequence: Sequence) -> list[torch.Tensor]:
    grown = some_tokens(1300, 1) + some_tokens(3, 9)
    extend(store, kv, sequence, grown)
    layers = range(len(store.geometry.layers))
    return [store.attend(sequence, each, a_query(kv, each, 1, 4)) for each in layers]
