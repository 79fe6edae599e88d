"""Keys, values and queries for the tests of digests and selection, and exact attention on them."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier.kernels.oracle import attention_oracle
from kvtier.kernels.running import Partial

SEEDS = (0, 1, 2)
PAGE = 16


@dataclass(frozen=True, slots=True)
class Context:
    """query [q_heads, width], keys and values [heads, tokens, width] in the order of slots."""

    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float

    @property
    def group(self) -> int:
        return self.query.shape[0] // self.keys.shape[0]


def gaussian(
    seed: int, tokens: int = 100, width: int = 64, heads: int = 2, group: int = 3
) -> Context:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((heads * group, width), generator=generator)
    keys = torch.randn((heads, tokens, width), generator=generator)
    # A common part and lengths that differ, as keys of models have.
    lengths = torch.rand((heads, tokens, 1), generator=generator) * 2 + 0.5
    keys = keys * lengths + 3 * torch.randn((heads, 1, width), generator=generator)
    values = torch.randn((heads, tokens, width), generator=generator)
    return Context(query, keys, values, 1 / math.sqrt(width))


def clustered(seed: int, tokens: int = 2048, width: int = 64) -> Context:
    """Runs of about 24 tokens share most of a key and of a value; each query looks for a few."""
    heads, group, count = 2, 3, max(1, tokens // 24)
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    centres, of_values = normal(heads, count, width), normal(heads, count, width)
    which = torch.randint(0, count, (heads, tokens), generator=generator).sort(1).values
    rows = torch.arange(heads).unsqueeze(1)
    keys = centres[rows, which] * 1.2 + normal(heads, tokens, width) * 0.8
    keys = keys + 3 * normal(heads, 1, width)
    values = of_values[rows, which] + normal(heads, tokens, width) * 0.5
    wanted = torch.randint(0, count, (heads, group, 3), generator=generator)
    query = centres[rows.unsqueeze(2), wanted].sum(2) + normal(heads, group, width) * 0.7
    return Context(query.view(heads * group, width), keys, values, 1 / math.sqrt(width))


def numpy_scores(context: Context, softcap: float | None = None) -> NDArray[np.float64]:
    """True natural scores [q_heads, tokens], float64."""
    query, keys = context.query.double().numpy(), context.keys.double().numpy()
    scores = np.concatenate(
        [
            query[head * context.group : (head + 1) * context.group] @ rows.T
            for head, rows in enumerate(keys)
        ]
    )
    scores = scores * context.scale
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def log_sums(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural log of the sum of exponentials over each page, [q_heads, pages]."""
    pages = range(0, scores.shape[1], PAGE)
    peak = scores.max()
    return np.stack(
        [np.log(np.exp(scores[:, page : page + PAGE] - peak).sum(1)) + peak for page in pages], 1
    )


def exact(context: Context, chosen: Tensor) -> Partial:
    """Attention over the tokens of chosen pages, bool [kv_heads, pages], by the oracle."""
    tokens = context.keys.shape[1]
    shown = chosen.repeat_interleave(PAGE, 1)[:, :tokens].repeat_interleave(context.group, 0)
    arrays = [t.double().numpy() for t in (context.query, context.keys, context.values)]
    out, lse = attention_oracle(
        arrays[0][:, None], arrays[1], arrays[2], shown.numpy()[:, None], context.scale, None
    )
    return Partial(torch.from_numpy(out).float(), torch.from_numpy(lse).float())


def everything(context: Context) -> Tensor:
    heads, tokens, _ = context.keys.shape
    return torch.ones((heads, -(-tokens // PAGE)), dtype=torch.bool)
