"""The bytes of digests in an Extent, and what its header says of them: any other is refused."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import ChecksumMismatch, FormatError
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.tiering import digest_section, extent_format
from kvtier.tiering.digest_section import HEAD_BYTES, DigestHead
from kvtier.tiering.extent_format import DigestSection
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.geometry import Geometry, LayerGeometry
from kvtier.tiering.stored_digests import DigestKind
from tests.rebuild_cases import peek
from tests.store_cases import (
    KV,
    open_store,
)
from tests.stored_digest_cases import (
    KINDS,
    REOPENED,
    WIDE,
    arrays,
    same,
    unit_of,
    written,
)

# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", KINDS)
@pytest.mark.parametrize("tokens", [1, 16, 17, 505, 512])
def test_what_was_packed_is_unpacked(bits: int | None, tokens: int) -> None:
    shapes = (LayerGeometry(2, 64, 64), LayerGeometry(3, 80, 24), LayerGeometry(1, 5, 7))
    kind = DigestKind(Geometry(shapes, "float16"), bits)
    generator = torch.Generator().manual_seed(tokens)
    for layer, shape in enumerate(shapes):
        keys, values = (
            torch.randn(shape.kv_heads, tokens, width, generator=generator).half()
            for width in (shape.key_width, shape.value_width)
        )
        digests, unit = kind.make(keys, values), unit_of(layer, tokens)
        section = kind.section(layer, tokens)
        assert section == DigestSection(digests.held_bytes + HEAD_BYTES, bits or 0, int(bool(bits)))
        block = np.full(section.nbytes + 100, 0xEE, np.uint8)
        kind.pack(digests, unit, block[: section.nbytes])
        assert (block[section.nbytes :] == 0xEE).all()
        found = kind.unpack(block, unit, "here")
        assert found is not None
        assert same(found, digests)
        assert digest_section.parse(block, 77, "here") == DigestHead(section, layer, tokens)
        assert DigestKind(kind.geometry, 4 if bits == 2 else 2).unpack(block, unit, "x") is None
        for other in (unit_of(layer, tokens, 78), unit_of((layer + 1) % 3, tokens)):
            with pytest.raises(ChecksumMismatch, match="here: the digests are"):
                kind.unpack(block, other, "here")


@pytest.mark.parametrize("bits", KINDS)
def test_every_flipped_byte_of_a_section_is_detected(bits: int | None) -> None:
    kind = DigestKind(Geometry.uniform(1, 1, 8), bits)
    unit, section = unit_of(0, 20), kind.section(0, 20)
    block = np.zeros(section.nbytes, np.uint8)
    kind.pack(kind.make(torch.randn(1, 20, 8), torch.randn(1, 20, 8)), unit, block)
    for at in range(block.size):
        damaged = block.copy()
        damaged[at] ^= 0x10
        with pytest.raises(ChecksumMismatch):
            kind.unpack(damaged, unit, "here")
    for size in (0, HEAD_BYTES - 1, block.size - 1):
        with pytest.raises(ChecksumMismatch):
            kind.unpack(block[:size], unit, "here")


def test_the_bytes_of_a_section_are_what_they_always_were() -> None:
    """As docs/format.md lists them: head, words, low, step, centre, factors, means, codes."""
    kind = DigestKind(Geometry.uniform(1, 1, 4), 2)
    digests = kind.make(torch.ones(1, 17, 4), torch.ones(1, 17, 4))
    for number, each in enumerate(arrays(digests).values()):
        each.view(-1).copy_(torch.arange(each.numel()) + 10 * number)
    block = np.zeros(kind.section(0, 17).nbytes, np.uint8)
    kind.pack(digests, unit_of(0, 17), block)
    names: Mapping[str, torch.Tensor] = arrays(digests)
    order = ("words", "low", "step", "centre", "key_factors", "value_factors", "key_means",
             "value_means", "codes")  # fmt: skip
    listed = b"".join(names[name].numpy().tobytes() for name in order)
    assert block[HEAD_BYTES:].tobytes() == listed
    assert block[8:HEAD_BYTES].tobytes() == struct.pack("<IIHBB4x", block.size, 0, 17, 2, 1)
    assert int(block[:8].view("<u8")[0]) == extent_format.checksum(block[8:], 77)


@pytest.mark.parametrize(("bits", "percent"), [(None, 6.5), (2, 14), (3, 14)])
def test_digests_are_a_small_part_of_the_kv(bits: int | None, percent: float) -> None:
    for width in (64, 80, 96, 128):
        geometry = Geometry.uniform(1, 8, width, dtype="bfloat16")
        nbytes = DigestKind(geometry, bits).section(0, 512).nbytes
        assert 100 * align_up(nbytes, GRID_BYTES) / geometry.payload_bytes(0, 512) < percent


@pytest.fixture
def stored(tmp_path: Path) -> KV:
    return written(tmp_path)


# ---- headers ------------------------------------------------------------------------------------


def header_of(path: Path, geometry: Geometry) -> tuple[np.ndarray[Any, Any], Unit]:
    with open_store(path, geometry, REOPENED) as store:
        segment = next(iter(store._registry.committed.values()))
        extent = segment.extents[1]
        assert extent is not None
        block = np.frombuffer(peek(path, extent), np.uint8).copy()
        return block, Unit(segment, 1)


def test_a_header_names_its_digests(stored: KV, tmp_path: Path) -> None:
    block, unit = header_of(tmp_path, WIDE)
    header = extent_format.parse_header(block, "here")
    assert header.digests == DigestKind(WIDE, 3).section(1, unit.segment.token_count)
    assert header.digests_at + align_up(header.digests.nbytes, GRID_BYTES) == block.size
    assert block[8:12].tobytes() == b"\x02\0\0\0"


@pytest.mark.parametrize(
    ("at", "value"),
    [(8, 1), (124, 0), (127, 255), (182, 1), (182, 5)],
    ids=["older version", "no bytes", "too many", "one bit", "five bits"],
)
def test_impossible_digests_are_refused_whatever_the_checksum(
    at: int, value: int, stored: KV, tmp_path: Path
) -> None:
    block, _ = header_of(tmp_path, WIDE)
    if at == 124:
        block[124:128] = 0
    block[at] = value
    block[248:256] = 0
    size = int(block[12:16].view("<u4")[0])
    block[248:256] = np.array([extent_format.checksum(block[:size], 0)], "<u8").view(np.uint8)
    with pytest.raises(FormatError, match="contradicts itself"):
        extent_format.parse_header(block, "here")
