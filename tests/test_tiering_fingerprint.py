"""Fingerprint and Provenance: what makes KV valid, and how it came about."""

import hashlib
import math

import pytest

from kvtier.errors import ConfigError
from kvtier.tiering.extent_format import HEADER
from kvtier.tiering.fingerprint import EXACT, PROVENANCE_BYTES, Fingerprint, Provenance
from kvtier.tiering.prefix_index import PrefixIndex


def test_digest_is_that_of_canonical_json() -> None:
    made = Fingerprint.of({"b": [1, 2.5, None], "a": {"y": True, "x": "\u00e9"}})
    assert made.description == '{"a":{"x":"\\u00e9","y":true},"b":[1,2.5,null]}'
    assert made.digest == hashlib.sha256(made.description.encode()).digest()
    assert made.hex == made.digest.hex()


def test_order_of_keys_does_not_matter() -> None:
    one = {"a": 1, "b": {"c": 2, "d": 3}}
    other = {"b": {"d": 3, "c": 2}, "a": 1}
    assert Fingerprint.of(one) == Fingerprint.of(other)


@pytest.mark.parametrize(
    "changed",
    [
        {"a": 2, "b": [1, 2]},
        {"a": 1, "b": [2, 1]},
        {"a": "1", "b": [1, 2]},
        {"a": 1.0000000000000002, "b": [1, 2]},
        {"a": True, "b": [1, 2]},
        {"a": 1, "b": [1, 2], "c": None},
    ],
)
def test_every_difference_changes_the_digest(changed: dict[str, object]) -> None:
    assert Fingerprint.of(changed).digest != Fingerprint.of({"a": 1, "b": [1, 2]}).digest


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        b"bytes",
        {1, 2},
        object(),
        {1: "an int as a key"},
        [{None: 0}],
        ({True: 0},),
    ],
    ids=repr,
)
def test_what_is_not_plain_json_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="fingerprint"):
        Fingerprint.of({"value": {"inner": value}})


def test_keys_that_json_would_write_alike_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 1"):
        Fingerprint.of({"a": {1: "x"}})
    Fingerprint.of({"a": {"1": "x"}})


@pytest.mark.parametrize("budget", [1.0, 0.125, 1e-9])
@pytest.mark.parametrize("codec", ["raw", "exact", ""])
def test_approximate_never_equals_exact(budget: float, codec: str) -> None:
    made = Provenance.approximate(budget, codec)
    assert made != EXACT
    assert hash(made) != hash(EXACT)
    assert made.text != EXACT.text
    assert Provenance.parse(made.text) == made


def test_exact_is_exact() -> None:
    assert EXACT.text == "exact"
    assert Provenance.parse("exact") == EXACT


def test_budgets_that_differ_never_share_a_text() -> None:
    one = Provenance.approximate(0.1234567, "raw")
    assert one != Provenance.approximate(0.12345671, "raw")
    assert Provenance.approximate(1, "raw") == Provenance.approximate(1.0, "raw")


@pytest.mark.parametrize("budget", [math.nan, 0.0, -0.5, 1.5, math.inf])
def test_impossible_budgets_are_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match="budget"):
        Provenance.approximate(budget, "raw")


@pytest.mark.parametrize(
    "text",
    ["", "Exact", "exact ", " exact", "exact\0", "approximately", "approximate:\0", "ex\xe4ct"],
)
def test_other_texts_are_no_provenance(text: str) -> None:
    with pytest.raises(ConfigError, match="provenance"):
        Provenance.parse(text)
    with pytest.raises(ConfigError, match="provenance"):
        Provenance(text)


def test_text_that_no_header_can_hold_is_refused() -> None:
    longest = "approximate:" + "x" * (PROVENANCE_BYTES - len("approximate:"))
    assert Provenance(longest).text == longest
    with pytest.raises(ConfigError, match="57 bytes"):
        Provenance(longest + "x")
    assert f"{PROVENANCE_BYTES}s" in HEADER.format


def test_provenances_have_indexes_of_their_own() -> None:
    # The committer keeps one PrefixIndex per Provenance: as keys they must not collide.
    indexes = {EXACT: PrefixIndex()}
    assert Provenance.approximate(0.5, "raw") not in indexes
    assert Provenance.parse("exact") in indexes
