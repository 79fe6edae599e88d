"""The commands kvtier hold and kvtier unhold: what stays on a full drive, and for how long."""

import shutil
import time
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.tiering.config import Config
from kvtier.tiering.listing import describe
from kvtier.tools.hold import parse_seconds
from tests.command_cases import as_json, heavy_modules, kvtier, refused
from tests.store_cases import KV, PLAIN, open_store, put, some_tokens

A, B = some_tokens(700, 1), some_tokens(900, 2)
REGION = 2 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store of "a" and "b"; its region has room for some more."""
    path = tmp_path_factory.mktemp("made") / "store"
    with open_store(path, config=Config(REGION, hot="4MiB")) as store:
        put(store, KV(PLAIN), "a", A)
        put(store, KV(PLAIN), "b", B)
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "store")


def fill(path: Path, seed: int) -> None:
    """More than the region has room for."""
    with open_store(path) as store:
        for each in range(seed, seed + 4):
            put(store, KV(PLAIN), f"filler {each}", some_tokens(1000, each))
        assert store.stats().segments_evicted > 0


def found(path: Path, tokens: list[int]) -> int:
    with open_store(path) as store:
        return store.lookup(tokens)


def test_what_is_held_stays(store: Path) -> None:
    held = as_json("hold", store, "a")
    assert held["held_until"] is None
    assert 700 * PLAIN.token_bytes < held["held_bytes"] < held["limit_bytes"]
    assert held["limit_bytes"] == ((REGION - (1 << 20)) - 4096) // 2
    assert "a is held until kvtier unhold" in kvtier("hold", store, "a").stdout
    (name,) = [each for each in describe(store).names if each.name == "a"]
    assert (name.held, name.held_until) == (True, None)
    fill(store, 100)
    assert found(store, A) == len(A)
    assert found(store, B) == 0
    assert "is not held any more" in kvtier("unhold", store, "a").stdout
    fill(store, 200)
    assert found(store, A) == 0


def test_for_a_time(store: Path) -> None:
    held = as_json("hold", store, "a", "--for", "7d")
    assert held["held_until"] is not None
    listed = as_json("ls", store)["names"]
    assert [(each["held"], each["held_until"]) for each in listed] == [
        (True, held["held_until"]),
        (False, None),
    ]
    end = time.mktime(time.strptime(held["held_until"], "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    assert abs(end - time.time() - 7 * 86400) < 120
    assert f"held until {held['held_until']}" in kvtier("ls", store).stdout
    kvtier("hold", store, "b", "--for", "0.01s")
    time.sleep(0.02)
    listed = as_json("ls", store)["names"]
    assert [(each["held"], each["held_until"]) for each in listed][1] == (False, None)


def test_all_are_let_go(store: Path) -> None:
    assert kvtier("unhold", store, "--all").stdout == "nothing was held\n"
    kvtier("hold", store, "a")
    kvtier("hold", store, "b", "--for", "2w")
    assert as_json("unhold", store, "--all") == {"unheld": ["a", "b"]}
    assert not any(each.held for each in describe(store).names)


def test_the_limit(store: Path) -> None:
    message = refused("hold", store, "a", "--limit", "64KiB")
    assert "bytes free of 65536 bytes" in message
    assert not any(each.held for each in describe(store).names)
    assert as_json("hold", store, "a", "--limit", "1MiB")["limit_bytes"] == 1 << 20


@pytest.mark.parametrize(
    "arguments",
    [
        ["hold", "absent"],
        ["hold", "a", "--for", "soon"],
        ["hold", "a", "--for", "0s"],
        ["hold", "a", "--limit", "much"],
        ["hold", "a", "--fingerprint", "ffff0000"],
        ["unhold", "absent"],
        ["unhold"],
        ["unhold", "a", "--all"],
        ["unhold", "--all", "--fingerprint", "00"],
    ],
)
def test_what_cannot_be_done(arguments: list[str], store: Path) -> None:
    command, *others = arguments
    refused(command, store, *others)
    assert not any(each.held for each in describe(store).names)


def test_no_store_and_an_open_one(store: Path, tmp_path: Path) -> None:
    assert "not a kvtier store" in refused("hold", tmp_path / "absent", "a")
    with open_store(store):
        assert "open for writing in this process" in refused("hold", store, "a")
        assert "open for writing in this process" in refused("unhold", store, "a")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), (" 12H ", 43200), ("7d", 604800), ("2w", 1209600), ("1.5h", 5400)],
)
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1y", "1d2h", "9" * 13 + "s", "\u0661s"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 90s"):
        parse_seconds(text)


def test_they_load_no_torch(store: Path) -> None:
    assert heavy_modules("hold", store, "a") == "[]"
    assert heavy_modules("unhold", store, "a") == "[]"
