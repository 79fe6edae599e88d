"""The hash behind the chained token digests; apart, because it needs no numpy."""

from dataclasses import dataclass
from typing import Self

import xxhash


@dataclass(frozen=True, slots=True)
class ChainHash:
    """A position of a stream, from which it can be followed without its tokens at hand."""

    _state: xxhash.xxh3_128

    @classmethod
    def at_start(cls) -> Self:
        return cls(xxhash.xxh3_128())

    def then(self, tokens: bytes | memoryview) -> Self:
        """The position after these tokens too (little-endian uint32)."""
        state = self._state.copy()
        state.update(tokens)
        return type(self)(state)

    @property
    def digest(self) -> bytes:
        """16 bytes that name the position."""
        return self._state.digest()
