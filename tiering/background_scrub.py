"""A scrub beside an open store: damaged Segments leave its index and are marked in its catalog."""

import logging

from kvtier.tiering.extent_io import Counters
from kvtier.tiering.findings import Finding
from kvtier.tiering.ledger import Change
from kvtier.tiering.opening import OpenFiles
from kvtier.tiering.process_lock import ProcessLock
from kvtier.tiering.registry import Registry
from kvtier.tiering.scrubber import RATE_DEFAULT, Custody, Scrubber

_log = logging.getLogger("kvtier")


def background_scrub(
    lock: ProcessLock,
    files: OpenFiles,
    registry: Registry,
    counters: Counters,
    rate: int | str = RATE_DEFAULT,
) -> Scrubber:
    """A Scrubber of an open store, not started yet. rate: bytes per second. Raises ConfigError."""

    def quarantine(segment_id: int) -> None:
        counters.damaged_extents += 1
        segment = registry.committed.get(segment_id)
        if segment is None:
            # It belongs to another model.
            files.ledger.apply(Change(quarantined=[segment_id]))
        else:
            segment.quarantined = segment.damaged = True
            registry.quarantine([segment])

    return Scrubber(files, Custody(lock, quarantine, _log_finding), rate=rate)


def _log_finding(finding: Finding) -> None:
    _log.error("scrub: %s: %s", finding.where, finding.what)
