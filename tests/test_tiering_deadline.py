"""How long loading may take: what is a deadline, and what is none."""

import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.tiering.back_loader import BackLoader, State
from kvtier.tiering.chain import as_tokens
from kvtier.tiering.fingerprint import EXACT
from kvtier.tiering.plan_runner import Wish
from tests.store_cases import KV, PLAIN, open_store, put, some_tokens


@pytest.mark.parametrize(
    "seconds", [0, -0.0, 5, Fraction(5, 2), np.float32(2.5), np.int64(5), threading.TIMEOUT_MAX]
)
def test_any_real_number_is_a_deadline(seconds: float) -> None:
    wish = Wish("load", seconds)
    wish.check()
    assert wish.limit_s == seconds
    assert type(wish.limit_s) is float


@pytest.mark.parametrize(
    "seconds",
    [None, float("inf"), 1e10, 10**400, np.float32("inf"), Fraction(10**400), 1e300],
    ids=str,
)
def test_what_nobody_can_wait_for_is_no_deadline(seconds: float | None) -> None:
    wish = Wish("load", seconds)
    wish.check()
    assert wish.limit_s is None


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (-1, "-1"),
        (-(10**400), "-1000"),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
        (np.float32("nan"), "nan"),
        (True, "True"),
        (False, "False"),
        (np.True_, "True"),
        ("5", "'5'"),
        (b"", "b''"),
        ([], r"\[\]"),
        (5j, "5j"),
        (torch.tensor(5.0), "tensor"),
        (np.zeros(2), "array"),
    ],
    ids=str,
)
def test_anything_else_is_refused(given: Any, shown: str) -> None:
    message = f"must be a number of seconds, 0 or more, or None for no deadline: got .*{shown}"
    with pytest.raises(ConfigError, match=message):
        Wish("load", given).check()


def test_a_wait_for_longer_than_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = threading.Event()

    def load(self: BackLoader, view: object) -> State:
        assert drive.wait(60)
        return State.LEFT

    monkeypatch.setattr(BackLoader, "_load", load)
    tokens = some_tokens(600, 1)
    with open_store(tmp_path) as store:
        put(store, KV(PLAIN), "n", tokens)
        views, _ = store._restorer.stored(EXACT, as_tokens(tokens))
        loader = BackLoader.start(store, views, len(tokens))
        timer = threading.Timer(0.1, drive.set)
        timer.start()
        assert loader.wait(0, float("inf")) is State.LEFT
        timer.join()
        loader.close()
