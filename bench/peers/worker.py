"""What every way of keeping a context is for the benchmark: a process that stores one and loads it.

A worker reads requests from stdin and answers on stdout, one JSON object a line:

    {"do": "store", "context": {...}, "place": {...}, "data": PATH}  -> {}
    {"do": "load", "check": BOOL}   -> {"seconds", "read_s", "cpu_s", "step_s", "checksum"}
    {"do": "close"}                 -> {}

An error is answered with {"error": TEXT} and ends the worker. What libraries print goes to stderr.
Peers run in an environment of their own, so nothing here imports kvtier.
"""

import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

Array = NDArray[np.float32]
Layer = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [kv_heads, tokens, width] and contiguous."""

QUERY_HEADS = 14
"""Of each layer, as the demo's model has."""
THREADS = 1
"""Threads of torch in everything that only loads: a copy of a few MiB is not worth more."""


@dataclass(frozen=True, slots=True)
class Context:
    """The shape of a stored context; float32 throughout."""

    layers: int
    kv_heads: int
    width: int
    tokens: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of all keys and values: layer, keys or values, head, token, element."""
        return self.layers, 2, self.kv_heads, self.tokens, self.width

    @property
    def nbytes(self) -> int:
        return 4 * self.layers * 2 * self.kv_heads * self.tokens * self.width


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is kept. device: a block device of its own for those that can use one raw."""

    folder: str
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """How one load went. seconds: until a model could begin to decode, read_s: until the bytes that
    it then has were in memory. cpu_s: processor time of the process meanwhile, all its threads.
    step_s: until one token had attended to all of the context in every layer."""

    seconds: float
    read_s: float
    cpu_s: float
    step_s: float
    checksum: str | None


class Contestant(ABC):
    """One way of keeping a context. It keeps one at a time."""

    @abstractmethod
    def store(self, context: Context, place: Place, kv: Array) -> None:
        """Keep what kv [layers, 2, kv_heads, tokens, width] holds, in `place`."""

    @abstractmethod
    def load(self) -> float:
        """Bring the context to where a model can decode with it; returns the moment
        (time.perf_counter) at which its bytes were in memory."""

    @abstractmethod
    def loaded(self) -> Iterator[Layer]:
        """What was loaded, layer by layer."""

    def step(self) -> None:
        """One token attends to all that was loaded, in every layer."""
        for keys, values in self.loaded():
            query = torch.ones(1, QUERY_HEADS, 1, keys.shape[2])
            torch.nn.functional.scaled_dot_product_attention(
                query, keys[None], values[None], enable_gqa=True
            )

    @abstractmethod
    def forget(self) -> None:
        """Let go of what was loaded, so that the next load begins with nothing in memory."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the place."""


def checksum(layers: Iterator[Layer]) -> str:
    """Of keys and values, layer by layer."""
    digest = xxhash.xxh3_64()
    for layer in layers:
        for rows in layer:
            digest.update(rows.contiguous().numpy().reshape(-1).view(np.uint8).data)
    return str(digest.hexdigest())


def checksum_of(kv: Array) -> str:
    """What `checksum` says of the same keys and values."""
    return checksum((torch.from_numpy(each[0]), torch.from_numpy(each[1])) for each in kv)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _measured(contestant: Contestant, check: bool) -> Load:
    cpu = _cpu_s()
    begun = time.perf_counter()
    read = contestant.load()
    ended = time.perf_counter()
    cpu = _cpu_s() - cpu
    contestant.step()
    stepped = time.perf_counter()
    digest = checksum(contestant.loaded()) if check else None
    contestant.forget()
    return Load(ended - begun, read - begun, cpu, stepped - begun, digest)


def answer(contestant: Contestant, request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what one request asks for."""
    if request["do"] == "store":
        # Written to by nobody, but torch would warn of memory that it must not write.
        kv = np.load(request["data"], mmap_mode="c")
        contestant.store(Context(**request["context"]), Place(**request["place"]), kv)
        return {}
    if request["do"] == "load":
        return asdict(_measured(contestant, request["check"]))
    if request["do"] == "close":
        contestant.close()
        return {}
    raise ValueError(f"no such request: {request['do']!r}")


def serve(handle: Callable[[Mapping[str, Any]], dict[str, Any]], threads: int = THREADS) -> None:
    """Answer requests until stdin ends, with this many threads of torch."""
    torch.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    say({"ready": True})
    for line in sys.stdin:
        try:
            say(handle(json.loads(line)))
        except BaseException as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise


def compete(contestant: Contestant) -> None:
    """Serve as a contestant; what a worker's module calls last."""
    serve(lambda request: answer(contestant, request))
