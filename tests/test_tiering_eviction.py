"""Eviction: which Pages leave a tier, as a pure function."""

import numpy as np
import pytest

from kvtier.tiering.eviction import Usage, Victims, plan_eviction


def usage(used_at: list[int], unit_bytes: list[int] | int = 10, idle_before: int = 0) -> Usage:
    count = len(used_at)
    sizes = [unit_bytes] * count if isinstance(unit_bytes, int) else unit_bytes
    return Usage(
        layers=np.arange(count, dtype=np.int64) % 3,
        slots=np.arange(count, dtype=np.int64),
        unit_bytes=np.array(sizes, np.int64),
        used_at=np.array(used_at, np.int64),
        idle_before=idle_before,
    )


def slots(victims: Victims) -> list[int]:
    return [int(each) for each in victims.slots]


def test_idle_units_go_first_oldest_first_then_the_most_recent() -> None:
    given = usage([3, 9, 1, 7, 5, 2], idle_before=5)
    assert slots(plan_eviction(given, 60, idle_only=False)) == [2, 5, 0, 1, 3, 4]


def test_unit_used_at_the_border_is_not_idle() -> None:
    given = usage([5, 4], idle_before=5)
    assert slots(plan_eviction(given, 20, idle_only=True)) == [1]


@pytest.mark.parametrize(
    ("needed", "count"), [(-1, 0), (0, 0), (1, 1), (10, 1), (11, 2), (30, 3), (31, 3)]
)
def test_no_more_units_than_needed(needed: int, count: int) -> None:
    victims = plan_eviction(usage([1, 2, 3]), needed, idle_only=False)
    assert len(victims.slots) == len(victims.layers) == count
    assert victims.freed_bytes == 10 * count


def test_idle_only_leaves_units_in_use() -> None:
    victims = plan_eviction(usage([1, 9, 2, 8], idle_before=5), 100, idle_only=True)
    assert (slots(victims), victims.freed_bytes) == ([0, 2], 20)
    none = plan_eviction(usage([9, 8], idle_before=5), 1, idle_only=True)
    assert (slots(none), none.freed_bytes) == ([], 0)


def test_nothing_to_evict() -> None:
    victims = plan_eviction(usage([]), 10, idle_only=False)
    assert (slots(victims), victims.freed_bytes) == ([], 0)


@pytest.mark.parametrize("seed", range(20))
def test_against_one_victim_at_a_time(seed: int) -> None:
    random = np.random.RandomState(seed)
    count = int(random.randint(1, 40))
    used_at = random.permutation(100)[:count].tolist()
    sizes = random.randint(1, 50, count).tolist()
    idle_before, needed = int(random.randint(100)), int(random.randint(1, sum(sizes) + 20))
    idle_only = bool(random.randint(2))
    left, chosen, freed = list(range(count)), [], 0
    while freed < needed:
        idle = [each for each in left if used_at[each] < idle_before]
        if idle:
            victim = min(idle, key=lambda each: used_at[each])
        elif left and not idle_only:
            victim = max(left, key=lambda each: used_at[each])
        else:
            break
        left.remove(victim)
        chosen.append(victim)
        freed += sizes[victim]
    given = usage(used_at, sizes, idle_before)
    victims = plan_eviction(given, needed, idle_only=idle_only)
    assert (slots(victims), victims.freed_bytes) == (chosen, freed)
    assert [int(each) for each in victims.layers] == [each % 3 for each in chosen]


def test_plan_changes_nothing() -> None:
    given = usage([3, 1, 2], idle_before=2)
    before = given.used_at.copy(), given.unit_bytes.copy(), given.slots.copy()
    plan_eviction(given, 15, idle_only=False)
    assert (given.used_at == before[0]).all()
    assert (given.unit_bytes == before[1]).all()
    assert (given.slots == before[2]).all()
