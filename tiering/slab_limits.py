"""Sizes and bounds of slabs: apart from the format, because a listing needs nothing else of it."""

from kvtier.io.alignment import GRID_BYTES

SLAB_BYTES = 1 << 20
"""Bytes of Blobs that one slab gathers; a larger Blob has a slab of its own."""
ENTRIES_MAX = 4096
KEY_BYTES_MAX = 1024
BLOB_ALIGNMENT = 8
COPIES = 2
"""Of a slab's header."""
HEADERS_BYTES = COPIES * GRID_BYTES
