"""Memory that attention keeps between calls, and the views of it that calls of one shape share.

Making a view costs as much as a small product, and layer after layer asks for the same ones.
"""

import math

import torch
from torch import Tensor

from kvtier.kernels.launch_checks import PAGE_TOKENS

VIEWS_MAX = 32
"""Shapes whose views are kept; a step of a decode needs two to four."""


class Workspace:
    """Buffers kept between calls; one per thread that calls, not thread-safe.

    Invariants: a buffer only grows, to the next power of two elements; its contents mean nothing
    between calls; views that are kept are of buffers that are. It holds, before rounding up, 1 MiB
    of keys or values and 1 MiB of values beside them (or one page of every kv head, if that is
    more), half a MiB for a 16-bit pool, 8 MiB of scores (or one query's over 2,048 tokens, if that
    is more), 2 MiB of masks, and 8 MiB of queries and results. dense_causal_attention adds keys and
    values of 16,384 tokens of one kv head, if they have 16 bits.
    """

    __slots__ = ("_buffers", "_pieces", "_rows", "_spans", "_taken")

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._taken: dict[tuple[str, torch.dtype], Tensor] = {}
        self._rows: dict[tuple[int, int, int, int, int], Rows] = {}
        self._spans: dict[tuple[int, ...], Span] = {}
        self._pieces: dict[tuple[tuple[int, ...], int, int, int], Pieces] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all kept buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The kept buffers, flat; for tests and statistics."""
        return tuple(self._buffers.values())

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous view of the named buffer with this shape; its contents are undefined."""
        key = name, dtype
        taken = self._taken.get(key)
        if taken is not None and taken.shape == shape:
            return taken
        count = math.prod(shape)
        buffer = self._buffers.get(key)
        # What is made under inference_mode could not be written outside of it afterwards.
        with torch.inference_mode(False):
            if buffer is None or buffer.numel() < count:
                buffer = torch.empty(1 << max(count - 1, 0).bit_length(), dtype=dtype)
                self._buffers[key] = buffer
                # Views of the smaller buffer would keep its memory, too.
                self._rows.clear()
                self._spans.clear()
                self._pieces.clear()
            taken = self._taken[key] = buffer[:count].view(shape)
        return taken

    def rows(self, key: tuple[int, int, int, int, int]) -> "Rows":
        """Views for one block of queries; key: kv_heads, group, n, Dk, Dv."""
        found = self._rows.get(key)
        if found is None:
            found = Rows(self, *key)
            if len(self._rows) >= VIEWS_MAX:
                self._rows.clear()
            self._rows[key] = found
        return found

    def span(self, rows: "Rows", pages: int, chunk_pages: int, unused: int) -> "Span":
        """Views for pages of each kv head whose scores are held at a time; see Span."""
        key = rows.heads, rows.many, *rows.widths, pages, chunk_pages, unused
        found = self._spans.get(key)
        if found is None:
            found = Span(self, rows, pages, chunk_pages, unused)
            if len(self._spans) >= VIEWS_MAX:
                self._spans.clear()
            self._spans[key] = found
        return found

    def pieces(
        self, asked: tuple[int, int, int, int], pages: int, chunk_pages: int, unused: int
    ) -> "Pieces":
        """Views for pages that are attended to in chunks of at most so many; asked: kv_heads,
        group, n, width; see Pieces."""
        key = asked, pages, chunk_pages, unused
        found = self._pieces.get(key)
        if found is None:
            found = Pieces(self, *key)
            if len(self._pieces) >= VIEWS_MAX:
                self._pieces.clear()
            self._pieces[key] = found
        return found


class Rows:
    """One block of queries, and the state of its softmax: rows of [kv_heads, many, ...].

    The query group is folded into the query length, so that one product per kv head serves it. A
    product of 2, 3 or 7 rows takes longer than one of 4 or 8, so there may be more rows than
    queries. What the rest of them hold is nobody's: rows of a product do not meet.

    query [kv_heads, many, Dk], out [kv_heads, many, Dv], peak and total [1, kv_heads, many, 1].
    asked, answer, peaks and totals are those of the queries alone, [kv_heads, group, n, ...].
    """

    __slots__ = (
        "answer",
        "asked",
        "count",
        "heads",
        "many",
        "out",
        "peak",
        "peaks",
        "query",
        "total",
        "totals",
        "widths",
    )

    def __init__(
        self, workspace: Workspace, heads: int, group: int, n: int, key_width: int, value_width: int
    ) -> None:
        rows = self.count = group * n
        many = rows + (-rows % 4 if 1 < rows < 8 else 0)
        self.heads, self.many, self.widths = heads, many, (key_width, value_width)
        self.query = workspace.take("query", (heads, many, key_width))
        self.out = workspace.take("out", (heads, many, value_width))
        self.peak = workspace.take("peak", (1, heads, many, 1))
        self.total = workspace.take("total", (1, heads, many, 1))

        def shown(rows_of: Tensor) -> Tensor:
            return rows_of[:, :rows].view(heads, group, n, -1)

        self.asked, self.answer = shown(self.query), shown(self.out)
        self.peaks, self.totals = shown(self.peak[0]), shown(self.total[0])


class Span:
    """Neighbouring pages of all kv heads, in chunks of one size, whose scores are held at a time.

    The last chunk begins before the one ahead of it ends, if need be, and leaves out what that one
    has, as well as the last `unused` slots. starts: the first page of each chunk. scores
    [chunks, kv_heads, many, tokens of a chunk]; by_chunk: the same, one after the other; left_out:
    those of the last chunk that do not count; weights: the same as by_chunk, without what is left
    out. One buffer is for the keys of a chunk, and then for values, so that it stays in the
    processor's cache: gathered_keys [kv_heads * pages, 16 * Dk] and the same as keys [kv_heads, Dk,
    tokens], ready for a product; gathered_values [.., 16 * Dv], of_head [kv_heads, tokens, Dv], and
    values: for each chunk, without what is left out.
    """

    __slots__ = (
        "by_chunk",
        "chunk_pages",
        "gathered_keys",
        "gathered_values",
        "keys",
        "left_out",
        "of_head",
        "scores",
        "starts",
        "values",
        "weights",
    )

    def __init__(
        self, workspace: Workspace, rows: Rows, pages: int, chunk_pages: int, unused: int
    ) -> None:
        chunks = -(-pages // chunk_pages)
        size = self.chunk_pages = -(-pages // chunks)
        again = chunks * size - pages
        self.starts = [*range(0, (chunks - 1) * size, size), pages - size]
        heads, many, (key_width, value_width) = rows.heads, rows.many, rows.widths
        tokens = size * PAGE_TOKENS
        self.scores = workspace.take("scores", (chunks, heads, many, tokens))
        self.by_chunk = self.scores.unbind()
        self.gathered_keys, keys = self._gathered(workspace, heads, key_width)
        self.gathered_values, self.of_head = self._gathered(workspace, heads, value_width)
        self.keys = keys.transpose(1, 2)
        self.weights, self.values = list(self.by_chunk), [self.of_head] * chunks
        self.left_out: list[Tensor] = []
        if again or unused:
            last, end = self.by_chunk[-1], tokens - unused
            counts = slice(again * PAGE_TOKENS, end)
            self.weights[-1], self.values[-1] = last[..., counts], self.of_head[:, counts]
            outside = last[..., : counts.start], last[..., end:]
            self.left_out = [each for each in outside if each.shape[2]]

    def _gathered(self, workspace: Workspace, heads: int, width: int) -> tuple[Tensor, Tensor]:
        """Room for the pages of a chunk, and the tokens of each head in it."""
        rows = workspace.take("pages", (heads * self.chunk_pages, PAGE_TOKENS * width))
        return rows, rows.view(heads, -1, width)


class Pieces:
    """Neighbouring pages of all kv heads in chunks of one size, each attended to in one call, with
    its keys and values beside each other.

    The last chunk begins before the one ahead of it ends, if need be, and leaves out what that one
    has, as well as the last `unused` slots. starts: the first page of each chunk. gathered_keys,
    gathered_values: [kv_heads * pages, 16 * width]; keys, values: the same of each chunk, without
    what is left out, [kv_heads, 1, tokens, width]: kv heads are a batch, so that a result is in one
    piece. query [kv_heads, 1, many, width] for queries that cannot be taken as they are, because
    they have 16 bits or are 3 or 7, which takes longer than 4 or 8; asked: those of them that are
    queries, [kv_heads, group, n, width].
    """

    __slots__ = (
        "asked",
        "chunk_pages",
        "gathered_keys",
        "gathered_values",
        "keys",
        "many",
        "query",
        "starts",
        "values",
    )

    def __init__(
        self,
        workspace: Workspace,
        asked: tuple[int, int, int, int],
        pages: int,
        chunk_pages: int,
        unused: int,
    ) -> None:
        heads, group, n, width = asked
        chunks = -(-pages // chunk_pages)
        size = self.chunk_pages = -(-pages // chunks)
        self.starts = [*range(0, (chunks - 1) * size, size), pages - size]
        rows = group * n
        self.many = rows + (rows in (3, 7))
        self.query = workspace.take("query", (heads, 1, self.many, width))
        self.asked = self.query[:, 0, :rows].view(heads, group, n, width)
        shape = heads * size, PAGE_TOKENS * width
        self.gathered_keys = workspace.take("pages", shape)
        self.gathered_values = workspace.take("values of pages", shape)
        again, end = (chunks * size - pages) * PAGE_TOKENS, size * PAGE_TOKENS - unused

        def by_chunk(gathered: Tensor) -> list[Tensor]:
            whole = gathered.view(heads, 1, -1, width)
            return [whole] * (chunks - 1) + [whole[:, :, again:end]]

        self.keys, self.values = by_chunk(self.gathered_keys), by_chunk(self.gathered_values)
