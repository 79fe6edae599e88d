"""How a TieredCache reads its context: which tokens attend to everything, and which to a budget.

Tokens of the prompt attend to everything, also where they are read one by one; what is generated
after them attends sparsely. With a sparse question a model may lose the instruction itself, and a
restore reads the context anyway.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.guard import WHOLE, Level, schedule_of

CODEC = "raw"
"""How the Pages that are read are encoded."""


def as_budget(budget: object) -> float:
    """The share of the context that a step reads: "exact" is all of it. Raises ConfigError."""
    if budget == "exact":
        return WHOLE
    if isinstance(budget, int | float) and not isinstance(budget, bool) and 0 < budget <= WHOLE:
        return float(budget)
    raise ConfigError(f'budget must be "exact" or a share above 0 and at most 1: got {budget!r}')


@dataclass(slots=True)
class SparseMode:
    """budget: WHOLE reads everything. prompt_columns: columns of the prompt, padding included."""

    budget: float = WHOLE
    level: Level = "off"
    prompt_columns: int = 0
    is_guarded: bool = False
    """`kvtier.generate` owns the loop, and audits it."""
    provenance: Provenance = field(init=False)
    """Of what is generated. A budget that an alarm widens does not make it any better: it goes on
    upon what came before."""

    def __post_init__(self) -> None:
        schedule_of(self.level)
        is_exact = self.budget == WHOLE
        self.provenance = EXACT if is_exact else Provenance.approximate(self.budget, CODEC)

    def budget_of(self, first: int, count: int) -> float | None:
        """Of a pass over `count` columns from `first` on; None: it reads everything.

        Raises UnsupportedError where a guard was asked for and nobody audits.
        """
        if self.budget == WHOLE or count > 1 or first < self.prompt_columns:
            return None
        if self.level != "off" and not self.is_guarded:
            raise UnsupportedError(
                f'guard="{self.level}" compares steps with exact ones, which a cache cannot do '
                'by itself: call kvtier.generate(model, input_ids, cache), or set guard="off"'
            )
        return self.budget

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Within the block every pass reads everything."""
        budget, self.budget = self.budget, WHOLE
        try:
            yield
        finally:
            self.budget = budget

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Within the block somebody audits."""
        self.is_guarded = True
        try:
            yield
        finally:
            self.is_guarded = False
