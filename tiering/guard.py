"""When a sparse answer is audited, when an audit is an alarm, and what follows. Pure policy.

Reading less than everything may change an answer, and the attention mass that was read does not
tell: it hardly predicts damage. So a guard compares, at some steps, the next-token distribution
with the one that exact attention gives on the same history. Once a wrong value is begun, exact and
sparse agree again, so the first tokens of every answer are audited, and a level may audit the
steps in which the model was uncertain.

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

    first: so many from the beginning. every: each such step; 0: none. margin: steps in which the
    sparse distribution puts its best two tokens closer than this are audited too (the difference
    of their probabilities); 0: none. redoes: an alarm takes back what was said since the last
    audit that was none.
    """

    first: int
    every: int
    margin: float
    redoes: bool

    def is_due(self, step: int, margin: float) -> bool:
        """Whether this step of an answer is audited."""
        if step <= self.first or margin < self.margin:
            return True
        return bool(self.every) and step % self.every == 0


SCHEDULES: dict[Level, Schedule] = {
    "off": Schedule(first=0, every=0, margin=0.0, redoes=False),
    "light": Schedule(first=2, every=32, margin=0.0, redoes=False),
    "strict": Schedule(first=8, every=8, margin=0.1, redoes=True),
}


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
