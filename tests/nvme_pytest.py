"""Runs inside the virtual machine of `nvme_machine.py`: pytest, on the files and tests named.

`python nvme_pytest.py FILE[::CLASS]...` prints one line of JSON: the outcome of every test, and
what is to be read of those that did not pass.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest

ROOT = Path(__file__).parent.parent


class Outcomes:
    """A plugin of pytest that keeps what became of every test."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.others: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.others[report.nodeid] = f"{report.when} {report.outcome}: {report.longrepr}"
        elif report.when == "call":
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.others[report.nodeid] = str(report.longrepr)


if __name__ == "__main__":
    # The line of JSON alone may go to the first of these; pytest and its children say much.
    answers = os.dup(1)
    os.dup2(2, 1)
    outcomes = Outcomes()
    names = [str(ROOT / "tests" / name) for name in sys.argv[1:]]
    pytest.main([*names, "-q", "--tb=short", "-p", "no:cacheprovider"], plugins=[outcomes])
    answer = {"passed": outcomes.passed, "others": outcomes.others}
    os.write(answers, json.dumps(answer).encode() + b"\n")
