"""SGLang's HiCacheFile: `batch_set` keeps a context, `batch_get` loads it.

sglang.srt.mem_cache.hicache_storage.HiCacheFile, one file per page of tokens, read one after the
other through the page cache. Pages are read right into host memory; SGLang's own controller reads
into a staging page and copies. Looking the pages up is not counted.
"""

from bench.peers.bare import bare_parents, empty_module
from bench.peers.chunks import ChunkContestant, ChunkMemory
from bench.peers.worker import Place, compete

bare_parents("sglang.srt.mem_cache.hicache_storage", "sglang.srt.mem_cache.storage.file.x")
# The evictor reads a limit in words by it, and there is no limit here; the module loads Triton.
empty_module("sglang.srt.utils.common", "human_readable_int")
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig  # noqa: E402


class SglangFile(ChunkContestant):
    """Keeps a context in a HiCacheFile of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._storage: HiCacheFile | None = None
        self._keys: list[str] = []

    def keep(self, memory: ChunkMemory, place: Place) -> None:
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
        self._keys = [f"{index:064x}" for index in range(memory.count)]
        if not self._storage.batch_set(self._keys, list(memory.flat)):
            raise OSError("HiCacheFile did not keep the context")

    def read(self, memory: ChunkMemory) -> None:
        assert self._storage is not None
        found = self._storage.batch_get(self._keys, list(memory.flat))
        if any(each is None for each in found):
            raise OSError("HiCacheFile does not have every page")

    def close(self) -> None:
        self._storage = None
        super().close()


if __name__ == "__main__":
    compete(SglangFile())
