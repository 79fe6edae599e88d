"""Rows of a batch: the padding and the Sequence of each, and the pass that is under way.

Invariants:
- Between passes all layers hold the same columns. A pass goes through the layers in order, its ids
  were announced before, and each layer's keys go to its attention before the next layer's arrive:
  a model that does otherwise would get other attention than it asked for, and is refused.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listing

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.tiering.adapters.sparse_mode import SparseMode
from kvtier.tiering.plan_runner import Compute
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
        self.announced = 0
        """Columns whose ids are known to be read in this pass, and all before."""
        self.compute: Compute | None = None
        """Has the model read tokens of one row; None: no model is known."""
        self.mode = SparseMode()
        """Which passes read everything, and which to a budget."""
        self.unattended: int | None = None
        """The layer whose new keys its attention has not asked for yet."""

    def require_between_passes(self) -> None:
        """Raises ConfigError when a forward pass failed midway and was not taken back."""
        ahead = self.columns[0] - min(self.columns)
        if ahead:
            raise ConfigError(
                f"the last forward pass failed before its end: take its {ahead} tokens back with "
                f"cache.crop({-ahead}), or make a new cache"
            )

    def announce(self, count: int) -> None:
        """The ids of the next `count` columns are known."""
        self.announced = self.columns[0] + count

    def advance(self, layer: int, count: int) -> int:
        """A layer takes `count` new columns; returns the column where they begin.

        Raises ConfigError and UnsupportedError for a model that breaks the invariants.
        """
        at = self.columns[layer]
        if layer == 0:
            self.require_between_passes()
        if self.unattended is not None:
            raise UnsupportedError(
                f"layer {self.unattended} did not attend with 'kvtier': the model computes its "
                "attention itself, or its attention was set to another after the store was opened"
            )
        if at + count != (self.announced if layer == 0 else self.columns[0]):
            raise ConfigError(
                f"layer {layer} brings columns {at} to {at + count} of tokens that the store was "
                "not shown: call the model that the store was opened for, while it is open, "
                "with input_ids"
            )
        self.columns[layer] = at + count
        self.unattended = layer
        return at

    def rewind(self, columns: int) -> None:
        """All layers hold this many columns now."""
        self.columns = [columns] * len(self.columns)
        self.announced = columns
        self.unattended = None

    def check_positions(self, positions: torch.Tensor | None, count: int) -> None:
        """Positions of the next `count` columns must count each row's tokens from 0: rotated
        otherwise, its keys are not those that another batch would restore. Raises ConfigError."""
        if positions is None:
            if any(self.pads):
                raise ConfigError(
                    "this cache has padded rows, but the model got no position_ids: pass "
                    "(attention_mask.cumsum(-1) - 1).clamp(min=0), of the new tokens"
                )
            return
        if not self.positions_fit(positions, self.columns[0], count):
            begin = [max(0, self.columns[0] - pad) for pad in self.pads]
            raise ConfigError(
                f"position_ids {list(positions.shape)} are not those of the next {count} tokens of "
                f"each row: from {begin} on, without gaps. A cache that was used for another "
                "prompt cannot take this one: make a new TieredCache. If it was not, pass "
                "attention_mask to generate, which else takes ids like its padding for padding"
            )

    def positions_fit(self, positions: torch.Tensor, first: int, count: int) -> bool:
        """Whether these are the positions of `count` columns from `first` on, in each row."""
        columns = np.arange(first, first + count)
        expected = columns[None] - np.array(self.pads)[:, None]
        given = positions.detach().cpu().numpy()
        if given.ndim < 2 or given.shape[-2] not in (1, len(expected)) or given.shape[-1] != count:
            return False
        return not bool(((given != expected) & (expected >= 0)).any())

    def hold(self, ids: Ids) -> bool:
        """Whether the columns that are held begin `ids` [rows, n], and leave some of them."""
        at = self.columns[0]
        return 0 < at < ids.shape[1] and all(
            np.array_equal(ids[row, pad:at], sequence.tokens[: max(0, at - pad)])
            for row, (pad, sequence) in enumerate(zip(self.pads, self.sequences, strict=True))
        )

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
    if isinstance(ids, Mapping):
        raise ConfigError(
            f"{what} must be integer ids [batch, tokens]: got {type(ids).__name__}, whose "
            "['input_ids'] may be what is meant"
        )
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
            raise UnsupportedError(f"row {row} is padded elsewhere than on its left")
    return pads
