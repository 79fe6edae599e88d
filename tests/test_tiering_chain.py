"""Token chains: one digest per position, whatever held the tokens and wherever they were cut."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from kvtier.errors import ConfigError
from kvtier.tiering.chain import TOKEN_MAX, as_tokens, chain_digest

ROOT = Path(__file__).parent.parent
STREAM = np.random.RandomState(5).randint(0, 150_000, 700).tolist()

FORMS: dict[str, Callable[[list[int]], object]] = {
    "list": list,
    "tuple": tuple,
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "big endian": lambda ids: np.array(ids, ">i8"),
    "strided": lambda ids: np.repeat(np.array(ids), 2)[::2],
    "torch int64": lambda ids: torch.tensor(ids),
    "torch int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
}


@pytest.mark.parametrize("form", FORMS)
def test_digest_does_not_depend_on_the_container(form: str) -> None:
    """A074."""
    tokens = as_tokens(FORMS[form](STREAM))
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == STREAM
    # The oracle: the ids as little-endian 32-bit words, written without numpy.
    words = b"".join(each.to_bytes(4, "little") for each in STREAM)
    assert chain_digest(tokens) == xxhash.xxh3_128(words).digest()


def test_digest_is_pinned() -> None:
    assert chain_digest(as_tokens([])).hex() == "99aa06d3014798d86001c324468d497f"
    assert chain_digest(as_tokens([1, 2, 3])).hex() == "a76f94d1118f3bcfe6d1006dda205ce7"


@pytest.mark.parametrize("hash_seed", [None, "0", "7"])
def test_digest_is_the_same_in_another_process(hash_seed: str | None) -> None:
    """A074: a digest names a Segment across processes, so it may use nothing seeded per process."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    code = (
        "from kvtier.tiering.chain import as_tokens, chain_digest\n"
        f"print(chain_digest(as_tokens({STREAM!r})).hex())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == chain_digest(as_tokens(STREAM)).hex()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_digest_at_a_position_does_not_depend_on_the_cuts(seed: int) -> None:
    random = np.random.RandomState(seed)
    stream = as_tokens(STREAM)
    for _ in range(20):
        cuts = np.sort(random.choice(np.arange(1, len(stream)), random.randint(1, 9), False))
        segments = np.split(stream, cuts)
        at = int(random.randint(len(segments)))
        joined = np.concatenate(segments[: at + 1])
        assert chain_digest(joined) == chain_digest(stream[: len(joined)])


def test_every_position_has_its_own_digest() -> None:
    stream = as_tokens([7] * 64)
    digests = {chain_digest(stream[:n]) for n in range(65)}
    assert len(digests) == 65
    assert {len(each) for each in digests} == {16}


@pytest.mark.parametrize(
    "given",
    [
        [1.0, 2.0],
        [[1, 2]],
        [[1], [2, 3]],
        [-1],
        [TOKEN_MAX + 1],
        [2**70],
        [True, False],
        ["1"],
        "123",
        5,
        None,
        torch.tensor([0.5], requires_grad=True),
        torch.tensor([[1, 2]]),
    ],
    ids=repr,
)
def test_what_is_no_list_of_ids_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="token"):
        as_tokens(given)


def test_limits_are_ids() -> None:
    assert as_tokens([0, TOKEN_MAX]).tolist() == [0, TOKEN_MAX]
    assert as_tokens([]).shape == (0,)
    assert as_tokens(np.zeros(0, np.int64)).dtype == np.uint32


def test_tokens_are_a_copy() -> None:
    given = np.array([1, 2, 3], np.uint32)
    tokens = as_tokens(given)
    given[0] = 9
    assert tokens.tolist() == [1, 2, 3]
