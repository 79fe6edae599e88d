"""Exported prefixes for tests: made, taken apart, altered, put together with a right checksum."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from kvtier.tiering.exchange import export_name
from tests.store_cases import KV, PLAIN, open_store, put, some_tokens

Head = dict[str, Any]
TOKENS = some_tokens(40, 1)


def make_export(folder: Path, tokens: list[int] = TOKENS) -> Path:
    """An export of "a", of a store that is not needed any more."""
    with open_store(folder / "source") as store:
        put(store, KV(PLAIN), "a", tokens)
        export_name(store, "a", folder / "a.kv")
    return folder / "a.kv"


def split(data: bytes) -> tuple[Head, bytes]:
    """Head and tensors of an export."""
    (length,) = struct.unpack_from("<Q", data)
    head: Head = json.loads(data[8 : 8 + length])
    return head, data[8 + length :]


def joined(head: Head, tensors: bytes) -> bytes:
    """An export as somebody would write it who knows the format: its checksum is right."""
    head["__metadata__"]["checksum"] = ""
    hasher = xxhash.xxh3_128(_text(head))
    hasher.update(tensors)
    head["__metadata__"]["checksum"] = f"xxh3-128:{hasher.hexdigest()}"
    text = _text(head)
    return struct.pack("<Q", len(text)) + text + tensors


def _text(head: Head) -> bytes:
    return json.dumps(head, sort_keys=True, separators=(",", ":")).encode()


def altered(data: bytes, alter: Callable[[Head], object]) -> bytes:
    """An export whose head was changed by `alter`, with a right checksum."""
    head, tensors = split(data)
    alter(head)
    return joined(head, tensors)
