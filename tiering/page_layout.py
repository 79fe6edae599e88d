"""Where the Pages of a Segment's layer lie in its payload, and in which order their tokens do."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvtier.errors import FormatError
from kvtier.tiering.extent_format import CODEC_RAW, DIRECTORY_ENTRY, NO_POSITION, Directory
from kvtier.tiering.geometry import PAGE_TOKENS, LayerGeometry, pages_of

Order = npt.NDArray[np.int64]
"""int64 [kv_heads, tokens]: which token of the Segment lies at each place."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where the Pages of one Segment's layer lie in its payload (raw codec)."""

    layer: LayerGeometry
    tokens: int
    item_bytes: int

    @property
    def pages(self) -> int:
        return pages_of(self.tokens)

    @property
    def plain(self) -> Directory:
        """The directory of these Pages in the order of positions, without checksums. Shared by all
        layouts that are alike: not to be changed."""
        return _plain_directory(self)

    @property
    def head_bytes(self) -> int:
        return self.tokens * self.layer.row_width * self.item_bytes

    def directory(self, order: Order | None) -> Directory:
        """The directory of these Pages, checksums still zero."""
        heads, pages = self.layer.kv_heads, self.pages
        row_bytes = self.layer.row_width * self.item_bytes
        counts = np.full(pages, PAGE_TOKENS, np.int64)
        counts[-1] = self.tokens - (pages - 1) * PAGE_TOKENS
        in_head = np.arange(pages, dtype=np.int64) * PAGE_TOKENS * row_bytes
        directory = np.zeros((heads, pages), DIRECTORY_ENTRY)
        directory["offset"] = np.arange(heads)[:, None] * self.head_bytes + in_head
        directory["length"] = counts * row_bytes
        directory["tokens"] = counts
        directory["head_group"] = np.arange(heads)[:, None]
        directory["codec"] = CODEC_RAW
        positions = np.full((heads, pages * PAGE_TOKENS), NO_POSITION, np.uint16)
        positions[:, : self.tokens] = np.arange(self.tokens) if order is None else order
        directory["positions"] = positions.reshape(heads, pages, PAGE_TOKENS)
        return directory.reshape(-1)

    def require_raw(self, directory: Directory, where: str) -> None:
        """Raise FormatError unless the directory lays out these Pages as `directory()` does."""
        expected = self.directory(None)
        for name in ("offset", "length", "tokens", "head_group", "codec"):
            if len(directory) != len(expected) or (directory[name] != expected[name]).any():
                raise FormatError(f"{where}: page {name} is not what this release can read")

    def order_of(self, directory: Directory) -> Order | None:
        """The order that a directory keeps; None when it is that of positions.

        Raises FormatError when a head's positions are not a permutation.
        """
        heads = self.layer.kv_heads
        order = directory["positions"].reshape(heads, -1)[:, : self.tokens].astype(np.int64)
        in_order = np.arange(self.tokens)
        if (order == in_order).all():
            return None
        if (np.sort(order, axis=1) != in_order).any():
            raise FormatError("page directory: positions are not a permutation of the segment's")
        return order


@lru_cache(maxsize=4096)
def _plain_directory(layout: PageLayout) -> Directory:
    directory = layout.directory(None)
    directory.flags.writeable = False
    return directory
