"""LMCache's LocalDiskBackend: `batched_submit_put_task` keeps a context, `batched_get_blocking`
loads it.

lmcache.v1.storage_backend.local_disk_backend.LocalDiskBackend: a file per chunk, four threads, with
use_odirect unless the argument `buffered` is given. Looking the chunks up is part of the call.
"""

import asyncio
import sys
import threading

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import TensorMemoryObj
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from bench.peers.chunks import ChunkContestant, ChunkMemory
from bench.peers.lmcache_memory import memory_objects
from bench.peers.worker import Place, compete

PUT_S_MAX = 120.0


class Pool:
    """Stands for LocalCPUBackend: hands out memory that is there, chunk after chunk."""

    def __init__(self, memory: ChunkMemory) -> None:
        self._objects = memory_objects(memory)
        self._next = 0

    def allocate(self, *_: object) -> TensorMemoryObj:
        taken = self._objects[self._next]
        self._next = (self._next + 1) % len(self._objects)
        return taken


class LocalDisk(ChunkContestant):
    """Keeps a context in a LocalDiskBackend of its own."""

    def __init__(self, *, direct: bool) -> None:
        super().__init__()
        self._direct = direct
        self._backend: LocalDiskBackend | None = None
        self._keys: list[CacheEngineKey] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def keep(self, memory: ChunkMemory, place: Place) -> None:
        config = LMCacheEngineConfig.from_defaults(
            local_disk=f"{place.folder}/local_disk",
            max_local_disk_size=2.0 * memory.context.nbytes / (1 << 30) + 1.0,
            extra_config={"use_odirect": self._direct},
        )
        self._backend = LocalDiskBackend(config, self._loop, Pool(memory), dst_device="cpu")
        self._keys = [
            CacheEngineKey("bench", 1, 0, index, torch.float32) for index in range(memory.count)
        ]
        done = threading.Semaphore(0)
        self._backend.batched_submit_put_task(
            self._keys, memory_objects(memory), on_complete_callback=lambda _: done.release()
        )
        for _ in self._keys:
            if not done.acquire(timeout=PUT_S_MAX):
                raise OSError("LocalDiskBackend did not keep every chunk")

    def read(self, memory: ChunkMemory) -> None:
        assert self._backend is not None
        found = self._backend.batched_get_blocking(self._keys)
        if any(each is None for each in found):
            raise OSError("LocalDiskBackend did not load every chunk")

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
        self._backend = None
        super().close()


if __name__ == "__main__":
    compete(LocalDisk(direct="buffered" not in sys.argv[1:]))
