"""Chained token digests: a position of a token stream as 16 bytes.

The digest at position n covers tokens [0, n) and nothing else, so cutting a stream into Segments
at other places renames nobody. A digest names; it never decides: tokens themselves are compared
on every hit (`prefix_index.py`).
"""

import hashlib

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.tiering.chain_hash import ChainHash

Tokens = npt.NDArray[np.uint32]

TOKEN_MAX = 2**32 - 2
"""Largest token id: ids are kept as uint32."""
CONTENT_TOKENS_MIN = 4
"""124 bits of digest."""


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


def content_tokens(content: bytes, count: int) -> Tokens:
    """uint32 [count]: ids that stand for input that is not text, such as an image.

    An engine puts them where its prompt has placeholders, so that equal placeholders of different
    content are different tokens to the store, and the text before them is still shared. They lie
    above every vocabulary (2**31 and more). Raises ConfigError below CONTENT_TOKENS_MIN: fewer
    ids could be the same for two contents by chance.
    """
    if count < CONTENT_TOKENS_MIN:
        raise ConfigError(
            f"content needs at least {CONTENT_TOKENS_MIN} token ids to be told apart: got {count}"
        )
    stream = hashlib.shake_128(content).digest(4 * count)
    ids = np.frombuffer(stream, "<u4") & np.uint32(0x7FFFFFFF) | np.uint32(0x80000000)
    found: Tokens = np.minimum(ids, np.uint32(TOKEN_MAX))
    return found


def chain_digest(tokens: Tokens) -> bytes:
    """Digest of the position after `tokens`, which are all tokens from the stream's start."""
    # Without a copy: of a long stream one is taken at every Segment.
    return ChainHash.at_start().then(np.ascontiguousarray(tokens, "<u4").data).digest
