"""QEMU's log of what an NVMe drive saw, and the check of what a power cut would have left of it.

The log has the format of Linux' dm-log-writes. A sector behind the region carries marks of the
guest: at such a position the catalog was the copy that has the mark's number, durable. So whatever
of the drive's cache is lost there, everything that this catalog names must be whole.
"""

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import yaml

from kvtier.errors import KvtierError
from kvtier.io.catalog import Catalog, unpack_extents
from kvtier.tiering.verifier import verify
from tests.crash_images import ANY, Keep, Media, lose_all
from tests.crash_log import REGION, Event
from tests.store_cases import KV, PLAIN, check_bytes, open_store

SUPER = struct.Struct("<QQQI")
ENTRY = struct.Struct("<QQQQ")
MAGIC = 0x6A736677736872
FLUSH, FUA, DISCARD = 1, 2, 4
MARK = b"KVTMARK\0"
OWN = b"KVTIER"
"""How Extents and records begin."""
OF_M = KV(PLAIN)


@dataclass(frozen=True, slots=True)
class Mark:
    """number: of the copy of the catalog that holds from here on."""

    number: int


def read_log(path: Path, mark_offset: int) -> Iterator[Event | Mark]:
    """Writes, discards (as zeros), flushes and marks, in the order in which the drive saw them."""
    with path.open("rb") as file:
        magic, version, count, sector = SUPER.unpack(file.read(SUPER.size))
        assert (magic, version) == (MAGIC, 1)
        position = sector
        for _ in range(count):
            file.seek(position)
            # QEMU leaves the fourth field, the length of the data, at zero.
            start, sectors, flags, _ = ENTRY.unpack(file.read(ENTRY.size))
            offset, nbytes = start * sector, sectors * sector
            file.seek(position + sector)
            data = b"" if flags & DISCARD else file.read(nbytes)
            position += sector + len(data)
            # Linux asks for these of a flush that is bound to a write; a store does not.
            assert not flags & FUA
            if data.startswith(MARK):
                assert offset == mark_offset
                yield Mark(int.from_bytes(data[8:16], "little"))
            elif flags & DISCARD:
                yield Event("zero", REGION, offset, nbytes)
            elif nbytes:
                assert len(data) == nbytes
                yield Event("write", REGION, offset, nbytes, data)
            if flags & FLUSH:
                yield Event("sync", REGION)


def drawn(media: Media, random: Random, keep: Keep) -> bytes | bytearray:
    """The bytes of the drive after a power cut."""
    return media.draw(random, lambda _: keep).files[REGION]


@dataclass(slots=True)
class Replay:
    """Goes through a log and checks images of the drive against the catalog of each position.

    folder: scratch space. share: where the guest left settings and marks: of each number a copy of
    the catalog, and the names that were acknowledged by then. tokens_of: those of a name.
    """

    folder: Path
    share: Path
    tokens_of: Callable[[str], list[int]]
    kinds: Sequence[Keep] = ANY * 4
    """How the writes that no flush covers fare, in the images of one position."""
    images: int = 0
    flushes: int = 0
    seen: set[int] = field(default_factory=set)
    """Where anything began that an acknowledgement stood for."""
    violations: list[str] = field(default_factory=list)

    def explore(self, events: list[Event | Mark], media: Media, seed: int) -> None:
        """Draw images at every mark, and before and after every flush; ends at a violation."""
        random = Random(seed)
        mark = 0
        for position, event in enumerate(events):
            if self.violations:
                return
            if isinstance(event, Mark):
                mark = event.number
                self._check(media, mark, position, random)
                self._check_acknowledged(media, mark, random)
                continue
            if event.kind == "sync":
                self._check(media, mark, position, random)
                self.flushes += 1
            media.apply(event)
            if event.kind == "sync":
                self._check(media, mark, position, random)

    def _check(self, media: Media, mark: int, position: int, random: Random) -> None:
        """What a power cut leaves here: the least, the most, and random parts, torn and whole."""
        if not mark:
            # The store is not yet made: nothing is promised.
            return
        for keep in self.kinds[:1] if media.is_settled else self.kinds:
            directory = self.lay(drawn(media, random, keep), mark)
            self.images += 1
            found = verify(directory).findings
            self.violations += [
                f"event {position}, mark {mark}, {keep.__name__}: {f}" for f in found
            ]

    def _check_acknowledged(self, media: Media, mark: int, random: Random) -> None:
        """Every acknowledged name is there in full, exact, when the drive's cache is lost."""
        names = json.loads((self.share / "marks" / f"{mark}.json").read_text())
        if not names:
            return
        region = drawn(media, random, lose_all)
        directory = self.lay(region, mark)
        found = self._places(mark)
        self.seen |= found
        for offset in sorted(self.seen - found):
            if region[offset : offset + len(OWN)] == OWN:
                self.violations.append(f"mark {mark}: byte {offset} still begins what was removed")
        try:
            self._resume_all(directory, mark, names)
        except KvtierError as error:
            self.violations.append(f"mark {mark}: {error}")

    def _places(self, mark: int) -> set[int]:
        """Where Extents and records begin that the catalog of a mark names."""
        with Catalog.open(self.share / "marks" / f"{mark}.sqlite", read_only=True) as catalog:
            packed = [row.extents for row in catalog.segments()]
            packed += [row.record for row in catalog.names()]
        return {each.offset for part in packed for each in unpack_extents(part)}

    def _resume_all(self, directory: Path, mark: int, names: list[str]) -> None:
        with open_store(directory) as store:
            listed = sorted(row.name for row in store.names())
            if listed != sorted(names):
                self.violations.append(f"mark {mark}: {listed} are there, not {names}")
            for name in names:
                tokens = self.tokens_of(name)
                sequence = store.resume(tokens)
                found = sequence.length()
                if found < len(tokens):
                    self.violations.append(f"mark {mark}: {found} tokens of {name} are there")
                check_bytes(store, OF_M, sequence, tokens[:found])
                store.release(sequence)

    def lay(self, region: bytes | bytearray, mark: int) -> Path:
        """A store's directory, as it would be found: the drive's image, and a mark's catalog."""
        directory = self.folder / "store"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        shutil.copy(self.share / "marks" / f"{mark}.sqlite", directory / "catalog.sqlite")
        settings = yaml.safe_load((self.share / "store.yaml").read_text())
        settings["region"]["path"] = REGION
        (directory / "store.yaml").write_text(yaml.safe_dump(settings))
        (directory / REGION).write_bytes(region)
        return directory
