"""Makes holes in what a store holds: changed bytes on the region, and a scrub that finds them."""

from pathlib import Path

from kvtier.io.catalog import Catalog, SegmentRow, unpack_extents
from kvtier.tiering.extent_format import header_bytes
from kvtier.tiering.store import Store

AT = 77
"""Byte of the payload that is changed."""


def rows(path: Path) -> list[SegmentRow]:
    """The Segments that a store's catalog names, as they were stored one after another."""
    with Catalog.open(path / "catalog.sqlite", read_only=True) as catalog:
        return catalog.segments()


def damage(store: Store, *segments: int) -> None:
    """Change a payload byte in the last layer of these Segments, by their place in the catalog."""
    path = Path(store._files.catalog.path).parent
    layer = len(store.geometry.layers) - 1
    found = rows(path)
    with (path / "region.kv").open("r+b") as region:
        for index in segments:
            row = found[index]
            extent = unpack_extents(row.extents)[layer]
            at = extent.offset + header_bytes(store.geometry, layer, row.token_count) + AT
            region.seek(at)
            byte = region.read(1)[0]
            region.seek(at)
            region.write(bytes([byte ^ 8]))


def lose(store: Store, *segments: int) -> None:
    """Damage Segments and let the store find it."""
    damage(store, *segments)
    store.scrub("1GiB").result()
