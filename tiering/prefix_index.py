"""Longest stored match of a token stream, down to single tokens, and what is stored past holes.

Committed Segments form a tree: a child hangs at a position inside or at the end of its parent.
Children of one position are kept sorted by their tokens, so the child that shares the longest
prefix with a query is a neighbour of the query's place, whatever their number. A path may also go
on from a child that shares less, where something hangs; those places are looked up by the tokens
that lead to them.

Invariants:
- A match is made of tokens that were compared, all the way from the first one. Digests play no
  part.
- A lost Segment (damaged, unreadable, or on a drive that is not there) is in no match. Its tokens
  still lead to what hangs below it, which `walk` finds.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtier.tiering.chain import Tokens
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.segment import Segment, SegmentView
from kvtier.tiering.stored_ranges import sound, unbroken

ROOT = 0
Key = bytes
TOKEN_KEY_BYTES = 4
_Path: TypeAlias = "tuple[()] | tuple[SegmentView, _Path]"
"""Views that lead to a place, the last one first: to go on from it copies none of them."""


def _key(tokens: Tokens) -> Key:
    """Bytes that sort like the tokens do."""
    return tokens.astype(">u4").tobytes()


def _own_key(tokens: Tokens, provenance: Provenance) -> Key:
    """The place of a Segment among those of one position. Of the same tokens there may be an exact
    one and one that is not."""
    return _key(tokens) + (b"" if provenance == EXACT else b"~")


def _shared(left: Tokens, right: Tokens) -> int:
    """Tokens that both begin with."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    at = int(differs.argmax()) if size else 0
    return at if size and differs[at] else size


@dataclass(slots=True)
class _ByTokens:
    """Segments under some of their first tokens, for finding those that a stream leads to."""

    segments: dict[Key, dict[int, Segment]] = field(default_factory=dict)
    """By these tokens, then by id()."""
    lengths: dict[int, int] = field(default_factory=dict)
    """How many such keys have each length in tokens."""

    def add(self, segment: Segment, length: int) -> None:
        under = self.segments.setdefault(_key(segment.named_tokens[:length]), {})
        if not under:
            self.lengths[length] = self.lengths.get(length, 0) + 1
        under[id(segment)] = segment

    def remove(self, segment: Segment, length: int) -> None:
        key = _key(segment.named_tokens[:length])
        del self.segments[key][id(segment)]
        if not self.segments[key]:
            del self.segments[key]
            self.lengths[length] -= 1
            if not self.lengths[length]:
                del self.lengths[length]

    def leading(self, rest: Key) -> dict[int, Segment]:
        """Those whose tokens `rest` begins with."""
        found: dict[int, Segment] = {}
        for length in self.lengths:
            if length * TOKEN_KEY_BYTES <= len(rest):
                found.update(self.segments.get(rest[: length * TOKEN_KEY_BYTES], {}))
        return found


@dataclass(slots=True)
class _Children:
    """Segments that begin at one position; those that are not lost are sorted by tokens."""

    keys: list[Key] = field(default_factory=list)
    by_key: dict[Key, Segment] = field(default_factory=dict)
    stems: _ByTokens = field(default_factory=_ByTokens)
    """Children below which something hangs, by the tokens that lead there."""
    lost: _ByTokens = field(default_factory=_ByTokens)
    """Children that are lost, by all their tokens."""

    @property
    def segments(self) -> list[Segment]:
        lost = [each for under in self.lost.segments.values() for each in under.values()]
        return [*self.by_key.values(), *lost]

    def list(self, segment: Segment) -> None:
        key = _own_key(segment.named_tokens, segment.provenance)
        assert key not in self.by_key, "the same tokens twice below one position"
        insort(self.keys, key)
        self.by_key[key] = segment

    def unlist(self, segment: Segment) -> None:
        key = _own_key(segment.named_tokens, segment.provenance)
        del self.by_key[key]
        self.keys.pop(bisect_left(self.keys, key))

    def is_listed(self, segment: Segment) -> bool:
        return self.by_key.get(_own_key(segment.named_tokens, segment.provenance)) is segment

    def __bool__(self) -> bool:
        return bool(self.keys or self.lost.segments)


class PrefixIndex:
    """Committed Segments of one fingerprint and provenance, and the exact ones they continue."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], _Children] = {}
        self._attached: dict[int, list[int]] = {}
        """By id() of a Segment: its positions where children hang, sorted."""
        self._present: set[int] = set()
        """id() of every Segment that is in."""
        self._lost = 0
        """How many of them are lost."""

    def __len__(self) -> int:
        return sum(len(each.keys) for each in self._children.values())

    def __contains__(self, segment: Segment) -> bool:
        return id(segment) in self._present

    @staticmethod
    def _place(parent: SegmentView | None) -> tuple[int, int]:
        return (ROOT, 0) if parent is None else (id(parent.segment), parent.limit)

    # ---- what is in -------------------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """Make a frozen Segment with tokens findable, below segment.parent."""
        parent = segment.parent
        place = self._place(parent)
        children = self._children.setdefault(place, _Children())
        is_first = not children
        if segment.lost:
            self._add_lost(children, segment)
        else:
            children.list(segment)
        self._present.add(id(segment))
        for limit in self._attached.get(id(segment), []):
            children.stems.add(segment, limit)
        if is_first and parent is not None:
            insort(self._attached.setdefault(place[0], []), place[1])
            if place[0] in self._present:
                self._siblings(parent.segment).stems.add(parent.segment, parent.limit)

    def remove(self, segment: Segment) -> None:
        """Undo `add`. What hangs below the Segment stays, and can no longer be reached."""
        parent = segment.parent
        place = self._place(parent)
        children = self._children[place]
        if children.is_listed(segment):
            children.unlist(segment)
        else:
            children.lost.remove(segment, segment.token_count)
            self._lost -= 1
        self._present.remove(id(segment))
        for limit in self._attached.get(id(segment), []):
            children.stems.remove(segment, limit)
        if not children:
            del self._children[place]
            if parent is not None:
                self._attached[place[0]].remove(place[1])
                if not self._attached[place[0]]:
                    del self._attached[place[0]]
                if place[0] in self._present:
                    self._siblings(parent.segment).stems.remove(parent.segment, parent.limit)

    def lose(self, segment: Segment) -> None:
        """A Segment that is in is lost from now on, if it was not before."""
        children = self._siblings(segment)
        if children.is_listed(segment):
            children.unlist(segment)
            self._add_lost(children, segment)

    def _add_lost(self, children: _Children, segment: Segment) -> None:
        children.lost.add(segment, segment.token_count)
        self._lost += 1

    def replace(self, lost: Segment, segment: Segment) -> None:
        """Put a Segment of the same tokens in the place of a lost one: what hangs below that hangs
        below this from now on."""
        assert self._place(lost.parent) == self._place(segment.parent)
        limits = self._attached.pop(id(lost), [])
        siblings = self._siblings(lost)
        for limit in limits:
            siblings.stems.remove(lost, limit)
            children = self._children.pop((id(lost), limit))
            self._children[id(segment), limit] = children
            for child in children.segments:
                child.parent = SegmentView(segment, limit)
        # Before the last child of a position goes, another one must be there.
        if limits:
            self._attached[id(segment)] = limits
        self.add(segment)
        self.remove(lost)

    def _siblings(self, segment: Segment) -> _Children:
        """The children of one position that a Segment is among."""
        return self._children[self._place(segment.parent)]

    # ---- finding ----------------------------------------------------------------------------

    def find(
        self, parent: SegmentView | None, tokens: Tokens, provenance: Provenance = EXACT
    ) -> Segment | None:
        """The Segment of exactly these tokens and this provenance below this position."""
        children = self._children.get(self._place(parent))
        return children.by_key.get(_own_key(tokens, provenance)) if children else None

    def find_lost(
        self, parent: SegmentView | None, tokens: Tokens, provenance: Provenance = EXACT
    ) -> list[Segment]:
        """The lost Segments of exactly these tokens and this provenance below this position."""
        children = self._children.get(self._place(parent))
        found = children.lost.segments.get(_key(tokens), {}) if children else {}
        return [each for each in found.values() if each.provenance == provenance]

    def match(self, tokens: Tokens) -> list[SegmentView]:
        """Views that together hold the longest stored prefix of `tokens`, in order.

        A lost Segment ends a match just before it, unless what follows lies behind another one.
        """
        views = self._match(tokens)
        if self._lost:
            end = views[-1].end if views else 0
            views += unbroken(sound(self.walk(tokens), end), end)
        return views

    def _match(self, tokens: Tokens) -> list[SegmentView]:
        """Along the tree alone."""
        best: _Path = ()
        best_end = 0
        stack: list[tuple[tuple[int, int], int, _Path]] = [((ROOT, 0), 0, ())]
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
                if segment.lost:
                    continue
                shared = _shared(segment.named_tokens, rest)
                for limit in {shared, *self._inner(segment, shared)} - {0}:
                    view = SegmentView(segment, limit)
                    stack.append(((id(segment), limit), position + limit, (view, path)))
        found: list[SegmentView] = []
        while best:
            view, best = best
            found.append(view)
        return found[::-1]

    def walk(self, tokens: Tokens) -> list[SegmentView]:
        """Every Segment that `tokens` lead to, as far as it shares them, lost ones too: what is
        stored past holes. In the order of positions."""
        found: list[SegmentView] = []
        stack: list[tuple[tuple[int, int], int]] = [((ROOT, 0), 0)]
        seen: set[tuple[int, int]] = set()
        while stack:
            place, position = stack.pop()
            if place in seen:
                continue
            seen.add(place)
            rest = tokens[position:]
            for segment in self._candidates(place, rest):
                shared = _shared(segment.named_tokens, rest)
                if shared:
                    found.append(SegmentView(segment, shared))
                for limit in self._inner(segment, shared):
                    stack.append(((id(segment), limit), position + limit))
        found.sort(key=lambda view: (view.segment.start, -view.limit))
        return found

    def _candidates(self, place: tuple[int, int], rest: Tokens) -> list[Segment]:
        """Children that may lead to the longest match: every one below which something hangs
        that `rest` leads to, the neighbours of the place where `rest` would be sorted in, and the
        lost ones that `rest` begins with."""
        children = self._children.get(place)
        if children is None or not len(rest):
            return []
        key = _key(rest[:SEGMENT_TOKENS])
        found = children.stems.leading(key)
        found.update(children.lost.leading(key))
        same = children.by_key.get(key)
        if same is not None and not same.lost:
            # None shares more with it.
            found[id(same)] = same
            return list(found.values())
        at = bisect_left(children.keys, key)
        # A neighbour that was lost just now must not hide a sound one behind it.
        for side in (range(at - 1, -1, -1), range(at, len(children.keys))):
            for index in side:
                segment = children.by_key[children.keys[index]]
                if not segment.lost:
                    found[id(segment)] = segment
                    break
        return list(found.values())

    def _inner(self, segment: Segment, shared: int) -> list[int]:
        """Positions inside the first `shared` tokens of a Segment where children hang."""
        return [limit for limit in self._attached.get(id(segment), []) if limit <= shared]
