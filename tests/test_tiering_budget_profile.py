"""Budgets of layers, the profile that says them, and a cache that obeys it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import kvtier
from kvtier.errors import ConfigError, DeviceError, FormatError, VersionMismatch
from kvtier.tiering import store_files
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.adapters.sparse_mode import SparseMode
from kvtier.tiering.budget import Budget, safest
from kvtier.tiering.budget_profile import PROFILE, Profile, TaskBudget, budget_for, load
from kvtier.tiering.fingerprint import PROVENANCE_BYTES, Fingerprint, Provenance
from tests.model_cases import generate, llama, prompt, qwen2

pytestmark = pytest.mark.usefixtures("one_thread", "always_loads")

MODEL = Fingerprint.of({"weights": "w", "namespace": ""})
LAYERS = 2
UNEVEN = Budget((0.125, 0.5))


def a_profile(budget: Budget | None = UNEVEN, **changes: Any) -> Profile:
    tasks = {
        "needle": TaskBudget(Budget((0.125, 0.125)), 0.001, 0.25, 3, 3),
        "text": TaskBudget(None, 0.5, 7.0, 0, 0),
    }
    known: dict[str, Any] = {
        "fingerprint": MODEL.model_hex(), "name": "a model", "layers": LAYERS, "tokens": 1024,
        "seeds": 2, "budget": budget, "tasks": tasks,
    }  # fmt: skip
    return Profile(**{**known, **changes})


# ---- budgets --------------------------------------------------------------------------------


def test_a_budget_is_a_share_or_one_for_each_layer() -> None:
    assert Budget.of("exact", 3) is Budget.of(1, 3) is Budget.of([1.0, 1, 1], 3) is None
    even, uneven = Budget.of(0.1, 3), Budget.of((0.1, 0.2, 1), 3)
    assert even == Budget((0.1,) * 3)
    assert uneven is not None
    assert even is not None
    assert (even.share, even.plain()) == (0.1, 0.1)
    assert uneven.share == pytest.approx(1.3 / 3)
    assert uneven.plain() == [0.1, 0.2, 1.0]
    assert uneven.scaled(6).shares == pytest.approx((0.6, 1.0, 1.0))


@pytest.mark.parametrize(
    "wanted",
    [0, 1.1, -0.5, float("nan"), float("inf"), True, None, "half", [], [0.5], [0.5] * 4,
     [0.5, 0.5, 0], [0.5, 0.5, "0.5"], [[0.5] * 3], {"a": 1}, 10**400],
)  # fmt: skip
def test_what_is_no_budget_is_refused(wanted: object) -> None:
    with pytest.raises(ConfigError, match="budget"):
        Budget.of(wanted, 3)


def test_the_safest_budget_is_enough_for_all() -> None:
    one, other = Budget((0.1, 0.5)), Budget((0.2, 0.2))
    assert safest([one, other]) == Budget((0.2, 0.5))
    assert safest([one, None]) is safest([]) is None


def test_uneven_budgets_have_provenances_of_their_own() -> None:
    """Equal for equal budgets only; one share for all layers is that share."""
    texts = {
        Provenance.approximate(each, "raw").text
        for each in (0.125, (0.125, 0.5), (0.5, 0.125), (0.125, 0.5, 0.5), (0.125, 0.5000001))
    }
    assert len(texts) == 5
    assert max(map(len, texts)) <= PROVENANCE_BYTES
    assert Provenance.approximate((0.125,) * 24, "raw") == Provenance.approximate(0.125, "raw")
    assert Provenance.approximate((0.125, 1), "raw") == Provenance.approximate([0.125, 1.0], "raw")
    for shares in ((), (0.5, 0.0), (0.5, 1.5)):
        with pytest.raises(ConfigError, match="budget"):
            Provenance.approximate(shares, "raw")


def test_an_alarm_widens_all_layers_alike() -> None:
    mode = SparseMode(Budget((0.05, 0.15)))
    first = mode.provenance
    mode.widen(0.2)
    assert mode.budget is not None
    assert mode.budget.shares == pytest.approx((0.1, 0.3))
    with mode.exactly():
        assert not mode.is_sparse(0, 1)
    assert mode.budget_of(1, 0, 1) == pytest.approx(0.3)
    mode.widen(1.0)
    assert mode.share == 1.0
    mode.widen(0.5)
    assert mode.share == 1.0, "it is never narrowed again"
    assert mode.provenance == first


# ---- the file -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, UNEVEN, Budget((0.1, 0.1)), Budget((1e-9, 1.0))])
def test_a_profile_is_read_as_it_was_written(budget: Budget | None, tmp_path: Path) -> None:
    made = a_profile(budget)
    made.save(tmp_path / PROFILE)
    assert load(tmp_path / PROFILE) == made
    assert budget_for(tmp_path, MODEL, LAYERS) == budget
    assert os.listdir(tmp_path) == [PROFILE]


def test_a_profile_may_be_changed_by_hand(tmp_path: Path) -> None:
    a_profile(None).save(tmp_path / PROFILE)
    text = (tmp_path / PROFILE).read_text()
    (tmp_path / PROFILE).write_text(text.replace("\nbudget: exact", "\nbudget: [0.25, 1]"))
    assert budget_for(tmp_path, MODEL, LAYERS) == Budget((0.25, 1.0))


def test_the_tenant_does_not_matter_and_the_model_does(tmp_path: Path) -> None:
    a_profile().save(tmp_path / PROFILE)
    tenant = Fingerprint.of({"weights": "w", "namespace": {"name": "a", "salt": "b"}})
    assert budget_for(tmp_path, tenant, LAYERS) == UNEVEN
    other = Fingerprint.of({"weights": "v", "namespace": ""})
    with pytest.raises(ConfigError, match=r"another model, a model .*kvtier guard run --store"):
        budget_for(tmp_path, other, LAYERS)
    a_profile(layers=3, budget=None, tasks={}).save(tmp_path / PROFILE)
    with pytest.raises(ConfigError, match="another model"):
        budget_for(tmp_path, MODEL, LAYERS)


def test_no_profile_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"kvtier guard run --store {tmp_path}"):
        budget_for(tmp_path, MODEL, LAYERS)


GOOD = yaml.safe_dump(a_profile().to_dict(), sort_keys=False)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0" * 200, b"\xff\xfe\x00garbage", b"- a\n", b"just text", b"{unclosed: [",
        b"[" * 600, b"!!python/object/apply:os.system ['true']\n", b"x" * (2 << 20),
        GOOD[: len(GOOD) // 2].encode(),
        *(
            GOOD.replace(old, new, 1).encode()
            for old, new in (
                ("version: 1", "version: one"), ("version: 1", "version: true"),
                ("layers: 2", "layers: 3"), ("layers: 2", "layers: -2"),
                ("layers: 2", "layers: true"), ("tokens: 1024", "tokens: many"),
                ("seeds: 2", "seeds: 0"), ("model: a model", "model: \"a\\x1b[2J\""),
                ("model: a model", "model: [a]"), ("budget:\n- 0.125", "budget:\n- 1.125"),
                ("budget:\n- 0.125", "budget:\n- .nan"), ("budget:\n- 0.125", "budget:\n- x"),
                ("budget:\n- 0.125\n", "budget:\n"), ("budget: exact", "budget: profile"),
                ("kl: 0.001", "kl: -1"), ("kl: 0.001", "kl: .inf"), ("kl_max: 0.25", "k: 0.25"),
                ("kept: 3", "kept: 4"), ("kept: 3", "kept: '3'"), ("tasks:", "others:"),
                ("  needle:", "  {}:"), ("tasks:", "tasks: 3\nothers:"),
            )
        ),
    ],
    ids=lambda data: repr(data)[2:42],
)  # fmt: skip
def test_a_damaged_profile_is_a_format_error(data: bytes, tmp_path: Path) -> None:
    assert data != GOOD.encode()
    (tmp_path / PROFILE).write_bytes(data)
    with pytest.raises(FormatError, match=PROFILE):
        budget_for(tmp_path, MODEL, LAYERS)


def bomb(levels: int) -> str:
    """A budget of lists of lists, ten of each level, written in a line a level."""
    lists = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(["x0: &x0 [0.5]", *lists, f"budget: [*x{levels - 1}, 0.5]"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("budget: 0.5", bomb(40)),
        ("budget: 0.5", f"budget: 0x{'f' * 10000}"),
        ("layers: 2", "layers: 1000000000"),
    ],
    ids=["aliases", "digits", "layers"],
)
def test_a_profile_costs_no_more_than_its_bytes(old: str, new: str, tmp_path: Path) -> None:
    """What a few lines name may take for ever to write out, or gigabytes to hold."""
    even = yaml.safe_dump(a_profile(Budget((0.5, 0.5))).to_dict(), sort_keys=False)
    assert old in even
    (tmp_path / PROFILE).write_text(even.replace(old, new, 1))
    with pytest.raises(FormatError, match=PROFILE):
        budget_for(tmp_path, MODEL, LAYERS)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / PROFILE)
    with pytest.raises(FormatError, match="not a regular file"):
        load(tmp_path / PROFILE)
    os.unlink(tmp_path / PROFILE)
    (tmp_path / PROFILE).mkdir()
    with pytest.raises(DeviceError, match=PROFILE):
        load(tmp_path / PROFILE)
    with pytest.raises(DeviceError, match=PROFILE):
        a_profile().save(tmp_path / PROFILE)


def test_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / PROFILE).write_text("version: 2\n")
    with pytest.raises(VersionMismatch, match=r"version 2.* kvtier guard run"):
        load(tmp_path / PROFILE)


# ---- obeyed ---------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    options: dict[str, Any] = {"region": "64MiB", "hot": 8 << 20, "placement": "keys"}
    with kvtier.open(tmp_path / "kv", model=qwen2(), **options) as opened:
        yield opened


def pages_by_layer(store: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[float]:
    """The share of the Pages that each layer of a step chooses, when what was sealed with the
    prompt is no longer recent: that is read beyond the budget."""
    ids, new = prompt(1, 1500), 70
    chosen: list[float] = []
    attend = type(store).attend

    def counted(self: Any, sequence: Any, layer: int, *args: Any, **given: Any) -> torch.Tensor:
        before = self.sparse_counts()
        out: torch.Tensor = attend(self, sequence, layer, *args, **given)
        found = self.sparse_counts().since(before)
        chosen.append(found.pages_chosen / max(found.pages_to_choose, 1))
        return out

    monkeypatch.setattr(type(store), "attend", counted)
    with TieredCache(store, ids, guard="off", **options) as cache:
        generate(store.model, ids, cache, new)
    return chosen[-LAYERS:]


@pytest.mark.parametrize("by_profile", [False, True])
def test_each_layer_reads_its_own_share(
    by_profile: bool, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_profile:
        a_profile(fingerprint=store.fingerprint.model_hex()).save(store.directory / PROFILE)
    budget = "profile" if by_profile else (0.125, 0.5)
    found = pages_by_layer(store, monkeypatch, budget=budget)
    assert found == pytest.approx([0.125, 0.5], abs=0.02)


def test_a_layer_may_read_everything(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pages_by_layer(store, monkeypatch, budget=(1.0, 0.125))
    assert found == pytest.approx([0.0, 0.125], abs=0.02), "nothing was to be chosen in the first"
    with TieredCache(store, prompt(1, 1500), budget=(1.0, 0.125), guard="off") as cache:
        assert cache.mode.provenance.text.startswith("approximate:budgets=")


def test_a_profile_may_say_exact(store: Any) -> None:
    a_profile(None, fingerprint=store.fingerprint.model_hex()).save(store.directory / PROFILE)
    ids = prompt(2, 100)
    with TieredCache(store, ids, budget="profile") as cache:
        assert cache.mode.budget is None
        generate(store.model, ids, cache, 2)


def test_a_cache_refuses_what_it_cannot_obey(store: Any) -> None:
    ids = prompt(3, 20)
    with pytest.raises(ConfigError, match=r"no profile .*kvtier guard run --store"):
        TieredCache(store, ids, budget="profile")
    with kvtier.open(store.directory.parent / "other", model=llama(), region="16MiB") as other:
        a_profile(fingerprint=other.fingerprint.model_hex()).save(store.directory / PROFILE)
    with pytest.raises(ConfigError, match="another model"):
        TieredCache(store, ids, budget="profile")
    with pytest.raises(ConfigError, match="3 shares, but the model 2 layers"):
        TieredCache(store, ids, budget=(0.5, 0.5, 0.5))


def test_a_profile_is_one_of_a_stores_own_files(tmp_path: Path) -> None:
    assert PROFILE in store_files.OWN_FILES
