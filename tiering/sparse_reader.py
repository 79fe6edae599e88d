"""Sparse attention: a query chooses from digests which Pages of the context it reads.

Pages are chosen by the attention mass that their digests promise, per kv head, up to a budget of
bytes. What was not read counts with its estimated mass and its mean value, where keys are sketched
(an estimate from means alone misleads as often as it helps). The Tail is always read.

Invariants:
- Only the tokens of a Sequence take part: see digested_views.py.
- The budget is a share of the bytes of the sealed Pages. The Tail is outside of it, and so are
  recent tokens that were sealed just now.
"""

from collections.abc import Callable

import numpy as np
import torch

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.kernels.digests import PageDigests, page_digests
from kvtier.kernels.page_mass import page_mass
from kvtier.kernels.paged_attention import merge
from kvtier.kernels.running import Partial
from kvtier.kernels.selection import group_mass, page_lists, top_pages, unread_partial
from kvtier.kernels.sketch import coordinate_weights
from kvtier.kernels.workspace import Workspace
from kvtier.tiering.digested_views import RECENT_TOKENS, DigestedViews, digested
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.geometry import PAGE_TOKENS, SEGMENT_PAGES, pages_of
from kvtier.tiering.packing import gather
from kvtier.tiering.page_recall import PageRecall
from kvtier.tiering.reader import Query, Reader
from kvtier.tiering.segment import Segment
from kvtier.tiering.sequence import Sequence

SKETCH_SEED = 1
"""Of the rotation of sketched keys: part of what a stored digest means."""


class SparseReader:
    """Attends to a part of the context. Callers hold the store's lock."""

    def __init__(
        self,
        reader: Reader,
        write_out: Callable[[Sequence], None],
        sketch_bits: int | None,
    ) -> None:
        """reader: attends to Frames. write_out: has what is sealed and in HOT alone begin to go to
        the device, because a Page that leaves HOT must be there."""
        self.geometry = reader.geometry
        self.residency = reader.residency
        self.mover = reader.mover
        self.recall = PageRecall(reader.mover)
        self._reader = reader
        self._write_out = write_out
        self.sketch = None if sketch_bits is None else (sketch_bits, SKETCH_SEED)
        self._moves = 0
        """How often a Segment lost its slot, or was to be written anew."""
        self.pages_to_choose = 0
        self.pages_chosen = 0
        self._workspace = Workspace()

    def forget(self, segment: Segment) -> None:
        """A Segment loses its slot or Extents: see Registry.on_moved."""
        self.recall.forget(segment)
        segment.digests = {}
        self._moves += 1

    def can(self, sequence: Sequence, layer: int) -> bool:
        """Whether there is anything to choose from: a layer with a window reads its window."""
        shape = self.geometry.layers[layer]
        return bool(sequence.views) and shape.window is None and shape.value_width > 0

    def attend(self, sequence: Sequence, query: Query, budget: float) -> torch.Tensor:
        """Attention of the last token: [q_heads, 1, value_width], the query's dtype.

        budget: the share of the sealed context's bytes that is read, above 0. Raises ConfigError,
        FormatError, DeviceError, CapacityError, and UnsupportedError for several tokens, or for KV
        that is not finite.
        """
        layer, vectors = query.layer, query.vectors
        if vectors.ndim != 3 or vectors.shape[1] != 1:
            raise UnsupportedError(
                f"a budget is for one token at a time: the query of layer {layer} has shape "
                f"{list(vectors.shape)}"
            )
        if not layer:
            self.recall.cache.begin_step()
        known = self._known(sequence, layer)
        log_mass = page_mass(
            vectors[:, 0],
            known.digests,
            scale=query.scale,
            workspace=self._workspace,
            softcap=query.softcap,
            refined=0.0 if self.sketch is None else 1.0,
        )
        chosen = self._choose(sequence, layer, known, log_mass, budget)
        parts = self._attend_chosen(sequence, query, known, chosen)
        if self.sketch is not None:
            digests = known.digests
            parts.append(
                unread_partial(
                    log_mass,
                    digests.array("value_means"),
                    digests.array("value_factors"),
                    ~chosen,
                    self._workspace,
                )
            )
        self._read_ahead(sequence, layer)
        return merge(parts).out.to(vectors.dtype)

    # ---- digests ----------------------------------------------------------------------------

    def _known(self, sequence: Sequence, layer: int) -> DigestedViews:
        known = sequence.table.digested.get(layer)
        if known is None or known.views is not sequence.views or known.moves != self._moves:
            # Taken out, because it is changed: where that fails, all of it is made anew.
            known = sequence.table.digested.pop(layer, None)
            self._write_out(sequence)
            views = sequence.views
            known = digested(known, views, layer, self.geometry, self.sketch, self._digest)
            self.recall.require_directories([Unit(view.segment, layer) for view in views])
            known.moves = self._moves
            sequence.table.digested[layer] = known
        return known

    def _digest(self, segment: Segment, layer: int, first: PageDigests | None) -> PageDigests:
        """Of one unit, which is read as a whole if it never was digested. first: the digests of the
        first Segment of the context, if that is another one: keys are sketched with its weights."""
        weights = None if first is None or first.sketch is None else first.sketch.weights
        found = segment.digests.get(layer)
        if found is None or not _weighted(found, weights):
            keys, values = self._rows(segment, layer)
            bits, seed = self.sketch or (None, 0)
            try:
                if bits is not None and weights is None:
                    weights = coordinate_weights(keys)
                found = page_digests(keys, values, bits, seed, weights)
            except ConfigError as error:
                raise UnsupportedError(
                    f"layer {layer} cannot be attended to by a budget: {error}"
                ) from error
            segment.digests[layer] = found
        return found

    def _rows(self, segment: Segment, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [heads, tokens, width] of one unit, as they lie in its Pages."""
        loaded = self.mover.load([Unit(segment, layer)])
        assert loaded, "HOT always has room for one unit"
        hot, tokens = self.residency.hot, segment.token_count
        frames = hot.frames[layer][segment.slot, :, : pages_of(tokens)].astype(np.int64)
        shape = self.geometry.layers[layer]
        return gather(hot.tier.memory(layer), torch.from_numpy(frames), shape, tokens)

    # ---- chosen -----------------------------------------------------------------------------

    def _choose(
        self,
        sequence: Sequence,
        layer: int,
        known: DigestedViews,
        log_mass: torch.Tensor,
        budget: float,
    ) -> torch.Tensor:
        """Which Pages are read, bool [heads, columns]."""
        heads = known.digests.heads
        mass = group_mass(log_mass, log_mass.shape[0] // heads)
        limit = round(budget * int(known.page_bytes.sum()))
        always = known.always
        if sequence.length(layer) - known.tokens < RECENT_TOKENS:
            fresh = known.recent & ~known.always
            always = always | fresh
            limit += int((fresh * known.page_bytes).sum(1).max())
        mask = top_pages(mass, known.page_bytes, limit, always)
        self.pages_chosen += int(mask.sum())
        self.pages_to_choose += mask.numel()
        return mask

    def _attend_chosen(
        self, sequence: Sequence, query: Query, known: DigestedViews, mask: torch.Tensor
    ) -> list[Partial]:
        """Over the chosen Pages, bool [heads, columns], and the Tail."""
        head, column = mask.nonzero(as_tuple=True)
        known.wanted = head.numpy(), column.numpy()
        is_hot = torch.from_numpy(self.residency.hot.pages[query.layer, known.slots] > 0)
        # What HOT has whole first: it needs no room, and may leave when others do.
        parts = self._attend_pages(query, known, mask & is_hot)
        parts += self._attend_pages(query, known, mask & ~is_hot)
        return parts + self._attend_tail(sequence, query)

    def _attend_tail(self, sequence: Sequence, query: Query) -> list[Partial]:
        """Over all that is not sealed, Segment by Segment: mostly there is one, and HOT has it. One
        that a pass beyond HOT brought is read back."""
        layer, hot = query.layer, self.residency.hot
        parts = []
        for each in sequence.tail:
            filled = each.filled[layer]
            if filled:
                loaded = self.mover.load([Unit(each, layer)])
                assert loaded, "HOT always has room for one unit"
                frames = hot.frames[layer][each.slot, :, : pages_of(filled)].astype(np.int64)
                last = (filled - 1) % PAGE_TOKENS + 1
                parts.append(self._reader.attend_frames(query, torch.from_numpy(frames), last))
        return parts

    def _attend_pages(
        self, query: Query, known: DigestedViews, mask: torch.Tensor
    ) -> list[Partial]:
        """Over these Pages, as many at a time as HOT surely has room for."""
        if not mask.any():
            return []
        layer, heads = query.layer, known.digests.heads
        frame_bytes = self.geometry.frames_bytes(layer, 1)
        at_once = max(SEGMENT_PAGES, self.residency.hot.tier.limit_bytes // 4 // frame_bytes)
        all_lists, counts = page_lists(mask)
        all_there = torch.arange(all_lists.shape[1]) < counts[:, None]
        parts = []
        for first in range(0, all_lists.shape[1], at_once):
            lists = all_lists[:, first : first + at_once]
            there = all_there[:, first : first + at_once]
            head, _ = there.nonzero(as_tuple=True)
            columns = lists[there].numpy()
            wanted = known.slots[columns], head.numpy(), known.numbers[columns]
            with self.recall.recalled(layer, *wanted) as recalled:
                # A head with fewer repeats any Frame, of which nothing counts.
                frames = torch.full(lists.shape, int(recalled[0]))
                frames[there] = torch.from_numpy(recalled)
                valid = None
                if known.shown is not None or not there.all():
                    valid = there[..., None].expand(*there.shape, PAGE_TOKENS).clone()
                    if known.shown is not None:
                        valid &= known.shown[torch.arange(heads)[:, None], lists]
                parts.append(self._reader.attend_frames(query, frames, valid))
        return parts

    # ---- ahead ------------------------------------------------------------------------------

    def _read_ahead(self, sequence: Sequence, layer: int) -> None:
        """While others compute: what the next layer wanted in the step before, if HOT lacks it."""
        behind = layer + 1 if layer + 1 < len(self.geometry.layers) else 0
        known = sequence.table.digested.get(behind)
        if known is None or known.wanted is None or known.views is not sequence.views:
            return
        if not self.residency.hot.pages[behind, known.slots].all():
            heads, columns = known.wanted
            self.recall.start(behind, known.slots[columns], heads, known.numbers[columns])


def _weighted(digests: PageDigests, weights: torch.Tensor | None) -> bool:
    """Whether keys were sketched with these weights; None: with whichever."""
    sketch = digests.sketch
    return weights is None or sketch is None or torch.equal(sketch.weights, weights)
