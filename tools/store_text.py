"""What `kvtier ls` and `kvtier verify` print for people."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvtier.io.superblock import ONE_COPY
from kvtier.tiering.region_state import PRESENT, region_advice
from kvtier.tools.text_table import counted, human_bytes, table

if TYPE_CHECKING:
    from kvtier.tiering.findings import Report
    from kvtier.tiering.listing import NameEntry, StoreDescription

FINDINGS_SHOWN_MAX = 200
WHAT_TO_DO = "kvtier scrub puts out of use what is damaged, then kvtier rm --damaged removes it"


def listing_text(
    store: "StoreDescription",
    line_width: int | None = None,
    emphasis: Callable[[str], str] = str,
) -> str:
    """Names, fingerprints and segments as tables, under lines about the region.

    line_width: of the terminal. emphasis: makes a line stand out, where the region is not whole.
    """
    lines = [
        f"store {store.uuid}, catalog version {store.catalog_version}",
        *_regions(store, emphasis),
        "",
    ]
    blobs = store.blobs
    if blobs.slabs:
        lines += [
            f"{counted(blobs.count, 'blob')} of {human_bytes(blobs.bytes)} in "
            f"{counted(blobs.slabs, 'slab')} of {human_bytes(blobs.slab_bytes)}"
            f"{_out_of_use(blobs.quarantined_slabs)}",
            "",
        ]
    elif not store.segments:
        return "\n".join([*lines, "nothing is stored"])
    if store.names:
        rows = [(n.name, n.tokens, _state(n), n.created, n.fingerprint[:12]) for n in store.names]
        lines += [table(("name", "tokens", "", "saved", "fingerprint"), rows, line_width), ""]
    prints = [(f.hex[:12], f.segments, f.tokens) for f in store.fingerprints]
    lines += [table(("fingerprint", "segments", "tokens"), prints, line_width), ""]
    several = len(store.regions) > 1
    segments = [
        (
            s.id,
            s.fingerprint[:12],
            s.provenance,
            s.start,
            s.tokens,
            human_bytes(s.bytes),
            ",".join(s.tiers),
            *([",".join(map(str, s.drives))] if several else []),
            "quarantined" if s.quarantined else "" if s.tiers else "missing",
        )
        for s in store.segments
    ]
    heads = ["segment", "fingerprint", "provenance", "start", "tokens", "bytes", "tiers"]
    heads += ["region", ""] if several else [""]
    return "\n".join([*lines, table(heads, segments, line_width)] if segments else lines)


def _regions(store: "StoreDescription", emphasis: Callable[[str], str]) -> Iterator[str]:
    count = len(store.regions)
    used = (
        f"{human_bytes(store.used_bytes)} used, {human_bytes(store.free_bytes)} free of "
        f"{human_bytes(store.region_bytes)}"
    )
    if count > 1:
        yield f"{count} regions: {used}"
    for number, region in enumerate(store.regions):
        if count == 1:
            yield f"region {region.path}: {used}"
        else:
            held = f"{human_bytes(region.used_bytes)} used of {human_bytes(region.bytes)}"
            yield f"region {number} {region.path}: {held}"
        if region.state != PRESENT:
            advice = region_advice(region.state, region.bytes, count)
            yield emphasis(f"{region.path}: {advice}")


def _out_of_use(slabs: int) -> str:
    return f" ({counted(slabs, 'slab')} quarantined)" if slabs else ""


def _state(name: "NameEntry") -> str:
    """Whether it is damaged, and how long it is held."""
    words = ["damaged"] if name.damaged else ["a drive of it is missing"] if name.missing else []
    if name.held:
        words.append("held" if name.held_until is None else f"held until {name.held_until}")
    return ", ".join(words)


def report_text(report: "Report") -> str:
    """What was checked and every finding, up to a bound."""
    lines = [
        f"checked {counted(report.segments_checked, 'segment')}, "
        f"{counted(report.extents_checked, 'extent')}, {counted(report.pages_checked, 'page')}, "
        f"{counted(report.blobs_checked, 'blob')}; "
        f"read {human_bytes(report.bytes_read)}"
    ]
    lines += [f"{f.kind}: {f.where}: {f.what}" for f in report.findings[:FINDINGS_SHOWN_MAX]]
    if report.segments_missing:
        lines.append(
            f"{counted(report.segments_missing, 'segment')} could not be checked: the drive is "
            "missing"
        )
    hidden = len(report.findings) - FINDINGS_SHOWN_MAX
    if hidden > 0:
        lines.append(f"and {hidden} more (--json lists all)")
    lines.append("nothing found" if report.ok else counted(len(report.findings), "finding"))
    return "\n".join(lines)


def verify_text(report: "Report") -> str:
    """What was checked, every finding, and what to do about them."""
    text = report_text(report)
    unfit = _unfit(report)
    if unfit:
        return (
            f"{text}\nattach the right drive in place of {', '.join(unfit)}, or restore it as it "
            "was, then run kvtier verify again: what else was found may come from this alone"
        )
    # Of a region that is missing the findings say themselves what to do.
    if all(finding.kind == "region" for finding in report.findings):
        return text
    return f"{text}\n{WHAT_TO_DO}"


def _unfit(report: "Report") -> list[str]:
    """Paths of regions that are another store's, cut, or no regions at all: of what lies on them
    nothing can be known, and kvtier scrub could not even open the store."""
    paths = [
        each.where
        for each in report.findings
        if each.kind == "superblock" and not each.what.startswith(ONE_COPY)
    ]
    return list(dict.fromkeys(paths))
