"""Approximate KV goes on upon exact KV: an exact request gets the beginning, and never the rest."""

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.rebuilder import rebuild
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.store_cases import KV, PLAIN, check_bytes, extend, open_store, some_tokens

SPARSE = Provenance.approximate(0.125, "raw")
OTHER = Provenance.approximate(0.25, "raw")
EXACT_KV, SPARSE_KV = KV(PLAIN), KV(PLAIN, salt=1)
"""What a model computes with all it has seen, and what with less."""
PROMPT, ANSWER = 700, 650


def answered(store: Store, tokens: list[int], prompt: int, name: str) -> Sequence:
    """A Sequence that is exact for its prompt and sparse after it, saved. Its KV of the answer is
    other KV than an exact one's, so that one taken for the other is seen."""
    sequence = store.resume(tokens[:prompt])
    extend(store, EXACT_KV, sequence, tokens[:prompt])
    store.go_on_approximately(sequence, SPARSE)
    extend(store, SPARSE_KV, sequence, tokens)
    store.save(sequence, name, tokens)
    return sequence


def is_right(store: Store, tokens: list[int], provenance: Provenance, prompt: int) -> int:
    """How much of `tokens` is found; its KV is compared."""
    sequence = store.resume(tokens, provenance=provenance)
    found = sequence.length()
    for layer in range(len(PLAIN.layers)):
        held = store.read(sequence, layer)
        exact, sparse = EXACT_KV.rows(tokens, layer), SPARSE_KV.rows(tokens, layer)
        for got, wanted, rest in zip(held, exact, sparse, strict=True):
            assert (got[:, : min(prompt, found)] == wanted[:, : min(prompt, found)]).all()
            assert (got[:, prompt:] == rest[:, prompt:found]).all()
    store.release(sequence)
    return found


@pytest.mark.parametrize("prompt", [PROMPT, 512, 1024, 1])
def test_an_exact_request_gets_the_beginning_and_a_sparse_one_all(
    prompt: int, tmp_path: Path
) -> None:
    tokens = some_tokens(prompt + ANSWER, 1)
    with open_store(tmp_path) as store:
        store.release(answered(store, tokens, prompt, "chat"))
    for _ in range(2):
        with open_store(tmp_path) as store:
            assert is_right(store, tokens, EXACT, prompt) == prompt
            assert is_right(store, tokens, SPARSE, prompt) == len(tokens)
            assert is_right(store, tokens, OTHER, prompt) == prompt
            assert store.lookup(tokens) == prompt
            assert store.lookup(tokens, provenance=SPARSE) == len(tokens)
            assert store.saved("chat")[1] == SPARSE
    assert verify(tmp_path).findings == []


def test_the_same_tokens_are_stored_exactly_as_well(tmp_path: Path) -> None:
    """Computed exactly later, they do not replace the sparse ones, and are not replaced by them."""
    tokens = some_tokens(PROMPT + ANSWER, 2)
    with open_store(tmp_path) as store:
        store.release(answered(store, tokens, PROMPT, "chat"))
        sequence = store.resume(tokens)
        extend(store, EXACT_KV, sequence, tokens)
        store.save(sequence, "exact", tokens)
        store.release(sequence)
        assert is_right(store, tokens, EXACT, len(tokens)) == len(tokens)
    with open_store(tmp_path) as store:
        assert is_right(store, tokens, EXACT, len(tokens)) == len(tokens)
        # Exact KV is as good for who takes less.
        assert is_right(store, tokens, SPARSE, len(tokens)) == len(tokens)
        store.remove("exact")
        assert is_right(store, tokens, EXACT, PROMPT) == PROMPT
        assert is_right(store, tokens, SPARSE, PROMPT) == len(tokens)
    assert verify(tmp_path).findings == []


def test_two_answers_to_one_prompt_and_one_removed(tmp_path: Path) -> None:
    prompt = some_tokens(PROMPT, 3)
    answers = [prompt + some_tokens(ANSWER, seed) for seed in (4, 5)]
    with open_store(tmp_path) as store:
        for number, tokens in enumerate(answers):
            store.release(answered(store, tokens, PROMPT, f"chat/{number}"))
        store.remove("chat/0")
    with open_store(tmp_path) as store:
        assert is_right(store, answers[0], SPARSE, PROMPT) == PROMPT
        assert is_right(store, answers[1], SPARSE, PROMPT) == len(answers[1])
        store.remove("chat/1")
        assert store.lookup(prompt) == 0
    assert verify(tmp_path).findings == []


def test_a_lost_catalog_brings_both_back(tmp_path: Path) -> None:
    tokens = some_tokens(PROMPT + ANSWER, 6)
    with open_store(tmp_path) as store:
        store.release(answered(store, tokens, PROMPT, "chat"))
    (tmp_path / "catalog.sqlite").unlink()
    report = rebuild(tmp_path)
    assert not report.segments_dropped
    with open_store(tmp_path) as store:
        assert is_right(store, tokens, EXACT, PROMPT) == PROMPT
        assert is_right(store, tokens, SPARSE, PROMPT) == len(tokens)
        assert store.saved("chat")[1] == SPARSE
    assert verify(tmp_path).findings == []


def test_a_damaged_prompt_takes_its_answer_with_it_until_it_is_computed_anew(
    tmp_path: Path,
) -> None:
    tokens = some_tokens(PROMPT + ANSWER, 7)
    with open_store(tmp_path) as store:
        sequence = answered(store, tokens, PROMPT, "chat")
        offset = sequence.views[0].segment.extents[1].offset  # type: ignore[union-attr]
        store.release(sequence)
    with (tmp_path / "region.kv").open("r+b") as region:
        region.seek(offset + 8192)
        region.write(b"\xff" * 64)
    with open_store(tmp_path) as store:
        for provenance in (EXACT, SPARSE):
            assert is_right(store, tokens, provenance, PROMPT) == 0
        sequence = store.sequence()
        extend(store, EXACT_KV, sequence, tokens[:512])
        store.save(sequence, "again", tokens[:512])
        store.release(sequence)
        assert is_right(store, tokens, EXACT, PROMPT) == PROMPT
        assert is_right(store, tokens, SPARSE, PROMPT) == len(tokens)


def test_a_sequence_changes_once_and_only_from_exact(tmp_path: Path) -> None:
    tokens = some_tokens(40, 8)
    with open_store(tmp_path) as store:
        sequence = store.sequence()
        extend(store, EXACT_KV, sequence, tokens)
        with pytest.raises(ConfigError, match="exact cannot go on as exact"):
            store.go_on_approximately(sequence, EXACT)
        store.go_on_approximately(sequence, SPARSE)
        store.go_on_approximately(sequence, SPARSE)
        with pytest.raises(ConfigError, match=r"budget=0\.125.* cannot go on as .*budget=0\.25"):
            store.go_on_approximately(sequence, OTHER)
        assert sequence.length() == 40
        check_bytes(store, EXACT_KV, sequence, tokens)
