"""The crash checker: many images of a crash, no violation; and it finds every sync that is missing.

See `crash_log.py` for what is recorded, `crash_images.py` for what a crash may leave,
`crash_scenarios.py` for what stores do, and `crash_checker.py` for what must hold afterwards.
"""

import multiprocessing
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from kvtier.io.drives import Drives
from kvtier.tiering.committer import Committer
from kvtier.tiering.started_writes import StartedWrites
from tests.crash_checker import Checker, checking
from tests.crash_explorer import Explorer, Plan, Verdict, explore
from tests.crash_images import Image, Media, images_at, keep_all, lose_all
from tests.crash_log import Event
from tests.crash_scenarios import SCENARIOS, record
from tests.crash_workload import STORE, TINY, Named, Recording, Snapshot
from tests.store_cases import KV

pytestmark = pytest.mark.usefixtures("one_thread")

FAST, FAST_IMAGES_MIN = Plan(8), 5_000
SLOW, SLOW_IMAGES_MIN = Plan(30), 100_000
ROUNDS_MAX = 12
TRIES = (2, 6, 20)
"""Images per position, from cheap to thorough, until a missing sync is found."""
NOT_OURS = {"SQLite's sync of journal"}
"""Used only while a catalog is made, before it has its name."""


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """One process per core. Spawned, because torch's threads do not survive a fork."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=context) as pool:
        yield pool


def explore_all(workers: ProcessPoolExecutor, seeds: range, plan: Plan) -> dict[str, Verdict]:
    """Every scenario under every seed, by scenario and seed."""
    jobs = {
        f"{scenario} {seed}": workers.submit(explore, scenario, seed, replace(plan, seed=seed))
        for seed, scenario in product(seeds, SCENARIOS)
    }
    return {name: job.result() for name, job in jobs.items()}


def explore_until(
    workers: ProcessPoolExecutor, first_seed: int, plan: Plan, images_min: int
) -> dict[str, Verdict]:
    """Every scenario under one more seed at a time, until there are so many images."""
    verdicts: dict[str, Verdict] = {}
    for seed in range(first_seed, first_seed + ROUNDS_MAX):
        verdicts |= explore_all(workers, range(seed, seed + 1), plan)
        if sum(each.images for each in verdicts.values()) >= images_min:
            break
    return verdicts


def check_verdicts(verdicts: dict[str, Verdict], images_min: int) -> None:
    print(f"{sum(each.images for each in verdicts.values())} images of {len(verdicts)} runs")
    violations = {name: each.violations for name, each in verdicts.items() if each.violations}
    assert violations == {}
    assert sum(each.images for each in verdicts.values()) >= images_min
    assert min(each.images for each in verdicts.values()) >= 20, "a scenario was hardly explored"


def test_no_crash_breaks_a_store(workers: ProcessPoolExecutor) -> None:
    """A063."""
    check_verdicts(explore_until(workers, 0, FAST, FAST_IMAGES_MIN), FAST_IMAGES_MIN)


@pytest.mark.slow
def test_no_crash_of_very_many_breaks_a_store(workers: ProcessPoolExecutor) -> None:
    check_verdicts(explore_until(workers, 100, SLOW, SLOW_IMAGES_MIN), SLOW_IMAGES_MIN)


# ---- the mutation: every sync is needed ---------------------------------------------------------


def sites_of(scenario: str, root: Path) -> set[str]:
    root.mkdir()
    return set(record(root, scenario, 0).sites) - NOT_OURS


def test_every_sync_that_is_missing_is_found(tmp_path: Path, workers: ProcessPoolExecutor) -> None:
    """Each place that asks for a flush, an fsync or a synchronous commit is left out in turn.
    A066."""
    sites = {scenario: sites_of(scenario, tmp_path / scenario) for scenario in SCENARIOS}
    missing = set().union(*sites.values())
    assert len(missing) > 8, "the sites were not recorded"
    for tries in TRIES:
        jobs = {}
        for site in sorted(missing):
            # The first scenario that has it: that of the making has what belongs to it.
            scenario = next(each for each in SCENARIOS if site in sites[each])
            plan = Plan(tries, again=False, violations_max=1)
            jobs[site] = workers.submit(explore, scenario, 0, plan, site)
        missing = {site for site, job in jobs.items() if not job.result().violations}
    assert missing == set(), "nothing breaks without them: they are not needed, or not checked"


def test_a_missing_wait_for_what_is_on_its_way_is_found(tmp_path: Path) -> None:
    """The catalog then names payloads that no flush covered."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Committer, "_finish", lambda self, sequence: None)
        patched.setattr(StartedWrites, "covers", lambda self, extent: False)
        recording = record(tmp_path, "behind", 0)
    with checking(tmp_path, recording) as checker:
        verdict = Explorer(recording, checker, Plan(4, again=False, violations_max=1)).run()
    assert verdict.violations


def test_a_flush_of_one_drive_alone_is_found(tmp_path: Path) -> None:
    """A store on two drives whose flush forgets the second one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Drives, "flush", lambda self: self.members[0].flush())
        recording = record(tmp_path, "spread", 0)
    with checking(tmp_path, recording) as checker:
        verdict = Explorer(recording, checker, Plan(4, again=False, violations_max=1)).run()
    assert verdict.violations


# ---- what is recorded is what happened ----------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_log_holds_every_byte(tmp_path: Path, scenario: str) -> None:
    """All events one after the other make the very files that the store left."""
    recording = record(tmp_path, scenario, 1)
    media = Media(recording.start)
    for event in recording.events:
        media.apply(event)
    image = media.draw(Random(0), lambda path: keep_all)
    found = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()}
    assert found == set(image.files)
    for name in found - {*recording.regions, f"{STORE}/lock"}:
        assert (tmp_path / name).read_bytes() == image.files[name], name
    for name, left in recording.left.items():
        assert image.files[name] == left
        assert left[:8] == b"KVTIERSB"


def test_a_crash_may_lose_keep_and_tear() -> None:
    """Of two writes, none, one and both; of a large one, some sectors; what is synced always."""
    media = Media()
    for event in (
        Event("make directory", "s"),
        Event("create", "s/a"),
        Event("write", "s/a", 0, data=b"first"),
        Event("sync", "s/a"),
        Event("sync directory", "s"),
        Event("sync directory", ""),
        Event("write", "s/a", 5, data=b"second"),
        Event("write", "s/a", 512, data=b"x" * 1024),
    ):
        media.apply(event)
    images = [image.files["s/a"] for image in images_at(media, Random(1), 200)]
    assert all(each.startswith(b"first") for each in images)
    assert {bytes(each[5:11]).strip(b"\0") for each in images} == {b"", b"second"}
    halves = {bytes(each[512:1536]).count(b"x") for each in images}
    assert halves == {0, 512, 1024}, "not torn"
    media.apply(Event("sync", "s/a"))
    assert media.is_settled


def test_names_are_durable_when_their_directory_is() -> None:
    media = Media(Image({"s/a": b"old"}, frozenset({"s"})))
    for event in (
        Event("create", "s/a.new"),
        Event("write", "s/a.new", 0, data=b"new"),
        Event("sync", "s/a.new"),
        Event("rename", "s/a.new", target="s/a"),
    ):
        media.apply(event)
    found = {image.files["s/a"].decode() for image in images_at(media, Random(2), 50)}
    assert found == {"old", "new"}
    media.apply(Event("sync directory", "s", target="s/b"))
    assert not media.is_settled, "a sync for another entry is none for this one"
    media.apply(Event("sync directory", "s"))
    assert media.draw(Random(0), lambda path: lose_all).files == {"s/a": b"new"}


def test_a_deleted_file_may_come_back_with_its_bytes() -> None:
    media = Media(Image({"s/a": b"old"}, frozenset({"s"})))
    media.apply(Event("delete", "s/a"))
    found = [set(image.files) for image in images_at(media, Random(3), 50)]
    assert set() in found
    assert {"s/a"} in found


# ---- every check can fail -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Image]:
    """A finished run of `share`, and what stands on the media then."""
    recording = record(tmp_path_factory.mktemp("saved"), "share", 0)
    media = Media(recording.start)
    for event in recording.events:
        media.apply(event)
    return recording, media.draw(Random(0), lambda path: keep_all)


Change = Callable[[Checker, Image, Snapshot], tuple[Image, Snapshot]]


def _with_sql(checker: Checker, image: Image, sql: str) -> Image:
    """The image with its catalog changed by a statement."""
    path = checker.lay(image) / "catalog.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(sql)
    connection.close()
    return replace(image, files={**image.files, f"{STORE}/{path.name}": path.read_bytes()})


def _as_it_is(checker: Checker, image: Image, last: Snapshot) -> tuple[Image, Snapshot]:
    return image, last


def _without_settings(checker: Checker, image: Image, last: Snapshot) -> tuple[Image, Snapshot]:
    files = {name: data for name, data in image.files.items() if "yaml" not in name}
    return replace(image, files=files), last


def _more_names(checker: Checker, image: Image, last: Snapshot) -> tuple[Image, Snapshot]:
    return image, replace(last, names={**last.names, "lost": Named((1, 2), 0.0)})


def _longer_list(checker: Checker, image: Image, last: Snapshot) -> tuple[Image, Snapshot]:
    return image, replace(last, lengths={**last.lengths, "a": last.lengths["a"] + 1})


def _other_weights(checker: Checker, image: Image, last: Snapshot) -> tuple[Image, Snapshot]:
    checker.kv = KV(TINY, salt=1)
    return image, last


def _flipped_payload(checker: Checker, image: Image, last: Snapshot) -> tuple[Image, Snapshot]:
    (name,) = checker.regions
    region = bytearray(image.files[name])
    region[region.index(b"KVTIEREX") + 4096] ^= 1
    return replace(image, files={**image.files, name: bytes(region)}), last


def _flipped_superblock(checker: Checker, image: Image, last: Snapshot) -> tuple[Image, Snapshot]:
    (name,) = checker.regions
    region = bytearray(image.files[name])
    region[100] ^= 1
    return replace(image, files={**image.files, name: bytes(region)}), last


def _stale_record(checker: Checker, image: Image, last: Snapshot) -> tuple[Image, Snapshot]:
    return _with_sql(checker, image, "UPDATE name SET token_count = token_count + 1"), last


def _row_without_erasing(checker: Checker, image: Image, last: Snapshot) -> tuple[Image, Snapshot]:
    sql = "DELETE FROM name WHERE name = 'again'"
    names = {name: each for name, each in last.names.items() if name != "again"}
    return _with_sql(checker, image, sql), replace(last, names=names)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_as_it_is, None),
        (_without_settings, "no store.yaml"),
        (_more_names, "name 'lost'"),
        (_longer_list, "list 'a' resumes"),
        (_other_weights, "have KV of others"),
        (_flipped_payload, "verify"),
        (_flipped_superblock, "superblock copy"),
        (_stale_record, "another token_count"),
        (_row_without_erasing, "what was removed still begins"),
    ],
)
def test_each_check_can_fail(
    tmp_path: Path, saved: tuple[Recording, Image], change: Change, what: str | None
) -> None:
    recording, image = saved
    with checking(tmp_path, recording) as checker:
        changed, expected = change(checker, image, recording.snapshots[-1])
        found = checker.violations(changed, expected, expected)
    if what is None:
        assert found == []
    else:
        assert any(what in each for each in found), found


def test_an_explorer_says_where(tmp_path: Path) -> None:
    """A store whose acknowledgements come too early is found, with position and step."""
    recording = record(tmp_path, "share", 0)
    early = [each for each in recording.events if each.kind != "end"]
    early.insert(early.index(Event("begin", offset=2)) + 1, Event("end", offset=2))
    hasty = replace(recording, events=early)
    with checking(tmp_path, hasty) as checker:
        verdict = Explorer(hasty, checker, Plan(2, violations_max=1)).run()
    assert "step 'save b as b'" in verdict.violations[0]
