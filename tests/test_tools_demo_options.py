"""What the demo refuses before it loads a model, and that demos leave one another alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvtier
from kvtier.errors import ConfigError, DeviceError, KvtierError, LockedError
from kvtier.io.lock import StoreLock
from kvtier.tools import demo_options, demo_workers
from kvtier.tools.demo_options import DemoOptions
from kvtier.tools.demo_protocol import Task
from kvtier.tools.stages import PlainStages
from kvtier.tools.system_errors import typed

ROOT = Path(__file__).parent.parent
DEADLINE_S = 60
GEOMETRY = kvtier.Geometry.uniform(2, 2, 16)
# A worker that says it is busy and stays so: the model is not needed to be interrupted.
BUSY = """
import json, sys, time
print(json.dumps({"event": "stage", "content": "busy"}), flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model_folder() -> Path:
    """Looks like a model to whoever does not load it."""
    folder = Path("model")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def demo_command(*arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "kvtier", "demo", "--model", os.fspath(model_folder())),
        *arguments,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def refused(*arguments: str) -> str:
    """Run the command; it must refuse in one line, which is returned."""
    done = subprocess.run(
        demo_command(*arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def make_store(folder: Path) -> None:
    with kvtier.open(folder, geometry=GEOMETRY, fingerprint="made-up", region="4MiB", hot="4MiB"):
        pass


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, which names its holder."""
    files = [path for path in folder.rglob("*") if path.is_file() and "lock" not in path.name]
    return {str(path): path.read_bytes() for path in files}


def test_second_demo_is_refused_and_the_first_undisturbed() -> None:
    make_store(Path("demo-out/store"))
    Path("demo-out/demo.log").write_text("of the first")
    Path("demo-out/demo.png").write_bytes(b"chart")
    before = snapshot(Path("demo-out"))
    assert len(before) >= 4
    with StoreLock.acquire(DemoOptions().lock_path):
        line = refused()
    assert f"another kvtier demo runs in demo-out: process {os.getpid()} " in line
    assert "--store" in line
    assert "--output" in line
    assert snapshot(Path("demo-out")) == before


def test_the_folder_is_free_again_when_the_demo_has_ended() -> None:
    for _ in range(2):
        with (
            demo_options.lock(DemoOptions()),
            pytest.raises(LockedError, match="another kvtier demo runs"),
        ):
            demo_options.lock(DemoOptions())


def test_demos_in_other_folders_need_not_wait() -> None:
    others = [DemoOptions(store=Path(name) / "kv", chart=Path(name) / "chart.png") for name in "ab"]
    with demo_options.lock(DemoOptions()), demo_options.lock(others[0]):
        demo_options.lock(others[1]).close()
    assert [other.log_path for other in others] == [Path("a/chart.log"), Path("b/chart.log")]


@pytest.mark.parametrize(
    "options", [DemoOptions(store=Path("kv")), DemoOptions(chart=Path("chart.png"))]
)
def test_one_option_alone_still_shares_the_demo_folder(options: DemoOptions) -> None:
    with demo_options.lock(DemoOptions()), pytest.raises(LockedError):
        demo_options.lock(options)


def test_store_that_a_process_has_open_is_not_removed() -> None:
    folder = Path("demo-out/store")
    with kvtier.open(folder, geometry=GEOMETRY, fingerprint="made-up", region="4MiB", hot="4MiB"):
        before = {path.name for path in folder.iterdir()}
        with pytest.raises(LockedError, match=str(os.getpid())):
            demo_options.remove_old_store(folder)
        assert {path.name for path in folder.iterdir()} == before
    demo_options.remove_old_store(folder)
    assert not folder.exists()


def test_options_that_can_work_are_accepted_and_nothing_is_made() -> None:
    Path("text").write_text("words")
    Path("empty").mkdir()
    make_store(Path("kv"))
    before = {str(path) for path in Path().rglob("*")}
    for store in (None, Path("kv"), Path("empty"), Path("absent")):
        demo_options.check(DemoOptions(document=Path("text"), store=store, chart=Path("x.png")))
    demo_options.check(DemoOptions(region=os.path.abspath("text")))
    # SQLite makes these to read, as for `kvtier ls`.
    beside = {f"kv/catalog.sqlite{each}" for each in ("-shm", "-wal")}
    assert {str(path) for path in Path().rglob("*")} - beside == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (DemoOptions(document=Path("absent.txt")), "cannot read the document absent.txt"),
        (DemoOptions(document=Path("picture")), "as UTF-8"),
        (DemoOptions(hot="plenty"), "hot must be a size"),
        (DemoOptions(region="1 parsec"), "region must be a size"),
        (DemoOptions(region="./absent"), "--region ./absent does not exist"),
        (DemoOptions(store=Path("thesis")), r"not empty \(found 'chapter-1'"),
        (DemoOptions(store=Path("picture")), "is a file"),
        (DemoOptions(chart=Path("absent/demo.png")), "there is no folder absent"),
        (DemoOptions(chart=Path("thesis")), "is a folder"),
    ],
)
def test_options_that_cannot_work_are_refused(options: DemoOptions, words: str) -> None:
    Path("picture").write_bytes(b"\xff\xd8\xff\xe0")
    Path("thesis").mkdir()
    Path("thesis/chapter-1").write_text("years of work")
    with pytest.raises(ConfigError, match=words):
        demo_options.check(options)


def test_store_in_use_is_refused_before_a_model_is_loaded() -> None:
    with (
        kvtier.open("kv", geometry=GEOMETRY, fingerprint="x", region="4MiB", hot="4MiB"),
        pytest.raises(LockedError, match="open for writing"),
    ):
        demo_options.check(DemoOptions(store=Path("kv")))


def test_store_that_holds_something_is_refused_before_a_model_is_loaded() -> None:
    with kvtier.open("kv", geometry=GEOMETRY, fingerprint="x", region="4MiB", hot="4MiB") as store:
        store.put_blob("mine", b"bytes")
    with pytest.raises(ConfigError, match=r"holds something already .*1 blob.*empty or new"):
        demo_options.check(DemoOptions(store=Path("kv")))


@pytest.mark.parametrize(
    "arguments",
    [("--document", "absent"), ("--region", "x"), ("--hot", "x"), ("--output", "absent/x.png")],
)
def test_refusal_is_one_line_and_makes_nothing(arguments: tuple[str, str]) -> None:
    assert arguments[0].strip("-") in refused(*arguments)
    assert not Path("demo-out").exists()


def test_folder_without_write_permission_is_one_line() -> None:
    model_folder()
    Path().chmod(0o555)
    try:
        if os.access(".", os.W_OK):
            pytest.skip("this user may write everywhere")
        assert "cannot make the folder demo-out: Permission denied" in refused()
    finally:
        Path().chmod(0o755)


def test_folder_that_cannot_be_made_is_one_line() -> None:
    # Also for root: the name is taken by a file.
    Path("demo-out").write_text("a file")
    assert "cannot make the folder demo-out: File exists" in refused()


def test_log_that_cannot_be_written_is_typed() -> None:
    task = Task("cold", None, None, "store", "1GiB", "256MiB", False)
    with pytest.raises(DeviceError, match=r"cannot write the log absent/demo\.log: No such file"):
        demo_workers.run_worker(task, Path("absent/demo.log"), PlainStages())


def test_typed_keeps_errno_and_what_is_typed_already() -> None:
    denied = PermissionError(13, "Permission denied")
    with (
        pytest.raises(DeviceError, match="cannot sing: Permission denied") as caught,
        typed("sing"),
    ):
        raise denied
    assert caught.value.errno == 13
    with pytest.raises(DeviceError, match="cannot sing: no voice"), typed("sing"):
        raise OSError("no voice")
    with pytest.raises(KvtierError) as kept, typed("sing"):
        raise LockedError("held", 11)
    assert str(kept.value) == "held"


@pytest.mark.parametrize("to_the_group", [True, False])
def test_interrupt_is_one_word_and_no_worker_stays(to_the_group: bool) -> None:
    """As from the keyboard, to all processes of the group, and as from kill -INT, to one."""
    code = (
        "import signal, sys\n"
        # A shell starts what runs in the background with this signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvtier.tools import demo_workers\n"
        "from kvtier.tools.cli import main\n"
        "sys.executable = sys.argv.pop(1)\n"
        "main()\n"
    )
    worker = Path("worker")
    worker.write_text(f"#!{sys.executable}\nopen('pid', 'w').write(str(__import__('os').getpid()))")
    with worker.open("a") as file:
        file.write(BUSY)
    worker.chmod(0o755)
    command = [sys.executable, "-c", code, os.path.abspath(worker), *demo_command()[3:]]
    with subprocess.Popen(
        command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        while "busy" not in (line := process.stderr.readline()):
            assert line, lines
            lines.append(line)
        pid = int(Path("pid").read_text())
        (os.killpg if to_the_group else os.kill)(process.pid, signal.SIGINT)
        assert process.stderr.read() == "stopped\n"
        assert process.wait(DEADLINE_S) == 130
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    demo_options.lock(DemoOptions()).close()
