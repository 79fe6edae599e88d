"""How the keys of each layer of a Hugging Face model carry their positions, read off the model.

What is read is tried: keys that the model's own code turns must come back as they were. Where they
do not, or where the model's code is built otherwise, keys are compared as they are stored, which
costs accuracy and nothing else.
"""

import inspect
import logging
import sys
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from kvtier.errors import ConfigError
from kvtier.kernels.rotary import Rotary, unrotated
from kvtier.tiering.geometry import Geometry

_log = logging.getLogger("kvtier")

STYLES: tuple[Literal["half", "interleaved"], ...] = ("half", "interleaved")
TRIED_TOKENS = 7
TOLERANCE = 1e-4


def rotaries_of(model: PreTrainedModel, geometry: Geometry) -> list[Rotary | None]:
    """For each layer; None: its keys are not known to be turned in a way that can be undone."""
    config: Any = model.config.get_text_config(decoder=True)
    kinds, _ = get_layer_types_and_kwargs(config)
    modules = [
        module
        for module in model.modules()
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    ]
    if len(modules) != 1:
        count = len(modules)
        _log.info("%s: %d rotary embeddings, keys compared as they are", config.model_type, count)
        return [None] * len(kinds)
    known: dict[str, Rotary | None] = {kind: _rotary_of(modules[0], kind) for kind in {*kinds}}
    found = []
    for kind, layer in zip(kinds, geometry.layers, strict=True):
        rotary = known[kind]
        fits = rotary is not None and rotary.rotated <= layer.key_width
        found.append(rotary if fits else None)
    missing = found.count(None)
    if missing:
        _log.info("%s: keys of %d layers compared as they are", config.model_type, missing)
    return found


def _rotary_of(module: torch.nn.Module, kind: str) -> Rotary | None:
    """Of layers of this kind, if it turns keys back."""
    frequencies = getattr(module, f"{kind}_inv_freq", getattr(module, "inv_freq", None))
    scaling = getattr(module, f"{kind}_attention_scaling", getattr(module, "attention_scaling", 1))
    turn = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if not isinstance(frequencies, torch.Tensor) or turn is None:
        return None
    numbers = tuple(frequencies.double().tolist())
    for style in STYLES:
        try:
            rotary = Rotary(numbers, float(scaling), style)
            if _turns_back(module, kind, turn, rotary):
                return rotary
        except (ConfigError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            # The model's code is built otherwise than most: it is not to be understood here.
            _log.info("rotary embedding of %s layers not understood: %s", kind, error)
            return None
    return None


def _turns_back(module: Any, kind: str, turn: Any, rotary: Rotary) -> bool:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(1, 1, TRIED_TOKENS, rotary.rotated, generator=generator)
    positions = torch.arange(3, 3 + TRIED_TOKENS)
    takes_kind = "layer_type" in inspect.signature(module.forward).parameters
    options = {"layer_type": kind} if takes_kind else {}
    with torch.no_grad():
        cos, sin = module(keys, positions[None], **options)
        turned = turn(keys, keys, cos, sin)[1]
    back = unrotated(turned, positions, rotary)
    return bool((back - keys).abs().max() < TOLERANCE)
