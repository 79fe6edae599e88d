"""Stores on several drives, which are files here."""

import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.io.catalog import Catalog, SegmentRow, unpack_extents
from kvtier.io.rawfile import create_region_file
from kvtier.tiering.config import Config
from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.store import Store
from tests.store_cases import MIB, PLAIN, Remembered, open_store, put, some_tokens

OF_M = Remembered(PLAIN)
DRIVES = 4
LONG = some_tokens(16 * SEGMENT_TOKENS, 1)
"""Sixteen Segments: four on each of four drives."""


def make_drives(folder: Path, sizes: Sequence[int] = (8 * MIB,) * DRIVES) -> list[str]:
    """Files that stand for drives."""
    paths = [str(folder / f"drive{number}") for number in range(len(sizes))]
    for path, nbytes in zip(paths, sizes, strict=True):
        create_region_file(path, nbytes)
    return paths


def make_store(folder: Path, sizes: Sequence[int] = (8 * MIB,) * DRIVES) -> Path:
    """A new store that is spread over new drives of these sizes; its directory."""
    path = folder / "kv"
    open_store(path, config=Config(make_drives(folder, sizes), hot="4MiB")).close()
    return path


def make_long(folder: Path, nbytes: int = 4 * MIB) -> Path:
    """A store on four drives of this size that holds LONG under the name "long"."""
    path = make_store(folder, (nbytes,) * DRIVES)
    with open_store(path) as store:
        put(store, OF_M, "long", LONG)
    return path


def rows(path: Path) -> list[SegmentRow]:
    with Catalog.open(path / "catalog.sqlite", read_only=True) as catalog:
        return catalog.segments()


def condemned(path: Path) -> list[int]:
    """Drives of what was removed and not erased yet."""
    with Catalog.open(path / "catalog.sqlite", read_only=True) as catalog:
        return [each.drive for each in catalog.condemned()]


def drives_of(row: SegmentRow) -> set[int]:
    return {each.drive for each in unpack_extents(row.extents)}


def take_away(folder: Path, number: int) -> None:
    """A drive is not there any more."""
    os.rename(folder / f"drive{number}", folder / f"away{number}")


def bring_back(folder: Path, number: int) -> None:
    os.rename(folder / f"away{number}", folder / f"drive{number}")


def tokens_there(store: Store, tokens: Sequence[int]) -> int:
    """How many tokens of a list can be loaded, holes apart."""
    return sum(end - start for start, end in store.stored(list(tokens)))
