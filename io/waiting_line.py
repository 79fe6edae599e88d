"""Requests that wait for their turn: by priority, first come first served within one."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvtier.io.device import Priority

Item = TypeVar("Item")


class WaitingLine(Generic[Item]):
    """Its owner holds a lock."""

    def __init__(self) -> None:
        self._lines: tuple[deque[Item], ...] = tuple(deque() for _ in Priority)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, item: Item, priority: Priority) -> None:
        """Stand behind everything of the same priority."""
        self._lines[priority].append(item)
        self._count += 1

    def add_first(self, item: Item, priority: Priority) -> None:
        """Stand before everything of the same priority: what was begun goes on."""
        self._lines[priority].appendleft(item)
        self._count += 1

    def first(self) -> Item | None:
        """What comes next, if there is anything; it stays."""
        if self._count:
            for line in self._lines:
                if line:
                    return line[0]
        return None

    def take(self) -> Item:
        """What comes next. There must be something."""
        self._count -= 1
        return next(line for line in self._lines if line).popleft()

    def remove(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Everything that is unwanted leaves; returns it."""
        gone: list[Item] = []
        for line in self._lines:
            gone += [item for item in line if unwanted(item)]
            kept = [item for item in line if not unwanted(item)]
            line.clear()
            line.extend(kept)
        self._count -= len(gone)
        return gone

    def clear(self) -> None:
        """Everything leaves."""
        for line in self._lines:
            line.clear()
        self._count = 0
