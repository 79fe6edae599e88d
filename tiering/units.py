"""Units as columns: what many of them have in common is worked out once, and no object is made for
each."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, overload

import numpy as np
import numpy.typing as npt

from kvtier.io.device import Int64Array
from kvtier.io.extent import Extent
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.residency import SlotArray
from kvtier.tiering.segment import Segment, SegmentView

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Units(Sequence[Unit]):
    """Units in an order. Their Segments keep slots and token counts as long as this is used.

    layers, slots, tokens: int64 [units]; tokens are those of the whole Segment.
    """

    segments: list[Segment]
    layers: SlotArray
    slots: SlotArray
    tokens: SlotArray
    sizes: Int64Array | None = None
    """[Sizes, units], once `ExtentIO.sizes` was asked."""

    @classmethod
    def of(cls, units: Iterable[Unit]) -> "Units":
        """The same units."""
        if isinstance(units, Units):
            return units
        units = list(units)
        return cls(
            [each.segment for each in units],
            np.array([each.layer for each in units], np.int64),
            np.array([each.segment.slot for each in units], np.int64),
            np.array([each.segment.token_count for each in units], np.int64),
        )

    @classmethod
    def by_layer(cls, views: Sequence[SegmentView], firsts: Sequence[int]) -> Self:
        """Of these views, layer by layer, what reaches beyond firsts[layer], a position."""
        segments = [view.segment for view in views]
        slots = np.array([each.slot for each in segments], np.int64)
        tokens = np.array([each.token_count for each in segments], np.int64)
        if not any(firsts):
            count = len(firsts)
            layers = np.arange(count).repeat(len(views))
            return cls(segments * count, layers, np.tile(slots, count), np.tile(tokens, count))
        ends = np.array([view.end for view in views], np.int64)
        layers, which = np.nonzero(ends > np.array(firsts, np.int64)[:, None])
        seen = [segments[each] for each in which.tolist()]
        return cls(seen, layers, slots[which], tokens[which])

    def __len__(self) -> int:
        return len(self.segments)

    def __iter__(self) -> Iterator[Unit]:
        return map(Unit, self.segments, self.layers.tolist())

    @overload
    def __getitem__(self, index: int) -> Unit: ...

    @overload
    def __getitem__(self, index: slice) -> "Units": ...

    def __getitem__(self, index: "int | slice") -> "Unit | Units":
        if isinstance(index, slice):
            return Units(
                *(self.segments[index], self.layers[index], self.slots[index], self.tokens[index]),
                None if self.sizes is None else self.sizes[:, index],
            )
        return Unit(self.segments[index], int(self.layers[index]))

    def those(self, chosen: Mask) -> "Units":
        """Those of them that are chosen."""
        if chosen.all():
            return self
        segments = [self.segments[each] for each in chosen.nonzero()[0].tolist()]
        return Units(
            *(segments, self.layers[chosen], self.slots[chosen], self.tokens[chosen]),
            None if self.sizes is None else self.sizes[:, chosen],
        )

    def extents(self) -> list[Extent | None]:
        """Where they lie; None: nowhere on the device."""
        layers = self.layers.tolist()
        return [
            segment.extents[layer] for segment, layer in zip(self.segments, layers, strict=True)
        ]
