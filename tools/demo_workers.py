"""Starts the demo's worker processes and listens to their events."""

import json
import os
import subprocess
import sys
from pathlib import Path

from kvtier.errors import KvtierError
from kvtier.tools.demo_protocol import Outcome, Task
from kvtier.tools.stages import Stages

LOG_LINES_SHOWN = 12


def run_worker(task: Task, log: Path, shown: Stages) -> Outcome | None:
    """Run one worker to its end; its outcome, or None from the phase that has none.

    Raises KvtierError with the worker's own message, or with the end of its log if it died.
    """
    command = [sys.executable, "-m", "kvtier.tools.demo_worker", task.to_json()]
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    outcome: Outcome | None = None
    with (
        log.open("ab") as errors,
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
            process.terminate()
            raise
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
        raise KvtierError(
            f"the demo's {task.phase} process ended with code {process.returncode}; "
            f"the end of {log}:\n{tail}"
        )
    return outcome
