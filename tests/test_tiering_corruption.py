"""Every bit and block of a filled region counts: a change is found by verify, and never served."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import FormatError, KvtierError
from kvtier.tiering.config import PlacementName
from kvtier.tiering.findings import DIGESTS, PADDING, RECORD
from kvtier.tiering.listing import describe
from kvtier.tiering.verifier import verify
from tests.corruption_cases import HOT, FilledStore
from tests.store_cases import PLAIN, open_store

pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE_EVERY = 100
"""After so many changes all is verified and all is resumed."""
MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def a_filled_store(placement: PlacementName) -> Iterator[FilledStore]:
    # Thousands of catalogs are copied and opened: in memory, that is a matter of seconds.
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as home:
        yield FilledStore(Path(home), placement)


@pytest.fixture(scope="module")
def full() -> Iterator[FilledStore]:
    with a_filled_store("position") as found:
        yield found


@pytest.fixture
def filled(full: FilledStore, monkeypatch: pytest.MonkeyPatch) -> FilledStore:
    full.attach(monkeypatch)
    return full


def change_one_place(filled: FilledStore, random: np.random.Generator) -> set[str]:
    """Change, look, change back. Returns the kinds of findings."""
    place, data = filled.change(random)
    filled.write(place.offset, data)
    try:
        found = filled.findings(place.owner)
        assert found, f"nobody noticed a change at byte {place.offset}"
        kinds = {each.kind for each in found}
        lost = filled.lost_with(place.owner)
        name = lost or next(iter(filled.saved))
        with filled.open() as store:
            length = filled.resumed(store, name)
            spared = lost is None or kinds <= {PADDING, DIGESTS}
            assert (length == len(filled.saved[name])) == spared
            assert store.stats().damaged_extents == (0 if spared else 1)
    finally:
        filled.restore(place)
    return kinds


def check_whole(filled: FilledStore, random: np.random.Generator) -> None:
    """The same with the whole store: only what was changed is lost."""
    place, data = filled.change(random)
    filled.write(place.offset, data)
    try:
        with filled.open() as store:
            lost = {
                name
                for name, tokens in filled.saved.items()
                if filled.resumed(store, name) < len(tokens)
            }
        assert lost <= {filled.lost_with(place.owner)}
        filled.write(place.offset, data)  # Opening repaired a superblock.
        assert not verify(filled.home / "copy").ok
    finally:
        filled.restore(place)


def change_many_places(filled: FilledStore, seed: int, changes: int) -> None:
    random = np.random.default_rng(seed)
    kinds: set[str] = set()
    for number in range(changes):
        if number % WHOLE_EVERY == WHOLE_EVERY - 1:
            check_whole(filled, random)
        else:
            kinds |= change_one_place(filled, random)
    assert kinds >= {"superblock", "header", "page", PADDING, RECORD}
    assert verify(filled.home / "pristine").ok, "everything was changed back"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_changed_bit_or_block_is_found_and_never_served(
    filled: FilledStore, seed: int
) -> None:
    change_many_places(filled, seed, 100)


def test_every_change_is_found_where_extents_have_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_filled_store("keys") as filled:
        filled.attach(monkeypatch)
        random, kinds = np.random.default_rng(4), set[str]()
        for _ in range(100):
            kinds |= change_one_place(filled, random)
        assert kinds >= {"header", "page", PADDING, DIGESTS}
        assert verify(filled.home / "pristine").ok, "everything was changed back"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13, 14])
def test_ten_thousand_changes(filled: FilledStore, seed: int) -> None:
    change_many_places(filled, seed, 2500)


def check_a_changed_catalog(filled: FilledStore, directory: Path) -> str:
    """Refused with a typed error, rows left out, or exact. Returns which."""
    for inspect in (describe, verify):
        with contextlib.suppress(KvtierError):
            inspect(directory)
    try:
        with open_store(directory, PLAIN, HOT) as store:
            lengths = [filled.resumed(store, name) for name in filled.saved]
    except KvtierError:
        return "refused"
    whole = lengths == [len(tokens) for tokens in filled.saved.values()]
    return "whole" if whole else "rows left out"


def change_catalogs(filled: FilledStore, seed: int, changes: int) -> set[str]:
    random = np.random.default_rng(seed)
    pristine = filled.home / "pristine"
    whole = np.frombuffer((pristine / "catalog.sqlite").read_bytes(), np.uint8)
    outcomes: set[str] = set()
    for _ in range(changes):
        directory = filled.home / "copy"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(pristine, directory)
        changed = whole.copy()
        changed[int(random.integers(len(whole)))] ^= 1 << int(random.integers(8))
        (directory / "catalog.sqlite").write_bytes(changed.tobytes())
        outcomes.add(check_a_changed_catalog(filled, directory))
    return outcomes


def test_a_changed_bit_of_the_catalog_never_gives_other_bytes(filled: FilledStore) -> None:
    assert len(change_catalogs(filled, 5, 50)) > 1


def test_a_schema_that_is_no_text_is_refused(filled: FilledStore) -> None:
    """SQLite quotes the schema in its message, which then is no text either."""
    directory = filled.home / "copy"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(filled.home / "pristine", directory)
    whole = (directory / "catalog.sqlite").read_bytes()
    assert b"CREATE INDEX segment_parent" in whole
    changed = whole.replace(b"CREATE INDEX segment_parent", b"CREATE IN\xacEX segment_parent")
    (directory / "catalog.sqlite").write_bytes(changed)
    assert check_a_changed_catalog(filled, directory) == "refused"
    with pytest.raises(FormatError, match="damaged"):
        describe(directory)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [21, 22])
def test_a_thousand_changed_bits_of_catalogs(filled: FilledStore, seed: int) -> None:
    assert change_catalogs(filled, seed, 500) == {"refused", "whole", "rows left out"}
