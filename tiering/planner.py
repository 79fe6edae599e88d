"""Load, recompute, or both at once: a pure function from costs and what is stored to a Plan.

A context is ready when the KV of all its tokens but the last few is there. What is stored may be
read from the drive or computed again; computing goes from the front, because a token needs all
before it, and is cheapest there; so loading goes from the back, until they meet. Holes in what is
stored are computed whatever is chosen.

Loading is chosen unless another way is predicted to be faster by more than MARGIN: a prediction
has an error, and computing keeps the processor from others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtier.tiering.geometry import SEGMENT_TOKENS
from kvtier.tiering.stored_ranges import Range

Way = Literal["load", "recompute", "both"]
Kind = Literal["load", "compute"]

MARGIN = 0.1
"""How much faster, as a part, another way must be than loading alone."""
DOUBT = 4.0
"""How many times slower a drive may be by now, where its rate was measured long ago."""
BESIDE = 0.2
"""What loading and computing cost each other, as a part of the shorter one of them."""
MEETINGS_MAX = 64
"""Places at which loading and computing may meet that are tried."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of one forward pass: fixed_s, token_s for each token, pair_s for each pair of a token
    and one before it."""

    fixed_s: float
    token_s: float
    pair_s: float

    def seconds(self, start: int, end: int) -> float:
        """Of the tokens [start, end), as one pass."""
        count = end - start
        if count <= 0:
            return 0.0
        return self.fixed_s + count * (self.token_s + self.pair_s * (start + count / 2))


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Seconds of a load: latency_s once, and its bytes at bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s if nbytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What one machine and one model take. prefill: None where it was never measured. is_stale: the
    drive's rate was measured so long ago that it may be another one by now."""

    load: LoadCost
    prefill: PrefillCost | None
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """What is to be made ready.

    length: tokens; those behind the last stored one are computed in any case. stored: ranges in
    the order of positions. token_bytes: what is read for one of their tokens, on average.
    """

    length: int
    stored: tuple[Range, ...]
    token_bytes: float


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens [start, end) are loaded or computed."""

    kind: Kind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps that make a context ready, in this order; they follow each other from 0 to its length.

    Where the way is "both", loads begin at once and go from the back of their range to its front
    beside what is computed. seconds: predicted; None where nothing is known of computing.
    considered: what each way would take. wants_rate: the drive's rate was measured long ago, and
    loading would not be chosen if it were DOUBT times lower by now: a load should tell it.
    """

    way: Way
    steps: tuple[Step, ...]
    seconds: float | None
    why: str
    considered: dict[Way, float]
    wants_rate: bool = False


def plan(
    costs: Costs, context: Context, *, way: Way | None = None, deadline_s: float | None = None
) -> Plan:
    """The fastest way to have a context ready, or this one; "load": all that is stored.

    deadline_s: how long loading may take; what cannot be there by then is computed.
    """
    loads = tuple(_loaded_by(costs.load, context, deadline_s))
    if way == "recompute" or not loads:
        why = "it was asked for" if way == "recompute" else _why_not_loaded(context)
        return _made("recompute", costs, context, (), why)
    if costs.prefill is None:
        why = "it was asked for" if way == "load" else "how long computing takes is not known yet"
        made = _made("load", costs, context, loads, why)
        return replace(made, wants_rate=costs.is_stale)
    options = _options(costs.prefill, costs.load, context, loads)
    if way == "load":
        options["load"] = loads
    seconds = {each: _seconds(costs, context, each, options[each]) for each in options}
    chosen, why = _choose(seconds, costs.is_stale) if way is None else (way, "it was asked for")
    wants_rate = chosen == "load" and costs.is_stale and not _loads_in_doubt(costs, context, loads)
    return Plan(chosen, _steps(context, options[chosen]), seconds[chosen], why, seconds, wants_rate)


def _loads_in_doubt(costs: Costs, context: Context, loads: tuple[Range, ...]) -> bool:
    """Whether loading is chosen even if the drive is DOUBT times slower than it was."""
    assert costs.prefill is not None
    load = replace(costs.load, bytes_per_s=costs.load.bytes_per_s / DOUBT)
    slower = replace(costs, load=load)
    options = _options(costs.prefill, load, context, loads)
    seconds = {each: _seconds(slower, context, each, options[each]) for each in options}
    return _choose(seconds, is_stale=False)[0] == "load"


def _made(way: Way, costs: Costs, context: Context, loads: Sequence[Range], why: str) -> Plan:
    seconds = None if costs.prefill is None else _seconds(costs, context, way, loads)
    considered: dict[Way, float] = {} if seconds is None else {way: seconds}
    return Plan(way, _steps(context, loads), seconds, why, considered)


def _why_not_loaded(context: Context) -> str:
    if context.stored:
        return "nothing of it can be loaded by the deadline"
    return "nothing of it is stored"


def _choose(seconds: dict[Way, float], is_stale: bool) -> tuple[Way, str]:
    load = seconds["load"]
    best: Way = min(seconds, key=lambda each: seconds[each])
    if best == "load" or seconds[best] > load * (1 - MARGIN):
        return "load", f"{load:.3g} s, and no other way is clearly faster"
    if best == "recompute" and is_stale:
        return "both", "the drive's rate was measured long ago: reading beside tells it anew"
    return best, f"{seconds[best]:.3g} s instead of {load:.3g} s for loading"


# ---- what is loaded ---------------------------------------------------------------------------


def _loaded_by(load: LoadCost, context: Context, deadline_s: float | None) -> Iterator[Range]:
    """The stored ranges, as far as they can be there by the deadline."""
    left = None if deadline_s is None else max(0.0, deadline_s - load.latency_s) * load.bytes_per_s
    for start, end in context.stored:
        end = min(end, context.length)
        if left is not None:
            tokens = int(min(left / max(context.token_bytes, 1e-9), end - start))
            if tokens < end - start:
                # Whole Segments are read.
                end = start + tokens // SEGMENT_TOKENS * SEGMENT_TOKENS
            left -= (end - start) * context.token_bytes
        if start < end:
            yield start, end


def _options(
    prefill: PrefillCost, load: LoadCost, context: Context, loads: tuple[Range, ...]
) -> dict[Way, tuple[Range, ...]]:
    """What each way loads, at best."""
    chosen = _worth_loading(prefill, load, context, loads)
    options: dict[Way, tuple[Range, ...]] = {"load": chosen, "recompute": ()}
    (start, end), *rest = chosen
    meetings = range(start, end, SEGMENT_TOKENS)
    spread = meetings[:: -(-len(meetings) // MEETINGS_MAX)]
    candidates = [((at, end), *rest) for at in spread]
    options["both"] = min(
        candidates, key=lambda each: _seconds_of_both(prefill, load, context, each)
    )
    return options


def _worth_loading(
    prefill: PrefillCost, load: LoadCost, context: Context, loads: tuple[Range, ...]
) -> tuple[Range, ...]:
    """The stored ranges that make it fastest when each is loaded or computed, one after another;
    at least one of them. A short range between holes may be computed with them as one pass."""
    starts, ends = np.array(loads, np.float64).T
    took = load.latency_s + (ends - starts) * context.token_bytes / load.bytes_per_s
    best = np.zeros(len(loads) + 1)
    """Seconds until everything up to the end of range i - 1 is there, that range loaded."""
    came_from = np.zeros(len(loads) + 1, np.int64)
    before = np.concatenate([[0.0], ends])
    for index in range(len(loads)):
        computed = _passes(prefill, before[: index + 1], starts[index])
        options = best[: index + 1] + computed
        came_from[index + 1] = int(options.argmin())
        best[index + 1] = options.min() + took[index]
    finish = best[1:] + _passes(prefill, ends, float(context.length))
    at = int(finish.argmin()) + 1
    chosen: list[Range] = []
    while at:
        chosen.insert(0, loads[at - 1])
        at = int(came_from[at])
    return tuple(chosen)


def _passes(
    prefill: PrefillCost, starts: npt.NDArray[np.float64], end: float
) -> npt.NDArray[np.float64]:
    """PrefillCost.seconds of passes from each of `starts` to `end`."""
    counts = end - starts
    pairs = prefill.pair_s * (starts + counts / 2)
    taken: npt.NDArray[np.float64] = np.where(
        counts > 0, prefill.fixed_s + counts * (prefill.token_s + pairs), 0.0
    )
    return taken


# ---- how long it takes ------------------------------------------------------------------------


def _seconds(costs: Costs, context: Context, way: Way, loads: Sequence[Range]) -> float:
    assert costs.prefill is not None
    if way == "both":
        return _seconds_of_both(costs.prefill, costs.load, context, loads)
    total = 0.0
    for step in _steps(context, loads):
        if step.kind == "load":
            total += costs.load.seconds((step.end - step.start) * context.token_bytes)
        else:
            total += costs.prefill.seconds(step.start, step.end)
    return total


def _seconds_of_both(
    prefill: PrefillCost, load: LoadCost, context: Context, loads: Sequence[Range]
) -> float:
    """Computing waits where a load before it is not there yet; all loads go on beside it."""
    now = loaded = computing = 0.0
    for step in _steps(context, loads):
        if step.kind == "load":
            loaded += load.seconds((step.end - step.start) * context.token_bytes)
            now = max(now, loaded)
        else:
            is_last = step.end == context.length
            took = prefill.seconds(step.start, step.end) if is_last else _in_chunks(prefill, step)
            computing += 0.0 if is_last else took
            now += took
    return now + BESIDE * min(loaded, computing)


def _in_chunks(prefill: PrefillCost, step: Step) -> float:
    """Beside a load, it is computed Segment by Segment, so that it can end where they meet."""
    chunks = -(-(step.end - step.start) // SEGMENT_TOKENS)
    return prefill.seconds(step.start, step.end) + (chunks - 1) * prefill.fixed_s


def _steps(context: Context, loads: Sequence[Range]) -> tuple[Step, ...]:
    """All of the context: these ranges loaded, what lies between them and behind computed."""
    steps: list[Step] = []
    at = 0
    for start, end in loads:
        if at < start:
            steps.append(Step("compute", at, start))
        steps.append(Step("load", start, end))
        at = end
    if at < context.length:
        steps.append(Step("compute", at, context.length))
    return tuple(steps)
