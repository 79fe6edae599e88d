"""The tasks of bench/fidelity.py: a context, and questions after it whose answers are known.

Retrieval hides needles in the Python documentation, extraction turns prose into JSON records, and
text goes on where the context ends. Everything follows from name, length and seed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.tools.task_texts import CITIES, FIRST_NAMES, JOBS, LAST_NAMES, WORDS, haystack

ROOT = Path(__file__).resolve().parents[1]
DOCS = ("ARCHITECTURE.md", "field_reports.md", "guarantees.md", "performance.md")
"""This project's own: a model cannot have read them when it was trained."""
RETRIEVAL, JSON, TEXT = "retrieval", "json", "text"
NEEDLES = 8
RECORDS_ASKED = 5
RECORD_TOKENS_MIN = 20
"""A record of prose has more."""
CONTINUED_CHARACTERS = 420
"""About 100 tokens."""

SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"


RECORDS = (
    "{name}, a {age}-year-old {job}, moved to {city} some years ago after a long search for work. "
    "The office issued badge {badge}, and payroll lists a yearly salary of {salary} for this "
    "employee.",
    "The file of {name} says that this {job} lives in {city} and turned {age} last spring. A "
    "salary of {salary} was agreed on, and the front desk handed over badge {badge} on the first "
    "day.",
    "Working out of {city}, {name} ({age}) has been employed as a {job} since the reorganisation. "
    "According to the register, badge {badge} is still valid and the salary is {salary} per year.",
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer; fields are what counts."""

    text: str
    is_field: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """What follows the context, and the answer to it in pieces that are tokenised one by one."""

    text: str
    answer: tuple[Piece, ...]

    @property
    def fields(self) -> list[str]:
        return [piece.text for piece in self.answer if piece.is_field]


@dataclass(frozen=True, slots=True)
class Task:
    """A context and the questions that are asked about it, each for itself."""

    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Suffix:
    """The ids of a question and its answer: the last `answer` of them are the answer. fields: for
    each the first of its ids in the answer, and the one behind its last."""

    ids: list[int]
    answer: int
    fields: list[tuple[int, int]]


Count = Callable[[str], int]
"""How many tokens a text has."""


def make_task(name: str, tokens: int, seed: int, count: Count) -> Task:
    """The task of this name with a context of about so many tokens. Raises KeyError."""
    makers = {RETRIEVAL: _retrieval, JSON: _extraction, TEXT: _continuation}
    return makers[name](tokens, random.Random(seed), count)


def encode(question: Question, tokenizer: Any) -> Suffix:
    """In tokens, with the pieces of the answer apart, so that fields have whole tokens."""
    ids = list(tokenizer(question.text).input_ids)
    start, fields = len(ids), []
    for piece in question.answer:
        first = len(ids) - start
        ids += tokenizer(piece.text).input_ids
        if piece.is_field:
            fields.append((first, len(ids) - start))
    return Suffix(ids, len(ids) - start, fields)


def _retrieval(tokens: int, chance: random.Random, count: Count) -> Task:
    found = chance.sample(WORDS, NEEDLES)
    needles = [(word, str(chance.randint(1_000_000, 9_999_999))) for word in found]
    sentences = [f"One of the special magic numbers for {word} is: {n}." for word, n in needles]
    begin = (
        SYSTEM + "Some special magic numbers are hidden within the following text. Memorize "
        "them.\n\n"
    )
    left = tokens - count(begin) - sum(count(each) for each in sentences)
    body = []
    for sentence in haystack(chance):
        left -= count(sentence)
        if left < 0:
            break
        body.append(sentence)
    places = sorted(chance.sample(range(len(body) + 1), NEEDLES), reverse=True)
    for place, sentence in zip(places, reversed(sentences), strict=True):
        body.insert(place, sentence)
    word, number = chance.choice(needles)
    single = Question(
        f"\nWhat is the special magic number for {word} mentioned in the provided text? Answer "
        f"with the number only.{ANSWER}The special magic number for {word} is ",
        (Piece(number, True), Piece(END)),
    )
    listed: list[Piece] = []
    for word, number in needles:
        listed += [Piece(f"{word}: "), Piece(number, True), Piece("\n")]
    every = Question(
        "\nList all the special magic numbers in the text, one 'word: number' per line, in order "
        f"of appearance.{ANSWER}",
        tuple(listed),
    )
    return Task(begin + " ".join(body) + "\n", (single, every))


def _extraction(tokens: int, chance: random.Random, count: Count) -> Task:
    begin = (
        SYSTEM + "Convert the personnel notes below to JSON lines, one object per person in order "
        "of appearance, with the keys name, age, job, city, badge, salary.\n\n"
    )
    pairs = [(first, last) for first in FIRST_NAMES for last in LAST_NAMES]
    people = chance.sample(pairs, max(RECORDS_ASKED, tokens // RECORD_TOKENS_MIN))
    left = tokens - count(begin)
    records: list[dict[str, str | int]] = []
    notes: list[str] = []
    for first, last in people:
        record = _record(f"{first} {last}", chance)
        note = chance.choice(RECORDS).format(**record) + "\n"
        left -= count(note)
        if left < 0 and len(records) >= RECORDS_ASKED:
            break
        records.append(record)
        notes.append(note)
    answer: list[Piece] = []
    for record in records[:RECORDS_ASKED]:
        answer += _as_json(record)
    question = Question(f"\nNow write the JSON lines.{ANSWER}", tuple(answer))
    return Task(begin + "".join(notes), (question,))


def _record(name: str, chance: random.Random) -> dict[str, str | int]:
    letter = chance.choice("ABCDEFGHKMPRST")
    return {
        "name": name,
        "age": chance.randint(22, 79),
        "job": chance.choice(JOBS),
        "city": chance.choice(CITIES),
        "badge": f"{chance.randint(100, 999)}-{letter}{chance.randint(10, 99)}",
        "salary": chance.randint(21, 98) * 1000 + chance.choice((0, 250, 500, 750)),
    }


def _as_json(record: dict[str, str | int]) -> list[Piece]:
    """One line; values are fields, quotes and keys are not."""
    pieces = [Piece("{")]
    for index, (key, value) in enumerate(record.items()):
        quote = '"' if isinstance(value, str) else ""
        comma = ", " if index else ""
        pieces += [Piece(f'{comma}"{key}": {quote}'), Piece(str(value), True)]
        pieces += [Piece(quote)] if quote else []
    return [*pieces, Piece("}\n")]


def _continuation(tokens: int, chance: random.Random, count: Count) -> Task:
    """Documentation from a random place on, beginning again where it ends."""
    text = " ".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in DOCS)
    parts = text.split(" ")
    start = chance.randrange(len(parts))
    parts = parts[start:] + parts[:start]
    kept, left = 0, tokens
    while left > 0 and kept < len(parts):
        more = parts[kept : kept + 64]
        left -= count(" ".join(more))
        kept += len(more)
    after = " " + " ".join(parts[kept:])[:CONTINUED_CHARACTERS]
    return Task(" ".join(parts[:kept]), (Question("", (Piece(after),)),))
