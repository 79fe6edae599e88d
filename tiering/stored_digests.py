"""Digests of units in their Extents: made when a unit is packed, read when a query first asks.

Invariants:
- What is read back is bit for bit what was made; it has its checksum, and speaks of the unit that
  was asked for.
- A section that is damaged, cannot be read or is of another kind is as none: whoever asks makes
  the digests anew from the unit's Pages.
"""

import logging
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from kvtier.errors import ChecksumMismatch, ConfigError, DeviceError
from kvtier.io.alignment import GRID_BYTES, align_up
from kvtier.io.device import Buffers, ByteArray
from kvtier.kernels.digests import PageDigests, page_digests
from kvtier.kernels.rotation import rotated_width
from kvtier.kernels.sketch import Sketch
from kvtier.tiering import digest_section
from kvtier.tiering.digest_section import HEAD_BYTES, DigestHead
from kvtier.tiering.extent_format import NO_DIGESTS, DigestSection
from kvtier.tiering.extent_io import ExtentIO, Unit, batches, starts_of
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry, LayerGeometry, pages_of
from kvtier.tiering.steps import Pause, Read, Reading, Steps, whole

_log = logging.getLogger("kvtier")

SKETCH_SEED = 1
"""Of the rotation of sketched keys: part of what a stored digest means."""


class _Array(NamedTuple):
    """One array of a section. start: in bytes of the section."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class DigestKind:
    """What digests a store makes: of every Page its means, and of every key a sketch of some bits.

    It knows what they take on the drive, and what they look like there.
    """

    def __init__(self, geometry: Geometry, bits: int | None) -> None:
        """bits: of each element of a sketched key, 2 to 4; None: means alone."""
        self.geometry = geometry
        self.bits = bits
        self._sections: dict[tuple[int, int], DigestSection] = {}
        """By layer and tokens."""

    @property
    def sketch(self) -> tuple[int, int] | None:
        """(bits, seed) of the sketches; None: there are none."""
        return None if self.bits is None else (self.bits, SKETCH_SEED)

    def are_of(self, layer: int) -> bool:
        """Whether this layer has digests: one with a window reads its window."""
        shape = self.geometry.layers[layer]
        return shape.window is None and shape.value_width > 0

    def section(self, layer: int, tokens: int) -> DigestSection:
        """What is stored of a unit of so many tokens."""
        key = layer, tokens
        found = self._sections.get(key)
        if found is None:
            found = NO_DIGESTS
            if self.are_of(layer):
                last = [*arrays_of(self.geometry.layers[layer], tokens, self.bits).values()][-1]
                bits, seed = self.sketch or (0, 0)
                found = DigestSection(last.start + last.nbytes, bits, seed)
            self._sections[key] = found
        return found

    def head(self, unit: Unit) -> DigestHead:
        """What the head of a unit's section says."""
        tokens = unit.segment.token_count
        return DigestHead(self.section(unit.layer, tokens), unit.layer, tokens)

    def make(self, keys: torch.Tensor, values: torch.Tensor) -> PageDigests:
        """Digests of rows [heads, tokens, width] in the order of slots. Raises ConfigError where
        they are not all finite."""
        bits, seed = self.sketch or (None, 0)
        # Sums of rows that lie otherwise in memory may end in other bits.
        return page_digests(keys.contiguous(), values.contiguous(), bits, seed)

    def make_if_possible(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> PageDigests | None:
        """The same of a unit that is stored. None: its layer has no digests, or its rows are not
        all finite, which are kept like any others."""
        if not self.are_of(layer):
            return None
        try:
            return self.make(keys, values)
        except ConfigError:
            return None

    def pack(self, digests: PageDigests, unit: Unit, target: ByteArray) -> None:
        """Fill a unit's section. target: uint8, exactly its bytes."""
        shape = self.geometry.layers[unit.layer]
        for name, array in arrays_of(shape, digests.tokens, self.bits).items():
            source = digests if name in _OF_MEANS else digests.sketch
            tensor: torch.Tensor = getattr(source, name)
            assert (tensor.dtype, tuple(tensor.shape)) == (array.dtype, array.shape), name
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            target[array.start : array.start + array.nbytes] = raw
        digest_section.seal(target, self.head(unit), unit.segment.generation)

    def unpack(self, block: ByteArray, unit: Unit, where: str) -> PageDigests | None:
        """The digests of a unit, from the section that `block` begins with. None: they are of
        another kind. Raises ChecksumMismatch; where: named in it."""
        expected = self.head(unit)
        head = digest_section.parse(block, unit.segment.generation, where)
        if (head.layer, head.token_count) != (expected.layer, expected.token_count):
            raise ChecksumMismatch(f"{where}: the digests are those of another layer")
        if head != expected:
            return None
        # One piece of memory for all of it.
        held = torch.from_numpy(block[: expected.section.nbytes].copy())
        tokens = expected.token_count
        arrays = arrays_of(self.geometry.layers[unit.layer], tokens, self.bits)
        found = {
            name: held[each.start : each.start + each.nbytes].view(each.dtype).view(each.shape)
            for name, each in arrays.items()
        }
        means = {name: found.pop(name) for name in _OF_MEANS}
        sketch = None
        if found:
            sketch = Sketch(**found, centre=means["centre"], tokens=tokens, seed=SKETCH_SEED)
        return PageDigests(**means, tokens=tokens, sketch=sketch)


_OF_MEANS = ("centre", "key_means", "key_factors", "value_means", "value_factors")
"""Fields of PageDigests; the others are those of its Sketch."""


def arrays_of(shape: LayerGeometry, tokens: int, bits: int | None) -> dict[str, _Array]:
    """The arrays of a section, in their order: those of the largest elements first, so that each
    lies where its elements may."""
    heads, pages = shape.kv_heads, pages_of(tokens)
    listed: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ("centre", torch.float32, (heads, shape.key_width)),
        ("key_factors", torch.float32, (heads, pages)),
        ("value_factors", torch.float32, (heads, pages)),
        ("key_means", torch.int8, (heads, pages, shape.key_width)),
        ("value_means", torch.int8, (heads, pages, shape.value_width)),
    ]
    if bits is not None:
        words = (bits, heads, pages, rotated_width(shape.key_width) // 4)
        listed = [
            ("words", torch.int64, words),
            ("low", torch.float32, (heads,)),
            ("step", torch.float32, (heads,)),
            *listed,
            ("codes", torch.uint8, (heads, pages, PAGE_TOKENS)),
        ]
    found, start = {}, HEAD_BYTES
    for name, dtype, dims in listed:
        nbytes = prod(dims) * dtype.itemsize
        found[name] = _Array(dtype, dims, start, nbytes)
        start += nbytes
    return found


class DigestReader:
    """Reads the digests of units from their Extents. Callers hold the store's lock."""

    def __init__(self, extents: ExtentIO, kind: DigestKind) -> None:
        self.extents = extents
        self.kind = kind

    def is_stored(self, unit: Unit) -> bool:
        """Whether a unit's Extent has digests that can be of this kind, as far as its length
        tells."""
        extent = unit.segment.extents[unit.layer]
        nbytes = self.kind.section(unit.layer, unit.segment.token_count).nbytes
        if extent is None or not nbytes:
            return False
        return extent.length == self.extents.shape(unit).digests_at + align_up(nbytes, GRID_BYTES)

    def reading(
        self, units: Sequence[Unit], reading: Reading
    ) -> Steps[list[tuple[Unit, PageDigests]]]:
        """The digests of those of these units that have some, and whose Extents are on the device.

        Raises DeviceError where the device as a whole fails.
        """
        units = self._arrived(units)
        found: list[tuple[Unit, PageDigests]] = []
        sizes = [
            align_up(self.kind.section(each.layer, each.segment.token_count).nbytes, GRID_BYTES)
            for each in units
        ]
        for chosen in batches(sizes, reading.batch_bytes, reading.units_max):
            part, lengths = units[chosen], np.array(sizes[chosen], np.int64)
            starts = starts_of(lengths)
            offsets = [
                self.extents.extent(each).offset + self.extents.shape(each).digests_at
                for each in part
            ]
            piece = yield from reading.piece(int(lengths.sum()))
            try:
                buffers = Buffers(piece.memory, starts, lengths)
                unread = yield from self._unread(
                    part, Read(np.array(offsets, np.int64), buffers, piece.used_by)
                )
                for index, unit in enumerate(part):
                    yield Pause.SHORT
                    if index not in unread:
                        start = int(starts[index])
                        block = piece.memory[start : start + int(lengths[index])]
                        digests = self._checked(unit, block)
                        if digests is not None:
                            found.append((unit, digests))
            finally:
                piece.give_back()
        return found

    def _arrived(self, units: Sequence[Unit]) -> list[Unit]:
        """Those of these units that have digests on the device."""
        stored = [each for each in units if self.is_stored(each)]
        try:
            self.extents.finish_writes(stored)
        except DeviceError:
            # What it did not take has no Extent any more; whoever needs its Pages hears of it.
            stored = [each for each in stored if self.is_stored(each)]
        return stored

    def _unread(self, units: Sequence[Unit], read: Read) -> Steps[set[int]]:
        """Read; which of these units' digests cannot be read."""
        unread: set[int] = set()
        try:
            yield from whole(read)
        except DeviceError as error:
            if not error.failures:
                raise
            unread = {index for index, _ in error.failures}
            self.extents.counters.failed_reads += 1
            where, count = self.extents.where(units[min(unread)]), len(unread)
            _log.error("digests of %d units cannot be read, the first %s: %s", count, where, error)
        self.extents.counters.bytes_read += int(read.buffers.lengths.sum())
        return unread

    def _checked(self, unit: Unit, block: ByteArray) -> PageDigests | None:
        try:
            return self.kind.unpack(block, unit, self.extents.where(unit))
        except ChecksumMismatch as error:
            self.extents.counters.damaged_digests += 1
            _log.error("%s: they are made anew from the pages", error)
            return None
