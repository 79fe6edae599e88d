"""What makes KV valid (Fingerprint) and how it came about (Provenance)."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvtier.errors import ConfigError, FormatError

PROVENANCE_BYTES = 56
"""Room that an extent header has for the text of a Provenance."""
BUDGETS_DIGITS = 24
"""Hexadecimal digits that stand for the budgets of layers: no two lists of them were ever found
that share so many."""


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
        _require_string_keys(description)
        try:
            text = json.dumps(description, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a fingerprint is made of plain JSON values: {error}") from error
        return cls(hashlib.sha256(text.encode()).digest(), text)

    @classmethod
    def stored(cls, digest: bytes, description: str) -> Self:
        """One that was made before. Raises FormatError unless the digest is the description's."""
        # A lone surrogate, which JSON can spell, has no UTF-8: it never was digested.
        found = hashlib.sha256(description.encode(errors="replace")).digest()
        if found != digest:
            raise FormatError(
                f"the fingerprint {digest.hex()[:12]} is not that of its description, which is "
                f"{found.hex()[:12]}: one of them was changed"
            )
        return cls(digest, description)

    @property
    def hex(self) -> str:
        return self.digest.hex()

    def model_hex(self) -> str:
        """Of the description without its tenant: the same for all who use the same model."""
        content = json.loads(self.description)
        if isinstance(content, dict):
            content.pop("namespace", None)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a Segment's KV came about.

    "exact": computed by full attention over lossless KV. Anything else is approximate and says
    with which budget and codec; it is inherited by every Segment computed on top of it, and a
    request for exact KV never matches it.
    """

    text: str

    def __post_init__(self) -> None:
        if self.text != "exact" and not self.text.startswith("approximate:"):
            raise ConfigError(f"not a provenance: {self.text!r}")
        if not (self.text.isascii() and self.text.isprintable()):
            raise ConfigError(f"a provenance is printable ASCII: got {self.text!r}")
        if len(self.text) > PROVENANCE_BYTES:
            raise ConfigError(
                f"a provenance has at most {PROVENANCE_BYTES} bytes: got {len(self.text)} bytes, "
                f"{self.text!r}"
            )

    @classmethod
    def approximate(cls, budget: float | Sequence[float], codec: str) -> Self:
        """budget: the share of the context that was read, above 0 and at most 1, or that of each
        layer. Shares that are all alike are one."""
        shares = list(budget) if isinstance(budget, Sequence) else [budget]
        if not shares or not all(0 < each <= 1 for each in shares):
            raise ConfigError(f"a budget is above 0 and at most 1: got {budget}")
        # repr, not :g: two budgets must never share one text.
        texts = [repr(float(each)) for each in shares]
        if len(set(texts)) == 1:
            return cls(f"approximate:budget={texts[0]},codec={codec}")
        # A header has no room for the shares of many layers.
        digest = hashlib.sha256(",".join(texts).encode()).hexdigest()[:BUDGETS_DIGITS]
        return cls(f"approximate:budgets={digest},codec={codec}")

    def may_follow(self, before: "Provenance") -> bool:
        """Whether such a Segment may continue one of the provenance `before`: its own, or exact
        KV, which an approximate answer begins with."""
        return before in (self, EXACT)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ConfigError for a text that is no provenance."""
        return cls(text)


EXACT = Provenance("exact")


def tenant(namespace: str, salt: str | bytes = "") -> Any:
    """What a fingerprint says of its tenant. Two that differ in either part never share KV.

    The salt itself is not kept, only its digest: who can read a store still cannot name another
    tenant's KV. Raises ConfigError.
    """
    if not isinstance(namespace, str) or not isinstance(salt, str | bytes):
        raise ConfigError(
            f"a namespace is text, a salt text or bytes: got {type(namespace).__name__} and "
            f"{type(salt).__name__}"
        )
    if not salt:
        return namespace
    secret = salt.encode() if isinstance(salt, str) else salt
    keyed = hashlib.sha256(b"kvtier tenant\0" + namespace.encode() + b"\0" + secret)
    return {"name": namespace, "salt": keyed.hexdigest()}


def _require_string_keys(value: object) -> None:
    """JSON would write the keys 1 and "1" alike, so that two descriptions had one digest."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"a fingerprint's keys are text: got {key!r}")
            _require_string_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_string_keys(inner)
