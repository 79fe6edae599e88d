"""The tasks of `kvtier guard run`: a context, a question behind it, and the known answer.

Retrieval hides needles in documentation, as RULER does: a single one, one of several keys, one key
with several values. Extraction turns prose into JSON records of three string keys, and is scored
as Text2JSON is. Text goes on where it was cut. Everything follows from name, length and seed.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtier.tools import document
from kvtier.tools.task_texts import CITIES, FIRST_NAMES, JOBS, LAST_NAMES, WORDS, haystack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SINGLE, MULTI_KEY, MULTI_VALUE, EXTRACTION, TEXT = TASKS = (
    "single needle",
    "multi-key needle",
    "multi-value needle",
    "extraction",
    "text",
)
TOKENS_MIN = 512
"""Of a context: sink and recent tokens are most of a small budget of fewer."""
KEYS, VALUES, RECORDS_ASKED = 4, 3, 3
CONTINUED_CHARACTERS = 200
"""About 50 tokens."""
NOTES = (
    "{name}, who works as a {job}, moved to {city} some years ago after a long search.",
    "The file of {name} says that this {job} has been living in {city} since last spring.",
    "Working out of {city}, {name} has been employed as a {job} since the reorganisation.",
)

Count = Callable[[str], int]
"""How many tokens a text has."""
Role = Literal["", "value", "key"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer; a value is what was asked for, a key names it."""

    text: str
    role: Role = ""


@dataclass(frozen=True, slots=True)
class Question:
    """content: context and question; is_chat: they are put to the model as a user's message."""

    content: str
    answer: tuple[Piece, ...]
    is_chat: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """Of an answer in tokens: the first of its ids in the answer, and the one behind its last."""

    first: int
    behind: int
    role: Role


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and its answer as ids."""

    prompt: list[int]
    answer: list[int]
    parts: tuple[Part, ...]


def make(name: str, tokens: int, seed: int, count: Count) -> Question:
    """The task of this name whose context has about so many tokens."""
    chance = random.Random(f"{seed}")
    if name == EXTRACTION:
        return _extraction(tokens, chance, count)
    if name == TEXT:
        return _continuation(tokens, chance, count)
    return _retrieval(name, tokens, chance, count)


def encode(question: Question, tokenizer: "PreTrainedTokenizerBase") -> Asked:
    """In tokens. A part has all tokens that any of its characters are in."""
    if question.is_chat:
        prompt = document.prompt_of(question.content, tokenizer)
    else:
        prompt = list(tokenizer(question.content)["input_ids"])
    text = "".join(piece.text for piece in question.answer)
    found = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    offsets: list[tuple[int, int]] = found["offset_mapping"]
    parts, at = [], 0
    for piece in question.answer:
        start, at = at, at + len(piece.text)
        inside = [i for i, (a, b) in enumerate(offsets) if a < at and b > start]
        if piece.role:
            parts.append(Part(inside[0], inside[-1] + 1, piece.role))
    return Asked(prompt, list(found["input_ids"]), tuple(parts))


def text2json_score(right: Sequence[bool]) -> float:
    """0 to 1, of answers whose records are a name, and key and value twice: how many of these parts
    are right, in their order. Each name that is right counts 1, less a half for a key that is not
    and a quarter for a value; a name that is not is one more name than there should be."""
    width = 5
    assert right
    assert len(right) % width == 0
    records = [right[at : at + width] for at in range(0, len(right), width)]
    points, wrong_names = 0.0, 0
    for name, *rest in records:
        if not name:
            wrong_names += 1
            continue
        pairs = [(rest[0], rest[1]), (rest[2], rest[3])]
        points += 1 - sum(0.5 if not key else 0.25 * (not value) for key, value in pairs)
    return points / (len(records) + wrong_names)


def _retrieval(name: str, tokens: int, chance: random.Random, count: Count) -> Question:
    """One context for all three, so that a store computes it once."""
    words = chance.sample(WORDS, KEYS + 1)
    numbers = [str(each) for each in chance.sample(range(1_000_000, 9_999_999), KEYS + VALUES + 1)]
    code = numbers.pop()
    needles = list(zip([*words, *[words[KEYS]] * (VALUES - 1)], numbers, strict=True))
    chance.shuffle(needles)
    sentences = [
        f"One of the special magic numbers for {word} is: {number}." for word, number in needles
    ]
    sentences.insert(chance.randrange(len(needles)), f"The access code of the archive is: {code}.")
    begin = "Memorize the numbers that are hidden within the following text.\n\n"
    body = _filled(begin, tokens - sum(count(each) for each in sentences), chance, count)
    places = sorted(chance.choices(range(len(body) + 1), k=len(sentences)), reverse=True)
    for place, sentence in zip(places, reversed(sentences), strict=True):
        body.insert(place, sentence)
    context = begin + " ".join(body) + "\n\n"
    if name == SINGLE:
        return Question(
            f"{context}What is the access code of the archive?",
            (Piece("The access code of the archive is: "), Piece(code, "value")),
        )
    if name == MULTI_KEY:
        word, number = next(each for each in needles if each[0] != words[KEYS])
        return Question(
            f"{context}What is the special magic number for {word}?",
            (Piece(f"The special magic number for {word} is: "), Piece(number, "value")),
        )
    listed = [Piece(f"The special magic numbers for {words[KEYS]} are: ")]
    for index, number in enumerate(number for word, number in needles if word == words[KEYS]):
        listed += [Piece(", ")] if index else []
        listed.append(Piece(number, "value"))
    return Question(
        f"{context}What are the {VALUES} special magic numbers for {words[KEYS]}, in order of "
        "appearance?",
        tuple(listed),
    )


def _extraction(tokens: int, chance: random.Random, count: Count) -> Question:
    begin = "Here are notes about people.\n\n"
    names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    left = tokens - count(begin)
    records: list[dict[str, str]] = []
    notes: list[str] = []
    for name in chance.sample(names, len(names)):
        record = {"name": name, "job": chance.choice(JOBS), "city": chance.choice(CITIES)}
        note = chance.choice(NOTES).format(**record)
        left -= count(note + "\n")
        if left < 0 and len(records) >= RECORDS_ASKED:
            break
        records.append(record)
        notes.append(note)
    # Spread over the context, so that much of it has to be read.
    step = len(records) // RECORDS_ASKED
    wanted = [records[index * step + chance.randrange(step)] for index in range(RECORDS_ASKED)]
    answer = [Piece("[")]
    for number, record in enumerate(wanted):
        answer += _as_json(record, "," if number else "")
    people = ", ".join(record["name"] for record in wanted)
    content = (
        begin + "\n".join(notes) + f"\n\nWrite what the notes say about {people} as a JSON list of "
        "objects with the keys name, job and city, in this order, one object per line."
    )
    return Question(content, (*answer, Piece("\n]")))


def _as_json(record: dict[str, str], comma: str) -> list[Piece]:
    """The name's key is what makes it a record."""
    pieces = [Piece(f'{comma}\n{{"name": "'), Piece(record["name"], "value")]
    for key in ("job", "city"):
        pieces += [Piece('", "'), Piece(key, "key"), Piece('": "'), Piece(record[key], "value")]
    return [*pieces, Piece('"}')]


def _continuation(tokens: int, chance: random.Random, count: Count) -> Question:
    text = " ".join(_filled("", tokens, chance, count))
    cut = max(len(text) - CONTINUED_CHARACTERS, len(text) // 2)
    return Question(text[:cut], (Piece(text[cut:]),), is_chat=False)


def _filled(begin: str, tokens: int, chance: random.Random, count: Count) -> list[str]:
    """Sentences of about so many tokens, `begin` included."""
    left = tokens - count(begin)
    body: list[str] = []
    for sentence in haystack(chance):
        left -= count(sentence)
        if left < 0 and body:
            break
        body.append(sentence)
    return body
