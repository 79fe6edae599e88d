"""The on-disk format, pinned: fixed inputs give exactly the stored bytes, and those are read back.

A failure here means that the bytes on the device changed. If that was meant, raise FORMAT_VERSION
and make the images anew (`tests/golden_cases.py` says how); if not, it is a bug: every store in
the field would become unreadable.
"""

import hashlib
import json
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvtier.io.allocator import SpreadAllocator
from kvtier.io.buffers import BufferPool
from kvtier.io.device import Buffers, Device, Int64Array, PendingBatch, Priority
from kvtier.io.extent import Extent
from kvtier.io.superblock import DATA_START, Superblock
from kvtier.tiering import extent_format
from kvtier.tiering.chain import chain_digest
from kvtier.tiering.clusterer import Placement, UnitKeys
from kvtier.tiering.drive_space import DriveSpace
from kvtier.tiering.extent_io import ExtentIO, Owner, Unit
from kvtier.tiering.extent_writer import ExtentWriter, UnitWrite
from kvtier.tiering.fingerprint import Provenance
from kvtier.tiering.frames import MemoryTier
from kvtier.tiering.geometry import PAGE_TOKENS
from kvtier.tiering.packing import TORCH_DTYPES, gather, scatter
from kvtier.tiering.page_layout import Order, PageLayout
from kvtier.tiering.residency import Residency
from kvtier.tiering.segment import Segment, SegmentView
from kvtier.tiering.started_writes import StartedWrites
from tests import golden_cases
from tests.golden_cases import CASES, Case

UNITS = [
    pytest.param(case, layer, id=f"{case.name}-{layer}")
    for case in CASES
    for layer in range(len(case.geometry.layers))
]
WHOLE = [pytest.param(case, id=case.name) for case in CASES if case.whole_layer is not None]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def in_order(rows: torch.Tensor, order: Order | None) -> bytes:
    """Rows [heads, tokens, width] as an Extent keeps them: the token at each place."""
    if order is not None:
        rows = torch.stack([rows[head, order[head]] for head in range(len(order))])
    return raw(rows)


def test_the_kept_digests_are_those_of_the_cases() -> None:
    kept = json.loads(golden_cases.DIGESTS.read_text())
    assert {name: len(each) for name, each in kept.items()} == {
        case.name: len(case.geometry.layers) for case in CASES
    }
    widths = {case.geometry.layers[0].key_width for case in CASES}
    assert {64, 80, 96, 256, 576} <= widths
    files = sorted(path.name for path in golden_cases.FOLDER.iterdir())
    assert len(files) == 4
    assert all(
        path.stat().st_size <= golden_cases.IMAGE_BYTES_MAX
        for path in golden_cases.FOLDER.iterdir()
    )


@pytest.mark.parametrize(("case", "layer"), UNITS)
def test_image_is_what_it_always_was(case: Case, layer: int) -> None:
    kept = json.loads(golden_cases.DIGESTS.read_text())
    image = golden_cases.image_of(case, layer)
    assert hashlib.sha256(image).hexdigest() == kept[case.name][layer]


@pytest.mark.parametrize(("case", "layer"), UNITS)
def test_image_gives_back_what_it_was_made_of(case: Case, layer: int) -> None:
    check_reading(case, layer, golden_cases.image_of(case, layer))


@pytest.mark.parametrize("case", WHOLE)
def test_stored_file_is_made_again_bit_for_bit(case: Case) -> None:
    assert case.whole_layer is not None
    stored = golden_cases.image_path(case).read_bytes()
    assert golden_cases.image_of(case, case.whole_layer) == stored
    check_reading(case, case.whole_layer, stored)


def check_reading(case: Case, layer: int, image: bytes) -> None:
    block = np.frombuffer(image, np.uint8).copy()
    shape = case.geometry.layers[layer]
    header = extent_format.parse_header(block, "golden")
    assert header.identity == case.identity(layer)
    extent_format.require_identity(header, case.identity(layer), "golden")
    assert header.geometry == shape
    assert (header.dtype, header.layers) == (case.geometry.dtype, len(case.geometry.layers))
    if layer == 0:
        assert header.tokens is not None
        assert header.tokens.tolist() == case.stream[case.start :].tolist()
    else:
        assert header.tokens is None
    layout = PageLayout(shape, case.tokens, case.geometry.item_bytes)
    layout.require_raw(header.directory, "golden")
    order = layout.order_of(header.directory)
    expected_order = case.order(layer)
    assert (order is None) == (expected_order is None)
    assert order is None or expected_order is None or (order == expected_order).all()
    payload = block[header.header_bytes :][: header.payload_bytes]
    assert not block[header.header_bytes + header.payload_bytes :].any()
    assert extent_format.damaged_pages(header.directory, payload, case.generation) == []
    assert extent_format.checksum(payload, case.generation) == header.payload_checksum
    heads, pages = shape.kv_heads, layout.pages
    dtype = TORCH_DTYPES[case.geometry.dtype]
    pool = torch.zeros(heads * pages, PAGE_TOKENS * shape.row_width, dtype=dtype)
    frames = torch.arange(heads * pages).view(heads, pages)
    scatter(torch.from_numpy(payload).view(dtype), layout, pool, frames)
    keys, values = gather(pool, frames, shape, case.tokens)
    assert raw(keys) == in_order(case.bits(layer, False), order)
    assert raw(values) == in_order(case.bits(layer, True), order)


@pytest.mark.parametrize("case", WHOLE)
def test_stored_file_read_with_nothing_but_the_documented_offsets(case: Case) -> None:
    """A second reader, that shares no code with the first: what docs/format.md says is enough."""
    layer = case.whole_layer
    assert layer is not None
    image = golden_cases.image_path(case).read_bytes()
    shape, item = case.geometry.layers[layer], case.geometry.item_bytes

    def number(offset: int, size: int) -> int:
        return int.from_bytes(image[offset : offset + size], "little")

    assert (image[:8], number(8, 4)) == (b"KVTIEREX", 1)
    head, pages, stored = number(12, 4), number(172, 4), number(176, 4)
    assert image[16:32] == golden_cases.STORE_UUID
    assert image[32:64] == golden_cases.FINGERPRINT
    assert image[80:96] == chain_digest(case.stream)
    assert (number(96, 8), number(112, 8)) == (case.generation, len(image))
    assert (number(136, 8), number(144, 4)) == (case.start, layer)
    assert (number(152, 4), number(156, 4), number(160, 4)) == (
        shape.kv_heads, shape.key_width, shape.value_width,
    )  # fmt: skip
    assert image[184:240].rstrip(b"\0").decode() == case.provenance
    assert stored == (case.tokens if layer == 0 else 0)
    tokens_at = 256 + 56 * pages
    tokens = struct.unpack_from(f"<{stored}I", image, tokens_at)
    assert list(tokens) == case.stream[case.start :].tolist()[:stored]
    seen = set()
    keys, values = case.bits(layer, False), case.bits(layer, True)
    for page in range(pages):
        at = 256 + 56 * page
        offset, length = number(at, 4), number(at + 4, 4)
        count, head_group = number(at + 16, 2), number(at + 18, 2)
        assert length == count * shape.row_width * item
        start = head + offset
        for slot in range(count):
            token = number(at + 24 + 2 * slot, 2)
            row = start + slot * shape.key_width * item
            assert image[row : row + shape.key_width * item] == raw(keys[head_group, token])
            row = start + (count * shape.key_width + slot * shape.value_width) * item
            assert image[row : row + shape.value_width * item] == raw(values[head_group, token])
            seen.add((head_group, token))
        assert all(number(at + 24 + 2 * slot, 2) == 0xFFFF for slot in range(count, 16))
    assert len(seen) == shape.kv_heads * case.tokens


def test_superblock_is_what_it_always_was() -> None:
    stored = golden_cases.SUPERBLOCK.read_bytes()
    assert golden_cases.superblock().pack() == stored
    assert Superblock.parse(stored) == golden_cases.superblock()
    layout = struct.unpack_from("<8sIIQ16sQQQI", stored)
    assert layout == (
        b"KVTIERSB", 1, 512, 3, golden_cases.STORE_UUID, 1_700_000_000, 4 << 30, 1 << 20, 4096,
    )  # fmt: skip
    assert not any(stored[68:4088])


class MemoryDevice(Device):
    """A device of zeros in memory, from byte DATA_START on."""

    engine = "memory"
    path = "memory"
    direct_io = False
    direct_io_reason = "memory"
    block_bytes = 4096

    def __init__(self, nbytes: int) -> None:
        self.capacity_bytes = DATA_START + nbytes
        self.bytes = np.zeros(nbytes, np.uint8)

    def read(
        self, offsets: Int64Array, buffers: Buffers, priority: Priority = Priority.DEMAND
    ) -> None:
        self.check(offsets, buffers)
        for offset, start, length in zip(offsets, buffers.starts, buffers.lengths, strict=True):
            at = int(offset) - DATA_START
            buffers.memory[start : start + length] = self.bytes[at : at + length]

    def _start(
        self, what: str, offsets: Int64Array, buffers: Buffers, priority: Priority
    ) -> PendingBatch:
        batch = PendingBatch(what, self.path, offsets, buffers)
        if what == "write":
            self.write(offsets, buffers)
        else:
            self.read(offsets, buffers)
        batch.settle()
        return batch

    def wait(self, batch: PendingBatch) -> None:
        batch.result()

    @property
    def completion_fd(self) -> int:
        return -1

    def poll(self) -> None:
        pass

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        self.check(offsets, buffers)
        for offset, start, length in zip(offsets, buffers.starts, buffers.lengths, strict=True):
            at = int(offset) - DATA_START
            self.bytes[at : at + length] = buffers.memory[start : start + length]

    def flush(self) -> None:
        pass

    def discard(self, offsets: Int64Array, lengths: Int64Array) -> bool:
        return False

    def close(self) -> None:
        pass


class PlainSpace(DriveSpace):
    """Space without a catalog, in which nothing is ever evicted."""

    def __init__(self, device: Device, allocator: SpreadAllocator) -> None:
        self.device = device
        self.allocator = allocator
        self._started = StartedWrites(device)

    @property
    def started(self) -> StartedWrites:
        return self._started

    def allocate(self, nbytes: int, drive: int | None = None) -> Extent:
        return self.allocator.allocate(nbytes, drive)

    def write(self, offsets: Int64Array, buffers: Buffers) -> None:
        self.device.write(offsets, buffers)


class FixedOrder(Placement):
    def __init__(self, case: Case) -> None:
        self.case = case

    def orders(self, units: Sequence[UnitKeys]) -> list[Order | None]:
        return [self.case.order(0)] * len(units)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_write_path_of_the_store_makes_the_same_images(case: Case) -> None:
    layers = range(len(case.geometry.layers))
    images = b"".join(golden_cases.image_of(case, layer) for layer in layers)
    device = MemoryDevice(1 << 20)
    owner = Owner(golden_cases.STORE_UUID, golden_cases.FINGERPRINT)
    space = PlainSpace(device, SpreadAllocator([(DATA_START, device.capacity_bytes)]))
    extents = ExtentIO(case.geometry, owner, device, space, BufferPool(1 << 20))
    tiers = [MemoryTier(name, 0, case.geometry) for name in ("HOT", "HOST")]
    writer = ExtentWriter(extents, Residency(case.geometry, *tiers), FixedOrder(case))
    # The buffers are dirty, so that padding which nobody cleared would show.
    writer.buffers.memory[:] = 0xA5
    before = Segment(start=0, layers=len(layers), token_count=max(case.start, 1))
    segment = Segment(
        start=case.start,
        layers=len(layers),
        provenance=Provenance.parse(case.provenance),
        parent=SegmentView(before, case.start) if case.start else None,
        token_count=case.tokens,
        filled=[case.tokens] * len(layers),
        generation=case.generation,
        tokens=case.stream[case.start :],
        start_digest=chain_digest(case.stream[: case.start]),
        end_digest=chain_digest(case.stream),
    )
    writer.write(
        [
            UnitWrite(Unit(segment, layer), case.bits(layer, False), case.bits(layer, True))
            for layer in layers
        ]
    )
    writer.write_headers([segment])
    assert device.bytes[: len(images)].tobytes() == images
    assert not device.bytes[len(images) :].any()
