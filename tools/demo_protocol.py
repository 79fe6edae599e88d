"""What the demo's parent and its worker processes say to each other: a task, then events.

The task is one JSON argument. Each event is one line of JSON on the worker's standard output.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["prepare", "cold", "restored"]


@dataclass(frozen=True, slots=True)
class Task:
    """One worker process's work.

    prepare: convert the model if it has to be. cold: answer question 1 from nothing and save.
    restored: restore what cold saved and answer questions 2 and 3.
    """

    phase: Phase
    model: str | None
    document: str | None
    store: str
    region: str
    hot: str
    force: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Answered:
    """One question, answered through kvtier and compared with DynamicCache.

    first_token_s: seconds from before the cache is made (which restores what is stored) until
    the first new token is there. restored_tokens: how many of prompt_tokens came from the store.
    """

    question: str
    answer: str
    prompt_tokens: int
    restored_tokens: int
    first_token_s: float
    new_tokens: int
    identical: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cold or restored worker found. Sizes are bytes.

    kv_bytes: keys and values of question 1's prompt, as DynamicCache holds them.
    page_cache_bytes: bytes of the region in the page cache after the answers.
    """

    model: str
    document: str
    threads: int
    answers: tuple[Answered, ...]
    kv_bytes: int
    device_bytes: int
    page_cache_bytes: int
    engine: str
    direct_io: bool
    direct_io_reason: str
    hot_bytes_max: int
    hot_limit_bytes: int
    region_path: str

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Outcome":
        answers = tuple(Answered(**answer) for answer in fields["answers"])
        return cls(**{**fields, "answers": answers})
