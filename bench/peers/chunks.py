"""What peers that keep chunks share: the host memory that they read into, the tensors that a model
decodes with, and the way from one to the other.

All peers keep a context in chunks of some 256 tokens in all layers, which is LMCache's own size and
more than SGLang's and vLLM's, to their advantage: fewer and larger reads. Within a chunk the layout
is the one that costs least to put together afterwards.
"""

import mmap
import time
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import torch

from bench.peers.worker import Array, Contestant, Context, Layer, Place

CHUNK_TOKENS_MAX = 256


def chunk_tokens(context: Context) -> int:
    """The most tokens, up to CHUNK_TOKENS_MAX, that divide the context: vLLM's and SGLang's disk
    tiers keep whole chunks only."""
    sizes = range(CHUNK_TOKENS_MAX, 0, -1)
    return next(each for each in sizes if context.tokens % each == 0)


class ChunkMemory:
    """Memory for one context, its pages all there before anything is measured.

    flat: uint8 [chunks, bytes], page-aligned, each chunk [layers, 2, kv_heads, tokens, width].
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.tokens = chunk_tokens(context)
        self.count = context.tokens // self.tokens
        self._mapped = mmap.mmap(-1, context.nbytes)
        self.flat = torch.frombuffer(self._mapped, dtype=torch.uint8).view(self.count, -1)
        self.shape = (context.layers, 2, context.kv_heads, self.tokens, context.width)
        self.chunks = self.flat.view(torch.float32).view(self.count, *self.shape)
        self._decoded = torch.empty(context.shape, dtype=torch.float32)
        self.spoil()

    @property
    def chunk_bytes(self) -> int:
        return self.flat.shape[1]

    def spoil(self) -> None:
        """Overwrite everything, so that what is found afterwards was loaded."""
        self.flat.fill_(255)
        self._decoded.fill_(float("nan"))

    def fill(self, kv: Array) -> None:
        """Cut a context into the chunks."""
        for index in range(self.count):
            first = index * self.tokens
            part = np.ascontiguousarray(kv[:, :, :, first : first + self.tokens])
            self.chunks[index].copy_(torch.from_numpy(part))

    def assemble(self) -> None:
        """Put the chunks together as the tensors of a DynamicCache, [kv_heads, tokens, width]."""
        for index in range(self.count):
            first = index * self.tokens
            self._decoded[:, :, :, first : first + self.tokens].copy_(self.chunks[index])

    def loaded(self) -> Iterator[Layer]:
        for layer in self._decoded:
            yield layer[0], layer[1]


class ChunkContestant(Contestant):
    """A peer that keeps a context in chunks, in a place of its own."""

    def __init__(self) -> None:
        self._memory: ChunkMemory | None = None

    @abstractmethod
    def keep(self, memory: ChunkMemory, place: Place) -> None:
        """Open the peer, and have it keep every chunk. Raises OSError where it did not."""

    @abstractmethod
    def read(self, memory: ChunkMemory) -> None:
        """Have it load every chunk into `memory`. Raises OSError where it did not."""

    def store(self, context: Context, place: Place, kv: Array) -> None:
        self._memory = memory = ChunkMemory(context)
        memory.fill(kv)
        self.keep(memory, place)
        memory.spoil()

    def load(self) -> float:
        assert self._memory is not None
        self.read(self._memory)
        read = time.perf_counter()
        self._memory.assemble()
        return read

    def loaded(self) -> Iterator[Layer]:
        assert self._memory is not None
        return self._memory.loaded()

    def forget(self) -> None:
        """The memory is a pool that stays."""

    def close(self) -> None:
        self._memory = None
