"""What loading and computing take on this machine, measured as they happen.

Loads are timed by the store, forward passes by the adapter. The newest measurement counts most,
because a drive may be slowed down, and a machine busy, from one minute to the next.
"""

import json
import logging
import math
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.io.calibration_file import RATE_RANGE, Calibration
from kvtier.io.small_file import number_within, read_small, replace_file
from kvtier.tiering.planner import DOUBT, Costs, LoadCost, PrefillCost

_log = logging.getLogger("kvtier")

BYTES_PER_S_START = 500e6
"""A drive of which nothing is known: slower than any NVMe, faster than a disk."""
LATENCY_S_START = 0.001
LOAD_BYTES_MIN = 256 << 10
"""Smaller loads tell of latency, which hardly changes, and not of the rate."""
NEWEST_SHARE = 0.5
"""Part of the rate that the newest load has; the first one has all."""
STALE_S = 30.0
PASS_TOKENS_MIN = 8
"""Passes of fewer tokens are decoding: another way of computing."""
PASSES_KEPT = 12
"""Of each class of passes; a class is a power of two of their tokens."""
EXPLANATIONS = ((1,), (1, 2), (0, 1), (0, 1, 2), (2,), (0, 2))
"""Which of fixed_s, token_s and pair_s may be more than zero; a later choice must explain more.
Passes of one size at one position say no more than what a token takes."""
FILE_VERSION = 1
FILE_BYTES_MAX = 16 << 20
"""Some hundred models, each with all classes of passes full."""
TOKENS_RANGE = (1, 1 << 40)
PAIRS_RANGE = (0.0, 2.0**81)
SECONDS_RANGE = (1e-9, 1e6)
LATENCY_S_RANGE = (0.0, 1e4)
"""What measurements give. Other numbers in the file are damage, which the fit could not even
compute with."""


class DriveFlow:
    """How fast the drive brings what is read in batches that overlap. What was waited for tells its
    rate, since then the drive was the slower part; what was there when somebody looked tells at
    least how slow it is not. Callers hold the store's lock."""

    def __init__(self) -> None:
        self.tell: Callable[[int, float], None] = _nobody
        """Gets bytes, and the seconds that the drive was busy with them."""
        self.tell_at_most: Callable[[int, float], None] = _nobody
        """Gets bytes, and seconds in which they came, maybe long before the last of these."""
        self._landed_at = 0.0
        self._bytes = 0
        self._seconds = 0.0
        self._busy_since = 0.0
        self._busy_bytes = 0
        """What landed since then, with always something on its way."""

    def landed(self, nbytes: int, began: float, *, waited: bool) -> None:
        """A batch that began at a time of time.monotonic() is there."""
        now = time.monotonic()
        if began >= self._landed_at:
            self._busy_since, self._busy_bytes = began, 0
        self._busy_since = min(self._busy_since, began)
        self._busy_bytes += nbytes
        if not waited and self._busy_bytes >= LOAD_BYTES_MIN:
            self.tell_at_most(self._busy_bytes, now - self._busy_since)
        if waited:
            # Before the last one landed, the drive was busy with that.
            self._bytes += nbytes
            self._seconds += now - max(began, self._landed_at)
        self._landed_at = now
        if self._bytes >= LOAD_BYTES_MIN:
            self.tell(self._bytes, self._seconds)
            self._bytes, self._seconds = 0, 0.0


def _nobody(nbytes: int, seconds: float) -> None:
    """Nobody wants to know."""


class CostMeter:
    """Measurements of one model on one machine. `note_*` may be called on any thread."""

    def __init__(self, load: LoadCost, clock: Any = time.monotonic) -> None:
        self._load = load
        self._clock = clock
        self._loaded_at: float | None = None
        self._confirmed_at = -math.inf
        """When a load showed last that the rate is about what is known, or more."""
        self._passes: dict[int, deque[tuple[int, float, float]]] = {}
        """Per class: (tokens, pairs, seconds)."""
        self._prefill: PrefillCost | None = None
        self._changed = False

    @classmethod
    def start(cls) -> "CostMeter":
        """Before anything is measured."""
        return cls(LoadCost(LATENCY_S_START, BYTES_PER_S_START))

    def calibrated(self, drives: Collection[Calibration]) -> None:
        """What was measured of a store's drives counts until a load is; they are read side by
        side."""
        if drives and self._loaded_at is None:
            rate = sum(each.read_bytes_per_s for each in drives)
            self._load = LoadCost(max(each.latency_s for each in drives), rate)

    def costs(self) -> Costs:
        if self._prefill is None and self._passes:
            self._prefill = _fit([each for kept in self._passes.values() for each in kept])
        return Costs(self._load, self._prefill, self._age_s() > STALE_S)

    def _age_s(self) -> float:
        """How long ago the rate was measured, or confirmed."""
        loaded_at = -math.inf if self._loaded_at is None else self._loaded_at
        return float(self._clock() - max(loaded_at, self._confirmed_at))

    def note_load(self, nbytes: int, seconds: float) -> None:
        """So many bytes were brought from the drive into HOT, checks and all."""
        if nbytes < LOAD_BYTES_MIN or seconds <= 0:
            return
        rate = nbytes / max(seconds - self._load.latency_s, seconds / 2)
        share = 1.0 if self._loaded_at is None else NEWEST_SHARE
        # Seconds per byte are what adds up, so they are what is averaged.
        mixed = share / rate + (1 - share) / self._load.bytes_per_s
        rate = min(max(1 / mixed, RATE_RANGE[0]), RATE_RANGE[1])
        self._load = LoadCost(self._load.latency_s, rate)
        self._loaded_at = self._clock()
        self._changed = True

    def note_load_at_most(self, nbytes: int, seconds: float) -> None:
        """So many bytes were brought from the drive within this time, in a part of it maybe."""
        if nbytes < LOAD_BYTES_MIN or seconds <= 0:
            return
        if nbytes / seconds >= self._load.bytes_per_s:
            self.note_load(nbytes, seconds)
        elif nbytes / seconds >= self._load.bytes_per_s / DOUBT:
            # No plan hangs on a smaller difference while this is new.
            self._confirmed_at = self._clock()

    def note_pass(self, tokens: int, position: int, seconds: float) -> None:
        """A forward pass of so many tokens, the first one at this position, took so long."""
        if tokens < PASS_TOKENS_MIN or not SECONDS_RANGE[0] <= seconds <= SECONDS_RANGE[1]:
            return
        self._add_pass(tokens, tokens * (position + tokens / 2), seconds)
        self._changed = True

    def _add_pass(self, tokens: int, pairs: float, seconds: float) -> None:
        kept = self._passes.setdefault(tokens.bit_length(), deque(maxlen=PASSES_KEPT))
        kept.append((tokens, pairs, seconds))
        self._prefill = None

    # ---- across runs ------------------------------------------------------------------------

    def restore(self, path: Path, fingerprint: str) -> None:
        """Go on from what another run measured of this model on this machine, if it did: what
        cannot be read is measured anew. path: of the file."""
        entry = _read(path).get(fingerprint)
        try:
            if entry is None or entry["machine"] != _machine():
                return
            load = LoadCost(
                number_within(entry["latency_s"], LATENCY_S_RANGE),
                number_within(entry["bytes_per_s"], RATE_RANGE),
            )
            loaded = None if entry["loaded"] is None else time.time() - float(entry["loaded"])
            passes = [_pass(*each) for each in entry["passes"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            _log.warning("%s is not used: %r", path, error)
            return
        self._load = load
        if loaded is not None and 0 <= loaded < STALE_S:
            self._loaded_at = self._clock() - loaded
        for tokens, pairs, seconds in passes:
            self._add_pass(tokens, pairs, seconds)

    def keep(self, path: Path, fingerprint: str) -> None:
        """Write down what was measured since, beside that of other models. Where that cannot be
        done a warning says so: the next run measures anew."""
        if not self._changed:
            return
        entries = _read(path)
        entries[fingerprint] = {
            "machine": _machine(),
            "latency_s": self._load.latency_s,
            "bytes_per_s": self._load.bytes_per_s,
            "loaded": None
            if self._loaded_at is None
            else time.time() - (self._clock() - self._loaded_at),
            "passes": [list(each) for kept in self._passes.values() for each in kept],
        }
        try:
            replace_file(path, json.dumps({"version": FILE_VERSION, "models": entries}))
        except (OSError, RecursionError) as error:
            # What stands there of other models was read, and may still be nested too deep to write.
            _log.warning("%s is not written: %s", path, error)
        self._changed = False


def _read(path: Path) -> dict[str, Any]:
    """Entries by fingerprint; none where there is no file, or none that can be used."""
    try:
        content = json.loads(read_small(path, FILE_BYTES_MAX))
        if content["version"] != FILE_VERSION:
            return {}
        return dict(content["models"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("%s is not used: %r", path, error)
        return {}


def _pass(tokens: Any, pairs: Any, seconds: Any) -> tuple[int, float, float]:
    """One that was kept. Raises ValueError for what is none."""
    return (
        int(number_within(tokens, TOKENS_RANGE)),
        number_within(pairs, PAIRS_RANGE),
        number_within(seconds, SECONDS_RANGE),
    )


def _machine() -> str:
    """What measurements hold for: one taken elsewhere says nothing here."""
    return f"{platform.node()} {platform.machine()} {os.cpu_count()}"


def _fit(passes: list[tuple[int, float, float]]) -> PrefillCost:
    """Non-negative costs that explain passes (tokens, pairs, seconds) with the least relative
    error. A pass that took much longer than the others say is left out: the machine was busy."""
    cost, errors = _least(passes)
    usual = float(np.median(np.abs(errors)))
    calm = [
        each for each, error in zip(passes, errors, strict=True) if error < max(3 * usual, 0.25)
    ]
    return _least(calm)[0] if len(calm) >= max(3, len(passes) // 2) else cost


def _least(passes: list[tuple[int, float, float]]) -> tuple[PrefillCost, Any]:
    """The fit, and by what part each pass took longer than it says."""
    data = np.array(passes, np.float64)
    seconds = data[:, 2]
    columns = np.stack([np.ones(len(data)), data[:, 0], data[:, 1]], 1) / seconds[:, None]
    best, best_error = np.zeros(3), np.inf
    for chosen in EXPLANATIONS:
        part = columns[:, chosen]
        found = np.linalg.lstsq(part, np.ones(len(data)), rcond=None)[0]
        error = float(((part @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < best_error * 0.98 - 1e-12:
            best = np.zeros(3)
            best[list(chosen)] = found
            best_error = error
    return PrefillCost(*best.tolist()), 1 - columns @ best
