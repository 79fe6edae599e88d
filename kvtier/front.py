"""`kvtier.open`: the way in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError
from kvtier.io.probe import Engine
from kvtier.io.rawfile import DirectMode
from kvtier.tiering.config import Config, PlacementName
from kvtier.tiering.fingerprint import Fingerprint, tenant
from kvtier.tiering.geometry import Geometry

if TYPE_CHECKING:
    from kvtier.tiering.store import Store


def open(  # noqa: A001
    path: str | Path,
    *,
    model: Any = None,
    geometry: Geometry | None = None,
    fingerprint: Mapping[str, Any] | str | None = None,
    namespace: str = "",
    salt: str | bytes = "",
    region: int | str | Sequence[str] | None = None,
    hot: int | str = "512MiB",
    host: int | str = 0,
    engine: Engine = "auto",
    direct_io: DirectMode = "preferred",
    force: bool = False,
    hold_limit: int | str | None = None,
    discard: bool = False,
    placement: PlacementName = "position",
    sketch_bits: int = 3,
) -> Store:
    """Open the store in directory `path`, or make one there. Use it as a `with` block.

    model: a Hugging Face model; its geometry and fingerprint are read from it, and its attention
        is set to "kvtier" until the store is closed.
    geometry, fingerprint: for any other engine: the KV shapes, and plain values that identify
        all that the KV depends on (weights, dtype, rotary settings, ...).
    namespace, salt: separate tenants: KV is never shared across them. The salt is a secret of
        the tenant and is not kept; without it nobody finds what was stored with it.
    region, hot, host, engine, direct_io, force, hold_limit, discard, placement, sketch_bits: see
        kvtier.Config.

    Raises ConfigError for settings that cannot be used, and every error of Store.open.
    """
    from kvtier.tiering.store import Store

    config = Config(
        region, hot, host, engine, direct_io, force, hold_limit, discard, placement, sketch_bits
    )
    if model is not None:
        if geometry is not None or fingerprint is not None:
            raise ConfigError("pass a model, or geometry and fingerprint, not both")
        return _open_for_model(path, model, tenant(namespace, salt), config)
    if geometry is None or fingerprint is None:
        raise ConfigError("pass model=, or both geometry= and fingerprint=")
    if not isinstance(geometry, Geometry):
        raise ConfigError(f"geometry must be a kvtier.Geometry: got {type(geometry).__name__}")
    if not isinstance(fingerprint, str | Mapping):
        raise ConfigError(
            "fingerprint must be text, or a dict of plain values that identify the model: got "
            f"{type(fingerprint).__name__}"
        )
    identity = {
        "engine": fingerprint if isinstance(fingerprint, str) else dict(fingerprint),
        "geometry": geometry.to_dict(),
        "namespace": tenant(namespace, salt),
    }
    return Store.open(path, geometry, Fingerprint.of(identity), config)


def _open_for_model(path: str | Path, model: Any, owner: Any, config: Config) -> Store:
    if not hasattr(model, "config"):
        raise ConfigError(
            f"model must be a loaded Hugging Face model: got {type(model).__name__}. "
            "Load it with transformers.AutoModelForCausalLM.from_pretrained"
        )
    from kvtier.tiering.adapters.model_store import open_for_model

    return open_for_model(path, model, owner, config)
