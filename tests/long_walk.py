"""A long random walk over a store on a simulated drive, against a dict: everything a user may do,
with a region that is too small, damage, refused writes and kills on the way."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import CapacityError, ConfigError, DeviceError, FormatError, KvtierError
from kvtier.io.alignment import GRID_BYTES
from kvtier.io.simulated import SimulatedDevice
from kvtier.io.simulated_faults import BadRange, Faults
from kvtier.tiering import opening
from kvtier.tiering.config import Config
from kvtier.tiering.sequence import Sequence
from kvtier.tiering.store import Store
from tests.store_cases import (
    KV,
    MIB,
    PLAIN,
    VOCABULARY,
    Shuffled,
    check_attend,
    check_bytes,
    extend,
    open_store,
)

CACHE = Faults(volatile_cache=True, shuffled=True)
PIECES = (1, 3, 16, 40, 200, 512, 700)
TOKENS_MAX = 1500
SEQUENCES_MAX = 4
NAMES = 8


@dataclass
class Pair:
    """A Sequence of the store, and the tokens that it must hold."""

    sequence: Sequence
    tokens: list[int]


@dataclass
class Named:
    """What the dict says of a name. doubtful: it may have lost Segments to damage."""

    tokens: list[int]
    held: bool = False
    doubtful: bool = False


@dataclass
class LongWalk:
    """`model` is the reference: by name, what was saved last and not removed since."""

    path: Path
    random: np.random.Generator
    kv: KV = field(default_factory=lambda: KV(PLAIN))
    image: bytes = bytes(3 * MIB)
    pairs: list[Pair] = field(default_factory=list)
    model: dict[str, Named] = field(default_factory=dict)
    operations: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    device: SimulatedDevice = field(init=False)
    store: Store = field(init=False)

    # ---- opening and closing ----------------------------------------------------------------

    def open_device(self, path: str, **wishes: object) -> SimulatedDevice:
        self.device = SimulatedDevice.from_image(
            self.image, path=path, faults=CACHE, seed=int(self.random.integers(1 << 30)),
            log_bytes_max=1 << 30,
        )  # fmt: skip
        return self.device

    def open(self) -> None:
        is_new = not (self.path / "store.yaml").exists()
        config = Config(
            "3MiB" if is_new else None,
            hot=int(self.random.choice([200_000, 600_000, 4_000_000])),
            host=int(self.random.choice([0, 300_000])),
            hold_limit=MIB,
            discard=bool(self.random.integers(2)),
        )
        placement = Shuffled(int(self.random.integers(100)))
        self.store = open_store(self.path, PLAIN, config, placement)

    def reopen(self, image: bytes) -> None:
        self.pairs.clear()
        self.image = image
        self.open()
        known = {each.name for each in self.store.names()}
        for name, named in self.model.items():
            assert name in known or not named.held, f"the held name {name!r} is gone"

    # ---- the walk ---------------------------------------------------------------------------

    def run(self, operations: int) -> None:
        self.open()
        steps: list[tuple[Callable[[], None], int]] = [
            (self.append, 8), (self.put, 5), (self.fork, 2), (self.crop, 2), (self.save, 3),
            (self.release, 4), (self.resume, 6), (self.hold, 2), (self.unhold, 2),
            (self.remove, 2), (self.evict, 1), (self.close, 1), (self.kill, 1), (self.rot, 1),
            (self.refuse_writes, 1), (self.fail_flush, 1), (self.look, 2),
        ]  # fmt: skip
        weights = np.array([weight for _, weight in steps], float)
        while self.operations < operations:
            step, _ = steps[int(self.random.choice(len(steps), p=weights / weights.sum()))]
            self.operations += 1
            self.counts[step.__name__] = self.counts.get(step.__name__, 0) + 1
            step()
            self.device.clear_log()
            self.check()
        for pair in self.pairs:
            self.store.release(pair.sequence)
        assert not self.store._residency.leases.any()
        self.store._files.allocator.check()
        self.store.close()

    def check(self) -> None:
        """What holds after every operation."""
        for pair in self.pairs:
            assert pair.sequence.lengths.tolist() == [len(pair.tokens)] * 2
        stats = self.store.stats()
        assert stats.device_bytes <= stats.region_bytes
        assert stats.hot_bytes_max <= stats.hot_limit_bytes
        assert stats.host_bytes <= stats.host_limit_bytes
        for row in self.store.names():
            assert row.token_count == len(self.model[row.name].tokens)
            assert bool(row.held_until) == self.model[row.name].held
        if self.pairs:
            self.attend(self.pairs[int(self.random.integers(len(self.pairs)))])

    def attend(self, pair: Pair) -> None:
        if not pair.tokens:
            return
        layer = int(self.random.integers(2))
        count = min(int(self.random.choice([1, 1, 7])), len(pair.tokens))
        try:
            check_attend(self.store, self.kv, pair.sequence, pair.tokens, layer=layer, count=count)
        except (FormatError, DeviceError):
            self.damage_was_met(pair)

    def damage_was_met(self, pair: Pair) -> None:
        """A read failed: only where damage was done."""
        assert any(each.doubtful for each in self.model.values()) or self.counts.get("rot")
        self.store.release(pair.sequence)
        self.pairs.remove(pair)

    def any_pair(self) -> Pair:
        if not self.pairs or (len(self.pairs) < SEQUENCES_MAX and self.random.random() < 0.3):
            self.pairs.append(Pair(self.store.sequence(), []))
        return self.pairs[int(self.random.integers(len(self.pairs)))]

    def any_name(self) -> str | None:
        names = [each.name for each in self.store.names()]
        return names[int(self.random.integers(len(names)))] if names else None

    def some_tokens(self, count: int) -> list[int]:
        found: list[int] = self.random.integers(0, VOCABULARY, count).tolist()
        return found

    def undone(self, pair: Pair, before: list[int]) -> None:
        """An append was refused on the way: back to what it was."""
        pair.tokens[:] = before
        try:
            self.store.crop(pair.sequence, len(before))
        except KvtierError:
            self.store.release(pair.sequence)
            self.pairs.remove(pair)

    # ---- what users do ----------------------------------------------------------------------

    def append(self) -> None:
        pair = self.any_pair()
        size = int(self.random.choice(PIECES))
        if len(pair.tokens) + size > TOKENS_MAX:
            return
        before = list(pair.tokens)
        pair.tokens += self.some_tokens(size)
        if self.random.random() < 0.5:
            self.store.name_tokens(pair.sequence, pair.tokens)
        try:
            extend(self.store, self.kv, pair.sequence, pair.tokens, pieces=max(size // 2, 1))
        except (CapacityError, DeviceError, FormatError):
            self.undone(pair, before)

    def put(self) -> None:
        pair = Pair(self.store.sequence(), self.some_tokens(int(self.random.choice(PIECES))))
        self.pairs.append(pair)
        try:
            extend(self.store, self.kv, pair.sequence, pair.tokens)
            self._save(pair, hold=None)
        except (CapacityError, DeviceError):
            pass
        self.store.release(pair.sequence)
        self.pairs.remove(pair)

    def save(self) -> None:
        pair = self.any_pair()
        if pair.tokens:
            hold = (None, None, True, 1e6, False)[int(self.random.integers(5))]
            with suppress(CapacityError, DeviceError, FormatError):
                self._save(pair, hold)

    def _save(self, pair: Pair, hold: bool | float | None) -> None:
        name = f"n{int(self.random.integers(NAMES))}"
        was_held = name in self.model and self.model[name].held
        present = name in {each.name for each in self.store.names()}
        assert self.store.save(pair.sequence, name, pair.tokens, hold=hold) == len(pair.tokens)
        held = bool(hold) if hold is not None else was_held and present
        self.model[name] = Named(list(pair.tokens), held, self._may_be_damaged(pair))

    def _may_be_damaged(self, pair: Pair) -> bool:
        return bool(self.counts.get("rot"))

    def fork(self) -> None:
        pair = self.any_pair()
        if len(self.pairs) < SEQUENCES_MAX:
            with suppress(CapacityError, DeviceError, FormatError):
                self.pairs.append(Pair(self.store.fork(pair.sequence), list(pair.tokens)))

    def crop(self) -> None:
        pair = self.any_pair()
        length = int(self.random.integers(0, len(pair.tokens) + 1))
        try:
            self.store.crop(pair.sequence, length)
        except (CapacityError, DeviceError, FormatError):
            return
        del pair.tokens[length:]

    def release(self) -> None:
        if self.pairs:
            pair = self.pairs.pop(int(self.random.integers(len(self.pairs))))
            self.store.release(pair.sequence)

    def resume(self) -> None:
        if not self.model:
            return
        name = list(self.model)[int(self.random.integers(len(self.model)))]
        named = self.model[name]
        present = name in {each.name for each in self.store.names()}
        cut = int(self.random.integers(1, len(named.tokens) + 1))
        wanted = named.tokens[:cut] + self.some_tokens(3)
        sequence = self.store.resume(wanted)
        if present and not named.doubtful:
            assert sequence.length() >= cut, f"{name!r} is listed, and not whole"
        pair = Pair(sequence, wanted[: sequence.length()])
        if len(self.pairs) < SEQUENCES_MAX and self.random.random() < 0.5:
            self.pairs.append(pair)
            return
        try:
            check_bytes(self.store, self.kv, sequence, pair.tokens)
        except (FormatError, DeviceError):
            assert self.counts.get("rot")
        self.store.release(sequence)

    def hold(self) -> None:
        name = self.any_name()
        if name is not None:
            try:
                self.store.hold(name, None if self.random.random() < 0.5 else 1e6)
            except CapacityError:
                return
            self.model[name].held = True

    def unhold(self) -> None:
        if self.random.random() < 0.1:
            for each in self.store.unhold_all():
                self.model[each].held = False
            return
        name = self.any_name()
        if name is not None:
            self.store.unhold(name)
            self.model[name].held = False

    def remove(self) -> None:
        name = self.any_name()
        if name is None:
            with pytest.raises(ConfigError):
                self.store.remove("n0")
            return
        self.store.remove(name)
        del self.model[name]

    def evict(self) -> None:
        before = {each.name for each in self.store.names()}
        self.store._space.evict(int(self.random.integers(1, 400_000)))
        gone = before - {each.name for each in self.store.names()}
        assert not [name for name in gone if self.model[name].held]

    def look(self) -> None:
        """Ask for what was never stored, and for a part of what was."""
        unknown = [VOCABULARY + 1, *self.some_tokens(30)]
        assert self.store.lookup(unknown) == 0
        for row in self.store.names():
            named = self.model[row.name]
            if not named.doubtful:
                assert self.store.lookup(named.tokens) == len(named.tokens)

    # ---- what happens to stores -------------------------------------------------------------

    def close(self) -> None:
        self.store.close()
        self.reopen(self.device.image("all"))

    def kill(self) -> None:
        """The process dies and the power goes: what was acknowledged is there."""
        kept = ("none", "some", "all")[int(self.random.integers(3))]
        image = self.device.image(kept, seed=self.operations, torn_bytes=512)  # type: ignore[arg-type]
        self.store._files.close()
        self.reopen(image)

    def rot(self) -> None:
        """One bit of a Segment flips on the medium."""
        if self.random.random() < 0.7:
            return
        entries = list(self.store._files.inventory.entries.values())
        if not entries:
            return
        entry = entries[int(self.random.integers(len(entries)))]
        extent = entry.extents[int(self.random.integers(2))]
        self.device.rot(extent.offset, extent.length, 1)
        for named in self.model.values():
            named.doubtful = True

    def refuse_writes(self) -> None:
        """Some blocks cannot be written for the length of one save."""
        at = int(self.random.integers(MIB, 3 * MIB - GRID_BYTES)) // GRID_BYTES * GRID_BYTES
        bad = BadRange(at, 16 * GRID_BYTES, 5)
        self.device.set_faults(Faults(volatile_cache=True, shuffled=True, bad_ranges=(bad,)))
        try:
            self.put()
            self.append()
        finally:
            self.device.set_faults(CACHE)

    def fail_flush(self) -> None:
        """One flush fails, and with it what was in the drive's cache is gone."""
        number = self.device.counts.flushes + 1
        self.device.set_faults(
            Faults(volatile_cache=True, shuffled=True, failing_flushes=(number,))
        )
        try:
            self.put()
        finally:
            self.device.set_faults(CACHE)


def walk(path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, operations: int) -> LongWalk:
    """Run one walk in a new store at `path`."""
    shutil.rmtree(path, ignore_errors=True)
    walked = LongWalk(path, np.random.default_rng([20, seed]))
    monkeypatch.setattr(opening, "open_device", walked.open_device)
    monkeypatch.setattr(opening, "create_region_file", lambda path, nbytes: Path(path).touch())
    walked.run(operations)
    return walked
