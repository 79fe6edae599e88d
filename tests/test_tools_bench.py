"""The form of benchmarks: which bars fall short, what is written, and that nothing stays behind."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.tools import bench_rig
from kvtier.tools.bench_form import Bench
from kvtier.tools.bench_rig import BLKIO, MEMORY, interleave, loop_device, memory_limit, throttled

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="cgroups and loop devices need root")


def bench(*arguments: str) -> Bench:
    made = Bench("example", "What is asked.")
    made.options(arguments)
    return made


@pytest.mark.parametrize(
    ("value", "higher", "code", "verdict"),
    [
        (2.0, True, 0, "aim"),
        (1.2, True, 0, "bar"),
        (0.9, True, 1, "SHORT"),
        (0.5, False, 0, "aim"),
        (1.0, False, 0, "bar"),
        (1.1, False, 1, "SHORT"),
    ],
)
def test_a_bar_that_falls_short_is_the_exit_code(
    value: float, higher: bool, code: int, verdict: str
) -> None:
    made = bench()
    aim = 1.5 if higher else 0.7
    made.bar("speed", value, bar=1.0, aim=aim, unit="x", higher_is_better=higher)
    assert made.bars[0].verdict == verdict
    assert made.finish() == code


def test_what_was_not_measured_is_short_unless_it_is_optional(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = bench()
    made.missing("a peer", "it cannot be installed here", optional=True)
    assert made.finish() == 0
    made.missing("the rest", "no root")
    assert made.finish() == 1
    printed = capsys.readouterr().out
    assert "not measured" in printed
    assert "no root" in printed


def test_json_and_chart(tmp_path: Path) -> None:
    made = bench("--quick", "--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png"))
    made.samples("kvtier", [1.0, 2.0], unit="MB/s")
    made.table("a table", ["what", "MB/s"], [["kvtier", 2]])
    made.bar("speed", 2.0, bar=1.0, aim=1.5, unit="x")
    assert made.finish() == 0
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["bars"][0]["name"] == "speed"
    assert written["bars"][0]["value"] == 2.0
    assert written["samples"]["kvtier"]["values"] == [1.0, 2.0]
    assert written["machine"]["cores"] == os.cpu_count()
    assert written["quick"] is True
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_methods_take_turns_and_both_directions() -> None:
    order: list[str] = []

    def method(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = interleave({"a": lambda: method("a"), "b": lambda: method("b")}, rounds=2, pause_s=0)
    assert order == ["a", "b", "b", "a"]
    assert found == {"a": [1.0, 4.0], "b": [2.0, 3.0]}


@pytest.mark.loop
@root_only
def test_a_throttled_device_has_the_rate_asked_for() -> None:
    if not BLKIO.exists():
        pytest.skip("no block I/O controller of cgroup v1")
    with loop_device(None, 24 << 20) as device:
        command = ["dd", f"if={device}", "of=/dev/null", "bs=1M", "iflag=direct"]
        begun = time.monotonic()
        with throttled({device: 16 << 20}):
            subprocess.run(command, check=True, capture_output=True)
        # The controller lets a first slice through at once.
        assert time.monotonic() - begun > 0.9
    attached = subprocess.run(["losetup", "--list"], capture_output=True, text=True, check=True)
    assert f"{device} " not in attached.stdout
    assert not list(BLKIO.glob(f"kvtier-bench-{os.getpid()}-*"))


@root_only
def test_a_memory_limit_holds_for_what_runs_in_it() -> None:
    if not (MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip("no memory controller of cgroup v1")
    script = "import sys; data = bytearray(int(sys.argv[1]) << 20); print(len(data))"
    with memory_limit(96 << 20) as group:
        fits = group.run(["python3", "-c", script, "32"])
        assert fits.stdout.strip() == str(32 << 20)
        assert group.used_bytes_max >= 32 << 20
        assert group.run(["python3", "-c", script, "192"]).returncode != 0
    assert not group.path.exists()


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root"):
        bench_rig.drop_caches()
