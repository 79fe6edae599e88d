"""What counts as the same KV: tokens, fingerprint, namespace, provenance and shapes."""

from pathlib import Path

import pytest

import kvtier
from kvtier.errors import ConfigError
from kvtier.io.device import Buffers, Int64Array
from kvtier.tiering import chain, chain_hash, committer
from kvtier.tiering.config import Config
from kvtier.tiering.fingerprint import Fingerprint, Provenance
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    Shuffled,
    check_attend,
    check_bytes,
    check_everywhere,
    check_settled,
    extend,
    open_store,
    put,
    some_tokens,
)

RECORD = 4096
"""Bytes on the region of a name's record."""


def count_writes(store: Store) -> list[int]:
    """Sizes of all writes and flushes (0) from now on."""
    device = store._files.region.device
    noted: list[int] = []
    write, flush = device.write, device.flush

    def noting(offsets: Int64Array, buffers: Buffers) -> None:
        noted.append(int(buffers.lengths.sum()))
        write(offsets, buffers)

    def noting_flush() -> None:
        noted.append(0)
        flush()

    device.write, device.flush = noting, noting_flush  # type: ignore[method-assign]
    return noted


def of_namespace(path: Path, namespace: str, region: str | None = None) -> Store:
    return kvtier.open(
        path, geometry=PLAIN, fingerprint="m", namespace=namespace, region=region, hot=MIB
    )


@pytest.mark.parametrize("pieces", [10**9, 700])
def test_the_same_tokens_again_take_no_room(tmp_path: Path, pieces: int) -> None:
    """A116. Each time computed anew by a caller that did not ask what is stored."""
    kv, tokens = KV(PLAIN), some_tokens(8000, 1)
    with open_store(tmp_path, placement=Shuffled(1)) as store:
        put(store, kv, "first", tokens)
        used, segments = store.stats().device_bytes, store.stats().segments
        for turn in range(4):
            put(store, kv, f"n{turn}", tokens, pieces=pieces)
            assert store.stats().device_bytes == used + (turn + 1) * RECORD
            assert store.stats().segments == segments
        assert len(store.names()) == 5
        check_settled(store, tmp_path)


def test_a_resumed_sequence_that_is_saved_again_writes_nothing(tmp_path: Path) -> None:
    """A116, for a caller that asks first: a new name is a record, the same one nothing."""
    kv, tokens = KV(PLAIN), some_tokens(1300, 1)
    with open_store(tmp_path) as store:
        put(store, kv, "first", tokens)
        written, used = store.stats().bytes_written, store.stats().device_bytes
        for turn in range(5):
            sequence = store.resume(tokens)
            store.save(sequence, f"n{turn}", tokens)
            store.release(sequence)
        assert store.stats().bytes_written == written + 5 * RECORD
        assert store.stats().device_bytes == used + 5 * RECORD
        device_writes = count_writes(store)
        for turn in range(5):
            sequence = store.resume(tokens)
            store.save(sequence, f"n{turn}", tokens)
            store.release(sequence)
        assert device_writes == []
        assert store.stats().device_bytes == used + 5 * RECORD


def test_equal_digests_do_not_make_tokens_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A001: the digest names, the tokens decide."""

    def constant(tokens: chain.Tokens) -> bytes:
        return bytes(16)

    monkeypatch.setattr(committer, "chain_digest", constant)
    monkeypatch.setattr(chain_hash.ChainHash, "digest", bytes(16))
    kv = KV(PLAIN)
    first, second = list(range(1, 65)), list(range(101, 165))
    with open_store(tmp_path) as store:
        put(store, kv, "first", first)
        assert store.lookup(second) == 0
        assert store.resume(second).length() == 0
        put(store, kv, "second", second)
    with open_store(tmp_path) as store:
        for tokens in (first, second):
            sequence = store.resume(tokens)
            check_bytes(store, kv, sequence, tokens)


def test_namespaces_never_share(tmp_path: Path) -> None:
    """A004: in memory and after reopening."""
    kv, tokens = KV(PLAIN), some_tokens(600, 1)
    with of_namespace(tmp_path, "a", "16MiB") as store:
        put(store, kv, "n", tokens)
    for _ in range(2):
        with of_namespace(tmp_path, "b") as store:
            assert (store.lookup(tokens), store.resume(tokens).length()) == (0, 0)
            assert store.names() == []
        with of_namespace(tmp_path, "a") as store:
            check_bytes(store, kv, store.resume(tokens), tokens)


def test_salts_never_share_and_are_not_kept(tmp_path: Path) -> None:
    """A004: equal namespaces with different secrets are different tenants."""
    kv, tokens = KV(PLAIN), some_tokens(600, 1)

    def of_salt(namespace: str, salt: str | bytes) -> Store:
        region = None if (tmp_path / "store.yaml").exists() else "16MiB"
        return kvtier.open(
            tmp_path, geometry=PLAIN, fingerprint="m", namespace=namespace, salt=salt,
            region=region, hot=MIB,
        )  # fmt: skip

    with of_salt("a", "our secret") as store:
        put(store, kv, "n", tokens)
    for namespace, salt in (
        ("a", ""),
        ("a", "another"),
        ("", "our secret"),
        ("a", b"our secret\0"),
    ):
        with of_salt(namespace, salt) as store:
            assert (store.lookup(tokens), store.names()) == (0, [])
    with of_salt("a", b"our secret") as store:
        check_bytes(store, kv, store.resume(tokens), tokens)
    for each in tmp_path.iterdir():
        assert b"our secret" not in each.read_bytes(), each
    with pytest.raises(ConfigError, match="a salt text or bytes"):
        of_salt("a", 7)  # type: ignore[arg-type]


def test_equal_placeholders_of_two_images_are_not_equal_kv(tmp_path: Path) -> None:
    """Two images in one prompt: the text before them is shared, nothing behind it is."""
    kv = KV(PLAIN)
    text, question = some_tokens(100, 1), some_tokens(30, 2)

    def seen(image: bytes) -> list[int]:
        return [*text, *kvtier.content_tokens(image, 64).tolist(), *question]

    with open_store(tmp_path) as store:
        put(store, kv, "first", seen(b"first image"))
        assert store.lookup(seen(b"first image")) == 194
        assert store.lookup(seen(b"second image")) == 100
    assert kvtier.content_tokens(b"x", 4).tolist() == kvtier.content_tokens(b"x", 64)[:4].tolist()
    with pytest.raises(ConfigError, match="at least 4"):
        kvtier.content_tokens(b"x", 3)


def test_other_weights_find_nothing_and_lose_nothing(tmp_path: Path) -> None:
    """A005."""
    old, new = KV(PLAIN, salt=1), KV(PLAIN, salt=2)
    tokens = some_tokens(600, 1)
    with open_store(tmp_path, model="old") as store:
        put(store, old, "n", tokens)
    with open_store(tmp_path, model="new") as store:
        assert (store.lookup(tokens), store.names()) == (0, [])
        put(store, new, "n", tokens)
    for model, kv in (("old", old), ("new", new)):
        with open_store(tmp_path, model=model) as store:
            sequence = store.resume(tokens)
            check_bytes(store, kv, sequence, tokens)
            assert [each.name for each in store.names()] == ["n"]
    assert verify(tmp_path).ok


OTHER_SHAPES = {
    "heads": Geometry.uniform(2, 4, 4),
    "widths": Geometry((LayerGeometry(2, 4, 12),) * 2, "float32"),
    "dtype": Geometry.uniform(2, 2, 16, dtype="float16"),
    "half dtype": Geometry.uniform(2, 2, 16, dtype="bfloat16"),
    "layers": Geometry.uniform(4, 2, 4),
    "window": Geometry((LayerGeometry(2, 8, 8, 100),) * 2, "float32"),
}


@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_other_shapes_of_the_same_size_are_never_taken_for_the_models(
    tmp_path: Path, shape: str
) -> None:
    """A009: a caller that names the same fingerprint is told both; kvtier.open tells them apart."""
    kv, tokens = KV(PLAIN), some_tokens(600, 1)
    assert OTHER_SHAPES[shape].token_bytes == PLAIN.token_bytes
    with open_store(tmp_path / "direct") as store:
        put(store, kv, "n", tokens)
    with pytest.raises(ConfigError, match=r"\[2, 8, 8, null\].*but this model has"):
        open_store(tmp_path / "direct", OTHER_SHAPES[shape])
    with open_store(tmp_path / "direct") as store:
        check_bytes(store, kv, store.resume(tokens), tokens)

    with of_namespace(tmp_path / "front", "", "16MiB") as store:
        put(store, kv, "n", tokens)
    with kvtier.open(
        tmp_path / "front", geometry=OTHER_SHAPES[shape], fingerprint="m", hot=MIB
    ) as store:
        assert (store.lookup(tokens), store.resume(tokens).length()) == (0, 0)


def test_twenty_of_twentyfour_tokens_are_shared_and_stay_what_they_were(tmp_path: Path) -> None:
    """A016: the share ends inside a Page."""
    kv = KV(PLAIN)
    first = some_tokens(20, 1)
    second = [*first, *some_tokens(4, 2)]
    third = [*first, *some_tokens(4, 3)]
    with open_store(tmp_path, placement=Shuffled(1)) as store:
        put(store, kv, "second", second)
        holder = store.resume(third)
        check_bytes(store, kv, holder, first)
        twin = store.fork(holder)
        extend(store, kv, twin, third)
        store.save(twin, "third", third)
        check_bytes(store, kv, holder, first)
        check_everywhere(store, kv, holder, first)
        check_bytes(store, kv, twin, third)
        check_attend(store, kv, twin, third, layer=0, count=4)
        check_bytes(store, kv, store.resume(second), second)


def test_exact_requests_never_match_approximate_kv(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(600, 1)
    sparse = Provenance.approximate(0.125, "raw")
    with open_store(tmp_path) as store:
        sequence = store.sequence(sparse)
        extend(store, kv, sequence, tokens)
        store.save(sequence, "sparse", tokens)
        twin = store.fork(sequence)
        assert twin.provenance == sparse
    with open_store(tmp_path) as store:
        assert store.lookup(tokens) == 0
        assert store.lookup(tokens, provenance=sparse) == len(tokens)


@pytest.mark.parametrize("count", [40, 600])
def test_a_fork_cannot_give_what_it_shares_other_tokens(tmp_path: Path, count: int) -> None:
    """Both sides name their tokens only after the fork, and name different ones."""
    kv, tokens = KV(PLAIN), some_tokens(count, 1)
    others = [(each + 1) % 97 for each in tokens]
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        extend(store, kv, sequence, tokens)
        twin = store.fork(sequence)
        store.save(sequence, "a", tokens)
        if count < 64:
            # A short Tail was copied, so nothing is shared; the KV is the caller's word.
            assert store.save(twin, "b", others) == count
        else:
            with pytest.raises(ConfigError, match=r"share a segment.*position 0"):
                store.save(twin, "b", others)
            assert [each.name for each in store.names()] == ["a"]
            assert store.lookup(others) == 0
            assert store.save(store.fork(sequence), "c", tokens) == count
    assert verify(tmp_path).ok


def test_a_name_that_is_saved_again_stands_for_the_new_tokens(tmp_path: Path) -> None:
    kv = KV(PLAIN)
    with open_store(tmp_path) as store:
        put(store, kv, "n", some_tokens(100, 1))
        put(store, kv, "n", some_tokens(200, 2))
        assert [(each.name, each.token_count) for each in store.names()] == [("n", 200)]


def test_a_prefix_that_was_saved_as_part_of_more_is_not_stored_again(tmp_path: Path) -> None:
    kv, tokens = KV(PLAIN), some_tokens(1000, 1)
    with open_store(tmp_path) as store:
        put(store, kv, "whole", tokens)
        used = store.stats().device_bytes
        put(store, kv, "part", tokens[:700])
        assert store.stats().device_bytes == used + RECORD
        sequence = store.resume(tokens[:700])
        check_bytes(store, kv, sequence, tokens[:700])


def test_two_models_share_one_region_without_meeting(tmp_path: Path) -> None:
    kv = KV(PLAIN)
    other = Geometry.uniform(3, 1, 8)
    with open_store(tmp_path) as store:
        put(store, kv, "n", some_tokens(600, 1))
    second = Fingerprint.of({"model": "second"})
    with Store.open(tmp_path, other, second, Config(hot=MIB)) as store:
        put(store, KV(other), "n", some_tokens(600, 1))
        check_settled(store, tmp_path)
    with open_store(tmp_path) as store:
        check_bytes(store, kv, store.resume(some_tokens(600, 1)), some_tokens(600, 1))
