"""Walks over a recording, builds the images of a crash at every position, and has them checked.

`python crash_explorer.py IMAGES_PER_POSITION [SEED [SCENARIO...]]` explores and prints what it
finds, with the processor time that an image takes.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, os.fspath(Path(__file__).parent.parent))

import torch

from tests.crash_checker import Checker, checking
from tests.crash_images import Image, Media, images_at
from tests.crash_log import Event
from tests.crash_scenarios import SCENARIOS, record
from tests.crash_workload import Recording, Snapshot

IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where scratch directories lie: a drive's own syncs would take most of the time."""
AGAIN_PER_POSITION = 2
"""Images per position of a recovery that is cut itself."""


@dataclass(slots=True)
class Verdict:
    """images: built and checked. violations: in words, with their place."""

    images: int = 0
    violations: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """How thoroughly to explore. again: also record recoveries, and cut them at all their
    positions, as long as these images are no more than half of the others."""

    per_position: int
    again: bool = True
    violations_max: int = 5
    seed: int = 0


class Explorer:
    """One recording, explored."""

    def __init__(self, recording: Recording, checker: Checker, plan: Plan) -> None:
        self.recording = recording
        self.checker = checker
        self.plan = plan
        self.verdict = Verdict()
        self._random = Random(plan.seed)
        self._again_images = 0
        self._seen: set[tuple[int, int, int]] = set()

    def run(self) -> Verdict:
        """Check the images after each event, each image once per expectation.

        The step that makes the store is passed over, except in the scenario that is about it.
        """
        recording, media = self.recording, Media(self.recording.start)
        first = 0 if len(recording.steps) <= 2 else 1
        places = zip(recording.events, recording.expectations(), strict=True)
        for position, (event, (step, before, after)) in enumerate(places):
            media.apply(event)
            if step < first:
                continue
            where = f"position {position}, step {recording.steps[step]!r}"
            for image in images_at(media, self._random, self.plan.per_position):
                if not self._check(image, before, after, where):
                    continue
                # Drawn, so that recoveries from late positions have their turn as well.
                is_due = self._random.random() < 0.1
                is_due &= 3 * self._again_images < self.verdict.images
                if self.plan.again and is_due and not self.verdict.violations:
                    self._check_recovery(image, before, after, where)
                if len(self.verdict.violations) >= self.plan.violations_max:
                    return self.verdict
        return self.verdict

    def _check(self, image: Image, before: Snapshot, after: Snapshot, where: str) -> bool:
        """Check one image, unless it was checked under these expectations. Returns whether."""
        key = (image.digest, id(before), id(after))
        if key in self._seen:
            return False
        self._seen.add(key)
        self.verdict.images += 1
        found = self.checker.violations(image, before, after)
        self.verdict.violations += [f"{where}: {each}" for each in found]
        return True

    def _check_recovery(self, image: Image, before: Snapshot, after: Snapshot, where: str) -> None:
        """Check what a second crash could leave, during the recovery from the first."""
        images = self.verdict.images
        events: list[Event] = self.checker.recovery_of(image)
        media = Media(image)
        for position, event in enumerate(events):
            media.apply(event)
            for again in images_at(media, self._random, AGAIN_PER_POSITION):
                self._check(again, before, after, f"{where}, position {position} of its recovery")
                if self.verdict.violations:
                    return
        self._again_images += self.verdict.images - images


def explore(scenario: str, seed: int, plan: Plan, removed: str | None = None) -> Verdict:
    """Record a scenario and explore it. removed: a sync that is left out."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as place:
        # Images are laid where the store was made, because a store may name its region by an
        # absolute path.
        recording = record(Path(place), scenario, seed, removed)
        with checking(Path(place), recording) as checker:
            return Explorer(recording, checker, plan).run()


def main(words: list[str]) -> None:
    per_position, seed = int(words[0]), int(words[1]) if words[1:] else 0
    for scenario in words[2:] or SCENARIOS:
        began = time.process_time()
        verdict = explore(scenario, seed, Plan(per_position))
        took_ms = 1000 * (time.process_time() - began) / max(1, verdict.images)
        print(f"{scenario}: {verdict.images} images, {took_ms:.1f} ms each", flush=True)
        print(*verdict.violations, sep="\n", end="\n" if verdict.violations else "")


if __name__ == "__main__":
    main(sys.argv[1:])
