"""How a TieredCache reads its context: which tokens attend to everything, and which to a budget.

Tokens of the prompt attend to everything, also where they are read one by one; what is generated
after them attends sparsely. With a sparse question a model may lose the instruction itself, and a
restore reads the context anyway.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.errors import UnsupportedError
from kvtier.tiering.budget import Budget
from kvtier.tiering.budget_profile import budget_for
from kvtier.tiering.fingerprint import EXACT, Provenance
from kvtier.tiering.guard import WHOLE, Level, schedule_of
from kvtier.tiering.store import Store

CODEC = "raw"
"""How the Pages that are read are encoded."""


def as_budget(wanted: object, store: Store) -> Budget | None:
    """What a user asks for: a share of the context, one for each layer, "exact", or "profile": what
    `kvtier guard run` measured, from the store's directory. None: everything is read.

    Raises ConfigError, and FormatError and DeviceError for a profile that cannot be read.
    """
    layers = len(store.geometry.layers)
    if wanted == "profile":
        return budget_for(store.directory, store.fingerprint, layers)
    return Budget.of(wanted, layers)


@dataclass(slots=True)
class SparseMode:
    """budget: None reads everything. prompt_columns: columns of the prompt, padding included."""

    budget: Budget | None = None
    level: Level = "off"
    prompt_columns: int = 0
    is_guarded: bool = False
    """`kvtier.generate` owns the loop, and audits it."""
    provenance: Provenance = field(init=False)
    """Of what is generated. A budget that an alarm widens does not make it any better: it goes on
    upon what came before."""

    def __post_init__(self) -> None:
        schedule_of(self.level)
        budget = self.budget
        self.provenance = EXACT if budget is None else Provenance.approximate(budget.shares, CODEC)

    @property
    def share(self) -> float:
        """Of the context that is read, the mean over layers."""
        return WHOLE if self.budget is None else self.budget.share

    def is_sparse(self, first: int, count: int) -> bool:
        """Whether a pass over `count` columns from `first` on reads less than everything.

        Raises UnsupportedError where a guard was asked for and nobody audits.
        """
        if self.budget is None or count > 1 or first < self.prompt_columns:
            return False
        if self.level != "off" and not self.is_guarded:
            raise UnsupportedError(
                f'guard="{self.level}" compares steps with exact ones, which a cache cannot do '
                'by itself: call kvtier.generate(model, input_ids, cache), or set guard="off"'
            )
        return True

    def budget_of(self, layer: int, first: int, count: int) -> float | None:
        """The share that a layer reads in such a pass; None: everything. Raises as is_sparse."""
        is_sparse = self.is_sparse(first, count)
        return self.budget.shares[layer] if self.budget is not None and is_sparse else None

    def widen(self, share: float) -> None:
        """Read this share from now on, the mean over layers, in the proportions that they have."""
        if self.budget is not None:
            is_all = share >= WHOLE
            self.budget = None if is_all else self.budget.scaled(share / self.budget.share)

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Within the block every pass reads everything."""
        budget, self.budget = self.budget, None
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
