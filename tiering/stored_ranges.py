"""What of a token stream is stored past holes: pure functions over what the index leads to.

A hole is a range whose KV cannot be had (damaged, unreadable, on a drive that is not there) before
more that can. What lies behind it is whole, because its tokens were compared all the way; it is of
use as soon as the hole was computed anew.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvtier.tiering.segment import SegmentView

Range = tuple[int, int]
"""Positions [start, end)."""


def sound(walked: Iterable[SegmentView], first: int = 0) -> list[SegmentView]:
    """Those that can be handed out, from position `first` on, in the order of positions."""
    return [view for view in walked if not view.segment.lost and view.segment.start >= first]


def unbroken(views: Sequence[SegmentView], start: int) -> list[SegmentView]:
    """Views that follow each other from exactly `start` as far as possible.

    views: in the order of positions. A view is cut where the next one begins inside it.
    """
    chain: list[SegmentView] = []
    end = start
    at = bisect_left(views, start, key=_start)
    while True:
        best: SegmentView | None = None
        while chain and at < len(views) and _start(views[at]) <= _start(chain[-1]):
            at += 1
        for index in range(at, len(views)):
            view = views[index]
            if _start(view) > end:
                break
            # Of those that reach as far, the last one cuts least off what lies before it.
            if view.end > end and (best is None or view.end >= best.end):
                best = view
        if best is None:
            return chain
        if chain:
            last = chain.pop()
            chain.append(SegmentView(last.segment, min(last.limit, _start(best) - _start(last))))
        chain.append(best)
        end = best.end


def _start(view: SegmentView) -> int:
    return view.segment.start


def chains(walked: Sequence[SegmentView], matched: Sequence[SegmentView]) -> list[SegmentView]:
    """All that is stored: the match, and what can be attached behind holes, in order."""
    found = list(matched)
    end = matched[-1].end if matched else 0
    behind = sound(walked, end)
    for view in behind:
        if _start(view) >= end:
            found += unbroken(behind, _start(view))
            end = found[-1].end
    return found


def ranges(stored: Iterable[SegmentView]) -> list[Range]:
    """Of `chains`: those that touch as one."""
    found: list[Range] = []
    for view in stored:
        start = found.pop()[0] if found and found[-1][1] == _start(view) else _start(view)
        found.append((start, view.end))
    return found


def holes(walked: Sequence[SegmentView], stored: Sequence[Range]) -> list[Range]:
    """What lies before and between stored ranges, cut where it was cut when it was stored: a
    Segment computed anew can then take the place of the lost one."""
    cuts = {view.end for view in walked if is_whole_loss(view)}
    found: list[Range] = []
    at = 0
    for start, end in stored:
        inner = sorted(cut for cut in cuts if at < cut < start)
        edges = [at, *inner, start]
        found += [(low, high) for low, high in pairwise(edges) if low < high]
        at = end
    return found


def is_whole_loss(view: SegmentView) -> bool:
    """Whether all tokens of a lost Segment are among those that were walked."""
    return view.segment.lost and view.limit == view.segment.token_count
