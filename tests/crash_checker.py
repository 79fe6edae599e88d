"""Reopens a store from the image of a crash and says what is wrong with it.

The catalog is read by the standard library's SQLite, from files in memory; the region is a
simulated device that holds the image. A check goes through the public way: `Store.open`, `resume`,
`verify`, and then a second recovery, from what the first one left.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml

from kvtier.errors import FormatError, KvtierError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.catalog import unpack_extents
from kvtier.io.extent import drive_start
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import NO_FAULTS, Faults
from kvtier.io.simulated_medium import Medium
from kvtier.tiering import opening, record_format, store_files, verifier
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.store_files import CATALOG
from kvtier.tiering.verifier import verify
from tests.crash_images import Image
from tests.crash_log import (
    CrashLog,
    Event,
    RecordingDevice,
    recorded_files,
    recording_device,
)
from tests.crash_vfs import recorded_catalogs
from tests.crash_workload import (
    STORE,
    TINY,
    Named,
    Names,
    Recording,
    Snapshot,
    chain_tokens,
    head_digest,
    held_until,
    store_config,
)
from tests.store_cases import KV, open_store, put, some_tokens

FAILURES = (
    KvtierError, OSError, AssertionError, ValueError, TypeError, LookupError, RuntimeError,
    sqlite3.Error,
)  # fmt: skip
"""What a store that a crash broke may raise; anything is a violation."""
CACHE = Faults(volatile_cache=True)
SETTINGS_FILE = f"{STORE}/store.yaml"


@dataclass(frozen=True, slots=True)
class _State:
    """What a recovery left: every row of the catalog, the regions, what the allocator has in
    use."""

    rows: Mapping[str, list[Any]]
    regions: tuple[bytes, ...]
    used: Mapping[int, int]

    @property
    def named(self) -> dict[int, int]:
        """Length by offset of every Extent that a row names: of Segments, and records."""
        packed = [row["extents"] for row in self.rows["segment"]]
        packed += [row["record"] for row in self.rows["name"] + self.rows["fingerprint"]]
        return {each.offset: each.length for part in packed for each in unpack_extents(part)}


class Checker:
    """Checks images one by one in a scratch directory. Made by `checking`."""

    def __init__(self, scratch: Path, lists: Names, regions: tuple[str, ...]) -> None:
        """regions: their paths, relative to the root."""
        self.root = scratch
        self.lists = lists
        self.regions = regions
        self.kv = KV(TINY)
        self.devices: dict[str, SimulatedDevice] = {}
        """By path relative to the root: the regions as they were opened last."""
        self._images: dict[str, bytes] = {}
        self._inodes: dict[str, int] = {}
        self._rows: dict[tuple[int, bytes], Any] = {}

    # ---- the media --------------------------------------------------------------------------

    def lay(self, image: Image) -> Path:
        """Put an image where a store can be opened. Returns the store's directory."""
        directory = self.root / STORE
        for old in self.root.iterdir():
            shutil.rmtree(old)
        for each in sorted(image.directories):
            (self.root / each).mkdir()
        self._images, self._inodes = {}, {}
        for name, data in image.files.items():
            path = self.root / name
            with path.open("wb") as file:
                if name in self.regions and SETTINGS_FILE in image.files:
                    # A store that is there asks the file for its size alone.
                    file.truncate(len(data))
                else:
                    file.write(data)
                if name in self.regions:
                    self._images[name] = data
                    self._inodes[name] = os.fstat(file.fileno()).st_ino
        return directory

    def open_device(self, path: str, **wishes: object) -> SimulatedDevice:
        """The region, in place of what the store would open. A file made anew holds zeros."""
        device = SimulatedDevice.from_image(self._content(path), path=path, faults=CACHE)
        self.devices[self._name(path)] = device
        return device

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self.root)

    def _content(self, path: str) -> bytes:
        found, name = os.stat(path), self._name(path)
        is_laid = found.st_ino == self._inodes.get(name)
        return self._images[name] if is_laid else bytes(found.st_size)

    def recovery_of(self, image: Image) -> list[Event]:
        """What the first open after a crash does to the media."""
        directory = self.lay(image)
        log = CrashLog(self.root)

        def open_device(path: str, **wishes: object) -> RecordingDevice:
            content = self._content(path)
            return recording_device(log, path, Medium.holding(content), len(content))

        is_new = not store_files.is_store(directory)
        config = store_config(self.root, self.regions, is_new=is_new)
        with (
            recorded_files(log),
            recorded_catalogs(log),
            mock.patch.object(opening, "open_device", open_device),
        ):
            open_store(directory, TINY, config).close()
        return log.events

    def look_at_device(self, path: str, **wishes: object) -> SimulatedDevice:
        """A second opening of the region, which sees what the first one sees."""
        device = self.devices[self._name(path)]
        sizes = (device.block_bytes, device.capacity_bytes)
        return SimulatedDevice(
            device._medium, sizes, seed=0, faults=NO_FAULTS, path=path, log_bytes_max=1 << 20
        )

    # ---- checks -----------------------------------------------------------------------------

    def violations(self, image: Image, before: Snapshot, after: Snapshot) -> list[str]:
        """What is wrong with the store that a crash between two snapshots left as `image`."""
        directory = self.lay(image)
        is_made = SETTINGS_FILE in image.files
        if before.made and not is_made:
            return ["a store that was made has no store.yaml"]
        try:
            if not is_made:
                return self._make_again(directory)
            found: list[str] = []
            with self._recovered(directory) as store:
                if before.repairs == after.repairs:
                    found += store._files.region.notes
                found += self._wrong_names(store, before, after)
                found += self._wrong_lists(store, before, after)
                found += _wrong_bytes(store, directory, after)
                used = _in_use(store)
            first = self._state(directory, used)
            if first.used != first.named:
                found.append("what is in use is not what the catalog's rows name")
            found += _wrong_records(first)
            found += _removed_heads(first, before)
            self._images = {name: self._left_on_device(name, image) for name in self.regions}
            with self._recovered(directory) as store:
                used = _in_use(store)
            return found + _differences(first, self._state(directory, used))
        except FAILURES as error:
            return [f"{type(error).__name__}: {error}"]

    def _recovered(self, directory: Path) -> Store:
        return open_store(directory, TINY, store_config(self.root, self.regions, is_new=False))

    def _state(self, directory: Path, used: Mapping[int, int]) -> _State:
        live = tuple(self.devices[name].live() for name in self.regions)
        return _State(_all_rows(directory / CATALOG), live, used)

    def _left_on_device(self, name: str, image: Image) -> bytes:
        """A region after a recovery whose device then lost its power: what was flushed."""
        if not self.devices[name].log:
            return image.files[name]
        return self.devices[name].image("none")

    def _wrong_names(self, store: Store, before: Snapshot, after: Snapshot) -> Iterator[str]:
        found: dict[str, Named] = {}
        for row in store.names():
            tokens = tuple(chain_tokens(store, row))
            found[row.name] = Named(tokens, held_until(row))
            if len(tokens) != row.token_count:
                yield f"name {row.name!r} counts {row.token_count} tokens and has {len(tokens)}"
        for name in {*found, *before.names, *after.names}:
            allowed = (before.names.get(name), after.names.get(name))
            if found.get(name) not in allowed:
                yield f"name {name!r} stands for something else than before and after the step"

    def _wrong_lists(self, store: Store, before: Snapshot, after: Snapshot) -> Iterator[str]:
        checked: set[tuple[int, bytes]] = set()
        for key, tokens in self.lists.items():
            bounds = (before.lengths.get(key, 0), after.lengths.get(key, 0))
            sequence = store.resume(tokens)
            found = sequence.length()
            if not min(bounds) <= found <= max(bounds):
                yield f"list {key!r} resumes to {found} tokens, not to {bounds}"
            yield from self._wrong_kv(store, sequence, tokens, checked)
            store.release(sequence)

    def _wrong_kv(
        self, store: Store, sequence: Sequence, tokens: list[int], checked: set[tuple[int, bytes]]
    ) -> Iterator[str]:
        """Whether KV is that of the tokens, bit for bit; each part once per image."""
        as_bytes = np.array(tokens, "<u4").tobytes()
        for view in sequence.views:
            key = (view.segment.generation, as_bytes[: 4 * view.end])
            if key in checked:
                continue
            checked.add(key)
            for layer in range(len(TINY.layers)):
                wanted = self._wanted(tokens, key[1], layer)
                assert store._mover.load([Unit(view.segment, layer)]) == 1
                held = store._mover.tensors(Unit(view.segment, layer))
                place = slice(view.segment.start, view.end)
                for have, want in zip(held, wanted, strict=True):
                    if not np.array_equal(have[:, : view.limit].numpy(), want[:, place]):
                        yield f"tokens {place} of a list have KV of others in layer {layer}"

    def _wanted(self, tokens: list[int], prefix: bytes, layer: int) -> Any:
        """The rows of a prefix of a list, computed once."""
        if (layer, prefix) not in self._rows:
            rows = self.kv.rows(tokens[: len(prefix) // 4], layer)
            self._rows[layer, prefix] = tuple(each.numpy() for each in rows)
        return self._rows[layer, prefix]

    def _make_again(self, directory: Path) -> list[str]:
        """Where no store was made yet, one can be made, and it works."""
        tokens = some_tokens(40, 1)
        config = store_config(self.root, self.regions, is_new=True)
        with open_store(directory, TINY, config) as store:
            if store.names() or store._registry.committed:
                return ["a store that was never made has names or segments"]
            put(store, self.kv, "new", tokens)
            if store.lookup(tokens) != len(tokens):
                return ["a store that was made again does not keep what is saved"]
        return [str(each) for each in verify(directory).findings]


def _wrong_bytes(store: Store, directory: Path, after: Snapshot) -> Iterator[str]:
    """What `verify` finds, except in Segments whose bytes changed by themselves."""
    damaged = {
        each.catalog_id
        for each in store._registry.committed.values()
        if each.generation in after.damaged
    }
    for finding in verify(directory).findings:
        place = finding.where.partition(",")[0].removeprefix("segment ")
        if not (place.isdigit() and int(place) in damaged):
            yield f"verify: {finding.kind} {finding.where}: {finding.what}"


def _in_use(store: Store) -> dict[int, int]:
    """Length by offset of what the allocator has in use, which is consistent in itself."""
    allocator = store._files.allocator
    allocator.check()
    assert store.stats().device_bytes == allocator.used_bytes
    return allocator.used()


def _wrong_records(state: _State) -> Iterator[str]:
    """Records that do not say what the rows that name them say."""
    for table in ("name", "fingerprint"):
        for row in state.rows[table]:
            for extent in unpack_extents(row["record"]):
                region = state.regions[extent.drive]
                block = np.frombuffer(region[extent.byte : extent.byte + extent.length], np.uint8)
                try:
                    body = record_format.parse(block, extent.offset).body
                except FormatError as error:
                    yield f"record of a {table} at byte {extent.offset}: {error}"
                    continue
                for key in {*body} & {"name", "description", "token_count"}:
                    if row[key] != body[key]:
                        yield f"record of a {table} at byte {extent.offset} has another {key}"


def _removed_heads(state: _State, before: Snapshot) -> list[str]:
    """First blocks of Extents that were named before the step and are not any more: from them a
    scan would bring back what was removed."""
    named = state.named
    found: list[str] = []
    for drive, region in enumerate(state.regions):
        blocks = np.frombuffer(region, np.uint8).reshape(-1, GRID_BYTES)
        start = np.frombuffer(b"KVTIER", np.uint8)
        places = np.flatnonzero((blocks[:, : len(start)] == start).all(axis=1)).tolist()
        found += [
            f"what was removed still begins at byte {GRID_BYTES * at} of drive {drive}"
            for at in places
            if drive_start(drive) + GRID_BYTES * at not in named
            and head_digest(blocks[at]) in before.heads
        ]
    return found


def _all_rows(catalog: Path) -> dict[str, list[Any]]:
    """Every table of a catalog that nobody has open."""
    with closing(sqlite3.connect(f"{catalog.as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        found = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        ).fetchall()
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for (name,) in found}


def _differences(first: _State, second: _State) -> list[str]:
    found = [
        f"a second recovery changes the table {name}"
        for name in first.rows
        if first.rows[name] != second.rows.get(name)
    ]
    if first.used != second.used:
        found.append("a second recovery changes what is in use")
    if first.regions != second.regions:
        found.append("a second recovery changes a region")
    return found


@contextmanager
def checking(scratch: Path, recording: Recording) -> Iterator[Checker]:
    """A Checker that works in `scratch`, an existing directory, and stands in for the devices."""
    checker = Checker(scratch, recording.lists, recording.regions)
    with (
        mock.patch.object(opening, "open_device", checker.open_device),
        mock.patch.object(verifier, "open_device", checker.look_at_device),
        # Settings are read several times per image, and YAML takes longer than all else.
        mock.patch.object(yaml, "safe_load", lru_cache(yaml.safe_load)),
    ):
        yield checker
