"""Holds: a user's wish to keep a name's Segments on the drive, under a cap and for a time.

Invariants:
- What holds keep never exceeds the cap when a hold is set; shared Segments count once.
- A hold whose time is over keeps nothing, whether somebody noticed or not.
"""

import time

from kvtier.errors import CapacityError, ConfigError
from kvtier.tiering.catalog_rows import SECONDS_MAX
from kvtier.tiering.inventory import Inventory, NameKey
from kvtier.tiering.ledger import Ledger

FOREVER = SECONDS_MAX


def hold_end(seconds: float | None) -> float:
    """When a hold that begins now ends, in unix seconds. None: it does not. Raises ConfigError."""
    if seconds is None:
        return FOREVER
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ConfigError(f"a hold lasts for a number of seconds, or None: got {seconds!r}")
    if not 0 < seconds <= FOREVER:
        raise ConfigError(f"a hold lasts for more than 0 and at most {FOREVER:g} seconds")
    return min(max(time.time(), 0.0) + float(seconds), FOREVER)


class Holds:
    """Callers hold the store's lock."""

    def __init__(self, ledger: Ledger, limit_bytes: int) -> None:
        self.ledger = ledger
        self.limit_bytes = limit_bytes

    @property
    def inventory(self) -> Inventory:
        return self.ledger.inventory

    @property
    def held_bytes(self) -> int:
        """Bytes of Extents that holds keep now."""
        return self.inventory.held_bytes(time.time())

    def require_room(self, key: NameKey, segment_bytes: dict[int, int], new_bytes: int = 0) -> None:
        """Raise CapacityError if a name's hold of these Segments (bytes by id), and of new_bytes
        that have no id yet, goes past the cap. What the name holds now is given up for them."""
        now = time.time()
        others = self.inventory.held_segments(now, but=key)
        more = sum(size for each, size in segment_bytes.items() if each not in others) + new_bytes
        kept = sum(others.values())
        # A cap that was lowered since must not keep anybody from holding less than now.
        allowed = max(self.limit_bytes, self.inventory.held_bytes(now))
        if kept + more > allowed:
            raise CapacityError(
                "what holds may keep (hold_limit)", more, max(0, allowed - kept), self.limit_bytes
            )

    def hold(self, key: NameKey, seconds: float | None) -> None:
        """Keep what a name stands for. Raises ConfigError (no such name), CapacityError."""
        until = hold_end(seconds)
        row = self.inventory.names.get(key)
        if row is None:
            raise ConfigError(f"there is no name {key[1]!r} to hold")
        chain = self.inventory.chain(row.segment_id)
        self.require_room(key, {entry.id: entry.nbytes for entry in chain})
        self.ledger.set_hold(key, until)

    def unhold(self, key: NameKey) -> None:
        """End a hold; no error where there is none. Raises ConfigError (no such name)."""
        row = self.inventory.names.get(key)
        if row is None:
            raise ConfigError(f"there is no name {key[1]!r} to let go")
        if row.held_until:
            self.ledger.set_hold(key, 0.0)

    def unhold_all(self, fingerprint_id: int | None = None) -> list[str]:
        """End every hold, of one model or of all; returns the names."""
        keys = [
            key
            for key, row in sorted(self.inventory.names.items())
            if row.held_until and fingerprint_id in (None, key[0])
        ]
        for key in keys:
            self.ledger.set_hold(key, 0.0)
        return [name for _, name in keys]
