"""Chained token digests: a position of a token stream as 16 bytes.

The digest at position n covers tokens [0, n) and nothing else, so cutting a stream into Segments
at other places renames nobody. A digest names; it never decides: tokens themselves are compared
on every hit (`prefix_index.py`).
"""

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.tiering.chain_hash import ChainHash

Tokens = npt.NDArray[np.uint32]

CHAIN_BYTES = 16
TOKEN_MAX = 2**32 - 2
"""Largest token id: ids are kept as uint32."""


def as_tokens(tokens: object) -> Tokens:
    """Token ids as a uint32 vector, from a list, a numpy array or a torch tensor of integers.

    Raises ConfigError for anything that is not a one-dimensional list of ids in 0..TOKEN_MAX.
    """
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        # Ragged lists, tensors of another device and the like.
        raise ConfigError(f"tokens must be a list of integer ids: {error}") from error
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"tokens must be a one-dimensional list of integer ids: got shape {array.shape} "
            f"of {array.dtype}"
        )
    if int(array.min()) < 0 or int(array.max()) > TOKEN_MAX:
        raise ConfigError(
            f"token ids must lie in 0..{TOKEN_MAX}: got {int(array.min())} to {int(array.max())}"
        )
    return array.astype("<u4")


def chain_digest(tokens: Tokens) -> bytes:
    """Digest of the position after `tokens`, which are all tokens from the stream's start."""
    return ChainHash.at_start().then(tokens.astype("<u4").tobytes()).digest
