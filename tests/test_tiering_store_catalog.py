"""Catalogs whose rows were changed: a miss, a finding or a typed error; never other bytes."""

import contextlib
import os
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.errors import KvtierError
from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tiering.verifier import verify
from tests.store_cases import KV, PLAIN, check_everywhere, open_store, put, some_tokens

TOKENS = some_tokens(1100, 3)
OTHERS = some_tokens(40, 4)
SEEDS = range(60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a chain of three Segments, and one on its own."""
    with open_store(tmp_path, PLAIN, Config("32MiB")) as store:
        put(store, KV(PLAIN), "long", TOKENS)
        put(store, KV(PLAIN), "other", OTHERS)
    return tmp_path


def change(path: Path, sql: str, *values: Any) -> None:
    connection = sqlite3.connect(path / "catalog.sqlite")
    connection.execute("PRAGMA foreign_keys = OFF")
    with connection:
        assert connection.execute(sql, values).rowcount > 0
    connection.close()


def check_no_other_bytes(path: Path, asked: list[list[int]]) -> None:
    """Whatever is restored is exact, the store can be used, and the inspectors stay typed."""
    kv = KV(PLAIN)
    describe(path)
    with open_store(path, PLAIN) as store:
        for tokens in asked:
            sequence = store.resume(tokens)
            assert sequence.length() <= len(tokens)
            if sequence.length():
                check_everywhere(store, kv, sequence, tokens[: sequence.length()])
            store.release(sequence)
        check_everywhere(store, kv, store.resume(OTHERS), OTHERS)


BAD_VALUES: dict[str, tuple[str, Any]] = {
    "tokens short": ("tokens", b"12345"),
    "tokens text": ("tokens", "text"),
    "tokens number": ("tokens", 7),
    "provenance junk": ("provenance", "hearsay"),
    "provenance blob": ("provenance", b"exact"),
    "count huge": ("token_count", 1 << 60),
    "count text": ("token_count", "many"),
    "count smaller": ("token_count", 511),
    "start": ("start_position", 5),
    "start text": ("start_position", "0x"),
    "generation": ("generation", 12345),
    "generation zero": ("generation", 0),
    "parent itself": ("parent_id", 1),
    "parent missing": ("parent_id", 99),
    "limit": ("parent_limit", -1),
    "limit text": ("parent_limit", "all"),
    "created": ("created", 1e300),
    "start digest": ("start_digest", bytes(16)),
    "end digest": ("end_digest", bytes(16)),
}


@pytest.mark.parametrize("what", BAD_VALUES)
def test_a_row_that_cannot_be_true_is_a_miss_and_a_finding(path: Path, what: str) -> None:
    column, value = BAD_VALUES[what]
    change(path, f"UPDATE segment SET {column} = ? WHERE id = 1", value)
    if what != "limit":  # The limit of a Segment without parent says nothing.
        assert not verify(path).ok
    check_no_other_bytes(path, [TOKENS])


@pytest.mark.parametrize("extents", [b"", b"x", bytes(16), bytes(32), b"\xff" * 32])
def test_extents_that_cannot_be_are_a_finding_or_refused(path: Path, extents: bytes) -> None:
    change(path, "UPDATE segment SET extents = ? WHERE id = 1", extents)
    assert not verify(path).ok
    with contextlib.suppress(KvtierError):  # Refused, typed.
        check_no_other_bytes(path, [TOKENS])


def test_a_child_cut_from_its_parent_is_not_a_beginning(path: Path) -> None:
    change(path, "UPDATE segment SET parent_id = NULL WHERE id = 3")
    assert not verify(path).ok
    check_no_other_bytes(path, [TOKENS, TOKENS[1024:]])


def test_the_same_tokens_twice_is_a_finding(path: Path) -> None:
    columns = (
        "fingerprint_id, provenance, start_digest, end_digest, start_position, token_count, "
        "tokens, parent_id, parent_limit, generation, extents, created, used, quarantined"
    )
    change(path, f"INSERT INTO segment ({columns}) SELECT {columns} FROM segment WHERE id = 1")
    assert not verify(path).ok
    with pytest.raises(KvtierError, match="overlap"):
        open_store(path, PLAIN)


def test_tokens_with_one_bit_changed_are_never_served(path: Path) -> None:
    """Neither for the tokens as they were nor for those that the catalog names now."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        connection = sqlite3.connect(path / "catalog.sqlite")
        (blob,) = connection.execute("SELECT tokens FROM segment WHERE id = 1").fetchone()
        connection.close()
        damaged = bytearray(blob)
        at = int(rng.integers(len(damaged)))
        damaged[at] ^= 1 << int(rng.integers(8))
        named = np.frombuffer(bytes(damaged), "<u4").tolist() + TOKENS[512:]
        change(path, "UPDATE segment SET tokens = ? WHERE id = 1", bytes(damaged))
        assert not verify(path).ok
        with open_store(path, PLAIN) as store:
            first = at // 4
            for tokens in (named, TOKENS):
                assert store.lookup(tokens) <= first
        check_no_other_bytes(path, [named, TOKENS])
        change(path, "UPDATE segment SET tokens = ? WHERE id = 1", blob)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_changes_of_rows(path: Path, seed: int) -> None:
    """A112: a random value in a random column of a random row."""
    rng = np.random.default_rng(seed)
    columns = [
        "provenance", "start_digest", "end_digest", "start_position", "token_count", "tokens",
        "parent_limit", "generation", "extents", "created",
    ]  # fmt: skip
    values: list[Any] = [
        int(rng.integers(-(2**62), 2**62)), int(rng.integers(0, 1024)), rng.bytes(16),
        rng.bytes(32), rng.bytes(2048), "text", "", b"", float(rng.normal()),
    ]  # fmt: skip
    column = columns[int(rng.integers(len(columns)))]
    value = values[int(rng.integers(len(values)))]
    row = int(rng.integers(1, 4))
    try:
        change(path, f"UPDATE segment SET {column} = ? WHERE id = ?", value, row)
    except sqlite3.IntegrityError:
        return  # SQLite refuses it itself.
    with contextlib.suppress(KvtierError) if column == "extents" else contextlib.nullcontext():
        check_no_other_bytes(path, [TOKENS])
    verify(path)


def test_a_name_that_points_nowhere_is_a_finding(path: Path) -> None:
    change(path, "UPDATE name SET segment_id = 77 WHERE name = 'long'")
    change(path, "UPDATE name SET created = 'yesterday' WHERE name = 'other'")
    found = [each.where for each in verify(path).findings]
    assert found == ["name 'long'", "name 'other'"]
    describe(path)


def test_a_lost_fingerprint_is_a_finding(path: Path) -> None:
    change(path, "DELETE FROM fingerprint")
    assert {each.kind for each in verify(path).findings} == {"reference"}
    assert describe(path).names[0].fingerprint == "missing"


@pytest.mark.loop
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_store_on_a_read_only_file_system_can_be_inspected(path: Path, tmp_path: Path) -> None:
    where = tmp_path.parent / f"{tmp_path.name}-ro"
    where.mkdir()
    subprocess.run(["mount", "--bind", path, where], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", where], check=True)
        assert [each.name for each in describe(where).names] == ["long", "other"]
        assert verify(where).ok
        with pytest.raises(KvtierError, match="Read-only file system"):
            open_store(where, PLAIN)
    finally:
        subprocess.run(["umount", where], check=True)
