"""What a newcomer reads: damage in a listing, remedies in messages, one and several in words."""

import errno
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import kvtier as front
from kvtier.errors import ConfigError, DeviceError, FormatError
from kvtier.io.region_place import RegionPlace
from kvtier.tiering import store_files
from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tools.text_table import counted
from tests.command_cases import as_json, kvtier, refused
from tests.store_cases import KV, PLAIN, open_store, put, some_tokens

A, B = some_tokens(700, 1), some_tokens(300, 2)
A_AND_MORE = A[:512] + some_tokens(100, 3)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A closed store: "a" and "more" begin with the same Segment, "b" is alone."""
    path = tmp_path / "store"
    with open_store(path, config=Config("4MiB", hot="4MiB")) as store:
        for name, tokens in (("a", A), ("more", A_AND_MORE), ("b", B)):
            put(store, KV(PLAIN), name, tokens)
        store.put_blob("key", b"some bytes")
    return path


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path / "catalog.sqlite")) as database, database:
        database.execute(statement)


def state_of(path: Path) -> dict[str, bool]:
    return {each["name"]: each["damaged"] for each in as_json("ls", path)["names"]}


def test_ls_marks_the_names_that_are_damaged(store: Path) -> None:
    assert state_of(store) == {"a": False, "b": False, "more": False}
    assert "damaged" not in kvtier("ls", store).stdout
    kvtier("hold", store, "more")
    change(store, "UPDATE segment SET quarantined = 1 WHERE start_position = 512 AND id = 2")
    assert state_of(store) == {"a": True, "b": False, "more": False}
    change(store, "UPDATE segment SET quarantined = (id = 1)")
    assert state_of(store) == {"a": True, "b": False, "more": True}
    (line,) = [each for each in kvtier("ls", store).stdout.splitlines() if "more" in each]
    assert "damaged, held" in line


def test_ls_counts_the_slabs_that_are_out_of_use(store: Path) -> None:
    out = kvtier("ls", store).stdout
    assert "1 blob of 10 B in 1 slab of " in out
    assert "quarantined" not in out
    assert as_json("ls", store)["blobs"]["quarantined_slabs"] == 0
    change(store, "UPDATE slab SET quarantined = 1")
    assert as_json("ls", store)["blobs"]["quarantined_slabs"] == 1
    assert " (1 slab quarantined)\n" in kvtier("ls", store).stdout


def test_ls_names_the_version_of_the_catalog(store: Path) -> None:
    found = as_json("ls", store)
    assert found["catalog_version"] == 2
    assert "format_version" not in found
    assert kvtier("ls", store).stdout.startswith(f"store {found['uuid']}, catalog version 2\n")


def test_verify_says_what_to_do(store: Path) -> None:
    assert "scrub" not in kvtier("verify", store).stdout
    change(store, "UPDATE segment SET quarantined = 1 WHERE id = 2")
    last = kvtier("verify", store, code=1).stdout.splitlines()[-1]
    assert "kvtier scrub" in last
    assert "kvtier rm --damaged" in last
    change(store, "UPDATE segment SET quarantined = 0")
    (store / "region.kv").unlink()
    assert "scrub" not in kvtier("verify", store, code=1).stdout, "it has nothing to read"


def test_rm_says_what_was_held_and_when_there_was_nothing_to_do(store: Path) -> None:
    assert (
        kvtier("rm", store, "--damaged").stdout
        == "nothing is known to be damaged: kvtier scrub finds damage\n"
    )
    kvtier("hold", store, "a")
    kvtier("hold", store, "b", "--for", "7d")
    lines = kvtier("rm", store, "b", "more").stdout.splitlines()
    assert lines[:2] == ["removed b, which was held", "removed more"]
    assert as_json("rm", store, "a")["held"] == ["a"]


@pytest.mark.parametrize("command", ["rm", "unhold"])
def test_help_says_what_a_name_is(command: str) -> None:
    assert "As kvtier ls shows" in kvtier(command, "--help").stdout


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 slabs"), (1, "1 slab"), (2, "2 slabs"), (21, "21 slabs")]
)
def test_one_and_several(number: int, text: str) -> None:
    assert counted(number, "slab") == text


def test_a_catalog_that_is_lost_or_broken_names_the_remedy(store: Path) -> None:
    """Also where only what lies behind its first page is damaged."""
    path = store / "catalog.sqlite"
    whole, remedy = path.read_bytes(), f"; kvtier rebuild {store} makes it anew from the region"
    for data in (b"garbage" * 1000, whole[:4096] + b"\xa5" * (len(whole) - 4096)):
        path.write_bytes(data)
        for command in ("ls", "scrub", "verify"):
            assert remedy in refused(command, store)
        with pytest.raises(FormatError, match="kvtier rebuild"):
            describe(store)
    path.unlink()
    for command in ("ls", "scrub"):
        assert remedy in refused(command, store)
    with pytest.raises(DeviceError) as caught:
        describe(store)
    assert caught.value.errno == errno.ENOENT
    assert "restored 4 of 4 segments, 3 names, 1 fingerprint\n" in kvtier("rebuild", store).stdout


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"a: b\nc: [{SECRET}", "at line 2, column "),
        (f"a: b\n{SECRET}: *{SECRET}", "at line 2, column 10"),
        (f"{SECRET}\x01", "at character 7"),
        (f"!!bool {SECRET}", "KeyError"),
        (f"layout_version: {SECRET}", "no whole number"),
        (f"layout_version: 1\nstore_uuid: {SECRET:x<32}\nregion: {{path: r, bytes: 1}}", "UUID"),
        (f"layout_version: 1\nstore_uuid: {SECRET}\nregion: {{path: r, bytes: {SECRET}}}", "size"),
        (f"layout_version: 1\nstore_uuid: 5\nregion: {{path: {SECRET}, bytes: 1}}", "is text"),
        (SECRET, "TypeError"),
    ],
)
def test_damaged_settings_are_not_quoted(text: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "store.yaml").write_text(text)
    message = refused("ls", tmp_path)
    assert f"{tmp_path / 'store.yaml'} is damaged: " in message
    assert where in message
    assert SECRET not in message


def test_settings_are_read_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "store.yaml"
    store_files.write_settings(
        tmp_path,
        store_files.Settings("11111111-2222-3333-4444-555555555555", (RegionPlace("r", 4096),)),
    )
    whole = path.read_bytes()
    path.write_bytes(whole + b"#" * ((64 << 10) - len(whole)))
    assert store_files.read_settings(tmp_path).regions[0].path == "r"
    path.write_bytes(whole + b"#" * ((64 << 10) - len(whole) + 1))
    assert "more than 65536 bytes" in refused("ls", tmp_path)


@pytest.mark.parametrize("fingerprint", [5, ["a"], b"model", object()])
def test_a_fingerprint_of_another_type(fingerprint: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"got {type(fingerprint).__name__}"):
        front.open(
            tmp_path / "new",
            geometry=PLAIN,
            fingerprint=fingerprint,  # type: ignore[arg-type]
            region="4MiB",
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("geometry", [5, "float32", {"dtype": "float32"}])
def test_a_geometry_of_another_type(geometry: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"kvtier.Geometry: got {type(geometry).__name__}"):
        front.open(
            tmp_path / "new",
            geometry=geometry,  # type: ignore[arg-type]
            fingerprint="model",
            region="4MiB",
        )
    assert not (tmp_path / "new").exists()


def test_the_front_door_lists_its_names() -> None:
    assert dir(front) == sorted(front.__all__)
