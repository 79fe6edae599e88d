"""What an answer was made with: counted while it is made, reported when somebody asks."""

from dataclasses import dataclass

from kvtier.tiering.guard import Audits
from kvtier.tiering.stats import SparseCounts


@dataclass(frozen=True, slots=True)
class Report:
    """What an answer was made with.

    budget: the share of the context that its last step was allowed to read, the mean over layers;
    1: all of it. steps: tokens read after the prompt. audits: how many of them were compared with
    exact ones. worst_divergence: the largest of these, in nats. escalations: steps (from 1 on)
    whose audit widened the budget. taken_back: tokens that were generated again after an alarm.
    pages_chosen, pages_to_choose: Pages that sparse steps read, and had to choose from.
    bytes_recalled: what they read from the drive, beside whole layers. These three are the store's
    counts in the meantime: of others' answers too, where there are any.
    """

    budget: float
    steps: int
    audits: int
    worst_divergence: float
    escalations: tuple[int, ...]
    taken_back: int
    pages_chosen: int
    pages_to_choose: int
    bytes_recalled: int


@dataclass(slots=True)
class Tally:
    """What is counted of one answer, from its beginning on; of a cache that no answer was asked
    of by `kvtier.generate`, since it was made. before: the store's counts at the beginning."""

    before: SparseCounts
    audits: Audits
    steps: int = 0
    taken_back: int = 0

    def report(self, budget: float, now: SparseCounts) -> Report:
        """budget: the share that is read at present. now: the store's counts."""
        sparse = now.since(self.before)
        return Report(
            budget=budget,
            steps=self.steps,
            audits=len(self.audits.divergences),
            worst_divergence=self.audits.worst,
            escalations=tuple(self.audits.escalations),
            taken_back=self.taken_back,
            pages_chosen=sparse.pages_chosen,
            pages_to_choose=sparse.pages_to_choose,
            bytes_recalled=sparse.bytes_recalled,
        )
