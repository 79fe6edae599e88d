"""Ranges of a device that lie near each other become one read, where that is cheaper than two."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.io.device import Int64Array


@dataclass(frozen=True, slots=True)
class MergedRanges:
    """The reads to issue, and where in them each range that was asked for lies.

    offsets, lengths: int64 [reads], bytes of the device, in rising order.
    index: int64 [ranges], which read holds the range. start: int64 [ranges], bytes within it.
    """

    offsets: Int64Array
    lengths: Int64Array
    index: Int64Array
    start: Int64Array


def merge_ranges(
    offsets: Int64Array,
    lengths: Int64Array,
    gap_bytes: int,
    bytes_max: int,
    gaps_bytes_max: int | None = None,
) -> MergedRanges:
    """Join neighbours into one read where at most `gap_bytes` lie between them; 0 joins what
    touches. No read is longer than `bytes_max`, but one that a single range makes so.

    gaps_bytes_max: of all gaps together, the smallest are read along, up to so many bytes.
    offsets, lengths: int64 [ranges], in any order; ranges may overlap. Reads are as aligned as the
    ranges are. Raises ConfigError for a negative gap or length, or a bytes_max below 1.
    """
    if gap_bytes < 0 or bytes_max < 1:
        raise ConfigError(
            f"ranges are merged over a gap from 0 bytes on, into reads from 1 byte on: got "
            f"{gap_bytes} and {bytes_max}"
        )
    if not len(offsets):
        none = np.zeros(0, np.int64)
        return MergedRanges(none, none, none, none)
    if int(lengths.min()) < 0:
        raise ConfigError(f"a range has a negative length: {int(lengths.min())} bytes")
    order = np.argsort(offsets, kind="stable")
    begins = offsets[order]
    # A range may end behind the one that begins after it.
    ends = np.maximum.accumulate(begins + lengths[order])
    apart = _apart(begins[1:] - ends[:-1], gap_bytes, gaps_bytes_max)
    firsts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    firsts = _cut(begins, ends, firsts, bytes_max)
    lasts = np.concatenate([firsts[1:], [len(begins)]]) - 1
    # What was cut begins anew, so it does not reach back to a range that ended behind it.
    own_ends = np.maximum.reduceat(begins + lengths[order], firsts)
    index = np.empty(len(begins), np.int64)
    index[order] = np.repeat(np.arange(len(firsts)), lasts - firsts + 1)
    return MergedRanges(
        begins[firsts], own_ends - begins[firsts], index, offsets - begins[firsts][index]
    )


def _apart(gaps: Int64Array, gap_bytes: int, gaps_bytes_max: int | None) -> npt.NDArray[np.bool_]:
    """bool [gaps]: which of them are not read along."""
    apart = gaps > gap_bytes
    if gaps_bytes_max is None or not gap_bytes:
        return apart
    holes = ((gaps > 0) & ~apart).nonzero()[0]
    smallest_first = holes[gaps[holes].argsort(kind="stable")]
    fitting = np.searchsorted(gaps[smallest_first].cumsum(), gaps_bytes_max, "right")
    apart[smallest_first[fitting:]] = True
    return apart


def _cut(begins: Int64Array, ends: Int64Array, firsts: Int64Array, bytes_max: int) -> Int64Array:
    """Where reads begin, so that none is longer than bytes_max. Only groups that are too long are
    walked through, by one step for each read that comes of them."""
    pasts = np.concatenate([firsts[1:], [len(begins)]])
    too_long = ends[pasts - 1] - begins[firsts] > bytes_max
    if not too_long.any():
        return firsts
    cuts = []
    for first, past in zip(firsts[too_long].tolist(), pasts[too_long].tolist(), strict=True):
        at = first
        while at < past:
            limit = int(begins[at]) + bytes_max
            # The ends rise, so those that fit are a run; one range alone always goes.
            at = max(at + 1, int(np.searchsorted(ends[at:past], limit, "right")) + at)
            cuts.append(at)
    inside = np.array([cut for cut in cuts if cut < len(begins)], np.int64)
    return np.union1d(firsts, inside)
