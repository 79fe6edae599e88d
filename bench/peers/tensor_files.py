"""One file per context through the page cache; the argument is `torch` or `safetensors`.

torch.serialization.save and load (weights_only), safetensors.torch.save_file and load_file. The
tensors in the file have the shape that a DynamicCache keeps, so what was read is ready for decode.
load_file may only map the file: an element of every memory page is read before it counts as loaded.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import serialization

from bench.peers.worker import Array, Contestant, Context, Layer, Place, compete

Tensors = dict[str, torch.Tensor]
PAGE_ELEMENTS = 4096 // 4


def _load_torch(path: Path) -> Tensors:
    # weights_only: the restricted unpickler, which makes tensors and nothing else.
    found: Tensors = serialization.load(path, weights_only=True)
    return found


KINDS: dict[str, tuple[Callable[[Tensors, Path], object], Callable[[Path], Tensors]]] = {
    "torch": (serialization.save, _load_torch),
    "safetensors": (save_file, load_file),
}


class TensorFile(Contestant):
    """Keeps a context in one file."""

    def __init__(self, kind: str) -> None:
        self._save, self._load = KINDS[kind]
        self._path = Path()
        self._layers = 0
        self._tensors: Tensors = {}

    def store(self, context: Context, place: Place, kv: Array) -> None:
        self._path = Path(place.folder) / "context"
        self._layers = context.layers
        tensors: Tensors = {}
        for layer in range(context.layers):
            tensors[f"keys.{layer}"] = torch.from_numpy(kv[layer, 0].copy())
            tensors[f"values.{layer}"] = torch.from_numpy(kv[layer, 1].copy())
        self._save(tensors, self._path)
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def load(self) -> float:
        self._tensors = self._load(self._path)
        for tensor in self._tensors.values():
            tensor.view(-1)[::PAGE_ELEMENTS].sum()
        return time.perf_counter()

    def loaded(self) -> Iterator[Layer]:
        for layer in range(self._layers):
            yield self._tensors[f"keys.{layer}"], self._tensors[f"values.{layer}"]

    def forget(self) -> None:
        self._tensors = {}

    def close(self) -> None:
        self._path.unlink()


if __name__ == "__main__":
    compete(TensorFile(sys.argv[1]))
