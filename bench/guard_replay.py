"""What a guard would have done in runs of which every step was audited. Pure arithmetic.

The project's own Schedule and Audits go over the recorded divergences and margins of a run until
they raise an alarm. What follows an alarm is not in the record: in use the budget is wider from
then on, and with `strict` the answer goes on from where an audit found nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.tiering.guard import Audits, Schedule

COLLAPSED = 0.5
"""A run that keeps at most this share of the fields that full attention gets has collapsed: of the
runs that the guard's first thresholds came from, those called so kept 15, 22 and 0 of 137."""
KEPT = 0.9
"""A run that keeps at least this share has kept its answer; between the two it is damaged."""
FIELDS_MIN = 4
"""A run says nothing where full attention gets fewer fields right."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Replayed:
    """alarm: the step of the first one, or None. audits: until then. steps: until then.
    taken_back: tokens that this alarm takes back."""

    alarm: int | None
    audits: int
    steps: int
    taken_back: int


def replay(
    divergences: Sequence[float], margins: Sequence[float], schedule: Schedule, budget: float
) -> Replayed:
    """divergences, margins: of the steps of an answer, from step 1 on."""
    audits, confirmed = Audits(budget), 0
    for step, (divergence, margin) in enumerate(zip(divergences, margins, strict=True), 1):
        if not schedule.is_due(step, margin, audits.last):
            continue
        if audits.note(step, divergence):
            back = step - confirmed if schedule.redoes else 0
            return Replayed(step, len(audits.divergences), step, back)
        confirmed = step
    return Replayed(None, len(audits.divergences), len(divergences), 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """kept: fields right in a run and with full attention; full: with full attention."""

    kept: int
    full: int

    @property
    def name(self) -> str:
        """What became of the answer: "kept", "damaged", "collapsed", or "no verdict"."""
        if self.full < FIELDS_MIN:
            return "no verdict"
        share = self.kept / self.full
        if share >= KEPT:
            return "kept"
        return "collapsed" if share <= COLLAPSED else "damaged"


def verdict(run: Line, full: Line) -> Verdict:
    """Of a run and the one that read everything; both have `right`, indices of fields."""
    wanted = set(full["right"])
    return Verdict(len(wanted & set(run["right"])), len(wanted))


@dataclass(frozen=True, slots=True)
class Flagged:
    """Of so many runs so many had an alarm."""

    flagged: int
    runs: int

    @property
    def percent(self) -> float:
        return 100 * self.flagged / self.runs

    def __str__(self) -> str:
        return f"{self.flagged} of {self.runs}"


def flagged(replays: Iterable[Replayed]) -> Flagged:
    found = [each.alarm is not None for each in replays]
    return Flagged(sum(found), len(found))


def audited_share(replays: Iterable[Replayed]) -> float:
    """Audits over steps, until the first alarm of each run."""
    found = list(replays)
    steps = sum(each.steps for each in found)
    return sum(each.audits for each in found) / steps if steps else 0.0


def audits_in(steps: int, schedule: Schedule, margins: Sequence[float]) -> int:
    """Audits in an answer of so many steps that finds nothing; the margins of other answers, one
    after the other, stand for its own, and begin again where they end."""
    divergences = [0.0] * steps
    repeated = [margins[index % len(margins)] for index in range(steps)]
    return replay(divergences, repeated, schedule, 1.0).audits


def decode_cost(audits: int, steps: int, exact_s: float, sparse_s: float) -> float:
    """Percent by which audits make an answer dearer: each is an exact step in addition to the
    sparse one. exact_s, sparse_s: of a whole step, the model's own work included."""
    return 100 * audits * exact_s / (steps * sparse_s)
