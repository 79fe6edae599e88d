"""What loads tell of a drive: those that were waited for, and those that were there already."""

import time

import pytest

from kvtier.tiering.costs import CostMeter, DriveFlow
from kvtier.tiering.planner import LoadCost


def test_a_load_nobody_waited_for_tells_how_slow_the_drive_is_not() -> None:
    now = [0.0]
    meter = CostMeter(LoadCost(0.0, 1e9), lambda: now[0])
    meter.note_load_at_most(1000, 1e-9)
    meter.note_load_at_most(1 << 20, 1.0)
    assert meter.costs().is_stale, "too small, or too long ago, to tell"
    meter.note_load_at_most(1 << 20, (1 << 20) / 5e8)
    assert not meter.costs().is_stale
    assert meter.costs().load.bytes_per_s == 1e9, "it may have landed long before"
    now[0] = 100.0
    assert meter.costs().is_stale
    meter.note_load_at_most(1 << 20, (1 << 20) / 4e9)
    assert not meter.costs().is_stale
    assert meter.costs().load.bytes_per_s == pytest.approx(4e9)


def test_what_landed_unseen_counts_from_when_the_drive_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches that overlap share the time; what a batch took is not what it took to see it."""
    told: list[tuple[int, float]] = []
    at_most: list[tuple[int, float]] = []
    flow = DriveFlow()
    flow.tell = lambda nbytes, seconds: told.append((nbytes, seconds))
    flow.tell_at_most = lambda nbytes, seconds: at_most.append((nbytes, seconds))
    for began, now, waited in (
        *((10.0, 12.0, False), (10.5, 12.0, False), (11.0, 14.0, True), (13.0, 15.0, False)),
        *((20.0, 21.0, False), (19.0, 22.0, False)),
    ):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        flow.landed(1 << 20, began, waited=waited)
    mib = 1 << 20
    assert told == [(mib, 2.0)]
    assert at_most == [(mib, 2.0), (2 * mib, 2.0), (4 * mib, 5.0), (mib, 1.0), (2 * mib, 3.0)]
