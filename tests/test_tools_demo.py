"""The demo: its parts on made-up figures, all of it on a tiny random model, and on the real one."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, KvtierError
from kvtier.tools import demo, demo_options, demo_workers, document
from kvtier.tools.demo_protocol import Answered, Outcome, Task
from kvtier.tools.stages import PlainStages

ROOT = Path(__file__).parent.parent
FIGURES = {
    "model",
    "prompt_tokens",
    "prefill_s",
    "restore_s",
    "speedup",
    "identical",
    "device_bytes",
    "page_cache_bytes",
    "engine",
    "direct_io",
    "hot_bytes_max",
}
FAMILY_TREE = "Ada is the mother of Ben. Ben is the father of Cleo.\n"


def answered(**changes: Any) -> Answered:
    fields: dict[str, Any] = {
        "question": "Why?",
        "answer": "Because [of it].",
        "prompt_tokens": 2040,
        "restored_tokens": 2025,
        "first_token_s": 0.5,
        "new_tokens": 9,
        "identical": True,
    }
    return Answered(**{**fields, **changes})


def outcome(*answers: Answered) -> Outcome:
    return Outcome(
        model="made-up",
        document="a text",
        threads=1,
        answers=answers,
        kv_bytes=50_000_000,
        device_bytes=50_331_648,
        page_cache_bytes=0,
        engine="io_uring",
        direct_io=True,
        direct_io_reason="O_DIRECT works",
        hot_bytes_max=60_000_000,
        hot_limit_bytes=268_435_456,
        region_path="region",
    )


def result() -> demo.DemoResult:
    cold = outcome(answered(restored_tokens=0, first_token_s=20.0, prompt_tokens=2037))
    return demo.combine(cold, outcome(answered(), answered(first_token_s=0.25)))


def test_figures_come_from_the_first_answer_of_each_process() -> None:
    found = result()
    assert (found.prefill_s, found.restore_s, found.speedup) == (20.0, 0.5, 40.0)
    assert found.prompt_tokens == 2037
    assert found.identical
    assert set(found.to_dict()) >= FIGURES
    assert found.broken_promises() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_cache_bytes": 4096}, "4096 bytes of the region; another process"),
        ({"device_bytes": 49_999_999}, "fewer than the 50000000 bytes"),
        ({"hot_bytes_max": 268_435_457}, "over 268435456 bytes"),
        ({"questions": (answered(), answered(identical=False))}, "question 2: tokens differ"),
        ({"questions": (answered(), answered(restored_tokens=0))}, "nothing was restored"),
    ],
)
def test_broken_promise_is_named(changes: dict[str, Any], words: str) -> None:
    broken = replace(result(), **changes).broken_promises()
    assert len(broken) == 1
    assert words in broken[0]


def test_page_cache_is_no_promise_without_direct_io() -> None:
    assert replace(result(), page_cache_bytes=4096, direct_io=False).broken_promises() == []


def test_one_differing_question_makes_the_result_differ() -> None:
    cold = outcome(answered(restored_tokens=0))
    assert not demo.combine(cold, outcome(answered(), answered(identical=False))).identical


def test_task_and_outcome_survive_json() -> None:
    task = Task("cold", None, "a file", "a store", "1GiB", "256MiB", True)
    assert Task.from_json(task.to_json()) == task
    made = outcome(answered(), answered())
    assert Outcome.from_dict(json.loads(json.dumps(asdict(made)))) == made


def test_only_a_store_is_removed(tmp_path: Path) -> None:
    demo_options.remove_old_store(tmp_path / "absent")
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not a store of an earlier demo"):
        demo_options.remove_old_store(folder)
    assert (folder / "thesis.txt").exists()
    (folder / "thesis.txt").unlink()
    for name in ("store.yaml", "catalog.sqlite", "catalog.sqlite-wal", "lock", "region.kv"):
        (folder / name).write_bytes(b"")
    demo_options.remove_old_store(folder)
    assert not folder.exists()


def test_chart_is_a_png_of_its_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvtier.tools.chart import draw

    draw(result(), tmp_path / "chart.png")
    content = (tmp_path / "chart.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    assert int.from_bytes(content[16:20], "big") == 1600
    assert int.from_bytes(content[20:24], "big") == 900


def test_table_shows_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    from kvtier.tools.demo_report import show

    show(result(), Path("chart.png"))
    out = capsys.readouterr().out
    for words in (
        "20.00 s",
        "0.50 s",
        "40.0x",
        "yes",
        "50,331,648 B",
        "Because [of it].",
        "io_uring",
    ):
        assert words in out


def test_table_marks_what_the_page_cache_holds(capsys: pytest.CaptureFixture[str]) -> None:
    from kvtier.tools.demo_report import show

    show(replace(result(), page_cache_bytes=4096), Path("chart.png"))
    assert "NOT 0: 4,096 B" in capsys.readouterr().out


def test_plain_stages_do_not_repeat_percentages(capsys: pytest.CaptureFixture[str]) -> None:
    stages = PlainStages()
    for percent in range(0, 101, 10):
        stages.say(f"checking: {percent} %")
    stages.say("loading")
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_document_file_must_be_readable_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        document.from_file(tmp_path / "absent.txt")
    (tmp_path / "picture").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ConfigError, match="as UTF-8"):
        document.from_file(tmp_path / "picture")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        document.from_file(tmp_path / "empty.txt")


def test_shipped_document_is_long_enough_on_every_python() -> None:
    assert len(document.shipped().text) > 4 * document.DOCUMENT_TOKENS_MAX
    assert len(document.shipped().questions) == 3


def test_shared_prefix() -> None:
    assert document.shared_prefix([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert document.shared_prefix([[1], [2]]) == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; print('boom', file=sys.stderr); sys.exit(3)", "code 3"),
        ("import sys; print('boom', file=sys.stderr); sys.exit(3)", "boom"),
        ('print(\'{"event": "error", "content": "the region is full"}\')', "region is full"),
        ("import os; os.kill(os.getpid(), 9)", "code -9"),
    ],
)
def test_worker_that_fails_is_a_clear_error(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!{sys.executable}\n{code}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    task = Task("cold", None, None, "store", "1GiB", "256MiB", False)
    with pytest.raises(KvtierError, match=words):
        demo_workers.run_worker(task, tmp_path / "log", PlainStages())


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of two layers whose tokens are bytes, with a chat template."""
    pytest.importorskip("transformers")
    from tests.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


def run_demo(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder`, so that demo-out/ is made there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kvtier.tools.cli", "demo", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def test_whole_demo_on_a_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "family.txt").write_text(FAMILY_TREE * 10)
    arguments = ["--model", str(tiny_model), "--document", "family.txt", "--region", "64MiB"]
    arguments += ["--hot", "16MiB", "--json"]
    done = run_demo(tmp_path, *arguments, "--output", "chart.png")
    found = json.loads(done.stdout)
    assert set(found) >= FIGURES
    assert found["identical"]
    assert found["page_cache_bytes"] == 0 or not found["direct_io"]
    assert found["device_bytes"] >= found["kv_bytes"] > 0
    # 2 layers, keys and values, 2 heads of 16 floats.
    assert found["kv_bytes"] == found["prompt_tokens"] * 2 * 2 * 2 * 16 * 4
    first, second, third = found["questions"]
    assert first["restored_tokens"] == 0
    for question in (second, third):
        assert len(FAMILY_TREE) * 10 <= question["restored_tokens"] < question["prompt_tokens"]
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    # Another run on the same store, if it is named, could not start from nothing.
    refused = run_demo(tmp_path, *arguments, "--store", "demo-out/store", code=2)
    assert "holds something already" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_demo_without_a_model_says_how_to_get_one(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--model", "./absent", code=2)
    assert "Three ways to get a model" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "demo-out").exists()


@pytest.mark.model
def test_demo_on_the_real_model(tmp_path: Path) -> None:
    found = json.loads(run_demo(tmp_path, "--json").stdout)
    assert found["identical"]
    assert found["direct_io"]
    assert found["page_cache_bytes"] == 0
    assert found["speedup"] >= 20
    # 24 layers, keys and values, 2 heads of 64 floats.
    assert found["device_bytes"] >= found["prompt_tokens"] * 24 * 2 * 2 * 64 * 4
    assert found["hot_bytes_max"] <= found["hot_limit_bytes"]
    assert 1900 <= found["prompt_tokens"] <= 2100
    assert (tmp_path / "demo-out" / "demo.png").exists()
    # A region of 1 GiB is not worth keeping among pytest's old folders.
    shutil.rmtree(tmp_path / "demo-out" / "store")
