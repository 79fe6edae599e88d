"""Digests: what stays in memory of every Page of a layer, so that a query can choose what to read.

Of each Page the mean key, the mean value and the count of its tokens are kept, and, where memory
allows, a sketch of every key. With a key and value width of 64 in 16 bit, means alone are 3.6 % of
the KV, with a sketch of 2, 3 or 4 bits 10.3, 13.4 or 16.5 %.

Invariants of this file:
- Means are int8 with one float32 factor a page. Mean keys are kept relative to the mean key of
  their Segment and head, because keys of a model share a large common part that would use up the
  8 bits.
- A LayerDigests only grows at its end and is cropped from its end, a Segment at a time; its arrays
  have room to spare, so that adding Segments costs time in proportion to what is added.
- Digests speak for all the tokens of their Page. Where a view shows fewer, the caller must read the
  page (`always` of top_pages), never estimate it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier.kernels.launch_checks import PAGE_TOKENS
from kvtier.kernels.packed_codes import halves
from kvtier.kernels.sketch import Sketch, SketchedPages, in_order, scales_of, sketch_keys
from kvtier.kernels.workspace import Workspace

GROWTH = 1.5
"""Arrays that are too small are made anew this much larger."""


@dataclass(frozen=True, slots=True)
class PageDigests:
    """Digests of one layer of one Segment, heads leading.

    `centre` float32 [heads, Dk], the mean key; `key_means` int8 [heads, pages, Dk], relative to the
    centre, times `key_factors` float32 [heads, pages]; `value_means` and `value_factors` alike;
    `tokens`: all pages but the last hold 16; `sketch` of the same keys, or None.
    """

    centre: Tensor
    key_means: Tensor
    key_factors: Tensor
    value_means: Tensor
    value_factors: Tensor
    tokens: int
    sketch: Sketch | None

    @property
    def held_bytes(self) -> int:
        """Bytes of all arrays."""
        means = (self.key_means, self.key_factors, self.value_means, self.value_factors)
        held = sum(tensor.numel() * tensor.element_size() for tensor in (self.centre, *means))
        return held + (0 if self.sketch is None else self.sketch.held_bytes)


def page_digests(
    keys: Tensor,
    values: Tensor,
    bits: int | None = None,
    seed: int = 0,
) -> PageDigests:
    """Digests of keys [heads, tokens, Dk] and values [heads, tokens, Dv] in the order of slots.

    Page p holds tokens [16 p, 16 p + 16). With `bits` (2, 3 or 4) keys are sketched too, rotated by
    `seed`. Raises ConfigError for arguments that do not fit together or values that are not finite.
    """
    _check_tokens(keys, values)
    with torch.no_grad():
        means = _page_means(keys)
        values_of_pages = _page_means(values)
        centre = keys.float().mean(1)
        key_means, key_factors = _as_int8(means - centre.unsqueeze(1))
        value_means, value_factors = _as_int8(values_of_pages)
    return PageDigests(
        centre,
        key_means,
        key_factors,
        value_means,
        value_factors,
        keys.shape[1],
        None if bits is None else sketch_keys(keys, centre, bits, seed),
    )


class LayerDigests:
    """Digests of one layer over the Segments of a context, as arrays; not thread-safe.

    `widths` (Dk, Dv); `sketch` (bits, seed), or None for means alone. Arrays that pages grow are
    read up to `pages`: key_means int8 [heads, pages, Dk], key_factors float32 [heads, pages], the
    same for values, counts uint8 [pages], owners int64 [pages] (the index of a page's Segment).
    """

    def __init__(
        self, heads: int, widths: tuple[int, int], sketch: tuple[int, int] | None = None
    ) -> None:
        if heads < 1 or min(widths) < 1:
            raise ConfigError(f"heads is {heads} and widths {widths}; they take at least 1")
        self.heads = heads
        self.widths = widths
        self.sketch = sketch
        self._first_pages = [0]
        self._short: list[bool] = []
        self._arrays: dict[str, Tensor] = {}

    @property
    def segments(self) -> int:
        return len(self._first_pages) - 1

    @property
    def pages(self) -> int:
        return self._first_pages[-1]

    @property
    def short(self) -> bool:
        """Whether there are pages with fewer than 16 tokens."""
        return any(self._short)

    @property
    def held_bytes(self) -> int:
        """Bytes of what the pages take, without the room to spare."""
        return sum(
            array.narrow(axis, 0, self._length(kind)).numel() * array.element_size()
            for name, array in self._arrays.items()
            for axis, kind in [_PLACES[name]]
        )

    def array(self, name: str) -> Tensor:
        """One of the arrays, cut to what is in use."""
        axis, kind = _PLACES[name]
        return self._arrays[name].narrow(axis, 0, self._length(kind))

    def add(self, digests: PageDigests) -> None:
        """Append the pages of a Segment. Raises ConfigError where they do not fit the others."""
        self._check(digests)
        pages = digests.key_means.shape[1]
        counts = torch.full((pages,), PAGE_TOKENS, dtype=torch.uint8)
        counts[-1] = digests.tokens - (pages - 1) * PAGE_TOKENS
        new = {
            "centres": digests.centre.unsqueeze(1),
            "key_means": digests.key_means,
            "key_factors": digests.key_factors,
            "value_means": digests.value_means,
            "value_factors": digests.value_factors,
            "counts": counts,
            "owners": torch.full((pages,), self.segments),
        }
        if digests.sketch is not None:
            new["words"] = halves(digests.sketch.words)
            new["codes"] = in_order(digests.sketch.codes, digests.sketch.bits)
            new["grid"] = torch.stack((digests.sketch.low, digests.sketch.step)).unsqueeze(2)
        for name, source in new.items():
            self._append(name, source)
        self._first_pages.append(self.pages + pages)
        self._short.append(digests.tokens % PAGE_TOKENS != 0)

    def crop(self, segments: int) -> None:
        """Keep the first `segments` Segments."""
        if not 0 <= segments <= self.segments:
            raise ConfigError(f"segments is {segments}; it takes 0 to {self.segments}")
        del self._first_pages[segments + 1 :], self._short[segments:]

    def sketched(
        self, of_heads: slice, pages: Tensor | slice, workspace: Workspace
    ) -> SketchedPages:
        """The sketches of some heads' pages: a slice of them, or int64 [heads, n]; words of those
        are gathered in a kept buffer."""
        words, codes, grid = (self._arrays[name] for name in ("words", "codes", "grid"))
        owners, counts, grid = self._arrays["owners"], self._arrays["counts"], grid[:, of_heads]
        if isinstance(pages, slice):
            words, codes = words[:, :, of_heads, pages], codes[of_heads, pages]
            counts, owners = counts[pages].unsqueeze(0), owners[pages]
        else:
            words, codes = self._gathered(of_heads.start, pages, workspace)
            counts, owners = counts.take(pages), owners.take(pages)
        empty = None
        if self.short and int(counts.min()) < PAGE_TOKENS:
            by_slot = torch.arange(PAGE_TOKENS) >= counts.unsqueeze(-1)
            by_place = in_order(by_slot, words.shape[0]).permute(2, 0, 1)
            empty = by_place.expand(-1, grid.shape[1], -1)
        grids = grid.gather(2, owners.expand(2, grid.shape[1], -1))
        return SketchedPages(words, scales_of(codes, grids), empty)

    def _gathered(
        self, first_head: int, pages: Tensor, workspace: Workspace
    ) -> tuple[Tensor, Tensor]:
        """Words and codes of pages [heads, n] of heads from a first one on."""
        words, codes = self._arrays["words"], self._arrays["codes"]
        bits, _, heads, room, quarter = words.shape
        head = torch.arange(first_head, first_head + len(pages)).unsqueeze(1)
        rows = torch.stack((pages + head * room, pages + (head + heads) * room)).view(-1)
        gathered = workspace.take("words", (bits, len(rows), quarter), torch.int32)
        for plane in range(bits):
            torch.index_select(words[plane].view(-1, quarter), 0, rows, out=gathered[plane])
        rows = (pages + head * codes.shape[1]).view(-1)
        by_page = codes.view(-1, PAGE_TOKENS).index_select(0, rows)
        return gathered.view(bits, 2, len(pages), -1, quarter), by_page.view(*pages.shape, -1)

    def _length(self, kind: str) -> int:
        return self.pages if kind == "page" else self.segments

    def _append(self, name: str, source: Tensor) -> None:
        axis, kind = _PLACES[name]
        start, count = self._length(kind), source.shape[axis]
        array = self._arrays.get(name)
        if array is None or array.shape[axis] < start + count:
            shape = list(source.shape)
            shape[axis] = max(start + count, int(start * GROWTH))
            larger = torch.empty(shape, dtype=source.dtype)
            if array is not None:
                larger.narrow(axis, 0, start).copy_(array.narrow(axis, 0, start))
            self._arrays[name] = array = larger
        array.narrow(axis, start, count).copy_(source)

    def _check(self, digests: PageDigests) -> None:
        heads, _, key_width = digests.key_means.shape
        got = (heads, (key_width, digests.value_means.shape[2]))
        if got != (self.heads, self.widths):
            raise ConfigError(
                f"digests has (heads, widths) {got}; it takes {(self.heads, self.widths)}"
            )
        sketch = digests.sketch
        kind = None if sketch is None else (sketch.bits, sketch.seed)
        if kind != self.sketch:
            raise ConfigError(
                f"digests has a sketch with (bits, seed) {kind}; it takes {self.sketch}"
            )


_PLACES = {
    "centres": (1, "segment"),
    "grid": (2, "segment"),
    "key_means": (1, "page"),
    "key_factors": (1, "page"),
    "value_means": (1, "page"),
    "value_factors": (1, "page"),
    "counts": (0, "page"),
    "owners": (0, "page"),
    "words": (3, "page"),
    "codes": (1, "page"),
}
"""The dimension along which each array grows, and with what."""


def _page_means(rows: Tensor) -> Tensor:
    """Means [heads, pages, width] over pages of rows [heads, tokens, width]."""
    heads, tokens, width = rows.shape
    whole = tokens // PAGE_TOKENS
    cut = whole * PAGE_TOKENS
    means = rows[:, :cut].reshape(heads, whole, PAGE_TOKENS, width).float().mean(2)
    if cut == tokens:
        return means
    return torch.cat((means, rows[:, cut:].float().mean(1, keepdim=True)), 1)


def _as_int8(means: Tensor) -> tuple[Tensor, Tensor]:
    """`means` [heads, pages, width] as int8, and the factors [heads, pages] that undo it."""
    factors = means.abs().amax(2).div_(127).clamp_(min=1e-30)
    return (means / factors.unsqueeze(2)).round_().to(torch.int8), factors


def _check_tokens(keys: Tensor, values: Tensor) -> None:
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.dim() != 3 or 0 in tensor.shape or tensor.shape[:2] != keys.shape[:2]:
            raise ConfigError(
                f"{name} has shape {list(tensor.shape)}; it takes [heads, tokens, width], keys and "
                "values with the same heads and tokens, at least one of each"
            )
        if not tensor.is_floating_point() or not tensor.is_cpu:
            raise ConfigError(f"{name} is {tensor.dtype} on {tensor.device}; it takes cpu floats")
        if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
            raise ConfigError(f"{name} holds values that are not finite; it takes finite ones")
