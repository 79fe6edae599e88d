"""The workers of bench/restore.py: they load what they kept, and it shows when they do not."""

import sys
import types
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.peers.bare import bare_parents, empty_module
from bench.peers.chunks import ChunkMemory, chunk_tokens
from bench.peers.kvtier_store import KvtierStore
from bench.peers.plain_reads import PlainReads
from bench.peers.process import Worker
from bench.peers.subjects import Subject
from bench.peers.tensor_files import TensorFile
from bench.peers.worker import Array, Contestant, Context, Load, Place, answer, checksum_of
from bench.restore import Result
from kvtier.errors import KvtierError

CONTEXT = Context(layers=2, kv_heads=2, width=8, tokens=600)


def some_kv(seed: int) -> Array:
    kv: Array = np.random.default_rng(seed).standard_normal(CONTEXT.shape, dtype=np.float32)
    return kv


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "kv.npy"
    np.save(path, some_kv(1))
    return path


def store_request(data: Path, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    place = Place(str(folder))
    return {"do": "store", "context": asdict(CONTEXT), "place": asdict(place), "data": str(data)}


@pytest.mark.parametrize(
    "make",
    [
        KvtierStore,
        partial(KvtierStore, lazily=True),
        partial(TensorFile, "torch"),
        partial(TensorFile, "safetensors"),
        PlainReads,
    ],
)
def test_loads_what_it_kept_again_and_again(
    make: Callable[[], Contestant], data: Path, tmp_path: Path
) -> None:
    contestant = make()
    answer(contestant, store_request(data, tmp_path / "place"))
    for _ in range(2):
        load = Load(**answer(contestant, {"do": "load", "check": True}))
        assert load.checksum == checksum_of(some_kv(1)) != checksum_of(some_kv(2))
        assert 0 < load.read_s <= load.seconds < load.step_s
    assert answer(contestant, {"do": "load", "check": False})["checksum"] is None
    answer(contestant, {"do": "close"})


def test_kvtier_reads_the_drive_at_every_load(data: Path, tmp_path: Path) -> None:
    contestant = KvtierStore()
    answer(contestant, store_request(data, tmp_path / "place"))
    read = []
    for _ in range(2):
        answer(contestant, {"do": "load", "check": False})
        read.append(contestant._opened().stats().bytes_read)
    assert read[0] >= CONTEXT.nbytes
    assert read[1] >= 2 * CONTEXT.nbytes
    answer(contestant, {"do": "close"})


def test_other_bytes_have_another_checksum(data: Path, tmp_path: Path) -> None:
    contestant = PlainReads()
    answer(contestant, store_request(data, tmp_path / "place"))
    with (tmp_path / "place" / "plain").open("r+b") as file:
        file.seek(CONTEXT.nbytes // 2)
        file.write(b"damage")
    load = Load(**answer(contestant, {"do": "load", "check": True}))
    assert load.checksum != checksum_of(some_kv(1))
    answer(contestant, {"do": "close"})


def test_a_worker_process_answers_and_ends(data: Path, tmp_path: Path) -> None:
    module = ["bench.peers.tensor_files", "safetensors"]
    with Worker.start("files", sys.executable, module, tmp_path) as worker:
        worker.require_ready()
        place = tmp_path / "place"
        place.mkdir()
        worker.store(CONTEXT, Place(str(place)), data)
        assert worker.load(check=True).checksum == checksum_of(some_kv(1))
        (place / "context").unlink()
        with pytest.raises(KvtierError, match=r"files: FileNotFoundError"):
            worker.load()
        with pytest.raises(KvtierError, match="files ended"):
            worker.load()


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(KvtierError, match="make bench-peers"):
        Worker.start("peer", str(tmp_path / "python"), ["x"], tmp_path)
    module = ["bench.peers.nothing"]
    with (
        Worker.start("peer", sys.executable, module, tmp_path) as worker,
        pytest.raises(KvtierError, match=r"No module named bench\.peers\.nothing"),
    ):
        worker.require_ready()


@pytest.mark.parametrize(("tokens", "chunk"), [(2000, 250), (8192, 256), (600, 200), (257, 1)])
def test_chunks_divide_the_context(tokens: int, chunk: int) -> None:
    assert chunk_tokens(Context(1, 1, 1, tokens)) == chunk


def test_chunks_are_put_together_as_they_were_cut() -> None:
    memory = ChunkMemory(CONTEXT)
    memory.fill(some_kv(1))
    memory.assemble()
    for expected, found in zip(some_kv(1), memory.loaded(), strict=True):
        for rows, loaded in zip(expected, found, strict=True):
            assert torch.equal(torch.from_numpy(rows), loaded)
    memory.spoil()
    memory.assemble()
    assert all(bool(torch.isnan(rows).all()) for layer in memory.loaded() for rows in layer)


def test_a_module_without_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "heavy_peer" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").write_text("raise ImportError('needs CUDA')\n")
    (inner / "tier.py").write_text("WORKS = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(ModuleNotFoundError, match="make bench-peers"):
        bare_parents("no_such_peer.x")
    bare_parents("heavy_peer.inner.tier")
    from heavy_peer.inner import tier  # type: ignore[import-not-found]

    assert isinstance(tier, types.ModuleType)
    assert tier.WORKS
    empty_module("heavy_peer.inner.common", "parse")
    from heavy_peer.inner.common import parse  # type: ignore[import-not-found]

    with pytest.raises(RuntimeError, match=r"heavy_peer\.inner\.common\.parse is not there"):
        parse("200G")


def test_ratios_are_of_the_same_round_and_of_the_best_peer(tmp_path: Path) -> None:
    def loads(seconds: list[float], cpu_s: float, steps: list[float] | None = None) -> list[Load]:
        both = zip(seconds, steps or seconds, strict=True)
        return [Load(each, each, cpu_s, step, None) for each, step in both]

    result = Result(
        Subject("x", CONTEXT, tmp_path, ""),
        {
            "kvtier": loads([1.0, 2.0, 4.0], 0.5),
            "kvtier, layer by layer": loads([0.1, 0.1, 0.1], 0.1, [1.0, 2.0, 4.0]),
            "slow": loads([9.0, 9.0, 9.0], 1.0),
            "fast": loads([2.0, 3.0, 20.0], 2.0, [3.0, 4.0, 16.0]),
            "plain direct reads": loads([0.1, 0.1, 0.1], 0.1),
        },
    )
    assert result.peers == ["slow", "fast"]
    assert result.fastest() == "fast"
    assert result.over("fast") == 2.0
    assert result.step_over("fast") == 3.0
    assert result.cpu_over_best() == 0.5
