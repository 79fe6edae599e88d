"""What `kvtier ls` and `kvtier verify` print for people."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtier.tiering.region_state import PRESENT, region_advice
from kvtier.tools.text_table import human_bytes, table

if TYPE_CHECKING:
    from kvtier.tiering.listing import StoreDescription
    from kvtier.tiering.verifier import Report

FINDINGS_SHOWN_MAX = 200


def listing_text(
    store: "StoreDescription",
    line_width: int | None = None,
    emphasis: Callable[[str], str] = str,
) -> str:
    """Names, fingerprints and segments as tables, under lines about the region.

    line_width: of the terminal. emphasis: makes a line stand out, where the region is not whole.
    """
    lines = [
        f"store {store.uuid}, format version {store.format_version}",
        f"region {store.region_path}: {human_bytes(store.used_bytes)} used, "
        f"{human_bytes(store.free_bytes)} free of {human_bytes(store.region_bytes)}",
    ]
    if store.region_state != PRESENT:
        lines.append(emphasis(region_advice(store.region_state, store.region_bytes)))
    lines.append("")
    if not store.segments:
        return "\n".join([*lines, "nothing is stored"])
    if store.names:
        rows = [
            (n.name, n.tokens, "held" if n.held else "", n.created, n.fingerprint[:12])
            for n in store.names
        ]
        lines += [table(("name", "tokens", "", "saved", "fingerprint"), rows, line_width), ""]
    prints = [(f.hex[:12], f.segments, f.tokens) for f in store.fingerprints]
    lines += [table(("fingerprint", "segments", "tokens"), prints, line_width), ""]
    segments = [
        (
            s.id,
            s.fingerprint[:12],
            s.provenance,
            s.start,
            s.tokens,
            human_bytes(s.bytes),
            ",".join(s.tiers),
            "quarantined" if s.quarantined else "",
        )
        for s in store.segments
    ]
    heads = ("segment", "fingerprint", "provenance", "start", "tokens", "bytes", "tiers", "")
    return "\n".join([*lines, table(heads, segments, line_width)])


def report_text(report: "Report") -> str:
    """What was checked and every finding, up to a bound."""
    lines = [
        f"checked {report.segments_checked} segments, {report.extents_checked} extents, "
        f"{report.pages_checked} pages; read {human_bytes(report.bytes_read)}"
    ]
    lines += [f"{f.kind}: {f.where}: {f.what}" for f in report.findings[:FINDINGS_SHOWN_MAX]]
    hidden = len(report.findings) - FINDINGS_SHOWN_MAX
    if hidden > 0:
        lines.append(f"and {hidden} more (--json lists all)")
    count = len(report.findings)
    lines.append("nothing found" if report.ok else f"{count} finding{'s' if count > 1 else ''}")
    return "\n".join(lines)
