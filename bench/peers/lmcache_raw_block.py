"""LMCache's RawBlockCore on io_uring: `put_many` keeps a context, `load_many_into` loads it.

lmcache.v1.storage_backend.raw_block.core.RawBlockCore with O_DIRECT, zero copy, and its memory
registered with the ring: a slot per chunk, in a preallocated file or on a raw block device. All
chunks are one batch. Looking them up is part of the call.
"""

import os
from pathlib import Path

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.storage_backend.raw_block.core import RawBlockCore, RawBlockCoreConfig
from lmcache.v1.storage_backend.raw_block.key_codec import RawBlockKeySpec, encode_object_key

from bench.peers.chunks import ChunkContestant, ChunkMemory
from bench.peers.lmcache_memory import memory_objects
from bench.peers.worker import Place, compete

BLOCK_BYTES = 4096
METADATA_BYTES = 16 << 20


def core_config(path: str, capacity_bytes: int, slot_bytes: int) -> RawBlockCoreConfig:
    return RawBlockCoreConfig(
        device_path=path,
        capacity_bytes=capacity_bytes,
        block_align=BLOCK_BYTES,
        header_bytes=BLOCK_BYTES,
        slot_bytes=slot_bytes,
        use_odirect=True,
        enable_zero_copy=True,
        meta_total_bytes=METADATA_BYTES,
        meta_magic=b"LMCIDX01",
        meta_version=1,
        meta_checkpoint_interval_sec=3600,
        meta_idle_quiet_ms=100,
        meta_enable_periodic=False,
        meta_verify_on_load=False,
        load_checkpoint_on_init=False,
        io_engine="io_uring",
    )


class RawBlock(ChunkContestant):
    """Keeps a context in a RawBlockCore of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._core: RawBlockCore | None = None
        self._keys: list[RawBlockKeySpec] = []

    def keep(self, memory: ChunkMemory, place: Place) -> None:
        slot_bytes = memory.chunk_bytes + BLOCK_BYTES
        capacity = (memory.count + 2) * slot_bytes + METADATA_BYTES
        path = place.device or str(Path(place.folder) / "raw_block")
        if place.device is None:
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, capacity)
        self._core = RawBlockCore(core_config(path, capacity, slot_bytes), key_namespace="object")
        self._core.register_fixed_buffer_range(memory.flat.data_ptr(), memory.context.nbytes)
        self._keys = [
            encode_object_key(ObjectKey(index.to_bytes(32, "big"), "bench", 0))
            for index in range(memory.count)
        ]
        if not all(self._core.put_many(self._keys, memory_objects(memory)).results):
            raise OSError("RawBlockCore did not keep every chunk")

    def read(self, memory: ChunkMemory) -> None:
        assert self._core is not None
        names = [each.encoded for each in self._keys]
        if not all(self._core.load_many_into(names, memory_objects(memory))):
            raise OSError("RawBlockCore did not load every chunk")

    def close(self) -> None:
        if self._core is not None:
            self._core.close()
        self._core = None
        super().close()


if __name__ == "__main__":
    compete(RawBlock())
