"""A model's KV shapes: the only place where counts of tokens and pages become bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvtier.errors import ConfigError

PAGE_TOKENS = 16
"""Tokens of a full Page: the unit that attention reads and queries choose."""
SEGMENT_TOKENS = 512
"""Tokens of a full Segment: the unit of sharing and of persistence."""
SEGMENT_PAGES = SEGMENT_TOKENS // PAGE_TOKENS

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

LAYERS_MAX = 1024
HEADS_MAX = 1024
WIDTH_MAX = 8192
PAYLOAD_BYTES_MAX = 2**32 - 1
"""The page directory keeps offsets within a payload in 32 bits."""


def pages_of(tokens: int) -> int:
    """Pages that hold this many tokens of one kv head."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer: kv heads, elements of a key row and of a value row, sliding window in tokens.

    A latent (MLA) layer keeps one vector per token: value_width is 0.
    """

    kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("kv_heads", self.kv_heads, 1, HEADS_MAX),
            ("key_width", self.key_width, 1, WIDTH_MAX),
            ("value_width", self.value_width, 0, WIDTH_MAX),
            ("window", 1 if self.window is None else self.window, 1, 1 << 40),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} must be {low} to {high}: got {value}")

    @property
    def row_width(self) -> int:
        """Elements of one token of one kv head: its key row and its value row."""
        return self.key_width + self.value_width

    def first_seen(self, position: int) -> int:
        """The first position that the token at this one attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class Geometry:
    """All layers of a model and the dtype that their KV is kept in."""

    layers: tuple[LayerGeometry, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(ITEM_BYTES)}: got {self.dtype}")
        if not 1 <= len(self.layers) <= LAYERS_MAX:
            raise ConfigError(f"a geometry has 1 to {LAYERS_MAX} layers: got {len(self.layers)}")
        for layer in range(len(self.layers)):
            size = self.payload_bytes(layer, SEGMENT_TOKENS)
            if size > PAYLOAD_BYTES_MAX:
                raise ConfigError(
                    f"layer {layer} has {size} bytes for {SEGMENT_TOKENS} tokens: at most "
                    f"{PAYLOAD_BYTES_MAX} bytes can be stored"
                )

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, width: int, *, dtype: str = "float32") -> Self:
        """A model whose layers are all alike, with keys and values of one width."""
        return cls((LayerGeometry(kv_heads, width, width),) * layers, dtype)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def row_bytes(self, layer: int) -> int:
        """Bytes of one token of one kv head of this layer."""
        return self.layers[layer].row_width * self.item_bytes

    def frame_bytes(self, layer: int) -> int:
        """Bytes of a Frame: room for one full Page of this layer."""
        return PAGE_TOKENS * self.row_bytes(layer)

    def frames_bytes(self, layer: int, tokens: int) -> int:
        """Bytes of the Frames that hold this many tokens of this layer, all kv heads."""
        return self.layers[layer].kv_heads * pages_of(tokens) * self.frame_bytes(layer)

    def payload_bytes(self, layer: int, tokens: int) -> int:
        """Bytes of this many tokens of this layer, all kv heads, packed."""
        return self.layers[layer].kv_heads * tokens * self.row_bytes(layer)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(self.payload_bytes(layer, 1) for layer in range(len(self.layers)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "layers": [
                [each.kv_heads, each.key_width, each.value_width, each.window]
                for each in self.layers
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        layers: Sequence[Sequence[Any]] = data["layers"]
        return cls(tuple(LayerGeometry(*each) for each in layers), str(data["dtype"]))
