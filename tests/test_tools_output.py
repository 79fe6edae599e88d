"""Where the output of a command goes: a stdout that is closed, full, or read by nobody."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.command_cases import COMMAND, ROOT, kvtier
from tests.store_cases import KV, PLAIN, open_store, put, some_tokens

PLAN = ("plan", "--model", "Mistral-7B")


def shell(redirected: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process, its output redirected by a shell."""
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirected}', "sh", *COMMAND, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("arguments", [PLAN, (*PLAN, "--json"), ("doctor",), ("--version",)])
def test_a_closed_stdout_is_no_error(arguments: tuple[str, ...]) -> None:
    done = shell(">&-", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", [PLAN, (*PLAN, "--json"), ("devices",), ("--version",)])
def test_a_full_disk_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = shell(">/dev/full", *arguments)
    assert done.stderr == "kvtier: cannot write to stdout: No space left on device\n"
    assert done.returncode == 2


def test_who_reads_no_more_is_no_error() -> None:
    done = shell("| true", *PLAN)
    assert done.stderr == ""


def test_no_file_of_a_store_takes_the_number_of_a_closed_stdout(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, KV(PLAIN), "a", some_tokens(300, 1))
    code = (
        "import os, sys; from unittest import mock\n"
        "from kvtier.tiering import verifier; from kvtier.tools.cli import main\n"
        "def look(path): os.write(9, os.readlink('/proc/self/fd/1').encode()); sys.exit(0)\n"
        f"sys.argv = ['kvtier', 'verify', {str(tmp_path / 's')!r}]\n"
        "with mock.patch.object(verifier, 'verify', look): main()\n"
    )
    said = subprocess.run(
        ["sh", "-c", '"$@" 9>&1 >&-', "sh", COMMAND[0], "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (said.stdout, said.stderr) == (os.devnull, "")


def test_what_is_no_number_of_json_is_not_printed(tmp_path: Path) -> None:
    done = kvtier(*PLAN, "--json", "--reuses", "1e9", "--tflops", "1e-6")
    json.loads(done.stdout, parse_constant=pytest.fail)


def test_a_path_that_is_too_long_is_one_line() -> None:
    assert "File name too long" in kvtier("bench", "device", "a" * 5000, code=2).stderr
