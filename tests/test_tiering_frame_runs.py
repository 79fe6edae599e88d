"""Free Frames as runs: none is handed out twice, and whole units get neighbours."""

import numpy as np
import pytest

from kvtier.tiering.frame_runs import FrameArray, FrameRuns, runs_of


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_random_walk_keeps_every_invariant(seed: int) -> None:
    random = np.random.default_rng(seed)
    runs, out = FrameRuns(300), []
    taken: FrameArray = np.zeros(0, np.int64)
    for _ in range(800):
        count = int(random.integers(0, 40))
        if random.random() < 0.5 and count <= 300 - len(taken):
            frames = runs.take(count)
            assert len(frames) == count
            assert (np.diff(frames) > 0).all()
            assert not np.intersect1d(frames, taken).size
            out.append(frames)
        elif out:
            frames = out.pop(int(random.integers(len(out))))
            # Some come back in pieces, and in any order.
            cut = int(random.integers(len(frames) + 1))
            runs.give(random.permutation(frames[:cut]))
            runs.give(random.permutation(frames[cut:]))
        taken = np.concatenate([np.zeros(0, np.int64), *out])
        runs.check(taken)


def test_units_that_come_and_go_stay_in_one_run() -> None:
    """Also while single Pages are taken between them."""
    random = np.random.default_rng(5)
    runs = FrameRuns(64 * 20)
    units = [runs.take(64) for _ in range(12)]
    pages = [runs.take(2) for _ in range(40)]
    for _ in range(200):
        runs.give(units.pop(int(random.integers(len(units)))))
        runs.give(pages.pop(0))
        pages.append(runs.take(2))
        units.append(runs.take(64))
    whole = [each for each in units if len(runs_of(each)) == 1]
    assert len(whole) >= 11


def test_memory_that_was_never_needed_comes_last() -> None:
    runs = FrameRuns(100)
    first = runs.take(10)
    runs.take(10)
    runs.give(first)
    assert runs.take(8).tolist() == list(range(8))
    assert runs.take(3).tolist() == [20, 21, 22]


def test_runs_of_frames() -> None:
    assert runs_of(np.array([7, 5, 6, 1, 9, 10])) == [(1, 1), (5, 3), (9, 2)]
    assert runs_of(np.arange(4, 9)) == [(4, 5)]
    assert runs_of(np.zeros(0, np.int64)) == []


def test_frames_of_several_units_are_one_run_where_there_is_one() -> None:
    runs = FrameRuns(100)
    assert runs.take_each([3, 4, 5]).tolist() == list(range(12))
    assert runs.take_each([]).tolist() == []


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_frames_of_several_units_are_what_each_would_get(seed: int) -> None:
    """Whole free runs go to whole units, and no new memory is used while there are any."""
    random = np.random.default_rng(seed)
    runs = FrameRuns(200)
    units = [runs.take(8) for _ in range(16)]
    for index in range(1, 16, 2):
        runs.give(units[index])
    counts = random.permutation([8, 8, 8, 5, 3]).tolist()
    frames = runs.take_each(counts)
    assert frames.max() < 128
    assert len(np.unique(frames)) == len(frames) == sum(counts)
    ends = np.cumsum(counts)
    parts = np.split(frames, ends[:-1])
    assert all(len(runs_of(part)) == 1 for part in parts)
    runs.check(np.concatenate([*units[::2], frames]))
