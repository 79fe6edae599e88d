"""When a sparse answer is audited, when an audit is an alarm, and what follows. Pure policy.

Reading less than everything may change an answer, and the attention mass that was read does not
tell: it hardly predicts damage. So a guard compares, at some steps, the next-token distribution
with the one that exact attention gives on the same history. Once a wrong value is begun, exact and
sparse agree again, so the first tokens of every answer are audited; then the less sure the model
is of a step, the sooner after the last audit it is audited. At equal cost that finds more than
every n-th step does: where a value begins, a model that has lost it is often unsure
(bench/guard.py, docs/fidelity.md).

Divergence is the Kullback-Leibler divergence of the exact distribution from the sparse one, nats.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvtier.errors import ConfigError

Level = Literal["off", "light", "strict"]

ALARM = 1.0
"""Divergence of one audit from which on it is an alarm: seen in 22 of 24 runs that collapsed, and
in none of 40 others."""
ALARM_MEAN = 0.03
"""Mean divergence of many audits from which on they are one: runs that kept their answers stayed
below 0.010, those that lost them were above 0.07."""
MEAN_OF = 16
"""Audits from which on their mean counts: of a few, one uncertain token decides it."""
WHOLE = 1.0
"""The budget that is no budget: everything is read."""
WIDER = 2.0
"""By how much an alarm widens the budget."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps are audited, counted from 1 in each answer.

    first: so many from the beginning. every: a step of which the model is sure is audited so many
    steps after the last audit; any other after that many times its margin; 0: none is. gap: steps
    between two audits at least, which bounds the cost of an answer that is uncertain throughout.
    redoes: an alarm takes back what was said since the last audit that was none.
    """

    first: int
    every: int
    gap: int
    redoes: bool

    def is_due(self, step: int, margin: float, last: int) -> bool:
        """Whether this step of an answer is audited. margin: by how much the best token of the
        sparse distribution is more probable than the second, 0 to 1. last: the step audited
        last, or 0."""
        if step <= self.first:
            return True
        if not self.every or step - last < self.gap:
            return False
        # Margins of logits that are no numbers are none either, and those steps are audited.
        return not step - last < self.every * margin


SCHEDULES: dict[Level, Schedule] = {
    "off": Schedule(first=0, every=0, gap=1, redoes=False),
    "light": Schedule(first=2, every=64, gap=16, redoes=False),
    "strict": Schedule(first=8, every=8, gap=1, redoes=True),
}
"""Chosen on one context seed. On three others "light" flagged 12 of 16 runs that collapsed, where
every 32nd step had flagged 6 at as many audits (4.3 % of steps), "strict" 16 of 16 (21 % of steps),
and neither any of 6 runs of kvtier's own choice."""


def schedule_of(level: object) -> Schedule:
    """Raises ConfigError for what is no level."""
    for known in get_args(Level):
        if level == known:
            return SCHEDULES[known]
    raise ConfigError(f"guard must be off, light or strict: got {level!r}")


@dataclass(slots=True)
class Audits:
    """What the audits of one answer have found so far, and the budget that follows from it."""

    budget: float
    divergences: list[float] = field(default_factory=list)
    escalations: list[int] = field(default_factory=list)
    """Steps whose audit widened the budget."""
    last: int = 0
    """The step that was audited last; 0: none was."""
    _pooled: list[float] = field(default_factory=list)
    """Divergences since the budget was last widened."""

    @property
    def worst(self) -> float:
        return max(self.divergences, default=0.0)

    def note(self, step: int, divergence: float) -> bool:
        """Note an audit; True: it is an alarm, and the budget is wider from now on."""
        if not math.isfinite(divergence):
            # Logits that are no numbers cannot be called alike.
            divergence = math.inf
        self.last = step
        self.divergences.append(divergence)
        self._pooled.append(divergence)
        pooled = len(self._pooled) >= MEAN_OF and _mean(self._pooled) > ALARM_MEAN
        if divergence <= ALARM and not pooled:
            return False
        self.budget = wider(self.budget)
        self.escalations.append(step)
        self._pooled = []
        return True


def wider(budget: float) -> float:
    """The next budget; beyond half of the context that is all of it."""
    return WHOLE if budget * WIDER > WHOLE / 2 else budget * WIDER


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
