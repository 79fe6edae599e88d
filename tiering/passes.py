"""Where one pass over the layers ends and the next begins, told from the order of appends.

What was not used in the last whole pass is idle (residency.py). So Sequences that go through the
layers at the same time are in one pass: the rows of a batch, and what several threads compute. Were
each of them a pass, what one uses all the time would be idle as soon as two others had begun.
"""

from weakref import WeakSet, ref

from kvtier.tiering.residency import Residency
from kvtier.tiering.sequence import Sequence


class Passes:
    """Callers hold the store's lock."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._first: ref[Sequence] | None = None
        """The Sequence with which the pass began."""
        self._joined: WeakSet[Sequence] = WeakSet()
        """That, and those that came while it was on its way through the layers."""
        self.last_layer = 0
        """Of the last append, whoever made it."""

    def begin(self, sequence: Sequence, layer: int) -> None:
        """A Sequence whose layers hold the same tokens is about to get more of them, first in
        this one."""
        if layer < self.last_layer and (sequence in self._joined or self._first_is_through()):
            self._residency.begin_pass()
            self._first = ref(sequence)
            self._joined.clear()
        self._joined.add(sequence)

    def _first_is_through(self) -> bool:
        first = None if self._first is None else self._first()
        return first is None or first.closed or first.between_passes
