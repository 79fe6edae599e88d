"""kvtier: a tiered store for the KV cache of language models, down to raw NVMe.

In a checkout the rooms below this package are links to the repository's top-level folders
(kvtier/io -> ../io); in a wheel they are plain folders. Names are imported when they are used:
`import kvtier` alone loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.errors import KvtierError
    from kvtier.front import open  # noqa: A004
    from kvtier.tiering.adapters.generation import generate
    from kvtier.tiering.aio import AsyncStore
    from kvtier.tiering.chain import content_tokens
    from kvtier.tiering.config import Config
    from kvtier.tiering.fingerprint import Fingerprint, Provenance
    from kvtier.tiering.geometry import Geometry, LayerGeometry
    from kvtier.tiering.sequence import Sequence
    from kvtier.tiering.stats import StoreStats
    from kvtier.tiering.store import Store

__version__ = "0.1.0"

__all__ = [
    "AsyncStore",
    "Config",
    "Fingerprint",
    "Geometry",
    "KvtierError",
    "LayerGeometry",
    "Provenance",
    "Sequence",
    "Store",
    "StoreStats",
    "content_tokens",
    "generate",
    "open",
]

_HOMES = {
    "AsyncStore": ("kvtier.tiering.aio", "AsyncStore"),
    "Config": ("kvtier.tiering.config", "Config"),
    "Fingerprint": ("kvtier.tiering.fingerprint", "Fingerprint"),
    "Geometry": ("kvtier.tiering.geometry", "Geometry"),
    "KvtierError": ("kvtier.errors", "KvtierError"),
    "LayerGeometry": ("kvtier.tiering.geometry", "LayerGeometry"),
    "Provenance": ("kvtier.tiering.fingerprint", "Provenance"),
    "Sequence": ("kvtier.tiering.sequence", "Sequence"),
    "Store": ("kvtier.tiering.store", "Store"),
    "StoreStats": ("kvtier.tiering.stats", "StoreStats"),
    "content_tokens": ("kvtier.tiering.chain", "content_tokens"),
    "generate": ("kvtier.tiering.adapters.generation", "generate"),
    "open": ("kvtier.front", "open"),
}


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}") from None
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
