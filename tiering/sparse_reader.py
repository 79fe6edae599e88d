"""Sparse attention: a query chooses from digests which Pages of the context it reads.

Pages are chosen by the attention mass that their digests promise, per kv head, up to a budget of
bytes. What was not read counts with its estimated mass and its mean value, where keys are sketched
(an estimate from means alone misleads as often as it helps). The Tail is always read.

Invariants:
- Only the tokens of a Sequence take part: see digested_views.py, and sparse_attention.py for what
  a budget is.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.kernels.digests import PageDigests
from kvtier.kernels.page_mass import page_mass, refined_share
from kvtier.tiering.digested_views import DigestedViews, digested
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.geometry import pages_of
from kvtier.tiering.packing import gather
from kvtier.tiering.page_recall import PageRecall
from kvtier.tiering.reader import Query, Reader
from kvtier.tiering.segment import Segment
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.sparse_attention import SparseAttention
from kvtier.tiering.steps import run
from kvtier.tiering.stored_digests import DigestKind, DigestReader


class SparseReader:
    """Attends to a part of the context. Callers hold the store's lock."""

    def __init__(
        self,
        reader: Reader,
        write_out: Callable[[Sequence], None],
        digests: DigestKind,
    ) -> None:
        """reader: attends to Frames. write_out: has what is sealed and in HOT alone begin to go to
        the device, because a Page that leaves HOT must be there. digests: which it chooses by."""
        self.geometry = reader.geometry
        self.residency = reader.residency
        self.mover = reader.mover
        self.recall = PageRecall(reader.mover)
        self.attention = SparseAttention(reader, self.recall, estimates=digests.sketch is not None)
        self._write_out = write_out
        self.kind = digests
        self.sketch = digests.sketch
        self.stored = DigestReader(reader.mover.extents, digests)
        self._digest_bytes = 0
        """Of the digests that Segments hold."""
        self.digests_made = 0
        """Units that were read as a whole to digest them."""
        self.digests_read = 0
        """Units whose digests were read from their Extents."""
        self._moves = 0
        """How often a Segment lost its slot, or was to be written anew."""

    def forget(self, segment: Segment) -> None:
        """A Segment loses its slot or Extents: see Registry.on_moved."""
        self.recall.forget(segment)
        held = [each for each in segment.digests.values() if each is not None]
        self._digest_bytes -= sum(each.held_bytes for each in held)
        segment.digests = {}
        self._moves += 1

    def held_bytes(self, sequences: Iterable[Sequence]) -> int:
        """Bytes of digests in memory: with Segments, and together for each of these Sequences."""
        known = [each for sequence in sequences for each in sequence.table.digested.values()]
        return self._digest_bytes + sum(each.held_bytes for each in known)

    def can(self, sequence: Sequence, layer: int) -> bool:
        """Whether there is anything to choose from: a layer with a window reads its window."""
        return bool(sequence.placed_views) and self.kind.are_of(layer)

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
        # Without what autograd would keep account of, all calls of torch together take 9 % less.
        with torch.inference_mode():
            masses = self.masses(query, known)
            out = self.attention.attend(sequence, query, known, masses, budget)
        # What is made there may not be written outside of it, or take part in a backward pass.
        return out.clone()

    def masses(self, query: Query, known: DigestedViews) -> torch.Tensor:
        """Natural log of the mass that each column promises, [q_heads, columns]."""
        return page_mass(
            query.vectors[:, 0],
            known.digests,
            scale=query.scale,
            workspace=self.attention.workspace,
            softcap=query.softcap,
            refined=0.0 if self.sketch is None else refined_share(known.digests.pages),
        )

    # ---- digests ----------------------------------------------------------------------------

    def _known(self, sequence: Sequence, layer: int) -> DigestedViews:
        known = sequence.table.digested.get(layer)
        if known is None or known.views is not sequence.placed_views or known.moves != self._moves:
            # Taken out, because it is changed: where that fails, all of it is made anew.
            known = sequence.table.digested.pop(layer, None)
            self._write_out(sequence)
            views = sequence.placed_views
            # This also tells the orders of units that were not read before.
            self.recall.require_directories([Unit(view.segment, layer) for view in views])
            self._read_stored([view.segment for view in views], layer)
            known = digested(known, views, layer, self.geometry, self.sketch, self._digest)
            known.moves = self._moves
            sequence.table.digested[layer] = known
        return known

    def _read_stored(self, segments: list[Segment], layer: int) -> None:
        """Have the digests of a layer with its Segments that lie in their Extents. Where none of
        any layer is known they are read together: the layers behind it come next."""
        layers = [layer]
        if not any(each.digests for each in segments):
            layers = [each for each in range(len(self.geometry.layers)) if self.kind.are_of(each)]
        units = [
            Unit(segment, each)
            for each in layers
            for segment in segments
            if each not in segment.digests
        ]
        if units:
            extents = self.stored.extents
            found = run(self.stored.reading(units, extents.blocking), extents.device)
            self.digests_read += len(found)
            for unit in units:
                # Whoever lacks some now is not asked again.
                unit.segment.digests[unit.layer] = None
            for unit, digests in found:
                self._keep(unit.segment, unit.layer, digests)

    def _digest(self, segment: Segment, layer: int) -> PageDigests:
        """Of one unit, which is read as a whole if it never was digested."""
        found = segment.digests.get(layer)
        if found is None:
            try:
                found = self.kind.make(*self._rows(segment, layer))
            except ConfigError as error:
                raise UnsupportedError(
                    f"layer {layer} cannot be attended to by a budget: {error}"
                ) from error
            self.digests_made += 1
            self._keep(segment, layer, found)
        return found

    def _keep(self, segment: Segment, layer: int, digests: PageDigests) -> None:
        self._digest_bytes += digests.held_bytes
        segment.digests[layer] = digests

    def _rows(self, segment: Segment, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [heads, tokens, width] of one unit, as they lie in its Pages."""
        loaded = self.mover.load([Unit(segment, layer)])
        assert loaded, "HOT always has room for one unit"
        hot, tokens = self.residency.hot, segment.token_count
        frames = hot.frames[layer][segment.slot, :, : pages_of(tokens)].astype(np.int64)
        shape = self.geometry.layers[layer]
        return gather(hot.tier.memory(layer), torch.from_numpy(frames), shape, tokens)
