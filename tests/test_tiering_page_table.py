"""PageTable: columns and positions against a model that lists one token at a time."""

from dataclasses import dataclass

import numpy as np
import pytest

from kvtier.tiering.geometry import PAGE_TOKENS, pages_of
from kvtier.tiering.page_layout import Order
from kvtier.tiering.page_table import Columns, PageTable, columns_of
from kvtier.tiering.segment import Segment, SegmentView

HEADS = 2
Slot = tuple[int, int, int, int]
"""Segment's index, head, page, slot in the page."""


def segment_of(start: int, tokens: int, order: Order | None = None) -> Segment:
    segment = Segment(start=start, layers=1, token_count=tokens, filled=[tokens])
    segment.orders[0] = order
    return segment


def shuffled(random: np.random.RandomState, tokens: int) -> Order:
    return np.stack([random.permutation(tokens) for _ in range(HEADS)]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Stream:
    """(Segment, limit) pairs that follow each other."""

    views: list[tuple[Segment, int]]

    @classmethod
    def random(cls, random: np.random.RandomState, *, clustered: float) -> "Stream":
        views, start = [], 0
        for _ in range(random.randint(1, 5)):
            tokens = int(random.randint(1, 70))
            limit = tokens if random.rand() < 0.4 else int(random.randint(1, tokens + 1))
            order = shuffled(random, tokens) if random.rand() < clustered else None
            views.append((segment_of(start, tokens, order), limit))
            start += limit
        return cls(views)

    @property
    def end(self) -> int:
        return self.views[-1][0].start + self.views[-1][1]

    def expected(self, first: int, past: int) -> dict[Slot, int]:
        """The position of every slot that counts, by looking at each token."""
        found: dict[Slot, int] = {}
        for index, (segment, limit) in enumerate(self.views):
            order = segment.orders[0]
            for head in range(HEADS):
                for place in range(segment.token_count):
                    token = place if order is None else int(order[head, place])
                    position = segment.start + token
                    if token < limit and first <= position < past:
                        page, slot = divmod(place, PAGE_TOKENS)
                        found[index, head, page, slot] = position
        return found


def shown(columns: Columns, first: int, past: int) -> dict[Slot, int]:
    """The same, as Columns say it."""
    positions = columns.positions(0, HEADS, first, past)
    if positions is None:
        positions = (columns.start[:, None] + np.arange(PAGE_TOKENS))[None]
    found: dict[Slot, int] = {}
    for head in range(HEADS):
        rows = positions[head if len(positions) > 1 else 0]
        for column, (owner, page) in enumerate(
            zip(columns.owner.tolist(), columns.page.tolist(), strict=True)
        ):
            for slot, position in enumerate(rows[column].tolist()):
                if position >= 0:
                    assert (owner, head, page, slot) not in found
                    found[owner, head, page, slot] = position
    return found


@pytest.mark.parametrize("clustered", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(15))
def test_columns_show_each_token_once(seed: int, clustered: float) -> None:
    random = np.random.RandomState(seed)
    stream = Stream.random(random, clustered=clustered)
    columns = columns_of(stream.views, 0)
    everything = stream.expected(0, stream.end)
    assert shown(columns, 0, stream.end) == everything
    assert len(everything) == HEADS * stream.end
    for _ in range(8):
        first, past = sorted(random.randint(0, stream.end + 3, 2).tolist())
        expected = stream.expected(first, past)
        assert shown(columns, first, past) == expected
        between = columns.between(0, first, past)
        assert shown(between, first, past) == expected
        if not clustered and first < past:
            # In the order of positions, no column is left that holds nothing.
            left = zip(between.owner.tolist(), between.page.tolist(), strict=True)
            assert set(left) == {(owner, page) for owner, _, page, _ in expected}
        # A reader takes columns in groups.
        cut = int(random.randint(0, len(between) + 1))
        parts = shown(between.part(slice(0, cut)), first, past)
        parts |= shown(between.part(slice(cut, None)), first, past)
        assert parts == expected


def test_whole_pages_in_order_need_no_positions() -> None:
    views = [(segment_of(0, 512), 512), (segment_of(512, 64), 48)]
    columns = columns_of(views, 0)
    assert len(columns) == 32 + 3
    assert columns.positions(0, HEADS, 0, 560) is None
    assert columns.between(0, 0, 560) is columns
    assert columns.positions(0, HEADS, 1, 560) is not None
    assert columns.positions(0, HEADS, 0, 559) is not None
    assert columns_of([(segment_of(0, 512), 511)], 0).positions(0, HEADS, 0, 512) is not None


def test_no_views_are_no_columns() -> None:
    columns = columns_of([], 0)
    assert len(columns) == 0
    assert columns.positions(0, HEADS, 0, 0) is None
    assert len(PageTable().columns(0, (), [])) == 0


def test_one_row_of_positions_serves_all_heads_unless_one_is_clustered() -> None:
    random = np.random.RandomState(3)
    plain = columns_of([(segment_of(0, 20), 20)], 0).positions(0, HEADS, 0, 20)
    clustered = columns_of([(segment_of(0, 20, shuffled(random, 20)), 20)], 0)
    assert plain is not None
    assert plain.shape == (1, 2, 16)
    positions = clustered.positions(0, HEADS, 0, 20)
    assert positions is not None
    assert positions.shape == (HEADS, 2, 16)


@pytest.mark.parametrize("seed", range(6))
def test_order_that_becomes_known_after_the_columns(seed: int) -> None:
    """A Segment from the catalog is read after its columns are made; only then is its order
    known. Columns must not have assumed one."""
    random = np.random.RandomState(seed)
    stream = Stream.random(random, clustered=0.5)
    orders = [segment.orders[0] for segment, _ in stream.views]
    for number, (segment, _) in enumerate(stream.views):
        segment.catalog_id = number + 1
        segment.orders[0] = None
    columns = columns_of(stream.views, 0)
    first, past = sorted(random.randint(0, stream.end + 1, 2).tolist())
    between = columns.between(0, first, past)
    for (segment, _), order in zip(stream.views, orders, strict=True):
        segment.orders[0] = order
        segment.payload_checksums[0] = 1
    assert shown(columns, 0, stream.end) == stream.expected(0, stream.end)
    assert shown(between, first, past) == stream.expected(first, past)


def test_table_follows_views_and_tail() -> None:
    table = PageTable()
    first, second = segment_of(0, 40), segment_of(40, 16)
    views: tuple[SegmentView, ...] = (SegmentView(first, 40),)
    tail = Segment(start=40, layers=2, filled=[5, 0])
    assert shown(table.columns(0, views, [tail]), 0, 45) == Stream(
        [(first, 40), (segment_of(40, 5), 5)]
    ).expected(0, 45)
    tail.filled[0] = 17
    columns = table.columns(0, views, [tail])
    assert [each is tail for each in columns.segments] == [False, True]
    assert columns.owner.tolist() == [0, 0, 0, 1, 1]
    assert columns.count.tolist() == [16, 16, 8, 16, 1]
    assert columns.limit.tolist() == [40, 40, 40, 17, 17]
    # The views change: nothing of the old ones is kept.
    views = (SegmentView(first, 33), SegmentView(second, 16))
    columns = table.columns(0, views, [])
    assert columns.count.tolist() == [16, 16, 1, 16]
    assert columns.start.tolist() == [0, 16, 32, 40]
    views = (views[0], SegmentView(second, 3))
    assert table.columns(0, views, []).count.tolist() == [16, 16, 1, 3]
    assert len(table.columns(0, views[:1], [])) == 3


def test_layers_have_columns_of_their_own() -> None:
    random = np.random.RandomState(1)
    segment = Segment(start=0, layers=2, token_count=40, filled=[40, 40])
    segment.orders[1] = shuffled(random, 40)
    views, table = (SegmentView(segment, 10),), PageTable()
    assert len(table.columns(0, views, [])) == pages_of(10)
    assert len(table.columns(1, views, [])) == pages_of(40)
    assert len(table.columns(0, views, [])) == pages_of(10)
