"""What a store does while a crash may come: short runs, each about one thing.

Each is small, because every image of a crash is checked whole. Sizes and tokens are drawn from the
seed. To add one: a function here, and its name in SCENARIOS.

`python crash_scenarios.py` prints the steps of each, and the call sites that asked for a sync.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

sys.path.insert(0, os.fspath(Path(__file__).parent.parent))

from kvtier.tiering.extent_io import Unit
from kvtier.tiering.store import Store
from tests.crash_workload import Recording, Workload, recorded
from tests.store_cases import some_tokens

FREE_BYTES = 96 << 10
"""What ballast leaves of the region: room for a few Segments, so that saving evicts soon."""


def _lists(workload: Workload, random: Random, **shapes: tuple[str, int, int]) -> None:
    """Token lists by name: that whose beginning they share, how much of it, how many new ones."""
    for key, (base, shared, count) in shapes.items():
        start = workload.lists[base][:shared] if base else []
        workload.lists[key] = start + some_tokens(count, random.randrange(10**6))


def _make(workload: Workload) -> None:
    workload.step("make", workload.open)


def make(workload: Workload, random: Random) -> None:
    """A store is made, and used at once."""
    _lists(workload, random, a=("", 0, random.randint(1, 40)))
    _make(workload)
    workload.put("a", "a")


def make_on_drive(workload: Workload, random: Random) -> None:
    """A store is made whose region lies elsewhere, as on a device."""
    workload.use_drives()
    make(workload, random)


def spread(workload: Workload, random: Random) -> None:
    """A store on two drives, whose Segments lie on both; some go, and their space is used again."""
    workload.use_drives(2)
    _lists(
        workload,
        random,
        a=("", 0, random.randint(20, 60)),
        b=("a", 1000, random.randint(20, 60)),
        c=("", 0, random.randint(60, 120)),
    )
    _make(workload)
    workload.put("a", "a")
    workload.put("b", "b")
    workload.call("remove b", lambda store: store.remove("b"))
    workload.put("c", "c")
    workload.restart()
    workload.put("b", "b")
    segments = workload.store._registry.committed.values()
    assert {each.drive for segment in segments for each in segment.extents if each} == {0, 1}


def share(workload: Workload, random: Random) -> None:
    """Shared prefixes, a name that is replaced, tokens that are known already."""
    _lists(
        workload,
        random,
        a=("", 0, random.randint(60, 120)),
        b=("a", random.randint(20, 50), random.randint(20, 60)),
        c=("b", 1000, random.randint(1, 30)),
    )
    _make(workload)
    workload.put("a", "a")
    workload.put("b", "b", pieces=random.randint(9, 40))
    workload.put("again", "b")
    workload.put("a", "c")
    workload.put("c", "a")
    workload.restart()
    workload.put("c", "c")


def fork(workload: Workload, random: Random) -> None:
    """Two continuations of one Sequence, beyond a Tail that both share."""
    _lists(
        workload,
        random,
        a=("", 0, random.randint(20, 60)),
        left=("a", 1000, random.randint(75, 120)),
        right=("left", 0, 0),
    )
    workload.lists["right"] = workload.lists["left"][: len(workload.lists["a"]) + 70]
    workload.lists["right"] += some_tokens(random.randint(5, 60), random.randrange(10**6))
    _make(workload)
    workload.put("a", "a")
    workload.fork("a", ("left", "right"))


def stream(workload: Workload, random: Random) -> None:
    """Segments that are committed while their Sequence grows, and one that is never saved."""
    _lists(workload, random, a=("", 0, random.randint(514, 560)))
    _make(workload)
    workload.stream("a", random.randint(150, 400))
    workload.put("a", "a", pieces=random.randint(100, 600))


def behind(workload: Workload, random: Random) -> None:
    """Segments that are on their way to the drive while others are saved, dropped and named."""
    _lists(
        workload,
        random,
        a=("", 0, random.randint(1030, 1100)),
        b=("", 0, random.randint(513, 600)),
        c=("", 0, random.randint(20, 80)),
    )
    _make(workload)
    workload.behind("a", "b", "c")


def damage(workload: Workload, random: Random) -> None:
    """Bytes that change by themselves are quarantined, and their tokens stored anew."""
    _lists(
        workload,
        random,
        a=("", 0, random.randint(20, 60)),
        b=("a", 1000, random.randint(20, 60)),
    )
    _make(workload)
    workload.put("a", "a")
    workload.put("b", "b")
    workload.damage("b", random.randint(0, 1))
    workload.put("b", "b")
    workload.restart()
    workload.put("again", "b")


def repair(workload: Workload, random: Random) -> None:
    """A damaged copy of the superblock is written anew when the store is opened."""
    _lists(workload, random, a=("", 0, random.randint(20, 60)))
    _make(workload)
    workload.put("a", "a")
    workload.repair(random.randrange(3))
    workload.put("again", "a")


def by_keys(workload: Workload, random: Random) -> None:
    """Extents with digests behind their payloads: saved, removed, and their space used again."""
    _lists(
        workload,
        random,
        a=("", 0, random.randint(516, 560)),
        b=("a", 1000, random.randint(20, 60)),
        c=("", 0, random.randint(1, 40)),
    )
    workload.placement = "keys"
    _make(workload)
    workload.put("a", "a", pieces=random.randint(100, 600))
    workload.put("b", "b")
    workload.call("remove b", lambda store: store.remove("b"))
    workload.put("c", "c")
    workload.restart()
    workload.put("b", "b")
    extents = workload.store._extents
    for segment in workload.store._registry.committed.values():
        for layer, extent in enumerate(segment.extents):
            assert extent is not None
            assert extent.length > extents.shape(Unit(segment, layer)).digests_at


def remove(workload: Workload, random: Random) -> None:
    """Names are removed, with what only they needed, and the space is used again."""
    _lists(
        workload,
        random,
        a=("", 0, random.randint(40, 100)),
        b=("a", random.randint(10, 30), random.randint(20, 60)),
        c=("", 0, random.randint(60, 120)),
    )
    _make(workload)
    workload.put("a", "a")
    workload.put("b", "b")
    workload.call("remove a", lambda store: store.remove("a"))
    workload.put("c", "c")
    workload.call("remove b", lambda store: store.remove("b"))
    if random.random() < 0.5:
        workload.restart()
    workload.put("a", "a")
    workload.call("clear", lambda store: store.clear())
    assert workload.snapshots[-1].lengths == {"a": 0, "b": 0, "c": 0}


def hold(workload: Workload, random: Random) -> None:
    """Holds that are set, ended and saved with a name."""
    _lists(
        workload,
        random,
        a=("", 0, random.randint(10, 60)),
        b=("a", 1000, random.randint(10, 60)),
    )
    _make(workload)
    workload.put("a", "a", hold=True)
    workload.put("b", "b")
    workload.call("hold b", lambda store: store.hold("b", 3600))
    workload.call("let a go", lambda store: store.unhold("a"))
    workload.put("b", "a")
    workload.restart()
    workload.call("let all go", Store.unhold_all)
    assert not any(each.held for each in workload.snapshots[-1].names.values())


def evict(workload: Workload, random: Random) -> None:
    """A full region: what was used longest ago makes room, what is held stays."""
    _lists(
        workload,
        random,
        kept=("", 0, random.randint(20, 100)),
        **{f"n{i}": ("", 0, random.randint(60, 200)) for i in range(3)},
        long=("n0", 30, random.randint(200, 300)),
    )
    workload.free_bytes = FREE_BYTES
    workload.discard = random.random() < 0.5
    _make(workload)
    workload.put("kept", "kept", hold=True)
    for key in ("n0", "n1", "n2"):
        workload.put(key, key)
    workload.put("n0", "long")
    if random.random() < 0.5:
        workload.restart()
    workload.put("n1", "n1")
    seen = [each.lengths for each in workload.snapshots[1:]]
    assert seen[-1]["kept"] == len(workload.lists["kept"])
    fell = [key for old, new in pairwise(seen) for key in old if new[key] < old[key]]
    assert fell, "nothing was evicted"


Scenario = Callable[[Workload, Random], None]
SCENARIOS: dict[str, Scenario] = {
    each.__name__: each
    for each in [
        *(make, make_on_drive, spread, share, fork, stream, behind),
        *(damage, repair, by_keys, remove, hold, evict),
    ]
}


def record(root: Path, scenario: str, seed: int, removed: str | None = None) -> Recording:
    """Run a scenario below `root`, an empty directory. removed: a sync that is left out."""
    with recorded(root, removed) as workload:
        SCENARIOS[scenario](workload, Random(f"{scenario} {seed}"))
        return workload.recording()


if __name__ == "__main__":
    for name in SCENARIOS:
        with tempfile.TemporaryDirectory() as place:
            recording = record(Path(place), name, 0)
        print(f"{name}: {len(recording.events)} events, {', '.join(recording.steps)}")
        for site, count in sorted(recording.sites.items()):
            print(f"{count:6} {site}")
