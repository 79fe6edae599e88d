"""What makes KV valid (Fingerprint) and how it came about (Provenance)."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvtier.errors import ConfigError

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digest of everything that makes KV valid, with the description that was digested.

    digest: sha256 of the description as canonical JSON. The description holds resolved values
    only: two models whose KV could differ in one bit have different descriptions.
    """

    digest: bytes
    description: str

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Self:
        """Raises ConfigError for a description that is not plain JSON."""
        try:
            text = json.dumps(description, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a fingerprint is made of plain JSON values: {error}") from error
        return cls(hashlib.sha256(text.encode()).digest(), text)

    @property
    def hex(self) -> str:
        return self.digest.hex()


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a Segment's KV came about.

    "exact": computed by full attention over lossless KV. Anything else is approximate and says
    with which budget and codec; it is inherited by every Segment computed on top of it, and a
    request for exact KV never matches it.
    """

    text: str

    @property
    def is_exact(self) -> bool:
        return self.text == "exact"

    @classmethod
    def approximate(cls, budget: float, codec: str) -> Self:
        return cls(f"approximate:budget={budget:g},codec={codec}")

    @classmethod
    def parse(cls, text: str) -> Self:
        if text != "exact" and not text.startswith("approximate:"):
            raise ConfigError(f"not a provenance: {text!r}")
        return cls(text)


EXACT = Provenance("exact")
