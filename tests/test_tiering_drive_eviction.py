"""The order in which Segments leave a full drive: a pure function, against its rules."""

import numpy as np
import pytest

from kvtier.tiering.drive_eviction import NO_PARENT, DriveUsage, least_recently_used

SEEDS = range(200)


def usage(
    parents: list[int],
    used_at: list[float],
    *,
    kept: tuple[int, ...] = (),
    lost: tuple[int, ...] = (),
    nbytes: int = 10,
) -> DriveUsage:
    places = np.arange(len(parents))
    return DriveUsage(
        np.array(parents, np.int64),
        np.full(len(parents), nbytes, np.int64),
        np.array(used_at, np.float64),
        np.isin(places, kept),
        np.isin(places, lost),
    )


def test_a_chain_is_eaten_from_its_end() -> None:
    """A029: all of a chain was used at one time; its head is of use without its end."""
    chain = usage([NO_PARENT, 0, 1], [5.0, 5.0, 5.0])
    assert least_recently_used(chain, 1) == [2]
    assert least_recently_used(chain, 11) == [2, 1]
    assert least_recently_used(chain, 10**9) == [2, 1, 0]
    assert least_recently_used(chain, 0) == []


def test_the_end_used_longest_ago_goes_first() -> None:
    tree = usage([NO_PARENT, 0, 0, NO_PARENT], [9.0, 3.0, 8.0, 4.0])
    assert least_recently_used(tree, 40) == [1, 3, 2, 0]


def test_what_is_kept_stays_with_all_before_it() -> None:
    chain = usage([NO_PARENT, 0, 1, 2, 0], [1.0, 1.0, 1.0, 1.0, 9.0], kept=(2,))
    assert least_recently_used(chain, 10**9) == [3, 4]


def test_what_is_lost_goes_before_all_others() -> None:
    tree = usage([NO_PARENT, 0, 1, 2, NO_PARENT], [1.0, 9.0, 9.0, 9.0, 0.5], kept=(1,), lost=(2, 3))
    assert least_recently_used(tree, 10**9) == [3, 2, 4]


@pytest.mark.parametrize("seed", SEEDS)
def test_rules_hold_in_random_forests(seed: int) -> None:
    """A029: no victim has a child that stays, nothing kept goes, and no more than is needed."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 60))
    parents = [int(random.integers(-1, max(index, 1))) if index else -1 for index in range(count)]
    kept = tuple(np.flatnonzero(random.random(count) < 0.2).tolist())
    nbytes = random.integers(1, 100, count)
    given = usage(parents, random.random(count).tolist(), kept=kept)
    given = DriveUsage(given.parents, nbytes, given.used_at, given.kept, given.lost)
    needed = int(random.integers(0, int(nbytes.sum()) + 50))
    victims = least_recently_used(given, needed)
    assert len(set(victims)) == len(victims)
    assert not set(victims) & set(kept)
    gone: set[int] = set()
    for index in victims:
        children = {child for child in range(count) if parents[child] == index}
        assert children <= gone, "a victim left a child behind"
        gone.add(index)
    freed = int(nbytes[victims].sum()) if victims else 0
    if freed < needed:
        ends = [
            index
            for index in set(range(count)) - gone
            if index not in kept and not {c for c in range(count) if parents[c] == index} - gone
        ]
        assert not ends, "more could have gone"
    elif victims:
        assert freed - int(nbytes[victims[-1]]) < needed, "one too many"
