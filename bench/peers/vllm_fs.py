"""vLLM's FileSystemTierManager: `submit_store` keeps a context, `submit_load` loads it.

vllm.v1.kv_offload.tiering.fs.manager.FileSystemTierManager, one file per chunk by O_DIRECT, one job
per request, as vLLM's own TieringOffloadingManager submits it. Its C extension is used where a C
compiler can make empty stand-ins for the CUDA libraries that it is linked to and never calls; else
its Python code, which makes the same system calls. Looking the chunks up is not counted.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np

from bench.peers.bare import bare_parents
from bench.peers.chunks import ChunkContestant, ChunkMemory
from bench.peers.worker import Place, compete

CUDA_LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so", "libnvrtc.so.13")


def stand_in_for_cuda() -> None:
    """Load an empty library under each name that the C extension asks for."""
    compiler = shutil.which("cc")
    if compiler is None:
        return
    with TemporaryDirectory() as folder:
        for name in CUDA_LIBRARIES:
            path = str(Path(folder) / name)
            command = [compiler, "-shared", f"-Wl,-soname,{name}", "-x", "c", "/dev/null"]
            subprocess.run([*command, "-o", path], check=True, capture_output=True)
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


stand_in_for_cuda()
OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.x"
bare_parents("vllm.v1.x", OFFLOADING)
from vllm.v1.kv_offload.base import ReqContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager  # noqa: E402


def offloading_spec() -> SimpleNamespace:
    """What the tier reads of vLLM's own OffloadingSpec: names that go into its paths."""
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=False
    )
    config = SimpleNamespace(
        groups=(),
        model=SimpleNamespace(name="bench", dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16),
        parallel=parallel,
        replicated_layout=False,
        canonical_layout=False,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=16)


class VllmFs(ChunkContestant):
    """Keeps a context in a FileSystemTierManager of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._tier: FileSystemTierManager | None = None
        self._jobs = 0

    def keep(self, memory: ChunkMemory, place: Place) -> None:
        primary = memory.flat.numpy().data
        self._tier = FileSystemTierManager(offloading_spec(), primary, "fs", f"{place.folder}/fs")
        self._tier.submit_store(self._job(memory, loads=False))
        self._finish()

    def _job(self, memory: ChunkMemory, *, loads: bool) -> TransferJob:
        self._jobs += 1
        keys = [make_offload_key(index.to_bytes(32, "big"), 0) for index in range(memory.count)]
        return TransferJob(
            self._jobs, keys, np.arange(memory.count), loads, ReqContext(req_id="bench")
        )

    def _finish(self) -> None:
        assert self._tier is not None
        self._tier.drain_jobs()
        if not all(each.success for each in self._tier.get_finished_jobs()):
            raise OSError("a job of FileSystemTierManager failed; its log says why")

    def read(self, memory: ChunkMemory) -> None:
        assert self._tier is not None
        self._tier.submit_load(self._job(memory, loads=True))
        self._finish()

    def close(self) -> None:
        if self._tier is not None:
            self._tier.shutdown()
        self._tier = None
        super().close()


if __name__ == "__main__":
    compete(VllmFs())
