"""Longest stored match of a token stream, down to single tokens.

Committed Segments form a tree: a child hangs at a position inside or at the end of its parent.
Children of one position are kept sorted by their tokens, so the child that shares the longest
prefix with a query is a neighbour of the query's place, whatever their number.

Invariant: a match is made of tokens that were compared, all the way from the first one. Digests
play no part.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from kvtier.tiering.chain import Tokens
from kvtier.tiering.segment import Segment, SegmentView

ROOT = 0
Key = bytes


def _key(tokens: Tokens) -> Key:
    """Bytes that sort like the tokens do."""
    return tokens.astype(">u4").tobytes()


def _shared(left: Tokens, right: Tokens) -> int:
    """Tokens that both begin with."""
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size


@dataclass(slots=True)
class _Children:
    """Segments that begin at one position, sorted by tokens."""

    keys: list[Key] = field(default_factory=list)
    by_key: dict[Key, Segment] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """How many children have each length in tokens."""


class PrefixIndex:
    """Committed Segments of one fingerprint and provenance."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], _Children] = {}
        self._attached: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return sum(len(each.keys) for each in self._children.values())

    @staticmethod
    def _place(parent: SegmentView | None) -> tuple[int, int]:
        return (ROOT, 0) if parent is None else (id(parent.segment), parent.limit)

    def add(self, segment: Segment) -> None:
        """Make a frozen Segment with tokens findable, below segment.parent."""
        assert segment.tokens is not None
        place = self._place(segment.parent)
        children = self._children.setdefault(place, _Children())
        key = _key(segment.tokens)
        assert key not in children.by_key, "the same tokens twice below one position"
        insort(children.keys, key)
        children.by_key[key] = segment
        length = len(segment.tokens)
        children.lengths[length] = children.lengths.get(length, 0) + 1
        if len(children.keys) == 1 and place[0] != ROOT:
            insort(self._attached.setdefault(place[0], []), place[1])

    def remove(self, segment: Segment) -> None:
        """Undo `add`. What hangs below the Segment stays, and can no longer be reached."""
        assert segment.tokens is not None
        place = self._place(segment.parent)
        children = self._children[place]
        key = _key(segment.tokens)
        del children.by_key[key]
        children.keys.pop(bisect_left(children.keys, key))
        length = len(segment.tokens)
        children.lengths[length] -= 1
        if not children.lengths[length]:
            del children.lengths[length]
        if not children.keys:
            del self._children[place]
            if place[0] != ROOT:
                self._attached[place[0]].remove(place[1])

    def find(self, parent: SegmentView | None, tokens: Tokens) -> Segment | None:
        """The Segment of exactly these tokens below this position."""
        children = self._children.get(self._place(parent))
        return children.by_key.get(_key(tokens)) if children else None

    def match(self, tokens: Tokens) -> list[SegmentView]:
        """Views that together hold the longest stored prefix of `tokens`, in order.

        A Segment marked as quarantined ends a match just before it.
        """
        best: list[SegmentView] = []
        best_end = 0
        stack: list[tuple[tuple[int, int], int, list[SegmentView]]] = [((ROOT, 0), 0, [])]
        seen: set[tuple[int, int]] = set()
        while stack:
            place, position, path = stack.pop()
            if place in seen:
                continue
            seen.add(place)
            if position > best_end:
                best, best_end = path, position
            rest = tokens[position:]
            for segment in self._candidates(place, rest):
                assert segment.tokens is not None
                shared = _shared(segment.tokens, rest)
                if segment.quarantined or not shared:
                    continue
                for limit in {shared, *self._inner(segment, shared)}:
                    view = SegmentView(segment, limit)
                    stack.append(((id(segment), limit), position + limit, [*path, view]))
        return best

    def _candidates(self, place: tuple[int, int], rest: Tokens) -> list[Segment]:
        """Children that may lead to the longest match: every one that `rest` begins with, and
        the neighbours of the place where `rest` would be sorted in."""
        children = self._children.get(place)
        if children is None or not len(rest):
            return []
        found: dict[int, Segment] = {}
        for length in children.lengths:
            if length <= len(rest):
                segment = children.by_key.get(_key(rest[:length]))
                if segment is not None:
                    found[id(segment)] = segment
        at = bisect_left(children.keys, _key(rest[: max(children.lengths)]))
        for neighbour in children.keys[max(at - 1, 0) : at + 1]:
            segment = children.by_key[neighbour]
            found[id(segment)] = segment
        return list(found.values())

    def _inner(self, segment: Segment, shared: int) -> list[int]:
        """Positions inside the first `shared` tokens of a Segment where children hang."""
        return [limit for limit in self._attached.get(id(segment), []) if limit <= shared]
