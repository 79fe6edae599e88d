"""SGLang's HiCacheFile: `batch_set` keeps a context, `batch_get` loads it.

sglang.srt.mem_cache.hicache_storage.HiCacheFile, one file per page of tokens, read one after the
other through the page cache. Pages are read right into host memory; SGLang's own controller reads
into a staging page and copies. Looking the pages up is not counted.
"""

import time
from collections.abc import Iterator

from bench.peers.bare import bare_parents
from bench.peers.chunks import ChunkMemory
from bench.peers.worker import Array, Contestant, Context, Layer, Place, compete

bare_parents("sglang.srt.mem_cache.hicache_storage", "sglang.srt.mem_cache.storage.file.x")
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig  # noqa: E402


class SglangFile(Contestant):
    """Keeps a context in a HiCacheFile of its own."""

    def __init__(self) -> None:
        self._storage: HiCacheFile | None = None
        self._memory: ChunkMemory | None = None
        self._keys: list[str] = []

    def store(self, context: Context, place: Place, kv: Array) -> None:
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
            extra_config={"file_storage_path": f"{place.folder}/hicache"},
        )
        self._storage = HiCacheFile(config)
        self._memory = memory = ChunkMemory(context)
        self._keys = [f"{index:064x}" for index in range(memory.count)]
        memory.fill(kv)
        if not self._storage.batch_set(self._keys, list(memory.flat)):
            raise OSError("HiCacheFile did not keep the context")
        memory.spoil()

    def load(self) -> float:
        assert self._storage is not None
        assert self._memory is not None
        found = self._storage.batch_get(self._keys, list(self._memory.flat))
        read = time.perf_counter()
        if any(each is None for each in found):
            raise OSError("HiCacheFile does not have every page")
        self._memory.assemble()
        return read

    def loaded(self) -> Iterator[Layer]:
        assert self._memory is not None
        return self._memory.loaded()

    def forget(self) -> None:
        """The memory is a pool that stays."""

    def close(self) -> None:
        self._storage = self._memory = None


if __name__ == "__main__":
    compete(SglangFile())
