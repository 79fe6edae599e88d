"""A model's profile: the budget at which it keeps its answers, as measured, in a YAML file.

`kvtier guard run` writes it beside a store, and `budget="profile"` reads it. It may be changed by
hand: `budget` is "exact", a share, or one for each layer.

Invariants:
- It is of one model, whoever the tenant is: another model's is refused.
- It never says less than it was told to: what is not as it should be is an error, not a default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from kvtier.errors import ConfigError, DeviceError, FormatError, VersionMismatch
from kvtier.io.small_file import can_be_shown, number_within, read_small, replace_file
from kvtier.tiering.budget import Budget
from kvtier.tiering.fingerprint import Fingerprint
from kvtier.tiering.yaml_text import parse_yaml

PROFILE = "profile.yaml"
"""Name of the file in the directory of a store."""
PROFILE_VERSION = 1
_FILE_BYTES_MAX = 1 << 20
"""Far more than a model of a thousand layers fills."""
_TASKS_MAX = 64
_LAYERS_MAX = 1 << 16
"""More than a model has: a share that is written once is kept once for each."""
_COUNT_MAX = 10**9
_NATS = (0.0, 1e9)
_HEAD = """\
# What `kvtier guard run` measured, and budget="profile" obeys: at which budget each task keeps its
# answers, and `budget`, which is enough for all of them. A budget is a share of the context, one
# for each layer ([0.5, 0.25, ...]), or exact. Measured with placement="keys" and sketches as they
# are unless set otherwise.
"""


@dataclass(frozen=True, slots=True)
class TaskBudget:
    """What one task keeps its answers at.

    budget: the smallest one that was tried and found good; None: none was, and it reads
    everything. kl, kl_max: mean and largest divergence of full attention's next-token distribution
    from the sparse one, nats; fields: parts of the answers that full attention gets right, kept:
    of these, right at the budget too. All of the largest budget tried, where none was good.
    """

    budget: Budget | None
    kl: float
    kl_max: float
    kept: int
    fields: int


@dataclass(frozen=True, slots=True)
class Profile:
    """fingerprint: Fingerprint.model_hex of the model; name: what people call it. tokens, seeds: of
    the contexts that were measured. budget: what all tasks together need."""

    fingerprint: str
    name: str
    layers: int
    tokens: int
    seeds: int
    budget: Budget | None
    tasks: Mapping[str, TaskBudget]

    def to_dict(self) -> dict[str, Any]:
        """For YAML and JSON."""
        return {
            "version": PROFILE_VERSION,
            "fingerprint": self.fingerprint,
            "model": self.name,
            "layers": self.layers,
            "tokens": self.tokens,
            "seeds": self.seeds,
            "budget": _written(self.budget),
            "tasks": {
                name: {
                    "budget": _written(each.budget),
                    "kl": each.kl,
                    "kl_max": each.kl_max,
                    "kept": each.kept,
                    "fields": each.fields,
                }
                for name, each in self.tasks.items()
            },
        }

    @classmethod
    def from_dict(cls, found: Any) -> Self:
        """Raises VersionMismatch, and LookupError, TypeError, ValueError or ConfigError for
        anything else than `to_dict` makes."""
        version = found["version"]
        if type(version) is not int:
            raise TypeError("version is no whole number")
        if version != PROFILE_VERSION:
            raise VersionMismatch(
                "the profile", version, PROFILE_VERSION, "measure again: kvtier guard run"
            )
        layers = _count(found["layers"], 1)
        if layers > _LAYERS_MAX:
            raise ValueError("more layers than a model has")
        tasks = found["tasks"]
        if not isinstance(tasks, dict) or len(tasks) > _TASKS_MAX:
            raise TypeError("tasks are no names with what was measured of them")
        return cls(
            fingerprint=_words(found["fingerprint"]),
            name=_words(found["model"]),
            layers=layers,
            tokens=_count(found["tokens"], 1),
            seeds=_count(found["seeds"], 1),
            budget=_budget(found["budget"], layers),
            tasks={_words(name): _task(each, layers) for name, each in tasks.items()},
        )

    def save(self, path: Path) -> None:
        """Replace the file as a whole. Raises DeviceError."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=100)
        try:
            replace_file(path, _HEAD + text)
        except OSError as error:
            raise DeviceError(f"{path}: {error.strerror}", error.errno or 0) from error


def load(path: Path) -> Profile:
    """The profile in a file.

    Raises ConfigError where there is none, FormatError for what is none, VersionMismatch,
    DeviceError.
    """
    try:
        content = parse_yaml(read_small(path, _FILE_BYTES_MAX))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no profile {path}: run kvtier guard run --store {path.parent} for this "
            "model, or give a budget"
        ) from error
    except OSError as error:
        raise DeviceError(f"{path}: {error.strerror}", error.errno or 0) from error
    except ValueError as error:
        raise FormatError(f"{path} is no profile: {error}") from error
    try:
        return Profile.from_dict(content)
    except (LookupError, TypeError, ValueError) as error:
        raise FormatError(
            f"{path} is no profile that can be used: {type(error).__name__}: {error}"
        ) from error


def budget_for(directory: Path, fingerprint: Fingerprint, layers: int) -> Budget | None:
    """What the profile in a store's directory says of this model; None: everything is read.

    Raises as `load`, and ConfigError for the profile of another model.
    """
    path = directory / PROFILE
    found = load(path)
    if found.fingerprint != fingerprint.model_hex() or found.layers != layers:
        raise ConfigError(
            f"{path} was measured on another model, {found.name} ({found.fingerprint[:12]}), or "
            "with other weights or another dtype; this one is "
            f"{fingerprint.model_hex()[:12]}: run kvtier guard run --store {directory} "
            "for this model, or give a budget"
        )
    return found.budget


def _written(budget: Budget | None) -> str | float | list[float]:
    return "exact" if budget is None else budget.plain()


def _budget(found: object, layers: int) -> Budget | None:
    try:
        return Budget.of(found, layers)
    except ConfigError as error:
        raise ValueError(f"a budget that is none for {layers} layers") from error


def _task(found: Any, layers: int) -> TaskBudget:
    fields = _count(found["fields"], 0)
    kept = _count(found["kept"], 0)
    if kept > fields:
        raise ValueError("more fields are kept than there are")
    return TaskBudget(
        _budget(found["budget"], layers),
        number_within(found["kl"], _NATS),
        number_within(found["kl_max"], _NATS),
        kept,
        fields,
    )


def _count(value: object, least: int) -> int:
    if type(value) is not int or not least <= value <= _COUNT_MAX:
        raise ValueError("a count that is no count")
    return value


def _words(value: object) -> str:
    if not isinstance(value, str) or not can_be_shown(value):
        raise ValueError("text that cannot be shown")
    return value
