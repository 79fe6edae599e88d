"""The file of an exported prefix: safetensors, with a head that says what it is (docs/export.md).

    8 bytes: length of the head | head: JSON, padded with spaces | tensors without gaps

The head names every tensor with its place, and in "__metadata__" what the KV is valid for. All
places follow from the Geometry and the count of tokens, so a head is read by working out what it
must say and comparing: no size is taken from the file unless the file has that many bytes.
"""

import json
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from kvtier.errors import (
    BadMagic,
    ChecksumMismatch,
    ConfigError,
    FormatError,
    VersionMismatch,
)
from kvtier.io.device import ByteArray
from kvtier.io.durability import sync_directory
from kvtier.tiering.fingerprint import Fingerprint, Provenance
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.maintenance import checked_model
from kvtier.tiering.store_files import typed

FORMAT = "kvtier prefix"
FORMAT_VERSION = 1
HEAD_BYTES_MAX = 8 << 20
"""A head of 1024 layers with the longest description that a store takes has less."""
TEXT_CHARACTERS_MAX = 256
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
TOKENS = "tokens"
_TOKEN_BYTES = 4
_CHECKSUM = "checksum"
_NO_CHECKSUM = "xxh3-128:" + "0" * 32
_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of the file. offset, nbytes: from the end of the head."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Head:
    """What an export says of itself. created: ISO 8601 in UTC. kvtier_version: of its writer."""

    name: str
    fingerprint: Fingerprint
    geometry: Geometry
    provenance: Provenance
    token_count: int
    created: str
    kvtier_version: str

    def places(self) -> list[TensorPlace]:
        """Every tensor, in the order of the file."""
        geometry, tokens = self.geometry, self.token_count
        kind, size = DTYPES[geometry.dtype], geometry.item_bytes
        found = [TensorPlace(TOKENS, "U32", (tokens,), 0, tokens * _TOKEN_BYTES)]
        for number, layer in enumerate(geometry.layers):
            for name, width in (("keys", layer.key_width), ("values", layer.value_width)):
                shape = (layer.kv_heads, tokens, width)
                offset = found[-1].offset + found[-1].nbytes
                place = TensorPlace(f"{name}.{number}", kind, shape, offset, prod(shape) * size)
                found.append(place)
        return found

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        last = self.places()[-1]
        return last.offset + last.nbytes

    def pack(self, checksum: str = _NO_CHECKSUM) -> bytes:
        """The bytes before the tensors; their number does not depend on the checksum."""
        text = _canonical(self._to_dict(checksum))
        text = text.ljust(-(-len(text) // 8) * 8)
        if len(text) > HEAD_BYTES_MAX:
            raise ConfigError(
                f"an export's head has at most {HEAD_BYTES_MAX} bytes: this fingerprint's "
                f"description makes it {len(text)} bytes"
            )
        return _LENGTH.pack(len(text)) + text

    def _to_dict(self, checksum: str) -> dict[str, Any]:
        places: dict[str, Any] = {
            each.name: {
                "dtype": each.dtype,
                "shape": list(each.shape),
                "data_offsets": [each.offset, each.offset + each.nbytes],
            }
            for each in self.places()
        }
        places["__metadata__"] = {
            "format": FORMAT,
            "format_version": str(FORMAT_VERSION),
            "kvtier_version": self.kvtier_version,
            "name": self.name,
            "created": self.created,
            "token_count": str(self.token_count),
            "provenance": self.provenance.text,
            "geometry": json.dumps(self.geometry.to_dict()),
            "fingerprint": self.fingerprint.hex,
            "description": self.fingerprint.description,
            _CHECKSUM: checksum,
        }
        return places

    def hasher(self) -> "xxhash.xxh3_128":
        """What the tensors' bytes are still to be fed to: it has this head without a checksum."""
        return xxhash.xxh3_128(_canonical(self._to_dict("")))

    @classmethod
    def parse(cls, text: bytes, path: str) -> tuple[Self, str]:
        """The head, and the checksum that it names. Raises FormatError for what no export says."""
        data, said = _split(text, path)
        try:
            version = _number(said["format_version"])
            if version != FORMAT_VERSION:
                raise VersionMismatch(
                    f"the export {path}", version, FORMAT_VERSION, "export it anew"
                )
            fingerprint, geometry = checked_model(
                bytes.fromhex(said["fingerprint"]), said["description"], said["geometry"]
            )
            head = cls(
                _text(said["name"]), fingerprint, geometry, Provenance.parse(said["provenance"]),
                _number(said["token_count"]), _text(said["created"]),
                _text(said["kvtier_version"]),
            )  # fmt: skip
            checksum = _text(said[_CHECKSUM])
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise FormatError(f"the head of {path} is damaged: {error}") from error
        head._compare({**data, "__metadata__": said}, checksum, path)
        return head, checksum

    def _compare(self, found: dict[str, Any], checksum: str, path: str) -> None:
        """Raise FormatError unless a head says exactly what this one would."""
        expected = self._to_dict(checksum)
        for name in sorted(expected.keys() - found.keys()):
            raise FormatError(f"the head of {path} is damaged: the tensor {name!r} is missing")
        for name in sorted(found.keys() - expected.keys()):
            raise FormatError(
                f"the head of {path} is damaged: an export of this model has no tensor "
                f"{name[:TEXT_CHARACTERS_MAX]!r}"
            )
        for name, value in expected.items():
            if found[name] != value:
                raise FormatError(
                    f"the head of {path} is damaged: {name!r} is {str(found[name])[:300]}, "
                    f"expected {str(value)[:300]}"
                )


def _split(text: bytes, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors that a head names, and what it says of itself. Raises BadMagic for the head of a
    file that is no export."""
    try:
        data = json.loads(text)
        said = data.pop("__metadata__")
        if said["format"] != FORMAT:
            raise LookupError("another format")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadMagic(
            f"{path} was not written by kvtier export: it has no head that says "
            f"{FORMAT!r} ({type(error).__name__})"
        ) from error
    return data, said


def _canonical(data: dict[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _number(text: Any) -> int:
    if not isinstance(text, str) or not re.fullmatch(r"[1-9][0-9]{0,12}", text, re.ASCII):
        raise ValueError(f"{str(text)[:40]!r} is no count")
    return int(text)


def _text(text: Any) -> str:
    if not isinstance(text, str) or not text.isprintable() or len(text) > TEXT_CHARACTERS_MAX:
        raise ValueError(f"{str(text)[:40]!r} is no line of text")
    return text


# ---- writing ------------------------------------------------------------------------------------


class ExportWriter:
    """Takes the tensors in the order of the file. Made by `writing`."""

    def __init__(self, head: Head, fd: int, path: str) -> None:
        self._head = head
        self._fd = fd
        self._path = path
        self._hasher = head.hasher()
        self._at = len(head.pack())

    def add(self, data: ByteArray) -> None:
        """Write the bytes of the next tensor, or of its next part."""
        self._hasher.update(data.data)
        self._write(data.data, self._at)
        self._at += data.size

    def finish(self) -> None:
        """Write the head, with the checksum, and make all of it durable."""
        head = self._head
        assert self._at == len(head.pack()) + head.tensor_bytes
        self._write(memoryview(head.pack(f"xxh3-128:{self._hasher.hexdigest()}")), 0)
        with typed(self._path):
            os.fsync(self._fd)

    def _write(self, data: memoryview, offset: int) -> None:
        with typed(self._path):
            while data.nbytes:
                written = os.pwrite(self._fd, data, offset)
                data, offset = data[written:], offset + written


@contextmanager
def writing(path: str, head: Head) -> Iterator[ExportWriter]:
    """A new export, mode 0600, that takes its name when the block ends without an exception; else
    nothing is left. An export of that name is replaced.

    Raises DeviceError, and ConfigError where `path` names something that is no export.
    """
    _require_replaceable(path)
    folder, name = os.path.split(path)
    # Nobody else has this name; it is short enough for every file system that the name fits.
    new = os.path.join(folder, f".{name[:40]}.kvtier-{secrets.token_hex(8)}")
    with typed(path):
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            writer = ExportWriter(head, fd, path)
            yield writer
            writer.finish()
        finally:
            os.close(fd)
        # Writing took its time, and another file may have come there.
        _require_replaceable(path)
        with typed(path):
            os.rename(new, path)
            sync_directory(os.path.dirname(path) or ".")
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise


def _require_replaceable(path: str) -> None:
    """Raise ConfigError where something is at `path` that does not begin like an export."""
    with typed(path):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is there and is no regular file: name another one")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        length = _head_bytes(fd, status.st_size, path)
        _split(_read(fd, path, _LENGTH.size, length).tobytes(), path)
    except FormatError as error:
        raise ConfigError(
            f"{path} exists and is no kvtier export: name another file, or delete it"
        ) from error
    finally:
        os.close(fd)


# ---- reading ------------------------------------------------------------------------------------


class ExportFile:
    """An export, open for reading. Made by `ExportFile.open`; use it as a `with` block."""

    def __init__(self, path: str, fd: int, head: Head, checksum: str, start: int) -> None:
        """start: bytes before the tensors."""
        self.path = path
        self.head = head
        self._fd = fd
        self._checksum = checksum
        self._start = start

    @classmethod
    def open(cls, path: str) -> Self:
        """Open an export and check its head. Raises FormatError, DeviceError."""
        with typed(path):
            # Without O_NONBLOCK a pipe could wait for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BadMagic(f"{path} is no regular file: name one that kvtier export wrote")
            length = _head_bytes(fd, status.st_size, path)
            head, checksum = Head.parse(_read(fd, path, _LENGTH.size, length).tobytes(), path)
            start = _LENGTH.size + length
            if start + head.tensor_bytes != status.st_size:
                raise FormatError(
                    f"{path} has {status.st_size} bytes, its head speaks of "
                    f"{start + head.tensor_bytes} bytes: it was cut off, or is not whole"
                )
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, head, checksum, start)

    def read(self, place: TensorPlace) -> ByteArray:
        """The bytes of one tensor. Raises DeviceError, FormatError where the file was cut since."""
        return _read(self._fd, self.path, self._start + place.offset, place.nbytes)

    def check(self) -> None:
        """Read all of it and compare the checksum. Raises ChecksumMismatch, DeviceError."""
        hasher = self.head.hasher()
        end = self._start + self.head.tensor_bytes
        for offset in range(self._start, end, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, end - offset)
            hasher.update(_read(self._fd, self.path, offset, size).data)
        self.compare(hasher)

    def compare(self, hasher: "xxhash.xxh3_128") -> None:
        """Raise ChecksumMismatch unless what was fed to `Head.hasher` is what was exported."""
        if f"xxh3-128:{hasher.hexdigest()}" != self._checksum:
            raise ChecksumMismatch(f"{self.path} is damaged: its checksum does not match")

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def _head_bytes(fd: int, file_bytes: int, path: str) -> int:
    """Length of the head. Raises BadMagic unless the file can have one of that length."""
    if file_bytes >= _LENGTH.size:
        (length,) = _LENGTH.unpack(_read(fd, path, 0, _LENGTH.size).tobytes())
        if 2 <= length <= min(HEAD_BYTES_MAX, file_bytes - _LENGTH.size):
            return int(length)
    raise BadMagic(
        f"{path} was not written by kvtier export: its {file_bytes} bytes do not begin with the "
        f"length of a head of at most {HEAD_BYTES_MAX} bytes"
    )


def _read(fd: int, path: str, offset: int, nbytes: int) -> ByteArray:
    data = np.empty(nbytes, np.uint8)
    view = data.data
    with typed(path):
        while view.nbytes:
            count = os.preadv(fd, [view], offset)
            if not count:
                raise FormatError(f"{path} was cut off while it was read, at byte {offset}")
            view, offset = view[count:], offset + count
    return data
