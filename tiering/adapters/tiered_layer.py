"""One layer of a TieredCache: takes a model's keys and values, and attends for it."""

from functools import partial
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.tiering.adapters import attention
from kvtier.tiering.adapters.batch import Rows
from kvtier.tiering.adapters.restoring import mending


class TieredLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a TieredCache."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, rows: Rows, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.layer = layer
        self.window = rows.store.geometry.layers[layer].window
        self.is_sliding = self.window is not None
        self.is_initialized = True
        self._given: torch.Tensor | None = None
        """Values of the pass under way, until their attention is asked for."""

    @property
    def batch_size(self) -> int:
        return len(self.rows.sequences)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the store knows its shapes."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the KV of new columns; returns them, tagged with what attends to everything."""
        rows = self.rows
        if len(key_states) != len(rows.sequences):
            raise ConfigError(
                f"a batch of {len(key_states)} rows, but this cache was made for "
                f"{len(rows.sequences)}"
            )
        count = key_states.shape[2]
        is_sparse = rows.mode.is_sparse(rows.columns[self.layer], count)
        at = rows.advance(self.layer, count)
        for row, (pad, sequence) in enumerate(zip(rows.pads, rows.sequences, strict=True)):
            skip = min(max(pad - at, 0), count)
            if skip < count:
                if is_sparse and not self.layer:
                    rows.store.go_on_approximately(sequence, rows.mode.provenance)
                rows.store.append(
                    sequence, self.layer, key_states[row, :, skip:], value_states[row, :, skip:]
                )
        tagged = key_states.view_as(key_states)
        setattr(tagged, attention.TAG, self)
        self._given = value_states
        return tagged, value_states

    def require_window(self, window: int | None) -> None:
        if window != self.window:
            raise ConfigError(
                f"layer {self.layer} asks for a window of {window}, its geometry says {self.window}"
            )

    def attend(
        self,
        query: torch.Tensor,
        chunk: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        rows, (keys, values) = self.rows, chunk
        self._check_mask(attention_mask)
        given, self._given = self._given, None
        if values is not given:
            raise UnsupportedError(
                f"layer {self.layer} attends to other values than it gave to its cache"
            )
        rows.unattended = None
        batch, heads, count, _ = query.shape
        at = rows.columns[self.layer] - count
        budget = rows.mode.budget_of(self.layer, at, count)
        out = query.new_zeros(batch, count, heads, values.shape[3])
        for row, (pad, sequence) in enumerate(zip(rows.pads, rows.sequences, strict=True)):
            skip = min(max(pad - at, 0), count)
            if skip < count:
                ask = partial(
                    rows.store.attend,
                    sequence,
                    self.layer,
                    query[row, :, skip:],
                    keys=keys[row, :, skip:],
                    values=values[row, :, skip:],
                    scale=scale,
                    softcap=softcap,
                    budget=budget,
                )
                out[row, skip:] = mending(rows, sequence, ask).transpose(0, 1)
        return out

    def _check_mask(self, mask: torch.Tensor | None) -> None:
        """The mask of the first layer must be the padding that the cache was made with."""
        if self.layer:
            return
        rows = self.rows
        if mask is None:
            if any(rows.pads):
                raise ConfigError("this cache has padded rows, but the model got no attention_mask")
            return
        if mask.ndim != 2:
            raise UnsupportedError(
                f"a TieredCache takes a padding mask [batch, tokens]: got {list(mask.shape)}"
            )
        expected = torch.arange(mask.shape[1])[None] >= torch.tensor(rows.pads)[:, None]
        if mask.shape[1] != rows.columns[0] or bool((mask.bool() != expected).any()):
            raise ConfigError(
                "the attention_mask that the model got is not the one this cache was made with: "
                "pass the same to TieredCache and to the model"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Logical length in columns, whatever is in memory."""
        return self.rows.columns[self.layer]

    def get_max_length(self) -> int:
        return -1
