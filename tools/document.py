"""The document that the demo asks about, its three questions, and the prompts made of them.

The document comes first and the question last, so that all prompts share one long prefix.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENT_TOKENS_MAX = 2000
"""Longer documents are cut here: the demo must end within minutes on a small machine."""

SHIPPED_TOPICS = ("try", "raise")
SHIPPED_QUESTIONS = (
    "When is the else clause executed?",
    "Which exception does an empty raise re-raise?",
    "What does a bare except clause match?",
)
GENERAL_QUESTIONS = (
    "What is this text about? Answer in one sentence.",
    "How does this text begin?",
    "Which terms does this text explain?",
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text, what it is called, and three questions about it."""

    title: str
    text: str
    questions: tuple[str, ...]


def shipped() -> Document:
    """About 2,000 tokens of the Python language reference, which every Python carries."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in SHIPPED_TOPICS)
    return Document("the Python language reference on try and raise", text, SHIPPED_QUESTIONS)


def from_file(path: Path) -> Document:
    """The text of a UTF-8 file. Raises ConfigError if it cannot be read or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the document {path} as UTF-8 text: {error}") from error
    if not text.strip():
        raise ConfigError(f"the document {path} is empty ({path.stat().st_size} bytes)")
    return Document(path.name, text, GENERAL_QUESTIONS)


def prompts(document: Document, tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """The token ids of one prompt per question: the document (cut), then the question."""
    text = cut(document.text, tokenizer)
    return [prompt_of(f"{text}\n\n{question}", tokenizer) for question in document.questions]


def cut(text: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The longest beginning of `text` that has at most DOCUMENT_TOKENS_MAX tokens."""
    offsets = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)[
        "offset_mapping"
    ]
    if len(offsets) <= DOCUMENT_TOKENS_MAX:
        return text
    return text[: offsets[DOCUMENT_TOKENS_MAX - 1][1]]


def shared_prefix(rows: list[list[int]]) -> int:
    """How many tokens all rows have in common at their beginning."""
    shared = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return shared


def prompt_of(content: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The token ids of a user's message, and of what its answer begins with."""
    if tokenizer.chat_template is None:
        return list(tokenizer(f"{content}\nAnswer:", add_special_tokens=True)["input_ids"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
