"""The commands kvtier export and kvtier import: a prefix goes from one store to another."""

import json
import sqlite3
from pathlib import Path

import pytest

from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tiering.verifier import verify
from tests.command_cases import as_json, kvtier, refused
from tests.exchange_cases import altered
from tests.store_cases import KV, PLAIN, check_everywhere, open_store, put, some_tokens

A, B = some_tokens(700, 1), some_tokens(300, 2)
SMALL = Config("4MiB", hot="4MiB")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A closed store of "a" of two models."""
    path = tmp_path / "source"
    with open_store(path, config=SMALL) as store:
        put(store, KV(PLAIN), "a", A)
    with open_store(path, model="other") as store:
        put(store, KV(PLAIN, 1), "a", B)
        put(store, KV(PLAIN, 1), "b", B)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A closed store that is empty."""
    kvtier("format", tmp_path / "target", "--region", "4MiB")
    return tmp_path / "target"


def test_there_and_back(source: Path, target: Path, tmp_path: Path) -> None:
    """Each model finds its own, in a store that knew neither."""
    file = tmp_path / "a.kv"
    hexes = {each.description["model"]: each.hex for each in describe(source).fingerprints}
    assert "2 models have the name 'a'" in refused("export", source, "a", file)
    for model, tokens, salt in (("m", A, 0), ("other", B, 1)):
        prefix = hexes[model][:6]
        done = as_json("export", source, "a", file, "--fingerprint", prefix)
        assert (done["tokens"], done["fingerprint"]) == (len(tokens), hexes[model])
        assert done["nbytes"] == len(tokens) * (PLAIN.token_bytes + 4)
        done = as_json("import", target, file)
        assert (done["tokens"], done["new_tokens"]) == (len(tokens), len(tokens))
        with open_store(target, model=model) as store:
            check_everywhere(store, KV(PLAIN, salt), store.resume(tokens), tokens)
            assert store.lookup(B if model == "m" else A) == 0
    assert "0 of them are new" in kvtier("import", target, file, "--name", "again").stdout
    assert [each.name for each in describe(target).names] == ["a", "a", "again"]
    assert verify(target).findings == []
    out = kvtier("export", source, "b", file).stdout
    assert "b: 300 tokens" in out
    assert str(file) in out


def test_a_refused_file_leaves_the_store_as_it_was(
    source: Path, target: Path, tmp_path: Path
) -> None:
    """Its fingerprint is not named either."""
    file = tmp_path / "b.kv"
    kvtier("export", source, "b", file)
    whole, before = file.read_bytes(), as_json("ls", target)
    for data in (whole[:-1], whole[:-1] + b"\xa5", b"", whole + b"x"):
        file.write_bytes(data)
        assert str(file) in refused("import", target, file)
    file.write_bytes(altered(whole, lambda head: head.pop("values.1")))
    assert "'values.1' is missing" in refused("import", target, file)
    assert as_json("ls", target) == before
    assert before["fingerprints"] == []


def test_a_damaged_prefix(source: Path, tmp_path: Path) -> None:
    with (source / "region.kv").open("r+b") as file:
        file.seek((1 << 20) + 40_000)
        file.write(b"\xa5" * 300_000)
    prefix = describe(source).names[0].fingerprint[:8]
    message = refused("export", source, "a", tmp_path / "a.kv", "--fingerprint", prefix)
    assert "damaged" in message
    assert not list(tmp_path.glob("a.kv*"))


def test_what_cannot_be_done(source: Path, target: Path, tmp_path: Path) -> None:
    file, absent = tmp_path / "b.kv", tmp_path / "absent"
    assert "no name 'absent'" in refused("export", source, "absent", file)
    assert "not a kvtier store" in refused("export", absent, "b", file)
    kvtier("export", source, "b", file)
    assert "not a kvtier store" in refused("import", absent, file)
    assert not absent.exists()
    assert "No such file" in refused("import", target, absent)
    with open_store(target):
        assert "open for writing in this process" in refused("import", target, file)
    with open_store(source):
        assert "open for writing in this process" in refused("export", source, "b", file)
    with open_store(source, model="other") as store:
        put(store, KV(PLAIN, 1), "c", A)
    assert "for other tokens" in refused("import", source, file, "--name", "c")


def test_json_is_one_object(source: Path, tmp_path: Path) -> None:
    done = kvtier("export", source, "b", tmp_path / "b.kv", "--json")
    assert set(json.loads(done.stdout)) == {
        "name", "file", "tokens", "new_tokens", "nbytes", "fingerprint", "provenance",
    }  # fmt: skip


def test_a_catalog_that_lost_the_model_of_a_name(source: Path, tmp_path: Path) -> None:
    connection = sqlite3.connect(source / "catalog.sqlite")
    with connection:
        connection.execute("UPDATE fingerprint SET created = -9223372036854775808")
    connection.close()
    assert "rebuild --force" in refused("export", source, "b", tmp_path / "b.kv")
    assert not (tmp_path / "b.kv").exists()
