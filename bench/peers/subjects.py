"""Contexts that bench/restore.py has every method keep: the real model's, and synthetic ones."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.peers.process import Worker
from bench.peers.worker import Context, checksum_of

REAL_TOKENS = 2000
LAYERS, KV_HEADS, WIDTH = 24, 2, 64


@dataclass(frozen=True, slots=True)
class Subject:
    """A context that all keep. data: its keys and values as .npy. checksum: of them."""

    name: str
    context: Context
    data: Path
    checksum: str


def synthetic(tokens: int, folder: Path) -> Subject:
    """Random numbers in the shape of the real model's KV."""
    context = Context(LAYERS, KV_HEADS, WIDTH, tokens)
    data = folder / f"synthetic-{tokens}.npy"
    random = np.random.default_rng(tokens)
    kv = np.lib.format.open_memmap(data, mode="w+", dtype=np.float32, shape=context.shape)
    for layer in kv:
        layer[:] = random.standard_normal(layer.shape, dtype=np.float32)
    kv.flush()
    return Subject(f"synthetic, {tokens:,} tokens", context, data, checksum_of(kv))


class Model:
    """The real model in a process of its own: gives the KV, and the time to compute it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.seconds: list[float] = []

    def compute(self, data: Path | None) -> Context:
        asked = {"do": "compute", "tokens": REAL_TOKENS, "data": data and str(data)}
        answer = self.worker.ask(asked)
        self.seconds.append(answer["seconds"])
        return Context(**answer["context"])

    def subject(self, folder: Path) -> Subject:
        data = folder / "real.npy"
        context = self.compute(data)
        kv = np.load(data, mmap_mode="c")
        return Subject(f"real model, {context.tokens:,} tokens", context, data, checksum_of(kv))


def start_model(stack: ExitStack, folder: Path) -> Model:
    """Raises KvtierError where the model is not installed."""
    worker = Worker.start("recompute", sys.executable, ["bench.peers.recompute"], folder)
    stack.enter_context(worker).require_ready()
    return Model(worker)
