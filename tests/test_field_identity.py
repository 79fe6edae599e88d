"""Field reports about identity: whose KV it is, under any spelling, adapter, dtype or offset."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.errors import ConfigError
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.listing import describe
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.store_cases import (
    GEOMETRIES,
    KV,
    MIB,
    PLAIN,
    Shuffled,
    check_bytes,
    check_everywhere,
    open_store,
    put,
    shared,
    some_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = some_tokens(600, 1)


def of_model(path: Path, fingerprint: Mapping[str, Any] | str, geometry: Geometry = PLAIN) -> Store:
    region = None if (path / "store.yaml").exists() else "16MiB"
    return kvtier.open(path, geometry=geometry, fingerprint=fingerprint, region=region, hot=MIB)


ALIKE = (
    "org/a/b",
    "org/a-SEP-b",
    "org-SEP-a-SEP-b",
    "org_a_b",
    "org%2Fa%2Fb",
    "org/a//b",
    "org/a/b/",
    "org/a/b\n",
    "ORG/a/b",
    "org\\a\\b",
)


def test_ids_that_an_encoding_could_merge_have_kv_of_their_own(tmp_path: Path) -> None:
    """A002: ten ids, ten fingerprints, each with its own bytes."""
    for salt, each in enumerate(ALIKE):
        with of_model(tmp_path, each) as store:
            assert (store.lookup(TOKENS), store.names()) == (0, [])
            put(store, KV(PLAIN, salt), "n", TOKENS)
    assert len(describe(tmp_path).fingerprints) == len(ALIKE)
    for salt, each in enumerate(ALIKE):
        with of_model(tmp_path, each) as store:
            check_bytes(store, KV(PLAIN, salt), store.resume(TOKENS), TOKENS)


STRANGE = (
    "meta/Llama-3",
    "../../etc/x",
    "/etc/x",
    "",
    "x" * 300,
    "two\nlines",
    "user@host",
    "nul\0byte",
    "\N{SNOWMAN}",
)


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_no_text_of_a_caller_becomes_a_path(tmp_path: Path, text: str) -> None:
    """A003: model id, namespace and saved name; what the store makes is what it always makes."""
    path = tmp_path / "inner" / "store"
    path.parent.mkdir()
    files = {"store.yaml", "catalog.sqlite", "lock", "region.kv", "stats.json"}
    for namespace in ("", text):
        with kvtier.open(
            path,
            geometry=PLAIN,
            fingerprint=text,
            namespace=namespace,
            region=None if path.exists() else "16MiB",
            hot=MIB,
        ) as store:
            put(store, KV(PLAIN), "n", TOKENS)
            sequence = store.resume(TOKENS)
            if 0 < len(text) <= 256 and text.isprintable():
                store.save(sequence, text, TOKENS)
                assert text in [each.name for each in store.names()]
            else:
                with pytest.raises(ConfigError, match="a name has 1 to 256 printable characters"):
                    store.save(sequence, text, TOKENS)
            store.release(sequence)
    assert {each.name for each in path.iterdir()} == files
    assert [each.name for each in tmp_path.iterdir()] == ["inner"]
    assert [each.name for each in path.parent.iterdir()] == ["store"]
    assert verify(path).ok


DESCRIPTION: dict[str, Any] = {
    "weights": "W1",
    "tokenizer": "T1",
    "adapter": {"name": "ad", "digest": "D1"},
    "dtype": "float16",
}
CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"weights": "W2"},
    "tokenizer": {"tokenizer": "T2"},
    "adapter content": {"adapter": {"name": "ad", "digest": "D2"}},
    "adapter gone": {"adapter": None},
    "resolved dtype": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_named_alike_but_is_not_the_same_never_matches(tmp_path: Path, change: str) -> None:
    """A005, A006: other weights, another tokenizer, an adapter reloaded under its old name."""
    with of_model(tmp_path, DESCRIPTION) as store:
        put(store, KV(PLAIN), "n", TOKENS)
    for _ in range(2):
        with of_model(tmp_path, DESCRIPTION | CHANGES[change]) as store:
            assert (store.lookup(TOKENS), store.resume(TOKENS).length()) == (0, 0)
            assert store.names() == []
        with of_model(tmp_path, DESCRIPTION) as store:
            check_bytes(store, KV(PLAIN), store.resume(TOKENS), TOKENS)
    shown = [row.description["engine"] for row in describe(tmp_path).fingerprints]
    assert shown == [DESCRIPTION, DESCRIPTION | CHANGES[change]], "both can be told apart by a user"


def test_equal_sizes_of_two_dtypes_are_not_equal_kv(tmp_path: Path) -> None:
    """A007: a dtype is resolved before it identifies anything: the geometry has no "auto"."""
    half, brain = GEOMETRIES["float16"], GEOMETRIES["bfloat16"]
    assert half.token_bytes == brain.token_bytes
    with pytest.raises(ConfigError, match=r"dtype must be one of .*: got auto"):
        Geometry(half.layers, "auto")
    with of_model(tmp_path, "m", half) as store:
        put(store, KV(half), "n", TOKENS)
    with of_model(tmp_path, "m", brain) as store:
        assert (store.lookup(TOKENS), store.resume(TOKENS).length()) == (0, 0)
        put(store, KV(brain), "n", TOKENS)
    for geometry in (half, brain):
        with of_model(tmp_path, "m", geometry) as store:
            check_bytes(store, KV(geometry), store.resume(TOKENS), TOKENS)


def test_kv_is_only_found_at_the_position_it_was_computed_for(tmp_path: Path) -> None:
    """A108, A109, A110: nothing is shifted or joined, and what is no prefix is not used again, so
    keys are never used at other positions than their own."""
    kv = KV(PLAIN)
    first, second = some_tokens(512, 1), some_tokens(512, 2)
    with open_store(tmp_path) as store:
        put(store, kv, "both", first + second)
        put(store, kv, "first", first)
        assert store.lookup(second) == 0
        assert store.resume(second + first).length() == 0
        # The same fragment at another offset is other KV and is kept beside the first.
        put(store, kv, "moved", second + first)
        for tokens in (first + second, second + first):
            check_bytes(store, kv, store.resume(tokens), tokens)
        found = {
            tuple(each.tolist())
            for each in (store.resume(first + second).tokens, store.resume(second + first).tokens)
        }
        assert len(found) == 2


@pytest.mark.parametrize("at", [0, 15, 16, 299, 511, 512, 599])
def test_nearness_places_but_never_matches(tmp_path: Path, at: int) -> None:
    """A111: "enable" and "disable": prompts that differ in one token share what comes before it,
    whatever order a Placement gives the Pages."""
    kv = KV(PLAIN)
    other = list(TOKENS)
    other[at] = (other[at] + 1) % 97
    assert shared(TOKENS, other) == at
    with open_store(tmp_path, placement=Shuffled(at)) as store:
        put(store, kv, "enable", TOKENS)
        assert store.lookup(other) == at
        sequence = store.resume(other)
        assert sequence.length() == at
        if at:
            check_bytes(store, kv, sequence, other[:at])
            check_everywhere(store, kv, sequence, other[:at])
        put(store, kv, "disable", other)
        check_bytes(store, kv, store.resume(other), other)
        check_bytes(store, kv, store.resume(TOKENS), TOKENS)


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_what_a_store_makes_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """A112: KV, tokens and prompts are readable by their owner only."""
    path = tmp_path / "store"
    before = os.umask(umask)
    try:
        with open_store(path, PLAIN, Config("16MiB", hot=MIB)) as store:
            put(store, KV(PLAIN), "n", TOKENS)
            modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.iterdir()}
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert set(modes) >= {"store.yaml", "catalog.sqlite", "catalog.sqlite-wal", "region.kv", "lock"}
    assert set(modes.values()) == {0o600}, modes
