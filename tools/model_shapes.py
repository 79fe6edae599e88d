"""Shapes of language models, for what their KV takes and their prefill costs: published numbers, or
any config.json. No model is loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.io.small_file import read_small
from kvtier.tools.system_errors import typed

CONFIG_BYTES_MAX = 16 << 20
COUNT_MAX = 1 << 32
"""Of anything that a config counts: far more than any model has."""
FOUND_LENGTH_MAX = 60
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a config says. experts: MLPs that each token goes through. window: tokens that layers
    with a sliding window see; windowed_layers: how many those are. dtype_bytes: of a number of KV.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_width: int
    experts: int = 1
    window: int = 0
    windowed_layers: int = 0
    dtype_bytes: int = 2

    @property
    def weights(self) -> int:
        """Weights that a token of a prompt meets: those of the layers. The last one alone meets
        those that make it a word."""
        attention = self.hidden * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate * self.experts
        return self.layers * (attention + mlp)

    @property
    def layer_token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_width * self.dtype_bytes

    def kv_bytes(self, tokens: int) -> int:
        """KV that is read to go on behind so many tokens."""
        full = (self.layers - self.windowed_layers) * tokens
        return self.layer_token_bytes * (full + self.windowed_layers * min(tokens, self.window))

    @property
    def token_flops(self) -> float:
        """Of one token of a prompt, but for what it attends to in layers without a window."""
        windowed = 4.0 * self.windowed_layers * self.heads * self.head_width * self.window
        return 2.0 * self.weights + windowed

    @property
    def pair_flops(self) -> float:
        """Of one token and one before it, in all layers without a window."""
        return 4.0 * (self.layers - self.windowed_layers) * self.heads * self.head_width


PUBLISHED = {
    shape.name.lower(): shape
    for shape in (
        ModelShape("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 64),
        ModelShape("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128),
        ModelShape("Qwen2.5-72B", 80, 8192, 29568, 64, 8, 128),
        ModelShape("Qwen3-8B", 36, 4096, 12288, 32, 8, 128),
        ModelShape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128),
        ModelShape("Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128),
        ModelShape("Mistral-7B", 32, 4096, 14336, 32, 8, 128),
        ModelShape("Mixtral-8x7B", 32, 4096, 14336, 32, 8, 128, experts=2),
        ModelShape("Gemma-2-9B", 42, 3584, 14336, 16, 8, 256, window=4096, windowed_layers=21),
    )
}


def find(name: str) -> ModelShape:
    """A published shape by its name, or that of a config.json or of the folder that has one.

    Raises ConfigError.
    """
    known = PUBLISHED.get(name.lower())
    if known is not None:
        return known
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{name!r} names no home directory that is known here") from error
    with typed(f"look at {name}"):
        if path.is_dir():
            path = path / "config.json"
        is_file = path.is_file()
    if not is_file:
        names = ", ".join(shape.name for shape in PUBLISHED.values())
        raise ConfigError(
            f"there is no model, store or config.json {name!r}. Known by name: {names}"
        )
    return from_config(path)


def from_config(path: Path) -> ModelShape:
    """The shape that a Hugging Face config.json describes. Raises ConfigError."""
    try:
        config = json.loads(read_small(path, CONFIG_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path} as a model's config.json: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no config.json of a model: it holds no JSON object")
    inner = config.get("text_config")
    config = config if inner is None else inner
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: text_config must be a JSON object, found {_clipped(inner)}")
    layers, hidden = _count(config, path, "num_hidden_layers"), _count(config, path, "hidden_size")
    heads = _count(config, path, "num_attention_heads")
    window, windowed = _windows(config, path, layers)
    dtype = str(config.get("dtype", config.get("torch_dtype")) or "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"{path}: dtype {_clipped(dtype)} is not one of {', '.join(DTYPE_BYTES)}")
    mlp = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    return ModelShape(
        name=path.resolve().parent.name,
        layers=layers,
        hidden=hidden,
        intermediate=_count(config, path, mlp),
        heads=heads,
        kv_heads=_count(config, path, "num_key_value_heads", heads),
        head_width=_count(config, path, "head_dim", max(1, hidden // heads)),
        experts=_count(config, path, "num_experts_per_tok", 1),
        window=window,
        windowed_layers=windowed,
        dtype_bytes=DTYPE_BYTES[dtype],
    )


def _count(config: dict[str, Any], path: Path, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}: {key} must be a positive number, found {_clipped(value)}")
    if value > COUNT_MAX:
        raise ConfigError(f"{path}: {key} must be at most {COUNT_MAX}, found {_clipped(value)}")
    return value


def _clipped(value: object) -> str:
    """As it stands in a message of one line."""
    text = repr(value)
    return text if len(text) <= FOUND_LENGTH_MAX else f"{text[:FOUND_LENGTH_MAX]}..."


def _windows(config: dict[str, Any], path: Path, layers: int) -> tuple[int, int]:
    """Tokens of the sliding window, and how many layers have it."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or window < 1 or config.get("use_sliding_window") is False:
        return 0, 0
    window = _count(config, path, "sliding_window")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return window, min(layers, sum(each == "sliding_attention" for each in kinds))
    return window, layers
