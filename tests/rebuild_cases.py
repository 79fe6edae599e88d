"""Stores whose catalog is lost: filled, compared before and after, headers forged into them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvtier.io.catalog import Catalog, SegmentRow
from kvtier.io.device import ByteArray
from kvtier.io.extent import Extent
from kvtier.tiering import extent_format
from kvtier.tiering.catalog_rows import extents_of
from kvtier.tiering.extent_format import ExtentIdentity
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.page_layout import PageLayout
from kvtier.tiering.rebuilder import RebuildReport, rebuild
from kvtier.tiering.store import Store
from kvtier.tiering.verifier import verify
from tests.store_cases import KV, PLAIN, Remembered, check_bytes, extend, open_store

GRID = 4096
SPARSE = Provenance.approximate(0.5, "raw")


class Quick(Remembered):
    """Another model's rows, computed once."""

    def __init__(self, salt: int) -> None:
        super().__init__(PLAIN)
        KV.__init__(self, PLAIN, salt)


KVS: dict[str, KV] = {"m": Quick(0), "n": Quick(1)}
"""Two models."""


@dataclass(frozen=True)
class Stream:
    """What was saved once."""

    model: str
    provenance: Provenance
    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """What a store hands out: matched tokens of every stream; names with their lengths."""

    matched: dict[Stream, int]
    names: dict[str, set[tuple[str, int, int]]]
    """By model: name, limit, token_count."""


def save(store: Store, stream: Stream) -> None:
    """As a caller does: resume what is there, compute the rest, save."""
    tokens = list(stream.tokens)
    sequence = store.resume(tokens, provenance=stream.provenance)
    if sequence.length() == 0:
        store.release(sequence)
        sequence = store.sequence(stream.provenance)
    extend(store, KVS[stream.model], sequence, tokens)
    store.save(sequence, stream.name, tokens)
    store.release(sequence)


def state(path: Path, streams: list[Stream]) -> State:
    """Every match is compared bit by bit on the way."""
    matched: dict[Stream, int] = {}
    names: dict[str, set[tuple[str, int, int]]] = {}
    for model in KVS:
        with open_store(path, model=model) as store:
            for stream in streams:
                if stream.model == model:
                    matched[stream] = _matched(store, stream)
            names[model] = {(each.name, each.limit, each.token_count) for each in store.names()}
            store._files.allocator.check()
    assert verify(path).findings == []
    return State(matched, names)


def _matched(store: Store, stream: Stream) -> int:
    tokens = list(stream.tokens)
    sequence = store.resume(tokens, provenance=stream.provenance)
    length = sequence.length()
    assert length == store.lookup(tokens, provenance=stream.provenance)
    check_bytes(store, KVS[stream.model], sequence, tokens[:length])
    store.release(sequence)
    return length


def lose(path: Path) -> None:
    """Delete the catalog of a closed store."""
    for each in path.glob("catalog.sqlite*"):
        each.unlink()


def rebuilt(path: Path) -> RebuildReport:
    """Lose the catalog and rebuild it."""
    lose(path)
    report = rebuild(path)
    dropped = sum(report.segments_dropped.values())
    assert report.segments_found == report.segments_restored + dropped
    return report


def random_walk(
    path: Path, seed: int, *, steps: int, lengths: tuple[int, int] = (20, 2200)
) -> list[Stream]:
    """Save, extend, fork, replace and remove in two models and two provenances."""
    random = np.random.default_rng(seed)
    streams: list[Stream] = []
    for _ in range(steps):
        model = str(random.choice(list(KVS)))
        with open_store(path, model=model) as store:
            for _ in range(8):
                live = [each.name for each in store.names()]
                if live and random.random() < 0.25:
                    store.remove(str(random.choice(live)))
                    continue
                stream = _next_stream(streams, model, random, lengths)
                save(store, stream)
                streams.append(stream)
    return list(dict.fromkeys(streams))


def _next_stream(
    streams: list[Stream],
    model: str,
    random: np.random.Generator,
    lengths: tuple[int, int],
) -> Stream:
    own = [each for each in streams if each.model == model]
    provenance = EXACT if random.random() < 0.7 else SPARSE
    head: tuple[int, ...] = ()
    if own and random.random() < 0.6:
        base = own[int(random.integers(len(own)))]
        head = base.tokens[: int(random.integers(1, len(base.tokens) + 1))]
        provenance = base.provenance
    more = tuple(random.integers(0, 97, int(random.integers(*lengths))).tolist())
    # Few names, so that names are replaced.
    return Stream(model, provenance, f"n{random.integers(12)}", head + more)


# ---- on the region --------------------------------------------------------------------------


def rows(path: Path) -> list[SegmentRow]:
    with Catalog.open(path / "catalog.sqlite") as catalog:
        return catalog.segments()


def free_blocks(path: Path) -> Iterator[int]:
    """Offsets of grid blocks that nobody uses, the highest first."""
    with open_store(path) as store:
        used = sorted(store._files.allocator.used().items())
        [window] = store._files.region.windows
        end = window.end
    for offset, length in [*reversed(used), (0, 1 << 20)]:
        yield from range(end - GRID, offset + length - 1, -GRID)
        end = offset


def peek(path: Path, extent: Extent) -> bytes:
    with (path / "region.kv").open("rb") as file:
        file.seek(extent.offset)
        return file.read(extent.length)


def poke(path: Path, offset: int, data: bytes) -> None:
    with (path / "region.kv").open("r+b") as file:
        file.seek(offset)
        file.write(data)


def name_record(path: Path, name: str) -> Extent:
    with Catalog.open(path / "catalog.sqlite") as catalog:
        (row,) = [each for each in catalog.names() if each.name == name]
    offset, length = np.frombuffer(row.record, "<i8").tolist()
    return Extent(offset, length)


def forged(
    identity: ExtentIdentity, geometry: Geometry, tokens: list[int], payload: ByteArray
) -> bytes:
    """A whole Extent with a right header, around any payload."""
    layer = geometry.layers[identity.layer]
    layout = PageLayout(layer, identity.token_count, geometry.item_bytes)
    directory = layout.directory(None)
    extent_format.checksum_pages(directory, payload, identity.generation)
    size = extent_format.header_bytes(geometry, identity.layer, identity.token_count)
    total = extent_format.extent_bytes(geometry, identity.layer, identity.token_count)
    block = np.zeros(total, np.uint8)
    extent_format.write_header(
        block[:size],
        replace(identity, extent_bytes=total),
        geometry,
        directory,
        extent_format.checksum(payload, identity.generation),
        np.array(tokens, np.uint32),
    )
    block[size : size + payload.size] = payload
    return block.tobytes()


def identity_of(path: Path, row: SegmentRow, layer: int, offset: int) -> ExtentIdentity:
    """That of a stored Segment's Extent, as if it had been written at `offset`."""
    with Catalog.open(path / "catalog.sqlite") as catalog:
        store = bytes.fromhex(catalog.store_uuid.replace("-", ""))
        (fingerprint,) = (
            each.digest for each in catalog.fingerprints() if each.id == row.fingerprint_id
        )
    return ExtentIdentity(
        store_uuid=store,
        fingerprint=fingerprint,
        provenance=row.provenance,
        start_digest=row.start_digest,
        end_digest=row.end_digest,
        generation=row.generation,
        start_position=row.start_position,
        token_count=row.token_count,
        layer=layer,
        device_offset=offset,
        extent_bytes=extents_of(row)[layer].length,
    )
