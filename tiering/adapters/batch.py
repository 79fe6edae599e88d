"""Rows of a batch: the padding and the Sequence of each."""

from collections.abc import Iterable
from collections.abc import Sequence as Listing

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import ConfigError
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store

Ids = npt.NDArray[np.int64]


class Rows:
    """The rows of a batch: padding and Sequence of each, and the columns that layers hold."""

    def __init__(self, store: Store, pads: list[int], sequences: list[Sequence]) -> None:
        self.store = store
        self.pads = pads
        self.sequences = sequences
        self.columns = [0] * len(store.geometry.layers)

    def rearrange(self, sources: Listing[int]) -> None:
        """Row i becomes what row sources[i] is now: the first use moves it, others fork it."""
        taken: set[int] = set()
        sequences = []
        for source in sources:
            sequence = self.sequences[source]
            sequences.append(self.store.fork(sequence) if source in taken else sequence)
            taken.add(source)
        for index, sequence in enumerate(self.sequences):
            if index not in taken:
                self.store.release(sequence)
        self.pads = [self.pads[source] for source in sources]
        self.sequences[:] = sequences


def shared_columns(pads: Iterable[int], found: Iterable[int], length: int) -> int:
    """Columns that every row has, leaving one for the model to compute."""
    columns = [pad + count for pad, count in zip(pads, found, strict=True)]
    return max(0, min(*columns, length - 1))


def as_batch(ids: torch.Tensor | Listing[int], what: str) -> Ids:
    """int64 [batch, tokens]. Raises ConfigError."""
    array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or array.dtype.kind not in "iu" or not array.size:
        raise ConfigError(
            f"{what} must be integer ids [batch, tokens]: got {list(array.shape)} of {array.dtype}"
        )
    return array.astype(np.int64)


def left_pads(ids: Ids, mask: torch.Tensor | None) -> list[int]:
    """Padding columns of each row."""
    if mask is None:
        return [0] * len(ids)
    shown = as_batch(mask.long(), "attention_mask").astype(bool)
    if shown.shape != ids.shape:
        raise ConfigError(
            f"attention_mask {list(shown.shape)} must have the shape of input_ids {list(ids.shape)}"
        )
    pads = [int(np.argmax(row)) if row.any() else len(row) for row in shown]
    for row, pad in enumerate(pads):
        if pad == ids.shape[1]:
            raise ConfigError(f"row {row} is padding alone")
        if not shown[row, pad:].all():
            raise NotImplementedError(f"row {row} is padded elsewhere than on its left")
    return pads
