"""One growing stream of tokens: the Segments it is made of, and its Tail.

Invariants:
- views are frozen Segments, or their beginnings, that follow each other without a gap; the Tail
  follows them. A Segment of the Tail belongs to this Sequence alone. They are one tuple, replaced
  as a whole: who keeps something made of them sees by its identity whether it still holds.
- Every Segment of the Tail but the last is full in each layer that has begun the next one.
- tokens are the ids that the caller has named so far, from position 0 on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.errors import ClosedError, ConfigError
from kvtier.tiering.chain import Tokens, as_tokens
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.page_table import PageTable
from kvtier.tiering.segment import Segment, SegmentView

if TYPE_CHECKING:
    from kvtier.tiering.sealing import Sealing


class Sequence:
    """Handle of one Sequence of a store. Made by Store.sequence, Store.resume and Store.fork."""

    def __init__(self, layers: int, provenance: Provenance = EXACT) -> None:
        self.layers = layers
        self.provenance = provenance
        self._views: tuple[SegmentView, ...] = ()
        self.sealing: Sealing | None = None
        """Of the last Segment it filled, until that may be committed. New views end it."""
        self.tail: list[Segment] = []
        self.table = PageTable()
        self.tokens: Tokens = np.zeros(0, np.uint32)
        self.reserved_bytes = 0
        """HOT bytes that the pass in progress will still need for this Tail."""
        self.all_hot_at: tuple[tuple[SegmentView, ...], int] | None = None
        """Its views, and HOT's count of drops, when HOT held all of them in all layers."""
        self.pass_goes_straight = False
        """HOT has no room for this pass: it is sealed at its end, from the model's tensors."""
        self.closed = False

    @property
    def views(self) -> tuple[SegmentView, ...]:
        return self._views

    @views.setter
    def views(self, views: Iterable[SegmentView]) -> None:
        self._views = tuple(views)
        self.sealing = None

    @property
    def placed_views(self) -> tuple[SegmentView, ...]:
        """The views whose tokens have found their places: all before what is being sealed."""
        sealing = self.sealing
        return self._views if sealing is None or sealing.done else sealing.before

    @property
    def unplaced(self) -> list[Segment]:
        """The Segments behind those: what is being sealed, and the Tail."""
        behind = self._views[len(self.placed_views) :]
        return [*(view.segment for view in behind), *self.tail] if behind else self.tail

    @property
    def sealed_tokens(self) -> int:
        """Tokens before the Tail."""
        return self.views[-1].end if self.views else 0

    def length(self, layer: int = 0) -> int:
        """Tokens whose KV this layer holds."""
        # A loop, not sum(): it is asked in every layer of every step.
        length = self.sealed_tokens
        for each in self.tail:
            length += each.filled[layer]
        return length

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 [layers]: tokens of each layer. They differ while a pass is under way."""
        counts = np.array([each.filled for each in self.tail], np.int64).reshape(-1, self.layers)
        lengths: npt.NDArray[np.int64] = counts.sum(axis=0) + self.sealed_tokens
        return lengths

    @property
    def between_passes(self) -> bool:
        """Every layer holds the same tokens."""
        # No arrays: it is asked in every layer of every step, mostly of one Segment.
        if len(self.tail) == 1:
            filled = self.tail[0].filled
            return filled.count(filled[0]) == len(filled)
        return len(set(map(sum, zip(*(each.filled for each in self.tail), strict=True)))) <= 1

    def require_between_passes(self) -> None:
        """Raises ConfigError while layers hold different numbers of tokens."""
        if not self.between_passes:
            raise ConfigError(
                "a sequence can be sealed, forked or saved only between passes: its layers hold "
                f"{sorted(set(self.lengths.tolist()))} tokens. Append to the rest, or crop"
            )

    def require_open(self) -> None:
        if self.closed:
            raise ClosedError("this Sequence was closed")

    def declare(self, tokens: object) -> None:
        """Name token ids from position 0 on, before or after their KV arrives.

        Raises ConfigError when they contradict ids that were named before.
        """
        named = as_tokens(tokens)
        known = min(len(named), len(self.tokens))
        differing = np.flatnonzero(named[:known] != self.tokens[:known])
        if len(differing):
            at = int(differing[0])
            raise ConfigError(
                f"tokens differ from those of this sequence, first at position {at}: "
                f"{int(named[at])} given, {int(self.tokens[at])} held"
            )
        if len(named) > len(self.tokens):
            self.tokens = named
