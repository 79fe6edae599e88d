"""The store: calls its parts from left to right.

    WRITE  append: Tail's Frames -> (512 tokens) -> Extents -> (last layer) -> flush -> catalog
    READ   attend: PageTable -> what HOT lacks is read and checked -> attention, group by group
    RESUME tokens -> prefix index -> longest stored match -> its Pages, layer by layer

Invariants:
- Data is flushed before the catalog names it; the catalog is committed before it can be found.
- Bytes that fail their check are a miss for `resume` and a typed error for `attend`, never data.
"""

import math
import time

import numpy as np
import torch

from kvtier.errors import ConfigError, DeviceError, FormatError
from kvtier.tiering import stored_ranges
from kvtier.tiering.chain import Tokens, as_tokens
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.holds import hold_end
from kvtier.tiering.packing import as_operand, as_tensor
from kvtier.tiering.reader import Query
from kvtier.tiering.record_format import require_name
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store_core import StoreCore


class Store(StoreCore):
    """One store, open for writing. Made by `Store.open` or `kvtier.open`."""

    # ---- sequences --------------------------------------------------------------------------

    def sequence(self, provenance: Provenance = EXACT) -> Sequence:
        """A new, empty Sequence."""
        with self._lock:
            self._require_open()
            return self._new_sequence(provenance)

    def _new_sequence(self, provenance: Provenance) -> Sequence:
        sequence = Sequence(len(self.geometry.layers), provenance)
        self._own.add(sequence)
        return sequence

    def resume(
        self, tokens: object, *, provenance: Provenance = EXACT, lazily: bool = False
    ) -> Sequence:
        """A Sequence that begins with the longest stored prefix of `tokens`, maybe none of it.

        Its `length()` says how much was found. What fails its check is not part of a match. As
        much of it as fits is brought into HOT. lazily: layer by layer while `attend` goes through
        the layers, so that the first can begin at once. Then only headers are checked here, and
        `attend` raises DeviceError or FormatError where the rest is not as it should be; what was
        found so is out of use afterwards.
        """
        wanted = as_tokens(tokens)
        with self._lock:
            self._require_open(is_urgent=True)
            sequence = self._new_sequence(provenance)
            self._restorer.resume(sequence, wanted, lazily=lazily)
            return sequence

    def extend(self, sequence: Sequence, tokens: object) -> int:
        """Go on with what is stored of `tokens` from the end of a Sequence on; returns its length.

        This is for what lies behind a hole (`holes`), once the hole was computed and appended. A
        stored Segment is attached where it begins, with all checks of `resume`, and what follows
        it. The Tail is sealed for it, in memory. tokens: all of the Sequence's and what may
        follow. Raises ConfigError where they are not the Sequence's, or during a pass.
        """
        wanted = as_tokens(tokens)
        with self._lock:
            self._require_open(sequence, is_urgent=True)
            sequence.require_between_passes()
            held = sequence.length()
            if len(sequence.tokens) < held or len(wanted) < held:
                raise ConfigError(
                    f"extend needs the ids of all {held} tokens of this sequence: "
                    f"{len(sequence.tokens)} are named, {len(wanted)} given. Call name_tokens"
                )
            sequence.declare(wanted[:held])
            self._writer.sealer.finish(sequence)
            views = self._restorer.walk(sequence, wanted)
            starts = {view.segment.start for view in stored_ranges.sound(views, held)}
            ends = {view.end for view in views if stored_ranges.is_whole_loss(view)}
            if held in starts | ends:
                # Also where a lost Segment ended: what was computed can then take its place.
                self._writer.freeze(sequence)
            if held in starts:
                self._restorer.extend(sequence, wanted)
            return sequence.length()

    def graft(self, sequence: Sequence, other: Sequence) -> None:
        """Have a Sequence go on upon what `other` holds instead of its own Segments of the same
        first tokens, computed or loaded anew because the old ones are lost. During a pass too.

        Both are named so far, of one provenance or `other` is exact, and it ends where a Segment of
        the Sequence does. `other` is released. Raises ConfigError, and changes nothing, where it
        does not fit.
        """
        with self._lock:
            self._require_open(sequence)
            self._require_open(other)
            other.require_between_passes()
            held = other.length()
            if sequence is other or not sequence.provenance.may_follow(other.provenance):
                raise ConfigError(
                    "only another sequence of the same provenance, or an exact one, can be "
                    "grafted in"
                )
            named = min(len(sequence.tokens), len(other.tokens)) >= held
            if not named or not np.array_equal(other.tokens[:held], sequence.tokens[:held]):
                raise ConfigError(
                    f"the {held} tokens to be grafted in are not named in both sequences, or are "
                    "not the same"
                )
            if held not in (0, *(view.end for view in sequence.views)):
                raise ConfigError(
                    f"{held} tokens cannot be grafted in: no segment of this sequence ends there"
                )
            self._writer.freeze(other)
            self._writer.sealer.finish(sequence)
            old = [view for view in sequence.views if view.end <= held]
            behind = sequence.views[len(old) :]
            sequence.views, other.views = (*other.views, *behind), ()
            following = [*(view.segment for view in behind), *sequence.tail]
            if following and following[0].catalog_id is None:
                grafted = len(sequence.views) - len(behind)
                following[0].parent = sequence.views[grafted - 1] if grafted else None
            # Of what was computed, something may be written by nobody yet.
            self._writer.growing.add(sequence)
            for view in old:
                self._registry.release(view.segment)
            self.release(other)

    def go_on_approximately(self, sequence: Sequence, provenance: Provenance) -> None:
        """Say that what is appended to an exact Sequence from now on is approximate: an exact
        request never finds it. Its Tail is sealed, and stays exact.

        Raises ConfigError for a provenance that is exact, for a Sequence that is approximate in
        another way, or during a pass.
        """
        with self._lock:
            self._require_open(sequence)
            if sequence.provenance == provenance != EXACT:
                return
            if provenance == EXACT or sequence.provenance != EXACT:
                raise ConfigError(
                    f"a sequence that is {sequence.provenance.text} cannot go on as "
                    f"{provenance.text}"
                )
            self._writer.seal(sequence)
            sequence.provenance = provenance

    def stored(self, tokens: object, *, provenance: Provenance = EXACT) -> list[tuple[int, int]]:
        """Ranges [start, end) of `tokens` that are stored, those behind holes too. Reads no KV."""
        wanted = as_tokens(tokens)
        with self._lock:
            self._require_open()
            return stored_ranges.ranges(self._restorer.stored(provenance, wanted)[0])

    def holes(self, tokens: object, *, provenance: Provenance = EXACT) -> list[tuple[int, int]]:
        """Ranges of `tokens` that are lost before others that are stored, as they were cut.

        Computed in these pieces, each followed by `extend`, they take the places of what was lost.
        """
        wanted = as_tokens(tokens)
        with self._lock:
            self._require_open()
            return self._restorer.stored(provenance, wanted)[1]

    def lookup(self, tokens: object, *, provenance: Provenance = EXACT) -> int:
        """How many tokens of `tokens` are stored, from the first one on. Reads no KV."""
        wanted = as_tokens(tokens)
        with self._lock:
            self._require_open()
            views = self._registry.match(provenance, wanted)
            return views[-1].end if views else 0

    def saved(self, name: str) -> tuple[Tokens, Provenance]:
        """The tokens that were saved under a name, and how their KV came about. Reads no KV.

        Raises ConfigError (no such name), FormatError where its row cannot be true.
        """
        with self._lock:
            self._require_open()
            row = self._files.inventory.names.get((self._fingerprint_id, name))
            if row is None:
                raise ConfigError(f"there is no name {name!r} in this store for this model")
            return self._registry.tokens_of(row)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second Sequence with the same tokens, that shares what is sealed.

        Long Tails are frozen and shared, short ones copied. Raises ConfigError during a pass.
        """
        with self._lock:
            self._require_open(sequence)
            twin = self.sequence(sequence.provenance)
            try:
                self._writer.fork(sequence, twin)
            except BaseException:
                self.release(twin)
                raise
            return twin

    def crop(self, sequence: Sequence, length: int) -> None:
        """Forget all tokens from position `length` on; also ends a pass that was broken off.

        Raises ConfigError unless every layer holds that many tokens.
        """
        with self._lock:
            self._require_open(sequence)
            for segment in self._writer.crop(sequence, length):
                self._registry.release(segment)

    def release(self, sequence: Sequence) -> None:
        """End the use of a Sequence. What was committed stays stored; the rest is forgotten."""
        with self._lock.to_close():
            if sequence.closed or self._closed or self._lock.is_broken:
                return
            self._require_open(sequence)
            sequence.closed = True
            self._restorer.touch(sequence)
            self._release_views(sequence)

    def release_later(self, sequences: list[Sequence]) -> None:
        """Release at the next call. Safe at any moment, a finaliser's included."""
        self._to_release.append(sequences)

    # ---- tokens in, attention out -----------------------------------------------------------

    def append(self, sequence: Sequence, layer: int, keys: object, values: object) -> None:
        """Add the keys and values of new tokens to one layer. Every layer gets the same tokens.

        keys [kv_heads, n, key_width], values [kv_heads, n, value_width]: torch tensors or numpy
        arrays of the store's dtype. Whole Segments go to the region at once; they are committed
        when their last layer arrives, if their tokens are named. By keys (Config.placement), one
        that was begun before goes there bit by bit, with the passes that follow. Raises
        ConfigError, CapacityError, DeviceError.
        """
        with self._lock:
            self._require_open(sequence)
            completed = self._writer.append(sequence, layer, as_tensor(keys), as_tensor(values))
            if completed:
                self._committer.commit(sequence)

    def attend(
        self,
        sequence: Sequence,
        layer: int,
        query: object,
        *,
        keys: object = None,
        values: object = None,
        scale: float | None = None,
        softcap: float | None = None,
        budget: float | None = None,
    ) -> torch.Tensor:
        """Exact causal attention of the last n tokens over everything before and among them.

        query [q_heads, n, key_width] -> [q_heads, n, value_width]. keys, values: what was
        appended for those n tokens, if at hand (saves reading a long chunk back). scale:
        1 / sqrt(key_width) unless given. budget: attend to the pages that the query chooses, up to
        this share of the bytes of what is sealed, and to the Tail; for one token. Raises
        ConfigError, DeviceError, and FormatError for damaged bytes.
        """
        with self._lock:
            self._require_open(sequence, is_urgent=True)
            self._require_layer(layer)
            width = self.geometry.layers[layer].key_width
            asked = Query(
                layer,
                as_operand(query),
                1.0 / math.sqrt(width) if scale is None else scale,
                softcap,
                None if keys is None else as_operand(keys),
                None if values is None else as_operand(values),
            )
            try:
                if budget is not None and self._is_sparse(sequence, layer, budget):
                    return self._sparse.attend(sequence, asked, budget)
                return self._reader.attend(sequence, asked)
            except (FormatError, DeviceError):
                self._restorer.quarantine(sequence)
                raise

    def _is_sparse(self, sequence: Sequence, layer: int, budget: float) -> bool:
        if not 0 < budget <= 1:
            raise ConfigError(f"a budget is a share above 0 and at most 1: got {budget!r}")
        return budget < 1 and self._sparse.can(sequence, layer)

    def read(self, sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [kv_heads, n, key_width] and values [kv_heads, n, value_width] of all n tokens of a
        layer, in the order of positions: bit for bit what was appended.

        Raises ConfigError, DeviceError, and FormatError for damaged bytes.
        """
        with self._lock:
            self._require_open(sequence, is_urgent=True)
            self._require_layer(layer)
            try:
                return self._reader.rows(sequence, layer)
            except (FormatError, DeviceError):
                self._restorer.quarantine(sequence)
                raise

    def _require_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self.geometry.layers):
            raise ConfigError(f"layer {layer} of a model of {len(self.geometry.layers)} layers")

    def name_tokens(self, sequence: Sequence, tokens: object) -> None:
        """Say which ids the tokens of a Sequence have, from position 0 on; complete Segments
        are then committed as they arrive. Raises ConfigError on a contradiction."""
        with self._lock:
            self._require_open(sequence)
            sequence.declare(tokens)

    def save(
        self,
        sequence: Sequence,
        name: str,
        tokens: object = None,
        *,
        hold: bool | float | None = None,
    ) -> int:
        """Seal and flush a Sequence under a name; returns the tokens saved.

        tokens: all ids of the Sequence. One more than there is KV for is allowed, because a
        model's output ends with a token that it has not read yet. hold: keep it from eviction
        (True, or for so many seconds); None: as the name was before. Raises ConfigError (a
        length that does not fit, a bad name), CapacityError, DeviceError, and FormatError where
        a part of it was found to be lost on the drive (`graft` mends that).
        """
        require_name(name)
        with self._lock:
            self._require_open(sequence)
            until = self._held_until(name, hold)
            sequence.require_between_passes()
            held = sequence.length()
            named = sequence.tokens if tokens is None else as_tokens(tokens)
            if not held:
                raise ConfigError("an empty sequence cannot be saved: append to it first")
            if len(named) not in (held, held + 1):
                raise ConfigError(
                    f"{len(named)} tokens are named, but this sequence holds KV of {held}: "
                    f"name {held} tokens, or {held + 1} if the last was not read by the model"
                )
            sequence.declare(named[:held])
            adopted = self._adopt_stored(sequence, held)
            self._require_nothing_lost(sequence)
            if until:
                # Before anything is written, and room made for it.
                segments = [view.segment for view in sequence.views]
                self._holds.require_room(
                    (self._fingerprint_id, name),
                    {each.catalog_id: each.nbytes for each in segments if each.catalog_id},
                    self._writer.unsaved_bytes(sequence),
                )
            if not adopted:
                self._writer.seal(sequence)
            self._committer.save(sequence, name, held, until)
            return held

    def _held_until(self, name: str, hold: bool | float | None) -> float:
        """Until when a name that is saved now is held; 0: not."""
        if hold is None:
            row = self._files.inventory.names.get((self._fingerprint_id, name))
            return row.held_until if row and row.held_until > time.time() else 0.0
        if isinstance(hold, bool):
            return hold_end(None) if hold else 0.0
        return hold_end(hold)

    def _require_nothing_lost(self, sequence: Sequence) -> None:
        """Raise FormatError where what would be saved could not be found: it goes on behind a
        Segment that is out of use."""
        lost = next((view for view in sequence.views if view.segment.lost), None)
        if lost is not None:
            raise FormatError(
                f"tokens {lost.segment.start} to {lost.end} of this sequence are damaged on the "
                "drive, or it cannot read them, and nothing behind them would be found: compute "
                "them anew in another sequence, and graft it in. Nothing is lost meanwhile"
            )

    def _adopt_stored(self, sequence: Sequence, held: int) -> bool:
        """Where the store has all tokens of a Sequence already, continue it on those Segments:
        what is known is not written again."""
        views = self._registry.match(sequence.provenance, sequence.tokens[:held])
        if not views or views[-1].end < held or not sequence.between_passes:
            return False
        for view in views:
            self._registry.acquire(view.segment)
        self._release_views(sequence)
        sequence.views = views
        return True
