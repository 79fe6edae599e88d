"""Reads Geometry and Fingerprint off a Hugging Face model: resolved values only, no names."""

import hashlib
import json
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.packing import TORCH_DTYPES

LAYER_KINDS = ("full_attention", "sliding_attention")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
ADAPTER_SETTINGS = ("scaling", "use_dora", "use_rslora", "lora_alpha")
"""What an adapter's layer keeps per adapter, beside weights, that changes what it computes."""
# Fields of a config that say where a model came from or how it is run, not what it computes.
RUNTIME_FIELDS = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}


def geometry_of(model: PreTrainedModel) -> Geometry:
    """The KV shapes of every layer. Raises UnsupportedError, naming the layer kind, for
    models that keep other state than keys and values, or share it between layers."""
    config: Any = model.config.get_text_config(decoder=True)
    if model.device.type != "cpu":
        raise UnsupportedError(
            f"the model is on {model.device}: GPU tiers are not built yet, use model.to('cpu')"
        )
    dtypes = {value: name for name, value in TORCH_DTYPES.items()}
    if model.dtype not in dtypes:
        raise ConfigError(f"the model computes in {model.dtype}: kvtier keeps {list(TORCH_DTYPES)}")
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", False
    ):
        raise UnsupportedError("a model whose attention is not causal has no KV to reuse")
    if model.config.is_encoder_decoder:
        raise UnsupportedError("an encoder-decoder model has KV that depends on its encoder")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError("latent attention (MLA) models are not supported yet")
    kinds, options = get_layer_types_and_kwargs(config)
    layers = []
    for index, (kind, option) in enumerate(zip(kinds, options, strict=True)):
        if kind == "dummy":
            raise UnsupportedError(
                f"layer {index} keeps no KV of its own: it shares another layer's, or does not "
                "attend"
            )
        if kind not in LAYER_KINDS:
            raise UnsupportedError(
                f"layer {index} is of kind {kind!r}: kvtier takes {' and '.join(LAYER_KINDS)}"
            )
        own = config.per_layer_config[index]
        heads = own.num_attention_heads
        width = getattr(own, "head_dim", None) or own.hidden_size // heads
        kv_heads = getattr(own, "num_key_value_heads", None) or heads
        layers.append(LayerGeometry(kv_heads, width, width, option.get("sliding_window")))
    return Geometry(tuple(layers), dtypes[model.dtype])


def fingerprint_of(model: PreTrainedModel, geometry: Geometry, tenant: Any) -> Fingerprint:
    """Digest of weights, config, rotary settings, active adapters, shapes and tenant.

    Raises UnsupportedError for rotary embeddings that change with the length of the text:
    the KV of a prefix would then depend on what follows it.
    """
    config = {
        key: value
        for key, value in model.config.to_dict().items()
        if key not in RUNTIME_FIELDS and not key.startswith("_")
    }
    rotary = _rotary(model)
    canonical = json.dumps(config, sort_keys=True, default=str)
    return Fingerprint.of(
        {
            "engine": "transformers",
            "model_type": str(model.config.model_type),
            "weights": weights_digest(model),
            "config": hashlib.sha256(canonical.encode()).hexdigest(),
            "rotary": rotary,
            "adapter": _adapters_digest(model),
            "geometry": geometry.to_dict(),
            "namespace": tenant,
        }
    )


def weights_state(model: torch.nn.Module) -> int:
    """Changes when a weight or buffer is replaced or changed in place; costs microseconds each.

    So it does when an adapter is switched. What is changed through `.data` is not noticed here,
    but by the digest at the next open.
    """
    tensors = tuple(
        (each.data_ptr(), 0 if each.is_inference() else each._version)
        for each in [*model.parameters(), *model.buffers()]
    )
    return hash((tensors, tuple(_adapters(model))))


def weights_digest(model: torch.nn.Module) -> str:
    """xxh3-128 over name, shape, dtype and bytes of every parameter and buffer (rotary
    frequencies are among the buffers). Never cached: a change made through `.data`, as adapters
    are merged, leaves no trace to tell an old digest by."""
    digest = xxhash.xxh3_128()
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {list(each.shape)} {each.dtype};".encode())
        data = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


def _rotary(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Kind and scaling of every rotary embedding; its frequencies are digested as weights."""
    found = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind is None:
            continue
        kinds = kind if isinstance(kind, dict) else {"all": kind}
        for each in kinds.values():
            if each in LENGTH_DEPENDENT_ROPE:
                raise UnsupportedError(
                    f"rotary scaling {each!r} changes keys with the length of the text; their KV "
                    "cannot be reused"
                )
        scaling = {
            name: float(value)
            for name, value in vars(module).items()
            if name.endswith("attention_scaling") and isinstance(value, int | float)
        }
        found.append({"kind": {k: str(v) for k, v in kinds.items()}, "scaling": scaling})
    return found


def _adapters_digest(model: torch.nn.Module) -> str | None:
    """None: no adapter. Each layer's would be too long for a description."""
    layers = _adapters(model)
    return hashlib.sha256(json.dumps(layers).encode()).hexdigest() if layers else None


def _adapters(model: torch.nn.Module) -> list[str]:
    """Which adapters act in which layer, and how strongly; their weights are among the parameters.

    Read off the layers themselves, because adapters may be injected without the model's knowing.
    """
    found = []
    for name, module in model.named_modules():
        if not hasattr(module, "adapter_layer_names"):
            continue
        layer: Any = module
        settings = {
            kind: {each: str(value) for each, value in vars(layer)[kind].items()}
            for kind in ADAPTER_SETTINGS
            if isinstance(vars(layer).get(kind), dict)
        }
        active = [] if layer.disable_adapters else list(layer.active_adapters)
        found.append(f"{name} {active} merged {list(layer.merged_adapters)} {settings}")
    return found
