"""Has a context ready as a plan says: loads, computes, or both at once until they meet.

Knows no model: whoever has one gives a function that computes the next tokens of a Sequence. What
cannot be loaded, by damage, by a drive that fails or by a deadline, is computed: there is no error
for it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

from kvtier.errors import ConfigError, DeviceError
from kvtier.tiering import planner
from kvtier.tiering.back_loader import BackLoader, State
from kvtier.tiering.chain import Tokens
from kvtier.tiering.fingerprint import EXACT
from kvtier.tiering.segment import SegmentView
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from kvtier.tiering.stored_ranges import Range, ranges

_log = logging.getLogger("kvtier")

PlanName = Literal["auto", "load", "recompute", "both"]
PLAN_NAMES = ("auto", "load", "recompute", "both")
Compute = Callable[[Sequence, Tokens], None]
"""Append the KV of these tokens, which follow those of the Sequence, in all layers."""

CHUNK_TOKENS_MIN = 256
"""Short Segments that are computed beside a load are computed together."""
PATIENCE = 1.5
"""How much longer than predicted something is waited for before it is computed."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How a context is to be had. deadline_s: how long loading may take; None: however long."""

    plan: PlanName = "auto"
    deadline_s: float | None = None

    def check(self) -> None:
        """Raises ConfigError for what cannot be meant."""
        if self.plan not in PLAN_NAMES:
            raise ConfigError(f"plan must be one of {', '.join(PLAN_NAMES)}: got {self.plan!r}")
        # A caller may have given anything, whatever the annotation says.
        given: Any = self.deadline_s
        if given is None:
            return
        # A bool is a number to Python; who writes one means something else.
        is_number = isinstance(given, Real) and not isinstance(given, bool)
        if not is_number or not given >= 0:
            raise ConfigError(
                "deadline_s must be a number of seconds, 0 or more, or None for no deadline: got "
                f"{given!r}"
            )

    @property
    def way(self) -> planner.Way | None:
        return None if self.plan == "auto" else self.plan

    @property
    def limit_s(self) -> float | None:
        """deadline_s as a float. None: it is infinite, or longer than the system can wait."""
        given = self.deadline_s
        return None if given is None or given > threading.TIMEOUT_MAX else float(given)


def stored_end(store: Store, tokens: object, *, holes: bool) -> int:
    """Position after the last token that is stored; holes: also behind some."""
    stored = store.stored(tokens)
    if not holes:
        stored = [each for each in stored if not each[0]]
    return stored[-1][1] if stored else 0


def mend(store: Store, sequence: Sequence, compute: Compute) -> bool:
    """After a read failed in the middle of a pass: compute anew what was lost before the Tail of a
    Sequence, which then goes on as if nothing had happened. False: nothing of it is lost.

    Raises what computing raises, CapacityError.
    """
    sealed = sequence.sealed_tokens
    if len(sequence.tokens) < sealed or not any(view.segment.lost for view in sequence.views):
        return False
    tokens = sequence.tokens[:sealed]
    whole = PlanRunner(store, tokens, sealed + 1, compute, Wish("load")).run(lazily=False)
    try:
        if whole.length() < sealed:
            compute(whole, tokens[whole.length() :])
        store.graft(sequence, whole)
    except BaseException:
        store.release(whole)
        raise
    return True


class PlanRunner:
    """For one context, `tokens`, of a stream of `length` tokens: the others are computed by the
    caller in any case."""

    def __init__(
        self, store: Store, tokens: Tokens, length: int, compute: Compute | None, wish: Wish
    ) -> None:
        """compute: None where nobody can; then only an unbroken prefix is loaded."""
        self._store = store
        self._tokens = tokens
        self._length = length
        self._compute = compute
        limit_s = wish.limit_s
        self._wish = replace(wish, deadline_s=limit_s)
        self._until = None if limit_s is None else time.monotonic() + limit_s
        self._views: dict[int, SegmentView] = {}
        """What is stored, by the position where it begins."""
        self._holes: list[Range] = []
        self._is_late = False
        """Nothing more is read: the deadline is over, or the drive failed as a whole."""
        self.plan = self._make_plan()

    def _make_plan(self) -> planner.Plan:
        store = self._store
        with store._lock:
            store._require_open()
            restorer = store._restorer
            views, self._holes = restorer.stored(EXACT, self._tokens)
            nbytes = restorer.bytes_to_read(restorer.seen(views, len(self._tokens)))
        stored = ranges(views)
        held = sum(end - start for start, end in stored)
        costs = store.costs.costs()
        if self._compute is None:
            stored = [each for each in stored if not each[0]]
            costs = replace(costs, prefill=None)
        self._views = {view.segment.start: view for view in views}
        context = planner.Context(self._length, tuple(stored), nbytes / max(held, 1))
        return planner.plan(costs, context, way=self._wish.way, deadline_s=self._wish.deadline_s)

    @property
    def reach(self) -> int:
        """Tokens that will be there if all goes well."""
        return max((step.end for step in self._loads()), default=0)

    def _loads(self) -> list[planner.Step]:
        return [step for step in self.plan.steps if step.kind == "load"]

    def run(self, *, lazily: bool) -> Sequence:
        """A Sequence that begins with as much of the context as the plan has ready.

        lazily: what is loaded alone may still be on its way, and turn out to be damaged when it is
        attended to; see `mend`. Raises what computing raises, CapacityError.
        """
        loads = self._loads()
        if not loads:
            return self._store.sequence()
        if len(loads) == 1 and not loads[0].start and self._until is None:
            # Loaded as a whole only where the next plan may hang on it: that tells the drive's rate
            # best, and takes longer than to begin with the first layer that is there.
            lazily = lazily and not self.plan.wants_rate
            sequence = self._resume(loads[0].end, lazily)
            if sequence.length() >= loads[0].end or self._compute is None:
                return sequence
            # Damage was found: what lies behind it is worth another plan.
            self.plan = self._make_plan()
        else:
            sequence = self._store.sequence()
        try:
            self._carry_out(sequence)
        except BaseException:
            self._store.release(sequence)
            raise
        return sequence

    def _resume(self, end: int, lazily: bool) -> Sequence:
        try:
            return self._store.resume(self._tokens[:end], lazily=lazily)
        except DeviceError as error:
            if self._compute is None:
                raise
            _log.warning("nothing is loaded, all is computed: %s", error)
            return self._store.sequence()

    # ---- loading beside computing -----------------------------------------------------------

    def _carry_out(self, sequence: Sequence) -> None:
        loads = self._loads()
        if not loads:
            return
        goal = loads[-1].end
        loader = BackLoader.start(
            self._store, self._in_order(loads, sequence.length()), len(self._tokens)
        )
        try:
            while (at := sequence.length()) < goal:
                if not self._attach(sequence, loader) and not self._go_on(sequence, loader, at):
                    break
        finally:
            loader.close()

    def _in_order(self, loads: list[planner.Step], first: int) -> list[SegmentView]:
        """What is to be loaded from position `first` on, in the order in which it is needed."""
        views = [each for start, each in sorted(self._views.items()) if start >= first]
        wanted = [
            view
            for view in views
            if any(load.start <= view.segment.start < load.end for load in loads)
        ]
        if self.plan.way != "both":
            return wanted
        # A token to be computed needs all before it, so the first run is had from its back, and
        # beyond where they are predicted to meet: the drive may be faster than it was.
        run_end = loads[0].end
        run = [view for view in views if view.segment.start < run_end]
        return [*reversed(run), *(view for view in wanted if view.segment.start >= run_end)]

    def _attach(self, sequence: Sequence, loader: BackLoader) -> bool:
        """Attach what is there of what follows. False: nothing."""
        at = end = sequence.length()
        while self._is_there(loader, end):
            end = self._end_of(end)
        try:
            return end > at and self._store.extend(sequence, self._tokens[:end]) > at
        except DeviceError as error:
            _log.warning("nothing more is loaded, the rest is computed: %s", error)
            self._is_late = True
            loader.stop()
            return False

    def _is_there(self, loader: BackLoader, position: int) -> bool:
        if position not in self._views or not loader.knows(position):
            return False
        state = loader.state(position)
        # What was left can be attached and read when it is needed, but not after the deadline.
        return state is State.LOADED or (state is State.LEFT and not self._is_late)

    def _end_of(self, position: int) -> int:
        return min(self._views[position].end, len(self._tokens))

    def _go_on(self, sequence: Sequence, loader: BackLoader, at: int) -> bool:
        """Wait for what follows, or compute it. False: what is left is the caller's to compute."""
        if loader.knows(at) and loader.state(at) is State.WAITING and not self._is_late:
            if self._wait(loader, at):
                return True
            if self._until is not None and time.monotonic() >= self._until:
                self._is_late = True
                loader.stop()
        end = self._next_edge(loader, at)
        if end is None or self._compute is None:
            return False
        position = at
        while position < end:
            if loader.knows(position):
                loader.skip(position)
            position = self._end_of(position) if position in self._views else end
        self._compute(sequence, self._tokens[at:end])
        loader.keep_warm()
        # Sealed where a lost Segment ended, so that what was computed takes its place.
        self._store.extend(sequence, self._tokens[:end])
        return True

    def _wait(self, loader: BackLoader, at: int) -> bool:
        """Wait for a Segment as long as that is wise. True: its state is another one now."""
        until = self._until
        costs = self._store.costs.costs()
        if self.plan.way == "both" and costs.prefill is not None:
            computed_s = costs.prefill.seconds(at, self._end_of(at))
            if loader.seconds_until(at, costs.load) > computed_s:
                return False
            patience = time.monotonic() + PATIENCE * computed_s
            until = patience if until is None else min(until, patience)
        return loader.wait(at, until) is not State.WAITING

    def _next_edge(self, loader: BackLoader, at: int) -> int | None:
        """Where computing from here on is to end: where something can be attached, or where a hole
        was cut. None: nothing behind can be attached."""
        states = {each: loader.state(each) for each in sorted(self._views) if loader.knows(each)}
        behind = [
            start
            for start, state in states.items()
            if start > at
            and (state is State.LOADED or (state is not State.FAILED and not self._is_late))
        ]
        if not behind:
            return None
        ready = (
            start
            for start in behind
            if states[start] is not State.WAITING or start - at >= CHUNK_TOKENS_MIN
        )
        edges = [next(ready, behind[-1]), *(end for _, end in self._holes)]
        # What failed just now is a hole as well.
        edges += [self._end_of(start) for start in states if states[start] is State.FAILED]
        return min(edge for edge in edges if edge > at)
