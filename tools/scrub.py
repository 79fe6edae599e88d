"""The command `kvtier scrub`: walks a closed store, and quarantines what is damaged."""

from contextlib import nullcontext
from pathlib import Path

from kvtier.tiering import store_files
from kvtier.tiering.config import Config
from kvtier.tiering.findings import Finding
from kvtier.tiering.ledger import Change
from kvtier.tiering.opening import OpenFiles, open_files
from kvtier.tiering.scrubber import Custody, Scrubber, ScrubReport, parse_rate
from kvtier.tools.stages import Stages, stages
from kvtier.tools.store_text import report_text
from kvtier.tools.text_table import human_bytes

PROGRESS_S = 0.2


def scrub(directory: Path, rate: str) -> ScrubReport:
    """Walk the store at `rate` bytes per second, with progress on stderr.

    Raises ConfigError (no store, a bad rate), LockedError that names who has it open, FormatError,
    DeviceError.
    """
    parse_rate(rate)
    # Before anything is opened: opening makes a store where there is none.
    store_files.read_settings(directory)
    files = open_files(directory, Config())
    try:
        return _walk(files, rate)
    finally:
        files.close()


def _walk(files: OpenFiles, rate: str) -> ScrubReport:
    def quarantine(segment_id: int) -> None:
        files.ledger.apply(Change(quarantined=[segment_id]))

    scrubber = Scrubber(files, Custody(nullcontext(), quarantine, _keep), rate=rate)
    with stages(f"scrubbing {files.region.path} at {rate} per second") as shown:
        scrubber.start()
        try:
            while not scrubber.wait(PROGRESS_S):
                _say(shown, scrubber.report())
        finally:
            scrubber.stop()
    found = scrubber.result()
    # Opening repaired them, so that the walk found them whole.
    for note in files.region.notes:
        found.add("superblock", files.region.path, note)
    return found


def _keep(finding: Finding) -> None:
    """Findings are shown at the end, with the report."""


def _say(shown: Stages, found: ScrubReport) -> None:
    share = 100 * found.bytes_read // max(found.bytes_total, 1)
    shown.say(f"reading: {min(share, 100)} %")


def scrub_text(found: ScrubReport) -> str:
    """What was read, what was found, and which Segments were taken out of use."""
    lines = [report_text(found)]
    if found.quarantined:
        ids = ", ".join(map(str, found.quarantined))
        lines.append(f"quarantined now: segment{'s' * (len(found.quarantined) > 1)} {ids}")
    if found.slabs_quarantined:
        ids = ", ".join(map(str, found.slabs_quarantined))
        lines.append(f"quarantined now: slab{'s' * (len(found.slabs_quarantined) > 1)} {ids}")
    if not found.finished:
        lines.append(
            f"stopped after {human_bytes(found.bytes_read)} of {human_bytes(found.bytes_total)}"
        )
    return "\n".join(lines)
