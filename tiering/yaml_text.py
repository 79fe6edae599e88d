"""YAML that a person may have changed: parsed, or a ValueError that says where it is wrong.

What stands there is never said: the file may be another one than it should be.
"""

from typing import Any

import yaml


def parse_yaml(data: bytes) -> Any:
    """Raises ValueError for what is no YAML."""
    try:
        return yaml.safe_load(data.decode())
    except (
        yaml.YAMLError, LookupError, AttributeError, TypeError, ValueError, RecursionError
    ) as error:  # fmt: skip
        raise ValueError(f"{type(error).__name__}{_position(error)}") from error


def _position(error: Exception) -> str:
    """Where in the text a parser stopped, in words."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f" at line {mark.line + 1}, column {mark.column + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f" at byte {error.start}"
    if isinstance(error, yaml.reader.ReaderError):
        return f" at character {error.position}"
    return ""
