"""The command kvtier stat: what is stored, and the numbers of who has the store open."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiering import stats_file
from kvtier.tiering.config import Config
from kvtier.tiering.stats_file import STATS, LiveNumbers, read_stats
from tests.command_cases import COMMAND, ROOT, as_json, heavy_modules, kvtier, refused
from tests.store_cases import KV, PLAIN, extend, open_store, put, some_tokens

A = some_tokens(700, 1)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store of two Segments and one Blob."""
    path = tmp_path_factory.mktemp("made") / "store"
    with open_store(path, config=Config("8MiB", hot="4MiB")) as store:
        put(store, KV(PLAIN), "a", A)
        store.put_blob("key", bytes(5000))
        store.hold("a")
    return path


def test_a_closed_store_is_counted(closed: Path) -> None:
    found = as_json("stat", closed)
    catalog = found["catalog"]
    assert (catalog["segments"], catalog["tokens"], catalog["names"]) == (2, 700, 1)
    assert (catalog["blobs"], catalog["blob_bytes"], catalog["names_held"]) == (1, 5000, 1)
    assert catalog["used_bytes"] + catalog["free_bytes"] < catalog["region_bytes"]
    assert catalog["used_bytes"] > 700 * PLAIN.token_bytes + 5000
    assert (found["process"]["state"], found["process"]["pid"]) == ("closed", os.getpid())
    live = found["live"]
    assert live["kv_bytes_stored"] == 700 * PLAIN.token_bytes + 5000
    assert live["bytes_written"] > live["kv_bytes_stored"]
    text = kvtier("stat", closed).stdout
    assert f"not open; process {os.getpid()} closed it" in text
    assert "write amplification" in text


def test_it_answers_without_torch(closed: Path) -> None:
    assert heavy_modules("stat", closed) == "[]"


def test_an_open_store_shows_the_numbers_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_file, "STATS_EVERY_S", 0.0)
    with open_store(tmp_path / "s") as store:
        put(store, KV(PLAIN), "a", A)
        sequence = store.resume(A)
        before = store.stats()
        found = as_json("stat", tmp_path / "s")
        assert (found["process"]["state"], found["process"]["age_s"] < 5) == ("open", True)
        assert found["live"]["tokens_matched"] == before.tokens_matched == 700
        assert found["live"]["bytes_written"] == before.bytes_written
        assert f"open in process {os.getpid()}" in kvtier("stat", tmp_path / "s").stdout
        store.release(sequence)


def test_numbers_are_written_no_more_than_once_a_second(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.stats()
        first = (tmp_path / "s" / STATS).stat().st_ino
        for _ in range(50):
            store.stats()
        assert (tmp_path / "s" / STATS).stat().st_ino == first


def test_who_waits_for_bytes_does_not_wait_for_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s" / STATS
    with open_store(tmp_path / "s") as store:
        put(store, KV(PLAIN), "a", A)
        store._stats_file._written_at = 0.0
        path.unlink()
        sequence = store.resume(A)
        store.read(sequence, 0)
        assert not path.exists()
        store.release(sequence)
        store.stats()
        assert path.exists()


def test_who_only_reads_is_seen_to_have_it_open(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, KV(PLAIN), "a", A)
    with open_store(tmp_path / "s") as store:
        assert as_json("stat", tmp_path / "s")["process"]["state"] == "open"
        sequence = store.resume(A)
        store.read(sequence, 0)
        assert as_json("stat", tmp_path / "s")["process"]["state"] == "open"
        store.release(sequence)


def test_a_process_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; import os, sys\n"
        "from tests.store_cases import open_store\n"
        "store = open_store(Path(sys.argv[1])); store.stats(); os._exit(0)\n"
    )
    subprocess.run([COMMAND[0], "-c", code, str(tmp_path / "s")], cwd=ROOT, check=True)
    found = as_json("stat", tmp_path / "s")
    assert found["process"]["state"] == "gone"
    assert "ended" in kvtier("stat", tmp_path / "s").stdout
    path = tmp_path / "s" / STATS
    content = json.loads(path.read_text())
    # Another process has its number by now.
    path.write_text(json.dumps({**content, "pid": os.getpid()}))
    assert as_json("stat", tmp_path / "s")["process"]["state"] == "gone"
    path.write_text(json.dumps({**content, "host": "elsewhere"}))
    assert "on host elsewhere" in kvtier("stat", tmp_path / "s").stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no process has had this store open"),
        ("{", "damaged"),
        ("[" * 100_000, "damaged"),
        ('{"version": 1}', "damaged"),
    ],
)
def test_numbers_that_cannot_be_read_are_no_error(
    tmp_path: Path, content: str | None, words: str
) -> None:
    with open_store(tmp_path / "s"):
        pass
    path = tmp_path / "s" / STATS
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    found = as_json("stat", tmp_path / "s")
    assert (found["live"], found["process"]) == (None, None)
    assert words in found["why_not"]
    assert words in kvtier("stat", tmp_path / "s").stdout


@pytest.mark.parametrize(
    "damage",
    [
        {"written": 10**400},
        {"written": float("nan")},
        {"written": float("-inf")},
        {"stats": {"q_bytes": 10**400}},
        {"stats": {"q_bytes": 10**30}},
        {"stats": {"ratio": float("inf")}},
        {"stats": {"text": "\ud800"}},
        {"stats": {"a\x1b[31m": 1}},
        {"stats": {"list": [{"text": "\x9b2J"}]}},
        {"host": "\ud800"},
        {"host": "\x1b[2J"},
        {"pid": 10**400},
        {"process_started": "1"},
        {"version": ["\x1b[2J"]},
        {"store_uuid": ["\x1b[2J"]},
        {"open": "\x1b[2J"},
    ],
    ids=repr,
)
def test_contents_that_cannot_be_shown_are_damage(tmp_path: Path, damage: dict[str, Any]) -> None:
    with open_store(tmp_path / "s"):
        pass
    path = tmp_path / "s" / STATS
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    assert "damaged" in as_json("stat", tmp_path / "s")["why_not"]
    text = kvtier("stat", tmp_path / "s").stdout
    assert "damaged" in text
    assert text.replace("\n", "").isprintable()


def test_a_pipe_in_place_of_the_numbers_is_damage(tmp_path: Path) -> None:
    with open_store(tmp_path / "s"):
        pass
    (tmp_path / "s" / STATS).unlink()
    os.mkfifo(tmp_path / "s" / STATS)
    assert "damaged (it is not a regular file)" in kvtier("stat", tmp_path / "s").stdout


def test_numbers_of_a_copied_store_are_not_taken_for_its_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with open_store(tmp_path / name):
            pass
    uuid = json.loads((tmp_path / "one" / STATS).read_text())["store_uuid"]
    assert isinstance(read_stats(tmp_path / "one", uuid), LiveNumbers)
    (tmp_path / "one" / STATS).rename(tmp_path / "two" / STATS)
    assert as_json("stat", tmp_path / "two")["why_not"].endswith(f"of another store, {uuid}")


def test_watching_goes_on_until_it_is_stopped(closed: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "stat", str(closed), "--watch", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "stopped\n")
    assert lines[0]["process"]["age_s"] < lines[1]["process"]["age_s"]


def test_no_store_is_refused(tmp_path: Path) -> None:
    assert "is not a kvtier store" in refused("stat", tmp_path)


def test_a_directory_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stats_file, "STATS_EVERY_S", 0.0)
    with open_store(tmp_path / "s") as store:
        (tmp_path / "s" / STATS).unlink(missing_ok=True)
        (tmp_path / "s" / STATS).mkdir()
        (tmp_path / "s" / STATS / "something").touch()
        extend(store, KV(PLAIN), store.sequence(), A)
        store.stats()
        assert sum("is not kept up to date" in each for each in caplog.messages) == 1
        (tmp_path / "s" / STATS / "something").unlink()
        (tmp_path / "s" / STATS).rmdir()
        store.stats()
        assert (tmp_path / "s" / STATS).is_file()
