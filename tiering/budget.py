"""Budgets: which share of the context's bytes each layer reads. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from kvtier.errors import ConfigError
from kvtier.tiering.guard import WHOLE

_SHOWN_MAX = 40
"""Characters of text in a message."""
_SHORT = 10**9


@dataclass(frozen=True, slots=True)
class Budget:
    """shares: of each layer, above 0 and at most WHOLE, which reads everything. A layer with a
    window reads its window, whatever its share."""

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < each <= WHOLE for each in self.shares):
            raise ConfigError(f"shares of a budget are above 0 and at most 1: got {self.shares}")

    @classmethod
    def of(cls, wanted: object, layers: int) -> Self | None:
        """What somebody wrote: a share for all layers, one for each, or "exact"; None reads
        everything. Raises ConfigError."""
        if wanted == "exact":
            return None
        if isinstance(wanted, list | tuple):
            shares = tuple(map(_share, wanted))
        else:
            shares = (_share(wanted),) * layers
        if len(shares) != layers:
            raise ConfigError(f"budget has {len(shares)} shares, but the model {layers} layers")
        return None if min(shares) == WHOLE else cls(shares)

    @property
    def is_even(self) -> bool:
        """Whether all layers have the same share."""
        return len(set(self.shares)) == 1

    @property
    def share(self) -> float:
        """The mean over layers."""
        return self.shares[0] if self.is_even else fmean(self.shares)

    def scaled(self, factor: float) -> Self:
        """The same with shares so many times as large, as far as there is more to read."""
        return type(self)(tuple(min(WHOLE, each * factor) for each in self.shares))

    def plain(self) -> float | list[float]:
        """As `of` takes it."""
        return self.share if self.is_even else list(self.shares)


def safest(budgets: Sequence[Budget | None]) -> Budget | None:
    """What reads, in each layer, as much as any of these; None reads everything."""
    given = [each for each in budgets if each is not None]
    if len(given) < len(budgets) or not given:
        return None
    return Budget(tuple(map(max, zip(*(each.shares for each in given), strict=True))))


def percent_hint(value: object) -> str:
    """What to add to the refusal of a share, for who meant percent; else nothing."""
    if isinstance(value, int | float) and WHOLE < value <= 100:
        return f"; {value:g} % is {value / 100:g}"
    return ""


def _share(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= WHOLE:
        return float(value)
    raise ConfigError(
        'budget must be "exact", "profile", a share above 0 and at most 1, or one for each layer: '
        f"got {_shown(value)}{percent_hint(value)}"
    )


def _shown(value: object) -> str:
    """For messages. Only text and numbers of few digits are written out: a list of lists, which a
    file names by aliases, may have billions of items."""
    if isinstance(value, str):
        return repr(value[:_SHOWN_MAX])
    is_short = isinstance(value, float) or (isinstance(value, int) and abs(value) < _SHORT)
    return repr(value) if is_short else f"one of type {type(value).__name__}"
