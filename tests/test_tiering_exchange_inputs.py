"""Files that are no whole export: refused with a typed error, and the store is as it was."""

import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from kvtier.errors import (
    BadMagic,
    ChecksumMismatch,
    ConfigError,
    DeviceError,
    FormatError,
    KvtierError,
    VersionMismatch,
)
from kvtier.tiering.config import Config
from kvtier.tiering.exchange import import_file
from kvtier.tiering.exchange_format import HEAD_BYTES_MAX, ExportFile
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.listing import describe
from kvtier.tiering.store import Store
from tests.exchange_cases import TOKENS, Head, altered, joined, make_export, split
from tests.store_cases import KV, PLAIN, check_bytes, check_settled, open_store

FLIPS = 1000


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a whole export of 40 tokens."""
    return make_export(tmp_path_factory.mktemp("export")).read_bytes()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """An empty store, shared by tests that must leave it so."""
    path = tmp_path_factory.mktemp("target") / "store"
    with open_store(path, config=Config("4MiB", hot="4MiB")) as store:
        yield store
        check_settled(store, path)


def require_empty(store: Store) -> None:
    assert store.names() == []
    assert store.stats().segments == 0
    assert store.lookup(TOKENS) == 0


def refused(store: Store, path: Path, data: bytes, kind: type[KvtierError] = FormatError) -> str:
    """The message for this file; the store is empty before and after."""
    path.write_bytes(data)
    with pytest.raises(kind) as caught:
        import_file(store, path)
    require_empty(store)
    assert str(path) in str(caught.value) or "fingerprint" in str(caught.value)
    return str(caught.value)


def test_the_cases_are_whole(export: bytes, store: Store, tmp_path: Path) -> None:
    """Else every refusal below could be for another reason."""
    (tmp_path / "a").write_bytes(joined(*split(export)))
    with ExportFile.open(str(tmp_path / "a")) as file:
        file.check()


@pytest.mark.parametrize("seed", [1, 2])
def test_flipped_bytes_are_refused_or_exact(
    seed: int, export: bytes, store: Store, tmp_path: Path
) -> None:
    random, path, exact = np.random.default_rng(seed), tmp_path / "a", 0
    head_bytes = len(export) - len(split(export)[1])
    # Half of them in the head, which is the smaller part.
    places = [*random.integers(0, head_bytes, FLIPS // 4), *random.integers(0, len(export), 250)]
    for place in places:
        damaged = bytearray(export)
        damaged[place] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        try:
            import_file(store, path)
        except FormatError:
            continue
        exact += 1
        (name,) = store.names()
        assert name.name == "a"
        sequence = store.resume(TOKENS)
        check_bytes(store, KV(PLAIN), sequence, TOKENS)
        store.release(sequence)
        store.remove("a")
    # Blanks behind the head may become other blanks; nothing else goes unnoticed.
    assert exact <= 5
    require_empty(store)


def test_cut_anywhere(export: bytes, store: Store, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    sizes = {0, 1, 7, 8, 9, len(export) - 1, *random.integers(0, len(export), 60).tolist()}
    for size in sizes:
        refused(store, tmp_path / "a", export[:size])
    message = refused(store, tmp_path / "a", export[:-1])
    assert f"has {len(export) - 1} bytes, its head speaks of {len(export)} bytes" in message
    assert "not whole" in refused(store, tmp_path / "a", export + b"\0")


@pytest.mark.parametrize("length", [0, 1, HEAD_BYTES_MAX + 1, 2**31, 2**63, 2**64 - 1])
def test_lengths_that_cannot_be(length: int, export: bytes, store: Store, tmp_path: Path) -> None:
    data = struct.pack("<Q", length) + export[8:]
    refused(store, tmp_path / "a", data, BadMagic)


def test_a_long_head_of_a_sparse_file(store: Store, tmp_path: Path) -> None:
    """Its length is possible, and still nothing of that size is read."""
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<Q", 1 << 40))
    os.truncate(path, 1 << 41)
    with pytest.raises(BadMagic):
        import_file(store, path)
    require_empty(store)


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"\xff" * 64, b"[" * 100_000, b'{"__metadata__": 5}',
     b'{"__metadata__": {"format": "pt"}}', b'{"__metadata__": {"format": ["kvtier prefix"]}}'],
)  # fmt: skip
def test_heads_of_others(text: bytes, store: Store, tmp_path: Path) -> None:
    data = struct.pack("<Q", len(text)) + text + bytes(64)
    refused(store, tmp_path / "a", data, BadMagic)


def test_files_of_others(store: Store, tmp_path: Path) -> None:
    """Pickles, archives, and safetensors that somebody else wrote."""
    path = tmp_path / "a"
    safetensors.torch.save_file({"keys.0": torch.zeros(2, 40, 8)}, path, {"format": "pt"})
    refused(store, path, path.read_bytes(), BadMagic)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02c__builtin__\neval\n")
    refused(store, path, path.read_bytes(), BadMagic)
    refused(store, path, b"\x80\x04cos\nsystem\n(S'true'\ntR." + bytes(100), BadMagic)


def test_what_is_no_file(store: Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(BadMagic, match="no regular file"):
            import_file(store, path)
    with pytest.raises(DeviceError, match="No such file"):
        import_file(store, tmp_path / "absent")


def said(key: str, value: object) -> Callable[[Head], object]:
    """Change what the head says of itself."""
    return lambda head: head["__metadata__"].__setitem__(key, value)


def tensor(name: str, key: str, value: object) -> Callable[[Head], object]:
    """Change what the head says of one tensor."""
    return lambda head: head[name].__setitem__(key, value)


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (said("format_version", "x"), "no count"),
        (said("token_count", "41"), "'tokens' is "),
        (said("token_count", "0"), "no count"),
        (said("token_count", "9" * 13), "'tokens' is "),
        (said("token_count", 40), "no count"),
        (said("name", "a\nb"), "no line of text"),
        (said("name", "a" * 300), "no line of text"),
        (said("created", None), "no line of text"),
        (said("provenance", "guessed"), "not a provenance"),
        (said("fingerprint", "00" * 32), "is not that of its description"),
        (said("fingerprint", "zz"), "damaged"),
        (said("description", '{"model":"other"}'), "is not that of its description"),
        (said("description", "\ud800"), "is not that of its description"),
        (said("description", 7), "damaged"),
        (said("geometry", "{}"), "cannot be read"),
        (said("geometry", "["), "cannot be read"),
        (said("geometry", "[" * 100_000), "cannot be read"),
        (said("geometry", '{"dtype": "float32", "layers": [[2, 8, 8.0, null]]}'), "no whole"),
        (said("geometry", '{"dtype": "float64", "layers": [[2, 8, 8, null]]}'), "dtype"),
        (said("geometry", '{"dtype": "float32", "layers": [[2, 8, 8, null]]}'), "has no tensor"),
        (said("more", "x"), "expected"),
        (lambda head: head["__metadata__"].pop("name"), "damaged"),
        (lambda head: head["__metadata__"].pop("kvtier_version"), "damaged"),
        (lambda head: head.pop("values.1"), "'values.1' is missing"),
        (lambda head: head.__setitem__("keys.2", head["keys.1"]), "has no tensor 'keys.2'"),
        (tensor("keys.0", "dtype", "F16"), "'keys.0' is "),
        (tensor("keys.0", "dtype", "I32"), "'keys.0' is "),
        (tensor("keys.0", "shape", [2, 8, 40]), "'keys.0' is "),
        (tensor("keys.1", "shape", [2, 1 << 60, 8]), "'keys.1' is "),
        (tensor("values.1", "data_offsets", [0, 1 << 62]), "'values.1' is "),
        (tensor("tokens", "dtype", "I64"), "'tokens' is "),
    ],
)
def test_heads_that_contradict_themselves(
    alter: Callable[[Head], object], words: str, export: bytes, store: Store, tmp_path: Path
) -> None:
    """Written by somebody who knows the format: the checksum is right."""
    assert words in refused(store, tmp_path / "a", altered(export, alter))


def test_another_format_version(export: bytes, store: Store, tmp_path: Path) -> None:
    data = altered(export, said("format_version", "2"))
    message = refused(store, tmp_path / "a", data, VersionMismatch)
    assert "export it anew" in message
    assert "version 2" in message


def test_what_the_checksum_covers(export: bytes, store: Store, tmp_path: Path) -> None:
    """Everything that could be changed and still make sense."""
    head, tensors = split(export)
    for key, value in (
        ("name", "b"), ("created", "2020-01-01T00:00:00Z"), ("kvtier_version", "9"),
        ("provenance", "approximate:budget=0.5,codec=raw"), ("checksum", "xxh3-128:" + "0" * 32),
    ):  # fmt: skip
        changed = json.loads(json.dumps(head))
        changed["__metadata__"][key] = value
        text = json.dumps(changed).encode()
        data = struct.pack("<Q", len(text)) + text + tensors
        refused(store, tmp_path / "a", data, ChecksumMismatch)
    swapped = tensors[4:8] + tensors[:4] + tensors[8:]
    assert swapped != tensors
    data = export[: len(export) - len(tensors)] + swapped
    refused(store, tmp_path / "a", data, ChecksumMismatch)


def test_a_token_that_is_none(export: bytes, store: Store, tmp_path: Path) -> None:
    head, tensors = split(export)
    data = joined(head, b"\xff\xff\xff\xff" + tensors[4:])
    assert "4294967295" in refused(store, tmp_path / "a", data)


def test_shapes_that_the_description_contradicts(
    export: bytes, store: Store, tmp_path: Path
) -> None:
    """Else a file could claim the fingerprint of a model and keep the model itself from it."""
    layers = [[2, 8, 8, None], [2, 8, 8, 16]]
    real = Fingerprint.of({"geometry": {"dtype": "float32", "layers": layers}})

    def claim(head: Head) -> None:
        head["__metadata__"]["description"] = real.description
        head["__metadata__"]["fingerprint"] = real.hex

    assert "other KV shapes" in refused(store, tmp_path / "a", altered(export, claim))


def test_shapes_that_the_store_contradicts(export: bytes, tmp_path: Path) -> None:
    def widen(head: Head) -> None:
        layers = [[2, 8, 8, 16], [2, 8, 8, 16]]
        head["__metadata__"]["geometry"] = json.dumps({"dtype": "float32", "layers": layers})

    (tmp_path / "a").write_bytes(altered(export, widen))
    with open_store(tmp_path / "store", config=Config("4MiB", hot="4MiB")) as store:
        with pytest.raises(ConfigError, match="other KV shapes"):
            import_file(store, tmp_path / "a")
        assert describe(tmp_path / "store").segments == []
