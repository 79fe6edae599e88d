"""The attention kernels refuse arguments that do not fit, and name them."""

import math
from collections.abc import Callable

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.kernels.paged_attention import dense_causal_attention, paged_attention
from kvtier.kernels.running import Partial
from kvtier.kernels.workspace import Workspace
from tests.kernel_cases import (
    Shape,
    make_case,
)

Broken = tuple[str, str, object]
BROKEN: list[Broken] = [
    ("query", "query has dtype torch.float64", torch.zeros(4, 1, 8, dtype=torch.float64)),
    ("query", r"query has shape \[4, 8\]; it takes \[any, any, any\]", torch.zeros(4, 8)),
    ("query", "query has strides", torch.zeros(4, 8, 3).transpose(1, 2)),
    ("query", "frames has 2 kv heads, query has 3 heads", torch.zeros(3, 1, 8)),
    ("query", "widths is .8, 8.; it takes .Dk, Dv. with Dk = 4", torch.zeros(4, 1, 4)),
    ("pool", "pool has dtype torch.bfloat16", torch.zeros(4, 256, dtype=torch.bfloat16)),
    ("pool", r"pool has shape \[4, 255\]; it takes \[any, 256\]", torch.zeros(4, 255)),
    ("pool", r"pool has strides .*\(1024 bytes\)", torch.zeros(256, 4).t()),
    ("frames", "frames has dtype torch.int32", torch.zeros(2, 2, dtype=torch.int32)),
    ("frames", "frames holds indices 0 to 4; it takes 0 to 3", torch.tensor([[0, 1], [2, 4]])),
    ("frames", "frames holds indices -1 to 2", torch.tensor([[0, 1], [2, -1]])),
    ("valid", r"valid has shape \[2, 2, 15\]", torch.ones(2, 2, 15, dtype=torch.bool)),
    ("valid", "valid has dtype torch.float32", torch.ones(2, 2, 16)),
    ("valid", "the last 3 pages; frames has 2", torch.ones(2, 3, 16, dtype=torch.bool)),
    ("valid", "valid is 0 slots of the last of 2 pages; it takes 1 to 16", 0),
    ("valid", "valid is 17 slots", 17),
    ("visible", r"visible has shape \[1, 3, 2, 16\]", torch.ones(1, 3, 2, 16, dtype=torch.bool)),
    ("scale", "scale is nan", math.nan),
    ("softcap", "softcap is 0.0", 0.0),
]


@pytest.mark.parametrize(("name", "message", "value"), BROKEN)
def test_paged_refuses_what_does_not_fit(name: str, message: str, value: object) -> None:
    case = make_case(Shape(2, 2, 8, 8, tokens=32), seed=1)
    pool, frames = torch.zeros(4, 256), torch.tensor([[0, 1], [2, 3]])
    arguments: dict[str, object] = {
        "query": case.query,
        "pool": pool,
        "frames": frames,
        "widths": (8, 8),
        "valid": case.valid,
        "visible": None,
        "scale": 1.0,
        "softcap": None,
        "workspace": Workspace(),
    }
    call: Callable[..., Partial] = paged_attention
    call(**arguments)
    with pytest.raises(ConfigError, match=message):
        call(**{**arguments, name: value})


@pytest.mark.parametrize(
    ("name", "message", "value"),
    [
        ("keys", r"keys has shape \[2, 4, 8\]; it takes \[any, 5, 8\]", torch.zeros(2, 4, 8)),
        ("keys", "keys has 3 kv heads, query has 4 heads", torch.zeros(3, 5, 8)),
        ("keys", "keys has strides", torch.zeros(2, 8, 5).transpose(1, 2)),
        ("values", r"values has shape \[1, 5, 8\]; it takes \[2, 5, any\]", torch.zeros(1, 5, 8)),
        ("values", "values has dtype torch.float16", torch.zeros(2, 5, 8, dtype=torch.float16)),
        ("window", "window is 0", 0),
    ],
)
def test_dense_refuses_what_does_not_fit(name: str, message: str, value: object) -> None:
    arguments: dict[str, object] = {
        "query": torch.zeros(4, 5, 8),
        "keys": torch.zeros(2, 5, 8),
        "values": torch.zeros(2, 5, 8),
        "window": None,
        "scale": 1.0,
        "workspace": Workspace(),
    }
    call: Callable[..., Partial] = dense_causal_attention
    call(**arguments)
    with pytest.raises(ConfigError, match=message):
        call(**{**arguments, name: value})
