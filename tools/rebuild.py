"""The command `kvtier rebuild`: a lost catalog is made anew from the region."""

from collections.abc import Sequence
from pathlib import Path

from kvtier.tiering.rebuilder import RebuildReport
from kvtier.tiering.rebuilder import rebuild as make_anew
from kvtier.tools.stages import stages
from kvtier.tools.text_table import counted, human_bytes


def rebuild(directory: Path, regions: Sequence[str], *, force: bool) -> RebuildReport:
    """Rebuild with progress on stderr. Raises as `rebuilder.rebuild`."""
    with stages(f"rebuilding the catalog of {directory}") as shown:

        def progress(done: int, total: int) -> None:
            shown.say(f"reading the region: {100 * done // max(total, 1)} %")

        return make_anew(directory, regions=regions, force=force, progress=progress)


def rebuild_text(report: RebuildReport) -> str:
    """What came back, what did not and why, what it took."""
    lines = [
        f"read {human_bytes(report.bytes_read)} of {report.region_path} in {report.seconds:.1f} s "
        f"({report.seconds_per_gib:.2f} s per GiB)",
        f"restored {report.segments_restored} of {counted(report.segments_found, 'segment')}, "
        f"{counted(report.names_restored, 'name')}, "
        f"{counted(report.fingerprints_restored, 'fingerprint')}",
    ]
    if report.blobs_restored:
        lines.append(f"restored {counted(report.blobs_restored, 'blob')}")
    for what, reasons in (
        ("segments left out", report.segments_dropped),
        ("names left out", report.names_dropped),
        ("slabs of blobs left out", report.slabs_dropped),
        ("blocks that begin like an extent or record and are none", report.unusable),
    ):
        lines += [f"{what}: {count}: {why}" for why, count in sorted(reasons.items())]
    if report.bytes_unreadable:
        lines.append(f"{human_bytes(report.bytes_unreadable)} could not be read")
    if report.descriptions_lost:
        lines.append(
            f"{report.descriptions_lost} fingerprints lost their description; the model that they "
            "belong to finds its KV all the same"
        )
    if report.headers_left:
        lines.append(
            f"{report.headers_left} headers of what was left out could not be erased; the next "
            "open tries again"
        )
    if report.names_restored:
        lines.append("holds are not on the region: hold names again (kvtier keeps none now)")
    if report.kept_catalog is not None:
        lines.append(
            f"the old catalog is kept as {report.kept_catalog}: it holds tokens in the clear, "
            "delete it when it is not needed"
        )
    return "\n".join(lines)
