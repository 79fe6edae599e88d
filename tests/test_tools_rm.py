"""The command kvtier rm: what goes, what stays because others need it, and what is asked first."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tiering.maintenance import maintained
from kvtier.tiering.opening import open_files
from kvtier.tiering.verifier import verify
from tests.command_cases import (
    ANSWER_S_MAX,
    answered,
    as_json,
    at_a_terminal,
    heavy_modules,
    kvtier,
    processor_s,
    refused,
)
from tests.store_cases import KV, PLAIN, check_everywhere, open_store, put, some_tokens

A, B = some_tokens(700, 1), some_tokens(900, 2)
A_AND_MORE = A[:512] + some_tokens(300, 3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store: "a" and "more" share a Segment, "b" is alone; another model has an "a"."""
    path = tmp_path_factory.mktemp("made") / "store"
    with open_store(path, config=Config("4MiB", hot="4MiB")) as store:
        for name, tokens in (("a", A), ("more", A_AND_MORE), ("b", B)):
            put(store, KV(PLAIN), name, tokens)
    with open_store(path, model="other") as store:
        put(store, KV(PLAIN, 1), "a", A)
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "store")


def names(path: Path) -> list[str]:
    return [each.name for each in describe(path).names]


def is_found(path: Path, tokens: list[int], model: str = "m") -> bool:
    with open_store(path, model=model) as store:
        return store.lookup(tokens) == len(tokens)


def test_a_name_and_its_bytes(store: Path) -> None:
    before = describe(store)
    done = kvtier("rm", store, "b")
    assert done.stdout.splitlines()[0] == "removed b"
    assert "2 segments removed, " in done.stdout
    assert "b" not in names(store)
    after = describe(store)
    assert len(before.segments) - len(after.segments) == 2
    assert before.used_bytes - after.used_bytes > 900 * PLAIN.token_bytes
    assert not is_found(store, B[:1])
    assert verify(store).findings == []
    found = as_json("rm", store, "more")
    assert found["names"] == ["more"]
    assert found["segments"] == 1
    assert found["freed_bytes"] == after.used_bytes - describe(store).used_bytes


def test_what_others_need_stays(store: Path) -> None:
    kvtier("rm", store, "more")
    with open_store(store) as opened:
        sequence = opened.resume(A)
        check_everywhere(opened, KV(PLAIN), sequence, A)
        assert opened.lookup(A_AND_MORE) == 512


def test_several_names_go_together(store: Path) -> None:
    assert as_json("rm", store, "b", "more", "b")["names"] == ["b", "more"]
    assert names(store) == ["a", "a"]


def test_all_or_none_of_several_names(store: Path) -> None:
    before = names(store)
    assert "no name 'absent'" in refused("rm", store, "b", "absent")
    assert names(store) == before


def test_a_name_of_several_models_needs_a_fingerprint(store: Path) -> None:
    hexes = {each.description["model"]: each.hex for each in describe(store).fingerprints}
    message = refused("rm", store, "a")
    assert "2 models have the name 'a'" in message
    assert all(each[:12] in message for each in hexes.values())
    assert "no name 'a' of a fingerprint zz" in refused("rm", store, "a", "--fingerprint", "zz")
    kvtier("rm", store, "a", "--fingerprint", hexes["other"][:8].upper())
    assert is_found(store, A)
    assert not is_found(store, A[:1], "other")


def test_everything_must_be_confirmed(store: Path) -> None:
    before = names(store)
    assert "(4 names, 7 segments, 0 slabs of blobs)" in refused("rm", store, "--all")
    assert "nothing was removed" in answered("y", "rm", store, "--all", code=2).stderr
    assert names(store) == before
    done = at_a_terminal("yes", "rm", store, "--all")
    assert "Remove everything from " in done.stderr
    assert "7 segments removed" in done.stdout
    assert (describe(store).names, describe(store).segments) == ([], [])
    assert as_json("rm", store, "--all", "--yes")["segments"] == 0


def test_damaged_segments_and_what_hangs_below_them(store: Path) -> None:
    found = as_json("rm", store, "--damaged")
    assert (found["names"], found["segments"], found["freed_bytes"]) == ([], 0, 0)
    region = store / "region.kv"
    first = describe(store).segments[0]
    with closing(open_files(store, Config())) as files:
        extent = files.inventory.entries[first.id].extents[1]
    with region.open("r+b") as file:
        file.seek(extent.offset + extent.length // 2)
        file.write(b"\xa5" * 64)
    kvtier("scrub", store, code=1)
    everything = shutil.copytree(store, store.with_name("everything"))
    out = kvtier("rm", everything, "--all", "--yes").stdout
    assert "7 segments removed" in out, "what is damaged goes too"
    assert (describe(everything).names, describe(everything).segments) == ([], [])
    found = as_json("rm", store, "--damaged")
    # The first Segment is what "a" and "more" begin with.
    assert found["names"] == ["a", "more"]
    assert found["segments"] == 3
    assert found["freed_bytes"] > (700 + 300) * PLAIN.token_bytes
    assert is_found(store, B)
    assert is_found(store, A, "other")
    assert verify(store).findings == []


def test_a_row_that_cannot_be_true_goes_as_damaged(store: Path) -> None:
    with closing(sqlite3.connect(store / "catalog.sqlite")) as database, database:
        database.execute("UPDATE segment SET tokens = zeroblob(length(tokens)) WHERE id = 4")
    with maintained(store) as files:
        assert [each.id for each in files.inventory.entries.values() if not each.sound] == [4, 5]
    found = as_json("rm", store, "--damaged")
    assert found["names"] == ["b"]
    assert found["segments"] == 2
    assert verify(store).findings == []


def test_blobs_go_with_everything(store: Path) -> None:
    with open_store(store) as opened:
        opened.put_blob("key", b"some bytes" * 1000)
    done = kvtier("rm", store, "--all", "--yes")
    assert "7 segments and 1 slab of blobs removed" in done.stdout
    with open_store(store) as opened:
        assert opened.get_blob("key") is None
    assert verify(store).findings == []


@pytest.mark.parametrize(
    "options", [[], ["--all", "--damaged"], ["b", "--all"], ["--all", "--fingerprint", "00"]]
)
def test_one_thing_at_a_time(options: list[str], store: Path) -> None:
    before = names(store)
    refused("rm", store, *options, "--yes")
    assert names(store) == before


def test_a_store_that_is_open_or_absent(store: Path, tmp_path: Path) -> None:
    with open_store(store):
        assert "open for writing in this process" in refused("rm", store, "b")
    assert "not a kvtier store" in refused("rm", tmp_path / "absent", "b")
    assert not (tmp_path / "absent").exists()


def test_it_answers_at_once(store: Path) -> None:
    assert heavy_modules("rm", store, "--damaged") == "[]"
    assert processor_s("rm", store, "--damaged", runs=2) <= ANSWER_S_MAX
