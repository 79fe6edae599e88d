"""A run of a store whose every step is recorded, and what must hold before and after each step.

A Snapshot is what the store itself said between two steps; the steps assert that it said what was
asked for. Where a step was cut by a crash, each name and each token list may stand as before it or
as after it, and nowhere else.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listing
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import xxhash

from kvtier.io.alignment import GRID_BYTES
from kvtier.io.catalog import NameRow
from kvtier.io.device import ByteArray
from kvtier.io.extent import Extent
from kvtier.io.simulated_medium import Medium
from kvtier.io.superblock import copy_offsets
from kvtier.tiering import opening
from kvtier.tiering.config import Config, PlacementName
from kvtier.tiering.geometry import Geometry
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from tests.crash_images import Image
from tests.crash_log import (
    REGION,
    CrashLog,
    Event,
    RecordingDevice,
    recorded_files,
    recording_device,
)
from tests.crash_vfs import recorded_catalogs
from tests.store_cases import KV, extend, open_store

TINY = Geometry.uniform(2, 1, 4)
STORE = "s"
REGION_BYTES = 2 << 20
HOT = "256KiB"
OWN_REGION = f"{STORE}/{REGION}"
DRIVE = "drive"
"""Where a region lies: in the store's directory, or in one of such a name, as on a device."""
Names = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Named:
    """What a name stands for: all its tokens, and whether and until when it is held."""

    tokens: tuple[int, ...]
    held: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a store holds between two steps.

    lengths: how many tokens of each list it finds. heads: digests of the first blocks of all
    Extents that it named until now. damaged: generations of Segments whose bytes changed by
    themselves. repairs: how many copies of the superblock did, and were written anew.
    """

    made: bool = False
    names: Mapping[str, Named] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    heads: frozenset[int] = frozenset()
    damaged: frozenset[int] = frozenset()
    repairs: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """start: what stood on the media before the first event. regions: their paths, relative to the
    root. snapshots[i]: before step i. left: the bytes that each region had at the end."""

    start: Image
    regions: tuple[str, ...]
    events: list[Event]
    steps: list[str]
    snapshots: list[Snapshot]
    lists: Names
    sites: Mapping[str, int]
    left: Mapping[str, bytes]

    def expectations(self) -> Iterator[tuple[int, Snapshot, Snapshot]]:
        """After each event: the step, and between which snapshots a crash may leave the store."""
        step, before, after = 0, self.snapshots[0], self.snapshots[0]
        for event in self.events:
            if event.kind == "begin":
                step = event.offset
                before, after = self.snapshots[step], self.snapshots[step + 1]
            elif event.kind == "end":
                before = after
            yield step, before, after


def held_until(row: NameRow) -> float:
    return row.held_until


class Workload:
    """Runs steps on one store in `root`, which is empty. Use it as `with recorded(...)`."""

    def __init__(self, root: Path, log: CrashLog) -> None:
        self.log = log
        self.lists: Names = {}
        self.kv = KV(TINY)
        self.steps: list[str] = []
        self.snapshots = [Snapshot()]
        self.devices: list[RecordingDevice] = []
        self.directory = root / STORE
        self.start = Image({}, frozenset())
        self.media = {OWN_REGION: Medium.blank(REGION_BYTES)}
        """By the path of each region, in the order of their numbers."""
        self.discard = False
        self.placement: PlacementName = "position"
        self.free_bytes: int | None = None
        """If not None, ballast leaves only so much of the region."""
        self._damaged: frozenset[int] = frozenset()
        self._repairs = 0
        self._open_store: Store | None = None

    @property
    def store(self) -> Store:
        assert self._open_store is not None
        return self._open_store

    def open_device(self, path: str, **wishes: object) -> RecordingDevice:
        medium = self.media[self.log.relative(path) or ""]
        self.devices.append(recording_device(self.log, path, medium, REGION_BYTES))
        return self.devices[-1]

    def use_drives(self, count: int = 1) -> None:
        """Let the regions be files that were there before, outside the store: so are devices."""
        names = [f"{DRIVE}{number}/{REGION}" for number in range(count)]
        for name in names:
            drive = self.log.root / name
            drive.parent.mkdir()
            with drive.open("wb") as file:
                file.truncate(REGION_BYTES)
        self.log.events.clear()
        self.media = {name: Medium.blank(REGION_BYTES) for name in names}
        files = {name: bytes(REGION_BYTES) for name in names}
        self.start = Image(files, frozenset(name.partition("/")[0] for name in names))

    def open(self) -> None:
        is_new = not (self.directory / "store.yaml").exists()
        config = store_config(self.log.root, tuple(self.media), is_new=is_new)
        config = replace(config, discard=self.discard, placement=self.placement)
        self._open_store = store = open_store(self.directory, TINY, config)
        if self.free_bytes is not None:
            # No row names it, so after a crash it is free.
            allocator = store._files.allocator
            room = min(allocator.free_bytes - self.free_bytes, allocator.largest_free_bytes)
            allocator.allocate(room)

    def close(self) -> None:
        self.store.close()
        self._open_store = None

    def step(self, what: str, action: Callable[[], Any]) -> None:
        """Run one step and note what the store holds after it."""
        self.log.note(Event("begin", offset=len(self.steps)))
        action()
        self.log.note(Event("end", offset=len(self.steps)))
        self.steps.append(what)
        self.snapshots.append(self._snapshot())

    def _snapshot(self) -> Snapshot:
        store = self.store
        names = {}
        for row in store.names():
            tokens = chain_tokens(store, row)
            names[row.name] = Named(tuple(tokens), held_until(row))
        heads = head_digests(
            [medium.live() for medium in self.media.values()], store._files.allocator.used()
        )
        return Snapshot(
            made=True,
            names=names,
            lengths={key: store.lookup(tokens) for key, tokens in self.lists.items()},
            heads=self.snapshots[-1].heads | heads,
            damaged=self._damaged,
            repairs=self._repairs,
        )

    def recording(self) -> Recording:
        """Close the store; everything that was recorded."""
        self.close()
        log = self.log
        return Recording(
            start=self.start,
            regions=tuple(self.media),
            events=log.events,
            steps=self.steps,
            snapshots=self.snapshots,
            lists=self.lists,
            sites=log.sites,
            left={name: medium.live() for name, medium in self.media.items()},
        )

    # ---- steps ------------------------------------------------------------------------------

    def put(self, name: str, key: str, *, pieces: int = 10**9, **hold: bool) -> None:
        """Compute what the store lacks of a list, and save it under a name."""
        tokens = self.lists[key]

        def action() -> None:
            sequence = self.store.resume(tokens)
            extend(self.store, self.kv, sequence, tokens, pieces=pieces)
            assert self.store.save(sequence, name, tokens, **hold) == len(tokens)
            self.store.release(sequence)
            assert self.store.lookup(tokens) == len(tokens)

        self.step(f"save {key} as {name}", action)

    def stream(self, key: str, pieces: int) -> None:
        """Append a list whose tokens are named beforehand, and never save it."""
        tokens = self.lists[key]

        def action() -> None:
            sequence = self.store.sequence()
            self.store.name_tokens(sequence, tokens)
            extend(self.store, self.kv, sequence, tokens, pieces=pieces)
            self.store.release(sequence)

        self.step(f"stream {key}", action)

    def fork(self, base: str, keys: tuple[str, str]) -> None:
        """Two continuations of a stored list, by a fork, saved under their keys."""

        def action() -> None:
            store = self.store
            twins: list[Sequence] = [store.resume(self.lists[base])]
            extend(store, self.kv, twins[0], self.lists[keys[0]][: len(self.lists[base]) + 70])
            twins.append(store.fork(twins[0]))
            for key, twin in zip(keys, twins, strict=True):
                tokens = self.lists[key]
                extend(store, self.kv, twin, tokens, pieces=33)
                store.save(twin, key, tokens)
            for twin in twins:
                store.release(twin)

        self.step(f"fork {base}", action)

    def behind(self, kept: str, dropped: str, other: str) -> None:
        """Two Sequences that are longer than a Segment; while their payloads are on their way, a
        third one is saved, one is given up, and the last one is cropped and saved."""
        lists = self.lists

        def action() -> None:
            store = self.store
            long, given_up = store.sequence(), store.sequence()
            extend(store, self.kv, long, lists[kept])
            extend(store, self.kv, given_up, lists[dropped])
            saved = store.sequence()
            extend(store, self.kv, saved, lists[other])
            store.save(saved, other, lists[other])
            store.release(given_up)
            store.crop(long, 600)
            extend(store, self.kv, long, lists[kept])
            store.save(long, kept, lists[kept])
            store.release(long)
            store.release(saved)

        self.step(f"save {other}, then {kept}", action)

    def damage(self, key: str, layer: int) -> None:
        """Let a byte of the list's last Segment change; resume then quarantines it."""
        tokens = self.lists[key]

        def action() -> None:
            store = self.store
            (*_, segment) = [
                each
                for each in store._registry.committed.values()
                if not each.quarantined and each.named_tokens.tolist() == tokens[each.start :]
            ]
            extent = segment.extents[layer]
            assert extent is not None
            self._rot(extent.offset + GRID_BYTES)
            self._damaged |= {segment.generation}
            # What HOT holds is not read again.
            self.close()
            self.open()
            sequence = self.store.resume(tokens)
            assert sequence.length() == segment.start
            self.store.release(sequence)

        self.step(f"damage {key}", action)

    def repair(self, copy: int) -> None:
        """Let a byte of a copy of the superblock change, and open the store again."""

        def action() -> None:
            self.close()
            self._rot(copy_offsets(REGION_BYTES)[copy] + 100)
            self._repairs += 1
            self.open()
            assert len(self.store._files.region.notes) == 1

        self.step("repair", action)

    def _rot(self, at: int) -> None:
        """Let one byte of the only region change by itself, durably."""
        ((name, medium),) = self.media.items()
        byte = bytes([medium.live()[at] ^ 255])
        self.log.note(Event("rot", name, at, data=byte))
        medium.flip(np.arange(8 * at, 8 * at + 8))

    def call(self, what: str, action: Callable[[Store], object]) -> None:
        """A step that is one call of the store."""
        self.step(what, lambda: action(self.store))

    def restart(self) -> None:
        def action() -> None:
            self.close()
            self.open()

        self.step("close and open", action)


def store_config(root: Path, regions: tuple[str, ...], *, is_new: bool) -> Config:
    """How the store below `root` is made or opened. regions: relative to the root."""
    if not is_new:
        return Config(hot=HOT)
    if regions == (OWN_REGION,):
        return Config(REGION_BYTES, hot=HOT)
    return Config([os.fspath(root / each) for each in regions], hot=HOT)


def head_digest(block: ByteArray) -> int:
    """Of the first block of an Extent, uint8 [GRID_BYTES]."""
    return int(xxhash.xxh3_64_intdigest(block.data))


def head_digests(regions: Listing[bytes], offsets: Iterable[int]) -> set[int]:
    """Of Extents at these offsets. regions: all bytes of each."""
    blocks = [np.frombuffer(each, np.uint8).reshape(-1, GRID_BYTES) for each in regions]
    places = [Extent(offset, GRID_BYTES) for offset in offsets]
    return {head_digest(blocks[each.drive][each.byte // GRID_BYTES]) for each in places}


def chain_tokens(store: Store, row: NameRow) -> list[int]:
    """All tokens that a name stands for, from the Segments that the catalog names."""
    segment, limit = store._registry.committed.get(row.segment_id), row.limit
    pieces: list[list[int]] = []
    while segment is not None:
        pieces.append(segment.named_tokens[:limit].tolist())
        parent = segment.parent
        segment, limit = (None, 0) if parent is None else (parent.segment, parent.limit)
    return [token for piece in reversed(pieces) for token in piece]


@contextmanager
def recorded(root: Path, removed: str | None = None) -> Iterator[Workload]:
    """A workload below `root`, an existing directory; its store is closed at the end."""
    log = CrashLog(root, removed)
    workload = Workload(root, log)
    with ExitStack() as stack:
        stack.enter_context(recorded_files(log))
        stack.enter_context(recorded_catalogs(log))
        stack.enter_context(mock.patch.object(opening, "open_device", workload.open_device))
        try:
            yield workload
        finally:
            if workload._open_store is not None:
                workload.close()
