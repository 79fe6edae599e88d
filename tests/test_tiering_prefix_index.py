"""PrefixIndex against brute force: the longest stored match, whatever hangs where."""

import numpy as np
import pytest

from kvtier.tiering import stored_ranges
from kvtier.tiering.chain import Tokens, as_tokens
from kvtier.tiering.prefix_index import PrefixIndex
from kvtier.tiering.segment import Segment, SegmentView

LENGTH_MAX = 9


def segment_of(tokens: object, parent: SegmentView | None = None) -> Segment:
    ids = as_tokens(tokens)
    return Segment(
        start=parent.end if parent else 0,
        layers=1,
        parent=parent,
        token_count=len(ids),
        filled=[len(ids)],
        tokens=ids,
    )


def tokens_of(segment: Segment) -> Tokens:
    assert segment.tokens is not None
    return segment.tokens


class Model:
    """Every Segment that is in, and the longest match by trying all paths."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.segments: list[Segment] = []

    def add(self, segment: Segment) -> None:
        self.index.add(segment)
        self.segments.append(segment)

    def remove(self, segment: Segment) -> None:
        self.index.remove(segment)
        self.segments.remove(segment)

    def stream_of(self, segment: Segment) -> list[int] | None:
        """All tokens from position 0 to the Segment's end; None if it cannot be reached."""
        if segment.quarantined or not any(segment is each for each in self.segments):
            return None
        own: list[int] = tokens_of(segment).tolist()
        if segment.parent is None:
            return own
        before = self.stream_of(segment.parent.segment)
        return None if before is None else before[: segment.parent.end] + own

    def longest(self, query: list[int]) -> int:
        best = 0
        for segment in self.segments:
            stream = self.stream_of(segment)
            if stream is not None:
                shared = 0
                while shared < min(len(stream), len(query)) and stream[shared] == query[shared]:
                    shared += 1
                best = max(best, shared)
        return best

    def check(self, query: list[int]) -> None:
        views = self.index.match(as_tokens(query))
        assert (views[-1].end if views else 0) == self.longest(query), (query, views)
        position = 0
        for place, view in enumerate(views):
            segment = view.segment
            assert not segment.quarantined
            assert segment.start == position
            assert 0 < view.limit <= segment.token_count
            parent = segment.parent
            if place == 0:
                assert parent is None
            else:
                assert parent is not None
                assert parent.segment is views[place - 1].segment
                assert parent.limit == views[place - 1].limit
            # What is handed out are the tokens that were asked for, none else.
            shown = tokens_of(segment)[: view.limit].tolist()
            assert shown == query[position : view.end]
            position = view.end

    def random_place(self, random: np.random.RandomState) -> SegmentView | None:
        if not self.segments or random.rand() < 0.3:
            return None
        segment = self.segments[random.randint(len(self.segments))]
        if random.rand() < 0.5:
            return SegmentView(segment, segment.token_count)
        return SegmentView(segment, int(random.randint(1, segment.token_count + 1)))

    def random_query(self, random: np.random.RandomState, alphabet: int) -> list[int]:
        """A stored stream, cut and followed by noise, or noise alone."""
        query: list[int] = []
        if self.segments and random.rand() < 0.8:
            query = self.stream_of(self.segments[random.randint(len(self.segments))]) or []
            query = query[: random.randint(len(query) + 1)]
        noise: list[int] = random.randint(0, alphabet, random.randint(0, 6)).tolist()
        return query + noise


@pytest.mark.parametrize("alphabet", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_match_is_the_longest(seed: int, alphabet: int) -> None:
    random = np.random.RandomState(seed * 10 + alphabet)
    model = Model()
    for step in range(90):
        act = random.rand()
        if act < 0.75 or not model.segments:
            place = model.random_place(random)
            tokens = random.randint(0, alphabet, random.randint(1, LENGTH_MAX + 1)).tolist()
            if model.index.find(place, as_tokens(tokens)) is None:
                model.add(segment_of(tokens, place))
        elif act < 0.93:
            model.remove(model.segments[random.randint(len(model.segments))])
        else:
            model.segments[random.randint(len(model.segments))].quarantined = True
        if step % 3 == 0:
            assert len(model.index) == len(model.segments)
            for _ in range(6):
                model.check(model.random_query(random, alphabet))


@pytest.mark.parametrize("seed", range(4))
def test_streams_that_resume_what_is_stored(seed: int) -> None:
    """As a store uses it: match a stream, attach the rest of it, and find all of it again."""
    random = np.random.RandomState(seed)
    model = Model()
    for _ in range(60):
        stream = random.randint(0, 2, random.randint(1, 40)).tolist()
        views = model.index.match(as_tokens(stream))
        # Not every Sequence asks first: some store a stream from its beginning.
        place = views[-1] if views and random.rand() < 0.7 else None
        while (at := place.end if place else 0) < len(stream):
            tokens = stream[at : at + LENGTH_MAX]
            segment = model.index.find(place, as_tokens(tokens))
            if segment is None:
                segment = segment_of(tokens, place)
                model.add(segment)
            place = SegmentView(segment, segment.token_count)
        views = model.index.match(as_tokens(stream))
        assert views[-1].end == len(stream)
        model.check(stream)
        model.check(model.random_query(random, 2))


def test_a_path_may_leave_a_segment_that_is_no_neighbour() -> None:
    """The child that shares most may end; the way on may begin inside one that shares less."""
    model = Model()
    other = segment_of([1, 2, 9, 9, 9])
    model.add(other)
    model.add(segment_of([5, 5, 5, 5], SegmentView(other, 2)))
    model.add(segment_of([1, 2, 5, 5, 6]))
    model.add(segment_of([1, 2, 5, 6]))
    query = [1, 2, 5, 5, 5, 5]
    views = model.index.match(as_tokens(query))
    assert [(view.segment.start, view.limit) for view in views] == [(0, 2), (2, 4)]
    model.check(query)


def test_quarantined_segment_does_not_hide_a_sound_one() -> None:
    model = Model()
    damaged = [segment_of([1, 2, 3, 4 + n]) for n in range(3)]
    for each in [segment_of([1, 2, 3, 0]), *damaged]:
        model.add(each)
    for each in damaged:
        each.quarantined = True
    assert model.index.match(as_tokens([1, 2, 3, 5]))[0].limit == 3
    model.check([1, 2, 3, 5])


def test_quarantined_segment_ends_a_match_before_it() -> None:
    index = PrefixIndex()
    first = segment_of([1, 2, 3])
    second = segment_of([4, 5], SegmentView(first, 3))
    third = segment_of([6], SegmentView(second, 2))
    for each in (first, second, third):
        index.add(each)
    query = as_tokens([1, 2, 3, 4, 5, 6, 7])
    assert [view.limit for view in index.match(query)] == [3, 2, 1]
    second.quarantined = True
    assert [view.limit for view in index.match(query)] == [3]
    first.quarantined = True
    assert index.match(query) == []


def test_removal_and_the_same_tokens_again() -> None:
    index = PrefixIndex()
    first = segment_of([1, 2])
    child = segment_of([3], SegmentView(first, 2))
    index.add(first)
    index.add(child)
    index.remove(first)
    assert index.match(as_tokens([1, 2, 3])) == []
    twin = segment_of([1, 2])
    index.add(twin)
    assert [view.segment for view in index.match(as_tokens([1, 2, 3]))] == [twin]
    index.remove(child)
    index.remove(twin)
    index.add(first)
    index.add(child)
    assert [view.segment for view in index.match(as_tokens([1, 2, 3]))] == [first, child]


def test_find_needs_the_exact_place_and_tokens() -> None:
    index = PrefixIndex()
    first = segment_of([1, 2, 3])
    child = segment_of([1, 2, 3], SegmentView(first, 2))
    index.add(first)
    index.add(child)
    assert index.find(None, as_tokens([1, 2, 3])) is first
    assert index.find(SegmentView(first, 2), as_tokens([1, 2, 3])) is child
    assert index.find(SegmentView(first, 3), as_tokens([1, 2, 3])) is None
    assert index.find(None, as_tokens([1, 2])) is None


def test_empty_index_and_empty_query() -> None:
    index = PrefixIndex()
    assert index.match(as_tokens([1])) == []
    index.add(segment_of([1]))
    assert index.match(as_tokens([])) == []


def test_ids_sort_by_value_and_not_by_their_bytes() -> None:
    model = Model()
    ids = [0, 1, 255, 256, 65535, 65536, 2**31, 2**32 - 2]
    for each in ids:
        model.add(segment_of([each, each]))
    for each in ids:
        model.check([each, each, 3])
        model.check([each, 7])


class Tree:
    """Segments in an index, some of them lost, and what a stream leads to by trying all."""

    def __init__(self, random: np.random.RandomState, alphabet: int) -> None:
        self.index = PrefixIndex()
        self.segments: list[Segment] = []
        self.random = random
        self.alphabet = alphabet

    def grow(self) -> None:
        random = self.random
        parent = None
        if self.segments and random.rand() < 0.8:
            above = self.segments[random.randint(len(self.segments))]
            parent = SegmentView(above, int(random.randint(1, above.token_count + 1)))
        count = random.randint(1, LENGTH_MAX + 1)
        tokens = random.randint(0, self.alphabet, count).tolist()
        if self.index.find(parent, as_tokens(tokens)) is None:
            self.segments.append(segment_of(tokens, parent))
            self.index.add(self.segments[-1])

    def lose(self) -> None:
        segment = self.segments[self.random.randint(len(self.segments))]
        segment.quarantined = True
        self.index.lose(segment)

    def replace(self) -> None:
        """Something lost is stored anew."""
        lost = [each for each in self.segments if each.lost]
        if not lost:
            return
        old = lost[self.random.randint(len(lost))]
        tokens = tokens_of(old)
        if self.index.find(old.parent, tokens) is not None:
            return
        assert old in self.index.find_lost(old.parent, tokens)
        new = segment_of(tokens, old.parent)
        self.index.replace(old, new)
        self.segments[self.segments.index(old)] = new

    def stream_of(self, segment: Segment) -> list[int]:
        own: list[int] = tokens_of(segment).tolist()
        if segment.parent is None:
            return own
        assert segment.parent.segment in self.segments, "what hung below a lost one hangs below"
        return self.stream_of(segment.parent.segment)[: segment.parent.end] + own

    def check(self, query: list[int]) -> None:
        walked = self.index.walk(as_tokens(query))
        expected = set()
        for segment in self.segments:
            stream = self.stream_of(segment)
            shared = 0
            while shared < min(len(stream), len(query)) and stream[shared] == query[shared]:
                shared += 1
            if shared > segment.start:
                expected.add((segment, shared))
        found = {(view.segment, view.end) for view in walked}
        assert found <= expected
        # What reaches no farther than another one that begins there and is sound may be left out.
        for segment, end in expected - found:
            assert end < segment.start + segment.token_count or not segment.lost
            assert segment.lost or any(
                view.segment.start == segment.start and view.end >= end and not view.segment.lost
                for view in walked
            ), (query, segment)
            assert not any(
                each.parent is not None
                and each.parent.segment is segment
                and each.parent.end <= end
                for each in self.segments
            ), "something hangs below it where the query leads"
        self.check_chain(walked, query)

    def check_chain(self, walked: list[SegmentView], query: list[int]) -> None:
        """What is stored is unbroken in itself, and none of it is lost."""
        position = 0
        for view in stored_ranges.chains(walked, self.index.match(as_tokens(query))):
            assert not view.segment.lost
            assert view.segment.start >= position
            assert (
                tokens_of(view.segment)[: view.limit].tolist()
                == (query[view.segment.start : view.end])
            )
            position = view.end


@pytest.mark.parametrize("alphabet", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_walk_goes_on_behind_what_is_lost(seed: int, alphabet: int) -> None:
    random = np.random.RandomState(1000 + seed * 10 + alphabet)
    tree = Tree(random, alphabet)
    for step in range(40):
        act = random.rand()
        if act < 0.7 or not tree.segments:
            tree.grow()
        elif act < 0.87:
            tree.lose()
        else:
            tree.replace()
        if step % 4 == 0 and tree.segments:
            for _ in range(5):
                query = tree.stream_of(tree.segments[random.randint(len(tree.segments))])
                noise = random.randint(0, alphabet, random.randint(0, 6)).tolist()
                tree.check(query[: random.randint(len(query) + 1)] + noise)


def test_a_lost_segment_that_was_never_listed_leads_on() -> None:
    """As from the catalog, or from a drive that is missing."""
    index = PrefixIndex()
    first = segment_of([1, 2, 3])
    first.unavailable = True
    child = segment_of([4], SegmentView(first, 3))
    index.add(first)
    index.add(child)
    query = as_tokens([1, 2, 3, 4])
    assert index.match(query) == []
    assert [view.segment for view in index.walk(query)] == [first, child]
    index.remove(child)
    index.remove(first)
    assert index.walk(query) == []
