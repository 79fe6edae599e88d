"""The oracle of the attention kernels: dense, float64, numpy; shares no code with any of them.

It is written to be read, not to be fast: one query head and one query at a time.
"""

import numpy as np
from numpy.typing import NDArray


def attention_oracle(
    query: NDArray[np.float64],
    keys: NDArray[np.float64],
    values: NDArray[np.float64],
    mask: NDArray[np.bool_],
    scale: float,
    softcap: float | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention of every query over the tokens that its mask shows, and its natural log-sum-exp.

    `query` [q_heads, n, Dk], `keys` [kv_heads, tokens, Dk], `values` [kv_heads, tokens, Dv];
    `mask` broadcastable to [q_heads, n, tokens], True where visible. Query head h reads kv head
    h // (q_heads / kv_heads). Returns out [q_heads, n, Dv] and lse [q_heads, n]; where nothing is
    visible they are 0 and -inf. Hidden tokens are never read.
    """
    q_heads, n, _ = query.shape
    kv_heads, tokens, value_width = values.shape
    shown = np.broadcast_to(mask, (q_heads, n, tokens))
    out = np.zeros((q_heads, n, value_width))
    lse = np.full((q_heads, n), -np.inf)
    for head in range(q_heads):
        kv_head = head * kv_heads // q_heads
        for index in range(n):
            seen = shown[head, index]
            if not seen.any():
                continue
            score = keys[kv_head][seen] @ query[head, index] * scale
            if softcap is not None:
                score = softcap * np.tanh(score / softcap)
            weight = np.exp(score - score.max())
            out[head, index] = weight @ values[kv_head][seen] / weight.sum()
            lse[head, index] = score.max() + np.log(weight.sum())
    return out, lse
