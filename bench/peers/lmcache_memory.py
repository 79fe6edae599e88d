"""LMCache's memory objects over the chunks of one context."""

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from bench.peers.chunks import ChunkMemory


def memory_objects(memory: ChunkMemory) -> list[TensorMemoryObj]:
    """One for each chunk, where LMCache's allocators would have put them: aligned to pages."""
    return [
        TensorMemoryObj(
            flat,
            MemoryObjMetadata(
                torch.Size(memory.shape),
                torch.float32,
                flat.data_ptr(),
                memory.chunk_bytes,
                1,
                fmt=MemoryFormat.KV_2LTD,
            ),
            None,
        )
        for flat in memory.flat
    ]
