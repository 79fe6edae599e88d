"""docs/field_reports.md has a row for each of 120 reports, and the tests that it names exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs" / "field_reports.md"
NUMBERS = [f"A{number:03}" for number in range(1, 121)]
ROW = re.compile(r"^\| (A\d{3}) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$")
TEST = re.compile(r"`(tests/\w+\.py)::([\w.]+)`")
STATES = ("test: ", "does not apply: ")
WAITS = "waits for GPU tiers: "

Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def rows() -> dict[str, tuple[str, str, str]]:
    """Where it was reported, the right outcome and the state, by number."""
    found: dict[str, tuple[str, str, str]] = {}
    for line in DOC.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| A\d", line):
            match = ROW.match(line)
            assert match is not None, f"not a row of four columns: {line}"
            assert match[1] not in found, f"two rows of {match[1]}"
            found[match[1]] = match[2], match[3], match[4]
    return found


@cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def nodes_of(path: str, dotted: str) -> list[Documented]:
    """The module, the class if there is one, and the test that `dotted` names in it."""
    nodes: list[Documented] = [tree_of(path)]
    for name in dotted.split("."):
        inner = [
            each
            for each in nodes[-1].body
            if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == name
        ]
        assert inner, f"{path} has no {dotted}"
        nodes.append(inner[0])
    return nodes


def problems(number: str, where: str, outcome: str, state: str) -> list[str]:
    """What is wrong with a row."""
    found = []
    if not re.search(r"\w+/[\w.-]+( PR)?#\d+", where) and not re.search(r"PR#\d+", where):
        found.append(f"no public reference: {where}")
    if len(outcome) < 8:
        found.append(f"no outcome: {outcome}")
    if not state.startswith(STATES):
        found.append(f"a state begins with one of {STATES}: {state}")
    tests = TEST.findall(state)
    if state.startswith("test: ") and not tests:
        found.append("no test is named")
    if state.count("::") != len(tests):
        found.append(f"a test is not written as `tests/file.py::name`: {state}")
    for path, dotted in tests:
        if not (ROOT / path).is_file():
            found.append(f"there is no {path}")
            continue
        texts = [ast.get_docstring(node) or "" for node in nodes_of(path, dotted)]
        if not any(re.search(rf"\b{number}\b", text) for text in texts):
            found.append(f"{path}::{dotted} does not mention {number}")
    return found


def test_every_report_has_a_row() -> None:
    assert list(rows()) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_row(number: str) -> None:
    assert problems(number, *rows()[number]) == []


def test_what_waits_has_a_test_of_what_can_be_shown_now() -> None:
    waiting = {number: state for number, (_, _, state) in rows().items() if WAITS in state}
    assert waiting, "no GPU tier is built yet"
    assert all(state.startswith("test: ") for state in waiting.values())


GOOD = (
    "a/b#1",
    "a miss or exact",
    "test: `tests/test_field_reports_doc.py::test_each_rule_can_fail`",
)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (("nowhere", *GOOD[1:]), "no public reference"),
        ((GOOD[0], "", GOOD[2]), "no outcome"),
        ((*GOOD[:2], "done"), "a state begins with"),
        ((*GOOD[:2], "test: all of them"), "no test is named"),
        ((*GOOD[:2], GOOD[2] + ", `test_x.py::y`"), "not written as"),
        ((*GOOD[:2], "test: `tests/test_gone.py::test_x`"), "there is no tests/test_gone.py"),
        ((*GOOD[:2], "test: `tests/test_field_reports_doc.py::test_row`"), "does not mention A999"),
    ],
)
def test_each_rule_can_fail(row: tuple[str, str, str], words: str) -> None:
    """The sound row names this test, which says A999."""
    assert problems("A999", *GOOD) == []
    found = problems("A999", *row)
    assert len(found) == 1, found
    assert words in found[0]


def test_a_test_that_does_not_exist_is_named() -> None:
    with pytest.raises(AssertionError, match="has no test_never_written"):
        problems("A999", *GOOD[:2], "test: `tests/test_field_reports_doc.py::test_never_written`")
