"""Restoring by plan: whatever is loaded and whatever is computed, the tokens are DynamicCache's."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtier
from kvtier.errors import ConfigError, DeviceError
from kvtier.tiering.adapters import huggingface
from kvtier.tiering.adapters.huggingface import TieredCache
from kvtier.tiering.back_loader import BackLoader, State
from kvtier.tiering.planner import Costs, LoadCost, PrefillCost
from kvtier.tiering.segment import SegmentView
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from tests.hole_cases import damage, lose
from tests.hole_cases import rows as rows_of
from tests.model_cases import expected, generate, padded, prompt, qwen2

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 2700
"""Five Segments and a short one."""
NEW = 12
KNOWN = PrefillCost(1e-3, 1e-5, 1e-9)


@pytest.fixture(scope="module")
def answer() -> tuple[torch.Tensor, torch.Tensor]:
    ids = prompt(3, TOKENS)
    return ids, expected("qwen2", ids, NEW)


@pytest.fixture
def saved(tmp_path: Path, answer: tuple[torch.Tensor, torch.Tensor]) -> Path:
    """A store that has the prompt, but for its last token."""
    ids, _ = answer
    model = qwen2()
    with (
        kvtier.open(tmp_path / "kv", model=model, region="64MiB") as store,
        TieredCache(store, ids) as cache,
        torch.no_grad(),
    ):
        model(input_ids=ids[:, :-1], cache=cache)
        cache.save("prompt")
    return tmp_path / "kv"


class Opened:
    """A store with its model, whose costs are set instead of measured."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.model: Any = qwen2()
        self.store: Store = kvtier.open(path, model=self.model)
        self._patch = patch
        self.passes: list[tuple[int, int]] = []
        note = self.store.costs.note_pass

        def note_pass(tokens: int, position: int, seconds: float) -> None:
            self.passes.append((position, position + tokens))
            note(tokens, position, seconds)

        patch.setattr(self.store.costs, "note_pass", note_pass)

    def cost(
        self, bytes_per_s: float, prefill: PrefillCost | None = KNOWN, *, is_stale: bool = False
    ) -> None:
        costs = Costs(LoadCost(0.0, bytes_per_s), prefill, is_stale)
        self._patch.setattr(self.store.costs, "costs", lambda: costs)

    def empty_hot(self) -> None:
        """What was loaded must be read once more."""
        self.store._mover.ahead.give_up()
        hot = self.store._residency.hot
        for slot in range(hot.pages.shape[1]):
            for layer in range(2):
                hot.drop(layer, slot)

    def check(self, answer: tuple[torch.Tensor, torch.Tensor], **how: Any) -> int:
        """Generate from what a cache restores; returns how many tokens that were."""
        ids, tokens = answer
        with TieredCache(self.store, ids, **how) as cache:
            assert torch.equal(generate(self.model, ids, cache, NEW), tokens)
            return cache.restored_tokens


@pytest.fixture
def opened(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    found = Opened(saved, monkeypatch)
    with found.store:
        yield found


def fail(*args: Any, **more: Any) -> None:
    """What the drive does."""
    raise DeviceError("the drive is gone", 19)


def slowed(patch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """The drive takes so long for each Segment; returns where those begin that it loads."""
    genuine = BackLoader._load
    begun: list[int] = []

    def load(self: BackLoader, view: SegmentView) -> State:
        begun.append(view.segment.start)
        time.sleep(seconds)
        return genuine(self, view)

    patch.setattr(BackLoader, "_load", load)
    return begun


def test_what_is_stored_is_loaded(
    opened: Opened, answer: tuple[torch.Tensor, torch.Tensor]
) -> None:
    assert opened.check(answer) == TOKENS - 1
    assert opened.check(answer, plan="load") == TOKENS - 1
    assert opened.check(answer, plan="recompute") == 0
    first = [each for each in opened.passes if each[1] - each[0] > 1]
    assert first == [(0, TOKENS)]


def test_a_drive_that_is_too_slow_is_not_read(
    opened: Opened, answer: tuple[torch.Tensor, torch.Tensor]
) -> None:
    opened.cost(1e3)
    read = opened.store.stats().bytes_read
    assert opened.check(answer) == 0
    assert opened.store.stats().bytes_read == read, "its own KV is attended to, not the stored"


def test_both_at_once_meet_and_are_exact(
    opened: Opened, answer: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cake: the drive has the last Segments, the model computes the first ones meanwhile."""
    token_bytes = opened.store.geometry.payload_bytes(0, 1) * 2
    opened.cost(token_bytes * 1e4, PrefillCost(0, 1e-4, 0))
    genuine = huggingface.compute_alone

    def compute(*args: Any) -> None:
        time.sleep(0.05)
        genuine(*args)

    monkeypatch.setattr(huggingface, "compute_alone", compute)
    begun = slowed(monkeypatch, 0.05)
    assert opened.check(answer) == TOKENS - 1
    assert begun[0] == 2560, "from the back"
    assert begun == sorted(begun, reverse=True)
    computed = [each for each in opened.passes if each[1] - each[0] > 1]
    assert computed[0] == (0, 512), "from the front"
    assert 1 <= len(computed) <= 4
    assert begun[-1] <= computed[-1][1], "until they meet"


@pytest.mark.parametrize("lost", [(1,), (0, 2), (1, 2, 4), (5,), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("plan", ["auto", "load"])
def test_holes_are_computed_and_healed(
    saved: Path,
    answer: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    lost: tuple[int, ...],
    plan: str,
) -> None:
    model = qwen2()
    with kvtier.open(saved, model=model) as store:
        lose(store, *lost)
    opened = Opened(saved, monkeypatch)
    with opened.store as store:
        ids, tokens = answer
        opened.cost(1e9)
        end = TOKENS - 1 if 5 not in lost else 2560
        with TieredCache(store, ids, plan=plan) as cache:  # type: ignore[arg-type]
            assert cache.restored_tokens == end
            computed = [each for each in opened.passes if each[1] - each[0] > 1]
            holes = {(512 * each, 512 * (each + 1)) for each in lost if each < 5}
            assert set(computed) == holes, "nothing but the holes"
            output = generate(model := opened.model, ids, cache, NEW)
            assert torch.equal(output, tokens)
            assert model is not None
            cache.save("answer", tokens=output)
        assert store.lookup(output[0, :-1]) == TOKENS + NEW - 1
        assert opened.check(answer) == TOKENS - 1


@pytest.mark.parametrize("way", ["load", "both"])
def test_damage_that_is_found_while_loading_is_computed(
    saved: Path,
    answer: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    opened = Opened(saved, monkeypatch)
    with opened.store as store:
        damage(store, 1, 3)
        token_bytes = store.geometry.payload_bytes(0, 1) * 2
        opened.cost(1e9 if way == "load" else token_bytes * 1e4, PrefillCost(0, 1e-4, 0))
        assert opened.check(answer) == TOKENS - 1
        computed = {each for each in opened.passes if each[1] - each[0] > 1}
        if way == "load":
            assert store.stats().damaged_extents == 2
            assert computed == {(512, 1024), (1536, 2048)}
        else:
            # What is computed from the front need not be read to be found damaged.
            assert store.stats().damaged_extents in (1, 2)
            assert computed


@pytest.mark.parametrize("segments", [(4,), (0, 2), (0, 1, 2, 3, 4, 5)])
def test_damage_in_the_middle_of_a_pass_is_computed_within_it(
    opened: Opened, answer: tuple[torch.Tensor, torch.Tensor], segments: tuple[int, ...]
) -> None:
    """A stored prefix is read layer by layer while the model computes: the last layer's bytes turn
    out to be damaged when the layers before it are done."""
    opened.cost(1e12)
    ids, tokens = answer
    with TieredCache(opened.store, ids) as cache:
        assert cache.restored_tokens == TOKENS - 1
        damage(opened.store, *segments)
        opened.empty_hot()
        output = generate(opened.model, ids, cache, NEW)
        assert torch.equal(output, tokens)
        assert opened.store.stats().damaged_extents == len(segments)
        assert cache.save("answer", tokens=output) == TOKENS + NEW - 1
    assert opened.store.lookup(output[0, :-1]) == TOKENS + NEW - 1
    assert opened.check(answer) == TOKENS - 1


def test_a_device_that_fails_in_the_middle_of_a_pass_is_an_error(
    opened: Opened, answer: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Segment is to blame, so computing one anew would not help."""
    opened.cost(1e12)
    ids, _ = answer

    with TieredCache(opened.store, ids) as cache:
        opened.empty_hot()
        monkeypatch.setattr(opened.store._extents.device, "start_read", fail)
        with pytest.raises(DeviceError, match="the drive is gone"):
            generate(opened.model, ids, cache, NEW)
        monkeypatch.undo()


def test_a_deadline_is_kept_when_the_drive_hangs(
    opened: Opened, answer: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = threading.Event()
    genuine = BackLoader._load

    def load(self: BackLoader, view: SegmentView) -> State:
        if view.segment.start == 1024:
            assert drive.wait(60)
        return genuine(self, view)

    monkeypatch.setattr(BackLoader, "_load", load)
    opened.cost(1e9)
    began = time.monotonic()
    try:
        assert opened.check(answer, deadline_s=0.5) == 1024
        assert time.monotonic() - began < 20
    finally:
        drive.set()
    assert opened.check(answer, deadline_s=30.0) == TOKENS - 1
    assert opened.check(answer, deadline_s=0) == 0


@pytest.mark.parametrize("seconds", [float("inf"), 1e10, 10**400], ids=str)
def test_a_deadline_that_nobody_can_wait_for_is_none(
    opened: Opened,
    answer: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    genuine = BackLoader._load

    def load(self: BackLoader, view: SegmentView) -> State:
        time.sleep(0.05)
        return genuine(self, view)

    monkeypatch.setattr(BackLoader, "_load", load)
    opened.cost(1e9)
    lose(opened.store, 2)
    assert opened.check(answer, plan="load", deadline_s=seconds) == TOKENS - 1


def test_a_drive_that_fails_as_a_whole_is_computed_around(
    opened: Opened, answer: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(opened.store._extents.device, "start_read", fail)
        assert opened.check(answer, deadline_s=30.0) == 0
        assert opened.check(answer) == 0
    assert opened.check(answer) == TOKENS - 1


def test_rows_of_a_batch_have_holes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [prompt(11, 1700), prompt(12, 1300)]
    ids, mask = padded(rows)
    tokens = expected("qwen2", ids, NEW, {"attention_mask": mask})
    model: Any = qwen2()
    with kvtier.open(tmp_path / "kv", model=model, region="64MiB") as store:
        with TieredCache(store, ids, mask) as cache, torch.no_grad():
            generate(model, ids, cache, 2, {"attention_mask": mask})
            cache.save("both")
        second = [i for i, row in enumerate(rows_of(tmp_path / "kv")) if row.start_position == 512]
        assert len(second) == 2
        lose(store, *second)
    opened = Opened(tmp_path / "kv", monkeypatch)
    with opened.store as store:
        opened.cost(1e9)
        assert [store.lookup(each[0]) for each in rows] == [512, 512]
        with TieredCache(store, ids, mask) as cache:
            assert cache.restored_tokens == ids.shape[1] - 1
            output = generate(opened.model, ids, cache, NEW, {"attention_mask": mask})
        assert torch.equal(output, tokens)


def test_passes_and_loads_are_measured(opened: Opened, answer: tuple[torch.Tensor, Any]) -> None:
    costs = opened.store.costs.costs
    known = costs()
    assert known.prefill is not None, "the process that saved it knew, and wrote it down"
    assert known.is_stale
    opened.check(answer, plan="recompute")
    assert costs().prefill != known.prefill
    opened.check(answer, plan="load")
    assert not costs().is_stale
    assert costs().load != known.load


@pytest.mark.parametrize(
    ("seconds", "is_stale", "lazily"),
    [(0.3, False, True), (1e-6, True, True), (0.3, True, False)],
)
def test_only_a_rate_that_matters_is_worth_a_load_as_a_whole(
    opened: Opened,
    answer: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    is_stale: bool,
    lazily: bool,
) -> None:
    """A drive not seen for long loads layer by layer, unless the next choice hangs on its rate."""
    nbytes = sum(each.nbytes for each in opened.store._registry.committed.values())
    # To compute all of it takes 2.7 s.
    opened.cost(nbytes / seconds, PrefillCost(0.0, 1e-3, 0.0), is_stale=is_stale)
    genuine = opened.store.resume
    asked: list[bool] = []

    def resume(tokens: object, *, lazily: bool) -> Sequence:
        asked.append(lazily)
        return genuine(tokens, lazily=lazily)

    monkeypatch.setattr(opened.store, "resume", resume)
    assert opened.check(answer) == TOKENS - 1
    assert asked == [lazily]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"plan": "fast"}, "auto, load, recompute, both: got 'fast'"),
        ({"deadline_s": -1.0}, "number of seconds, 0 or more, or None for no deadline: got -1.0"),
        ({"deadline_s": float("nan")}, "got nan"),
        ({"deadline_s": "5"}, "got '5'"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    opened: Opened, answer: tuple[torch.Tensor, Any], how: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TieredCache(opened.store, answer[0], **how)


def test_a_save_mends_what_a_scrub_found_lost(opened: Opened, answer: Any) -> None:
    ids, tokens = answer
    opened.cost(1e12)
    with TieredCache(opened.store, ids) as cache:
        assert torch.equal(generate(opened.model, ids, cache, NEW), tokens)
        lose(opened.store, 1)
        assert cache.save("answer", tokens=tokens) == TOKENS + NEW - 1
    assert opened.store.lookup(tokens[0].numpy()) == TOKENS + NEW - 1
