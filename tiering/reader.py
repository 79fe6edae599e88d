"""The read path: attention over a Sequence's Pages, wherever they are.

A context larger than HOT streams through it in groups of Pages; partial results are merged by
their log-sum-exp, which is exact and needs bounded memory.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.io.device import Int64Array
from kvtier.kernels import launch_checks
from kvtier.kernels.paged_attention import dense_causal_attention, merge, paged_attention
from kvtier.kernels.running import Partial
from kvtier.kernels.workspace import Workspace
from kvtier.tiering.extent_io import Unit
from kvtier.tiering.frame_table import Placed, placed
from kvtier.tiering.geometry import PAGE_TOKENS, Geometry, LayerGeometry
from kvtier.tiering.packing import TORCH_DTYPES
from kvtier.tiering.page_table import Columns
from kvtier.tiering.residency import NO_FRAME, Residency
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.transfer import Mover

# Kernels know no Geometry; both must mean the same Page.
assert launch_checks.PAGE_TOKENS == PAGE_TOKENS

GROUP_PAGES = 128
"""Columns attended to at a time by many queries: 2,048 tokens, so that masks stay small."""
GROUP_PAGES_ONE_QUERY = 1024
"""Columns attended to at a time by one query: 16,384 tokens, so that calls are few."""


class Query(NamedTuple):
    """What is asked of one layer.

    vectors [q_heads, n, key_width]: the queries of the last n tokens. keys, values: those same
    tokens' own, if the caller still has them, so that a new chunk is not read back.
    """

    layer: int
    vectors: torch.Tensor
    scale: float
    softcap: float | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


class Reader:
    """Attends. Callers hold the store's lock."""

    def __init__(self, geometry: Geometry, residency: Residency, mover: Mover) -> None:
        self.geometry = geometry
        self.residency = residency
        self.mover = mover
        self._workspace = Workspace()

    def attend(self, sequence: Sequence, query: Query) -> torch.Tensor:
        """Exact causal attention of the last n tokens: [q_heads, n, value_width], the query's
        dtype. Raises ConfigError, FormatError, DeviceError, CapacityError, and
        UnsupportedError for a layer of latents."""
        shape = self.geometry.layers[query.layer]
        if not shape.value_width:
            raise UnsupportedError(
                f"layer {query.layer} keeps latents (value width 0): kvtier stores them, "
                "attention over them is not built"
            )
        self._check(query, shape)
        count = query.vectors.shape[1]
        length = sequence.length(query.layer)
        if count > length:
            raise ConfigError(
                f"queries of the last {count} tokens, but layer {query.layer} holds {length}: "
                "append keys and values first"
            )
        parts: list[Partial] = []
        past = length
        # One token's own key lies in HOT with the rest: a part of its own would cost a merge.
        if count > 1 and query.keys is not None and query.values is not None:
            past = length - count
            parts.append(
                dense_causal_attention(
                    query.vectors,
                    query.keys,
                    query.values,
                    scale=query.scale,
                    workspace=self._workspace,
                    window=shape.window,
                    softcap=query.softcap,
                )
            )
        found = self._placed(sequence, query, past)
        if found is None:
            parts.extend(self._past(sequence, query, past))
        else:
            self.mover.read_on_behind(sequence, query.layer, found.slots)
            # Float32 is for what is merged; alone, the result is the kernel's as it is.
            dtype = torch.float32 if parts else query.vectors.dtype
            attended = self.attend_frames(query, found.frames, found.valid, out_dtype=dtype)
            parts.append(attended)
        out = parts[0].out if len(parts) == 1 else merge(parts).out
        dtype = query.vectors.dtype
        # Even a conversion to the same dtype lets go of the interpreter's lock.
        return out if out.dtype is dtype else out.to(dtype)

    def rows(self, sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [kv_heads, n, key_width] and values [kv_heads, n, value_width] of all n tokens of a
        layer, those before its window too, in the order of positions.

        Raises FormatError, DeviceError.
        """
        shape = self.geometry.layers[layer]
        tokens = sequence.length(layer)
        dtype = TORCH_DTYPES[self.geometry.dtype]
        keys = torch.empty(shape.kv_heads, tokens, shape.key_width, dtype=dtype)
        values = torch.empty(shape.kv_heads, tokens, shape.value_width, dtype=dtype)
        parts = [(view.segment, view.limit) for view in sequence.views]
        parts += [(each, each.filled[layer]) for each in sequence.tail if each.filled[layer]]
        for segment, limit in parts:
            unit = Unit(segment, layer)
            loaded = self.mover.load([unit])
            assert loaded, "HOT always has room for one unit"
            held_keys, held_values = self.mover.tensors(unit)
            place = slice(segment.start, segment.start + limit)
            keys[:, place] = held_keys[:, :limit]
            values[:, place] = held_values[:, :limit]
        return keys, values

    @staticmethod
    def _check(query: Query, shape: LayerGeometry) -> None:
        """What the kernels cannot know: which shapes this layer has. Keys and values are checked
        even where one token's own are not used."""
        vectors = query.vectors
        asked = vectors.shape
        if len(asked) != 3 or asked[1] < 1 or asked[2] != shape.key_width:
            raise ConfigError(
                f"query of layer {query.layer} has shape {list(asked)}; it takes "
                f"[q_heads, tokens, {shape.key_width}] with at least one token"
            )
        if asked[0] % shape.kv_heads:
            raise ConfigError(
                f"query of layer {query.layer} has {asked[0]} heads; it takes a multiple "
                f"of the {shape.kv_heads} kv heads"
            )
        if query.keys is None and query.values is None:
            return
        if query.keys is None or query.values is None:
            raise ConfigError("keys and values are given together, or neither of them")
        for name, given, width in (
            ("keys", query.keys, shape.key_width),
            ("values", query.values, shape.value_width),
        ):
            expected = (shape.kv_heads, asked[1], width)
            if given.shape != expected or given.dtype != vectors.dtype:
                raise ConfigError(
                    f"{name} of layer {query.layer} has shape {list(given.shape)} of "
                    f"{given.dtype}; with this query it takes {list(expected)} of {vectors.dtype}"
                )

    def _past(self, sequence: Sequence, query: Query, past: int) -> Iterator[Partial]:
        """Attention over positions before `past`, group by group."""
        layer = query.layer
        shape = self.geometry.layers[layer]
        length, count = sequence.length(layer), query.vectors.shape[1]
        first = shape.first_seen(length - count)
        columns = sequence.table.columns(layer, sequence.views, sequence.tail, first)
        columns = columns.between(layer, first, past)
        size = GROUP_PAGES_ONE_QUERY if count == 1 else GROUP_PAGES
        owners, begins = np.unique(columns.owner, return_index=True)
        units = [Unit(columns.segments[owner], layer) for owner in owners.tolist()]
        ends = np.append(begins[1:], len(columns))
        at = 0
        while at < len(units):
            many = int(np.searchsorted(ends, begins[at] + size, "right")) - at
            group = self._beside_others(units[at : at + max(1, many)])
            loaded = self.mover.load(group)
            assert loaded, "HOT always has room for one unit"
            # What comes next is read while this is attended to.
            with self.mover.lease(group[:loaded]):
                self.mover.read_on(sequence, layer, units[at + loaded :])
            part = columns.part(slice(int(begins[at]), int(ends[at + loaded - 1])))
            yield self._attend_group(query, part, (length, count), (first, past))
            at += loaded

    def _beside_others(self, units: list[Unit]) -> list[Unit]:
        """The first of these, as many as take a quarter of HOT: half of it is for what is read
        ahead."""
        ends = np.cumsum([self.mover.flights.unit_bytes(each) for each in units])
        limit = self.residency.hot.tier.limit_bytes // 4
        return units[: max(1, int(np.searchsorted(ends, limit, "right")))]

    def _placed(self, sequence: Sequence, query: Query, past: int) -> Placed | None:
        """Frames of everything before `past`, where HOT holds all of it and every query sees it."""
        layer = query.layer
        if self.geometry.layers[layer].window is not None or past < sequence.sealed_tokens:
            return None
        if query.vectors.shape[1] > 1 and past == sequence.length(layer):
            return None
        tail = []
        for each in sequence.tail:
            filled = each.filled[layer]
            if filled and each.start < past:
                tail.append((each, min(filled, past - each.start)))
        found = placed(sequence.table.placed, self.residency.hot, layer, sequence.views, tail)
        if found is not None:
            self.residency.note(layer, found.slots)
        return found

    def attend_frames(
        self,
        query: Query,
        frames: torch.Tensor,
        valid: torch.Tensor | int | None,
        visible: torch.Tensor | None = None,
        out_dtype: torch.dtype = torch.float32,
    ) -> Partial:
        """Attention over Frames of HOT, which stay what they are meanwhile; see paged_attention."""
        shape = self.geometry.layers[query.layer]
        return paged_attention(
            query.vectors,
            self.residency.hot.tier.memory(query.layer),
            frames,
            (shape.key_width, shape.value_width),
            valid,
            scale=query.scale,
            workspace=self._workspace,
            softcap=query.softcap,
            visible=visible,
            out_dtype=out_dtype,
        )

    def _attend_group(
        self, query: Query, group: Columns, stream: tuple[int, int], bounds: tuple[int, int]
    ) -> Partial:
        """stream: tokens of the layer, and how many of the last ones ask. bounds: [first, past)."""
        layer = query.layer
        shape = self.geometry.layers[layer]
        frames = self.residency.hot.frames[layer][group.slots(), :, group.page]
        assert (frames != NO_FRAME).all()
        positions = group.positions(layer, shape.kv_heads, *bounds)
        valid = visible = None
        if positions is not None:
            shown = np.broadcast_to(positions >= 0, (shape.kv_heads, *positions.shape[1:]))
            valid = torch.from_numpy(shown.copy())
        length, count = stream
        asking = np.arange(length - count, length)
        if positions is None:
            all_positions = (group.start[:, None] + np.arange(PAGE_TOKENS))[None]
        else:
            all_positions = positions
        if self._differs_by_query(all_positions, asking, shape.window):
            seen = all_positions[None] <= asking[:, None, None, None]
            if shape.window is not None:
                seen &= all_positions[None] > asking[:, None, None, None] - shape.window
            visible = torch.from_numpy(seen)
        by_head = torch.from_numpy(np.ascontiguousarray(frames.T, np.int64))
        return self.attend_frames(query, by_head, valid, visible)

    @staticmethod
    def _differs_by_query(positions: Int64Array, asking: Int64Array, window: int | None) -> bool:
        """Whether some query does not see a position that another one sees."""
        if len(asking) == 1:
            return False
        if int(positions.max(initial=0)) > int(asking[0]):
            return True
        return (
            window is not None
            and int(positions.min(where=positions >= 0, initial=np.iinfo(np.int64).max))
            <= int(asking[-1]) - window
        )
