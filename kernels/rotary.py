"""Rotary position embedding, undone: keys as they were before their positions were put in."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a layer's keys carry their positions.

    The leading `rotated` dimensions of a key form pairs; at position p, pair i was turned by the
    angle p * inverse_frequencies[i] and multiplied by `scaling`. The other dimensions are as they
    were. Raises ConfigError for numbers that cannot be undone.
    """

    inverse_frequencies: tuple[float, ...]
    """One for each pair: those in use, after any scaling of frequencies."""
    scaling: float = 1.0
    """What transformers calls attention_scaling: cos and sin were multiplied by it."""
    style: Literal["half", "interleaved"] = "half"
    """Which dimensions are a pair: i and i + rotated/2 (Llama, Qwen, Gemma, NeoX), or 2i and 2i + 1
    (GPT-J, Cohere)."""

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.inverse_frequencies)):
            raise ConfigError("inverse_frequencies must be finite")
        if not (math.isfinite(self.scaling) and self.scaling > 0):
            raise ConfigError(f"scaling is {self.scaling}; it takes a finite number above 0")
        if self.style not in ("half", "interleaved"):
            raise ConfigError(f'style is {self.style!r}; it takes "half" or "interleaved"')

    @property
    def rotated(self) -> int:
        """How many leading dimensions of a key are turned."""
        return 2 * len(self.inverse_frequencies)


def unrotated(keys: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Keys before their positions were put in: the inverse of k * cos + rotate(k) * sin.

    keys: float [..., tokens, width]. positions: int64 [tokens]. Returns float32 of the same shape,
    in new memory. Keys that are not finite stay so, in their own rows. Raises ConfigError.
    """
    if keys.ndim < 2 or not keys.dtype.is_floating_point or keys.shape[-1] < rotary.rotated:
        raise ConfigError(
            f"keys is {list(keys.shape)} {keys.dtype}; it takes a float [..., tokens, width] with "
            f"a width of at least {rotary.rotated}"
        )
    if positions.shape != keys.shape[-2:-1] or positions.dtype != torch.int64:
        raise ConfigError(
            f"positions is {list(positions.shape)} {positions.dtype}; it takes int64 "
            f"[{keys.shape[-2]}]"
        )
    frequencies = torch.tensor(rotary.inverse_frequencies, dtype=torch.float32)
    # In float32, because models compute their angles so.
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().div_(rotary.scaling), angles.sin().div_(rotary.scaling)
    result = keys.to(torch.float32, copy=True)
    first, second = _pairs(result, rotary)
    turned = first * cos + second * sin, second * cos - first * sin
    first.copy_(turned[0])
    second.copy_(turned[1])
    return result


def _pairs(keys: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair, as views."""
    turned = keys[..., : rotary.rotated]
    if rotary.style == "interleaved":
        return turned[..., 0::2], turned[..., 1::2]
    half = rotary.rotated // 2
    return turned[..., :half], turned[..., half:]
