"""A Hugging Face `Cache` whose KV lives in a kvtier store.

    with kvtier.open("kv", model=model) as store:
        cache = TieredCache(store, input_ids)
        output = model.generate(input_ids, cache=cache)
        cache.save("book", tokens=output)

Each row of a batch is a Sequence; the padding on its left is not part of it. Columns count tokens
the way the library does, padding included.
"""

import copy
import weakref
from collections.abc import Sequence as Listing
from contextvars import Context
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvtier.errors import ConfigError
from kvtier.tiering.adapters.batch import Ids, Rows, as_batch, left_pads
from kvtier.tiering.adapters.report import Report, Tally
from kvtier.tiering.adapters.restoring import mending, restore
from kvtier.tiering.adapters.sparse_mode import SparseMode, as_budget
from kvtier.tiering.adapters.tiered_layer import TieredLayer
from kvtier.tiering.chain import Tokens
from kvtier.tiering.guard import Audits, Level
from kvtier.tiering.plan_runner import PlanName, Wish
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store


class TieredCache(Cache):
    """KV of a batch in a store; begins with what all rows of `input_ids` share with the store.

    input_ids: [tokens] or [batch, tokens]. attention_mask: same shape, zeros on the left where
    rows are padded. At least one token is always left for the model to compute. Raises
    ConfigError, and UnsupportedError for padding that is not on the left.

    plan: "auto" has the rows ready in the way that is predicted to be fastest: stored KV is loaded,
    computed again, or both at once from two ends (planner.py); "load" loads all that is stored,
    and computes only the holes in it; "recompute" uses nothing that is stored; "both" is what it
    says. deadline_s: what cannot be loaded in so many seconds is computed.

    budget: the share of the context, in bytes, that a generated token attends to, or a tuple of one
    for each layer; the prompt's own tokens attend to everything. "profile": what `kvtier guard run`
    found for this model. guard: how often `kvtier.generate` compares a step with an exact one
    ("off", "light", "strict"); it plays no part where everything is read.
    """

    def __init__(
        self,
        store: Store,
        input_ids: torch.Tensor | Listing[int],
        attention_mask: torch.Tensor | None = None,
        *,
        plan: PlanName = "auto",
        deadline_s: float | None = None,
        budget: float | tuple[float, ...] | Literal["exact", "profile"] = "exact",
        guard: Level = "light",
    ) -> None:
        if not isinstance(store, Store):
            raise ConfigError(f"store must be what kvtier.open gave: got {type(store).__name__}")
        wish = Wish(plan, deadline_s)
        wish.check()
        ids = as_batch(input_ids, "input_ids")
        pads = left_pads(ids, attention_mask)
        masked = [int(ids[row, 0]) for row, pad in enumerate(pads) if pad]
        self.pad_token: int | None = masked[0] if masked else getattr(store, "pad_token", None)
        """What follows a row that ended before others; set it where `generate` is told another."""
        streams = [ids[row, pad:] for row, pad in enumerate(pads)]
        rows = Rows(store, pads, [])
        rows.mode = SparseMode(as_budget(budget, store), guard, ids.shape[1])
        self._setup(rows)
        if hasattr(store, "model"):
            rows.compute = partial(compute_alone, store.model, store)
        self.restored_tokens = restore(rows, streams, ids.shape[1], wish)
        """Columns that are there already: loaded, or computed beside that."""

    def _setup(self, rows: Rows) -> None:
        self._stand_on(rows)
        # Sequences are let go when the cache is, at the store's next call: a finaliser may run
        # in the middle of one.
        finalizer = weakref.finalize(self, rows.store.release_later, rows.sequences)
        finalizer.atexit = False

    def _stand_on(self, rows: Rows) -> None:
        self.rows = rows
        layers = [TieredLayer(rows, layer) for layer in range(len(rows.store.geometry.layers))]
        super().__init__(layers=list(layers))
        self.begin_tally()

    @property
    def mode(self) -> SparseMode:
        """Which passes read everything, and which to a budget."""
        return self.rows.mode

    # ---- what the library calls -------------------------------------------------------------

    def observe(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> None:
        """The model is about to read these ids [batch, n]: they continue every row.

        A batch that is a multiple of this cache's (beams, several answers) repeats its rows.
        Raises ConfigError where they are not the ids that this cache was made for, or not at
        their positions.
        """
        rows = self.rows
        rows.require_between_passes()
        if not input_ids.numel():
            raise ConfigError(
                f"nothing is left for the model to read: this cache holds {rows.columns[0]} "
                "tokens, the prompt is not longer. Make a new TieredCache for it"
            )
        ids = as_batch(input_ids, "input_ids")
        repeats, rest = divmod(len(ids), len(rows.sequences))
        if repeats > 1 and not rest:
            self.batch_repeat_interleave(repeats)
        if len(ids) != len(rows.sequences):
            raise ConfigError(
                f"a batch of {len(ids)} rows, but this cache was made for {len(rows.sequences)}"
            )
        rows.check_positions(position_ids, ids.shape[1])
        at = rows.columns[0]
        for row, (pad, sequence) in enumerate(zip(rows.pads, rows.sequences, strict=True)):
            new = ids[row, max(pad - at, 0) :]
            known = sequence.tokens[: sequence.length()]
            if len(new) and len(known) == sequence.length() and not self._ended(sequence, new):
                rows.store.name_tokens(sequence, np.concatenate([known, new]))
        rows.announce(ids.shape[1])
        if not self.mode.is_guarded:
            self.tally.steps += max(0, at + ids.shape[1] - max(at, self.mode.prompt_columns))

    def _ended(self, sequence: Sequence, new: Ids) -> bool:
        """Whether a row of a batch is fed padding because others go on. Such tokens are left
        without names, and what has no name is not committed."""
        generated = len(sequence.tokens) == sequence.length() > 0
        return generated and len(self.rows.pads) > 1 and new.tolist() == [self.pad_token]

    def columns_read_again(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> int:
        """How many of these ids [batch, n], from the left, the cache holds, if their positions
        say that they begin at the beginning: assisted decoding passes a prompt as a whole,
        whatever the cache holds of it."""
        rows, ids = self.rows, as_batch(input_ids, "input_ids")
        if position_ids is None or len(ids) != len(rows.sequences) or not rows.hold(ids):
            return 0
        return rows.columns[0] if rows.positions_fit(position_ids, 0, ids.shape[1]) else 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.rows.columns[layer_idx]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; the library passes their number as a negative integer."""
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop takes the number of tokens to remove as a negative integer: "
                f"got {tokens_to_remove}"
            )
        rows = self.rows
        columns = rows.columns[0] + tokens_to_remove
        if columns < 0:
            raise ConfigError(f"cannot remove {-tokens_to_remove} of {rows.columns[0]} tokens")
        for pad, sequence in zip(rows.pads, rows.sequences, strict=True):
            rows.store.crop(sequence, max(0, columns - pad))
        rows.rewind(columns)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.rows.rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        count = len(self.rows.sequences)
        self.rows.rearrange([row for row in range(count) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        chosen = torch.arange(len(self.rows.sequences))[indices]
        self.rows.rearrange(chosen.tolist())

    def reset(self) -> None:
        """Forget everything; the rows and their padding stay."""
        self.crop(-self.rows.columns[0])
        for sequence in self.rows.sequences:
            sequence.tokens = sequence.tokens[:0]

    # ---- what kvtier adds -------------------------------------------------------------------

    def fork(self) -> "TieredCache":
        """A second cache with the same tokens, sharing all that is sealed."""
        rows = self.rows
        twin = Rows(rows.store, list(rows.pads), [rows.store.fork(s) for s in rows.sequences])
        twin.rewind(rows.columns[0])
        twin.compute = rows.compute
        # Nobody audits the twin, even where `kvtier.generate` has the loop of this one.
        # Not made anew: its provenance is that of its first budget.
        twin.mode = copy.copy(rows.mode)
        twin.mode.is_guarded = False
        cache = copy.copy(self)
        cache._setup(twin)
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> "TieredCache":
        return self.fork()

    def begin_tally(self) -> None:
        """What `report` says counts from now on."""
        self.tally = Tally(self.rows.store.sparse_counts(), Audits(self.mode.share))

    def report(self) -> Report:
        """What the last answer of `kvtier.generate` was made with, so far; before the first one,
        or without it, all that was read since this cache was made."""
        return self.tally.report(self.mode.share, self.rows.store.sparse_counts())

    def close(self) -> None:
        """Let go of the Sequences now. What was saved stays saved."""
        for sequence in self.rows.sequences:
            self.rows.store.release(sequence)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def save(
        self,
        name: str,
        tokens: torch.Tensor | Listing[int] | None = None,
        *,
        hold: bool | float | None = None,
    ) -> int:
        """Seal and flush; returns the tokens saved. Survives the process.

        tokens: what the model put out, [tokens] or [batch, tokens], padding included; default:
        the ids that the model was seen to read. Rows of a batch are saved as NAME/0, NAME/1, ...
        Padding is never stored, neither on the left nor behind the end of a row. hold: keep it
        from eviction (True, or for so many seconds); None: as the name was before. Raises
        ConfigError when the length does not fit the KV held, CapacityError past the cap of holds.
        """
        rows = self.rows
        if tokens is None:
            return sum(
                self._save_row(name, row, sequence.tokens.astype(np.int64), hold)
                for row, sequence in enumerate(rows.sequences)
            )
        ids = as_batch(tokens, "tokens")
        held = rows.columns[0]
        if len(ids) != len(rows.sequences) or ids.shape[1] not in (held, held + 1):
            raise ConfigError(
                f"tokens {list(ids.shape)} do not fit the KV held: {len(rows.sequences)} rows of "
                f"{held} tokens (or {held + 1}, the last not read by the model)"
            )
        return sum(
            self._save_row(name, row, ids[row, pad:], hold) for row, pad in enumerate(rows.pads)
        )

    def _row_name(self, name: str, row: int) -> str:
        return name if len(self.rows.sequences) == 1 else f"{name}/{row}"

    def _save_row(self, name: str, row: int, stream: Ids, hold: bool | float | None) -> int:
        rows = self.rows
        sequence = rows.sequences[row]
        end = self._end(stream)
        row_name = self._row_name(name, row)

        def save(saved: Sequence) -> int:
            ids = stream[: saved.length()]
            use = partial(rows.store.save, saved, row_name, ids, hold=hold)
            return mending(rows, saved, use)

        if end >= sequence.length():
            return save(sequence)
        # The row ended before others of its batch: what follows is padding.
        ended = rows.store.fork(sequence)
        try:
            rows.store.crop(ended, min(end, ended.length()))
            return save(ended)
        finally:
            rows.store.release(ended)

    def _end(self, stream: Ids) -> int:
        """Tokens before the padding that ends a row."""
        if self.pad_token is None or len(self.rows.sequences) == 1:
            return len(stream)
        other = np.flatnonzero(stream != self.pad_token)
        return int(other[-1]) + 1 if len(other) else len(stream)


def compute_alone(model: PreTrainedModel, store: Store, sequence: Sequence, tokens: Tokens) -> None:
    """Have the model read the next tokens of one Sequence: between the passes of a caller, or in
    the middle of one."""
    cache = TieredCache.__new__(TieredCache)
    cache._stand_on(Rows(store, [0], [sequence]))
    at = sequence.length()
    cache.rows.rewind(at)
    reading = partial(
        model,
        input_ids=torch.from_numpy(tokens.astype(np.int64))[None],
        position_ids=torch.arange(at, at + len(tokens))[None],
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    with torch.no_grad():
        # What the library notes of a caller's pass in context variables must not see this one.
        Context().run(reading)
