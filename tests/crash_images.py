"""What a crash could leave on the media, at every position of a CrashLog.

The media keep less than any file system or drive promises:
- Of the writes, truncations and extensions of a file since its last sync, any subset is there, and
  some of them are torn: of such a write, any subset of its sectors is there.
- Of the creations, renames and deletions in a directory since its last sync, any subset happened.
- Files and directories do not wait for one another: each is drawn by itself.
Promised is only that what was synced stays, that a rename is atomic, and that a write lands nowhere
else than asked. An older write never lands over a newer one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import xxhash

from tests.crash_log import Event

SECTORS = (512, 4096)
Keep = Callable[[Random, int], Sequence[int]]
"""Of n unsynced operations, which are kept: 0 lost, 1 kept, or the bytes of the sectors of a torn
write."""


@dataclass(frozen=True, slots=True)
class Image:
    """What stands on the media: bytes by path, and the directories. Paths relative to the root."""

    files: Mapping[str, bytes]
    directories: frozenset[str]

    @property
    def digest(self) -> int:
        """Differs where images differ."""
        held = xxhash.xxh3_128()
        for path, data in sorted(self.files.items()):
            held.update(f"{path} {len(data)} ".encode())
            held.update(data)
        held.update(" ".join(sorted(self.directories)).encode())
        return held.intdigest()


@dataclass(slots=True)
class _File:
    """durable: the synced bytes. unsynced: what was done to them since, in order."""

    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[Event] = field(default_factory=list)

    def sync(self) -> None:
        for event in self.unsynced:
            _apply(self.durable, event)
        self.unsynced.clear()

    def drawn(self, random: Random, keep: Keep) -> bytes:
        data = bytearray(self.durable)
        for event, kept in zip(self.unsynced, keep(random, len(self.unsynced)), strict=True):
            if kept == 1 or (kept and event.kind == "resize"):
                _apply(data, event)
            elif kept:
                _tear(data, event, kept, random)
        return bytes(data)


def _apply(data: bytearray, event: Event) -> None:
    """Do to the bytes of a file what one event says."""
    if event.kind == "resize":
        del data[event.length :]
        data.extend(bytes(event.length - len(data)))
        return
    written = bytes(event.length) if event.kind == "zero" else event.data
    data.extend(bytes(max(0, event.offset - len(data))))
    data[event.offset : event.offset + len(written)] = written


def _tear(data: bytearray, event: Event, sector: int, random: Random) -> None:
    """Let some sectors of a write land and the others not."""
    written = bytes(event.length) if event.kind == "zero" else event.data
    end = event.offset + len(written)
    fates = random.getrandbits(len(written) // sector + 2)
    first = event.offset - event.offset % sector
    for number, start in enumerate(range(first, end, sector)):
        if fates >> number & 1:
            low, high = max(start, event.offset), min(start + sector, end)
            piece = written[low - event.offset : high - event.offset]
            _apply(data, Event("write", offset=low, data=piece))


_Entries = dict[str, "_File | None"]
"""What a path stands for; None: a directory."""


class Media:
    """Takes events one by one; between two of them, draws images of a crash."""

    def __init__(self, start: Image | None = None) -> None:
        """start: what stands on the media, all of it durable."""
        self._live: _Entries = {}
        if start is not None:
            self._live |= dict.fromkeys(start.directories)
            self._live |= {path: _File(bytearray(data)) for path, data in start.files.items()}
        self._durable: _Entries = dict(self._live)
        self._unsynced: dict[str, list[tuple[Event, _File | None]]] = {}
        """By directory: what was done to its entries, with the file that it was done to."""

    def apply(self, event: Event) -> None:
        """Let one event happen."""
        if event.kind in ("begin", "end"):
            return
        if event.kind == "sync directory":
            changes, waiting = self._unsynced.pop(event.path, []), []
            for each, file in changes:
                if event.target in ("", each.path, each.target):
                    _change(self._durable, each, file)
                else:
                    waiting.append((each, file))
            self._unsynced[event.path] = waiting
        elif event.kind in ("create", "make directory", "rename", "delete"):
            file = _File() if event.kind == "create" else self._live.get(event.path)
            self._unsynced.setdefault(_directory(event.path), []).append((event, file))
            _change(self._live, event, file)
        else:
            file = self._live[event.path]
            assert file is not None
            if event.kind == "sync":
                file.sync()
            elif event.kind == "rot":
                _apply(file.durable, event)
            else:
                file.unsynced.append(event)

    @property
    def is_settled(self) -> bool:
        """Whether everything is durable, so that a crash has one outcome."""
        files = [*self._live.values(), *self._durable.values()]
        return not any(self._unsynced.values()) and not any(
            each.unsynced for each in files if each is not None
        )

    def draw(self, random: Random, keep: Callable[[str], Keep]) -> Image:
        """An image. keep: how the unsynced operations of the file or directory at a path fare."""
        entries = dict(self._durable)
        for directory, changes in sorted(self._unsynced.items()):
            fates = keep(f"{directory}/")(random, len(changes))
            for (event, file), kept in zip(changes, fates, strict=True):
                if kept:
                    _change(entries, event, file)
        directories = frozenset(path for path, file in entries.items() if file is None)
        files = {
            path: file.drawn(random, keep(path))
            for path, file in sorted(entries.items())
            # A file whose directory is not there cannot be reached.
            if file is not None and (not _directory(path) or _directory(path) in directories)
        }
        return Image(files, directories)


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def _change(entries: _Entries, event: Event, file: "_File | None") -> None:
    if event.kind == "delete":
        # Only this very file: where a lost creation left an older one, that one stays.
        if entries.get(event.path) is file:
            entries.pop(event.path, None)
        return
    if event.kind == "rename":
        if entries.get(event.path) is file:
            entries.pop(event.path, None)
        entries[event.target] = file
        return
    entries[event.path] = file


# ---- how unsynced operations fare ---------------------------------------------------------------


def lose_all(random: Random, count: int) -> list[int]:
    return [0] * count


def keep_all(random: Random, count: int) -> list[int]:
    return [1] * count


def keep_first(random: Random, count: int) -> list[int]:
    """Those before a random one: what a drive without a cache leaves."""
    kept = random.randint(0, count)
    return [1] * kept + [0] * (count - kept)


def keep_some(random: Random, count: int) -> list[int]:
    return [random.getrandbits(1) for _ in range(count)]


def lose_one(random: Random, count: int) -> list[int]:
    lost = random.randrange(count) if count else 0
    return [int(i != lost) for i in range(count)]


def tear_some(random: Random, count: int) -> list[int]:
    sector = random.choice(SECTORS)
    return [random.choice((0, 1, 1, sector, sector)) for _ in range(count)]


ANY: tuple[Keep, ...] = (
    lose_all, keep_all, keep_first, keep_some, lose_one, tear_some, tear_some,
)  # fmt: skip


def _region_only(kept: Keep, others: Keep) -> Callable[[str], Keep]:
    return lambda path: kept if path.endswith("region.kv") else others


OPPOSITES: tuple[Callable[[str], Keep], ...] = (
    _region_only(lose_all, keep_all),
    _region_only(lose_all, lose_all),
    lambda path: lose_one if path.endswith("/") else keep_all,
    _region_only(keep_all, keep_all),
    _region_only(keep_all, lose_all),
)
"""The region and everything else at their extremes, and one change of a directory that is missing
alone: where an order is not kept, one of these shows it first."""


def images_at(media: Media, random: Random, count: int) -> Iterator[Image]:
    """Up to `count` images of a crash now: first the opposites, then random ones."""
    if media.is_settled:
        yield media.draw(random, _region_only(keep_all, keep_all))
        return
    for number in range(count):
        if number < len(OPPOSITES):
            yield media.draw(random, OPPOSITES[number])
        else:
            yield media.draw(random, lambda path: random.choice(ANY))
