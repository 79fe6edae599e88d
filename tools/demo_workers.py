"""Starts the demo's worker processes and listens to their events."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from kvtier.errors import KvtierError
from kvtier.tools.demo_protocol import Outcome, Task
from kvtier.tools.stages import Stages
from kvtier.tools.system_errors import typed

LOG_LINES_SHOWN = 12
STOP_S_MAX = 2.0
"""An interrupted worker may take this long to remove what is half made, up to 3 GB."""


def run_worker(task: Task, log: Path, shown: Stages) -> Outcome | None:
    """Run one worker to its end; its outcome, or None from the phase that has none.

    Raises KvtierError with the worker's own message, or with the end of its log if it died.
    """
    command = [sys.executable, "-m", "kvtier.tools.demo_worker", task.to_json()]
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    outcome: Outcome | None = None
    with (
        _open_log(log) as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **quiet}, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "stage":
                    shown.say(event["content"])
                elif event["event"] == "outcome":
                    outcome = Outcome.from_dict(event["content"])
                else:
                    raise KvtierError(event["content"])
        except BaseException:
            # An error event, or an interrupt from the keyboard: no worker may outlive the demo.
            _stop(process)
            raise
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
        raise KvtierError(
            f"the demo's {task.phase} process ended with code {process.returncode}; "
            f"the end of {log}:\n{tail}"
        )
    return outcome


def _open_log(log: Path) -> BinaryIO:
    with typed(f"write the log {log}"):
        return log.open("ab")


def _stop(process: "subprocess.Popen[str]") -> None:
    """End the worker; the keyboard interrupts it too, so it may be ending by itself."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S_MAX)
    finally:
        # Also when the keyboard interrupts the waiting.
        process.kill()
        process.wait()
