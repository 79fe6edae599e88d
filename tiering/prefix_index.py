"""Longest stored match of a token stream, down to single tokens.

Committed Segments form a tree: a child hangs at a position inside or at the end of its parent.
Children of one position are kept sorted by their tokens, so the child that shares the longest
prefix with a query is a neighbour of the query's place, whatever their number. A path may also go
on from a child that shares less, where something hangs; those places are looked up by the tokens
that lead to them.

Invariant: a match is made of tokens that were compared, all the way from the first one. Digests
play no part.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from kvtier.tiering.chain import Tokens
from kvtier.tiering.geometry import SEGMENT_TOKENS
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
    stems: dict[Key, dict[int, Segment]] = field(default_factory=dict)
    """Children below which something hangs, by the tokens that lead there, then by id()."""
    stem_lengths: dict[int, int] = field(default_factory=dict)
    """How many stems have each length in tokens."""

    def add_stem(self, segment: Segment, limit: int) -> None:
        stem = self.stems.setdefault(_key(segment.named_tokens[:limit]), {})
        if not stem:
            self.stem_lengths[limit] = self.stem_lengths.get(limit, 0) + 1
        stem[id(segment)] = segment

    def remove_stem(self, segment: Segment, limit: int) -> None:
        key = _key(segment.named_tokens[:limit])
        del self.stems[key][id(segment)]
        if not self.stems[key]:
            del self.stems[key]
            self.stem_lengths[limit] -= 1
            if not self.stem_lengths[limit]:
                del self.stem_lengths[limit]


class PrefixIndex:
    """Committed Segments of one fingerprint and provenance."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], _Children] = {}
        self._attached: dict[int, list[int]] = {}
        """By id() of a Segment: its positions where children hang, sorted."""
        self._present: set[int] = set()
        """id() of every Segment that is in."""

    def __len__(self) -> int:
        return sum(len(each.keys) for each in self._children.values())

    @staticmethod
    def _place(parent: SegmentView | None) -> tuple[int, int]:
        return (ROOT, 0) if parent is None else (id(parent.segment), parent.limit)

    def add(self, segment: Segment) -> None:
        """Make a frozen Segment with tokens findable, below segment.parent."""
        parent = segment.parent
        place = self._place(parent)
        children = self._children.setdefault(place, _Children())
        key = _key(segment.named_tokens)
        assert key not in children.by_key, "the same tokens twice below one position"
        insort(children.keys, key)
        children.by_key[key] = segment
        self._present.add(id(segment))
        for limit in self._attached.get(id(segment), []):
            children.add_stem(segment, limit)
        if len(children.keys) == 1 and parent is not None:
            insort(self._attached.setdefault(place[0], []), place[1])
            if place[0] in self._present:
                self._siblings(parent.segment).add_stem(parent.segment, parent.limit)

    def remove(self, segment: Segment) -> None:
        """Undo `add`. What hangs below the Segment stays, and can no longer be reached."""
        parent = segment.parent
        place = self._place(parent)
        children = self._children[place]
        key = _key(segment.named_tokens)
        del children.by_key[key]
        children.keys.pop(bisect_left(children.keys, key))
        self._present.remove(id(segment))
        for limit in self._attached.get(id(segment), []):
            children.remove_stem(segment, limit)
        if not children.keys:
            del self._children[place]
            if parent is not None:
                self._attached[place[0]].remove(place[1])
                if not self._attached[place[0]]:
                    del self._attached[place[0]]
                if place[0] in self._present:
                    self._siblings(parent.segment).remove_stem(parent.segment, parent.limit)

    def _siblings(self, segment: Segment) -> _Children:
        """The children of one position that a Segment is among."""
        return self._children[self._place(segment.parent)]

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
                shared = _shared(segment.named_tokens, rest)
                for limit in {shared, *self._inner(segment, shared)} - {0}:
                    view = SegmentView(segment, limit)
                    stack.append(((id(segment), limit), position + limit, [*path, view]))
        return best

    def _candidates(self, place: tuple[int, int], rest: Tokens) -> list[Segment]:
        """Children that may lead to the longest match: every one below which something hangs
        that `rest` leads to, and the neighbours of the place where `rest` would be sorted in."""
        children = self._children.get(place)
        if children is None or not len(rest):
            return []
        found: dict[int, Segment] = {}
        for length in children.stem_lengths:
            if length <= len(rest):
                found.update(children.stems.get(_key(rest[:length]), {}))
        at = bisect_left(children.keys, _key(rest[:SEGMENT_TOKENS]))
        # A quarantined neighbour must not hide a sound one behind it.
        for side in (range(at - 1, -1, -1), range(at, len(children.keys))):
            for index in side:
                segment = children.by_key[children.keys[index]]
                if not segment.quarantined:
                    found[id(segment)] = segment
                    break
        return [segment for segment in found.values() if not segment.quarantined]

    def _inner(self, segment: Segment, shared: int) -> list[int]:
        """Positions inside the first `shared` tokens of a Segment where children hang."""
        return [limit for limit in self._attached.get(id(segment), []) if limit <= shared]
